"""The values of op arguments that a Case names (:mod:`attnlab.case.op_arguments`), from its lengths and seed.

The call of the op and the reference both take them from here.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths

QUERY_SCALE = 0.125  # of an FP8 query, whose elements are at most 448
OUTPUT_SCALE = 0.03125  # of an FP8 output
_RANGES = 3


def causal_seqs(lengths: Lengths) -> torch.Tensor:
    """Return which sequences are causal, [num_seqs] int32: every second one, the first included."""
    return (torch.arange(len(lengths.query_lens)) % 2 == 0).int()


def ranges(lengths: Lengths) -> torch.Tensor:
    """Return bidirectional ranges of positions, [num_seqs, 3, 2] int32; first and last are inclusive.

    The first begins in the context and ends inside the new tokens, the second has the rest of them; it is
    empty (first = last) if nothing is left. The third is unused: (0, 0).
    """
    found = torch.zeros(len(lengths.query_lens), _RANGES, 2, dtype=torch.int32)
    for seq, (query_len, ctx_len) in enumerate(
        zip(lengths.query_lens, lengths.ctx_lens, strict=True)
    ):
        middle, last = ctx_len + query_len // 2, ctx_len + query_len - 1
        found[seq, 0] = torch.tensor([max(0, ctx_len - 9), middle])
        if middle + 1 < last:
            found[seq, 1] = torch.tensor([middle + 1, last])
    return found


def prefix_lens(lengths: Lengths) -> torch.Tensor:
    """Return the prefix that every row of a sequence sees, [num_seqs] int32: half of the context."""
    return torch.tensor([ctx_len // 2 for ctx_len in lengths.ctx_lens], dtype=torch.int32)


def tree_bias(case: Case) -> torch.Tensor:
    """Return the bias of a row for the key of a new token, [n, n] float32; n is the largest query_len.

    It is drawn from the seed, and -inf for some tokens before the row.
    """
    size = max(case.lengths.query_lens)
    generator = torch.Generator().manual_seed(case.seed + 6)
    bias = torch.randn(size, size, generator=generator)
    away = torch.arange(size)[:, None] - torch.arange(size)
    return bias.masked_fill((away > 0) & (away % 3 == 1), -torch.inf)


def per_token_head(tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [..., head_size] quantised to ``dtype``, and the scale of each [...] float32.

    As triton_reshape_and_cache_flash_per_token_head_quant does (vLLM 0.33.0).
    """
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (tokens.float().abs().amax(-1) / most).clamp(min=1e-6)
    numbers = tokens.float() / scale[..., None]
    if dtype == torch.int8:
        numbers = torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5).trunc()
    return numbers.nan_to_num(0.0).to(dtype), scale


def latent_size(case: Case) -> int:
    """Return the width of the values in a latent cache: eight ninths of a multiple of 9, else all."""
    return case.head_size // 9 * 8 if case.head_size % 9 == 0 else case.head_size
