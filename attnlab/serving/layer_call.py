"""LayerCall: one call of an attention layer's implementation, and the hooks that make it known."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Arguments = Callable[[], Mapping[str, Any]]
METHODS = ("forward", "forward_mqa", "forward_mha", "do_kv_cache_update")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLayer:
    """An attention layer of the model.

    - ``name``: vLLM's. ``number``: the first number in it, or None. ``index``: counted from 0.
    - ``layer``, ``impl``: vLLM's objects. ``reads``: the name of the layer whose cache it reads.
    - ``is_decoder``: False for encoders and cross attention; only their values are checked.
    """

    name: str
    number: int | None
    index: int
    layer: Any
    impl: Any
    reads: str
    is_decoder: bool


@dataclass(slots=True, kw_only=True, eq=False)
class LayerCall:
    """A call that runs: its layer and method, and what was seen of it so far."""

    known: KnownLayer
    method: str
    is_in_op: bool = False
    ops: int = 0
    writes: int = 0


class LayerHooks(Protocol):
    """What the hooks of layers call."""

    def layer_begins(self, impl: Any, method: str) -> LayerCall | None: ...
    def layer_left(self, call: LayerCall) -> None: ...
    def layer_ended(self, call: LayerCall, arguments: Arguments) -> None: ...
    def built(self, builder: Any, arguments: Arguments) -> None: ...


def hook_impl(session: LayerHooks, impl_class: type) -> None:
    """Hook the methods of an implementation's class, and of no class twice."""
    for name in METHODS:
        original = getattr(impl_class, name, None)
        if original is None or getattr(original, "is_attnlab", False):
            continue
        setattr(impl_class, name, _hooked(session, name, original))


def _hooked(session: LayerHooks, name: str, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = session.layer_begins(self, name)
        if call is None:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        finally:
            session.layer_left(call)
        session.layer_ended(call, lambda: signature.bind(self, *args, **kwargs).arguments)
        return result

    method.is_attnlab = True  # type: ignore[attr-defined]
    return method


def hook_builder(session: LayerHooks, builder_class: type) -> None:
    """Hook ``build`` of a metadata builder's class, which gets the batch in one form for all backends."""
    original = getattr(builder_class, "build", None)
    if original is None or getattr(original, "is_attnlab", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.built(self, lambda: signature.bind(self, *args, **kwargs).arguments)
        return original(self, *args, **kwargs)

    build.is_attnlab = True  # type: ignore[attr-defined]
    builder_class.build = build  # type: ignore[attr-defined]
