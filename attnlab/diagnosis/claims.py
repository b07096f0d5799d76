"""Claims: what is stated of a fault without a name, as far as further cases confirm it."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.case.fields import runs_triton
from attnlab.case.shown import Document, json_value
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.parts import part_facts
from attnlab.diagnosis.pattern import Pattern, Sizes, row_rules, sequence_rules
from attnlab.diagnosis.trials import Repair
from attnlab.kernels.triton.probe import (
    Elements,
    LaunchLog,
    Probe,
    TensorStores,
    joined,
    probing,
    stores_of,
    tensors_in,
)
from attnlab.lab.problem import Problem
from attnlab.lab.result import Result
from attnlab.weights.conclude import rounding_text
from attnlab.weights.facts import without_implied
from attnlab.weights.plan import Description


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(ABC):
    """A statement about a fault, and the number of further cases with wrong outputs that confirm it."""

    cases: int

    @property
    @abstractmethod
    def said(self) -> str:
        """Return the statement in words."""

    @property
    def text(self) -> str:
        """Return the statement in words, with the number of cases."""
        return f"{self.said} (confirmed on {self.cases} further {_cases(self.cases)})"


def _cases(count: int) -> str:
    return "case" if count == 1 else "cases"


def in_decodes(text: str, only_decodes: bool) -> str:
    """Return a statement with its scope, if that is batches of decodes alone."""
    return f"{text} (in batches of decodes)" if only_decodes else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRule(Claim):
    """A rule that explains an output and those of further cases.

    ``only_decodes``: no wrong output with several new tokens of a sequence was seen, of an op that computes
    those, too. ``others``: rules of other kinds that give the same outputs in all of these cases.
    """

    candidate: Candidate
    only_decodes: bool = False
    others: tuple[Candidate, ...] = ()

    @property
    def law(self) -> str:
        """Return what the kernel does, where, and the rules that no case separates from it."""
        laws = (self.candidate.text, *(one.text for one in self.others))
        found = ", or ".join(laws) + (": no case separates them" if self.others else "")
        return in_decodes(found, self.only_decodes)

    @property
    def said(self) -> str:
        """Return the rule in words, with its rows."""
        scope = self.candidate.scope
        where = "" if scope is None or scope.rows == "all" else f"{scope.text}: "
        return f"{where}{self.law}"

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON-able values; ``others`` are the rules that no case separates from it."""
        return {**self.candidate.to_dict(), "others": json_value(self.others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakClaim(Claim):
    """The statement that every wrong row depends on slots without a token.

    ``only_nan``: with finite numbers in these slots, every output is right. Otherwise every wrong row changes
    with these numbers, too.
    """

    only_nan: bool = True

    @property
    def said(self) -> str:
        """Return the claim in words."""
        if not self.only_nan:
            return "slots that hold no token count: each wrong row changes with the numbers in them"
        return (
            "slots that hold no token are read and multiplied by weight 0, so that only NaN in them reaches "
            "the output: with finite numbers there, every output is right"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedWeights(Claim):
    """A description of an X-ray from which the outputs of further cases follow.

    ``only_decodes``: it holds for batches of decodes; other batches were right, or follow another rule.
    ``right_decodes``: batches of decodes alone were right, as if another kernel computed them.
    """

    description: Description
    only_decodes: bool = False
    right_decodes: bool = False

    @property
    def said(self) -> str:
        """Return the description in words."""
        text = self.description.text
        if self.right_decodes:
            return f"{text} (batches of decodes alone are right)"
        return in_decodes(text, self.only_decodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionClaim(Claim):
    """The statement that weights are off by no more than rounding to bfloat16.

    ``largest``: by which part of it a weight is off at most, in all cases. ``only_decodes``: batches of
    decodes alone were measured, of an op that computes others, too.
    """

    largest: float
    only_decodes: bool = False

    @property
    def said(self) -> str:
        """Return the claim in words."""
        return in_decodes(rounding_text(self.largest), self.only_decodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureClaim(Claim):
    """The statement that an output is wrong with some features of a call, and right without any of them.

    ``features``: nouns with their articles; without one of them, the output is right in all cases.
    """

    features: tuple[str, ...]

    @property
    def said(self) -> str:
        """Return the claim in words."""
        *others, last = self.features
        every = f"{', '.join(others)} and {last}" if others else last
        without = f"if {'one of these' if others else 'this'} is left out"
        return f"the output is wrong with {every}, and right {without}"


# Statements about what the programs of a Triton kernel store and load, from their recorded addresses.

UNWRITTEN = "no kernel writes"
_CONFLICT = "stores other numbers to elements of"


def recorded_facts(
    case: Case, is_wrong: torch.Tensor, run: Callable[[Case], Result], problem: Problem
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is wrong with the stores of a Case, with the loads of what has one value per row, and with
    parts that are merged, each with the rows and heads that it concerns.

    ``problem``: the Case's. ``is_wrong``: [num_tokens, num_heads] bool, the wrong rows and heads of its
    output, as are the yielded tensors. A conflict in scratch memory may concern all of them. Only the
    interpreter records accesses.
    """
    if not runs_triton(case.backend):
        return
    # Stores of NaN by all programs would hide a conflict.
    known = case.replace(empty_slots="garbage")
    with probing(Probe(accesses=True)) as probe:
        output = run(known).output
    written = stores_of(probe.launches)
    for stores in written:
        # the kernels of an op may have several names for the output
        is_output = _is_output(stores.tensor, output)
        name = "the output" if is_output else stores.name
        for place, addresses in stores.conflicts.items():
            cells = torch.ones_like(is_wrong)
            if is_output:
                cells = stores.holds(addresses)[: len(is_wrong)].any(-1)
            yield f"{place} {_CONFLICT} {name} that another program stores to", cells
        unwritten = is_wrong[:0]
        if is_output:
            unwritten = stores.unwritten[: len(is_wrong)].any(-1) & is_wrong
        if bool(unwritten.any()):
            yield f"{UNWRITTEN} some elements of the output", unwritten
    if case.query_rows is None and case.query_heads is None:
        yield from _unread_inputs(probe.launches, output, is_wrong, written)
    if case.spec.parts:
        yield from part_facts(case.spec.parts, probe.launches, output, problem, is_wrong)


def _unread_inputs(
    launches: Sequence[LaunchLog],
    output: torch.Tensor,
    is_wrong: torch.Tensor,
    stores: Sequence[TensorStores],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inputs with numbers of each row and head that programs do not read completely for the rows
    and heads that they store, each with these.

    That are tensors [num_tokens, num_heads, head_size], as queries are, and [num_heads, num_tokens], as the
    log-sum-exps of merged parts are. Where no program reads an input and stores the output, as with split
    sequences, all programs count as one. ``stores``: those of the launches.
    """
    programs = [
        (joined(log.loads), joined(log.stores)) for launch in launches for log in launch.programs
    ]
    if not programs:
        return  # the grids are empty
    tensors = tensors_in(launches)
    outputs = [Elements(one) for _, one in tensors if _is_output(one, output)]
    stored = [
        sum((_cells(one, one.indices(at), is_wrong) for one in outputs), torch.zeros_like(is_wrong))
        for _, at in programs
    ]
    written = {one.tensor.data_ptr() for one in stores}
    for name, tensor in tensors:
        if tensor.data_ptr() in written or not tensor.is_floating_point():
            continue
        if not _has_cells(tensor, is_wrong):
            continue
        elements = Elements(tensor)
        loads = [elements.indices(loaded) for loaded, _ in programs]
        both = [(load, cells) for load, cells in zip(loads, stored, strict=True) if len(load)]
        unread = torch.zeros_like(is_wrong)
        for load, cells in both:
            unread |= cells & ~_cells(elements, load, is_wrong, completely=True)
        if not any(bool(cells.any()) for _, cells in both):
            every = np.unique(np.concatenate(loads))
            unread = ~_cells(elements, every, is_wrong, completely=True)
        if bool(unread.any()):
            yield (
                f"programs store rows of the output and do not read all of {name} for these rows",
                unread,
            )


def _has_cells(tensor: torch.Tensor, cells: torch.Tensor) -> bool:
    """Answer whether a tensor has numbers of each row and head: [tokens, heads, …] or [heads, tokens]."""
    num_tokens, num_heads = cells.shape
    if tensor.dim() == 3:
        return tensor.shape[1] == num_heads and len(tensor) >= num_tokens
    return tensor.shape == (num_heads, num_tokens)


def _cells(
    tensor: Elements, indices: Any, cells: torch.Tensor, *, completely: bool = False
) -> torch.Tensor:
    """Return which rows and heads of a tensor have some of their elements among ``indices``, or all of them,
    as bool with the shape of ``cells``."""
    size = tensor.shape[-1] if len(tensor.shape) == 3 else 1
    counts = np.bincount(indices // size, minlength=tensor.shape.numel() // size)
    had = torch.from_numpy(counts == size if completely else counts > 0).view(tensor.shape[:2])
    return (had if len(tensor.shape) == 3 else had.T)[: len(cells)]


def is_conflict(fact: str) -> bool:
    """Answer whether a statement says that programs store different numbers to the same elements.

    That is a fault even if the output is right: the order of the programs decides which number stays.
    """
    return _CONFLICT in fact


def _is_output(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """Answer whether a tensor is the output, maybe in FP8 or with rows of padding.

    Scratch memory has other sizes.
    """
    is_format = tensor.dtype == output.dtype or tensor.element_size() == 1
    return tensor.shape[1:] == output.shape[1:] and is_format and len(tensor) >= len(output)


# RepairClaim: an edit of one expression of a kernel's source with which every output is right.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepairClaim:
    """The statement that a kernel is right with one expression changed, in a call and in further cases.

    The edits that are tried are small: another operator, number, name or operand, or one more part. So the
    claim finds faults of one expression. It does not say that the author meant this expression.

    - ``repair``: the edit. With it, outputs and side outputs are right in every case, with NaN and with
      finite numbers in slots without a token. ``source``: the text of its line.
    - ``cases``: the number of further cases in which the unchanged kernel is wrong.
    - ``is_stated``: whether the text names the edit. It does not if what the edit adds had one value in all
      cases: then a rerun confirms the line alone.
    - ``only_finite``: some outputs stay wrong with NaN in slots without a token, so the claim is about finite
      numbers there.
    - ``untouched``: the number of further cases that are wrong with the same bits with the edit and without
      it, because the same fault, or another, is elsewhere, too: in a second kernel, for example.
    - ``others``: edits of other lines that pass the same cases, one of each. ``argument``: an argument of the
      kernel that makes them right with another value, too. The caller may pass a wrong one.
    - ``subject``: what is right with the edit.
    """

    repair: Repair
    source: str
    cases: int
    only_finite: bool = False
    is_stated: bool = True
    untouched: int = 0
    others: tuple[Repair, ...] = ()
    argument: str = ""
    subject: str = "the output is"

    @property
    def file(self) -> str:
        """Return the path of the source."""
        return self.repair.line[0]

    @property
    def line(self) -> int:
        """Return the line of the expression, from 1."""
        return self.repair.line[1]

    @property
    def place(self) -> str:
        """Return the name of the file and the line."""
        return _place(self.repair)

    @property
    def text(self) -> str:
        """Return the claim in words, with its line."""
        return f"{self.place}: {self.reason}"

    @property
    def reason(self) -> str:
        """Return the edit in words, and the first equivalent edit of another line."""
        finite = ", for finite numbers in slots without a token" if self.only_finite else ""
        edit = self.repair.edit
        what = (
            f"with {self.repair.change if self.is_stated else f'another value of {edit.subject}'}"
        )
        if self.argument:
            what += f", or with another value passed as {self.argument},"
        elsewhere = next((one for one in self.others if one.line != self.repair.line), None)
        other = "" if elsewhere is None else f"; or {_place(elsewhere)}: with {elsewhere.change}"
        rest = (
            f"; in {self.untouched} other {_cases(self.untouched)} it stays wrong, without a change"
        )
        return (
            f"{what} {self.subject} right, here and in {self.cases} further "
            f"{_cases(self.cases)}{finite}{other}{rest if self.untouched else ''}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        edit = self.repair.edit
        return {
            "file": self.file,
            "line": self.line,
            "source": self.source,
            "before": edit.before,
            "after": edit.after,
            "cases": self.cases,
            "only_finite": self.only_finite,
            "stated": self.is_stated,
            "argument": self.argument or None,
            "untouched": self.untouched,
            "others": [
                {"file": one.line[0], "line": one.line[1], "edit": one.change}
                for one in self.others
            ],
            "text": self.text,
        }


def _place(repair: Repair) -> str:
    return f"{Path(repair.line[0]).name}, line {repair.line[1]}"


# PatternClaim: what a pattern says about other cases, so that running one can contradict it.

_SCALE = "the output of another softmax scale: "
_NAN = "all elements are NaN"
# What several facts have in common: the kinds of facts, and the statement.
_MULTIPLES = "multiples of the correct output: only the sum of the weights is wrong"
_ADDED = "the correct output and one number that is added to all elements of a head"
_FAMILIES = ((_MULTIPLES, {"zeros", "factor", "factors"}), (_ADDED, {"added"}))
_GENERAL = frozenset({_MULTIPLES, _ADDED})
EVERY, ALL = "every sequence", "all rows of these sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternClaim:
    """Rules of the wrong places that hold in all cases that were looked at.

    - ``sequences``, ``rows``: rules in words, each selects exactly the wrong ones, simplest first.
    - ``heads``: the wrong heads; ``all_heads``: whether these are all. ``elements``: the wrong elements of
      each head, None for all.
    - ``only_decodes``: no sequence had several new tokens, of an op that computes such sequences, too.
    - ``values``: what the wrong cells hold, such as "all zeros", if that accounts for all of them. Of a wrong
      softmax scale, all expressions that give its number.
    """

    sequences: tuple[str, ...]
    rows: tuple[str, ...]
    heads: tuple[int, ...]
    all_heads: bool
    elements: tuple[int, ...] | None
    values: frozenset[str]
    only_decodes: bool = False

    @property
    def is_rule(self) -> bool:
        """Answer whether the claim excludes anything: some places, or some values.

        NaN alone is no rule: anything that is wrong may end in it.
        """
        if self.values - {_NAN}:
            return True
        if not self.sequences or not self.rows:
            return False
        if self.values:
            return True
        is_everywhere = self.sequences[0] == EVERY and self.rows[0] == ALL and self.all_heads
        return not is_everywhere or self.elements is not None

    def common(self, other: "PatternClaim") -> "PatternClaim | None":
        """Return the claim that both cases support, or None if heads or elements differ."""
        if (self.all_heads, self.elements) != (other.all_heads, other.elements):
            return None
        if not self.all_heads and self.heads != other.heads:
            return None
        return PatternClaim(
            sequences=tuple(text for text in self.sequences if text in other.sequences),
            rows=tuple(text for text in self.rows if text in other.rows),
            heads=self.heads,
            all_heads=self.all_heads,
            elements=self.elements,
            values=self._common_values(other.values),
            only_decodes=self.only_decodes and other.only_decodes,
        )

    def _common_values(self, others: frozenset[str]) -> frozenset[str]:
        is_scale = any(text.startswith(_SCALE) for text in self.values)
        common = self.values & others
        return common if is_scale or self.values == others else common & _GENERAL

    def predicts_none(self, sizes: Sizes) -> bool:
        """Answer whether no sequence of another batch has the rule, so that its output must be correct."""
        members = dict(sequence_rules(sizes))
        return bool(self.sequences) and members.get(self.sequences[0], {0}) == set()

    @property
    def text(self) -> str:
        """Return the claim in words."""
        has_rows = bool(self.rows) and self.rows[0] != ALL
        words = ["some sequences have wrong rows" if has_rows else "some rows are wrong"]
        if self.sequences and self.sequences[0] != EVERY:  # another call may have right sequences
            words = [f"the wrong sequences are those {self.sequences[0]}"]
        if has_rows:
            words.append(self.rows[0])
        if not self.all_heads:
            words.append(f"in heads {', '.join(map(str, self.heads))}")
        if self.elements is not None:
            words.append(f"in {len(self.elements)} elements, the first of them {self.elements[0]}")
        if self.values:
            shown = self.values - _GENERAL or self.values
            words = [f"{', '.join(words)}: {'; '.join(sorted(shown))}"]
        return in_decodes(", ".join(words), self.only_decodes)


def claim_of(
    is_wrong: torch.Tensor, ran_heads: list[int], sizes: Sizes, pattern: Pattern
) -> PatternClaim | None:
    """Return what an output's errors claim; None if nothing is wrong.

    ``is_wrong``: [num_tokens, num_heads] bool; ``ran_heads``: the heads that ran.
    """
    rows, heads = is_wrong.any(1), torch.nonzero(is_wrong.any(0)).flatten().tolist()
    if not heads:
        return None
    starts = sizes.row_starts
    tokens = {
        seq: torch.nonzero(rows[starts[seq] : starts[seq + 1]]).flatten().tolist()
        for seq in sizes.seqs
    }
    tokens = {seq: found for seq, found in tokens.items() if found}
    elements = [fact.values["elements"] for fact in pattern.of("elements")]
    return PatternClaim(
        sequences=_sequences(set(tokens), sizes),
        rows=_rows(tokens, sizes),
        heads=tuple(heads),
        all_heads=heads == ran_heads,
        elements=tuple(elements[0]) if elements else None,
        values=_values(pattern) if pattern.is_complete else frozenset(),
        only_decodes=sizes.takes_prefills and max(sizes.query_lens, default=0) <= 1,
    )


def _values(pattern: Pattern) -> frozenset[str]:
    scales = pattern.of("softmax_scale")
    if scales:
        return frozenset(f"{_SCALE}{name}" for name in scales[0].values["names"])
    kinds = {fact.kind for fact in pattern.rules}
    general = {text for text, family in _FAMILIES if kinds <= family}
    if kinds == {"zeros"}:
        general = set()
    exact = set() if "factors" in kinds else {fact.what for fact in pattern.rules}
    return frozenset(exact | general)


def _sequences(wrong: set[int], sizes: Sizes) -> tuple[str, ...]:
    every = {seq for seq in sizes.seqs if sizes.query_lens[seq]}
    rules = [(EVERY, every), *sequence_rules(sizes)]
    return tuple(text for text, members in rules if members == wrong)


def _rows(tokens: dict[int, list[int]], sizes: Sizes) -> tuple[str, ...]:
    """Return the rules that select exactly the wrong rows of the wrong sequences."""
    rules: list[tuple[str, Callable[[int, int], bool]]] = [(ALL, lambda seq, token: True)]
    return tuple(
        text
        for text, is_member in [*rules, *row_rules(tokens, sizes)]
        if all(
            found == [t for t in range(sizes.query_lens[seq]) if is_member(seq, t)]
            for seq, found in tokens.items()
        )
    )


# AccessClaim: accesses that a kernel must not make, or lacks, wherever its output is wrong.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseFacts:
    """Statements about the accesses of one Case, or about its attention weights.

    - ``places``: for each statement, the rows and heads that it concerns, [num_tokens, num_heads] bool.
    - ``is_wrong``: the wrong rows and heads, of the same shape; empty if the Case cannot run.
    """

    places: Mapping[str, torch.Tensor]
    is_wrong: torch.Tensor

    def covers(self, *facts: str) -> bool:
        """Answer whether each wrong row and head is a place of at least one of the statements."""
        left = self.is_wrong.clone()
        for fact in facts:
            left &= ~self.places[fact] if fact in self.places else True
        return not bool(left.any())

    @property
    def refuted(self) -> frozenset[str]:
        """Return the statements that cannot be the fault: they are true of a right output.

        A conflict between programs is a fault even then: their order decides which number stays.
        """
        if bool(self.is_wrong.any()):
            return frozenset()
        return frozenset(fact for fact in self.places if not is_conflict(fact))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessClaim(Claim):
    """Statements about the slots that a kernel reads and the elements that it writes, of one kind.

    - ``facts``: in every case, each concerns every wrong row and head.
    - ``either``: in every case, each wrong row and head is concerned by at least one of these.
    - ``some``: in every case with a wrong output, each concerns some rows.

    None is true of a case with a right output, except that programs may store different numbers to the same
    elements and leave the right one there.
    """

    facts: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    some: tuple[str, ...] = ()

    @property
    def is_unwritten(self) -> bool:
        """Answer whether the claim says that no kernel writes what is wrong."""
        return any(fact.startswith(UNWRITTEN) for fact in self.facts)

    @property
    def said(self) -> str:
        """Return the claim in words."""
        if self.either:
            return f"of each wrong row, one of these is true: {'; '.join(self.either)}"
        return "; ".join((*self.facts, *self.some))

    def holds_in(self, found: CaseFacts) -> bool:
        """Answer whether the claim is true of another case."""
        if found.refuted & {*self.facts, *self.either, *self.some}:
            return False
        if not bool(found.is_wrong.any()):
            return True
        is_everywhere = all(found.covers(fact) for fact in self.facts)
        is_split = not self.either or found.covers(*self.either)
        return is_everywhere and is_split and set(self.some) <= set(found.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraitClaim(AccessClaim):
    """What is wrong with the attention weights of wrong rows and heads, as an :class:`AccessClaim` says it of
    accesses."""

    @property
    def said(self) -> str:
        """Return the claim in words."""
        if self.facts:
            return f"of each wrong row: {'; '.join(without_implied(self.facts))}"
        if self.some:
            return f"of some wrong rows: {'; '.join(without_implied(self.some))}"
        return super(TraitClaim, self).said


# KernelLocation: where in the source of a kernel a fault may be.


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """A line of a kernel's source that may hold the fault.

    - ``file``: the path of the source; ``line``: from 1; ``source``: its text.
    - ``score``: from 0 to 1, by which lines are ranked. ``evidence``: "edit", "spectrum", "outside", "part",
      "load" or "role" (:mod:`attnlab.diagnosis.lines`). ``reason``: why, without a full stop.
    """

    file: str
    line: int
    source: str
    score: float
    evidence: str
    reason: str

    @property
    def text(self) -> str:
        """Return the line and the reason."""
        return f"{Path(self.file).name}, line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLocation(Document):
    """Lines that may hold a fault, ranked; or why there are none.

    - ``lines``: by all evidence, as material: most of them are not the fault. ``confirmed``: the edit that
      further cases confirm, or None if there is none or none was looked for.
    - ``repairs``: edits that make the located call right, and a second case, the best first.
    - ``why_none``: a clause, "" if there are lines. ``tried``: the number of trial edits; ``ended``: the
      signal by which one of them ended the trials, or "". ``programs``: (programs with wrong elements,
      programs that write elements).
    """

    _without = ("ended",)

    lines: tuple[KernelLine, ...] = ()
    confirmed: RepairClaim | None = None
    repairs: tuple[Repair, ...] = ()
    why_none: str = ""
    tried: int = 0
    ended: str = ""
    programs: tuple[int, int] = (0, 0)

    def sentences(self) -> list[str]:
        """Return the line that reruns confirm in words, or that there is none."""
        if self.confirmed is not None:
            return [self.confirmed.text]
        if not self.lines:
            return [f"source line: unknown, because {self.why_none}"]
        ended = f"; one ended the trials by {self.ended}" if self.ended else ""
        return [
            f"source line: unknown; further cases confirm none of {self.tried} trial edits{ended}"
        ]

    @property
    def confirmed_lines(self) -> tuple[KernelLine, ...]:
        """Return the lines of the confirmed edit, the first of them with what confirms it."""
        if self.confirmed is None:
            return ()
        own = [one for one in self.lines if (one.file, one.line) == self.confirmed.repair.line]
        return tuple(
            dataclasses.replace(one, evidence="edit", reason=self.confirmed.reason)
            for one in own[:1]
        )
