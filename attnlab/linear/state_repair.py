"""Find the changed expression of a kernel with which an op of linear attention is right.

The search and its confirmation are those of softmax attention (:mod:`attnlab.diagnosis.lines`): an edit
of one expression is stated only if it makes every case right that is wrong without it, at least ten further
ones, and leaves all others right.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.claims import RepairClaim
from attnlab.diagnosis.lines import lines_of_accesses, located
from attnlab.diagnosis.repair_check import Proof, Proofs, claim_among, probe_of
from attnlab.diagnosis.trials import Judge, Limit, Repair, Trials, TrialTarget
from attnlab.kernels.triton.kernel_text import called_functions
from attnlab.kernels.triton.launch_plan import recording_launches
from attnlab.kernels.triton.probe import LaunchLog, Probe, probing
from attnlab.kernels.triton.replay import Replay
from attnlab.kernels.triton.run_log import TooLong, other_outside
from attnlab.linear.run import Runner, StateOutput, deviation
from attnlab.linear.state_claims import Trial

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


def is_repaired(trial: Trial, repair: Repair, run: Runner) -> bool:
    """Answer whether a trial is right with an edit."""
    return _TrialProof(case=trial.case, trial=trial, runner=run).accepts(repair)


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
    launches: list[LaunchLog],
    contents: torch.Tensor,
    own: torch.Tensor | None,
    judge: Judge,
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

    def run(
        self, slots: str, repair: Repair | None, condition: set[bool]
    ) -> tuple[bool, torch.Tensor] | None:
        """Run the trial's call as :meth:`Proof.run` says."""
        try:
            with probing(probe_of(repair, condition)):
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
