"""Wrappers of ops: inside a layer's call, they report the op's arguments to the session."""

import functools
import inspect
from typing import Any, Protocol

from attnlab.recorder.catalogue import signature_of
from attnlab.recorder.patches import Function
from attnlab.recorder.recorded_op import RecordedOp, binder
from attnlab.serving.begun_op import BegunOp
from attnlab.serving.layer_call import Arguments, LayerCall

# Ops that write the cache and have a parameter slot_mapping (vLLM 0.11.2 to 0.33.0).
WRITE_OPS = frozenset(
    {
        *(
            f"vllm._custom_ops.{name}"
            for name in (
                "cpu_attn_reshape_and_cache",
                "reshape_and_cache",
                "reshape_and_cache_flash",
                "concat_and_cache_mla",
            )
        ),
        *(
            f"{folder}.triton_reshape_and_cache_flash.{name}"
            for folder in ("vllm.v1.attention.ops", "vllm.attention.ops")
            for name in (
                "triton_reshape_and_cache_flash",
                "triton_reshape_and_cache_flash_diffkv",
                "triton_reshape_and_cache_flash_per_token_head_quant",
            )
        ),
    }
)


class OpHooks(Protocol):
    """What the wrappers of ops call."""

    def current(self) -> LayerCall | None: ...
    def op_begins(
        self, call: LayerCall, op: RecordedOp, arguments: Arguments
    ) -> BegunOp | None: ...
    def op_ended(self, call: LayerCall, begun: BegunOp, result: Any) -> None: ...
    def op_wrote(self, call: LayerCall, arguments: Arguments) -> None: ...


def attention_wrapper(session: OpHooks, op: RecordedOp, original: Function) -> Function:
    """Return a function that makes the call and lets the session check it."""
    bind = binder(signature_of(op, original))

    @functools.wraps(original)
    def checking(*args: Any, **kwargs: Any) -> Any:
        call = session.current()
        if call is None or call.is_in_op:
            return original(*args, **kwargs)
        begun = session.op_begins(call, op, lambda: bind(args, kwargs))
        call.is_in_op = True
        try:
            result = original(*args, **kwargs)
        finally:
            call.is_in_op = False
        if begun is not None:
            session.op_ended(call, begun, result)
        return result

    return checking


def write_wrapper(session: OpHooks, original: Function) -> Function:
    """Return a function that makes the cache write and reports its slot_mapping."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def writing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = session.current()
        if call is not None:
            session.op_wrote(call, lambda: signature.bind(*args, **kwargs).arguments)
        return result

    return writing
