"""power: find the defects that a test would notice, given its data, tolerance, cache and output buffer.

Each defect of the catalogue is a mutant of the correct output. A mutant is killed if an element leaves the
test's tolerance, survives if none does, and is equivalent if no data would show it. No kernel runs: the
mutants' outputs are computed, on a sample of each sequence's rows and heads.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from attnlab.case.case import Case, as_case
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.case.ops import check_scored
from attnlab.case.shown import Document, Shown, json_fields, json_value
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.edit import Rows, family, fault
from attnlab.diagnosis.diagnosis import find_distinction
from attnlab.diagnosis.reruns import SECOND_SCALES
from attnlab.kernels.backend import OnStep, cell_steps, ignore_step
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Predicted, Problem, RowSlice, make_problem, sample_rows
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Job, Outcome, Task


def _noise(at: Rows, size: torch.Tensor | float) -> Predicted:
    """Return normal noise with the standard deviation ``size``."""
    correct = at.problem.correct(at.slice)
    generator = torch.Generator().manual_seed(at.slice.seq)
    noise = torch.randn(correct.output.shape, generator=generator, dtype=torch.float64)
    return Predicted(output=noise * size, bound=correct.bound)


def _noise_of_its_size(at: Rows) -> Predicted:
    """Return noise with the root mean square of the correct output, at least one rounding step."""
    output = at.problem.correct(at.slice).output
    step = at.problem.rounding(at.slice.seq).step
    return _noise(at, output.square().mean().sqrt().clamp(min=step))


CORRECT, *_NOISE = family(
    "mutants",
    fault("correct", "the output is correct", "mlir-air #1427", lambda at: at.inputs),
    fault(
        "noise_of_its_size",
        "the output is random noise of the same magnitude as the correct output",
        "mlir-air #1427",
        _noise_of_its_size,
    ),
    fault(
        "random_noise",
        "the output is random noise from N(0, 1)",
        "mlir-air #1427",
        lambda at: _noise(at, 1.0),
    ),
)
MUTANTS: tuple[Defect, ...] = (
    *(defect for defect in DEFECTS.values() if not defect.harmless),
    *_NOISE,
)


MAX_SEQS, TOKENS, HEADS = 4, 4, 4  # of the sample; a decode has one token
CorrectSample = list[tuple[RowSlice, Predicted]]  # some rows, each with its correct output
Map = Callable[[torch.Tensor], torch.Tensor]


_NOTHING = 1e-9  # a margin that is no change


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The effect of a mutant on a sample of rows.

    ``effect``: the largest absolute change of an element; ``margins``: by kernel, "decode" and "prefill",
    the largest ratio of a change to what the test allows there. Both are infinite if an element becomes NaN
    or infinite.
    """

    effect: float
    margins: dict[str, float]

    @property
    def margin(self) -> float:
        """Return the margin of the kernel in which the mutant shows least, of those that it changes.

        A fault may be in one kernel only, so the test must notice it in each.
        """
        return min((one for one in self.margins.values() if one > _NOTHING), default=0.0)

    @property
    def is_killed(self) -> bool:
        """Answer whether the test notices the mutant in each kernel whose rows it changes."""
        return self.margin > 1


def kernels_where(margins: dict[str, float], *, killed: bool) -> tuple[str, ...]:
    """Return the kernels in whose rows a mutant is killed, or survives although it changes them."""
    changed = {kernel: one for kernel, one in margins.items() if one > _NOTHING}
    return tuple(kernel for kernel, one in changed.items() if (one > 1) == killed)


def sample_correct(problem: Problem, heads: int = HEADS) -> CorrectSample:
    """Return a sample of rows and heads, each with its correct output."""
    row_slices = sample_rows(problem, TOKENS, heads, MAX_SEQS)
    return [(row_slice, problem.correct(row_slice)) for row_slice in row_slices]


def score(
    problem: Problem, sample: CorrectSample, mutant: Defect, case: Case, compared: Map | None = None
) -> Score:
    """Return a mutant's score under the Case's tolerances.

    ``compared``: what the test makes of output rows before it compares them, with the Case's tolerance.
    """
    effect, margins = 0.0, dict[str, float]()
    for row_slice, correct in sample:
        kernel = "decode" if problem.is_decode(row_slice.seq) else "prefill"
        output, right = mutant.compute(problem, row_slice).output, correct.output
        if compared is not None:
            output, right = compared(output), compared(right)
        change = (output - right).abs().nan_to_num(torch.inf, torch.inf)
        atol = correct.bound if case.tolerance is None else case.tolerance
        allowed = atol + case.rtol * right.abs()
        ratio = torch.where(change == 0, 0.0, change / allowed)
        effect = max(effect, float(change.max()))
        margins[kernel] = max(margins.get(kernel, 0.0), float(ratio.max()))
    return Score(effect=effect, margins=margins)


