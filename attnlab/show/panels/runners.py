"""What an explorer runs: a Case or a saved call, on kernels by name or on functions of a notebook."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from operator import is_not
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakMethod

from attnlab.case.case import Case
from attnlab.diagnosis.captured import where_it_ran
from attnlab.kernels import find_backend
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.run_call import for_call
from attnlab.kernels.runner import one_backend
from attnlab.lab.call_lab import CallLab, call_lab
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall

Kernel = Callable[..., Any]
# A small Case of a user's kernel: prefill and decode, at and around the ends of blocks.
_SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 64,
    "query_lens": (18, 1, 5),
    "ctx_lens": (0, 64, 37),
    "distribution": "normal",
    "stage": "sound",
}


@dataclass(slots=True, kw_only=True)
class NotebookKernels:
    """Functions of a notebook that Cases name as backend, "MODULE:FUNCTION".

    A cell that defines one anew, or what it uses, replaces it: :meth:`changed` finds that out.
    """

    functions: dict[str, Kernel] = field(default_factory=dict)
    _parts: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, kernel: Kernel | str) -> str:
        """Return the name of a kernel as a backend; a function is kept."""
        if isinstance(kernel, str):
            return kernel
        name = f"{kernel.__module__}:{kernel.__name__}"
        self.functions[name] = kernel
        self._parts[name] = [*_used(kernel, set())]
        return name

    def expression(self, name: str) -> str:
        """Return the Python of a backend: the name of a function of the notebook, or a text."""
        return self.functions[name].__name__ if name in self.functions else repr(name)

    def changed(self) -> bool:
        """Take functions that their module has defined anew; return whether there is one."""
        is_changed = False
        for name, kernel in [*self.functions.items()]:
            found: dict[str, Any] = getattr(getattr(kernel, "fn", kernel), "__globals__", {})
            new = found.get(kernel.__name__, kernel)
            parts, before = [*_used(new, set())], self._parts[name]
            if len(parts) != len(before) or any(map(is_not, parts, before)):
                self.add(new)
                is_changed = True
        return is_changed

    def lab_of(self, lab: Lab, case: Case) -> Lab:
        """Return the lab that runs a Case, with the products of ``lab``."""
        lab = copy(lab)
        if case.backend in self.functions:
            lab.runner = PluginBackend(spec=case.backend, function=self.functions[case.backend])
        elif isinstance(lab, CallLab):
            lab.runner = find_backend(case.backend, lab.source, lab.device)
        if isinstance(lab, CallLab):
            lab.runner = for_call(lab.given, lab.runner)
        return lab


def after_each_cell(follow: Callable[..., None]) -> None:
    """Call a method after each cell of the notebook as long as its object exists; not without IPython."""
    from IPython import get_ipython

    shell, method = get_ipython(), WeakMethod(follow)
    if shell is None:
        return

    def ended(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()
        else:
            shell.events.unregister("post_run_cell", ended)

    shell.events.register("post_run_cell", ended)


def _used(one: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a function, and the functions and numbers of its module that it uses."""
    function = getattr(one, "fn", one)  # of triton.jit
    if id(one) in seen:
        return
    seen.add(id(one))
    yield one
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if callable(used) or isinstance(used, int | float):
            yield from _used(used, seen)


def subject(
    what: Case | KernelCall | Path | str | None,
    kernel: Kernel | str | None,
    source: Path | str | None,
    lab: Lab | None,
    kernels: NotebookKernels,
) -> tuple[Case, Lab]:
    """Return the Case of an explorer and its lab; a path is that of a saved KernelCall.

    Without a kernel and a source, a call runs on the models.
    """
    name = None if kernel is None else kernels.add(kernel)
    if isinstance(what, Path | str):
        what = KernelCall.load(Path(what))
    if isinstance(what, KernelCall):
        own = PluginBackend(spec=name, function=kernel) if name and callable(kernel) else None
        runner = own or one_backend(source, name, None) or ModelBackend()
        ran = where_it_ran(what, Case()).case
        of_call = call_lab(what.cpu(), ran, runner, source=source)
        return of_call.case, of_call
    lab = lab if lab is not None else Lab(source=source)
    if name is None:
        backend = {} if source is None else {"backend": "vllm"}
        return (what or Case()).replace(**backend), lab
    if what is None:
        function = kernel if callable(kernel) else None
        is_plugin = function is not None or ":" in name
        op = PluginBackend(spec=name, function=function).op if is_plugin else Case().op
        what = Case(**_SMALL, op=op)
    return what.replace(backend=name), lab
