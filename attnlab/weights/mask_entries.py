"""The mask of a call, for the entries of an AttentionSetup."""

from collections.abc import Callable

import torch

from attnlab.tensors.sequence_mask import mask_of
from attnlab.tensors.visibility import SequenceMask
from attnlab.weights.setup import AttentionSetup


def visible_entries(setup: AttentionSetup) -> torch.Tensor:
    """Return which entries each row sees by their positions, [R, E] bool."""
    at, position = setup.entry_position, setup.position[:, None]
    if setup.call.visibility.is_plain:
        window = setup.call.sliding_window
        return (at <= position) & (at > position - window) if window else at <= position
    seen = _by_sequence(setup, lambda mask, rows: mask.visible(rows).double())
    return seen > 0


def biased_entries(setup: AttentionSetup) -> torch.Tensor | None:
    """Return what the mask adds to the score of each entry, [R, E] float64, or None for nothing."""
    if setup.call.qq_bias is None:
        return None
    return _by_sequence(setup, lambda mask, rows: mask.bias(rows))


def _by_sequence(
    setup: AttentionSetup,
    values_of: Callable[[SequenceMask, torch.Tensor], torch.Tensor | None],
) -> torch.Tensor:
    """Return values of rows and positions for the entries, 0 for entries outside the sequence.

    ``values_of`` returns [rows, seq_len] for the positions of some rows of one sequence.
    """
    at, seqs, position = (one.cpu() for one in (setup.entry_position, setup.seq, setup.position))
    found = torch.zeros(at.shape, dtype=torch.float64)
    for seq in seqs.unique().tolist():
        rows, mask = seqs == seq, mask_of(setup.call, seq)
        values, keys = values_of(mask, position[rows]), at[rows]
        assert values is not None
        inside = (keys >= 0) & (keys < mask.seq_len)
        found[rows] = values.double().gather(1, keys.clamp(0, mask.seq_len - 1)) * inside
    return found.to(setup.device)
