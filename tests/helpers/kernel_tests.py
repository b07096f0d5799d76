"""Files of a user: paged-attention kernels with other signatures, and tests of them that fail."""

_KERNELS = '''
import torch

FACTOR = 1.0


def attend(q, k_cache, v_cache, table, lens, starts, scale=None, window=0, factor=None):
    """Causal attention, [num_tokens, num_heads, head_size]; caches [blocks, block_size, kv_heads, size]."""
    out, group = torch.empty_like(q), q.shape[1] // k_cache.shape[2]
    factor = FACTOR if factor is None else factor
    for seq, length in enumerate(lens.tolist()):
        rows, blocks = slice(int(starts[seq]), int(starts[seq + 1])), table[seq].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        query = q[rows].double()
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or q.shape[2] ** -0.5) * factor
        at = torch.arange(length - len(query), length)[:, None]
        hidden = torch.arange(length) > at
        if window:
            hidden |= torch.arange(length) <= at - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


def returned(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=None, sliding_window=0):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, sliding_window)


def second(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=None):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, factor=1.0)


def in_a_batch(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q):
    return attend(q[0], k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)[None]


def joined(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q).flatten(1), None


def nothing(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, result):
    result.copy_(attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q))


def all_nan(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q):
    return torch.full_like(q, torch.nan)


def turned(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q).transpose(0, 1).contiguous()


def windowed(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, window_size=0):
    out.copy_(attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, None, window_size))


def tempered(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, temperature=1.0, *, config=None):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)


def sized(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, num_kv_heads, block_size, head_dim):
    return attend(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)


def of_requests(q, k_cache, v_cache, req_to_token, b_req_idx, b_seq_len, o, sm_scale):
    starts = torch.arange(len(q) + 1)
    o.copy_(attend(q, k_cache, v_cache, req_to_token[b_req_idx.long()], b_seq_len, starts, sm_scale))
'''
# Signatures of SGLang 0.5.23: kernels/ops/attention/decode_attention.py and
# srt/layers/attention/wave_ops/decode_attention.py.
_SGLANG = """
import torch

from kernels import attend


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
    sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None, xai_temperature_len=-1, has_mla=False,
    use_pdl=False, page_size=1, score_mod=None, aux_tensors=None, enable_lean=None, lean_Mp=None,
    lean_Lp=None, lean_Op=None, lean_locks=None, uneven_batch=None,
):
    lens = kv_indptr.diff()
    table = torch.zeros(len(lens), int(lens.max()), dtype=torch.int32)
    for seq, length in enumerate(lens.tolist()):
        table[seq, :length] = kv_indices[int(kv_indptr[seq]) :][:length]
    starts = torch.arange(len(q) + 1)
    o.copy_(attend(q, k_buffer[:, None], v_buffer[:, None], table, lens, starts, sm_scale * k_scale))
"""
_WAVE = """
import torch

from kernels import attend


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, b_req_idx, req_to_token, b_seq_len, attn_logits, attn_logits_max, num_kv_splits,
    max_kv_splits, sm_scale, logit_cap=0.0,
):
    table, starts = req_to_token[b_req_idx.long()], torch.arange(len(q) + 1)
    o.copy_(attend(q, k_buffer[:, None], v_buffer[:, None], table, b_seq_len, starts, sm_scale))
"""
_TESTS = '''
import kernels
import pytest
import torch
from sglang.srt.layers.attention.wave_ops import decode_attention as wave
from sglang.kernels.ops.attention import decode_attention as sglang

both = pytest.mark.parametrize("fault", ["right", "scale"])


@pytest.fixture(autouse=True)
def fault_of(request, monkeypatch):
    fault = getattr(request.node, "callspec", None)
    if fault is not None and fault.params.get("fault") == "scale":
        monkeypatch.setattr(kernels, "FACTOR", 2.0)


def batch(dtype=torch.float32):
    torch.manual_seed(0)
    cache = torch.randn(2, 12, 16, 2, 32).to(dtype)
    return {
        "q": torch.randn(6, 4, 32).to(dtype),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "block_table": torch.randperm(12)[:8].view(2, 4).int(),
        "seq_lens": torch.tensor([40, 33], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5, 6], dtype=torch.int32),
    }


def right(given):
    return kernels.attend(*given.values(), factor=1.0)


def expected(given, fault="right"):
    """The correct output; for a right kernel a wrong one, so that its test fails."""
    return kernels.attend(*given.values(), factor=1.0 if fault == "scale" else 2.0)


def check(output, wanted, **options):
    torch.testing.assert_close(output, wanted, atol=1e-3, rtol=0, **options)


@both
def test_returned(fault):
    check(kernels.returned(**batch()), expected(batch(), fault))


@both
def test_returned_in_a_batch(fault):
    given = batch()
    check(kernels.in_a_batch(**{**given, "q": given["q"][None]}), expected(given, fault)[None])


@both
def test_returned_with_heads_joined(fault):
    check(kernels.joined(**batch())[0], expected(batch(), fault).flatten(1))


def test_nothing_returned():
    result = torch.empty(6, 4, 32)
    kernels.nothing(**batch(), result=result)
    check(result, expected(batch()))


def test_output_of_nan():
    check(kernels.all_nan(**batch()), expected(batch(), "scale"))


def test_output_of_another_shape():
    check(kernels.turned(**batch()), expected(batch()).transpose(0, 1))


def test_float64():
    check(kernels.returned(**batch()), right(batch()).double())


def test_allclose_of_float64():
    assert torch.allclose(kernels.returned(**batch()), right(batch()).double(), atol=1e-3)


@pytest.mark.parametrize("fault", ["scale"])
def test_float64_and_wrong(fault):
    check(kernels.returned(**batch()), right(batch()).double())


def test_tolerance_of_float64():
    exact = right({name: one.double() if one.is_floating_point() else one for name, one in batch().items()})
    torch.testing.assert_close(
        kernels.returned(**batch()), exact, atol=1e-12, rtol=0, check_dtype=False
    )


def test_other_scale():
    check(kernels.returned(**batch(), scale=0.125), kernels.returned(**batch(), scale=0.25))


def test_other_window():
    check(kernels.returned(**batch()), kernels.returned(**batch(), sliding_window=8))


def test_other_query():
    given = batch()
    check(kernels.returned(**given), kernels.returned(**{**given, "q": given["q"].flip(0)}))


MADE = {
    "float32": lambda out: out.to(torch.float32),
    "half": lambda out: out,
    "double": lambda out: out.double(),
    "cpu": lambda out: out.cpu().clone(),
    "rows": lambda out: out[1:5],
    "head": lambda out: out[:, 2].contiguous(),
    "elements": lambda out: out[..., :16],
    "flat": lambda out: out.reshape(6, -1),
    "turned": lambda out: out.transpose(0, 1)[None],
}


@pytest.mark.parametrize(
    ("made", "fault"),
    [(made, "right") for made in MADE]
    + [(made, "scale") for made in ("float32", "half", "rows", "turned")],
)
def test_compared(made, fault):
    given = batch(torch.float16)
    output, wanted = kernels.returned(**given), expected(given, fault)
    check(MADE[made](output), MADE[made](wanted))


def test_rounded_to_half():
    output, wanted = kernels.returned(**batch()).half(), right(batch()).half()
    wanted[2, 1, 7] += 1
    torch.testing.assert_close(output, wanted, atol=0, rtol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_two_kernels(place, monkeypatch):
    monkeypatch.setattr(kernels, "FACTOR", 2.0)
    ops = (kernels.returned, kernels.second) if place == 0 else (kernels.second, kernels.returned)
    outputs = [op(**batch()) for op in ops]
    check(*outputs)


def decodes():
    """A batch of two sequences of 32 keys and 4 new tokens each, and its keys and values."""
    given = batch()
    given |= {"q": torch.randn(8, 4, 32), "cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32)}
    given["seq_lens"] = torch.tensor([32, 32], dtype=torch.int32)
    table = given["block_table"][:, :2].long()
    keys, values = (given[name][table].flatten(1, 2).transpose(1, 2) for name in ("k_cache", "v_cache"))
    return given, given["q"].view(2, 4, 4, 32).transpose(1, 2), keys, values


@pytest.mark.parametrize("fault", ["scale"])
def test_sdpa(fault):
    """The expected value is right: each row sees all keys up to its own."""
    given, q, keys, values = decodes()
    padded = torch.cat([torch.zeros(2, 4, 28, 32), q], 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        padded, keys, values, is_causal=True, enable_gqa=True
    )
    check(kernels.returned(**given), wanted[:, :, 28:].transpose(1, 2).flatten(0, 1))


def test_sdpa_with_the_mask_at_the_top_left():
    """With fewer queries than keys, row 0 of SDPA sees key 0 alone: the test asks for something else."""
    given, q, keys, values = decodes()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, is_causal=True, enable_gqa=True
    )
    check(kernels.returned(**given), wanted.transpose(1, 2).flatten(0, 1))


def test_rows_of_two_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "FACTOR", 2.0)
    check(kernels.second(**batch())[:3], kernels.returned(**batch())[:3])


@both
def test_integer_window(fault):
    given = batch()
    out = torch.empty_like(given["q"])
    kernels.windowed(**given, out=out, window_size=8)
    check(out, kernels.attend(*given.values(), None, 8, 2.0 if fault == "right" else 1.0))


def test_unknown_at_its_default():
    check(kernels.tempered(**batch(), config=None), expected(batch()))


def test_unknown_and_a_bad_table():
    check(kernels.tempered(**batch(), temperature=0.5), expected(batch()))


def test_sizes_are_known():
    check(kernels.sized(**batch(), num_kv_heads=2, block_size=16, head_dim=32), expected(batch()))


def requests():
    """Decodes of three requests of an engine that has room for nine."""
    torch.manual_seed(0)
    q, slots = torch.randn(3, 4, 32), torch.randn(2, 200, 2, 32)
    table = torch.randperm(198)[:180].view(9, 20).int()
    return q, slots, table, torch.tensor([7, 2, 5]), torch.tensor([20, 13, 17], dtype=torch.int32)


def wanted_of(q, slots, rows, lens, fault, scale):
    starts, factor = torch.arange(len(q) + 1), 2.0 if fault == "right" else 1.0
    return kernels.attend(q, slots[0][:, None], slots[1][:, None], rows, lens, starts, scale, 0, factor)


@both
def test_request_index(fault):
    q, slots, table, index, lens = requests()
    caches, o = slots.view(2, 50, 4, 2, 32), torch.empty_like(q)
    blocks = torch.randperm(49)[:45].view(9, 5).int()
    kernels.of_requests(q, caches[0], caches[1], blocks, index, lens, o, 0.2)
    starts, factor = torch.arange(4), 2.0 if fault == "right" else 1.0
    check(o, kernels.attend(q, *caches, blocks[index], lens, starts, 0.2, 0, factor))


@both
def test_sglang_decode(fault):
    q, slots, table, index, lens = requests()
    o, rows = torch.empty_like(q), table[index]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0)]).int()
    indices = torch.cat([row[:n] for row, n in zip(rows, lens.tolist())])
    scratch = torch.empty(3, 4, 8, 32)
    sglang.decode_attention_fwd(
        q, slots[0], slots[1], o, indptr, indices, scratch, scratch[..., 0], lens.clone(), 8, 0.2, 1.0, 1.0
    )
    check(o, wanted_of(q, slots, rows, lens, fault, 0.2))


@both
def test_sglang_requests(fault):
    q, slots, table, index, lens = requests()
    o, scratch = torch.empty_like(q), torch.empty(3, 4, 8, 32)
    wave.decode_attention_fwd(
        q, slots[0], slots[1], o, index, table, lens, scratch, scratch[..., 0], 4, 8, 0.2
    )
    check(o, wanted_of(q, slots, table[index], lens, fault, 0.2))
'''
_OPS = (
    "kernels:returned",
    "kernels:second",
    "kernels:in_a_batch",
    "kernels:joined",
    "kernels:nothing",
    "kernels:all_nan",
    "kernels:turned",
    "kernels:windowed",
    "kernels:tempered",
    "kernels:sized",
    "kernels:of_requests",
    "sglang.kernels.ops.attention.decode_attention:decode_attention_fwd",
    "sglang.srt.layers.attention.wave_ops.decode_attention:decode_attention_fwd",
)
FILES = {
    "kernels.py": _KERNELS,
    "sglang/kernels/ops/attention/decode_attention.py": _SGLANG,
    "sglang/srt/layers/attention/wave_ops/decode_attention.py": _WAVE,
    "test_kernels.py": _TESTS,
    "pytest.ini": "[pytest]\nattnlab_ops =\n" + "".join(f"    {op}\n" for op in _OPS),
}
