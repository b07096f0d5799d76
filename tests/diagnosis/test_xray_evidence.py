"""Names that an X-ray of the kernel contradicts are withdrawn; without a name, its rule is stated."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fault_injection import correct_run, plant
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.defects import DEFECTS
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.refinement import with_xray
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.model import ModelBackend
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from attnlab.weights.conclude import xray

CASE = hostile(
    query_lens=(1, 5, 1), ctx_lens=(20, 18, 40), platform="sm_90", empty_slots="garbage",
    num_heads=4, head_size=32,
)  # fmt: skip
Change = Callable[[KernelCall], dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class WrongBackend(ModelBackend):
    """The models, run with wrong arguments."""

    change: Change = lambda call: {}
    models_prefill = False

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        """Run the models with the changed call, into the same output."""
        return super().run(dataclasses.replace(call, **self.change(call)), target, kernels, options)


@dataclass(slots=True)
class WrongLab(Lab):
    """A lab with a wrong backend."""

    change: Change = lambda call: {}

    def backend(self, case: Case) -> Backend:
        return WrongBackend(change=self.change)


def scaled(factor: float) -> Change:
    return lambda call: {"sm_scale": factor * (call.sm_scale or call.query.shape[2] ** -0.5)}


def planted(name: str) -> Diagnosis:
    """Return the diagnosis of a planted defect, from the output alone."""
    lab = Lab()
    problem, output = correct_run(lab, CASE)
    wrong = plant(problem, output, DEFECTS[name], "all")
    return diagnose(CASE, wrong, lab=lab, propose=False)


def names(diagnosis: Diagnosis) -> list[str]:
    return [candidate.name for candidate in diagnosis.explanations]


def test_a_name_that_the_weights_contradict_is_withdrawn():
    diagnosis = planted("scale_doubled")
    assert names(diagnosis) == ["scale_doubled"]
    for change in (lambda call: {}, scaled(0.5)):
        again = with_xray(diagnosis, xray(CASE, backend=WrongBackend(change=change), confirm=False))
        assert names(again) == []
        assert len(again.withdrawn) == 1


def test_a_name_that_the_weights_confirm_is_kept():
    found = xray(CASE, backend=WrongBackend(change=scaled(2.0)), confirm=False)
    assert names(with_xray(planted("scale_doubled"), found)) == ["scale_doubled"]


def test_a_scale_without_a_name_is_described_by_the_xray():
    diagnosis = diagnose(CASE, lab=WrongLab(change=scaled(1.3)), propose=False)
    assert (diagnosis.status, diagnosis.cause) == ("described", None)
    assert diagnosis.xray is not None
    assert diagnosis.xray.status == "described"
    assert diagnosis.to_dict()["xray"]["descriptions"]
    assert diagnosis.sentences()[0] == diagnosis.weights.text
    text = diagnosis.weights.description.text
    assert [text in sentence for sentence in diagnosis.sentences()].count(True) == 1


def test_a_kernel_with_a_known_fault_keeps_its_name():
    diagnosis = diagnose(CASE, lab=WrongLab(change=scaled(2.0)), propose=False)
    assert names(diagnosis) == ["scale_doubled"]
    assert diagnosis.xray is not None
