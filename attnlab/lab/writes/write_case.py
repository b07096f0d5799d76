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
DIFFKV, LATENT = "diffkv", "mla"
CACHE_FORMATS = (*PER_TOKEN_HEAD, DIFFKV, LATENT)
_POISON = 0x5A  # a byte of memory that nothing may write
_COUNTS = ("num_tokens", "num_kv_heads", "head_size", "value_size", "block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase:
    """A write of new tokens.

    - ``cache_format``: a scale per token and head with int8, FP8 or INT4; "diffkv", keys and values of
      different width in one cache; "mla", latents and rotary parts in one cache with one head.
    - ``kv_cache_dtype``, ``k_scale``, ``v_scale``: of diffkv and mla, which has k_scale alone.
    - ``padding``: tokens after the last that has an entry in slot_mapping. Every fifth entry is -1.
    - ``gap``: bytes after each page that belong to something else. ``spread``: the standard deviation of keys
      and values; 0 gives tokens of zeros.
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
    spread: float = 1.0
    dtype: str = "float16"
    seed: int = 0
    platform: str = "sm_90"

    def __post_init__(self) -> None:
        """Check every field; raise InvalidCase before anything is allocated."""
        allowed: dict[str, tuple[str, ...]] = {
            "cache_format": CACHE_FORMATS,
            "kv_cache_dtype": ("auto", "fp8"),
            "dtype": ("float16", "bfloat16", "float32"),
            "platform": tuple(PLATFORMS),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                refuse(name, f"one of {', '.join(choices)}", getattr(self, name))
        for name in (*_COUNTS, "padding", "gap", "seed"):
            least = int(name in _COUNTS)
            if type(getattr(self, name)) is not int or not least <= getattr(self, name) < 1 << 20:
                refuse(name, f"an integer of at least {least}", getattr(self, name))
        for name in ("k_scale", "v_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                refuse(name, "a positive finite number", getattr(self, name))
        self._check_format()

    def _check_format(self) -> None:
        """Refuse what a format does not have."""
        if self.kv_cache_dtype != "auto" and self.cache_format in PER_TOKEN_HEAD:
            refuse("kv_cache_dtype", f"auto with {self.cache_format}", self.kv_cache_dtype)
        if self.cache_format == INT4 and (self.head_size % 2 or self.value_size % 2):
            refuse("head_size", "even with INT4, as value_size", self.head_size)
        if self.cache_format == LATENT and self.num_kv_heads != 1:
            refuse("num_kv_heads", "1 with mla", self.num_kv_heads)
        if self.gap % 16:
            refuse("gap", "a multiple of 16", self.gap)

    @property
    def machine(self) -> Platform:
        """Return the platform's facts."""
        return PLATFORMS[self.platform]

    @property
    def stored(self) -> ElementFormat:
        """Return the format of a stored element of diffkv and mla."""
        return read_format(self.kv_cache_dtype, FORMATS[self.dtype].dtype, self.machine.fp8_e4m3)

    @property
    def element(self) -> torch.dtype:
        """Return the dtype of the cache's elements; a byte of INT4 has two."""
        if self.cache_format == INT4:
            return torch.uint8
        if self.cache_format == INT8:
            return torch.int8
        fp8 = FORMATS[self.machine.fp8_e4m3].dtype
        return fp8 if self.cache_format == FP8 else self.stored.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteInputs:
    """The tensors of a write.

    - ``key``, ``value``: [num_tokens + padding, num_kv_heads, size]. ``slots``: [num_tokens] int64, -1 for a
      token that is not written.
    - ``caches``, ``scales``: by name, views [num_blocks, block_size, num_kv_heads, size] or without the last
      dimension, with a gap after each page. ``memory``: what lies under each, uint8.
    """

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    caches: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]


def make_write_inputs(case: WriteCase) -> WriteInputs:
    """Return the tensors of a case before the write; all memory of caches has one byte value."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, count = FORMATS[case.dtype].dtype, case.num_tokens + case.padding
    key, value = (
        (torch.randn(count, case.num_kv_heads, size, generator=generator) * case.spread).to(dtype)
        for size in (case.head_size, case.value_size)
    )
    blocks = -(-case.num_tokens // case.block_size) + 2
    slots = torch.randperm(blocks * case.block_size, generator=generator)[: case.num_tokens]
    slots[4::5] = -1
    memory: dict[str, torch.Tensor] = {}

    def paged(name: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        each = torch.empty(0, dtype=dtype).element_size()
        inner = case.block_size * case.num_kv_heads * (sizes[0] if sizes else 1)
        page = inner + case.gap // each
        memory[name] = torch.full((blocks * page * each,), _POISON, dtype=torch.uint8)
        tokens = (case.block_size, case.num_kv_heads, *sizes)
        strides = torch.empty(tokens).stride()
        return memory[name].view(dtype).as_strided((blocks, *tokens), (page, *strides))

    widths = _widths(case)
    caches = {name: paged(name, case.element, size) for name, size in widths.items()}
    scales: dict[str, torch.Tensor] = {}
    if case.cache_format in PER_TOKEN_HEAD:
        scales = {
            f"{name}_scale_cache": paged(f"{name}_scale_cache", torch.float32) for name in "kv"
        }
    return WriteInputs(
        key=key, value=value, slots=slots, caches=caches, scales=scales, memory=memory
    )


def _widths(case: WriteCase) -> dict[str, int]:
    """Return the elements of a head in each cache."""
    if case.cache_format in (DIFFKV, LATENT):
        return {"kv_cache": case.head_size + case.value_size}
    factor = 2 if case.cache_format == INT4 else 1
    return {"key_cache": case.head_size // factor, "value_cache": case.value_size // factor}


def by_slot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a paged tensor as [num_slots, …], a copy."""
    return tensor.flatten(0, 1)


Arguments = dict[str, Any]
