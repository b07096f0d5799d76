"""Defects of which keys a row attends to."""

import dataclasses

import torch

from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.attention_inputs import AttentionInputs, Predicted, score_error, scores_of
from attnlab.defects.defect import Defect, always, by_sight
from attnlab.defects.problem import Problem, RowSlice, visible


def _hide(sight: AttentionInputs, hidden: torch.Tensor) -> AttentionInputs:
    """Return the sight without the keys that are ``hidden``, [keys] or [rows, keys] bool."""
    return dataclasses.replace(sight, visible=sight.visible & ~hidden)


def _keys(sight: AttentionInputs) -> torch.Tensor:
    return torch.arange(sight.key.shape[0])


def _newest_dropped(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    return _hide(sight, _keys(sight) == len(_keys(sight)) - 1)


def _oldest_dropped(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    """Hide the oldest key that a row sees: the first of its window, or of the sequence."""
    return _hide(sight, sight.visible & (sight.visible.cumsum(1) == 1))


def _causal(by: int) -> "Defect":
    more = by > 0

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        position = sight.position + by
        window = problem.call.sliding_window
        seen = visible(position, sight.key.shape[0], window + by if window else 0)
        return dataclasses.replace(sight, visible=seen)

    return Defect(
        name="causal_plus_one" if more else "causal_minus_one",
        family="tokens",
        text="a row sees one token of its future"
        if more
        else "a row does not see its own token: the causal mask is strict",
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=by_sight(change),
        applies=always,
    )


def _window(name: str, text: str, seen_in: tuple[str, ...], width: int | None) -> Defect:
    """Return the defect of a window that is ``width`` keys wider, or without limit."""

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        window = 0 if width is None else problem.call.sliding_window + width
        seen = visible(sight.position, sight.key.shape[0], window)
        if width is not None and window == 0:
            seen = torch.zeros_like(seen)
        return dataclasses.replace(sight, visible=seen)

    return Defect(
        name=name,
        family="tokens",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=by_sight(change),
        applies=lambda problem: problem.call.sliding_window > 0,
    )


def _window_both_sides(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    away = (_keys(sight) - sight.position[:, None]).abs()
    return dataclasses.replace(sight, visible=away < problem.call.sliding_window)


def _last_partial_block_dropped(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    cached, size = problem.cached_len(row_slice.seq), problem.call.block_size
    keys = _keys(sight)
    return _hide(sight, (keys >= cached // size * size) & (keys < cached))


def _partition_dropped(last: bool) -> Defect:
    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        cached = problem.cached_len(row_slice.seq)
        if cached <= PARTITION_SIZE:
            return sight
        keys, edge = _keys(sight), (cached - 1) // PARTITION_SIZE * PARTITION_SIZE
        hidden = (keys >= edge) & (keys < cached) if last else keys < PARTITION_SIZE
        return _hide(sight, hidden)

    where = "last" if last else "first"
    return Defect(
        name=f"{where}_partition_dropped",
        family="tokens",
        text=f"the {where} partition of {PARTITION_SIZE} cached tokens is left out of the merge",
        seen_in=("ROCm/vllm #22", "flashinfer #50"),
        touches="cached",
        compute=by_sight(change),
        applies=_has_partitions,
        links=("short_scratch",),
    )


def _has_partitions(problem: Problem) -> bool:
    return any(problem.cached_len(seq) > PARTITION_SIZE for seq in range(problem.num_seqs))


def _partitions_unscaled(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Merge partitions by their sums alone, without the factor exp(own largest - overall largest)."""
    sight = problem.sight(row_slice)
    cached = problem.cached_len(row_slice.seq)
    if cached <= PARTITION_SIZE:
        return problem.mix(sight)
    scores = scores_of(sight)
    part = (_keys(sight).clamp(max=cached - 1)) // PARTITION_SIZE
    weights, sums = torch.zeros_like(scores), torch.zeros_like(scores[..., :1])
    sinks = None if sight.sinks is None else sight.sinks[:, None, None]
    for index in part.unique().tolist():
        own = part == index
        largest = scores[..., own].amax(-1, keepdim=True).clamp(min=-1e30)
        if index == 0 and sinks is not None:  # it counts in the first partition
            largest = torch.maximum(largest, sinks)
            sums += (sinks - largest).exp()
        weights[..., own] = (scores[..., own] - largest).exp()
    weights /= weights.sum(-1, keepdim=True) + sums
    value = sight.value.transpose(0, 1)
    output = weights @ value
    noise = sight.rounding.bound(weights, value, output, score_error(sight))
    if problem.kernel_like:
        output = output.to(problem.call.query.dtype).double()
    return Predicted(output=output.transpose(0, 1), noise=noise.transpose(0, 1))


def _reversed_order(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Compute the right thing with the keys in reverse, in float32."""
    sight = problem.sight(row_slice)
    turned = dataclasses.replace(
        sight,
        query=sight.query.float(),
        key=sight.key.flip(0).float(),
        value=sight.value.flip(0).float(),
        visible=sight.visible.flip(1),
        slopes=None,
    )
    if sight.slopes is not None:
        return problem.mix(sight)
    return problem.mix(turned)


def _context_only(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    ctx_len = problem.seq_len(row_slice.seq) - problem.query_len(row_slice.seq)
    return _hide(sight, _keys(sight) >= ctx_len)


def _new_only(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    ctx_len = problem.seq_len(row_slice.seq) - problem.query_len(row_slice.seq)
    return _hide(sight, _keys(sight) < ctx_len)


def _tail_attended(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    """Let the rows of a sequence see the slots behind its last cached token, up to the block's end."""
    cached, size = problem.cached_len(row_slice.seq), problem.call.block_size
    tail = torch.arange(cached, -(-cached // size) * size)
    reading, kv = problem.reading(row_slice.seq), problem.kv_of(row_slice.heads)
    key = problem.stored_key(reading, tail, kv)
    value = problem.stored_value(reading, tail, kv)
    seen = torch.ones(len(row_slice.tokens), len(tail), dtype=torch.bool)
    return dataclasses.replace(
        sight,
        key=torch.cat([sight.key, key]),
        value=torch.cat([sight.value, value]),
        visible=torch.cat([sight.visible, seen], 1),
    )


def _tail_leaked(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    """Multiply the values behind the last cached token by weights of 0, which NaN survives."""
    wide = _tail_attended(problem, row_slice, sight)
    behind = torch.arange(wide.key.shape[0]) >= sight.key.shape[0]
    key = wide.key.masked_fill(behind[:, None, None], 0.0)
    return dataclasses.replace(
        wide, key=key, visible=wide.visible & ~behind, leak=behind.expand_as(wide.visible)
    )


def _has_tail(problem: Problem) -> bool:
    size = problem.call.block_size
    return any(problem.cached_len(seq) % size for seq in range(problem.num_seqs))


TOKENS = (
    Defect(
        name="newest_token_dropped",
        family="tokens",
        text="the newest token of a sequence is not attended to",
        seen_in=("vllm #28490",),
        touches="all",
        compute=by_sight(_newest_dropped),
        applies=always,
    ),
    Defect(
        name="oldest_token_dropped",
        family="tokens",
        text="the oldest key that a row may see, of its window where it has one, is left out",
        seen_in=("sglang #32087",),
        touches="all",
        compute=by_sight(_oldest_dropped),
        applies=always,
    ),
    _causal(+1),
    _causal(-1),
    _window(
        "window_plus_one",
        "the window is one key wider",
        ("vllm #3385", "transformers #29623"),
        1,
    ),
    _window("window_minus_one", "the window is one key short", ("sglang #32087",), -1),
    _window(
        "window_ignored", "the window is ignored", ("vllm #30887", "rocm-libraries #12229"), None
    ),
    Defect(
        name="window_both_sides",
        family="tokens",
        text="the window reaches as far into the future as into the past",
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=by_sight(_window_both_sides),
        applies=lambda problem: problem.call.sliding_window > 0,
    ),
    Defect(
        name="last_partial_block_dropped",
        family="tokens",
        text="the cached tokens of a block that is not full are left out",
        seen_in=("vllm #39810",),
        touches="cached",
        compute=by_sight(_last_partial_block_dropped),
        applies=_has_tail,
    ),
    _partition_dropped(last=True),
    _partition_dropped(last=False),
    Defect(
        name="partitions_not_rescaled",
        family="tokens",
        text="partitions are merged without bringing them to one common maximum",
        seen_in=("vllm-project/flash-attention #176", "flashinfer #58"),
        touches="cached",
        compute=_partitions_unscaled,
        applies=_has_partitions,
    ),
    Defect(
        name="context_only",
        family="tokens",
        text="new tokens are not attended to, only the context is",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=by_sight(_context_only),
        applies=always,
    ),
    Defect(
        name="new_tokens_only",
        family="tokens",
        text="the context is not attended to, only new tokens are",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=by_sight(_new_only),
        applies=lambda problem: any(
            problem.seq_len(seq) > problem.query_len(seq) for seq in range(problem.num_seqs)
        ),
    ),
    Defect(
        name="tail_attended",
        family="tokens",
        text="the slots behind a sequence's last cached token, up to the end of its block, are attended to",
        seen_in=("nano-vllm #213", "torch-spyre #4517"),
        touches="cached",
        compute=by_sight(_tail_attended),
        applies=_has_tail,
    ),
    Defect(
        name="tail_leaked",
        family="tokens",
        text="values behind a sequence's last cached token are multiplied by 0, which NaN survives",
        seen_in=("vllm #641", "vllm #53856", "Dao-AILab/flash-attention #1745", "flashinfer #941"),
        touches="cached",
        compute=by_sight(_tail_leaked),
        applies=_has_tail,
    ),
    Defect(
        name="accumulation_order",
        family="tokens",
        text="keys are added up in another order: nothing is wrong",
        seen_in=("vllm #39146",),
        touches="all",
        compute=_reversed_order,
        applies=always,
        harmless=True,
    ),
)
