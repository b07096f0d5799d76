"""Functions of a project that nobody named: pytest --attnlab records those with attention's arguments."""

import dataclasses
import sys
from pathlib import Path

import pytest
from helpers.recorded_tests import pytest_in

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.kernels.by_name import ByName
from attnlab.kernels.plugin import PluginBackend
from attnlab.lab.lab import Lab
from attnlab.recorder.arguments import read_arguments
from attnlab.recorder.ops import ops_in

KERNEL = """
import torch


def decode(q, k_cache, v_cache, block_tables, context_lens, scale):
    out = torch.empty_like(q)
    for i, n in enumerate(context_lens.tolist()):
        k, v = (c[block_tables[i].long()].flatten(0, 1)[: n - SHORT] for c in (k_cache, v_cache))
        s = torch.einsum("hd,khd->hk", q[i], k.repeat_interleave(2, 1)) * scale
        out[i] = torch.einsum("hk,khd->hd", s.softmax(-1), v.repeat_interleave(2, 1))
    return out


def dense(q, k, v, causal):
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1 + SHORT).bool(), -torch.inf)
    return s.softmax(-1) @ v


def always_causal(q, k, v):
    return dense(q, k, v, True)


def corner(q, k, v, causal):
    s = q @ k.mT * q.shape[-1] ** -0.5
    late = 1 + k.shape[-2] - q.shape[-2]
    return s.masked_fill(torch.ones_like(s).triu(late).bool(), -torch.inf).softmax(-1) @ v


def tokens_first(q, k, v):
    return dense(*(one.transpose(-3, -2) for one in (q, k, v)), True).transpose(-3, -2)


def update(q, k_cache, v_cache, block_tables, context_lens, scale):
    return q * scale


SHORT = 1
"""
TESTS = """
import kern
import torch
import torch.nn.functional as F


def reference(q, k_cache, v_cache, block_tables, context_lens, scale):
    kern.SHORT = 0
    try:
        return kern.decode.__wrapped__(q, k_cache, v_cache, block_tables, context_lens, scale)
    finally:
        kern.SHORT = 1


def batch():
    torch.manual_seed(0)
    caches = torch.randn(2, 16, 16, 2, 32)
    tables = torch.randperm(16)[:12].reshape(3, 4).int()
    return torch.randn(3, 4, 32), *caches, tables, torch.tensor([5, 33, 64]).int(), 32**-0.5


def test_paged():
    torch.testing.assert_close(kern.decode(*batch()), reference(*batch()))


def test_dense():
    q, k, v = torch.randn(3, 2, 4, 20, 16)
    torch.testing.assert_close(
        kern.dense(q, k, v, True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_unstated_mask():
    q, k, v = torch.randn(3, 2, 4, 20, 16)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(kern.always_causal(q, k, v), wanted)


def bottom_right(query):
    k, v = torch.randn(2, 2, 4, 20, 16)
    scores = (query @ k.mT / 4).masked_fill(torch.ones(6, 20).triu(15).bool(), -torch.inf)
    return k, v, scores.softmax(-1) @ v


def test_few_queries():
    query = torch.randn(2, 4, 6, 16)
    k, v, wanted = bottom_right(query)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, k, v, is_causal=True), wanted)


def test_other_corner():
    query = torch.randn(2, 4, 6, 16)
    k, v = torch.randn(2, 2, 4, 20, 16)
    wanted = F.scaled_dot_product_attention(query, k, v, is_causal=True)
    torch.testing.assert_close(kern.corner(query, k, v, True), wanted)


def causal(q, k, v):
    q, k, v = (one.transpose(-3, -2) for one in (q, k, v))
    scores = (q @ k.mT / 4).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(-3, -2)


def test_batch_of_tokens():
    q, k, v = torch.randn(3, 2, 20, 4, 16)
    torch.testing.assert_close(kern.tokens_first(q, k, v), causal(q, k, v))


def test_tokens():
    q, k, v = torch.randn(3, 20, 4, 16)
    torch.testing.assert_close(kern.tokens_first(q, k, v), causal(q, k, v))


def test_another_result():
    q, k, v = torch.randn(3, 20, 4, 16)
    torch.testing.assert_close(kern.tokens_first(q, k, v), 2 * causal(q, k, v) + 1)


def test_no_attention():
    torch.testing.assert_close(kern.update(*batch()), batch()[0])


def test_unnamed():
    q, k, v = torch.randn(3, 2, 4, 20, 16)
    output = (q @ k.mT / 4).softmax(-1) @ v
    assert torch.allclose(output, 2 * output)


def test_no_call():
    output = torch.randn(3, 4)
    assert torch.allclose(output, 2 * output)


def test_left_out():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 2, 4, 16, 16)
    flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * score)
    assert False


def test_without_tensors():
    assert False
"""


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict[str, str]:
    """Return the section of each failing test of the project, by the name of the test."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "kern.py").write_text(KERNEL)
    (folder / "test_own.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    parts = pytest_in(folder, "--attnlab", "--attnlab-seconds=0").split("___ test_")[1:]
    return {part.split(" ")[0]: part.partition("- attnlab -")[2] for part in parts}


def test_a_kernel_is_recorded_by_the_names_of_its_arguments(sections):
    assert "op          kern.decode" in sections["paged"]
    assert "wrong side  the kernel" in sections["paged"]
    assert "next        attnlab page attnlab-failures/test_own.py_test_paged-" in sections["paged"]
    assert "/call.safetensors --kernel kern.py:decode\n" in sections["paged"]


def test_a_dense_kernel_is_read_as_torch_reads_its_own(sections):
    assert "op          kern.dense" in sections["dense"]
    assert "wrong side  the kernel" in sections["dense"]
    assert "next" not in sections["dense"]  # it cannot run other calls


@pytest.mark.parametrize("name", ["batch_of_tokens", "tokens"])
def test_dimensions_and_causality_that_no_argument_states_follow_from_the_expected_value(
    sections, name
):
    assert "op          kern.tokens_first" in sections[name]
    assert "wrong side  the kernel" in sections[name]
    text = "as [batch, tokens, heads, size]; causal attention"
    assert f"read as     queries, keys and values {text}" in sections[name]
    assert "wrong side  the expected value, or the arguments" in sections["another_result"]


def test_a_mask_that_no_argument_states_follows_from_torchs_own_attention(sections):
    """Read without a mask, the right expected value would be wrong in 19 of 20 rows."""
    assert "read as     causal attention" in sections["unstated_mask"]
    assert "from another call, is\n            within" in sections["unstated_mask"]


def test_the_corner_of_the_causal_mask_is_named_with_fewer_rows_than_keys(sections):
    assert "wrong side  the expected value" in sections["few_queries"]
    assert "wrong side  the test's arguments" in sections["other_corner"]
    for name, side in (("few_queries", "it"), ("other_corner", "the output")):
        text = " ".join(sections[name].split())
        assert f"; {side} is exact with the causal mask at the bottom right, where" in text


def test_a_function_that_is_no_attention_is_not_accused(sections):
    assert "not decided" in sections["no_attention"]
    assert "wrong side" not in sections["no_attention"]
    assert "attnlab_ops=kern:update" in sections["no_attention"]


def test_a_failed_test_without_a_call_says_why(sections):
    """One line names what was seen, why it was not read, and what to add; a test without tensors has none."""
    add = "add the function that computes attention: -o attnlab_ops=MODULE:FUNCTION"
    unnamed = f"no attention call: no function that attnlab knows was called; {add}\n"
    assert unnamed in sections["no_call"]
    why = "flex_attention (score_mod does more than add to a score or cap it)"
    assert f"{why}; {add}" in sections["left_out"]
    assert "no attention call" not in sections["without_tensors"]


def test_functions_of_test_modules_count_if_there_are_no_others(tmp_path, monkeypatch):
    (tmp_path / "own_alone.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("own_alone")
    try:
        names = ["decode", "dense", "always_causal", "corner", "tokens_first", "update"]
        assert [op.function for op in ops_in(tmp_path, {"own_alone"})] == names
        assert ops_in(tmp_path / "other", set()) == []
    finally:
        del sys.modules["own_alone"]


def test_context_lens_are_all_keys_only_without_new_tokens():
    import torch

    lens, cache = torch.tensor([3]), torch.zeros(1, 16, 1, 8)
    given = {"q": cache[0, :1], "k_cache": cache, "v_cache": cache, "context_lens": lens}
    assert read_arguments(given).fields["seq_lens"] is lens
    assert "seq_lens" not in read_arguments({**given, "k": cache[0, :1]}).fields


def test_an_unknown_argument_is_refused_before_anything_runs(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def paged(q, k_cache, v_cache, pages, seq_lens):\n    pass\n")
    with pytest.raises(InvalidCase, match="pages must be an argument that attnlab knows"):
        PluginBackend(spec=f"{file}:paged")


def windowed(q, k_cache, v_cache, out, cu_seqlens_q, seq_lens, block_table, sliding_window):
    pass


def decode(q, k_cache, v_cache, seq_lens, block_table, scale=None):
    pass


def test_a_function_without_starts_of_the_queries_gets_one_token_per_sequence():
    assert ByName(function=decode).op == "decode_attention_fwd"
    assert ByName(function=windowed).op == "unified_attention"


@pytest.mark.parametrize(("example", "expected"), [(None, 52), (8, 52), (-1, -1), (0, 0)])
def test_no_window_hides_no_key_or_is_what_the_function_calls_none(example, expected):
    """A number of keys that hides none has one meaning; 0 and -1 do not."""
    case = Case(op="unified_attention", num_heads=2, query_lens=(12, 1), ctx_lens=(40, 30))
    given = {} if example is None else {"sliding_window": example}
    call = Lab().call(case)
    assert ByName(function=windowed, example=given).arguments(call)["sliding_window"] == expected
    call = dataclasses.replace(call, sliding_window=16)
    assert ByName(function=windowed, example=given).arguments(call)["sliding_window"] == 16
