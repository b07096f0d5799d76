"""Cache writes in vLLM's further formats: cases, the bytes that they must store, and their check."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable, Unsupported
from attnlab.case.fields import Declared, Int, Number, OneOf, group
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.case.shown import Document, HostileReport
from attnlab.kernels.cuda.backend import cache_ops, has_source
from attnlab.kernels.vllm.backend import calling, load
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.cache_write import half_away, nibble, stored_numbers_of
from attnlab.tensors.formats import FORMATS, ElementFormat, read_format

INT8, FP8, INT4 = PER_TOKEN_HEAD = (
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
)
DIFFKV, LATENT, DS_LATENT = "diffkv", "mla", "fp8_ds_mla"
NHD, HND, X_SPLIT = PLAIN = ("nhd", "hnd", "x-split")
CUDA_FORMATS = (LATENT, DS_LATENT, *PLAIN)  # of the ops of csrc/cache_kernels.cu
CACHE_FORMATS = (*PER_TOKEN_HEAD, DIFFKV, *CUDA_FORMATS)
DS_SIZES = {"head_size": 512, "value_size": 64}
_POISON = 0x5A  # a byte of memory that nothing may write


_one = group("a write")
_count, _gap = Int(1, (1 << 20) - 1), Int(0, (1 << 20) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase(Declared):
    """A write of new tokens; the help of each field says what it is. Every fifth entry of slot_mapping is -1.

    ``cache_format``: a scale per token and head with int8, FP8 or INT4; "diffkv", keys and values of
    different width in one cache; "mla", latents and rotary parts in one cache with one head; "fp8_ds_mla",
    the same with 512 latent numbers in FP8, a scale for each 128, and 64 rotary numbers as they are; "nhd",
    "hnd" and "x-split", the layouts of reshape_and_cache_flash and reshape_and_cache.
    """

    cache_format: str = _one(NHD, OneOf(CACHE_FORMATS), "format of the cache")
    num_tokens: int = _one(11, _count, "tokens with an entry in slot_mapping")
    num_kv_heads: int = _one(3, _count, "KV heads")
    head_size: int = _one(32, _count, "elements of a head's key")
    value_size: int = _one(32, _count, "elements of a head's value")
    block_size: int = _one(16, _count, "tokens per block")
    kv_cache_dtype: str = _one(
        "auto",
        OneOf(("auto", "fp8", "fp8_e4m3", "fp8_e5m2")),
        "of formats without scales in the cache",
    )
    k_scale: float = _one(1.0, Number(), "as kv_cache_dtype; of mla, of the whole cache")
    v_scale: float = _one(1.0, Number(), "as kv_cache_dtype")
    padding: int = _one(0, _gap, "tokens after the last that has an entry in slot_mapping")
    gap: int = _one(64, _gap, "bytes after each page that belong to something else")
    slot_gap: int = _one(0, _gap, "elements after each slot (mla, fp8_ds_mla, nhd)")
    token_gap: int = _one(0, _gap, "elements after each token of key; twice as many of value")
    first_block: int = _one(
        0,
        Int(0, (1 << 32) - 1),
        "first block that is written to; the cache has as many more before it",
    )
    spread: float = _one(1.0, Number(zero=True), "standard deviation of keys and values")
    dtype: str = _one("float16", OneOf(("float16", "bfloat16", "float32")), "of new tokens")
    seed: int = _one(0, _gap, "seed of the data")
    platform: str = _one("sm_90", OneOf(tuple(PLATFORMS)), "the platform that is modelled")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the fields whose value the format does not have, and which it has."""
        for name, is_wrong, needed in self._rules_of_format():
            yield name, is_wrong, f"{needed} with {self.cache_format}"

    def _rules_of_format(self) -> Iterator[tuple[str, bool, str]]:
        kind, sizes = self.cache_format, (self.head_size, self.value_size)
        is_latent, is_ds, is_split = kind in (LATENT, DS_LATENT), kind == DS_LATENT, kind == X_SPLIT
        has_own_dtype = is_ds or kind in PER_TOKEN_HEAD
        yield "kv_cache_dtype", has_own_dtype and self.kv_cache_dtype != "auto", "auto"
        is_odd = kind == INT4 and any(size % 2 for size in sizes)
        yield "head_size", is_odd, "even, as value_size,"
        yield "num_kv_heads", is_latent and self.num_kv_heads != 1, "1"
        yield "gap", self.gap % 16 > 0 and not is_split, "a multiple of 16"
        yield "gap", is_split and self.gap > 0, "0, as there are no strides,"
        yield "first_block", self.first_block > 0 and kind not in CUDA_FORMATS, "0"
        has_slot_gap = is_latent or kind == NHD
        yield "slot_gap", self.slot_gap > 0 and not has_slot_gap, "0"
        yield "value_size", kind in PLAIN and len({*sizes}) > 1, "head_size"
        is_cut = is_split and self.head_size % self.x > 0
        yield "head_size", is_cut, f"a multiple of {self.x if is_split else 16}"
        for name, size in DS_SIZES.items():
            yield name, is_ds and getattr(self, name) != size, f"{size}"
        yield "dtype", is_ds and self.dtype == "float32", "of 16 bits"
        for name in ("token_gap", "slot_gap"):
            yield name, is_ds and getattr(self, name) % 16 > 0, "a multiple of 16"

    @property
    def x(self) -> int:
        """Return the elements of 16 bytes, by which the layout x-split divides a head."""
        return 16 // torch.empty(0, dtype=self.element).element_size()

    @property
    def machine(self) -> Platform:
        """Return the platform's facts."""
        return PLATFORMS[self.platform]

    @property
    def stored(self) -> ElementFormat:
        """Return the format of a stored element of a format without scales in the cache."""
        return read_format(self.kv_cache_dtype, FORMATS[self.dtype].dtype, self.machine.fp8_e4m3)

    @property
    def element(self) -> torch.dtype:
        """Return the dtype of the cache's elements; bytes for INT4, which has two in one, and fp8_ds_mla."""
        if self.cache_format in (INT4, DS_LATENT):
            return torch.uint8
        if self.cache_format == INT8:
            return torch.int8
        fp8 = FORMATS[self.machine.fp8_e4m3].dtype
        return fp8 if self.cache_format == FP8 else self.stored.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteInputs:
    """The tensors of a write.

    - ``key``, ``value``: [num_tokens + padding, num_kv_heads, size].
    - ``slots``: [num_tokens] int64, counted from the case's first block, -1 for a token that is not written.
    - ``caches``, ``scales``: by name, views [num_blocks, block_size, num_kv_heads, size] or without the last
      dimension, from the case's first block on, with a gap after each page. The keys of x-split are
      [num_blocks, block_size, num_kv_heads, size / x, x].
    - ``memory``: what lies under each from the first block on, uint8.
    """

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    caches: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]


