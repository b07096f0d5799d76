"""Which defects of the catalogue a test's comparison would not notice, on the test's data and tolerance.

A defect is noticed if it moves an element of the correct output by more than atol + rtol × |element|. Rows
and heads are sampled, as for ``attnlab power``.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.output_file import write_text
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.defects.problem import Problem
from attnlab.diagnosis.captured import check_diagnosable, where_it_ran
from attnlab.mutation.mutants import MUTANTS
from attnlab.mutation.score import sample_correct, score
from attnlab.recorder.comparisons import Comparison
from attnlab.recorder.matches import factor_of, output_matches
from attnlab.recorder.recorded import Recorded
from attnlab.tensors.call import KernelCall

_SHOWN = 3  # survivors in a row of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPower:
    """The power of one comparison: the names of the defects that it notices (``killed``) or not.

    ``with_itself``: the expected value is the output of another call of the same op, so a defect that both
    calls have is not noticed, whatever the names say.
    """

    __test__ = False  # not a class of tests

    node_id: str
    op: str
    atol: float
    rtol: float
    killed: tuple[str, ...]
    survived: tuple[str, ...]
    with_itself: bool = False

    @classmethod
    def of_json(cls, text: str) -> "TestPower":
        """Return what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        for name in ("killed", "survived"):
            values[name] = tuple(values[name])
        return cls(**values)

    def to_json(self) -> str:
        """Return the power as one line of JSON."""
        return json.dumps(asdict(self))


def powers_of(
    node_id: str, recorded: Sequence[Recorded], comparisons: Iterable[Comparison]
) -> list[TestPower]:
    """Return the power of each passed comparison of a call's output; of a repeated one only the last."""
    found: dict[tuple[str, float, float], TestPower] = {}
    for comparison in comparisons:
        if not comparison.passed:
            continue
        for one, shaped in ((r, s) for r in reversed(recorded) for s in r.shaped(comparison)):
            try:
                call = one.call
                if not output_matches(call, shaped.actual):
                    continue
                power = _power(node_id, call, shaped)
            except AttnLabError:
                continue
            others = [other for other in recorded if other is not one]
            same = any(_made(other, power.op, shaped.expected) for other in others)
            found[power.op, power.atol, power.rtol] = replace(power, with_itself=same)
            break
    return list(found.values())


def _made(one: Recorded, op: str, tensor: torch.Tensor) -> bool:
    """Answer whether a tensor is the output of a call of an op."""
    try:
        return one.origin.op == op and output_matches(one.call, tensor)
    except AttnLabError:
        return False


def _power(node_id: str, call: KernelCall, comparison: Comparison) -> TestPower:
    check_diagnosable(call)
    call = call.cpu()
    ran = where_it_ran(call, Case())
    problem = Problem.of_call(call, Target.of(ran.case), kernels_of(ran.case, call))
    sample = sample_correct(problem)
    factor = factor_of(call, comparison.actual) or 1.0
    tolerances = Case().replace(atol=comparison.atol * factor, rtol=comparison.rtol)
    outcomes = {
        mutant.name: score(problem, sample, mutant, tolerances).is_killed
        for mutant in MUTANTS
        if mutant.applies(problem)
    }
    return TestPower(
        node_id=node_id,
        op=call.origin.op or call.op,
        atol=comparison.atol,
        rtol=comparison.rtol,
        killed=tuple(name for name, killed in outcomes.items() if killed),
        survived=tuple(name for name, killed in outcomes.items() if not killed),
    )


def table(powers: Sequence[TestPower]) -> list[str]:
    """Return the lines of the table: per test, how many defects it notices, and some that it does not."""
    if not powers:
        return ["no passing test compared the output of a recorded call"]
    lines = [f"{'notices':>9}  test; defects that it would not notice"]
    for one in sorted(powers, key=lambda one: (len(one.killed), one.node_id)):
        total = len(one.killed) + len(one.survived)
        lines.append(f"{len(one.killed):>4} of {total:<3} {one.node_id}")
        if one.with_itself:
            lines.append(
                f"{'':12}compares the op with itself: a defect of both calls is not noticed"
            )
        if one.survived:
            more = len(one.survived) - _SHOWN
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"{'':12}{', '.join(one.survived[:_SHOWN])}{rest}")
    return lines


def write_powers(path: Path, powers: Sequence[TestPower]) -> None:
    """Write the powers as a JSON list. Raises InvalidCase if the file cannot be written."""
    write_text(path, json.dumps([asdict(one) for one in powers], indent=1) + "\n")
