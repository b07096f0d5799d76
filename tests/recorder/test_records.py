"""Calls of a library's ops are read as their records state; what a record would not pass is unknown."""

import pytest
import torch

from attnlab.recorder.arguments import BoundArguments, RecordedOp, call_of_reading
from attnlab.recorder.failing_side import Comparison, judge
from attnlab.recorder.records import library_ops
from attnlab.recorder.watch import Watch
from attnlab.tensors.call import KernelCall, Origin

_OPS = {op.name: op for op in library_ops()}
_EXTEND = "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd"
_FLAT = "lmdeploy.pytorch.kernels.cuda.flashattention.flash_attn_varlen_func"
_PAGED = "lmdeploy.pytorch.kernels.cuda.pagedattention.flash_attn_with_kvcache"


def _call(op: RecordedOp, given: dict[str, object]) -> KernelCall:
    reading = op.read(BoundArguments(given, {}))
    assert not reading.why_not
    return call_of_reading(reading, Origin(op=op.name), op=op.op)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of one sequence, [rows, heads, size], whose last row sees all keys."""
    rows, keys = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    hidden = torch.ones(rows, keys).tril(keys - rows) == 0
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def _extend(**changes: object) -> tuple[dict[str, object], torch.Tensor]:
    """Return arguments of SGLang's extend op with contexts of 3 and 5 tokens, and the right output."""
    torch.manual_seed(0)
    slots, lens = torch.tensor([7, 2, 9, 0, 5, 11, 3, 8]), [(3, 2), (5, 4)]
    query, key, value = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    cache = torch.randn(2, 12, 2, 16)
    parts, first, begin = [], 0, 0
    for context, new in lens:
        old = cache[:, slots[first : first + context]]
        rows = slice(begin, begin + new)
        parts.append(
            _attention(
                query[rows], torch.cat([old[0], key[rows]]), torch.cat([old[1], value[rows]])
            )
        )
        first, begin = first + context, begin + new
    given = {
        **{"q_extend": query, "k_extend": key, "v_extend": value, "o_extend": torch.cat(parts)},
        **{"k_buffer": cache[0], "v_buffer": cache[1], "kv_indices": slots},
        **{"qo_indptr": torch.tensor([0, 2, 6]), "kv_indptr": torch.tensor([0, 3, 8])},
        **{"custom_mask": None, "is_causal": True, "mask_indptr": None, "max_len_extend": 4},
        **{"k_scale": 1.0, "v_scale": 1.0, "sm_scale": None, "sliding_window_size": -1},
    }
    return {**given, **changes}, torch.cat(parts)


def test_context_slots_are_completed_by_the_new_tokens() -> None:
    given, output = _extend()
    call = _call(_OPS[_EXTEND], given)
    assert call.op == "sglang_extend_attention"
    assert call.seq_lens.tolist() == [5, 9]
    assert not call.unknown_arguments
    compared = Comparison(actual=output, expected=output, atol=0.0, rtol=0.0, passed=True)
    assert judge(call, compared).side == "neither"


def test_a_wrong_key_of_the_context_is_seen() -> None:
    given, output = _extend()
    given["kv_indices"] = torch.tensor([7, 2, 1, 0, 5, 11, 3, 8])
    call = _call(_OPS[_EXTEND], given)
    compared = Comparison(actual=output, expected=output + 1, atol=1e-3, rtol=0.0, passed=False)
    assert judge(call, compared).diagnosis.is_wrong


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_mask_of_bytes_is_read_if_it_is_the_causal_one(is_causal: bool) -> None:
    masks = [torch.ones(2, 5).tril(3).flatten(), torch.ones(4, 9).tril(5).flatten()]
    mask = torch.cat(masks).bool()
    mask[1] &= is_causal
    given, _ = _extend(custom_mask=mask, mask_indptr=torch.tensor([0, 10, 46]))
    call = _call(_OPS[_EXTEND], given)
    assert call.unmodelled == (() if is_causal else ("custom_mask",))
    assert not call.unknown_arguments


@pytest.mark.parametrize(("lens", "unknown"), [([2, 4], ()), ([2, 3], ("extend_seq_lens_cpu",))])
def test_a_list_of_numbers_is_compared_with_that_of_the_record(
    lens: list[int], unknown: tuple[str, ...]
) -> None:
    """SGLang's Triton backend passes the lengths of the new tokens as a list, too."""
    given, _ = _extend(extend_seq_lens_cpu=lens)
    found = _call(_OPS[_EXTEND], given).unknown_arguments
    assert tuple(one.partition("=")[0] for one in found) == unknown


