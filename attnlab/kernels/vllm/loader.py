"""Load only vLLM's attention ops, each module with a private ``import``.

An import statement calls ``__import__`` from the builtins of its module. The loader replaces that function
for op modules: ``vllm…`` (and, on a CPU, torch and Triton) come from a private table of op modules of the
same source and stubs. So an installed vLLM stays unchanged, sys.modules has nothing new afterwards, several
releases can be loaded in one process, and a module that fails to load leaves nothing in sys.modules.
"""

import ast
import builtins
import importlib.util
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton.coverage import mark_functions, marks
from attnlab.kernels.vllm.source import Source


@contextmanager
def _listed(name: str, module: ModuleType) -> Iterator[None]:
    """List a module in sys.modules inside the block, where a dataclass looks for its names."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


class Stub(ModuleType):
    """A module of vLLM that is not loaded. Its names exist; calling one raises Unavailable."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Absent:
    """A name in a module that is not loaded; calling it raises Unavailable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unavailable(f"{self._name} was called, but the lab loads only vLLM's attention ops")


class Loader:
    """Load op modules of a Source.

    - ``stubs``: replace other modules of vLLM, by dotted name.
    - ``is_marked``: whether the functions record what runs (:mod:`attnlab.kernels.triton.coverage`).
    """

    def __init__(
        self, source: Source, stubs: Mapping[str, ModuleType], is_marked: bool = False
    ) -> None:
        self._source, self._is_marked = source, is_marked
        self._modules: dict[str, ModuleType] = dict(stubs)
        self._ops: dict[str, ModuleType] = {}

    def load(self, op: str) -> ModuleType:
        """Return the op module ``op``; it is loaded once.

        Raises Unavailable if the release has no such module or its top level raises.
        """
        if op not in self._ops:
            file = self._source.op_file(op)
            name = ".".join(file.relative_to(self._source.root).with_suffix("").parts)
            self._ops[op] = self._import(name)
        return self._ops[op]

    def _import(self, name: str) -> ModuleType:
        """Return the module ``name``: from the table, or load an op module, or make a stub."""
        if name not in self._modules:
            folder, _, leaf = name.rpartition(".")
            if folder.replace(".", "/") in self._source.ops_folders:
                self._run(name, leaf)
            else:
                self._modules[name] = Stub(name)
        if "." in name:
            folder, _, leaf = name.rpartition(".")
            setattr(self._import(folder), leaf, self._modules[name])
        return self._modules[name]

    def _run(self, name: str, leaf: str) -> None:
        """Execute an op module; it stays in the table only if all of it ran."""
        file = self._source.op_file(leaf)
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._importer}
        linecache.checkcache(module.__file__)  # Triton reads the source from there
        tree = ast.parse(file.read_bytes())
        if self._is_marked:
            mark_functions(tree)
            module.__dict__.update(marks(module.__file__))
        code = compile(tree, module.__file__, "exec", dont_inherit=True)
        self._modules[name] = module
        try:
            with _listed(name, module):
                exec(code, module.__dict__)
        except Exception as error:
            del self._modules[name]
            why = f"{type(error).__name__}: {error}"
            raise Unavailable(
                f"{leaf} of vLLM {self._source.version} cannot be loaded: {why}"
            ) from error

    def _importer(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Replace ``__import__`` in an op module; the parameters are those of ``__import__``."""
        if level:
            name = importlib.util.resolve_name("." * level + name, (globals or {})["__package__"])
        if name.partition(".")[0] != "vllm" and name not in self._modules:
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        module = self._import(name)
        if not fromlist:
            return self._import(name.partition(".")[0])
        for part in fromlist:
            if part not in vars(module) and self._is_module(f"{name}.{part}"):
                self._import(f"{name}.{part}")
        return module

    def _is_module(self, name: str) -> bool:
        """Return whether a dotted name is in the table or is a file in the ops folders."""
        folder, _, leaf = name.rpartition(".")
        path = folder.replace(".", "/")
        is_op = path in self._source.ops_folders
        return name in self._modules or (
            is_op and (self._source.root / path / f"{leaf}.py").is_file()
        )
