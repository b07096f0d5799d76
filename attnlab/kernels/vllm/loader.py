"""Loading vLLM's attention ops alone: each module runs with an ``import`` of its own.

A module's import statements call ``__import__`` of its builtins. Here that one answers ``vllm…``, and on
a CPU torch and Triton, from a private table: other op modules of the same source, or small stand-ins. So
neither sys.modules nor an installed vLLM is touched, two releases can stand side by side, and a module
that fails leaves nothing behind.
"""

import builtins
import importlib.util
import linecache
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from attnlab.case.errors import Unavailable
from attnlab.kernels.vllm.source import Source


class Stub(ModuleType):
    """A module of vLLM that is not loaded: its names exist, and say so when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Absent:
    """A name of a module that is not loaded; calling it raises Unavailable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unavailable(f"{self._name} is called, and the lab loads vLLM's attention ops alone")


class Loader:
    """Loads op modules of a Source; ``stubs`` are the modules of vLLM that stand in for real ones."""

    def __init__(self, source: Source, stubs: Mapping[str, ModuleType]) -> None:
        self._source = source
        self._modules: dict[str, ModuleType] = dict(stubs)

    def load(self, op: str) -> ModuleType:
        """Return the op module ``op``, loaded once.

        Raises Unavailable where the release has none or its top level cannot run.
        """
        file = self._source.op_file(op)
        name = ".".join(file.relative_to(self._source.root).with_suffix("").parts)
        return self._import(name)

    def _import(self, name: str) -> ModuleType:
        """Return the module ``name`` from the table: there, an op module to run, or a stub."""
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
        """Run an op module's text; it stays in the table only where all of it ran."""
        file = self._source.op_file(leaf)
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._importer}
        linecache.checkcache(module.__file__)  # Triton reads the source from there
        code = compile(file.read_bytes(), module.__file__, "exec", dont_inherit=True)
        self._modules[name] = module
        try:
            exec(code, module.__dict__)
        except Exception as error:
            del self._modules[name]
            why = f"{type(error).__name__}: {error}"
            raise Unavailable(
                f"{leaf} of vLLM {self._source.version} cannot load: {why}"
            ) from error

    def _importer(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Stand for ``__import__`` in an op module."""
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
        """Answer whether a dotted name is in the table or a file of the ops folders."""
        folder, _, leaf = name.rpartition(".")
        path = folder.replace(".", "/")
        is_op = path in self._source.ops_folders
        return name in self._modules or (
            is_op and (self._source.root / path / f"{leaf}.py").is_file()
        )
