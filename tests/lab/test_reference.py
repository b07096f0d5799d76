"""The reference agrees with torch's attention in float64; its operations are counted."""

import pytest
import torch
from bench import visible_flops
from helpers.cases import hostile
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.ops import OPS
from attnlab.lab import reference as reference_module
from attnlab.lab.reference import (
    attend,
    exact_attention,
    reference,
    stored_tokens,
)
from attnlab.tensors.cache import alibi_slopes, make_batch, sink_logits
from attnlab.tensors.visibility import Visibility

DOUBLE = 1e-12  # float64: 1.1e-16 per operation, a few thousand operations on numbers below 10


def plain(query, key, value, scale, window, slopes, sinks=None, softcap=None):
    """Return attention by scaled_dot_product_attention with an explicit mask, float64.

    A sink is an additional key with the sink as its score and the value 0. With a soft cap the mask
    contains the scores, and the queries are 0.
    """
    query_len, seq_len = query.shape[0], key.shape[0]
    at = torch.arange(seq_len - query_len, seq_len)[:, None]
    keys = torch.arange(seq_len)[None]
    visible = (keys <= at) & ((keys > at - window) if window else True)
    bias = torch.zeros(query.shape[1], query_len, seq_len, dtype=torch.float64)
    if slopes is not None:
        bias += slopes.double()[:, None, None] * (keys - at)
    bias.masked_fill_(~visible, float("-inf"))
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (query, key, value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if softcap is not None:
        bias += softcap * (torch.einsum("hqd,hkd->hqk", q, k) * scale / softcap).tanh()
        q = torch.zeros_like(q)
    if sinks is not None:
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
        bias = torch.cat([bias, sinks.double()[:, None, None].expand(-1, query_len, 1)], 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return mixed.transpose(0, 1)


def plain_batch(case, batch):
    """Return the output of the whole batch by ``plain``, with the keys as the op reads them."""
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    rows, tokens, out = batch.token_start_loc, batch.kv_start_loc, []
    for i, (q, c) in enumerate(zip(batch.lengths.query_lens, batch.lengths.ctx_lens, strict=True)):
        decode = q == 1 and case.op == "chunked_prefill_paged_decode"
        new = q if decode or case.spec.new_tokens_from == "cache" else 0
        key, value = (
            stored_tokens(case, tensor[tokens[i] : tokens[i + 1]], c + new, scale_of)
            for tensor, scale_of in ((batch.key, case.k_scale), (batch.value, case.v_scale))
        )
        query = batch.query[rows[i] : rows[i + 1]]
        biases = (batch.alibi_slopes, batch.sinks, case.softcap)
        out.append(plain(query, key, value, scale, case.sliding_window, *biases))
    return torch.cat(out)


@st.composite
def shapes(draw):
    """Return a small random Case."""
    op = draw(
        st.sampled_from([*(op for op in list(OPS)[:4] if OPS[op].context), "unified_attention"])
    )
    unified = op == "unified_attention"
    group, count = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 3))
    alibi = draw(st.booleans())
    return hostile(
        num_heads=group * draw(st.integers(1, 3)),
        num_queries_per_kv=group,
        head_size=draw(st.sampled_from([8, 24, 64])),
        x=8,
        query_lens=tuple(draw(st.integers(1, 70)) for _ in range(count)),
        ctx_lens=tuple(draw(st.integers(0, 90)) for _ in range(count)),
        alibi=alibi,
        sinks=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([0, 1, 2, 16, 200])),
        sm_scale=draw(st.sampled_from([None, 0.3])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8", "fp8" if unified else "fp8_e5m2"])),
        k_scale=draw(st.sampled_from([1.0, 0.02])),
        v_scale=draw(st.sampled_from([1.0, 3.0])),
        op=op,
        softcap=draw(st.sampled_from([None, 0.1, 5.0])) if unified else None,
        seed=draw(st.integers(0, 99)),
    )


