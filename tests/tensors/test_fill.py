"""Writing tokens: the fast path gives the same bytes as copying token by token."""

import pytest
import torch
from helpers.cases import same_bits
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.tensors import cache
from attnlab.tensors.cache import write_tokens


def one_by_one(key, value, new_key, new_value, rows, slots):
    """Write each token element by element: slow and simple."""
    block_size, x = value.shape[3], key.shape[4]
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        block, offset = divmod(slot, block_size)
        for chunk in range(key.shape[2]):
            key[block, :, chunk, offset] = new_key[row, :, chunk * x : chunk * x + x]
        value[block, :, :, offset] = new_value[row]


def random_bytes(shape, dtype, generator):
    """Return random bits as ``dtype``, NaN and infinities included."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype)


@st.composite
def writes(draw):
    """Return a cache, new tokens, and the rows and slots to write."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.uint8]))
    block_size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 32]))
    x = draw(st.sampled_from([1, 4, 8, 16]))
    chunks, heads, blocks = (draw(st.integers(1, 3)) for _ in range(3))
    blocks = draw(st.integers(2, 40))
    key = random_bytes((blocks, heads, chunks, block_size, x), dtype, generator)
    value = random_bytes((blocks, heads, chunks * x, block_size), dtype, generator)
    tokens = blocks * block_size + 9
    new_key, new_value = (
        random_bytes((tokens, heads, chunks * x), dtype, generator) for _ in range(2)
    )
    slots, rows = runs(draw, blocks, block_size, generator)
    return key, value, new_key, new_value, rows, slots


def runs(draw, blocks, block_size, generator):
    """Return slots and rows of several sequences: whole shuffled blocks, gaps, partial blocks."""
    order = torch.randperm(blocks, generator=generator).tolist()
    slots, rows, row = [], [], draw(st.integers(0, 7))
    while order:
        take = [order.pop() for _ in range(min(len(order), draw(st.integers(1, 20))))]
        places = [block * block_size + offset for block in take for offset in range(block_size)]
        begin, end = draw(st.integers(0, block_size)), draw(st.integers(0, block_size))
        places = places[begin : len(places) - end]
        slots += places
        rows += range(row, row + len(places))
        row += len(places) + draw(st.integers(0, 1))
    row_limit = blocks * block_size + 8
    rows = [min(r, row_limit) for r in rows]
    slots, rows = torch.tensor(slots, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    shuffle = draw(st.sampled_from(["nothing", "nothing", "rows", "slots", "two slots"]))
    if shuffle == "rows":
        rows = rows[torch.randperm(len(rows), generator=generator)]
    if shuffle == "slots":
        slots = slots[torch.randperm(len(slots), generator=generator)]
    if shuffle == "two slots" and len(slots) > 3:  # in the middle of a block the ends still fit
        slots[[1, 2]] = slots[[2, 1]]
    return slots, rows


@given(writes())
@settings(max_examples=examples(120), deadline=None)
def test_fast_path_equals_one_token_at_a_time(drawn):
    """Every byte of both cache tensors is equal, written or not, NaN included."""
    key, value, *rest = drawn
    slow = key.clone(), value.clone()
    one_by_one(*slow, *rest)
    write_tokens(key, value, *rest)
    assert same_bits(key, slow[0])
    assert same_bits(value, slow[1])


def test_whole_blocks_take_the_fast_path(monkeypatch):
    """Whole blocks take the fast path, and partial ones the indexed assignment."""
    seen = []
    monkeypatch.setattr(cache, "_write_key_blocks", lambda key, blocks, tokens: seen.append(blocks))
    monkeypatch.setattr(cache, "_write_value_blocks", lambda value, blocks, tokens: None)
    key, value = torch.zeros(4, 1, 1, 4, 2), torch.zeros(4, 1, 2, 4)
    new = torch.ones(9, 1, 2)
    slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 0])
    write_tokens(key, value, new, new, torch.arange(9), slots)
    assert torch.cat(seen).tolist() == [3, 1]
    assert value.sum() == 2  # only the ninth token
    assert value[0, 0, :, 0].tolist() == [1.0, 1.0]


def test_one_by_one_sees_a_wrong_slot():
    """The simple writer is independent: a slot that is off by one differs."""
    key, value = torch.zeros(2, 1, 1, 4, 2), torch.zeros(2, 1, 2, 4)
    new, slots = torch.randn(4, 1, 2), torch.arange(4)
    other = key.clone(), value.clone()
    one_by_one(*other, new, new, torch.arange(4), (slots + 1) % 8)
    write_tokens(key, value, new, new, torch.arange(4), slots)
    assert not same_bits(key, other[0])
    assert not same_bits(value, other[1])


@pytest.mark.parametrize("what", ["rows", "slots"])
def test_a_block_whose_tokens_stand_in_another_order(what):
    """A run that begins and ends like a whole block, but is not one, is written token by token."""
    rows = slots = torch.arange(4)
    other = torch.tensor([0, 2, 1, 3])
    rows, slots = (other, slots) if what == "rows" else (rows, other)
    new = torch.arange(8.0).view(4, 1, 2)
    fast = torch.zeros(1, 1, 1, 4, 2), torch.zeros(1, 1, 2, 4)
    slow = tuple(tensor.clone() for tensor in fast)
    whole = tuple(tensor.clone() for tensor in fast)
    write_tokens(*whole, new, new, torch.arange(4), torch.arange(4))
    write_tokens(*fast, new, new, rows, slots)
    one_by_one(*slow, new, new, rows, slots)
    assert [same_bits(*pair) for pair in zip(fast, slow, strict=True)] == [True, True]
    assert [same_bits(*pair) for pair in zip(fast, whole, strict=True)] == [False, False]


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_and_one_token(tokens):
    """No token changes nothing; one token changes one slot."""
    key, value = torch.zeros(2, 1, 1, 4, 2), torch.zeros(2, 1, 2, 4)
    new, where = torch.ones(1, 1, 2), torch.arange(tokens)
    write_tokens(key, value, new, new, where, where)
    assert key.sum() == value.sum() == 2 * tokens
