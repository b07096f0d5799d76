"""Attention that a test or a project writes out in torch or launches itself, and comparisons of any kind."""

from pathlib import Path

import pytest
from helpers.recorded_tests import properties, pytest_in
from helpers.sources import needs_triton

pytestmark = pytest.mark.slow

KERNEL = """
import torch
import triton
import triton.language as tl

FAULT = ""


class Attention(torch.nn.Module):
    def forward(self, x, weights):
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (x @ w for w in weights))
        group = q.shape[1] // k.shape[1]
        spread = (1, group, 1, 1) if FAULT == "modulo" else ()
        k, v = (t.repeat(spread) if spread else t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * (1.0 if FAULT == "scale" else 0.25)
        late = 2 if FAULT == "late" else 1
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(late)
        return torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).flatten(2)


def window_attention(query, key, value, window):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    back = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
    hidden = (back < 0) | (back >= window + (FAULT == "late"))
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def capped(q, k, v, softcap):
    scores, scale = q @ k.mT, q.shape[-1] ** -0.5
    inside, outside = (1.0, scale) if FAULT == "order" else (scale, 1.0)
    return ((softcap * (scores * inside / softcap).tanh()) * outside).softmax(-1) @ v


@triton.jit
def decode(Out, Q, K_cache, V_cache, Block_Tables, seq_lens_ptr, scale, H: tl.constexpr,
           D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, STALE: tl.constexpr):
    seq, head = tl.program_id(0), tl.program_id(1)
    d, at = tl.arange(0, D), tl.arange(0, N * COLUMNS)
    length = tl.load(seq_lens_ptr + seq) + STALE
    block = tl.load(Block_Tables + seq * COLUMNS + at // N)
    place = ((block * N + at % N)[:, None] * H + head) * D + d[None, :]
    scores = tl.sum(tl.load(K_cache + place) * tl.load(Q + (seq * H + head) * D + d)[None, :], 1)
    scores = tl.where(at < length, scores * scale, -1e30)
    weights = tl.exp(scores - tl.max(scores, 0))
    out = tl.sum(weights[:, None] * tl.load(V_cache + place), 0) / tl.sum(weights, 0)
    tl.store(Out + (seq * H + head) * D + d, out)
"""
TESTS = """
import kern
import numpy
import pytest
import torch
import torch.nn.functional as F


def inputs(*shape):
    torch.manual_seed(0)
    return torch.randn(3, *shape)


def close(output, expected, fault):
    torch.testing.assert_close(output, expected, atol=1e-9 if fault == "right" else 1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["right", "late", "modulo", "scale"])
def test_module(fault, monkeypatch):
    monkeypatch.setattr(kern, "FAULT", fault)
    x, sizes = torch.randn(2, 12, 64), (64, 32, 32)
    weights = [torch.randn(64, size) / 8 for size in sizes]
    q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (x @ w for w in weights))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(kern.Attention()(x, weights), wanted.transpose(1, 2).flatten(2), fault)


@pytest.mark.parametrize("fault", ["right", "late"])
def test_window(fault, monkeypatch):
    monkeypatch.setattr(kern, "FAULT", fault)
    q, k, v = inputs(2, 4, 24, 16)
    mask = torch.ones(24, 24).tril().bool() & ~torch.ones(24, 24).tril(-6).bool()
    close(kern.window_attention(q, k, v, 6), F.scaled_dot_product_attention(q, k, v, mask), fault)


def test_softcap_order(monkeypatch):
    monkeypatch.setattr(kern, "FAULT", "order")
    q, k, v = inputs(2, 4, 24, 16)
    scores = 3 * (q.double() @ k.double().mT / 12).tanh()
    close(kern.capped(q, k, v, 3.0), (scores.softmax(-1) @ v.double()).float(), "")


@pytest.mark.parametrize("fault", ["right", "stale"])
def test_launch(fault):
    torch.manual_seed(0)
    (key, value), query = torch.randn(2, 12, 16, 2, 32), torch.randn(3, 2, 32)
    table, lens = torch.randperm(12).view(3, 4).int(), torch.tensor([5, 33, 60]).int()
    out = torch.empty_like(query)
    kern.decode[3, 2](out, query, key, value, table, lens, 0.125, 2, 32, 16, 4, fault == "stale")
    wanted = []
    for row, number, one in zip(table, lens, query):
        k, v = (cache[row.long()].flatten(0, 1)[:number] for cache in (key, value))
        weights = (torch.einsum("hd,khd->hk", one, k) * 0.125).softmax(-1)
        wanted.append(torch.einsum("hk,khd->hd", weights, v))
    close(out, torch.stack(wanted), fault)


def masked(window):
    q, k, v = inputs(2, 4, 24, 16)
    back = torch.arange(24)[:, None] - torch.arange(24)
    mask = (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_largest_difference():
    assert (masked(6) - masked(7)).abs().max() < 1e-3


def test_cosine():
    q, k, v = inputs(2, 4, 24, 16)
    output = F.scaled_dot_product_attention(q, v, k)
    scores = q.double() @ k.double().mT / 4
    wanted = (scores.softmax(-1) @ v.double()).float()
    assert F.cosine_similarity(output.flatten(), wanted.flatten(), dim=0) > 0.99


def test_numpy():
    assert numpy.allclose(masked(6).numpy(), masked(6).numpy() + 1e-3, atol=1e-6)


def test_another_kernel():
    q, k, v = inputs(2, 4, 24, 16)
    scores = numpy.exp(q.numpy() @ k.numpy().swapaxes(-1, -2) / 8)
    made = torch.from_numpy(scores / scores.sum(-1, keepdims=True) @ v.numpy())
    close(made, (q @ k.mT / 4).softmax(-1) @ v, "")


def test_no_attention():
    x, w = torch.randn(8, 10), torch.randn(10, 10)
    close((x @ w).relu() @ w, torch.zeros(8, 10), "")


def test_doubled():
    q, k, v = inputs(2, 4, 24, 16)
    output = (q @ k.mT / 4).softmax(-1) @ v
    torch.save(output, "output.pt")
    assert torch.allclose(torch.load("output.pt", weights_only=True), 2 * output)
"""
ARGUMENTS = "the expected value, or the arguments"
# Of each failing test: the side, and words of the diagnosis or the evidence.
SIDES = {
    "test_module[right]": ("the tolerance", "both exact up to rounding"),
    "test_module[late]": ("the kernel", "causal_plus_one"),
    "test_module[modulo]": ("the kernel", "kv_head_modulo"),
    "test_module[scale]": ("the kernel", "scale_missing"),
    "test_window[right]": ("the tolerance", "both exact up to rounding"),
    "test_window[late]": ("the kernel", "window_plus_one"),
    "test_softcap_order": ("the kernel", "softcap_before_scale"),
    "test_launch[right]": ("the tolerance", "both exact up to rounding"),
    "test_launch[stale]": ("the kernel", "off by up to"),
    "test_largest_difference": ("the test's arguments", "one key too wide"),
    "test_cosine": (ARGUMENTS, "keys are read as values, and values as keys"),
    "test_numpy": (ARGUMENTS, "off by up to 0.001"),
    "test_another_kernel": ("the kernel, or its arguments", "scale"),
    "test_doubled": (ARGUMENTS, "twice the correct output"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, str]]:
    """Run the tests above once; return the properties of each."""
    folder: Path = tmp_path_factory.mktemp("written_out")
    (folder / "kern.py").write_text(KERNEL)
    (folder / "test_kern.py").write_text(TESTS)
    (folder / "conftest.py").write_text("import os\nos.environ['TRITON_INTERPRET'] = '1'\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    pytest_in(folder, "--attnlab", "--attnlab-seconds=0", "-q")
    return properties(folder)


@needs_triton
@pytest.mark.parametrize("name", SIDES)
def test_the_side_and_the_reason(found, name):
    facts, (side, words) = found[name], SIDES[name]
    assert facts.get("attnlab_wrong_side") == side, facts
    assert words in f"{facts['attnlab_evidence']}; {facts['attnlab_diagnosis']}", facts


@needs_triton
def test_what_is_no_attention_is_not_judged(found):
    assert "attnlab_wrong_side" not in found["test_no_attention"]
    assert "a launch of kern.decode" in found["test_launch[stale]"]["attnlab_op"]
    assert "code that was not recorded" in found["test_another_kernel"]["attnlab_op"]