_SHORT = {  # contexts so short that each key counts, and longer ones with several blocks and partitions
    "query_lens": (1, 1, 17, 40),
    "ctx_lens": (3, 300, 260, 0),
    "max_query_len": None,
    "max_seq_len": None,
    "block_table": None,
    "num_blocks": None,
    "max_blocks_per_seq": None,
    **dict.fromkeys(DATA_OF_LENGTHS),
}


Changes = dict[str, Any]
# What kills the survivors of a test: by name, the cheapest changes that kill a mutant; the names of mutants
# that no data can show; and the fields of a report about the changes that kill the most survivors.
Remedies = tuple[dict[str, Changes], set[str], dict[str, Any]]
NO_REMEDIES: Remedies = ({}, set(), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTest:
    """A test with changes of :func:`ladder`, and a sample of its correct rows, ready to score mutants.

    ``changes`` have the derived atol, and ``case`` has it, too.
    """

    changes: dict[str, Any]
    case: Case
    problem: Problem
    sample: CorrectSample

    @classmethod
    def of(cls, case: Case, changes: dict[str, Any], lab: Lab) -> "ChangedTest":
        """Return the test with changes; ``lab`` makes the batch. Without ``atol``, the Case's remains."""
        changed = case.replace(**{name: v for name, v in changes.items() if name != "atol"})
        problem = make_problem(changed, lab.batch(changed))
        sample = sample_correct(problem)
        if "atol" in changes:  # the smallest under which rounding fails no test
            bounds = [float(correct.bound.max()) for _, correct in sample]
            changes = {**changes, "atol": max(bounds)}
            changed = changed.replace(atol=changes["atol"])
        return cls(changes=changes, case=changed, problem=problem, sample=sample)

    @property
    def sampled(self) -> tuple[int, int]:
        """Return the number of rows of the sample, and the largest number of heads of a row."""
        rows = sum(len(part.tokens) for part, _ in self.sample)
        return rows, max(len(part.heads) for part, _ in self.sample)

    def score(self, mutant: Defect) -> Score:
        """Return a mutant's score."""
        return score(self.problem, self.sample, mutant, self.case)

    def kills(self, mutant: Defect) -> bool:
        """Answer whether the test kills or excludes a mutant."""
        return not mutant.applies(self.problem) or self.score(mutant).is_killed


def passes(case: Case) -> bool:
    """Run the backend of a changed test, and answer whether it passes."""
    return Lab().run(case).status == "match"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A test whose mutants were scored, and answers about changes of it, which are numbered as in ``ladder``.

    - ``changes``: those of a number, with the derived atol. ``kills``: whether they kill or exclude a
      mutant.
    - ``equivalent``: whether no data can show a mutant. ``passes``: whether the backend passes a changed
      test.
    """

    case: Case
    mutants: Sequence[Defect]
    scores: Mapping[str, Score]
    sampled: tuple[int, int]
    changes: Callable[[int], dict[str, Any]]
    kills: Callable[[int, str], bool]
    equivalent: Callable[[str], bool]
    passes: Callable[[int], bool]

    def remedies(self, on_step: OnStep) -> Remedies:
        """Try changes of the test, from the cheapest to all of them, until one kills all survivors."""
        alive = [name for name, one in self.scores.items() if not one.is_killed]
        killed: list[frozenset[str]] = []
        tests = [*ladder(self.case)] if alive else []
        for number in range(len(tests)):
            on_step("changes of the test", number, len(tests))
            killed.append(frozenset(name for name in alive if self.kills(number, name)))
            if len(killed[-1]) == len(alive):
                break
        if not killed:
            return NO_REMEDIES
        best = max(range(len(killed)), key=lambda number: len(killed[number]))
        cheapest = {
            name: self.changes(next(i for i, names in enumerate(killed) if name in names))
            for name in alive
            if any(name in names for names in killed)
        }
        left, excluded = [name for name in alive if name not in cheapest], set()
        for i, name in enumerate(left):
            on_step("mutants that no data can show", i, len(left))
            excluded |= {name} if self.equivalent(name) else set()
        on_step("the backend with the proposal")
        fields = {
            "proposal": self.changes(best),
            "left": sorted({*alive} - killed[best] - excluded),
            "models_pass": self.passes(best),
        }
        return cheapest, excluded, fields

    def report(self, found: Remedies, began: float) -> "MutationReport":
        """Return the report of the mutants."""
        rows, heads = self.sampled
        cheapest, equivalent, fields = found
        mutants = []
        for one in self.mutants:
            own = self.scores[one.name]
            alive = "equivalent" if one.name in equivalent else "survived"
            mutants.append(
                Mutant(
                    name=one.name,
                    text=one.text,
                    outcome="killed" if own.is_killed else alive,
                    effect=own.effect,
                    margin=own.margin,
                    margins=own.margins,
                    remedy=cheapest.get(one.name),
                )
            )
        return MutationReport(
            case=self.case,
            mutants=sorted(mutants, key=lambda m: -m.margin),
            **fields,
            sampled=(rows, self.case.lengths.num_tokens),
            heads=heads,
            seconds=time.perf_counter() - began,
        )


def is_equivalent(case: Case, mutant: Defect) -> bool:
    """Answer whether a mutant gives the correct output under all changes of the Case that are tried."""
    stored = case.replace(cache_write="scaled")
    return find_distinction(stored, mutant, CORRECT, same_kernels=False).case is None


def ladder(case: Case) -> Iterator[dict[str, Any]]:
    """Yield changes of a test, from the cheapest to all of them.

    Each sets atol to None, which stands for the derived tolerance, the smallest under which correct
    kernels pass. Under it a decode kernel must find the newest token in the cache, so each also writes
    that token if the test does not.
    """
    always: dict[str, Any] = {"atol": None}
    if case.staging.fill == "context_only" and decide(case).decode is not None:
        always = {"fill": "decode_rows", **always}
    has_old_scale = case.sm_scale is None and case.release == "0.11.2"
    scale = {"sm_scale": case.head_size**-0.5} if has_old_scale else {}
    data: dict[str, Any] = {"distribution": "normal"}
    contracts = decide(case).contracts(Target.of(case), case.op)
    # NaN leaks from slots after a sequence's last token if a kernel reads them.
    has_tail = any(terms.reads_tail != "nothing" for terms in contracts)
    poison = {"empty_slots": "garbage" if has_tail else "nan"}
    steps: list[dict[str, Any]] = [{}, data, {**data, **poison}]
    if case.is_fp8:
        store = {"cache_write": "scaled", **SECOND_SCALES, "x": None}
        steps += [{**store, **data}, {**store, **data, **poison}]
    steps.append({**steps[-1], **_SHORT})
    yielded: list[dict[str, Any]] = []
    for step in steps:
        changes = {n: v for n, v in {**scale, **step}.items() if getattr(case, n) != v}
        if changes not in yielded:
            yielded.append(changes)
            yield {**changes, **always}


def changes_text(changes: dict[str, Any]) -> str:
    """Return changes in words, such as "distribution=normal, atol=0.0021"."""
    return ", ".join(_change_text(name, value) for name, value in changes.items())


def _change_text(name: str, value: object) -> str:
    if name == "atol" and value is None:
        return "atol derived"
    return f"{name}={value:.2g}" if isinstance(value, float) else f"{name}={value}"


OUTCOMES = ("killed", "survived", "equivalent")
_RAN = {True: "passes", False: "does not pass", None: "was not run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant(Document):
    """One mutant and what the test does with it.

    - ``outcome``: "killed" in each kernel whose rows it changes; "survived" if it survives in one; or
      "equivalent".
    - ``margins``: by kernel, "decode" and "prefill", the largest ratio of a change of an element to what the
      test allows there; infinite for NaN. ``margin``: the smallest of the kernels that it changes. Above 1
      the test notices it.
    - ``remedy``: the cheapest change of the test that kills the mutant, or None.
    """

    _more = ("survives_in", "killed_in")

    name: str
    text: str
    outcome: str
    effect: float
    margin: float
    margins: dict[str, float] = field(default_factory=dict)
    remedy: dict[str, Any] | None = None

    @property
    def survives_in(self) -> tuple[str, ...]:
        """Return the kernels whose rows the mutant changes by no more than the test allows."""
        return kernels_where(self.margins, killed=False)

    @property
    def killed_in(self) -> tuple[str, ...]:
        """Return the kernels in whose rows the test notices the mutant."""
        return kernels_where(self.margins, killed=True)

    @property
    def outcome_text(self) -> str:
        """Return the outcome in words, such as "survived (decode; killed in prefill)"."""
        if not (self.survives_in and self.killed_in):
            return self.outcome
        where, killed = (" and ".join(names) for names in (self.survives_in, self.killed_in))
        return f"{self.outcome} ({where}; killed in {killed})"

    @property
    def remedy_text(self) -> str:
        """Return the remedy in words; "" if the mutant did not survive."""
        if self.outcome != "survived":
            return ""
        return "none found" if self.remedy is None else changes_text(self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MutationReport(Shown):
    """Which mutants a test notices.

    - ``proposal``: the changes of the test that kill the most survivors, or None; ``left``: mutants that
      still survive them; ``models_pass``: whether the Case's backend passes the changed test, None if it
      was not run.
    - ``sampled``: (rows computed, all rows); ``heads``: number of heads computed for each row.
    """

    case: Case
    mutants: list[Mutant]
    proposal: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    models_pass: bool | None = None
    sampled: tuple[int, int] = (0, 0)
    heads: int = 0
    seconds: float = 0.0

    def of(self, outcome: str) -> list[Mutant]:
        """Return the mutants with an outcome."""
        return [mutant for mutant in self.mutants if mutant.outcome == outcome]

    @property
    def survivors(self) -> list[Mutant]:
        """Return the mutants that the test does not notice."""
        return self.of("survived")

    def counts_by_kernel(self) -> dict[str, dict[str, int]]:
        """Return, for the rows of each kernel, how many mutants that change them are killed and survive."""
        return {
            kernel: {
                "killed": sum(kernel in mutant.killed_in for mutant in self.mutants),
                "survived": sum(kernel in mutant.survives_in for mutant in self.mutants),
            }
            for kernel in dict.fromkeys(name for one in self.mutants for name in one.margins)
        }

    def named(self, names: Sequence[str]) -> list[Mutant]:
        """Return the mutants with these names, in their order, without those that do not apply."""
        by_name = {mutant.name: mutant for mutant in self.mutants}
        return [by_name[name] for name in names if name in by_name]

    def counts(self) -> dict[str, int]:
        """Return the number of mutants by outcome."""
        return {outcome: len(self.of(outcome)) for outcome in OUTCOMES}

    def sentences(self) -> list[str]:
        """Return the report in words."""
        counts = self.counts()
        rows, all_rows = self.sampled
        sentences = [
            f"{counts['killed']} mutants killed, {counts['survived']} survived, "
            f"{counts['equivalent']} equivalent (no data can show them); computed on {rows} of "
            f"{all_rows} rows, {self.heads} heads each"
        ]
        kernels = self.counts_by_kernel()
        if len(kernels) > 1:
            parts = (
                f"{kernel} rows: {one['killed']} killed, {one['survived']} survived"
                for kernel, one in kernels.items()
            )
            sentences.append(f"by kernel, of the mutants that change its rows: {'; '.join(parts)}")
        if self.proposal is not None and self.survivors:
            left = (
                f"{', '.join(self.left)} still survive" if self.left else "all of them are killed"
            )
            name = self.case.backend
            backend = "the lab's model" if name == "model" else f"backend {name}"
            changes = changes_text(self.proposal)
            sentences.append(f"with {changes}, {left} and {backend} {_RAN[self.models_pass]}")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values; NaN and infinity are strings."""
        more = ("counts", "counts_by_kernel", "sentences")
        fields = json_fields(self, *more, without=("case", "heads"))
        return {**fields, "case": self.case.changes()}


__all__ = ["Mutant", "MutationReport", "power"]


def measure_power(
    case: Case,
    *,
    mutants: Iterable[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: OnStep | None = None,
) -> MutationReport:
    """Return which mutants a test with the Case's data and tolerance would notice.

    With ``remedies``, search for the cheapest change of the test that kills each survivor and for one set
    of changes that kills as many as possible, and run the models under that set. Raises InvalidCase for
    a cache write. ``on_step``: default, a line in the cell of a notebook.
    """
    began, on_step = time.perf_counter(), on_step or cell_steps()
    check_scored(case.spec)
    on_step("the test's own data")
    tests, scores = _Tests(case), {}
    named = {one.name: one for one in mutants if one.applies(tests.own.problem)}
    for i, (name, mutant) in enumerate(named.items()):
        on_step("mutants", i, len(named))
        scores[name] = tests.own.score(mutant)
    scored = Scored(
        case=case,
        mutants=list(named.values()),
        scores=scores,
        sampled=tests.own.sampled,
        changes=lambda number: tests.changed(number).changes,
        kills=lambda number, name: tests.changed(number).kills(named[name]),
        equivalent=lambda name: is_equivalent(case, named[name]),
        passes=lambda number: passes(tests.changed(number).case),
    )
    return scored.report(scored.remedies(on_step) if remedies else NO_REMEDIES, began)


_NAMED = {mutant.name: mutant for mutant in MUTANTS}
_CHANGE = "change"
_CHANGE_COST = 4.0  # of running the backend, in times of a mutant


@dataclass(frozen=True, kw_only=True)
class PowerJob(Job):
    """Scores mutants of a test, and runs its backend under changes of the test."""

    case: Case

    def open(self) -> "_Tests":
        return _Tests(self.case)

    def run(self, state: "_Tests", payload: dict[str, Any]) -> dict[str, Any]:
        if _CHANGE in payload:
            changed = state.changed(payload[_CHANGE]).case
            verdict = {"atol": changed.atol, "passes": passes(changed)}
        else:
            verdict = state.mutant_verdict(_NAMED[payload["mutant"]])
        found: dict[str, Any] = json_value(verdict)
        return found


class _Tests:
    """The test and its changes, each made when it is first needed."""

    def __init__(self, case: Case) -> None:
        self._case, self._ladder = case, list(ladder(case))
        self._lab = Lab(keep=1, device="cpu")  # most changes of a test leave its batch
        self._made: dict[int, ChangedTest] = {}

    @cached_property
    def own(self) -> ChangedTest:
        """Return the test itself, with its own tolerance."""
        return ChangedTest.of(self._case, {}, self._lab)

    def changed(self, number: int) -> ChangedTest:
        """Return the test with the changes of a number."""
        if number not in self._made:
            self._made[number] = ChangedTest.of(self._case, self._ladder[number], self._lab)
        return self._made[number]

    def mutant_verdict(self, mutant: Defect) -> dict[str, Any]:
        """Return the score of a mutant and, if it survives, which changes kill it."""
        own = self.own
        if not mutant.applies(own.problem):
            return {"applies": False, "sampled": own.sampled}
        found, killed = own.score(mutant), []
        if not found.is_killed:
            killed = [self.changed(i).kills(mutant) for i in range(len(self._ladder))]
        excluded = not found.is_killed and not any(killed) and is_equivalent(self._case, mutant)
        return {
            "applies": True,
            "sampled": own.sampled,
            "effect": found.effect,
            "margins": found.margins,
            "killed": killed,
            "equivalent": excluded,
        }


def power_tasks(case: Case) -> list[Task]:
    """Return the tasks of scoring a test. Raises InvalidCase for a cache write."""
    check_scored(case.spec)
    changes = range(len(list(ladder(case))))
    return [
        *(Task(key=f"mutant/{name}", payload={"mutant": name}) for name in _NAMED),
        *(Task(key=f"{_CHANGE}/{i}", payload={_CHANGE: i}, cost_s=_CHANGE_COST) for i in changes),
    ]


def power_header(case: Case, versions: Mapping[str, str], shard: Shard = ALL) -> Header:
    """Return the header of a store of the tasks; ``versions``: of all that decides the verdicts."""
    text = case.to_json()
    return {
        "command": "power",
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        "case": json_value(case.changes()),
        "versions": dict(versions),
        "shard": str(shard),
    }


def power_report(case: Case, outcomes: Mapping[str, Outcome], seconds: float) -> MutationReport:
    """Return the report that ``power`` gives, from the outcomes of all tasks."""
    began = time.perf_counter() - seconds
    verdicts = {key: outcome.verdict or {} for key, outcome in outcomes.items()}
    of_mutants = {name: verdicts[f"mutant/{name}"] for name in _NAMED}
    scores = {
        name: Score(
            effect=float(verdict["effect"]),
            margins={n: float(v) for n, v in verdict["margins"].items()},
        )
        for name, verdict in of_mutants.items()
        if verdict["applies"]
    }
    changes = list(ladder(case))
    of_changes = [verdicts[f"{_CHANGE}/{number}"] for number in range(len(changes))]
    rows, heads = next(iter(of_mutants.values()))["sampled"]
    scored = Scored(
        case=case,
        mutants=[_NAMED[name] for name in scores],
        scores=scores,
        sampled=(rows, heads),
        changes=lambda number: {**changes[number], "atol": float(of_changes[number]["atol"])},
        kills=lambda number, name: bool(of_mutants[name]["killed"][number]),
        equivalent=lambda name: bool(of_mutants[name]["equivalent"]),
        passes=lambda number: bool(of_changes[number]["passes"]),
    )
    return scored.report(scored.remedies(ignore_step), began)


def power(case: Case | str, *, remedies: bool = True, **changes: Any) -> MutationReport:
    """Return which defects a test with the Case's data and tolerance detects.

    With ``remedies``, also search the cheapest change of the test that detects each survivor.
    """
    return measure_power(as_case(case, **changes), remedies=remedies)
