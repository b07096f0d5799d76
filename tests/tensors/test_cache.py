"""The cache holds exactly the tokens of its provenance; all other slots are unchanged."""

import dataclasses

import pytest
import torch
from helpers.cases import hostile, same_bits
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.platforms import FILLS
from attnlab.lab.lab import Lab
from attnlab.tensors import cache
from attnlab.tensors import cache as cache_module
from attnlab.tensors.cache import (
    NOBODY,
    garbage,
    interleaved,
    make_batch,
    make_block_table,
    make_cache,
    write_tokens,
)
from attnlab.tensors.formats import FORMATS


@st.composite
def layouts(draw):
    """Return a small Case with an odd layout."""
    kv_cache_dtype = draw(st.sampled_from(["auto", "auto", "fp8", "fp8_e5m2"]))
    count = draw(st.integers(1, 4))
    group = draw(st.integers(1, 3))
    return hostile(
        num_heads=group * draw(st.integers(1, 3)),
        num_queries_per_kv=group,
        head_size=draw(st.sampled_from([16, 48, 64])),
        x=draw(st.sampled_from([1, 4, 8, 16])),
        block_size=draw(st.sampled_from([1, 5, 16, 24])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        kv_cache_dtype=kv_cache_dtype,
        query_lens=tuple(draw(st.integers(1, 40)) for _ in range(count)),
        ctx_lens=tuple(draw(st.integers(0, 60)) for _ in range(count)),
        empty_slots=draw(st.sampled_from(["zeros", "nan", "garbage"])),
        fill=draw(st.sampled_from(FILLS)),
        k_scale=draw(st.sampled_from([1.0, 0.03])),
        v_scale=draw(st.sampled_from([1.0, 2.5])),
        platform=draw(st.sampled_from(["gfx942", "sm_90"])),
        seed=draw(st.integers(0, 99)),
    )


def check_provenance(case, cache, batch):
    """Assert that every owned slot holds its encoded token, and that every other slot is unchanged."""
    fresh = make_empty(case)
    key, value = cache.to_flash()
    empty_key, empty_value = fresh.to_flash()
    starts = batch.kv_start_loc
    for block in range(key.shape[0]):
        for offset in range(key.shape[1]):
            seq, pos = (
                int(cache.provenance.seq[block, offset]),
                int(cache.provenance.pos[block, offset]),
            )
            if seq == NOBODY:
                assert pos == NOBODY
                wanted = empty_key[block, offset], empty_value[block, offset]
            else:
                assert cache.provenance.slot(seq, pos) == (block, offset)
                row = starts[seq] + pos
                wanted = (
                    cache.format.encode(batch.key[row], case.k_scale),
                    cache.format.encode(batch.value[row], case.v_scale),
                )
            assert same_bits(key[block, offset], wanted[0])
            assert same_bits(value[block, offset], wanted[1])


def make_empty(case):
    """Return the cache before any write: that of a batch without context."""
    blocks, lens = case.total_blocks, (1,)
    bare = case.replace(
        query_lens=lens, ctx_lens=(0,), fill="context_only", num_blocks=blocks, block_table=None
    )
    empty = make_cache(bare, make_batch(bare))
    assert (empty.provenance.seq == NOBODY).all()
    return empty


@given(layouts())
@settings(max_examples=25, deadline=None)
def test_every_slot_holds_what_provenance_says(case):
    """For any layout, format, fill and scale: owned slots are exact, all others unchanged."""
    batch = make_batch(case)
    check_provenance(case, make_cache(case, batch), batch)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_hostile_cache(kv_cache_dtype):
    """The hostile batch, with whole blocks on the fast path, head size 24 and NaN in unwritten slots."""
    case = hostile(head_size=24, x=8, kv_cache_dtype=kv_cache_dtype, num_heads=4)
    batch = make_batch(case)
    check_provenance(case, make_cache(case, batch), batch)


@pytest.mark.parametrize("mutant", ["position", "slot", "spare"])
def test_the_check_of_provenance_can_fail(mutant):
    """A misplaced token, a wrong owner and a byte in a spare block are each found."""
    case = hostile(query_lens=(20, 1), ctx_lens=(7, 30))
    batch = make_batch(case)
    cache = make_cache(case, batch)
    if mutant == "position":
        cache.provenance.pos[cache.provenance.pos == 3] = 4
    elif mutant == "slot":
        block, offset = cache.provenance.slot(1, 9)
        cache.value[block, :, :, offset] += 1
    else:
        spare = torch.nonzero((cache.provenance.seq == NOBODY).all(1))[0]
        cache.key[spare] = 0
    with pytest.raises(AssertionError):
        check_provenance(case, cache, batch)


@pytest.mark.parametrize("fill", FILLS)
def test_fill_policies(fill):
    """The cache holds ctx_len tokens, and the new tokens of all sequences or of decodes only."""
    case = hostile(fill=fill)
    lens = case.lengths.cached_lens(fill)
    for seq, (q, c) in enumerate(zip(case.query_lens, case.ctx_lens, strict=True)):
        new = fill == "all_rows" or (fill == "decode_rows" and q == 1)
        assert lens[seq] == c + (q if new else 0)
    provenance = make_cache(case, make_batch(case)).provenance
    for seq, length in enumerate(lens):
        assert sorted(provenance.pos[provenance.seq == seq].tolist()) == list(range(length))
    assert (provenance.seq != NOBODY).sum() == sum(lens)


def test_empty_slots_differ_in_nothing_else():
    """Zeros, NaN and garbage fill the same slots; garbage is finite and at least 0.5."""
    caches = {
        e: make_cache(hostile(empty_slots=e), make_batch(hostile()))
        for e in ("zeros", "nan", "garbage")
    }
    owned = caches["nan"].provenance.seq != NOBODY
    for one in caches.values():
        for tensor, nan in zip(one.to_flash(), caches["nan"].to_flash(), strict=True):
            assert same_bits(tensor[owned], nan[owned])
    assert caches["nan"].to_flash()[1][~owned].isnan().all()
    assert caches["zeros"].to_flash()[1][~owned].count_nonzero() == 0
    size = caches["garbage"].to_flash()[1][~owned].abs()
    assert ((size >= 0.5) & (size < 2)).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
def test_nan_in_an_fp8_cache(kv_cache_dtype, platform):
    """Each FP8 format has its NaN byte, and unowned slots decode to NaN."""
    case = hostile(kv_cache_dtype=kv_cache_dtype, platform=platform)
    cache = make_cache(case, make_batch(case))
    key = cache.format.decode(cache.to_flash()[0])
    assert key[cache.provenance.seq == NOBODY].isnan().all()
    assert not key[cache.provenance.seq != NOBODY].isnan().any()


def test_garbage_is_what_it_says():
    """Finite float16 of both signs, at least 0.5 and below 2; the same seed gives the same bits."""
    numbers = garbage((10_000,), seed=3)
    assert numbers.dtype == torch.float16
    assert ((numbers.abs() >= 0.5) & (numbers.abs() < 2)).all()
    assert (numbers < 0).any()
    assert numbers.unique().numel() > 3000
    assert same_bits(numbers, garbage((10_000,), seed=3))
    assert not same_bits(numbers, garbage((10_000,), seed=4))


def test_to_flash_by_index():
    """Every element of the flash layout is at its four coordinates."""
    case = hostile(query_lens=(3, 1), ctx_lens=(5, 20), head_size=24, x=8, fill="all_rows")
    cache = make_cache(case, make_batch(case))
    key, value = cache.to_flash()
    assert key.shape == value.shape == (case.total_blocks, case.block_size, 3, 24)
    block, offset = cache.provenance.slot(1, 17)
    for head in range(3):
        for d in range(24):
            assert key[block, offset, head, d] == cache.key[block, head, d // 8, offset, d % 8]
            assert value[block, offset, head, d] == cache.value[block, head, d, offset]


def test_block_tables():
    """Drawn blocks are distinct and shuffled by the seed; a given table is used unchanged."""
    case = hostile()
    table = make_block_table(case)
    assert table.shape == (len(case.query_lens), case.blocks_per_seq)
    assert table.unique().numel() == table.numel()
    assert int(table.max()) < case.total_blocks
    assert not torch.equal(table, make_block_table(case.replace(seed=8)))
    own = Case(query_lens=(1, 1), ctx_lens=(3, 40), block_table=((5, 0), (2, 3)))
    assert make_block_table(own).tolist() == [[5, 0], [2, 3]]


def test_provenance_is_frozen():
    """Provenance is frozen."""
    provenance = make_cache(hostile(), make_batch(hostile())).provenance
    with pytest.raises(dataclasses.FrozenInstanceError):
        provenance.seq = None


def test_a_write_off_by_one_is_caught(monkeypatch):
    """If addresses are shifted by one slot, the check of provenance fails."""
    real = cache_module.write_tokens

    def shifted(key, value, new_key, new_value, rows, slots):
        real(key, value, new_key, new_value, rows, (slots + 1) % (key.shape[0] * key.shape[3]))

    monkeypatch.setattr(cache_module, "write_tokens", shifted)
    case = hostile(query_lens=(20, 1), ctx_lens=(7, 30))
    batch = make_batch(case)
    with pytest.raises(AssertionError):
        check_provenance(case, make_cache(case, batch), batch)


def test_formats_of_caches():
    """An FP8 cache is stored as uint8, any other in the model's dtype."""
    assert make_cache(hostile(kv_cache_dtype="fp8"), make_batch(hostile())).key.dtype == torch.uint8
    case = hostile(dtype="bfloat16")
    cache = make_cache(case, make_batch(case))
    assert cache.format is FORMATS["bfloat16"]
    assert cache.value.dtype == torch.bfloat16


def test_interleaved_values_by_index():
    """Slot s of element d is at pack s // x, then d, then s % x; the inverse gives the plain cache."""
    value = torch.arange(2 * 3 * 4 * 16, dtype=torch.float16).view(2, 3, 4, 16)
    packed = interleaved(value).view(2, 3, 2, 4, 8)
    for d in range(4):
        for s in range(16):
            assert torch.equal(packed[:, :, s // 8, d, s % 8], value[:, :, d, s])
    assert torch.equal(interleaved(interleaved(value), back=True), value)


def test_a_cache_of_another_fp8_format_is_not_what_a_write_leaves():
    """The op writes the platform's format; a cache compared in another format differs in its bytes."""
    case = hostile(op="reshape_and_cache_flash", kv_cache_dtype="fp8", platform="gfx942")
    assert Lab().run(case).status == "match"
    assert Lab().run(case.replace(cache_format="fp8_e4m3fn")).status == "mismatch"


# Writing tokens: the fast path gives the same bytes as copying token by token.


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
