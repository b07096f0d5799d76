"""Coverage of arguments: which parameters of an op got one value only, and which strides, dtypes and far
offsets no case had.

It is built from the facts of the cases (:mod:`attnlab.kernels.vllm.argument_facts`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnlab.checker.argument_reasons import (
    FAR_REASONS,
    INDEX_DTYPES,
    NO_FAR,
    NO_STRIDE,
    VALUE_REASONS,
)
from attnlab.kernels.vllm.strides import USED_STRIDES

_INDEX_DTYPES = ("int32", "int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """What the cases of an op passed for a parameter.

    - ``values``: the values of a number, and "tensor"; ``dtypes``: of tensors.
    - ``strides``: dimensions whose stride differed from that of a contiguous tensor; ``no_strides``: the
      others that had more than one index. ``far``, ``not_far``: likewise, whether an offset exceeded 2^31.
    - ``gaps``: what is missing; ``reasons``: what is missing for a reason.
    """

    name: str
    values: tuple[str, ...]
    dtypes: tuple[str, ...]
    strides: tuple[int, ...]
    no_strides: tuple[int, ...]
    far: tuple[int, ...]
    not_far: tuple[int, ...]
    gaps: tuple[str, ...]
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return asdict(self)


def parameter_uses(
    op: str, parameters: Sequence[str], measured: Iterable[Mapping[str, Sequence[str]]]
) -> list[ParameterUse]:
    """Return what some cases of an op passed, in the order of its parameters."""
    facts: dict[str, set[str]] = {name: set() for name in parameters}
    for case in measured:
        for name, several in case.items():
            facts.setdefault(name, set()).update(several)
    return [_use(op, name, facts[name]) for name in parameters]


def _use(op: str, name: str, facts: set[str]) -> ParameterUse:
    values = _after(facts, "value ")
    dtypes = _after(facts, "dtype ")
    dims = {int(n) for n in _after(facts, "dim ")}
    strides, far = ({int(n) for n in _after(facts, word)} for word in ("stride ", "far "))
    gaps: list[str] = []
    reasons: list[str] = []
    reason = VALUE_REASONS.get((op, name)) or VALUE_REASONS.get(("", name))
    if reason is not None:
        reasons.append(reason)
    elif not dtypes and len(values) < 2:
        gaps.append("one value only")
    used = USED_STRIDES.get(op, {}).get(name, 0)
    for dim in sorted(dims - strides):
        text = f"stride {dim} is that of a contiguous tensor"
        gaps, reasons = _sorted(text, NO_STRIDE if dim >= used else "", gaps, reasons)
    for dim in sorted(dims - far):
        text = f"offsets of dimension {dim} are below 2^31"
        why = FAR_REASONS.get((op, name)) or (NO_FAR if dim >= used else "")
        gaps, reasons = _sorted(text, why, gaps, reasons)
    if set(dtypes) & set(_INDEX_DTYPES):
        wanted = INDEX_DTYPES.get((op, name), _INDEX_DTYPES)
        gaps += [f"never {dtype}" for dtype in wanted if dtype not in dtypes]
    return ParameterUse(
        name=name,
        values=(*values, *(["tensor"] if dtypes else [])),
        dtypes=tuple(dtypes),
        strides=tuple(sorted(strides)),
        no_strides=tuple(sorted(dims - strides)),
        far=tuple(sorted(far)),
        not_far=tuple(sorted(dims - far)),
        gaps=tuple(gaps),
        reasons=tuple(reasons),
    )


def _sorted(
    text: str, reason: str, gaps: list[str], reasons: list[str]
) -> tuple[list[str], list[str]]:
    """Return the gaps and the reasons with one more text, which is a gap without a reason."""
    if reason:
        return gaps, [*reasons, f"{text}: {reason}"]
    return [*gaps, text], reasons


def _after(facts: set[str], word: str) -> list[str]:
    """Return what follows a word in the facts that begin with it, sorted."""
    return sorted(fact.removeprefix(word) for fact in facts if fact.startswith(word))
