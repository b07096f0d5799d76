"""Pattern: what anyone can see in measured weights, in plain sentences, without an explanation."""

import torch

from attnlab.weights.description import numbers
from attnlab.weights.fit import Law
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.slot_owner import SlotOwners


def pattern(
    setup: AttentionSetup,
    measured: torch.Tensor,
    expected: torch.Tensor,
    owners: SlotOwners,
    law: Law | None,
) -> list[str]:
    """Return sentences about the weights that differ, [R, H, N]; rows must be finite."""
    bound = expected * setup.relative[:, None, None] + setup.fixed[:, None, None]
    off = (measured - expected).abs() > bound
    wrong = off.any(-1)
    if not bool(wrong.any()):
        return []
    sentences = [_where(setup, wrong), _sums(measured, wrong)]
    floor = 4 * setup.fixed[:, None, None]
    extra = off & (expected <= floor) & (measured.abs() > floor)
    missing = off & (measured.abs() <= floor)
    for mask, words in (
        (extra, " that must not count {have} a weight"),
        (missing, " {have} no weight"),
    ):
        if bool(mask.any()):
            sentences.append(
                _keys(setup, mask, measured if mask is extra else expected, owners, words)
            )
    if law is not None and abs(law.score - 1) > max(5 * law.score_error, 0.01):
        sentences.append(
            f"the log weight rises with the score by {law.score:.4g} ± {law.score_error:.1g}; 1 is right"
        )
    return sentences


def _where(setup: AttentionSetup, wrong: torch.Tensor) -> str:
    rows, heads = setup.rows[wrong.any(1)].tolist(), setup.heads[wrong.any(0)].tolist()
    words = f"wrong weights in {len(rows)} of {len(setup.rows)} rows ({numbers(rows)})"
    seqs = sorted(set(setup.seq[wrong.any(1)].tolist()))
    if len(seqs) < len(setup.seq.unique()):
        words += (
            f", of sequence {numbers(seqs)}"
            if len(seqs) == 1
            else f", of sequences {numbers(seqs)}"
        )
    if len(heads) < len(setup.heads):
        words += f", in {len(heads)} of {len(setup.heads)} heads ({numbers(heads)})"
    else:
        words += ", in every head" if len(heads) > 1 else ""
    return words


def _sums(measured: torch.Tensor, wrong: torch.Tensor) -> str:
    sums = measured.sum(-1)[wrong]
    least, most = float(sums.min()), float(sums.max())
    if most - least < 1e-3:
        return f"the weights of these rows sum to {least:.4g}"
    return f"the weights of these rows sum to {least:.4g} to {most:.4g}"


def _keys(
    setup: AttentionSetup,
    mask: torch.Tensor,
    weights: torch.Tensor,
    owners: SlotOwners,
    words: str,
) -> str:
    """Return how many keys a mask [R, H, N] has per row, and the heaviest of them."""
    counts = mask.any(1).sum(1)
    counts = counts[counts > 0]
    least, most = int(counts.min()), int(counts.max())
    # not torch.unravel_index, which imports sympy: seconds
    first, slot = divmod(int(torch.where(mask, weights, -1.0).argmax()), mask.shape[2])
    row, head = divmod(first, mask.shape[1])
    weight = float(weights[row, head, slot])
    seq, position = int(setup.seq[row]), int(setup.position[row])
    kind = owners.kind(slot, seq, position)
    at = int(owners.position[slot])
    in_memory = slot if setup.kept is None else int(setup.kept[slot])
    where = f"position {at}, {kind}" if at >= 0 else f"slot {in_memory}, {kind}"
    number = f"{least}" if least == most else f"{least} to {most}"
    what = ("key" if most == 1 else "keys") + words.format(have="has" if most == 1 else "have")
    return (
        f"in {len(counts)} rows, {number} {what}; the largest, {weight:.3g}, is row {int(setup.rows[row])}, "
        f"head {int(setup.heads[head])}, key at {where}"
    )
