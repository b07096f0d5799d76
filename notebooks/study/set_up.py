"""What every notebook does first and last: build its Case, describe its figures, conclude."""

import importlib
import re
import sys
from collections.abc import Mapping
from html import unescape
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.platforms import STAGES
from attnlab.case.pytest_id import nearest_id
from attnlab.lab.result import Result
from attnlab.show.notebook import Verdicts, provenance
from attnlab.show.panels.boxes import case_texts, read_case
from study.claims.cases import with_tolerance
from study.claims.ledger import FAILS, HOLDS, UNDECIDED

# Then "small" texts have 12 pixels, in a picture that fits the page of JupyterLab next to its list of files.
TEXTS = {"font.size": 10.5}


def case_from(parameters: Mapping[str, Any], **changes: Any) -> Case:
    """Return the Case of a notebook's parameters cell.

    ``parameters`` are the notebook's globals: ``test_id``, if present, is a vLLM pytest id, and every
    name of a Case's field changes that field unless its value is None. ``changes`` come last. Without a
    test id the Case has the tolerance of the test, too.
    Figures get alternative texts from here on. Raises InvalidCase.
    """
    describe_figures()
    given = {
        name: parameters[name]
        for name in FIELDS
        if name in parameters and parameters[name] is not None
    }
    fields = {**given, **changes}
    test_id = parameters.get("test_id")
    return (
        Case.from_test_id(test_id, **fields) if test_id else Case.from_dict(with_tolerance(fields))
    )


def conclude(verdicts: Verdicts, case: Case, *results: Result | str) -> None:
    """Record the Case and the backends of the results for the page's footer, then conclude the verdicts.

    A result may be a text that names a backend. Raises VerdictFailed if a verdict differs.
    """
    backends = [
        one if isinstance(one, str) else f"{one.backend}: {', '.join(one.decision.kernels)}"
        for one in results
    ]
    provenance(case=case.changes(), backends=list(dict.fromkeys(backends)))
    verdicts.conclude()


def describe_figures() -> None:
    """Give each figure that the notebook shows an alternative text, and its texts a size to read.

    The text consists of the titles of the figure's axes. Does nothing outside IPython.
    """
    if "IPython" not in sys.modules:
        return
    shell = importlib.import_module("IPython.core.getipython").get_ipython()
    if shell is None:
        return
    importlib.import_module("matplotlib").rcParams.update(TEXTS)
    # The inline backend sets its formatter at the first figure, and shows figures in a callback that it
    # registers then: this callback runs before that one.
    shell.events.register("post_execute", lambda: _describe(shell))


def _describe(shell: Any) -> None:
    """Add an alternative text to the output of the inline backend's formatter, once."""
    formatter = shell.display_formatter.formatters["image/png"]
    figure = importlib.import_module("matplotlib.figure").Figure
    draw = formatter.type_printers.get(figure)
    if draw is None or getattr(draw, "has_alt", False):
        return

    def drawn(shown: Any) -> Any:
        data = draw(shown)
        return data if data is None else (data, {"alt": alt_text(shown)})

    drawn.has_alt = True  # type: ignore[attr-defined]
    formatter.for_type(figure, drawn)


def alt_text(figure: Any) -> str:
    """Return the titles of a matplotlib figure and its axes as one line."""
    suptitle = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    titles = [suptitle, *(axes.get_title() for axes in figure.axes)]
    return "; ".join(" ".join(title.split()) for title in titles if title.strip())


def plain_text(html: str) -> str:
    """Return a piece of HTML without its tags."""
    return unescape(re.sub(r"<[^>]*>", "", html))


def round_trips(case: Case) -> tuple[dict[str, str], list[bool]]:
    """Return the texts of a Case by their form, and for each whether it gives the Case again."""
    texts = case_texts(case)
    same = [read_case(texts[name]) == case for name in ("JSON", "command line")]
    test_id, changes = nearest_id(case)
    return texts, [*same, Case.from_test_id(test_id, **changes) == case]


def stage_stories() -> dict[str, str]:
    """Return what each stage of the test changed, in its order."""
    return {name: stage.story for name, stage in STAGES.items()}


def by_verdict(verdicts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the claims' numbers by their verdict: holds, fails, cannot be decided."""
    return {
        verdict: [number for number, found in verdicts.items() if found == verdict]
        for verdict in (HOLDS, FAILS, UNDECIDED)
    }
