"""Start a capture in a process of vLLM: hook its model runners, its layers and its ops."""

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attnlab.recorder.catalogue import recorded_ops
from attnlab.recorder.patches import Function, Patches
from attnlab.recorder.recorded_op import RecordedOp
from attnlab.serving.op_hooks import WRITE_OPS, attention_wrapper, write_wrapper
from attnlab.serving.record_file import RecordFile
from attnlab.serving.session import Session
from attnlab.serving.settings import CaptureSettings

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
