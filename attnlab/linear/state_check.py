"""Check ops of linear attention: run hostile cases, and say what is wrong."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import (
    AttnLabError,
    InvalidCase,
    KernelFailed,
    KernelRejected,
    Unavailable,
    Unsupported,
)
from attnlab.case.fields import refuse
from attnlab.case.shown import Document, Shown, json_fields, json_value
from attnlab.diagnosis.claims import Claim, RepairClaim
from attnlab.diagnosis.lines import lines_of_accesses, located
from attnlab.diagnosis.repair_check import Proof, Proofs, claim_among
from attnlab.diagnosis.trials import Judge, Limit, Repair, Trials, TrialTarget
from attnlab.kernels.triton.kernel_text import called_functions
from attnlab.kernels.triton.launch_plan import recording_launches
from attnlab.kernels.triton.probe import LaunchLog, Probe, probing
from attnlab.kernels.triton.replay import Replay
from attnlab.kernels.triton.run_log import TooLong, other_outside
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.library.op import StateOp, package_of, state_ops_of
from attnlab.linear.run import Runner, SourceRunner, StateOutput, deviation
from attnlab.linear.state_case import StateCase, variants_of
from attnlab.linear.state_claims import (
    StateClaim,
    StateWeights,
    Trial,
    WeightFacts,
    explain,
    facts_of,
    fitting_scopes,
    measure,
    shows,
    weight_facts,
)

# Find the changed expression of a kernel with which an op of linear attention is right.
#
# The search and its confirmation are those of softmax attention (:mod:`attnlab.diagnosis.lines`): an edit
# of one expression is stated only if it makes every case right that is wrong without it, at least ten further
# ones, and leaves all others right.

_SUBJECT = "outputs and states are"
_LIMIT = Limit(edits=4000, seconds=40.0)
_MOST = 4  # edits that are compared
_LEAST = 0.75  # of the wrong trials, which an edit makes right


def find_repair(
    trials: Sequence[Trial], others: Sequence[Trial], run: Runner
) -> tuple[RepairClaim, list[Trial]] | None:
    """Return the edit with which wrong ``trials`` are right, and those; None if none is confirmed.

    ``others``: right trials, which must stay right. The edits are tried on the smallest wrong one. An op may
    have another fault, so that a few trials may stay wrong.
    """
    wrong = sorted(trials, key=lambda one: len(one.call.query))
    with other_outside(float("nan")), probing(Probe(records=True)) as probe:
        ran = run(wrong[0].call)
    target = _target(wrong[0], ran, probe.launches)
    if target is None or bool(target.right.all()):
        return None
    proofs = [_TrialProof(case=one.case, trial=one, runner=run) for one in (*wrong, *others)]
    searched = Trials(
        replay=target.replay,
        judge=target.judge,
        right=target.right,
        holds=lambda repair: any(one.accepts(repair) for one in proofs[1:3]),
    )
    every, doubted = searched.kernels, _doubted(wrong[0], ran, probe.launches)
    for is_first in (True, False):
        searched.kernels = [one for one in every if (one.function.fn in doubted) == is_first]
        by_access = lines_of_accesses(searched, [one.text() for one in ran.log.outside.values()])
        repairs = located(searched, by_access, _LIMIT).repairs if searched.kernels else ()
        found = _confirmed(proofs[: len(wrong)], proofs[len(wrong) :], repairs)
        if found is not None:
            return found
    return None


def _confirmed(
    wrong: Sequence["_TrialProof"], others: Sequence["_TrialProof"], repairs: Sequence[Repair]
) -> tuple[RepairClaim, list[Trial]] | None:
    """Return the claim of the edit that makes most wrong trials right, with these."""
    passed = {one: [proof for proof in wrong if proof.accepts(one)] for one in repairs[:_MOST]}
    most = max(map(len, passed.values()), default=0)
    best = [one for one in passed if len(passed[one]) == most]
    if most < max(2, _LEAST * len(wrong)):
        return None
    own = passed[best[0]]
    claim = claim_among(lambda: Proofs(own=[*own, *others]), best)
    if claim is None:
        return None
    return dataclasses.replace(claim, subject=_SUBJECT), [proof.trial for proof in own]


def _doubted(trial: Trial, ran: StateOutput, launches: list[LaunchLog]) -> set[object]:
    """Return the functions of launches that right states do not depend on, if outputs are wrong."""
    states = _states_target(trial, ran, launches)
    if states is None or not bool(states.right.all()):
        return set()
    used = {at for unit in states.replay.units for at, _ in unit.programs}
    rest = [one for at, one in enumerate(launches) if at not in used]
    return {one.fn for launch in rest for one in called_functions(launch.function)}


def _target(trial: Trial, ran: StateOutput, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the output, or the states if every output is right, as a tensor that launches write."""

    def of_output(output: torch.Tensor) -> torch.Tensor:
        return ~deviation(trial.call, output, ran.states, trial.right).rows

    if not bool(of_output(ran.output).all()):
        return _fitting(launches, ran.output, ran.output, of_output)
    return _states_target(trial, ran, launches)


