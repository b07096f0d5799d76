"""Start a capture in a process of vLLM: hook its model runners, its layers and its ops."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from attnlab.recorder.arguments import RecordedOp, binder
from attnlab.recorder.ops import recorded_ops, signature_of
from attnlab.recorder.patches import Function, Patches
from attnlab.serving.batch import Arguments, LayerCall
from attnlab.serving.begun_op import BegunOp
from attnlab.serving.record import RecordFile
from attnlab.serving.session import Session
from attnlab.serving.settings import CaptureSettings

# Wrappers of ops: inside a layer's call, they report the op's arguments to the session.

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


_log = logging.getLogger("attnlab.serving")
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_LAYERS = {
    "vllm.model_executor.layers.attention.attention": ["Attention"],
    "vllm.model_executor.layers.attention.mla_attention": ["MLAAttention"],
    "vllm.attention.layer": ["Attention", "MLAAttention"],  # 0.11.2
}
_started: list[tuple[Session, Patches]] = []


def start(text: str) -> Session:
    """Install the hooks of a capture with the settings in ``text``; again in a process, do nothing.

    Raises InvalidCase for wrong settings.
    """
    if _started:
        return _started[0][0]
    settings = CaptureSettings.of_text(text)
    session = Session(settings, RecordFile(Path(settings.out)))
    ops = {
        op.name: op
        for op in recorded_ops(on_error=session.failed)
        if not (op.name.startswith("torch.") or op.writes_cache)
    }
    patches = Patches(hooked_names(ops), functools.partial(_wrapper, session, ops))
    _started.append((session, patches))
    patches.install()
    return session


def hooked_names(ops: Iterable[str]) -> dict[str, list[str]]:
    """Return what a capture hooks, by module: model runners, layers, attention ops and cache writes."""
    found: dict[str, list[str]] = {
        **{module: ["GPUModelRunner"] for module in _RUNNERS},
        **{module: list(names) for module, names in _LAYERS.items()},
    }
    for name in (*ops, *sorted(WRITE_OPS)):
        module, _, function = name.rpartition(".")
        found.setdefault(module, []).append(function)
    return found


def _wrapper(
    session: Session, ops: dict[str, RecordedOp], module: str, name: str, original: Function
) -> Function | None:
    """Wrap an op, or hook a class in place and return None."""
    try:
        if name == "GPUModelRunner":
            hook_runner(session, original)
        elif module in _LAYERS:
            hook_layer(session, original)
        elif f"{module}.{name}" in WRITE_OPS:
            return write_wrapper(session, original)
        else:
            return attention_wrapper(session, ops[f"{module}.{name}"], original)
    except Exception as error:
        session.failed(f"{module}.{name}", error)
    return None


def hook_runner(session: Session, runner_class: Any) -> None:
    """Hook the methods of a model runner that start a step and that know its batch.

    vLLM 0.32.0 and 0.33.0: _build_attention_metadata of v1/worker/gpu_model_runner.py, and prepare_attn of
    v1/worker/gpu/model_runner.py.
    """
    _around(runner_class, "execute_model", before=session.begin_step, after=session.end_step)
    if "_build_attention_metadata" in vars(runner_class):
        _around(
            runner_class,
            "_build_attention_metadata",
            before=lambda runner, args, kwargs: session.batch_of_runner(runner),
        )
    if "prepare_attn" in vars(runner_class):
        _around(
            runner_class,
            "prepare_attn",
            before=lambda runner, args, kwargs: session.batch_of_input(
                args[0] if args else kwargs["input_batch"]
            ),
        )


def hook_layer(session: Session, layer_class: Any) -> None:
    """Note the arguments of each attention layer's constructor: what the model asked for."""

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        session.asked(layer, layer_class.__init__.__wrapped__, args, kwargs)

    _around(layer_class, "__init__", after_success=note)


def _around(
    owner: Any,
    name: str,
    *,
    before: Callable[[Any, Any, Any], None] | None = None,
    after: Callable[[], None] | None = None,
    after_success: Callable[[Any, Any, Any], None] | None = None,
) -> None:
    """Replace a method by one that also calls ``before`` and ``after``, which must not raise."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, args, kwargs)
        try:
            result = original(self, *args, **kwargs)
        finally:
            if after is not None:
                after()
        if after_success is not None:
            after_success(self, args, kwargs)
        return result

    setattr(owner, name, method)
