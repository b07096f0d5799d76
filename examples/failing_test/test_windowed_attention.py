"""An ordinary test of the kernel: it knows nothing of attnlab."""

import pytest
import torch
from windowed_attention import paged_attention

QUERY_LENS, SEQ_LENS = (5, 1, 17), (20, 40, 17)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    lens = torch.tensor([0, *QUERY_LENS], dtype=torch.int32)
    return {
        "query": torch.randn(sum(QUERY_LENS), 4, 32, dtype=torch.float16),
        "key_cache": torch.randn(12, 16, 2, 32, dtype=torch.float16),
        "value_cache": torch.randn(12, 16, 2, 32, dtype=torch.float16),
        "block_table": torch.randperm(12, dtype=torch.int32)[:9].view(3, 3),
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "query_start_loc": lens.cumsum(0).int(),
    }


def expected(given: dict[str, torch.Tensor], sliding_window: int) -> torch.Tensor:
    rows = []
    for seq, (query_len, seq_len) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        blocks = given["block_table"][seq].long()
        key, value = (
            given[name][blocks].flatten(0, 1)[:seq_len].float().repeat_interleave(2, 1)
            for name in ("key_cache", "value_cache")
        )
        start = int(given["query_start_loc"][seq])
        query = given["query"][start : start + query_len].float()
        scores = torch.einsum("qhd,khd->hqk", query, key) * 32**-0.5
        back = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        hidden = (back < 0) | (back >= sliding_window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(rows).half()


@pytest.mark.parametrize("sliding_window", [8, 64])
def test_paged_attention(sliding_window: int) -> None:
    given = batch()
    output = torch.empty_like(given["query"])
    paged_attention(**given, output=output, sliding_window=sliding_window)
    torch.testing.assert_close(output, expected(given, sliding_window), atol=2e-3, rtol=0)