def test_an_argument_that_no_record_has_is_unknown() -> None:
    given, _ = _extend(xai_temperature_len=5)
    assert _call(_OPS[_EXTEND], given).unknown_arguments == ("xai_temperature_len=5",)


@pytest.mark.parametrize("layout", ["hsd", "shd"])
def test_keys_by_head_are_read_in_the_layout_that_the_call_states(layout: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    both = [one.transpose(0, 1).contiguous() if layout == "hsd" else one for one in (key, value)]
    starts = {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 9])}
    given = {"q": query, "k": both[0], "v": both[1], **starts, "causal": True, "kv_layout": layout}
    reading = _OPS[_FLAT].read(BoundArguments(given, {"kv_layout": "hsd"}))
    assert reading.result is not None
    output = _attention(query, key, value)
    reading.fields["output"] = reading.result(output)[0]
    call = call_of_reading(reading, Origin(op=_FLAT), op="lmdeploy_flash_attention")
    compared = Comparison(actual=output, expected=output, atol=0.0, rtol=0.0, passed=True)
    assert judge(call, compared).diagnosis.status == "nothing wrong"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_cache_of_integers_is_read_as_its_numbers(bits: int) -> None:
    torch.manual_seed(0)
    shape = (3, 16, 2, 16 if bits == 8 else 8)
    stored = torch.randint(0, 256, shape, dtype=torch.uint8)
    scales = torch.stack([torch.full(shape[:3], 0.5), torch.full(shape[:3], 7.0)], -1)
    given = {
        **{"q": torch.randn(1, 4, 16), "k_cache": stored, "v_cache": stored},
        **{"k_scales_zeros": scales, "v_scales_zeros": scales, "quant_policy": bits},
        **{"cache_seqlens": torch.tensor([20]), "page_table": torch.tensor([[2, 0]])},
    }
    reading = _OPS[_PAGED].read(BoundArguments(given, {}))
    numbers = stored if bits == 8 else torch.cat([stored & 15, stored >> 4], -1)
    assert torch.equal(reading.fields["key_cache"], (numbers.float() - 7) * 0.5)
    assert "the cache's numbers" in reading.unknown


@pytest.mark.parametrize("gap", [0, 1])
def test_a_table_of_requests_and_new_rows_are_read_as_the_record_has_them(gap: int) -> None:
    """LightLLM's op gets lengths, and the first row of each sequence, which the lengths state, too."""
    torch.manual_seed(0)
    query, cache = torch.randn(5, 4, 16), torch.randn(2, 12, 2, 16)
    table = torch.tensor([[1, 7, 3, 0], [9, 2, 8, 0], [4, 10, 6, 5]], dtype=torch.int32)
    lens, requests = [(1, 2), (1, 3)], [2, 0]
    parts, begin = [], 0
    for (context, new), request in zip(lens, requests, strict=True):
        key, value = cache[:, table[request, : context + new].long()]
        parts.append(_attention(query[begin : begin + new], key, value))
        begin += new
    given = {
        **{"q": query, "k": cache[0], "v": cache[1], "o": torch.cat(parts)},
        **{"b_start_loc": torch.tensor([0, 2 + gap]), "b_seq_len": torch.tensor([3, 4])},
        **{"b_prompt_cache_len": torch.tensor([1, 1]), "b_req_idx": torch.tensor(requests)},
        **{"max_input_len": 3, "req_to_token_indexs": table},
    }
    name = next(name for name, op in _OPS.items() if op.op == "lightllm_llama_context")
    call = _call(_OPS[name], given)
    assert call.unknown_arguments == (("b_start_loc=a tensor (2,)",) if gap else ())
    output = torch.cat(parts)
    compared = Comparison(actual=output, expected=output, atol=0.0, rtol=0.0, passed=True)
    assert gap or judge(call, compared).diagnosis.status == "nothing wrong"


def test_tolerances_by_name_are_those_of_the_comparison() -> None:
    found: list[tuple[object, ...]] = []
    watch = Watch(lambda name, args, result: found.append((name, *args[2:])))
    one = torch.ones(3)
    watch.start()
    try:
        torch.allclose(one, one, atol=0.03)
        torch.isclose(one, one, atol=0.01, rtol=0.02)
    finally:
        watch.stop()
    assert found == [("allclose", 1e-5, 0.03), ("isclose", 0.02, 0.01)]
