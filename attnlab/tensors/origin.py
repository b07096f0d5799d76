"""Origin: which program made a call, where, and in which layer and step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnlab.case.errors import InvalidCall

STOCK_BFLOAT16 = "bfloat16 under Triton's interpreter"  # which takes their bits for integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a call comes from. Each field may be unknown: None.

    - ``op``: the function that was called, "module.function". The arguments of a function that attnlab has
      no record of (:data:`attnlab.case.ops.OPS`) are described by the record of a similar op.
    - ``program``, ``release``: the program that called, for example "vllm", and its release.
    - ``platform``: the GPU architecture, a name of :data:`attnlab.case.platforms.PLATFORMS`, or "cpu".
    - ``backend``: the program's attention backend; STOCK_BFLOAT16 for kernels in which Triton's own
      interpreter computed with bfloat16. ``layer``, ``step``, ``rank``: as the program counts.
    - ``test_id``: the pytest node id.
    """

    op: str | None = None
    program: str | None = None
    release: str | None = None
    platform: str | None = None
    backend: str | None = None
    layer: str | None = None
    step: int | None = None
    rank: int | None = None
    test_id: str | None = None

    @classmethod
    def of_dict(cls, values: object) -> "Origin":
        """Return the origin of a dict of its fields. Raises InvalidCall for another name or type."""
        if not isinstance(values, Mapping):
            raise InvalidCall(f"origin must be an object, got {values!r:.60}", field="origin")
        for name, value in values.items():
            expected = _TYPES.get(name)
            if expected is None:
                text = f"origin must have the fields {', '.join(_TYPES)}, got {name!r}"
                raise InvalidCall(text, field="origin")
            if value is not None and type(value) is not expected:
                text = f"origin.{name} must be {expected.__name__}, got {value!r:.60}"
                raise InvalidCall(text, field="origin")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are known."""
        values = {name: getattr(self, name) for name in _TYPES}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """Return the known fields as text."""
        known = ", ".join(f"{name} {value}" for name, value in self.to_dict().items())
        return known or "unknown"


_TYPES: dict[str, type] = {
    field.name: int if field.name in ("step", "rank") else str for field in fields(Origin)
}