@given(shapes(), st.sampled_from([4, 64, 256]), st.sampled_from([1 << 8, 1 << 12, 1 << 19]))
@settings(max_examples=examples(60), deadline=None)
def test_float64_reference_is_attention(case, rows, scores):
    """For any shape and tile size it equals torch's attention up to rounding in float64."""
    batch = make_batch(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_module, "_CPU_ROWS", rows)
        patch.setattr(reference_module, "_SCORES", {"cpu": scores})
        got = reference(case, batch)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, plain_batch(case, batch), atol=DOUBLE, rtol=DOUBLE)


@pytest.mark.parametrize("changes", [{}, {"alibi": True}, {"sinks": True}], ids=str)
def test_float32_reference_is_near(changes):
    """It differs by the rounding of scores (below 32, 2^-24 each) and sums in float32."""
    case = hostile(reference_dtype="float32", **changes)
    batch = make_batch(case)
    got = reference(case, batch)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), plain_batch(case, batch), atol=2e-5, rtol=0)


@pytest.mark.parametrize("reference_dtype", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_batch_is_not_changed(reference_dtype, dtype):
    """Later runs share the batch, so the reference does not change it."""
    case = hostile(dtype=dtype, reference_dtype=reference_dtype, sliding_window=5)
    batch, untouched = make_batch(case), make_batch(case)
    first = reference(case, batch)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(batch, name), getattr(untouched, name))
    assert torch.equal(first, reference(case, batch))


def test_only_stored_keys_are_quantised():
    """New keys of a prefill are not quantised, context keys are."""
    case = hostile(kv_cache_dtype="fp8", query_lens=(3, 1), ctx_lens=(4, 4))
    tokens = make_batch(case).key[:7]
    stored = stored_tokens(case, tokens, 4, 1.0)
    assert torch.equal(stored[4:].double(), tokens[4:].double())
    assert not torch.equal(stored[:4].double(), tokens[:4].double())
    assert stored_tokens(hostile(), tokens, 4, 1.0) is tokens


MUTANTS = {
    "causal, one key more": lambda out, t: attend_at(t, shift=1),
    "causal, one key less": lambda out, t: attend_at(t, shift=-1),
    "scale twice": lambda out, t: attend_at(t, scale=2.0),
    "window off by one": lambda out, t: attend_at(t, window=1),
    "kv head h % n": lambda out, t: attend_at(t, heads=True),
    "alibi the other way": lambda out, t: attend_at(t, slopes=-1.0),
    "no cap": lambda out, t: attend_at(t, softcap=None),
    "no sink": lambda out, t: attend_at(t, sinks=-torch.inf),
    "sink twice": lambda out, t: attend_at(t, sinks=0.6931),
    "sink of the next head": lambda out, t: attend_at((*t[:4], t[4].roll(-1))),
}


def attend_at(
    tensors, shift=0, scale=1.0, window=0, heads=False, slopes=1.0, sinks=0.0, softcap=2.0
):
    """Return torch's attention with one fault."""
    query, key, value, alibi, logits = tensors
    if heads:
        group = query.shape[1] // key.shape[1]
        order = torch.arange(query.shape[1]) % key.shape[1]
        key, value = key[:, order], value[:, order]
        assert group > 1
    if shift == 1:  # each query also sees the key of the next token
        key, value = torch.cat([key[1:], key[-1:]]), torch.cat([value[1:], value[-1:]])
    if shift == -1:
        key, value = torch.cat([key[:1], key[:-1]]), torch.cat([value[:1], value[:-1]])
    return plain(
        query, key, value, 0.3 * scale, 9 + window, alibi * slopes, logits + sinks, softcap
    )


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_wrong_attention_fails_the_comparison(mutant):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(20, 6, 16, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(30, 3, 16, generator=generator).double() for _ in range(2))
    slopes, sinks = alibi_slopes(6), sink_logits(6, 1)
    output = torch.empty_like(query)
    mask = Visibility(sliding_window=9).of_seq(0, 10, 30)
    attend(query, key, value, 0.3, output, mask, slopes, sinks, 2.0)
    tensors = (query, key, value, slopes, sinks)
    other = MUTANTS[mutant](output, tensors) if mutant else attend_at(tensors)
    assert torch.allclose(output, other, atol=DOUBLE, rtol=DOUBLE) == (mutant is None)


