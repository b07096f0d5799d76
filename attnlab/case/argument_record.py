"""OpArgument and ScaledCache: what is declared about an op argument (:mod:`attnlab.case.op_arguments`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCache:
    """A cache whose keys and values have a scale per token and KV head.

    - ``numbers``: "int8", "fp8" (the platform's E4M3) or "int4". INT4 is rotated, has two numbers in a byte
      and the zero point in its scale. ``mode``: KVQuantMode of vLLM 0.33.0.
    - ``far_dims``: the dimension of the key's and of the value's scale cache that is beyond 2^31 elements;
      None for a scale cache with gaps.
    """

    numbers: str
    mode: int
    far_dims: tuple[int | None, int | None] = (None, 0)

    @property
    def is_packed(self) -> bool:
        """Answer whether two numbers share a byte."""
        return self.numbers == "int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpArgument:
    """An argument, or several that belong together, with the values that a Case passes.

    - ``ops``: the ops that have it, in some release. ``parameters``: the names that it sets.
    - ``summary``: what it does. ``needs``: fields of the Case with the value that they must have.
    - ``cache``: the format of the cache if it has a scale per token and head. ``has_fp8``: whether it stores
      numbers in the platform's E4M3.
    - ``least_head_size``: the smallest head_size.
    - ``refused_masks``: masks with which the op refuses the argument; ``refusal``: by which line.
    - ``no_xray``: why values of 0 and 1 do not show the weights of the keys, or "".
    - ``far_dim``: the dimension of tensors whose last index is beyond 2^31 elements, or None.
    - ``strided``: the argument that passes the same numbers with other strides, or None.
    """

    name: str
    ops: tuple[str, ...]
    parameters: tuple[str, ...]
    summary: str
    needs: Mapping[str, Any] = field(default_factory=dict)
    cache: ScaledCache | None = None
    has_fp8: bool = False
    least_head_size: int = 1
    refused_masks: tuple[str, ...] = ()
    refusal: str = ""
    no_xray: str = ""
    far_dim: int | None = None
    strided: str | None = None

    @property
    def base(self) -> str:
        """Return the name of the argument that passes the same numbers with the usual strides."""
        return self.name if self.strided is None else self.strided

    @property
    def is_packed(self) -> bool:
        """Answer whether the cache has two numbers in a byte."""
        return self.cache is not None and self.cache.is_packed

    @property
    def is_far(self) -> bool:
        """Answer whether it asks for tensors beyond 2^31 elements and nothing else."""
        dims = (self.far_dim,) if self.cache is None else self.cache.far_dims
        return None not in dims
