"""Element formats of a KV cache: encoding and decoding of numbers."""

from dataclasses import dataclass

import torch

from attnlab.case.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A format of the elements of a KV cache.

    ``dtype`` is the numeric type. ``storage`` is the dtype of vLLM's tensor: ``dtype`` itself for 16 and
    32 bit, uint8 for FP8.
    """

    name: str
    dtype: torch.dtype
    storage: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Answer whether the elements are FP8 bytes, which have a scale."""
        return self.storage is torch.uint8

    @property
    def nan(self) -> torch.Tensor:
        """Return a NaN in this format, a scalar tensor of dtype ``storage``."""
        return torch.tensor(float("nan")).to(self.dtype).view(self.storage)

    def encode(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return ``values`` in this format, of dtype ``storage``.

        For FP8, values are divided by ``scale``, clamped to the finite range and rounded to nearest even,
        as ``reshape_and_cache`` does (csrc/cache_kernels.cu, vLLM 0.11.2). Otherwise ``scale`` is ignored.
        """
        if not self.is_fp8:
            return values.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return (values.float() / scale).clamp(-limit, limit).to(self.dtype).view(self.storage)

    def decode(self, stored: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the numbers that ``stored`` encodes, times ``scale`` for FP8; float32."""
        if not self.is_fp8:
            return stored.float()
        values = stored.view(self.dtype).float()
        return values if scale == 1.0 else values * scale


_FP8 = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}
_PLAIN = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

FORMATS: dict[str, ElementFormat] = {
    **{name: ElementFormat(name=name, dtype=t, storage=t) for name, t in _PLAIN.items()},
    **{name: ElementFormat(name=name, dtype=t, storage=torch.uint8) for name, t in _FP8.items()},
}


def read_format(kv_cache_dtype: str, dtype: torch.dtype, fp8_e4m3: str) -> ElementFormat:
    """Return the format in which a kernel reads a cache.

    For "auto" it is the model's ``dtype``; for "fp8" and "fp8_e4m3" the platform's ``fp8_e4m3``
    (``fp8_dtype`` in vllm/platforms/rocm.py); for "fp8_e5m2" that format.
    """
    if kv_cache_dtype == "auto":
        return FORMATS[str(dtype).removeprefix("torch.")]
    return FORMATS["fp8_e5m2" if kv_cache_dtype == "fp8_e5m2" else fp8_e4m3]


def written_format(case: Case) -> ElementFormat:
    """Return the format in which the Case's cache is written: given, or the one the platform reads."""
    if case.cache_format is not None:
        return FORMATS[case.cache_format]
    return read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, case.machine.fp8_e4m3)


def store(case: Case, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``tokens`` as the Case's cache stores them.

    They are encoded with ``scale``, or, for ``cache_write="numeric"``, cast to uint8 as in vLLM's test
    (0.11.2 and 0.33.0), which makes every byte 0 for data of ±1e-3.
    """
    if case.cache_write == "numeric":
        return tokens.to(torch.uint8)
    return written_format(case).encode(tokens, scale)
