"""Element formats of a KV cache: how numbers become bytes, and bytes numbers."""

from dataclasses import dataclass

import torch

from attnlab.case.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A format of the elements of a KV cache.

    ``dtype`` is what the bytes mean, ``storage`` the dtype of the tensor that vLLM keeps them in:
    itself for 16 and 32 bit, uint8 for FP8.
    """

    name: str
    dtype: torch.dtype
    storage: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Answer whether the elements are FP8 bytes, and so have a scale."""
        return self.storage is torch.uint8

    @property
    def nan(self) -> torch.Tensor:
        """Return a NaN of this format, a scalar of dtype ``storage``."""
        return torch.tensor(float("nan")).to(self.dtype).view(self.storage)

    def encode(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return ``values`` in this format, as ``storage``.

        FP8 is the value divided by ``scale``, saturated to the largest finite number, rounded to
        nearest even: what ``reshape_and_cache`` does (csrc/cache_kernels.cu, vLLM 0.11.2).
        """
        if not self.is_fp8:
            return values.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return (values.float() / scale).clamp(-limit, limit).to(self.dtype).view(self.storage)

    def decode(self, stored: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the numbers that ``stored`` stands for, float32."""
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
    """Return the format that a kernel reads a cache in.

    "auto" is the model's own ``dtype``; "fp8" and "fp8_e4m3" are ``fp8_e4m3``, which is a fact of the
    platform (vllm/platforms/rocm.py ``fp8_dtype``); "fp8_e5m2" is itself.
    """
    if kv_cache_dtype == "auto":
        return FORMATS[str(dtype).removeprefix("torch.")]
    return FORMATS["fp8_e5m2" if kv_cache_dtype == "fp8_e5m2" else fp8_e4m3]


def written_format(case: Case) -> ElementFormat:
    """Return the format that the Case's cache is written in: the platform's, unless overridden."""
    if case.cache_format is not None:
        return FORMATS[case.cache_format]
    return read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, case.machine.fp8_e4m3)


def store(case: Case, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``tokens`` as the Case's cache holds them.

    ``format.encode`` with ``scale``, or, for ``cache_write="numeric"``, the conversion of each number to
    uint8 that vLLM's own test does (0.11.2 and 0.33.0): for data of ±1e-3 every byte is 0.
    """
    if case.cache_write == "numeric":
        return tokens.to(torch.uint8)
    return written_format(case).encode(tokens, scale)
