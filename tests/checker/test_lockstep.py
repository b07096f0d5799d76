"""Hostile cases in lockstep and one program after another: the same outputs, notes, reads and coverage."""

import dataclasses
from collections import Counter

import pytest
import torch
from helpers.cases import same_bits
from helpers.examples import examples
from helpers.sources import needs_triton, of_release
from helpers.triton_example import CASE, EXAMPLE, planted

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels.backend import RunOutput
from attnlab.kernels.triton.coverage import Points, measuring
from attnlab.kernels.triton.lockstep.launch import using_lockstep
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.lab import lab as labs
from attnlab.lab.lab import Lab

pytestmark = needs_triton
EVERY = ("sm_90", "gfx942")
# What healthy kernels of 0.33.0 have that lockstep refuses.
REASONS = {
    "several programs store the same element",
    "the operation make_tensor_descriptor",
    "the operation atomic_rmw",
    "an int32 overflow in a loop that begins differently in each program",
}


@dataclasses.dataclass
class Ran:
    """What runs of a Case left: tensors, the other fields of each log, coverage, and what was refused."""

    tensors: list[torch.Tensor]
    facts: list[object]
    points: dict[str, Points]
    alone: Counter[str]


def ran(lab: Lab, case: Case, monkeypatch: pytest.MonkeyPatch, *, on: bool, cover: bool) -> Ran:
    """Run a Case in lockstep, or one program after another."""
    found = Ran([], [], {}, Counter())
    run = labs.run_backend

    def recorded(backend, call, target, kernels, options) -> RunOutput:
        output = run(backend, call, target, kernels, options)
        log = output.log
        found.tensors += [call.buffer.clone()]
        found.tensors += [one for one in (log.lse, log.padded) if one is not None]
        notes = log.launches, [*log.wraps.items()], [*log.outside.items()], log.reads
        found.facts += notes
        found.alone.update(log.alone.values())
        return output

    with monkeypatch.context() as patch, using_lockstep(on):
        patch.setattr(labs, "run_backend", recorded)
        try:
            if cover:
                with measuring() as measured:
                    lab.run(case)
                found.points |= measured.points
            else:
                lab.run(case)
        except AttnLabError as error:
            found.facts.append((type(error), str(error)))
    return found


def check_same(lab: Lab, case: Case, monkeypatch: pytest.MonkeyPatch, *, cover: bool) -> Ran:
    """Check that both ways to run a Case leave the same; return what lockstep left."""
    if cover:  # what an op keeps from its first run, it does not compute again
        ran(lab, case, monkeypatch, on=True, cover=True)
    alone, together = (ran(lab, case, monkeypatch, on=on, cover=cover) for on in (False, True))
    assert len(alone.tensors) == len(together.tensors)
    pairs = zip(alone.tensors, together.tensors, strict=True)
    assert all(same_bits(one, other) for one, other in pairs)
    assert alone.facts == together.facts
    assert alone.points == together.points
    assert not alone.alone
    return together


@pytest.mark.parametrize("cover", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_example(monkeypatch, dtype, cover):
    """The kernel of the examples, with its reads."""
    case = CASE.replace(backend=f"{EXAMPLE}:my_attention", dtype=dtype, trace_reads=True)
    found = check_same(Lab(device="cpu"), case, monkeypatch, cover=cover)
    assert not found.alone
    assert found.facts[3]


def test_a_result_states_what_ran_alone(monkeypatch, tmp_path):
    """A kernel with an atomic operation: the same output, and the reason in the result."""
    store = "    tl.store(place, mixed / total, mask=d < DIM)"
    case, _ = planted(tmp_path, store, "    tl.atomic_add(out, 0.0, mask=row < 0)\n" + store)
    case = case.replace(dtype="float32")
    found = check_same(Lab(device="cpu"), case, monkeypatch, cover=False)
    assert set(found.alone) == {"the operation atomic_rmw"}
    result = Lab(device="cpu").run(case)
    assert result.status == "match"
    assert result.alone == ("row_kernel: the operation atomic_rmw",)
    assert result.to_dict(1)["alone"] == list(result.alone)
    assert "one program at a time" in result._repr_html_()


def cases_of(ops: tuple[str, ...], platform: str, count: int | None) -> tuple[Lab, list[Case]]:
    source = of_release("0.33.0")
    backend = VllmBackend(path=source.path, requested_device="cpu")
    lab = Lab(source=source.path, device="cpu")
    return lab, [case for op in ops for case in hostile_cases(backend, op, platform, count, seed=0)]


@pytest.mark.releases
@pytest.mark.parametrize("op", VllmBackend.ops)
def test_the_first_hostile_cases(monkeypatch, op):
    """Six of each op; nothing but the known is refused."""
    lab, cases = cases_of((op,), "sm_90", 6)
    refused = Counter[str]()
    for number, case in enumerate(cases):
        refused += check_same(lab, case, monkeypatch, cover=number % 3 == 1).alone
    assert set(refused) <= REASONS


@pytest.mark.releases
@pytest.mark.slow
@pytest.mark.parametrize("platform", ["sm_90", pytest.param("gfx942", marks=pytest.mark.long)])
@pytest.mark.parametrize("op", VllmBackend.ops)
def test_every_hostile_case(monkeypatch, op, platform):
    """At most a tenth is refused. CI runs each fourth one."""
    lab, cases = cases_of((op,), platform, None)
    cases = cases[:: len(cases) // examples(len(cases))]
    refused = Counter[str]()
    for case in cases:
        refused += check_same(lab, case, monkeypatch, cover=False).alone
    assert set(refused) <= REASONS
    assert refused.total() <= len(cases) / 10
