"""All ops that are recorded: those of attnlab, and those of the entry-point group ``attnlab.ops``."""

import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.recorder.other_ops import other_ops
from attnlab.recorder.recorded_op import RecordedOp, op_of_text
from attnlab.recorder.vllm_ops import vllm_ops

GROUP = "attnlab.ops"


def recorded_ops(
    further: Iterable[RecordedOp | str] = (), *, on_error: Callable[[str, Exception], None]
) -> tuple[RecordedOp, ...]:
    """Return every op to record. ``further``: more of them, as RecordedOp or "module:function".

    An entry point that fails is passed to ``on_error`` with its name, and left out.
    """
    given = [op_of_text(one) if isinstance(one, str) else one for one in further]
    found = [*vllm_ops(), *other_ops()]
    for point in entry_points(group=GROUP):
        try:
            found += _ops_of(point.load())
        except Exception as error:  # a plug-in of another package
            on_error(f"entry point {point.name} of {GROUP}", error)
    return (*found, *given)


def _ops_of(loaded: Any) -> list[RecordedOp]:
    """Return the ops of an entry point: RecordedOps, or a function whose arguments have known names."""
    if isinstance(loaded, RecordedOp):
        return [loaded]
    if inspect.isfunction(loaded):
        return [RecordedOp(module=loaded.__module__, function=loaded.__name__)]
    if isinstance(loaded, (list, tuple)):
        return [op for one in loaded for op in _ops_of(one)]
    raise InvalidCase(f"{GROUP} must name a RecordedOp or a function, got {loaded!r:.60}")


def signature_of(op: RecordedOp, function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function; those of torch's SDPA, which has no signature, are known."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        if op.function != "scaled_dot_product_attention":
            raise
    return inspect.signature(_sdpa_parameters)


def _sdpa_parameters(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Have the parameters of torch.nn.functional.scaled_dot_product_attention (torch 2.13)."""
