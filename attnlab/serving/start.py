"""Start a capture in a process of vLLM: its session, and the hooks of model runners, layers and ops.

No method that a hook calls raises: an error is logged once, and the server continues unchanged.
"""

import atexit
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.recorder.arguments import RecordedOp, binder, release_of
from attnlab.recorder.ops import recorded_ops, signature_of
from attnlab.recorder.patches import Function, Patches
from attnlab.serving.batch import LayerCall, Layers, Step, layers_of, unchecked_slots
from attnlab.serving.begun_op import BegunOp, OpCheck
from attnlab.serving.capture_state import CaptureState, KeptCalls, RecordFile
from attnlab.serving.settings import CaptureSettings
from attnlab.serving.slots import FollowedSlots

_LATE = "scale, soft cap, sinks and ALiBi slopes of layers built before the capture began"


Arguments = Callable[[], Mapping[str, Any]]
_METHODS = ("forward", "forward_mqa", "forward_mha", "do_kv_cache_update")


class Session:
    """A capture in this process: ``state``, the ``slots`` of its layers, and the ``check`` of their ops."""

    def __init__(self, settings: CaptureSettings, records: RecordFile) -> None:
        self.state = CaptureState(settings, records)
        self.slots = FollowedSlots(self.state)
        self.check = OpCheck(self.state, self.slots, KeptCalls(records, settings.max_bytes))
        self._layers: Layers | None = None
        self._scheduled: Any = None
        self._is_off = False
        self._forwards = 0  # before this step
        atexit.register(self.state.tally.write)

    # Steps.

    def begin_step(self, runner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a step of a model runner: its arguments are those of ``execute_model``."""
        self.state.step, self._scheduled = None, None
        if self._is_off:
            return
        with self.state.guarded("a step"):
            scheduled = args[0] if args else kwargs["scheduler_output"]
            is_dummy = bool(kwargs.get("dummy_run") or (len(args) > 2 and args[2] is True))
            if is_dummy:
                return
            if self._layers is None:
                self._set_up(runner)
            if not self._is_off:
                self.state.requests.update(scheduled)
                if scheduled.total_num_scheduled_tokens:
                    self._scheduled = scheduled

    def _set_up(self, runner: Any) -> None:
        """Find and hook the layers of a runner, before its first step."""
        config = runner.vllm_config
        self.state.rank = int(getattr(config.parallel_config, "rank", 0) or 0)
        self._layers = layers_of(runner)
        if self.state.settings.rank is not None and self.state.rank not in range(
            *self.state.settings.rank
        ):
            self._is_off = True
            return
        for impl_class in {type(known.impl) for known in self._layers}:
            hook_impl(self, impl_class)
        for builder_class in self._layers.builders:
            hook_builder(self, builder_class)
        self.slots.begin(self._layers, unchecked_slots(runner))
        late = [known for known in self._layers if known.name not in self.state.constructed]
        if late:
            self.state.tally.unchecked[_LATE] += len(late)
        mode = getattr(config.compilation_config, "cudagraph_mode", None)
        backends = sorted({type(known.impl).__name__ for known in self._layers})
        self.state.records.write(
            "started",
            {
                "rank": self.state.rank,
                "layers": len(self._layers.by_impl),
                "implementations": backends,
                "cudagraph_mode": getattr(mode, "name", str(mode)),
                "settings": self.state.settings.to_json(),
                "release": release_of("vllm"),
            },
        )

    def batch_of_runner(self, runner: Any) -> None:
        """Take the batch of vLLM's first model runner, which has prepared its inputs."""
        if self._scheduled is None or self.state.step is not None:
            return
        with self.state.guarded("the batch"):
            names = list(runner.input_batch.req_ids)
            count = self._scheduled.total_num_scheduled_tokens
            self._make_step(names, _tensor(runner.input_ids), _tensor(runner.positions), count)

    def batch_of_input(self, batch: Any) -> None:
        """Take the batch of vLLM's second model runner: an InputBatch."""
        if self._scheduled is None or self.state.step is not None:
            return
        with self.state.guarded("the batch"):
            count = self._scheduled.total_num_scheduled_tokens
            self._make_step(list(batch.req_ids), batch.input_ids, batch.positions, count)

    def _make_step(
        self, names: list[str], ids: torch.Tensor, positions: torch.Tensor, count: int
    ) -> None:
        tokens, at = (one[:count].cpu().numpy().astype(np.int64) for one in (ids, positions))
        scheduled = self._scheduled.num_scheduled_tokens
        lens = np.array([scheduled[name] for name in names], np.int64)
        ends = np.cumsum(lens)
        first, last = at[ends - lens], at[ends - 1]
        rows = [self.state.requests[name] for name in names]
        for request, start, end, length in zip(rows, first, ends, lens, strict=True):
            request.set_tokens(int(start), tokens[end - length : end])
        number = self.state.tally.counts["steps"]
        self.state.tally.counts["steps"] += 1
        self.state.tally.counts["tokens"] += count
        numbers = np.zeros(count, np.int64)
        with self.slots.guarded():
            numbers = self.slots.tokens_of(number, rows, first, lens)
        self.state.step = Step(
            number=number, requests=rows, query_lens=lens, seq_lens=last + 1, tokens=numbers
        )
        self.state.metadata = {}

    def end_step(self) -> None:
        """End a step: follow the slots of layers that ran inside a full CUDA graph."""
        step = self.state.step
        if step is not None and self._layers is not None:
            if self.state.tally.counts["forwards"] == self._forwards:
                self.state.tally.counts["graph_steps"] += 1
                with self.slots.guarded():
                    self.slots.follow_graph(step)
            self._forwards = self.state.tally.counts["forwards"]
            self.state.tally.write_sometimes()
        self.state.step = self._scheduled = None

    # The batch's metadata, and what a layer asked for.

    def built(self, builder: Any, arguments: Arguments) -> None:
        """Take the metadata that a builder gets for its layers."""
        if self.state.step is None:
            return
        with self.state.guarded("metadata"):
            common = arguments()["common_attn_metadata"]
            size = int(builder.kv_cache_spec.block_size)
            for name in builder.layer_names:
                self.state.metadata.setdefault(name, (common, size))

    def asked(self, layer: Any, constructor: Any, args: Any, kwargs: Any) -> None:
        """Note the arguments of a layer's constructor."""
        with self.state.guarded("a layer"):
            given = inspect.signature(constructor).bind(layer, *args, **kwargs)
            given.apply_defaults()
            found = {**given.arguments, **given.arguments.get("extra_impl_args", {})}
            self.state.constructed[layer.layer_name] = found

    # Calls of layers.

    def layer_begins(self, impl: Any, method: str) -> LayerCall | None:
        """Begin a call of a layer; None if it is not checked."""
        if self.state.step is None or self._layers is None or self.state.call is not None:
            return None
        known = self._layers.by_impl.get(id(impl))
        if known is None or torch.compiler.is_compiling():
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        call = self.state.call = LayerCall(known=known, method=method)
        return call

    def layer_ended(self, call: LayerCall, arguments: Arguments) -> None:
        """Check what no op in the layer's call has shown."""
        step = self.state.step
        if step is None:
            return
        if call.method == "do_kv_cache_update":
            if not call.writes and call.known.is_decoder:
                with self.slots.guarded():
                    self.slots.wrote(call.known, step, arguments()["slot_mapping"])
            return
        self.state.tally.counts["forwards"] += 1
        if not call.ops and call.known.name in self.state.metadata:
            backend = type(call.known.impl).__name__
            self.state.tally.unchecked[
                f"values and arguments of {backend}.{call.method}: no known op"
            ] += 1
            with self.slots.guarded():
                if not hasattr(call.known.impl, "do_kv_cache_update") and not call.writes:
                    mapping = self.state.metadata[call.known.name][0].slot_mapping
                    self.slots.wrote(call.known, step, mapping)
                self.slots.read_by_metadata(call.known, step)


def _tensor(buffer: Any) -> torch.Tensor:
    """Return the device tensor of one of vLLM's buffers, or the tensor itself."""
    found: torch.Tensor = getattr(buffer, "gpu", buffer)
    return found


# Ops that write the cache and have a parameter slot_mapping (vLLM 0.11.2 to 0.33.0).
_CUSTOM_WRITES = (
    "cpu_attn_reshape_and_cache", "reshape_and_cache", "reshape_and_cache_flash", "concat_and_cache_mla",
)  # fmt: skip
WRITE_OPS = frozenset(
    (
        *(f"vllm._custom_ops.{name}" for name in _CUSTOM_WRITES),
        *(
            f"{folder}.triton_reshape_and_cache_flash.triton_reshape_and_cache_flash{ending}"
            for folder in ("vllm.v1.attention.ops", "vllm.attention.ops")
            for ending in ("", "_diffkv", "_per_token_head_quant")
        ),
    )
)


def attention_wrapper(session: Session, op: RecordedOp, original: Function) -> Function:
    """Return a function that makes the call and lets the session check it."""
    bind = binder(signature_of(op, original))

    @functools.wraps(original)
    def checking(*args: Any, **kwargs: Any) -> Any:
        call = session.state.call
        if call is None or call.is_in_op:
            return original(*args, **kwargs)
        begun: BegunOp | None = None
        with session.state.guarded(op.name):
            begun = session.check.begin(call, op, bind(args, kwargs))
        call.is_in_op = True
        try:
            result = original(*args, **kwargs)
        finally:
            call.is_in_op = False
        if begun is not None and session.state.step is not None:
            with session.state.guarded(op.name):
                call.ops += 1
                session.check.end(call, begun, result, session.state.step)
        return result

    return checking


def write_wrapper(session: Session, original: Function) -> Function:
    """Return a function that makes the cache write and reports its slot_mapping."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def writing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call, step = session.state.call, session.state.step
        if call is not None and step is not None and call.known.is_decoder:
            with session.slots.guarded():
                call.writes += 1
                slot_mapping = signature.bind(*args, **kwargs).arguments["slot_mapping"]
                session.slots.wrote(call.known, step, slot_mapping)
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
    """Install the hooks of a capture with the settings in ``text``; again in a process, do nothing."""
    if _started:
        return _started[0][0]
    settings = CaptureSettings.of_text(text)
    session = Session(settings, RecordFile(Path(settings.out)))
    ops = {
        op.name: op
        for op in recorded_ops(on_error=session.state.failed)
        # Reading the pages of a wrapper's plan waits for the GPU.
        if not (op.name.startswith("torch.") or op.writes_cache or "." in op.function)
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
        session.state.failed(f"{module}.{name}", error)
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

        def batch(runner: Any, args: Any, kwargs: Any) -> None:
            session.batch_of_input(args[0] if args else kwargs["input_batch"])

        _around(runner_class, "prepare_attn", before=batch)


def hook_layer(session: Session, layer_class: Any) -> None:
    """Note the arguments of each attention layer's constructor: what the model asked for."""

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        session.asked(layer, layer_class.__init__.__wrapped__, args, kwargs)

    _around(layer_class, "__init__", after_success=note)


def hook_impl(session: Session, impl_class: type) -> None:
    """Hook the methods of an implementation's class, and of no class twice."""
    for name in _METHODS:
        original = getattr(impl_class, name, None)
        if original is not None and not getattr(original, "is_attnlab", False):
            setattr(impl_class, name, _hooked(session, name, original))


def _hooked(session: Session, name: str, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = session.layer_begins(self, name)
        if call is None:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        finally:
            session.state.call = None
        session.layer_ended(call, lambda: signature.bind(self, *args, **kwargs).arguments)
        return result

    method.is_attnlab = True  # type: ignore[attr-defined]
    return method


def hook_builder(session: Session, builder_class: Any) -> None:
    """Hook ``build`` of a metadata builder's class, which gets the batch in one form for all backends."""
    original = getattr(builder_class, "build", None)
    if original is None or getattr(original, "is_attnlab", False):
        return
    signature = inspect.signature(original)

    def built(builder: Any, args: Any, kwargs: Any) -> None:
        session.built(builder, lambda: signature.bind(builder, *args, **kwargs).arguments)

    _around(builder_class, "build", before=built)
    builder_class.build.is_attnlab = True


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
