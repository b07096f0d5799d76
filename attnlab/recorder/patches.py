"""Replace functions by wrappers wherever a module has them, and undo it; without torch.

A function is replaced in the module that defines it and under every name by which another imported module has
it (``from module import op``). A module that is imported later is patched when its own code has run, so
everything that imports the function from it gets the wrapper. A method, "Class.method", is replaced in its
class. Other names in classes, closures and containers are not replaced.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
Wrap = Callable[[str, str, Function], Function | None]


def by_module(functions: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names of functions, (module, name), by module."""
    found: dict[str, list[str]] = {}
    for module, name in functions:
        found.setdefault(module, []).append(name)
    return found


class Patches:
    """Wrappers of functions, from :meth:`install` to :meth:`remove`.

    ``targets``: by module name, the functions to wrap. ``wrap(module, function, original)`` returns the
    wrapper, or None to leave the function as it is.
    """

    def __init__(self, targets: Mapping[str, Iterable[str]], wrap: Wrap) -> None:
        self._targets = {name: tuple(functions) for name, functions in targets.items()}
        self._wrap = wrap
        self._wrappers: dict[int, tuple[Function, Function]] = {}  # by id of the original
        self._methods: list[tuple[Any, str, Function]] = []  # class, name, original
        self._finder = _Finder(self)

    def install(self) -> None:
        """Wrap the functions of imported modules, and of modules that are imported from now on."""
        self._wrap_imported(self._targets)
        sys.meta_path.insert(0, self._finder)

    def add(self, targets: Mapping[str, Iterable[str]]) -> None:
        """Wrap further functions, of modules that are imported."""
        self._targets |= {
            name: (*self._targets.get(name, ()), *functions) for name, functions in targets.items()
        }
        self._wrap_imported(targets)

    def _wrap_imported(self, names: Iterable[str]) -> None:
        """Wrap the functions of those of some modules that are imported."""
        found: dict[int, tuple[Function, Function]] = {}
        for name in names:
            module = sys.modules.get(name)
            if module is not None:
                found |= self._wrapped(module)
        _replace(found)

    def remove(self) -> None:
        """Put the originals back, in modules that were imported meanwhile, too."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _replace({id(new): (new, old) for old, new in self._wrappers.values()})
        for owner, name, original in self._methods:
            setattr(owner, name, original)
        self._wrappers, self._methods = {}, []

    def is_target(self, module: str) -> bool:
        """Answer whether a module has functions to wrap."""
        return module in self._targets

    def patch_module(self, module: ModuleType) -> None:
        """Wrap the functions of a module whose code has just run."""
        _replace_in(module, self._wrapped(module))

    def _wrapped(self, module: ModuleType) -> dict[int, tuple[Function, Function]]:
        found = {}
        for name in self._targets[module.__name__]:
            class_, _, method = name.rpartition(".")
            owner = vars(module).get(class_) if class_ else module
            original = None if owner is None else vars(owner).get(method)
            known = [*self._wrappers, *(id(vars(one)[which]) for one, which, _ in self._methods)]
            if original is None or id(original) in known:
                continue
            wrapper = self._wrap(module.__name__, name, original)
            if wrapper is not None and class_:
                setattr(owner, method, wrapper)
                self._methods.append((owner, method, original))
            elif wrapper is not None:
                found[id(original)] = (original, wrapper)
        self._wrappers |= found
        return found


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules with functions to wrap, through the other finders, and wraps their loaders."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._searching or not self._patches.is_target(name):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patches)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module's code by its own loader, then wraps the module's functions."""

    def __init__(self, loader: Any, patches: Patches) -> None:
        self._loader = loader
        self._patches = patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patches.patch_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and others, for tracebacks


def _replace(changes: Mapping[int, tuple[Function, Function]]) -> None:
    """Replace objects in the namespaces of all imported modules; ``changes``: (old, new) by id of the old."""
    if not changes:
        return
    for module in list(sys.modules.values()):
        _replace_in(module, changes)


def _replace_in(module: Any, changes: Mapping[int, tuple[Function, Function]]) -> None:
    try:
        names = vars(module)
    except TypeError:  # something in sys.modules that is no module
        return
    for name, value in list(names.items()):
        change = changes.get(id(value))
        if change is not None and change[0] is value:
            names[name] = change[1]