def make_write_inputs(case: WriteCase) -> WriteInputs:
    """Return the tensors of a case before the write; all memory of caches has one byte value.

    Memory before the case's first block is not initialised, so that it needs address space alone.
    """
    generator = torch.Generator().manual_seed(case.seed)
    key = _new_tokens(case, case.head_size, case.token_gap, generator)
    value = _new_tokens(case, case.value_size, 2 * case.token_gap, generator)
    blocks = -(-case.num_tokens // case.block_size) + 2
    slots = torch.randperm(blocks * case.block_size, generator=generator)[: case.num_tokens]
    slots[4::5] = -1
    memory: dict[str, torch.Tensor] = {}

    def paged(name: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        each = torch.empty(0, dtype=dtype).element_size()
        shape, strides, page = page_layout(case, name, sizes)
        page += case.gap // each
        begin = case.first_block * page
        whole = torch.empty((begin + blocks * page) * each, dtype=torch.uint8)
        memory[name] = whole[begin * each :].fill_(_POISON)
        return memory[name].view(dtype).as_strided((blocks, *shape), (page, *strides), begin)

    caches = {name: paged(name, case.element, size) for name, size in _widths(case).items()}
    scales: dict[str, torch.Tensor] = {}
    if case.cache_format in PER_TOKEN_HEAD:
        scales = {
            f"{name}_scale_cache": paged(f"{name}_scale_cache", torch.float32) for name in "kv"
        }
    return WriteInputs(
        key=key, value=value, slots=slots, caches=caches, scales=scales, memory=memory
    )


def _new_tokens(case: WriteCase, size: int, gap: int, generator: torch.Generator) -> torch.Tensor:
    """Return keys or values, with NaN in the gaps after tokens."""
    count, dtype = case.num_tokens + case.padding, FORMATS[case.dtype].dtype
    numbers = torch.randn(count, case.num_kv_heads, size, generator=generator) * case.spread
    memory = torch.full((count, case.num_kv_heads * size + gap), float("nan"), dtype=dtype)
    tokens = memory[:, : case.num_kv_heads * size]
    tokens.copy_(numbers.flatten(1).to(dtype))
    return tokens.view(count, case.num_kv_heads, size)


def page_layout(
    case: WriteCase, name: str, sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape and strides of a page as [block_size, num_kv_heads, …], and its elements."""
    block_size, heads = case.block_size, case.num_kv_heads
    size = sizes[0] if sizes else 1
    page = block_size * heads * size
    if case.cache_format == HND:
        return (block_size, heads, size), (size, block_size * size, 1), page
    if case.cache_format == X_SPLIT and name == "value_cache":
        return (block_size, heads, size), (1, size * block_size, block_size), page
    if case.cache_format == X_SPLIT:
        shape = block_size, heads, size // case.x, case.x
        return shape, (case.x, size * block_size, block_size * case.x, 1), page
    slot = heads * size + case.slot_gap
    strides = (slot, size, 1) if sizes else (slot, 1)
    return (block_size, heads, *sizes), strides, block_size * slot


def _widths(case: WriteCase) -> dict[str, int]:
    """Return the elements of a head in each cache."""
    if case.cache_format == DS_LATENT:  # FP8 numbers, four float32 scales, rotary numbers
        return {"kv_cache": case.head_size + 16 + 2 * case.value_size}
    if case.cache_format in (DIFFKV, LATENT):
        return {"kv_cache": case.head_size + case.value_size}
    factor = 2 if case.cache_format == INT4 else 1
    return {"key_cache": case.head_size // factor, "value_cache": case.value_size // factor}


_REASONS: dict[str, dict[str, Any]] = {
    "pages with gaps, and tokens without a slot": {},
    "tokens of zeros: the smallest scale": {"spread": 0.0},
    "tokens beyond the range of FP8": {"spread": 600.0},
    "keys and values of different width": {"head_size": 24, "value_size": 48},
    "one slot per page": {"block_size": 1},
    "float32": {"dtype": "float32"},
    "tokens without an entry in slot_mapping": {"padding": 3},
}
_SCALED = {"k_scale": 0.5, "v_scale": 0.25}
_FP8 = {"an FP8 cache with scales": {"kv_cache_dtype": "fp8", **_SCALED}}
_CUDA: dict[str, dict[str, Any]] = {
    "keys and values as slices of larger tensors": {"token_gap": 32},
    "a block size that is no power of two": {"block_size": 12},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e5m2 with scales": {"kv_cache_dtype": "fp8_e5m2", **_SCALED},
    "rows that are not aligned to vectors": {"token_gap": 3},
    "slots with gaps": {"slot_gap": 16},
}
_OF_FORMAT: dict[str, dict[str, dict[str, Any]]] = {
    LATENT: {
        "the widths of DeepSeek": {"head_size": 512, "value_size": 64},
        "odd small widths": {"head_size": 7, "value_size": 3},
    },
    NHD: {"heads that are no multiple of a vector": {"head_size": 20, "value_size": 20}},
    HND: {"tokens of fewer than 32 elements": {"head_size": 8, "value_size": 8}},
    DS_LATENT: {"float16": {"dtype": "float16"}},
}
_LARGE = {"num_kv_heads": 8, "head_size": 128, "value_size": 128, "gap": 0}
# What a format does not have, by the reasons that need it.
_NOT = {
    DS_LATENT: {
        *("keys and values of different width", "float32", "an FP8 cache with scales"),
        *("fp8_e5m2 with scales", "rows that are not aligned to vectors"),
    },
    **{name: {"keys and values of different width"} for name in PLAIN},
}


def write_variants() -> dict[str, WriteCase]:
    """Return the hostile writes by their format and the reason why they are hostile."""
    return {
        f"{cache_format}: {reason}": _case(cache_format, **fields)
        for cache_format in CACHE_FORMATS
        for reason, fields in _reasons(cache_format).items()
    }


def _reasons(cache_format: str) -> dict[str, dict[str, Any]]:
    """Return the reasons of a format, each with the fields of its case."""
    found = _REASONS if cache_format in PER_TOKEN_HEAD else {**_REASONS, **_FP8}
    if cache_format in CUDA_FORMATS:
        found = {**found, **_CUDA, **_OF_FORMAT.get(cache_format, {}), **_far(cache_format)}
    absent = _NOT.get(cache_format, set())
    if cache_format not in (LATENT, DS_LATENT, NHD):
        absent = absent | {"slots with gaps"}
    return {reason: fields for reason, fields in found.items() if reason not in absent}


def _case(cache_format: str, **fields: Any) -> WriteCase:
    own: dict[str, Any] = {"num_kv_heads": 1 if cache_format in (LATENT, DS_LATENT) else 3}
    if cache_format == DS_LATENT:
        own |= {**DS_SIZES, "dtype": "bfloat16"}
    if cache_format == X_SPLIT:
        own["gap"] = 0
    return WriteCase(cache_format=cache_format, **{**own, **fields})


def _far(cache_format: str) -> dict[str, dict[str, Any]]:
    """Return a write to blocks that are more than 2³¹ elements after the first."""
    fields: dict[str, Any] = dict(_LARGE) if cache_format in PLAIN else {"gap": 0}
    if cache_format == LATENT:
        fields |= {"head_size": 512, "value_size": 64}
    if cache_format != DS_LATENT:
        fields["kv_cache_dtype"] = "fp8"
    case = _case(cache_format, **fields)
    page = page_layout(case, "key_cache", (next(iter(_widths(case).values())),))[2]
    return {"block offsets beyond 2³¹ elements": {**fields, "first_block": (1 << 31) // page + 1}}


# What a cache must hold after a write in a further format, and how far each number may be off.
#
# Scale per token and head (int8 and FP8). The scale is the largest magnitude divided by the largest number
# q of the format, at least 1e-6. Its division in float32 is off by 2⁻²². A number is divided by it, so the
# quotient is off by at most e = 2⁻²⁰ of itself, and then rounded: int8 half away from zero, FP8 to nearest
# even. The bound of a stored number is the distance to what the quotient times 1 ± e would become, which is
# 0 for most numbers.
#
# INT4. The scale is (largest − smallest) / 15, at least 1e-6; the zero point is −smallest / scale, rounded
# half away from zero and limited to 0 … 15. It replaces the lowest four bits of the scale, which moves it
# by at most 2⁻¹⁹ of itself. A number becomes number / scale + zero point, rounded and limited in the same
# way.
#
# Diffkv, MLA and the layouts of reshape_and_cache: see :mod:`attnlab.lab.cache_write`. MLA has one scale
# for both parts. fp8_ds_mla: see :mod:`attnlab.lab.writes`.

_QUOTIENT = 2.0**-20  # relative error of a quotient whose divisor is a rounded quotient, in float32
_SCALE, _PACKED_SCALE = 2.0**-22, 2.0**-19
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Numbers of a tensor as they are stored, and how far each may be off; float64, of equal shapes."""

    numbers: torch.Tensor
    bound: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedHalf:
    """What keys or values become: ``stored`` [n, num_kv_heads, size] before any scale, in units of the
    format; ``scale`` [n, num_kv_heads], or None without a scale cache; ``zero`` [n, num_kv_heads], the zero
    point of INT4.
    """

    stored: Stored
    scale: Stored | None = None
    zero: Stored | None = None


def expected_half(case: WriteCase, new: torch.Tensor, scale: float) -> ExpectedHalf:
    """Return what tokens [n, num_kv_heads, size] become. ``scale``: of a format that stores none."""
    if case.cache_format == INT4:
        return _int4(new.double())
    if case.cache_format in PER_TOKEN_HEAD:
        return _per_token_head(case, new.double())
    return ExpectedHalf(stored=plain_numbers(new, scale, case.stored))


def plain_numbers(new: torch.Tensor, scale: float | torch.Tensor, format: ElementFormat) -> Stored:
    """Return what tokens become in a format; FP8 numbers are divided by ``scale``."""
    numbers, bound = stored_numbers_of(new, scale, format, _QUOTIENT)
    return Stored(numbers=numbers, bound=bound)


def _per_token_head(case: WriteCase, new: torch.Tensor) -> ExpectedHalf:
    most = 127.0 if case.cache_format == INT8 else float(torch.finfo(case.element).max)
    scale = (new.abs().amax(-1) / most).clamp(min=_LEAST)

    def rounded(quotient: torch.Tensor) -> torch.Tensor:
        if case.cache_format == INT8:
            return half_away(quotient).clamp(-128, 127)
        return quotient.clamp(-most, most).to(case.element).double()

    stored = _with_sides(new / scale[..., None], rounded)
    return ExpectedHalf(stored=stored, scale=Stored(numbers=scale, bound=scale * _SCALE))


def _int4(new: torch.Tensor) -> ExpectedHalf:
    least, most = new.amin(-1), new.amax(-1)
    scale = ((most - least) / 15).clamp(min=_LEAST)
    zero = _with_sides(-least / scale, nibble)
    # A zero point next to a boundary moves every number of the token by one.
    each = _with_sides(new / scale[..., None] + zero.numbers[..., None], nibble)
    stored = Stored(numbers=each.numbers, bound=each.bound + zero.bound[..., None])
    return ExpectedHalf(
        stored=stored, scale=Stored(numbers=scale, bound=scale * _PACKED_SCALE), zero=zero
    )


def _with_sides(quotient: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
    """Return rounded quotients, with the distance to what a quotient that is off by 2⁻²⁰ of 16 becomes."""
    numbers = rounded(quotient)
    off = _QUOTIENT * quotient.abs().clamp(min=1.0)
    sides = [rounded(quotient + sign * off) for sign in (-1, 1)]
    return Stored(numbers=numbers, bound=torch.maximum(*((one - numbers).abs() for one in sides)))


# The cache format fp8_ds_mla: what a slot must hold.
#
# A slot has 512 latent numbers in FP8 e4m3, four float32 scales, one for each 128 of them, and 64 rotary
# numbers as they are. A reader multiplies each number by the stored scale. So a scale is right if no number
# is clipped and at most one bit is lost: it is between m = largest magnitude / 448 and 2 × max(m, 1e-4),
# within 2⁻²². 0.11.2 stores m, 0.33.0 the next power of two of max(m, 1e-4). A number is right if it is the
# token's divided by the stored scale, as :func:`attnlab.lab.writes.plain_numbers`.

_E4M3 = FORMATS["fp8_e4m3fn"]
_TILE, _LARGEST, _LATENTS_LEAST = 128, 448.0, 1e-4
_LATENTS_SCALE = 2.0**-22


def written_latents(
    case: WriteCase, inputs: WriteInputs, found: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, Stored]]:
    """Yield the kind of what slots hold, this, and what it must be. ``found``: [n, 656] bytes."""
    key, value = (
        new[: len(inputs.slots), 0][inputs.slots >= 0] for new in (inputs.key, inputs.value)
    )
    numbers, scales, rotary = _parts(case, found)
    yield SCALES, scales.double(), _scales(key)
    latents = plain_numbers(key, scales.repeat_interleave(_TILE, -1), _E4M3)
    yield NUMBERS, numbers.double(), latents
    yield NUMBERS, rotary.double(), Stored(numbers=value.double(), bound=torch.zeros(value.shape))


def write_latents(case: WriteCase, inputs: WriteInputs) -> None:
    """Write the correct bytes, with the scales of 0.33.0: a model of the op."""
    rows = torch.nonzero(inputs.slots >= 0).flatten()
    key, value = inputs.key[rows, 0], inputs.value[rows, 0]
    largest = key.float().unflatten(-1, (-1, _TILE)).abs().amax(-1)
    scales = (largest / _LARGEST).clamp(min=_LATENTS_LEAST).log2().ceil().exp2()
    numbers = _E4M3.encode(key, scales.repeat_interleave(_TILE, -1))
    slots = inputs.slots[rows]
    parts = [one.contiguous().view(torch.uint8) for one in (numbers, scales, value)]
    block, at = slots // case.block_size, slots % case.block_size
    inputs.caches["kv_cache"][block, at, 0] = torch.cat(parts, -1)


def _parts(case: WriteCase, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the latent numbers without scales, the scales, and the rotary numbers of [n, 656] bytes."""
    sizes = [case.head_size, 4 * case.head_size // _TILE, 2 * case.value_size]
    numbers, scales, rotary = (part.contiguous() for part in slots.split(sizes, -1))
    dtype = FORMATS[case.dtype].dtype
    return numbers.view(_E4M3.dtype), scales.view(torch.float32), rotary.view(dtype)


def _scales(key: torch.Tensor) -> Stored:
    least = key.double().unflatten(-1, (-1, _TILE)).abs().amax(-1) / _LARGEST
    most = 2 * least.clamp(min=_LATENTS_LEAST)
    middle = (least + most) / 2
    return Stored(numbers=middle, bound=middle - least + most * _LATENTS_SCALE)


def cuda_write(source: Source) -> Callable[[WriteCase, WriteInputs], None]:
    """Return the writer that calls the CUDA op of a format; it raises Unsupported without the source."""

    def write(case: WriteCase, inputs: WriteInputs) -> None:
        op, tensors = _op(case, inputs)
        if not has_source(source.root):
            raise Unsupported(
                f"{op} is a C++ op: its source csrc/cache_kernels.cu is in an sdist or a checkout, not in "
                f"this vLLM ({source.kind}); attnlab fetch --sdist 0.33.0 downloads one"
            )
        if case.machine.is_rocm:
            raise Unsupported(f"platform must be one of NVIDIA with {op}, got {case.platform}")
        dtype = DS_LATENT if case.cache_format == DS_LATENT else case.kv_cache_dtype
        cache_ops(source.root)(op, tensors, dtype)

    return write


def _op(case: WriteCase, inputs: WriteInputs) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of a format's op, and its tensors by the names of its parameters."""
    first = case.first_block * case.block_size
    caches = {name: _whole(view, case.first_block) for name, view in inputs.caches.items()}
    slots = torch.where(inputs.slots < 0, inputs.slots, inputs.slots + first)
    scales = _scale_tensors(case)
    if case.cache_format in (LATENT, DS_LATENT):
        return "concat_and_cache_mla", {
            "kv_c": inputs.key[:, 0],
            "k_pe": inputs.value[:, 0],
            "kv_cache": caches["kv_cache"][:, :, 0],
            "slot_mapping": slots,
            "scale": scales["k_scale"],
        }
    tensors = {"key": inputs.key, "value": inputs.value, "slot_mapping": slots, **caches, **scales}
    if case.cache_format == X_SPLIT:
        tensors["key_cache"] = caches["key_cache"].permute(0, 2, 3, 1, 4)
        tensors["value_cache"] = caches["value_cache"].permute(0, 2, 3, 1)
        return "reshape_and_cache", tensors
    return "reshape_and_cache_flash", tensors


def _whole(view: torch.Tensor, first_block: int) -> torch.Tensor:
    """Return the view of a cache from block 0 on."""
    return view.as_strided((first_block + view.shape[0], *view.shape[1:]), view.stride(), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Document):
    """A hostile write: what it got wrong, by kind, or the error for which it could not run.

    ``failed``: the error is a failure of the op itself, for example an access outside of its tensors.
    """

    _more = ("status",)
    _without = ("failed",)

    name: str
    case: WriteCase
    wrong: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    failed: bool = False

    @property
    def status(self) -> str:
        """Return "match", "mismatch", "failed" or "unavailable"."""
        if self.failed:
            return "failed"
        if self.error is not None:
            return "unavailable"
        return "mismatch" if self.wrong else "match"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriteReport(HostileReport):
    """What hostile cache writes found. ``backend``: whose ops ran."""

    _noun = "writes"

    backend: str
    results: tuple[WriteResult, ...]


NUMBERS, SCALES, ZERO_POINTS, ELSEWHERE = "numbers", "scales", "zero points", "elsewhere"
_MODES = {INT8: 2, FP8: 3, INT4: 4}  # KVQuantMode of vLLM 0.33.0
Writer = Callable[[WriteCase, WriteInputs], None]


def check_write(case: WriteCase, write: Writer) -> dict[str, int]:
    """Return what ``write`` gets wrong, by kind the number of wrong elements; empty if nothing is.

    Kinds: "numbers", "scales" and "zero points" of written tokens; "elsewhere", bytes of slots that no token
    has and of the gaps after pages. It mutates the memory of its inputs.
    """
    inputs = make_write_inputs(case)
    before = {name: one.clone() for name, one in inputs.memory.items()}
    write(case, inputs)
    wrong = dict.fromkeys((NUMBERS, SCALES, ZERO_POINTS, ELSEWHERE), 0)
    for kind, found, expected in _written(case, inputs):
        wrong[kind] += int((~((found - expected.numbers).abs() <= expected.bound)).sum())
    wrong[ELSEWHERE] = _changed_elsewhere(inputs, before)
    return {name: count for name, count in wrong.items() if count}


def model_write(case: WriteCase, inputs: WriteInputs) -> None:
    """Write the correct bytes: a model of the op."""
    if case.cache_format == DS_LATENT:
        return write_latents(case, inputs)
    written = inputs.slots >= 0
    for cache, scale, columns, half in _halves(case, inputs):
        numbers = half.stored.numbers
        if case.cache_format == INT4:
            pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
            numbers = pairs[..., 0] | (pairs[..., 1] << 4)
        block = inputs.slots[written] // case.block_size
        at = inputs.slots[written] % case.block_size
        view = cache[..., columns]
        view[block, at] = numbers.to(case.element).reshape(-1, *view.shape[2:])
        if scale is not None and half.scale is not None:
            stored = half.scale.numbers.float()
            if half.zero is not None:
                bits = (stored.view(torch.int32) & -16) | half.zero.numbers.int()
                stored = bits.view(torch.float32)
            scale[block, at] = stored


def vllm_write(source: Source, where: str = "cpu") -> Writer:
    """Return the writer that calls the op of a release.

    Triton ops run under the interpreter or on a GPU, CUDA ops on the emulated device. It raises Unsupported
    for a format whose op the source does not have.
    """
    by_cuda = cuda_write(source)

    def write(case: WriteCase, inputs: WriteInputs) -> None:
        if case.cache_format in CUDA_FORMATS:
            return by_cuda(case, inputs)
        loader = load(source, case.machine, where).loader
        function, arguments = _write_op(case, inputs, loader)
        known = inspect.signature(function).parameters  # older releases have no kv_quant_mode
        with calling(function.__name__, source):
            function(**{name: one for name, one in arguments.items() if name in known})

    return write


def _write_op(
    case: WriteCase, inputs: WriteInputs, loader: Any
) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a format and its arguments."""
    given: dict[str, Any] = {
        "key": inputs.key,
        "value": inputs.value,
        "slot_mapping": inputs.slots,
        **inputs.caches,
        **inputs.scales,
    }
    if case.cache_format == INT4:
        # Without the rotation before it.
        module, name = loader.load("int4_per_token_head"), "_run_reshape_kernel"
        given |= {"packing_factor": 2, "kernel": module._reshape_cache_int4_kernel}
    else:
        module = loader.load("triton_reshape_and_cache_flash")
        if case.cache_format == DIFFKV:
            name = "triton_reshape_and_cache_flash_diffkv"
            given |= {**_scale_tensors(case), "kv_cache_dtype": case.kv_cache_dtype}
        else:
            name = "triton_reshape_and_cache_flash_per_token_head_quant"
            given["kv_quant_mode"] = _MODES[case.cache_format]
    if not hasattr(module, name):
        raise Unsupported(f"this release has no {name}")
    return getattr(module, name), given


def _scale_tensors(case: WriteCase) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([getattr(case, name)]) for name in ("k_scale", "v_scale")}


def _halves(
    case: WriteCase, inputs: WriteInputs
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, slice, ExpectedHalf]]:
    """Yield keys, then values: their cache, their scale cache, their columns, and what they must be."""
    written = inputs.slots >= 0
    v_scale = case.k_scale if case.cache_format == LATENT else case.v_scale
    for name, new, scale, columns in (
        ("key", inputs.key, case.k_scale, slice(0, case.head_size)),
        ("value", inputs.value, v_scale, slice(case.head_size, None)),
    ):
        half = expected_half(case, new[: len(written)][written], scale)
        if "kv_cache" in inputs.caches:
            yield inputs.caches["kv_cache"], None, columns, half
        else:
            scales = inputs.scales.get(f"{name[0]}_scale_cache")
            yield inputs.caches[f"{name}_cache"], scales, slice(None), half


def _written(case: WriteCase, inputs: WriteInputs) -> Iterator[tuple[str, torch.Tensor, Stored]]:
    """Yield what the slots of written tokens hold, as kind, numbers and what they must be."""
    slots = inputs.slots[inputs.slots >= 0]
    if case.cache_format == DS_LATENT:
        yield from written_latents(case, inputs, inputs.caches["kv_cache"].flatten(0, 1)[slots, 0])
        return
    for cache, scale, columns, half in _halves(case, inputs):
        found = cache.flatten(0, 1)[slots][..., columns].flatten(2)
        if case.cache_format == INT4:
            found = torch.stack([found & 0xF, found >> 4], -1).flatten(-2)
        yield NUMBERS, found.double(), half.stored
        if scale is None or half.scale is None:
            continue
        one = scale.flatten(0, 1)[slots]
        yield SCALES, one.double(), half.scale
        if half.zero is not None:
            yield ZERO_POINTS, (one.view(torch.int32) & 0xF).double(), half.zero


def _changed_elsewhere(inputs: WriteInputs, before: dict[str, torch.Tensor]) -> int:
    """Return how many bytes outside the slots of written tokens changed."""
    count, slots = 0, inputs.slots[inputs.slots >= 0]
    for name, view in {**inputs.caches, **inputs.scales}.items():
        block, at = slots // view.shape[1], slots % view.shape[1]
        marks = torch.zeros_like(inputs.memory[name])
        marked = marks.view(view.dtype).as_strided(view.shape, view.stride())
        marked[block, at] = 1
        each = view.element_size()
        is_own = marks.view(-1, each).any(1).repeat_interleave(each)
        count += int(((inputs.memory[name] != before[name]) & ~is_own).sum())
    return count


def check_writes(
    *, backend: str = "vllm", source: Path | str | None = None, device: str = "cpu"
) -> WriteReport:
    """Run hostile cache writes in further formats, and compare the bytes of the cache.

    ``backend``: "vllm" for the ops of ``source`` (None: the installed vLLM), or "model". The CUDA ops need an
    sdist or a checkout: their source is compiled, and runs on the emulated device. Raises
    InvalidCase for a source that is no vLLM, and Unavailable if none is installed.
    """
    vllm = find_source(source) if backend == "vllm" else None
    write = model_write if vllm is None else vllm_write(vllm, device)
    results = []
    for name, case in write_variants().items():
        try:
            found: dict[str, Any] = {"wrong": check_write(case, write)}
        except (Unavailable, KernelRejected) as error:
            found = {"error": str(error), "failed": isinstance(error, KernelFailed)}
        results.append(WriteResult(name=name, case=case, **found))
    text = "model" if vllm is None else vllm.text()
    return WriteReport(backend=text, results=tuple(results))
