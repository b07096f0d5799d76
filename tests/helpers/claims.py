"""A candidate that explains an output, and a repair of a kernel, for tests of what is said about them."""

from attnlab.defects import DEFECTS
from attnlab.diagnosis.candidates import Candidate, Scope
from attnlab.diagnosis.trials import KernelText, Repair
from attnlab.kernels.triton.source_edits import Edit


def candidate(defect: str, **fields: object) -> Candidate:
    """Return a defect of the catalogue as an explanation of all rows, with changed fields."""
    numbers = {"predicted": 1.0, "observed": 1.0, "residual": 0.0, "ratio": 0.0, "seen_in": ()}
    texts = {"name": defect, "text": DEFECTS[defect].text, "verdict": "explains"}
    scope = Scope(rows="all", sequences=(0,))
    return Candidate(**{**numbers, **texts, "scope": scope, "defect": DEFECTS[defect], **fields})


REPAIR = Repair(
    kernel=KernelText(
        function=None, text="", file="k.py", first=0, executed=frozenset(), ran=frozenset()
    ),
    text="",
    edit=Edit(line=7, statement=7, start=0, end=1, before="a", after="b", cost=1),
    share=1.0,
)