def _states_target(trial: Trial, ran: StateOutput, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the states of all slots, or of the sequences, as a tensor that launches write."""
    call = trial.call
    slots = torch.arange(len(ran.states)) if call.op.states else call.tables[:, 0]
    shape = ran.states[slots].shape

    def of_states(is_turned: bool) -> Judge:
        def judge(found: torch.Tensor) -> torch.Tensor:
            sizes = (shape[3], shape[2]) if is_turned else shape[2:]
            parts = found.unflatten(2, sizes)
            states = ran.states.clone()
            states[slots] = (parts.mT if is_turned else parts).to(states.dtype)
            return ~deviation(call, ran.output, states, trial.right).slots[slots]

        return judge

    for is_turned, stored in enumerate((ran.states[slots], ran.states[slots].mT)):
        own = ran.states if call.op.states else None
        found = _fitting(launches, stored.flatten(2), own, of_states(bool(is_turned)))
        if found is not None:
            return found
    return None


def _fitting(
    launches: list[LaunchLog], contents: torch.Tensor, own: torch.Tensor | None, judge: Judge
) -> TrialTarget | None:
    """Return the target that is the argument with some contents, [rows, heads, n], the last one that is
    written; ``own``: the tensor itself, if it is known."""
    arguments = [
        value
        for launch in reversed(launches)
        for value in launch.arguments.values()
        if isinstance(value, torch.Tensor) and value.numel() == contents.numel()
    ]
    for one in arguments:
        if own is not None and one.data_ptr() != own.data_ptr():
            continue
        view = one.as_strided(contents.shape, contents.contiguous().stride())
        if one.is_contiguous() and torch.equal(
            view.nan_to_num(), contents.to(view.dtype).nan_to_num()
        ):
            replay = Replay(launches, contents.shape, view)
            return TrialTarget(replay=replay, judge=judge, right=judge(view))
    return None


@dataclass(slots=True, kw_only=True, eq=False)
class _TrialProof(Proof):
    """A trial that runs again with an edit; the memory outside of all tensors holds NaN."""

    trial: Trial
    runner: Runner
    has_slots: bool = False

    def run(self, slots: str, probe: Probe) -> tuple[bool, torch.Tensor] | None:
        """Run the trial's call as :meth:`Proof.run` says."""
        try:
            with probing(probe):
                ran = self.runner(self.trial.call)
        except TooLong:
            return False, torch.empty(0)
        except AttnLabError:
            return None
        again = dataclasses.replace(self.trial, found=ran)
        parts = (ran.output, ran.states)
        return not again.is_wrong, torch.cat([one.flatten().double() for one in parts])[:, None]

    def similar(self) -> Iterator[Proof]:
        """Yield the case with other data."""
        for seed in range(1, 11):
            case = self.case.replace(seed=self.case.seed + 100 * seed)
            trial = Trial.of(case, self.runner)
            yield _TrialProof(case=case, trial=trial, runner=self.runner)

    def launches(self) -> list[dict[str, Any]]:
        """Return the numbers among the arguments of each launch."""
        with recording_launches() as found:
            try:
                self.runner(self.trial.call)
            except AttnLabError:
                return []
        return [launch.values for launch in found]


_FEWEST = 3  # wrong trials that an explanation rests on, if cases with other data can give them
_MOST_TRIES = 24
_Stated = Claim | RepairClaim
_OUTSIDE = "a kernel accesses memory outside of its tensors"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StateFinding(Shown):
    """One fault of an op of linear attention.

    - ``kind``: "wrong_output", "wrong_state" (every output is right) or "fails". ``title``: what is known of
      it. ``is_rule``: a rule gives the numbers of all cases that show it; if not, ``title`` says what they
      have in common. ``case``: a small case that shows it. ``reasons``: the hostile cases that do.
    - ``evidence``: the largest error of ``case``, as a multiple of its rounding bound.
    """

    op: str
    kind: str
    title: str
    is_rule: bool
    case: StateCase
    reasons: tuple[str, ...]
    evidence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as values of strict JSON."""
        return {**json_fields(self), "run": self.case.to_cli()}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StateReport(Document, Shown):
    """What hostile cases found in the ops of linear attention of a source.

    - ``ops``: the number of cases of each op that ran. ``left_out``: limits that an op states, and what no
      case covers. ``not_run``: what could not run here.
    """

    source: str
    ops: dict[str, int]
    findings: tuple[StateFinding, ...]
    left_out: tuple[str, ...]
    not_run: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> int:
        """Return 1 for findings, 3 if an op could not run, else 0."""
        return 1 if self.findings else 3 if self.not_run else 0


def check_states(
    library: str,
    source: Path | str | None = None,
    *,
    ops: Sequence[str] | None = None,
    platform: str = "sm_90",
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> StateReport:
    """Run the hostile cases of the ops of linear attention of a library.

    ``source``: a wheel, an sdist or a checkout; None is the installed package. ``ops``: names, None for all.
    Raises InvalidCase for a wrong argument, Unavailable if there is no such source.
    """
    records = {op.name: op for op in state_ops_of(library)}
    for name in ops or ():
        if name not in records:
            refuse("op", f"one of {', '.join(records)}", name)
    found = find_source(source, package_of(library))
    began = time.perf_counter()
    results = []
    for i, name in enumerate(ops or records):
        on_case(i, len(ops or records))
        results.append(check_op(records[name], found, platform))
    return StateReport(
        source=found.text(),
        ops={one.op.name: one.ran for one in results},
        findings=tuple(finding for one in results for finding in one.findings),
        left_out=tuple(text for one in results for text in one.left_out),
        not_run=tuple(text for one in results for text in one.not_run),
        seconds=time.perf_counter() - began,
    )


@dataclass(slots=True, kw_only=True)
class OpResult:
    """What the cases of one op found; as of :class:`StateReport`."""

    op: StateOp
    ran: int = 0
    findings: list[StateFinding] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    not_run: list[str] = dataclasses.field(default_factory=list)


def tried(case: StateCase, run: Runner) -> Trial | KernelRejected | Unavailable:
    """Run a case; return the trial, or what the op raises, or why it cannot run."""
    try:
        return Trial.of(case, run)
    except (KernelRejected, Unavailable) as error:
        return error


def check_op(op: StateOp, source: Source, platform: str = "sm_90") -> OpResult:
    """Run the hostile cases of an op of a source."""
    run = SourceRunner(source=source, platform=platform)
    result = OpResult(op=op, left_out=[f"{op.name}: {k}, {v}" for k, v in op.left_out.items()])
    trials, reasons, failures = [], {}, dict[str, list[tuple[str, StateCase]]]()
    for reason, case in variants_of(op).items():
        found = tried(case, run)
        if isinstance(found, Trial):
            trials.append(found)
            reasons[id(found)] = reason
        elif isinstance(found, KernelFailed):
            failures.setdefault(str(found), []).append((reason, case))
        elif isinstance(found, Unavailable):
            lines = result.left_out if isinstance(found, Unsupported) else result.not_run
            lines.append(f"{op.name}, {reason}: {found}")
            continue
        else:
            result.left_out.append(f"{op.name}, {reason}: {found}")
        result.ran += 1
    for text, shown in failures.items():
        result.findings.append(_failure(op, text, shown))
    for claim, explained in statements(trials, run):
        result.findings.append(_finding(op, claim, explained, reasons, run))
    return result


def statements(trials: Sequence[Trial], run: Runner) -> Iterator[tuple[_Stated, list[Trial]]]:
    """Yield what is stated of the wrong trials, each claim with those that it is about.

    A claim is about at least two cases: where fewer are wrong, the same with other data run, too. What no
    rule explains, and what accesses memory outside of tensors, an edit of the source may explain.
    """
    wrong = [one for one in trials if one.is_wrong]
    more = list(_with_other_data(wrong, run)) if 0 < len(wrong) < _FEWEST else []
    every = [*trials, *more]
    claims: list[tuple[_Stated, list[Trial]]]
    claims, left = explain(every)  # type: ignore[assignment]
    if len(left) == 1:
        further = list(_with_other_data(left, run))
        every += further
        again, left = explain([*(one for one in trials if not one.is_wrong), *left, *further])
        claims += again
    claims, left = _without_chance(claims, left)
    outside = [one for _, explained in claims for one in explained if one.found.log.outside]
    if left or outside:
        found = find_repair([*left, *outside], [one for one in every if not one.is_wrong], run)
        if found is not None:
            left = [one for one in left if one not in found[1]]
            claims = [found, *((a, b) for a, b in claims if not {*b} <= {*found[1]})]
    yield from claims
    if left:
        yield facts_of(left, every, run), left


def _without_chance(
    claims: Sequence[tuple[_Stated, list[Trial]]], left: list[Trial]
) -> tuple[list[tuple[_Stated, list[Trial]]], list[Trial]]:
    """Return the claims without those that as many cases refute as confirm, whose trials are left, too.

    A trial refutes a rule if no claim explains it, and the rule would show in it. A right one does so only if
    a wrong one does, too: a fault may have a condition.
    """
    kept, dropped = list[tuple[_Stated, list[Trial]]](), list[Trial]()
    for claim, explained in claims:
        assert isinstance(claim, StateClaim)
        wrong = sum(shows(one, claim.rule) for one in left)
        if wrong and wrong + claim.right >= len(explained):
            dropped += explained
        else:
            kept.append((dataclasses.replace(claim, wrong=wrong), explained))
    return kept, [*left, *dropped]


def _with_other_data(trials: Sequence[Trial], run: Runner) -> Iterator[Trial]:
    """Yield trials of the same cases with other data, with sequences in another order, and shorter ones."""
    for one in trials:
        lens = one.case.query_lens
        halves = tuple(-(-n // 2) for n in lens)
        changes = [
            {"seed": one.case.seed + seed, "query_lens": lengths}
            for seed, lengths in enumerate((lens, lens[::-1], halves), 1)
        ]
        yield from _trials(_changed(one.case, changes), run)


def _trials(cases: Iterable[StateCase], run: Runner) -> Iterator[Trial]:
    """Yield the trials of the cases that run."""
    for case in cases:
        with suppress(AttnLabError):
            yield Trial.of(case, run)


def _changed(case: StateCase, changes: Iterable[dict[str, Any]]) -> Iterator[StateCase]:
    """Yield a case with each of several changes that are allowed."""
    for one in changes:
        with suppress(InvalidCase):
            yield case.replace(**one)


def _failure(op: StateOp, text: str, shown: list[tuple[str, StateCase]]) -> StateFinding:
    return StateFinding(
        op=op.name,
        kind="fails",
        title=f"the op raises: {text}",
        is_rule=False,
        case=shown[0][1],
        reasons=tuple(reason for reason, _ in shown),
        evidence=text,
    )


def _finding(
    op: StateOp, claim: _Stated, explained: list[Trial], reasons: dict[int, str], run: Runner
) -> StateFinding:
    """Return the finding of a claim, with a small case."""
    small = min(explained, key=lambda one: sum(one.case.query_lens))
    small = _shrunk(small, claim, run)
    is_rule = not isinstance(claim, WeightFacts)
    known = claim.text
    if isinstance(claim, WeightFacts):
        known = f"no rule explains it: {known}" if claim.said else "no rule explains it"
    outside = next((t for one in explained for t in one.found.log.outside.values()), None)
    if outside is not None and not isinstance(claim, RepairClaim):
        as_if = "the numbers here are as if: " if is_rule else ""
        known = f"{_OUTSIDE} ({outside.text()}); {as_if}{known}"
    return StateFinding(
        op=op.name,
        kind=small.kind,
        title=known,
        is_rule=is_rule,
        case=small.case,
        reasons=tuple(reasons[id(one)] for one in explained if id(one) in reasons),
        evidence=small.evidence,
    )


def _shrunk(trial: Trial, claim: _Stated, run: Runner) -> Trial:
    """Return a trial with fewer or shorter sequences that is still explained; without a rule, still wrong."""
    tries, is_smaller = 0, True
    while is_smaller and tries < _MOST_TRIES:
        is_smaller = False
        for case in _smaller(trial.case):
            tries += 1
            try:
                one = Trial.of(case, run)
            except AttnLabError:
                continue
            if one.is_wrong and _is_explained(one, claim, run):
                trial, is_smaller = one, True
                break
    return trial


def _is_explained(trial: Trial, claim: _Stated, run: Runner) -> bool:
    """Answer whether a claim explains a wrong trial, too; what is only described is not asked."""
    if isinstance(claim, StateClaim):
        return claim.scope in fitting_scopes(trial, claim.rule)
    if not isinstance(claim, RepairClaim):
        return True
    return _TrialProof(case=trial.case, trial=trial, runner=run).accepts(claim.repair)


def _smaller(case: StateCase) -> Iterator[StateCase]:
    """Yield cases that are smaller by one step."""
    lens = case.query_lens
    steps: list[dict[str, Any]] = [
        {"query_lens": lens[:i] + lens[i + 1 :]} for i in range(len(lens)) if len(lens) > 1
    ]
    steps += [
        {"query_lens": (*lens[:i], shorter, *lens[i + 1 :])}
        for i, n in enumerate(lens)
        for shorter in dict.fromkeys((n // 2, n - 1))
        if 0 < shorter < n
    ]
    if case.num_v_heads > 1:
        steps.append({"num_v_heads": 1, "num_k_heads": 1})
    yield from _changed(case, steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StateXRay(Shown):
    """The effective weights of a case.

    - ``status``: "right" or "wrong". ``sentences``: what is wrong, then what the weights show. ``worst``: the
      largest error of an output or a state, ``worst_weight`` of a weight, as multiples of their bounds.
    """

    case: StateCase
    source: str
    status: str
    sentences: tuple[str, ...]
    worst: float
    worst_weight: float
    weights: StateWeights

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values of strict JSON, with the sizes of the weights of each row by source."""
        sizes = self.weights.by_source()
        rows = [
            {"row": row, "sources": json_value(sources)}
            for row, sources in enumerate(sizes[:_MOST_ROWS].tolist())
        ]
        found = json_fields(self, without=("weights",))
        return {**found, "runs": self.weights.runs, "rows": rows}


_MOST_ROWS = 64


def xray_state(case: StateCase, source: Path | str | None = None) -> StateXRay:
    """Measure the weights of a case on the op of a source, None for the installed package.

    Where they are wrong, the same with other data and the hostile cases of the op confirm what is stated.
    Raises Unavailable if there is no such source, and what the op raises.
    """
    op = case.record
    found = find_source(source, package_of(op.library))
    run = SourceRunner(source=found, platform=case.platform)
    trial = Trial.of(case, run)
    weights = measure(trial.call, run)
    sentences = ["every output, state and weight is right, within rounding"]
    is_right = not trial.is_wrong and weights.deviation.is_right
    if not is_right:
        hostile = variants_of(op).values()
        others = [*_with_other_data([trial], run), *_trials(hostile, run)]
        about = [
            claim.text
            for claim, explained in statements([trial, *others], run)
            if trial in explained
        ]
        sentences = [one for one in about if one] or ["wrong, and nothing is common to such cases"]
        sentences += [text for text in weight_facts(weights) if text not in sentences[0]]
        outside = [one.text() for one in trial.found.log.outside.values()]
        sentences[:0] = [f"{_OUTSIDE} ({outside[0]})"] if outside else []
    return StateXRay(
        case=case,
        source=found.text(),
        status="right" if is_right else "wrong",
        sentences=tuple(sentences),
        worst=trial.deviation.worst,
        worst_weight=weights.deviation.worst,
        weights=weights,
    )
