"""Distinction: a Case in which two defects give different outputs although they agree in another Case."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, KernelRejected
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.case.shown import Document, Shown, json_number
from attnlab.contracts.dispatch import decide
from attnlab.defects.edit import Defect
from attnlab.diagnosis.reruns import SECOND_SCALES
from attnlab.kernels.control import Instability, controlled, rows_agree
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, make_problem, sample_rows

_LARGE_QUERY = 1 << 20  # elements; a Case with a larger query is shortened first
_SHORT: dict[str, Any] = {
    "query_lens": (1, 17, 40),
    "ctx_lens": (300, 260, 33),
    **dict.fromkeys(DATA_OF_LENGTHS),
}
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"distribution": "normal"},
    {"empty_slots": "garbage"},
    {"distribution": "normal", "empty_slots": "garbage"},
    {"distribution": "normal", "empty_slots": "nan"},
    {"distribution": "normal", "sm_scale": 0.3},
    {"distribution": "normal", **SECOND_SCALES},
    {"distribution": "normal", **SECOND_SCALES, "empty_slots": "garbage"},
    {"distribution": "normal", **_SHORT},
    {"distribution": "normal", "empty_slots": "garbage", **_SHORT},
    {"distribution": "normal", "num_queries_per_kv": 2},
    {"distribution": "normal", "num_queries_per_kv": 3, "num_heads": 12},
    {"distribution": "normal", "dtype": "float32"},
)
_SOFTCAP_CHANGES: tuple[dict[str, Any], ...] = (  # scores far above the cap
    {"distribution": "normal", "softcap": 0.5},
    {"distribution": "normal", "softcap": 0.004},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinction:
    """The result of the search for a Case that distinguishes two defects.

    - ``pair``: the names of the defects.
    - ``case``: the Case, or None if none of the changes that were tried distinguishes them.
    - ``changes``: its fields that differ from the Case that was diagnosed.
    - ``gap``: the largest difference of the two outputs, in units of the rounding bounds.
    - ``tried``: how many Cases were tried.
    - ``flags``: the flags of a command that choose the kernels, such as --source.
    """

    pair: tuple[str, str]
    case: Case | None
    changes: dict[str, Any]
    gap: float
    tried: int
    flags: tuple[str, ...] = ()

    @property
    def command(self) -> str | None:
        """Return the command line that diagnoses the Case with the same kernels, or None without a Case."""
        if self.case is None:
            return None
        words = shlex.split(self.case.to_cli())
        return shlex.join(["attnlab", "diagnose", *words[2:], *self.flags])

    def sentence(self) -> str:
        """Return the result in words."""
        first, second = self.pair
        if self.case is None:
            return f"{first} and {second} give the same output in all {self.tried} cases tried"
        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return (
            f"to distinguish {first} from {second}, run with {changes}: their outputs differ by "
            f"{self.gap:.3g} rounding bounds"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return {
            "pair": list(self.pair),
            "case": None if self.case is None else self.case.changes(),
            "changes": self.changes,
            "gap": json_number(self.gap),
            "tried": self.tried,
            "sentence": self.sentence(),
            "run": self.command,
        }


def find_distinction(
    case: Case,
    first: Defect,
    second: Defect,
    same_kernels: bool = True,
    rows: tuple[str, str] = ("all", "all"),
) -> Distinction:
    """Search for a Case near ``case`` in which the two defects differ by more than rounding.

    Changes are tried from the smallest to the largest. A change that dispatches to other kernels is
    skipped unless ``same_kernels`` is false. A large Case is shortened first, so that the proposal runs
    fast. ``rows``: in which rows each defect occurs, "all", "decode" or "prefill".
    """
    tried, pair = 0, (first.name, second.name)
    for changes, changed in changed_cases(case, same_kernels):
        problem = make_problem(changed)
        tried += 1
        if not (first.applies(problem) and second.applies(problem)):
            continue
        gap = gap_between(problem, first, second, rows)
        if gap > 1:
            return Distinction(pair=pair, case=changed, changes=changes, gap=gap, tried=tried)
    return Distinction(pair=pair, case=None, changes={}, gap=0.0, tried=tried)


def changed_cases(case: Case, same_kernels: bool = True) -> Iterator[tuple[dict[str, Any], Case]]:
    """Yield the Cases to try, each with the fields that it changes."""
    num_elements = case.lengths.num_tokens * case.num_heads * case.head_size
    shorten = _SHORT if num_elements > _LARGE_QUERY else {}
    kernels = set(decide(case).kernels)
    for extra in (*_CHANGES, *(_SOFTCAP_CHANGES if case.softcap is not None else ())):
        changes = {**shorten, **extra}
        if "query_lens" in changes:
            changes |= _without_sizes(case)
        try:
            changed = case.replace(**changes)
        except InvalidCase:
            continue  # the Case does not allow this change
        if not same_kernels or set(decide(changed).kernels) >= kernels:
            yield {n: v for n, v in changes.items() if getattr(case, n) != v}, changed


def _without_sizes(case: Case) -> dict[str, Any]:
    """Return the changes that reset all sizes which depend on the lengths."""
    names = ("num_blocks", "max_blocks_per_seq", "block_table", "max_query_len", "max_seq_len")
    return {name: None for name in names if getattr(case, name) is not None}


def gap_between(
    problem: Problem, first: Defect, second: Defect, rows: tuple[str, str] = ("all", "all")
) -> float:
    """Return the largest difference of the outputs under two defects, in units of both rounding bounds."""
    gap = 0.0
    for row_slice in sample_rows(problem):
        kind = "decode" if problem.is_decode(row_slice.seq) else "prefill"
        one, other = (
            defect.compute(problem, row_slice)
            if occurs_in in ("all", kind)
            else problem.correct(row_slice)
            for defect, occurs_in in zip((first, second), rows, strict=True)
        )
        finite = one.output.isfinite()
        if bool((finite != other.output.isfinite()).any()):
            return float("inf")
        ratio = (one.output - other.output).abs() / (one.bound + other.bound)
        ratio = ratio.masked_fill(~finite, 0.0).nan_to_num(0.0)  # 0 / 0: both exact and equal
        gap = max(gap, float(ratio.max()))
    return gap


# OtherRun: a second run of a Case with changed fields, and the output rows that differ between both.


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OtherRun(Document, Shown):
    """A second run of a Case, compared with the first.

    - ``changes``: the fields that the second run changes, with their values as text.
    - ``rows``: the output rows whose bits differ; ``num_rows``: the number of all rows.
    - ``largest``: the largest difference; NaN if a value is NaN in one run only, 0 if no row differs.
    - ``error``: what the kernel raises in the second run, or None.
    - ``instability``: that equal runs differ, so that the change shows nothing, or None.
    """

    _without = ("num_rows",)

    changes: Mapping[str, str]
    rows: tuple[int, ...]
    num_rows: int
    largest: float
    error: str | None = None
    instability: Instability | None = None

    @property
    def is_equal(self) -> bool:
        """Answer whether both outputs have the same bits."""
        return not self.rows and self.error is None and self.instability is None

    def text(self) -> str:
        """Return the comparison as one sentence."""
        changed = ", ".join(f"{name} {value}" for name, value in self.changes.items())
        if self.instability is not None:
            return f"{changed} is not compared: {self.instability.text}"
        if self.error is not None:
            return f"with {changed}, the kernel rejects the call: {self.error}"
        if not self.rows:
            return f"with {changed}, the output has the same bits"
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        return (
            f"with {changed}, {len(self.rows)} of {self.num_rows} rows have other bits "
            f"(rows {shown}), the largest difference is {self.largest:.4g}"
        )


def run_again(lab: Lab, case: Case, output: torch.Tensor, changes: Mapping[str, Any]) -> OtherRun:
    """Run a Case with changed fields, and compare its output with ``output``, that of the Case.

    Raises InvalidCase if the changes are not allowed, or give an output of another shape.
    """
    other = case.replace(**changes)
    words = {name: str(value) for name, value in changes.items()}
    none = OtherRun(changes=words, rows=(), num_rows=len(output), largest=0.0)
    with controlled() as control:
        try:
            second = lab.output(other)
        except KernelRejected as error:
            return dataclasses.replace(none, error=str(error))
        if not lab.backend(case).is_deterministic:
            control.compare(output, lambda: lab.output(case))
        is_alike = second.shape == output.shape and second.dtype == output.dtype
        same = rows_agree(output, second) if is_alike else None
    if control.found is not None:
        return dataclasses.replace(none, instability=control.found)
    if same is None:
        name = next(iter(changes))
        raise InvalidCase(f"{name} must keep the shape and dtype of the output", field=name)
    rows = torch.nonzero(~same).flatten()
    one, two = output[rows].double(), second[rows].double()
    both_nan = one.isnan() & two.isnan()
    difference = (one - two).abs().masked_fill(both_nan, 0.0)
    return OtherRun(
        changes=words,
        rows=tuple(rows.tolist()),
        num_rows=len(output),
        largest=float(difference.max()) if len(rows) else 0.0,
    )
