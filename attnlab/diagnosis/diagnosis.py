"""Diagnosis: what explains an output, and the evidence for it."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, KernelRejected
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.case.shown import Document, Shown, json_fields, json_value
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import Violations
from attnlab.defects.edit import Defect
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.claims import (
    AccessClaim,
    ConfirmedRule,
    DescribedWeights,
    FeatureClaim,
    KernelLine,
    KernelLocation,
    LeakClaim,
    PatternClaim,
    PrecisionClaim,
    RepairClaim,
    TraitClaim,
    in_decodes,
)
from attnlab.diagnosis.pattern import Pattern, list_text
from attnlab.diagnosis.reruns import SECOND_SCALES
from attnlab.diagnosis.side_claims import SideClaim
from attnlab.kernels.control import Instability, controlled, rows_agree
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, make_problem, sample_rows
from attnlab.weights.conclude import if_allowed
from attnlab.weights.xray import XRay

# Distinction: a Case in which two defects give different outputs although they agree in another Case.

_LARGE_QUERY = 1 << 20  # elements; a Case with a larger query is shortened first
_SHORT: dict[str, Any] = {
    "query_lens": (1, 17, 40),
    "ctx_lens": (300, 260, 33),
    **dict.fromkeys(DATA_OF_LENGTHS),
}
_OF_LENGTHS = ("num_blocks", "max_blocks_per_seq", "block_table", "max_query_len", "max_seq_len")
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
        case = None if self.case is None else self.case.changes()
        found = json_fields(self, "sentence", without=("flags", "case"))
        return {**found, "case": case, "run": self.command}


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
        if "query_lens" in changes:  # sizes that depend on the lengths follow from them
            changes |= {name: None for name in _OF_LENGTHS if getattr(case, name) is not None}
        changed = if_allowed(case, **changes)
        if changed and (not same_kernels or set(decide(changed).kernels) >= kernels):
            yield {n: v for n, v in changes.items() if getattr(case, n) != v}, changed


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


# Candidates as cells of a table and as values of JSON, and the conclusion of an X-ray as such.

CANDIDATE_COLUMNS = (
    "candidate",
    "predicted",
    "observed",
    "residual",
    "residual / bound",
    "verdict",
    "scope",
)


def candidate_cells(candidate: Candidate) -> list[str]:
    """Return a candidate as the cells of a table with ``CANDIDATE_COLUMNS``."""
    numbers = (candidate.predicted, candidate.observed, candidate.residual, candidate.ratio)
    linked = f" (violation: {', '.join(candidate.linked)})" if candidate.linked else ""
    return [
        candidate.name,
        *(f"{value:.3g}" for value in numbers),
        candidate.verdict + linked,
        "" if candidate.scope is None else candidate.scope.text,
    ]


STATUSES = (
    "nothing wrong",
    "explained",
    "ambiguous",
    "described",
    "unexplained",
    "rejected",
    "not decided",
)
_UNWRITTEN_BY = {
    "reruns": "no kernel writes {rows} (shown by reruns with other contents of the output buffer)",
    "buffer": "{rows}: the same as in the output buffer before the call; no kernel wrote there, or one wrote "
    "the same numbers",
    "contracts": "by the contracts of the kernels, none writes {rows}",
}
_SLOTS = {
    "tail": "the slots after a sequence's last token",
    "freed": "the blocks that the window has freed",
    "unmapped": "slots of no sequence",
}


_OF_XRAY = ("status", "descriptions", "confirmed", "sentences")
# claims that JSON has as text
_AS_TEXT = ("weights", "accesses", "leak", "claim", "features", "precision", "traits")
_FITS = ("softmax_scale", "keys", "sum")  # kinds of facts that explain the numbers of one call


def _in_this_call(text: str) -> str:
    return f"in this call, {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPlace:
    """The position of an error: sequence, new token of that sequence, output row and query head."""

    seq: int
    token: int
    row: int
    head: int

    @property
    def text(self) -> str:
        """Return the place in words."""
        return f"sequence {self.seq}, token {self.token} (row {self.row}), head {self.head}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Shown):
    """What explains an output.

    - ``status``: "nothing wrong" (rounding explains every element); "explained" (one defect does);
      "ambiguous" (several defects do, and the output does not decide between them); "described" (no
      defect does, but rules of the pattern reproduce the wrong rows); "unexplained"; "rejected" (the
      kernel raised ``rejection``); or "not decided" (the call has arguments that attnlab does not know,
      ``undecided_by``; ``wrong_rows`` then differ from attention without these; or ``rejection`` says why).
    - ``pattern``: what the error looks like, before any defect is considered.
    - ``cause``: the defect that explains the output, or None; ``explanations``: all defects that leave
      only rounding; ``candidates``: all defects that were compared, the best first.
    - ``wrong_rows``, ``wrong_heads``: how many rows and heads have an error above the rounding bound;
      ``largest``, ``place``: the largest absolute error of a wrong row and head, and where it is;
      ``largest_in_bounds``, ``place_in_bounds``: the largest error in units of its own rounding bound, often
      at another place, because bounds differ by row; None if the bounds are one number. ``tolerance``: the
      test's.
    - ``unwritten``: rows that no kernel wrote; ``unwritten_by``: how that is known, "reruns", "buffer",
      "contracts" or "".
    - ``slot_dependent``: rows that depend on the contents of unwritten cache slots, or None without
      reruns.
    - ``slot_kinds``: of the slot-dependent rows, those that change when slots of one kind hold NaN: "tail"
      (after a sequence's last token), "freed" (before the window) or "unmapped" (in no sequence).
    - ``wraps``, ``outside``: source lines with int32 overflow and with out-of-bounds access in the run.
    - ``bad_lines``: those of them that recur wherever the output of a further case is wrong.
    - ``outside_rows``: rows that depend on memory outside of the kernel's tensors, which may hold anything.
    - ``xray``: the attention weights of the kernel, if it was at hand and they were measured.
    - ``weights``: what of the X-ray's descriptions gives the outputs of further cases, or None.
    - ``rule``: a rule beyond the catalogue that explains the output and those of further cases, or None.
    - ``repair``: an edit of the source with which this output and those of further cases are right, or None.
    - ``observed``: what holds of this call, as sentences, if a repair describes the fault, or if nothing
      does: then facts that an X-ray measured. The first is the conclusion, and the status is "unexplained".
    - ``accesses``: wrong accesses that recur wherever the output of a further case is wrong, or None.
    - ``leak``: that the output is wrong by NaN in unwritten slots alone, here and in further cases, or None.
    - ``claim``: what of the pattern also holds in further cases, or None.
    - ``features``: if nothing else describes the fault, what the call must have for it, or None.
    - ``precision``: if nothing else describes the fault, that weights are off by rounding, here and in
      further cases, or None.
    - ``traits``: if nothing else describes the fault, what is wrong with the measured weights wherever the
      output of a further case is wrong, or None.
    - ``side_errors``: what is wrong with the log-sum-exp and the rows of padding.
    - ``location``: lines of the kernel's source that may hold the fault, or why there are none; None if they
      were not looked for. Only the line of ``repair`` is confirmed by reruns, and printed.
    - ``instability``: that equal runs of the kernel give different outputs, or None. Then nothing that rests
      on runs is stated.
    - ``withdrawn``: why explanations were withdrawn, one sentence each; no lines of :meth:`sentences`.
    - ``violations``: violations of the kernels' contracts by the call.
    - ``distinction``: for an ambiguous output, the search for a Case that decides.
    - ``unknown``: what could not be concluded, because the call does not hold it.
    - ``diagnosed``: which output is explained, if not the recorded one.
    - ``looked_at``: (rows on which candidates were confirmed, all rows).
    """

    status: str
    pattern: Pattern = field(default_factory=Pattern)
    cause: Candidate | None = None
    explanations: list[Candidate] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    wrong_rows: int = 0
    wrong_heads: int = 0
    place: ErrorPlace | None = None
    largest: float = 0.0
    largest_in_bounds: float | None = None
    place_in_bounds: ErrorPlace | None = None
    tolerance: float | None = None
    unwritten: list[int] = field(default_factory=list)
    unwritten_by: str = ""
    slot_dependent: list[int] | None = None
    slot_kinds: dict[str, list[int]] = field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    bad_lines: tuple[str, ...] = ()
    outside_rows: tuple[int, ...] = ()
    instability: Instability | None = None
    withdrawn: tuple[str, ...] = ()
    xray: XRay | None = None
    weights: DescribedWeights | None = None
    rule: ConfirmedRule | None = None
    repair: RepairClaim | None = None
    observed: tuple[str, ...] = ()
    accesses: AccessClaim | None = None
    leak: LeakClaim | None = None
    claim: PatternClaim | None = None
    features: FeatureClaim | None = None
    precision: PrecisionClaim | None = None
    traits: TraitClaim | None = None
    side_errors: tuple[SideClaim, ...] = ()
    location: KernelLocation | None = None
    violations: Violations = field(default_factory=Violations)
    distinction: Distinction | None = None
    looked_at: tuple[int, int] = (0, 0)
    rejection: str = ""
    undecided_by: tuple[str, ...] = ()
    unknown: list[str] = field(default_factory=list)
    diagnosed: str = ""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Answer whether there is anything to explain."""
        return self.status not in ("nothing wrong", "not decided")

    @property
    def locations(self) -> tuple[KernelLine, ...]:
        """Return the lines of the kernel's source that may hold the fault, the likeliest first."""
        return () if self.location is None else self.location.lines

    def counts(self) -> dict[str, int]:
        """Return the number of candidates by verdict."""
        return dict(Counter(candidate.verdict for candidate in self.candidates))

    @property
    def is_within_tolerance(self) -> bool:
        """Answer whether the test's tolerance accepts the largest error."""
        return self.tolerance is not None and self.largest <= self.tolerance

    def sentences(self) -> list[str]:
        """Return the diagnosis in words, one fact per sentence.

        First the conclusion with its source line, then the evidence for it, then the wrong places; what is
        unknown comes last. Withdrawn names and lines that no rerun confirmed are in :meth:`to_dict` alone.
        """
        first, *others = self._known_sentences()
        others = [one for one in others if _in_this_call(one) != first]
        found = [first, self.diagnosed, *others, *(f"unknown: {text}" for text in self.unknown)]
        return [*dict.fromkeys(filter(None, found))]  # a pattern may be the conclusion, too

    def _undecided_sentences(self) -> list[str]:
        """Return what holds whatever the unknown arguments mean."""
        names = ", ".join(self.undecided_by)
        one = len(self.undecided_by) == 1
        what = "the argument" if one else "the arguments"
        rows = f"{self.wrong_rows} of {self.looked_at[1]} rows differ, by up to {self.largest:.4g}"
        found = rows if self.wrong_rows else "rounding explains every difference"
        return [
            f"not decided because of {what} {names}: attnlab does not know {'it' if one else 'them'}",
            f"compared with attention without {'it' if one else 'them'}, {found}",
            *self._violation_sentences(),
        ]

    def _known_sentences(self) -> list[str]:
        if self.undecided_by:
            return self._undecided_sentences()
        if self.status == "not decided":
            return [f"not decided: {self.rejection}"]
        if not self.is_wrong:
            return ["nothing is wrong: rounding explains every difference from the correct output"]
        if self.status == "rejected":
            return [f"the kernel rejects the call: {self.rejection}", *self._violation_sentences()]
        if self.instability is not None:
            return [
                self.conclusion,
                *self.place_sentences(),
                *self.pattern.sentences(),
                *self._violation_sentences(),
                "no other statement is made: each would rest on runs of this kernel",
            ]
        observed = [*map(_in_this_call, self.observed)]
        return [
            self.conclusion,
            *(observed if self.status == "unexplained" else []),
            *self._violation_sentences(),
            *([] if self.distinction is None else [self.distinction.sentence()]),
            *([self.repair.text] if self.repair and not self.is_by_repair else []),
            *self._xray_sentences(),
            *(one.text for one in self.side_errors),
            *observed,
            *self._run_sentences(),
            *self.place_sentences(),
            *self._pattern_sentences(),
            *([] if self.location is None or self.repair else self.location.sentences()),
        ]

    @property
    def evidence(self) -> str:
        """Return how many rows are wrong and where, or the conclusion if no row is."""
        return next(iter(self.place_sentences()), self.conclusion)

    def place_sentences(self) -> list[str]:
        """Return how many rows are wrong and where, and which rows depend on what they must not."""
        sentences = []
        if self.place is not None:
            sentences.append(
                f"{self.wrong_rows} of {self.looked_at[1]} rows are wrong; the largest absolute error, "
                f"{self.largest:.4g}, is in {self.place.text}{self._in_bounds_text()}"
            )
        if self.is_within_tolerance:
            sentences.append(f"the tolerance of {self.tolerance:g} accepts this error")
        sentences += self._unwritten_sentences()
        if self.slot_dependent:
            rows = list_text("row", self.slot_dependent)
            sentences.append(f"the result of {rows} depends on unwritten cache slots")
        for kind, kind_rows in self.slot_kinds.items():
            sentences.append(f"NaN in {_SLOTS[kind]} changes {list_text('row', kind_rows)}")
        return sentences

    def _unwritten_sentences(self) -> list[str]:
        """Return which rows no kernel writes, and how that is known."""
        if not self.unwritten:
            return []
        rows = list_text("row", self.unwritten)
        return [_UNWRITTEN_BY[self.unwritten_by].format(rows=rows)]

    def _in_bounds_text(self) -> str:
        """Return which error is the largest relative to its rounding bound."""
        if self.largest_in_bounds is None or self.place_in_bounds is None:
            return ""
        where = (
            "at the same place"
            if self.place_in_bounds == self.place
            else f"in {self.place_in_bounds.text}"
        )
        size = f"{self.largest_in_bounds:.3g} bounds"
        return f"; relative to its rounding bound, the largest is {size}, {where}"

    def _pattern_sentences(self) -> list[str]:
        """Return the pattern; with reruns, without fits of the weights, which hold for this call alone.

        Those that further cases confirm are in the conclusion.
        """
        if self.slot_dependent is None:
            return self.pattern.sentences()
        facts = tuple(fact for fact in self.pattern.facts if fact.kind not in _FITS)
        return dataclasses.replace(self.pattern, facts=facts).sentences()

    def _run_sentences(self) -> list[str]:
        """Return what the run itself reported and the output depends on.

        Many right kernels read outside of their tensors and use nothing of it, so an access of no effect is
        in :meth:`to_dict` alone.
        """
        wraps = [f"int32 overflow: {text}" for text in self.wraps]
        accesses = [
            f"out-of-bounds access: {text}"
            for text in self.outside
            if self.outside_rows or text.split()[0] in self.bad_lines
        ]
        if self.outside_rows:
            rows = list_text("row", self.outside_rows)
            accesses.append(f"the result of {rows} depends on memory outside of the tensors")
        return [*wraps, *accesses]

    def _xray_sentences(self) -> list[str]:
        """Return what the X-ray measured, if that is not the conclusion already.

        A description of the weights of this call alone is no rule, and is left out.
        """
        if self.xray is None or self.xray.status not in ("right", "precision", "described"):
            return []
        is_said = self.precision is not None or self.status == "unexplained"
        if self.xray.status == "precision" and (is_said or not self.pattern.of("precision")):
            return []  # or the output is wrong by more than precision explains
        if self.xray.status == "described" and (self.weights or not self.explanations):
            return []
        return [f"X-ray of the kernel: {self.xray.sentences[0]}"]

    @property
    def is_by_repair(self) -> bool:
        """Answer whether a repair is what describes the output."""
        known = (
            self.explanations
            or self.rule
            or self.weights
            or self.leak
            or (self.accesses is not None and self.accesses.is_unwritten)
        )
        return self.repair is not None and not known

    @property
    def conclusion(self) -> str:
        """Return the cause or the description in one sentence, with its source line if one is confirmed.

        Equal runs that differ come first. Without a wrong output, it says so.
        """
        if self.status in ("nothing wrong", "not decided", "rejected"):
            return self._known_sentences()[0]
        if self.instability is not None:
            return f"not deterministic: {self.instability.text}"
        if self.repair is None:
            return self._cause_sentence()
        if self.is_by_repair:
            return self.repair.text
        return f"{self._cause_sentence()} [{self.repair.place}]"

    def _cause_sentence(self) -> str:
        names = [candidate.name for candidate in self.explanations]
        if self.status == "ambiguous":
            if len(names) == 1:
                return f"ambiguous: the output does not contradict {names[0]}, and does not show it"
            return f"ambiguous: {', '.join(names)} each explain the output"
        if self.side_errors and not self.wrong_rows:
            words = "; ".join(one.sentence for one in self.side_errors)
            return words if self.status == "described" else _in_this_call(words)
        if self.status == "described":
            return self._description()
        if self.cause is None or self.cause.scope is None:
            known = [*self.observed, *self._unwritten_sentences(), self.pattern.rules_text]
            if known[0]:
                return _in_this_call(known[0])
            if not self.candidates:
                return "unexplained: no rule of attnlab reproduces what is wrong"
            return f"unexplained: none of {len(self.candidates)} candidates explains the output"
        others = [name for name in names if name != self.cause.name]
        same = f" ({', '.join(others)} would give the same output)" if others else ""
        where = "" if self.cause.scope.rows == "all" else f" in {self.cause.scope.text}"
        text = in_decodes(self.cause.text, self.cause.only_decodes)
        return f"{self.cause.name}{where}: {text}{same}"

    def _bad_lines_text(self) -> str:
        """Return which lines have a bad access or an overflow wherever a further output is wrong."""
        overflows = {text.split()[0] for text in self.wraps}
        wraps = [line for line in self.bad_lines if line in overflows]
        others = [line for line in self.bad_lines if line not in overflows]
        does = "reads out of bounds" if self.outside_rows else "has a bad access"
        parts = [f"an int32 product overflows in {' and '.join(wraps)}"] if wraps else []
        parts += [f"{' or '.join(others)} {does}"] if others else []
        return f"wherever a further output is wrong, {', and '.join(parts)}" if parts else ""

    def _description(self) -> str:
        """Return what is stated of a fault without a name."""
        lines = self._bad_lines_text()
        if lines and self.outside_rows:
            why = "" if self.rule is None else f"; {self.rule.text}"
            return f"{lines}{why}"
        found = self.rule or self.weights or self.leak or self.accesses or self.precision
        if found is not None:
            return found.text
        if lines:
            claim = "" if self.claim is None else f"; {self.claim.text}"
            return f"{lines}, too{claim}"
        if self.claim is not None:
            return f"{self.claim.text} (confirmed on further cases)"
        if self.features is not None:
            return self.features.text
        if self.traits is not None:
            return self.traits.text
        return self.pattern.rules_text

    def _violation_sentences(self) -> list[str]:
        silent = [violation for violation in self.violations if violation.effect != "harmless"]
        return [f"contract violation: {violation.text}" for violation in silent]

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-able values; NaN and infinity are strings.

        Of an X-ray it has the conclusion; ``attnlab xray --json`` has the weights.
        """
        without = ("tolerance", "location", "xray", "rule", *_AS_TEXT)
        rule, xray, location = self.rule, self.xray, self.location
        texts = {name: getattr(self, name) for name in _AS_TEXT}
        return {
            **json_fields(self, "sentences", "locations", without=without),
            **{name: None if claim is None else claim.text for name, claim in texts.items()},
            "explanations": [one.name for one in self.explanations],
            "side_errors": [one.sentence for one in self.side_errors],
            "rejection": self.rejection or None,
            "rule": rule and rule.to_dict(),
            "xray": xray and {name: json_value(getattr(xray, name)) for name in _OF_XRAY},
            "no_location": None if location is None else location.why_none or None,
        }
