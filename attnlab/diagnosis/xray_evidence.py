"""What an X-ray says about the explanations of an output: names that contradict it are withdrawn."""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.defects.attention_inputs import AttentionInputs, Predicted, scores_of, weights_of
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.withdrawal import withdraw
from attnlab.weights.evidence import compare
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.xray import XRay

# Families whose defects change how much each key counts, not which slot is read as that key.
_WEIGHTS = ("masks", "softmax", "scores", "sinks", "softcap")
_OVERFLOW = (
    "softcap_overflows"  # it depends on the size of the scores, which an X-ray may draw anew
)
_AGREES = 0.5  # share of the rows and heads that a name must predict


def needs_xray(diagnosis: Diagnosis) -> bool:
    """Answer whether an X-ray may change a diagnosis: nothing is named, or a name says how keys count."""
    explanations = diagnosis.explanations
    return not explanations or any(one.defect.family in _WEIGHTS for one in explanations)


def with_xray(diagnosis: Diagnosis, found: XRay) -> Diagnosis:
    """Return the diagnosis with an X-ray of the same kernel and call.

    A name that says how keys count is withdrawn if it does not predict the measured weights. If no name is
    left and the X-ray has a description, the status is "described".
    """
    diagnosis = dataclasses.replace(diagnosis, xray=found)
    if found.status in ("right", "precision", "described"):
        diagnosis = withdraw(
            diagnosis,
            lambda one: _contradicts(one, found),
            "excluded by run",
            "{names} is withdrawn: the measured attention weights are not those that it predicts",
        )
    if diagnosis.status == "unexplained" and found.status == "described":
        return dataclasses.replace(diagnosis, status="described")
    return diagnosis


def _contradicts(candidate: Candidate, found: XRay) -> bool:
    """Answer whether a name predicts other weights than were measured."""
    if candidate.defect.family not in _WEIGHTS or candidate.name == _OVERFLOW:
        return False
    predicted = _predicted(candidate, found.setup)
    if predicted is None:
        return False
    readable = found.weights.isfinite().all(-1)
    explained = compare(found.setup, found.weights, predicted).explained
    return float(explained[readable].double().mean()) < _AGREES if bool(readable.any()) else False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WeightProblem(Problem):
    """A problem that predicts the weights of the keys, [rows, heads, keys], in place of outputs."""

    def predict(self, inputs: AttentionInputs) -> Predicted:
        weights = weights_of(inputs, scores_of(inputs)).nan_to_num(0.0).transpose(0, 1)
        return Predicted(output=weights, bound=torch.zeros_like(weights))


def _predicted(candidate: Candidate, setup: AttentionSetup) -> torch.Tensor | None:
    """Return the weights of all slots under a defect in its scope, [R, H, N], or None if they do not belong
    to the positions of the sequence."""
    of_call = Problem.of_call(setup.call, setup.target, tuple(dict.fromkeys(setup.kernels)))
    values = {field.name: getattr(of_call, field.name) for field in dataclasses.fields(Problem)}
    problem = _WeightProblem(**values)
    weights = torch.zeros(len(setup.rows), len(setup.heads), setup.num_slots, dtype=torch.float64)
    starts = problem.row_starts()
    for seq in setup.seq.unique().tolist():
        rows = torch.nonzero(setup.seq == seq).flatten()
        row_slice = RowSlice(seq=seq, tokens=setup.rows[rows] - starts[seq], heads=setup.heads)
        inside = candidate.scope is None or seq in candidate.scope.sequences
        compute = candidate.defect.compute if inside else Problem.correct
        output = compute(problem, row_slice).output
        if output.shape[2] != problem.seq_len(seq):
            return None
        slots = _slots(problem, setup, seq)
        weights[rows] = weights[rows].index_add(2, slots, output)
    return weights


def _slots(problem: Problem, setup: AttentionSetup, seq: int) -> torch.Tensor:
    """Return the slot of each position of a sequence, as the X-ray numbers them, [seq_len] int64."""
    call, size = setup.call, setup.call.block_size
    positions, ctx_len = (
        torch.arange(problem.seq_len(seq)),
        problem.seq_len(seq) - problem.query_len(seq),
    )
    blocks = (
        call.block_table[seq]
        .long()
        .cpu()[(positions // size).clamp(max=call.block_table.shape[1] - 1)]
    )
    new = setup.cache_slots + problem.row_starts()[seq] + positions - ctx_len
    return torch.where(positions < problem.cached_len(seq), blocks * size + positions % size, new)
