"""Element formats: encoding and decoding, against a decoder written by hand."""

import math

import pytest
import torch
from helpers.cases import hostile
from hypothesis import given
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.platforms import PLATFORMS
from attnlab.tensors.cache import NOBODY, make_batch, make_cache
from attnlab.tensors.formats import FORMATS, read_format, written_format

FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0, "fp8_e5m2": 57344.0}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def by_hand(name: str, byte: int) -> float:
    """Return the number that a byte encodes, by sign, exponent, fraction and the format's special bytes."""
    bits, bias = {"fp8_e4m3fn": (3, 7), "fp8_e4m3fnuz": (3, 8), "fp8_e5m2": (2, 15)}[name]
    sign, exponent, fraction = byte >> 7, (byte & 0x7F) >> bits, byte & ((1 << bits) - 1)
    if name == "fp8_e4m3fnuz" and byte == 0x80:
        return math.nan
    if name == "fp8_e4m3fn" and byte & 0x7F == 0x7F:
        return math.nan
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if fraction else math.copysign(math.inf, -sign)
    lead, power = (1, exponent - bias) if exponent else (0, 1 - bias)
    return (-1) ** sign * (lead + fraction / (1 << bits)) * 2.0**power


@pytest.mark.parametrize("name", FP8)
def test_decode_every_byte(name):
    """All 256 bytes decode as the format's definition says."""
    expected = torch.tensor([by_hand(name, byte) for byte in range(256)])
    torch.testing.assert_close(
        FORMATS[name].decode(ALL_BYTES), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", FP8)
@given(st.floats(-1e5, 1e5, width=32), st.sampled_from([1.0, 0.5, 4.0]))
def test_encode_takes_the_nearest_byte(name, value, scale):
    """The byte is the nearest finite one to value / scale; larger values saturate."""
    byte = FORMATS[name].encode(torch.tensor([value]), scale)
    finite = [n for n in (by_hand(name, b) for b in range(256)) if math.isfinite(n)]
    wanted = value / scale  # a power of two: exact
    chosen = by_hand(name, int(byte))
    assert abs(chosen - wanted) == min(abs(n - wanted) for n in finite)
    assert abs(chosen) <= LARGEST[name]


@pytest.mark.parametrize("name", FP8)
def test_ties_go_to_the_even_byte(name):
    """Half-way between two neighbours the even fraction is chosen, for both signs."""
    positive = [b for b in range(126) if math.isfinite(by_hand(name, b + 1))]
    middles = torch.tensor([(by_hand(name, b) + by_hand(name, b + 1)) / 2 for b in positive])
    even = torch.tensor([b + b % 2 for b in positive], dtype=torch.uint8)
    assert torch.equal(FORMATS[name].encode(middles), even)
    back = FORMATS[name].decode(FORMATS[name].encode(-middles))
    assert torch.equal(back, -FORMATS[name].decode(even))


@pytest.mark.parametrize("name", FP8)
def test_saturation_never_gives_nan_or_infinity(name):
    """Numbers above the maximum become the maximum, infinity included; NaN stays NaN."""
    format, largest = FORMATS[name], LARGEST[name]
    stored = format.encode(torch.tensor([1e9, -1e9, math.inf, -math.inf, largest * 1.2, math.nan]))
    decoded = format.decode(stored)
    assert decoded[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert decoded[5].isnan()


@pytest.mark.parametrize("name", FP8)
def test_every_byte_round_trips(name):
    """Encoding a decoded byte returns the byte, for every finite one."""
    format = FORMATS[name]
    finite = format.decode(ALL_BYTES).isfinite()
    assert finite.sum() >= 247
    assert torch.equal(format.encode(format.decode(ALL_BYTES[finite])), ALL_BYTES[finite])


def test_the_same_byte_means_half_as_much_in_fnuz():
    """A byte that is a number in both e4m3 formats is half as large in fnuz."""
    fn = FORMATS["fp8_e4m3fn"].decode(ALL_BYTES)
    fnuz = FORMATS["fp8_e4m3fnuz"].decode(ALL_BYTES)
    both = fn.isfinite() & fnuz.isfinite()
    assert both.sum() == 253  # not 0x7F and 0xFF, which are NaN in fn, nor 0x80, NaN in fnuz
    assert torch.equal(fnuz[both], fn[both] / 2)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_scale(name):
    """``nan`` is a NaN in the storage dtype; a scale multiplies the decoded number."""
    format = FORMATS[name]
    assert format.nan.dtype == format.storage
    assert format.decode(format.nan[None]).isnan().all()
    ones = format.encode(torch.ones(3))
    assert format.decode(ones, 2.5).tolist() == ([2.5] * 3 if format.is_fp8 else [1.0] * 3)
    assert format.is_fp8 == (name in FP8)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_fp8_means_where(platform):
    """ "fp8" is fnuz only on gfx942; e5m2 and auto do not depend on the platform."""
    e4m3 = "fp8_e4m3fnuz" if platform == "gfx942" else "fp8_e4m3fn"
    for kv_cache_dtype in ("fp8", "fp8_e4m3"):
        case = Case(platform=platform, kv_cache_dtype=kv_cache_dtype)
        assert written_format(case).name == e4m3
    assert written_format(Case(platform=platform, kv_cache_dtype="fp8_e5m2")).name == "fp8_e5m2"
    assert written_format(Case(platform=platform, dtype="bfloat16")).name == "bfloat16"
    machine = PLATFORMS[platform]
    assert read_format("fp8", torch.float16, machine.fp8_e4m3).name == e4m3
    assert read_format("auto", torch.float32, machine.fp8_e4m3).name == "float32"


def test_cache_format_overrides_the_platform():
    """A cache may be written in another format than the platform reads."""
    case = Case(kv_cache_dtype="fp8", cache_format="fp8_e4m3fn")
    assert written_format(case).name == "fp8_e4m3fn"
    assert case.machine.fp8_e4m3 == "fp8_e4m3fnuz"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_converting_numbers_to_uint8_gives_zeros(kv_cache_dtype):
    """The test's cast to uint8 makes every byte 0 for data of ±1e-3."""
    case = hostile(
        kv_cache_dtype=kv_cache_dtype, cache_write="numeric", distribution="uniform_1e-3"
    )
    cache = make_cache(case, make_batch(case))
    written = cache.provenance.seq != NOBODY
    assert cache.key.permute(0, 3, 1, 2, 4)[written].count_nonzero() == 0
    assert cache.value.permute(0, 3, 1, 2)[written].count_nonzero() == 0
    sound = make_cache(case.replace(cache_write="scaled"), make_batch(case))
    assert sound.key.permute(0, 3, 1, 2, 4)[written].count_nonzero() > 0