def test_a_reference_with_the_diagonal_moved_fails(monkeypatch):
    """A mask that is off by one fails the comparison."""
    real = reference_module._diagonal
    monkeypatch.setattr(reference_module, "_diagonal", lambda *args: real(*args).roll(1, 0))
    case = hostile(query_lens=(9, 1), ctx_lens=(4, 20))
    batch = make_batch(case)
    got, expected = reference(case, batch), plain_batch(case, batch)
    assert not torch.allclose(got, expected, atol=DOUBLE, rtol=DOUBLE)


@pytest.mark.parametrize("window", [0, 1, 5, 400])
def test_visible_flops_by_counting(window):
    """Two products, each with a multiplication and an addition per element of a visible pair."""
    case = hostile(sliding_window=window, query_lens=(7, 1, 30), ctx_lens=(0, 20, 3))
    pairs = 0
    for q, c in zip(case.query_lens, case.ctx_lens, strict=True):
        for at in range(c, c + q):
            pairs += sum(1 for key in range(at + 1) if not window or key > at - window)
    assert visible_flops(case) == pairs * case.num_heads * 2 * 2 * case.head_size


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 64, 71])
def test_alibi_slopes(num_heads):
    """Geometric for a power of two; otherwise the power below and every second slope of that above."""
    slopes = alibi_slopes(num_heads).double()
    assert slopes.shape == (num_heads,)
    below = 1 << (num_heads.bit_length() - 1)
    first = torch.tensor([2.0 ** (-8 / below * (h + 1)) for h in range(below)]).double()
    above = torch.tensor([2.0 ** (-8 / (2 * below) * (h + 1)) for h in range(2 * below)]).double()
    expected = torch.cat([first, above[::2][: num_heads - below]])
    torch.testing.assert_close(slopes, expected, atol=0, rtol=1e-6)


def plain_lse(case, batch):
    """Return the log-sum-exp of each row's visible scores, [num_tokens, num_heads] float64."""
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    rows, tokens, lse = batch.token_start_loc, batch.kv_start_loc, []
    for i, (q, c) in enumerate(zip(batch.lengths.query_lens, batch.lengths.ctx_lens, strict=True)):
        key = batch.key[tokens[i] : tokens[i + 1]].double()
        key = key.repeat_interleave(case.num_queries_per_kv, 1)
        for token in range(q):
            last = c + token + 1
            first = max(0, last - case.sliding_window) if case.sliding_window else 0
            query = batch.query[rows[i] + token].double()
            scores = torch.einsum("hd,khd->hk", query, key[first:last]) * scale
            if case.softcap is not None:
                scores = case.softcap * (scores / case.softcap).tanh()
            if batch.alibi_slopes is not None:
                away = torch.arange(first, last) - (c + token)
                scores = scores + batch.alibi_slopes.double()[:, None] * away
            lse.append(scores.logsumexp(1))
    return torch.stack(lse)


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 5}, {"alibi": True}, {"sinks": True}, {"softcap": 2.0}],
    ids=str,
)
def test_the_lse_is_that_of_the_keys(changes):
    """with_lse does not change the output; a sink is not part of the log-sum-exp."""
    case = hostile(op="unified_attention", **changes)
    batch = make_batch(case)
    got = exact_attention(case, batch, with_lse=True)
    assert torch.equal(got.output, reference(case, batch))
    assert exact_attention(case, batch).lse is None
    expected = plain_lse(case, batch)
    torch.testing.assert_close(got.lse, expected, atol=DOUBLE, rtol=DOUBLE)
    moved = plain_lse(case.replace(sm_scale=0.9 * case.head_size**-0.5), batch)
    assert not torch.allclose(got.lse, moved, atol=DOUBLE, rtol=DOUBLE)
