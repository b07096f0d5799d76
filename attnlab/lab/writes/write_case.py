"""WriteCase: a write of new tokens to a paged cache in one of vLLM's further formats, and its inputs."""

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.fields import refuse
from attnlab.case.platforms import PLATFORMS, Platform
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
_COUNTS = ("num_tokens", "num_kv_heads", "head_size", "value_size", "block_size")
_GAPS = ("padding", "gap", "token_gap", "slot_gap", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase:
    """A write of new tokens.

    - ``cache_format``: a scale per token and head with int8, FP8 or INT4; "diffkv", keys and values of
      different width in one cache; "mla", latents and rotary parts in one cache with one head;
      "fp8_ds_mla", the same with 512 latent numbers in FP8, a scale for each 128, and 64 rotary numbers as
      they are; "nhd", "hnd" and "x-split", the layouts of reshape_and_cache_flash and reshape_and_cache.
    - ``kv_cache_dtype``, ``k_scale``, ``v_scale``: of formats without scales in the cache; mla has k_scale
      alone.
    - ``padding``: tokens after the last that has an entry in slot_mapping. Every fifth entry is -1.
    - ``gap``: bytes after each page that belong to something else. ``slot_gap``: elements after each slot
      (mla, fp8_ds_mla, nhd). ``token_gap``: elements after each token of ``key``; twice as many of ``value``.
    - ``first_block``: the first block that tokens are written to; the cache has as many more before it.
    - ``spread``: the standard deviation of keys and values; 0 gives tokens of zeros.
    """

    cache_format: str
    num_tokens: int = 11
    num_kv_heads: int = 3
    head_size: int = 32
    value_size: int = 32
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    padding: int = 0
    gap: int = 64
    slot_gap: int = 0
    token_gap: int = 0
    first_block: int = 0
    spread: float = 1.0
    dtype: str = "float16"
    seed: int = 0
    platform: str = "sm_90"

    def __post_init__(self) -> None:
        """Check every field; raise InvalidCase before anything is allocated."""
        allowed: dict[str, tuple[str, ...]] = {
            "cache_format": CACHE_FORMATS,
            "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
            "dtype": ("float16", "bfloat16", "float32"),
            "platform": tuple(PLATFORMS),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                refuse(name, f"one of {', '.join(choices)}", getattr(self, name))
        for name in (*_COUNTS, *_GAPS, "first_block"):
            least, most = int(name in _COUNTS), 1 << (32 if name == "first_block" else 20)
            if type(getattr(self, name)) is not int or not least <= getattr(self, name) < most:
                refuse(name, f"an integer from {least} to {most - 1}", getattr(self, name))
        for name in ("k_scale", "v_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                refuse(name, "a positive finite number", getattr(self, name))
        self._check_format()

    def _check_format(self) -> None:
        """Refuse what a format does not have."""
        has_own_dtype = self.cache_format in (*PER_TOKEN_HEAD, DS_LATENT)
        if self.kv_cache_dtype != "auto" and has_own_dtype:
            refuse("kv_cache_dtype", f"auto with {self.cache_format}", self.kv_cache_dtype)
        if self.cache_format == INT4 and (self.head_size % 2 or self.value_size % 2):
            refuse("head_size", "even with INT4, as value_size", self.head_size)
        if self.cache_format in (LATENT, DS_LATENT) and self.num_kv_heads != 1:
            refuse("num_kv_heads", f"1 with {self.cache_format}", self.num_kv_heads)
        if self.gap % 16:
            refuse("gap", "a multiple of 16", self.gap)
        if self.first_block and self.cache_format not in CUDA_FORMATS:
            refuse("first_block", f"0 with {self.cache_format}", self.first_block)
        if self.slot_gap and self.cache_format not in (LATENT, DS_LATENT, NHD):
            refuse("slot_gap", f"0 with {self.cache_format}", self.slot_gap)
        if self.cache_format in PLAIN and self.value_size != self.head_size:
            refuse("value_size", f"head_size with {self.cache_format}", self.value_size)
        if self.cache_format == X_SPLIT:
            self._check_x_split()
        if self.cache_format == DS_LATENT:
            self._check_ds()

    def _check_x_split(self) -> None:
        if self.gap:
            refuse("gap", "0 with x-split, which has no strides", self.gap)
        if self.head_size % self.x:
            refuse("head_size", f"a multiple of {self.x} with x-split", self.head_size)

    def _check_ds(self) -> None:
        for name, size in DS_SIZES.items():
            if getattr(self, name) != size:
                refuse(name, f"{size} with {DS_LATENT}", getattr(self, name))
        if self.dtype == "float32":
            refuse("dtype", f"of 16 bits with {DS_LATENT}", self.dtype)
        for name in ("token_gap", "slot_gap"):
            if getattr(self, name) % 16:
                refuse(name, f"a multiple of 16 with {DS_LATENT}", getattr(self, name))

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


def by_slot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a paged tensor as [num_slots, …], a copy."""
    return tensor.flatten(0, 1)


Arguments = dict[str, Any]
