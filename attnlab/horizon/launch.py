"""The description of a launch: arguments, grid and programs of a kernel, as expressions of named sizes.

A description is a table of TOML, for example::

    [copy_rows]
    sizes = { rows = 1000, width = 4096 }
    grid = ["rows"]
    arguments = { x = "float16[rows, width]", index = "int32[rows] = i", stride = "x.stride(0)" }

A tensor is ``DTYPE[SHAPE]``, then ``strides [STRIDES]`` if it is not contiguous, then ``= VALUES`` if it
holds integers that the kernel uses; there, ``i`` is the offset of an element.
"""

import ast
import builtins
import functools
import hashlib
import importlib
import re
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.horizon.machine import ELEMENT_BYTES, Libdevice, Tensor
from attnlab.kernels.cache_folder import private_folder, writing
from attnlab.kernels.triton.interpreter import interpreted_triton
from attnlab.kernels.triton.kernel_text import LOOP_MAKER, WHILE_MAKER

# Kernels of a Python file, a folder or a wheel, loaded without an import of their package.
#
# Only functions that Triton compiles, plain functions, and the names that they use are executed. A name that
# cannot be made here raises Unavailable when a kernel uses it, so that the other kernels go on.

_JIT = re.compile(r"\bjit\b")
_GLUON = re.compile(r"\bgluon\b")
_HAS_KERNEL = re.compile(rb"^\s*@.*\bjit\b", re.MULTILINE)
_LIBDEVICE = ("libdevice", "tldevice")  # Triton's name, and that of vllm.triton_utils
_REAL = ("triton", "torch", "math", "typing", "functools", "enum", "dataclasses", "collections")


class Missing:
    """A name that a file uses and that does not exist here. Any use raises Unavailable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise Unavailable(f"{self._name} does not exist here")

    __call__ = __bool__ = __index__ = __mul__ = __rmul__ = __add__ = __radd__ = _refuse
    __eq__ = __lt__ = __gt__ = __sub__ = __rsub__ = __floordiv__ = __getitem__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Loops(ast.NodeTransformer):
    """Rewrite loops so that a run executes their first and last iterations (see machine.Loop)."""

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        call = node.iter
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if name not in ("range", "static_range"):
            return node
        assert isinstance(call, ast.Call)
        loop = ast.Name(f"__loop_{node.lineno}_{node.col_offset}", ast.Load())
        is_static = ast.Constant(name == "static_range")
        call.func, call.args = ast.Name(LOOP_MAKER, ast.Load()), [is_static, *call.args]
        stored, loaded = _names(node.body)
        begin = ast.Assign([ast.Name(loop.id, ast.Store())], call)
        node.iter = loop
        if carried := sorted(stored & loaded):
            names = ast.Tuple([ast.Constant(one) for one in carried], ast.Load())
            values = ast.Call(ast.Name("locals", ast.Load()), [], [])
            moved = ast.Call(ast.Attribute(loop, "carry", ast.Load()), [names, values], [])
            targets = ast.Tuple([ast.Name(one, ast.Store()) for one in carried], ast.Store())
            node.body.append(ast.Assign([targets], moved))
        return _placed(begin, node)

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        counter = ast.Name(f"__loop_{node.lineno}_{node.col_offset}", ast.Load())
        maker = ast.Call(ast.Name(WHILE_MAKER, ast.Load()), [], [])
        begin = ast.Assign([ast.Name(counter.id, ast.Store())], maker)
        more = ast.Call(ast.Attribute(counter, "more", ast.Load()), [], [])
        node.test = ast.BoolOp(ast.And(), [more, node.test])
        return _placed(begin, node)


def _placed(begin: ast.stmt, loop: ast.stmt) -> list[ast.AST]:
    """Return a loop after the statement that begins it, with the location of the loop in all made nodes."""
    return [ast.fix_missing_locations(ast.copy_location(one, loop)) for one in (begin, loop)]


def _names(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the names that statements store, and those that they load."""
    nodes = [n for one in body for n in ast.walk(one)]
    names = [n for n in nodes if isinstance(n, ast.Name)]
    changed = [n.target for n in nodes if isinstance(n, ast.AugAssign)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    loaded = {n.id for n in names if isinstance(n.ctx, ast.Load) or n in changed}
    return {n for n in stored if not n.startswith("__loop_")}, loaded


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel: its function under the interpreter, its definition, and the files that its code may be in.

    ``defaults``: values of parameters that decorators state (autotune, heuristics), by name.
    """

    name: str
    path: Path
    shown: str  # the path as it is printed
    node: ast.FunctionDef
    file: "KernelFile" = field(repr=False)

    @property
    def function(self) -> Any:
        """Return the interpreted function. Raises Unavailable if it cannot be made."""
        try:
            found = self.file.namespace.get(self.name)
        except Exception as error:  # the file's own code ran
            raise Unavailable(
                f"{self.name} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if found is None or isinstance(found, Missing):
            raise Unavailable(f"{self.name} cannot be loaded")
        return found


class KernelFile:
    """A Python file with kernels; ``files`` are all files of its source that were loaded, by path."""

    def __init__(self, path: Path, root: Path, files: "dict[Path, KernelFile]") -> None:
        self.path, self.root, self._files = path, root, files
        self.tree = ast.parse(path.read_bytes())
        self.lines = path.read_text(errors="replace").splitlines()
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        for statement in _flat(self.tree.body):
            for name in _defined(statement):
                self.definitions.setdefault(name, []).append(statement)
            if isinstance(statement, ast.FunctionDef) and any(
                map(_is_jit, statement.decorator_list)
            ):
                self.functions[statement.name] = statement
        self.namespace = Namespace(self)
        files[path] = self

    def called(self) -> "Iterator[tuple[Path, str]]":
        """Yield the functions that the functions of this file call: the file and the name of each."""
        for one in self.functions.values():
            for node in ast.walk(one):
                name = getattr(node, "func", None)
                if isinstance(name, ast.Name) and (found := self.definition(name.id)) is not None:
                    yield found[0].path, found[1].name

    def kernels(self, called: "set[tuple[Path, str]]") -> Iterator[Kernel]:
        """Yield the kernels: functions that are not among ``called`` and return nothing."""
        for name, node in self.functions.items():
            returns = any(isinstance(n, ast.Return) and n.value for n in ast.walk(node))
            if (self.path, name) not in called and not returns:
                shown = self.path.relative_to(self.root).as_posix()
                yield Kernel(name=name, path=self.path, shown=shown, node=node, file=self)

    def definition(self, name: str) -> "tuple[KernelFile, ast.FunctionDef] | None":
        """Return the definition of a function that Triton compiles, here or where it is imported from."""
        if name in self.functions:
            return self, self.functions[name]
        for statement in self.definitions.get(name, []):
            if isinstance(statement, ast.ImportFrom):
                file = _module_file(self.path, self.root, statement.module or "", statement.level)
                if file is not None and file != self.path:
                    alias = next(a for a in statement.names if (a.asname or a.name) == name)
                    return file_of(file, self.root, self._files).definition(alias.name)
        return None

    def make(self, name: str) -> Any:
        """Return what a name of the file's top level is; Missing if it cannot be made."""
        if name in self.functions:
            return self._function(self.functions[name])
        imports = (ast.Import, ast.ImportFrom)
        found = self.definitions.get(name, [])
        # Imports first: what follows may replace a missing package.
        for statement in sorted(found, key=lambda one: not isinstance(one, imports)):
            try:
                if isinstance(statement, imports):
                    return self._imported(statement, name)
                return self._executed(statement, name)
            except Exception:
                continue
        return Missing(name)

    def _executed(self, statement: ast.stmt, name: str) -> Any:
        """Return what a name is after a statement."""
        module = ast.Module([statement], [])
        exec(compile(module, str(self.path), "exec", dont_inherit=True), self.namespace)
        return dict.__getitem__(self.namespace, name)

    def _function(self, node: ast.FunctionDef) -> Any:
        """Return a function of Triton in its interpreted form."""
        bare = ast.FunctionDef(
            **{**{f: getattr(node, f) for f in node._fields}, "decorator_list": []}
        )
        ast.copy_location(bare, node)
        for argument in [*bare.args.args, *bare.args.kwonlyargs]:
            text = "" if argument.annotation is None else ast.unparse(argument.annotation)
            if "constexpr" not in text and "int64" not in text and "i64" not in text:
                argument.annotation = None
        bare.returns = None
        made = interpreted_triton().jit(self._executed(bare, node.name))
        kind = type(made.rewriter.ast_transformer)

        class Transformer(kind):  # type: ignore[misc, valid-type]
            def visit_Module(self, tree: ast.Module) -> ast.AST:
                found: ast.AST = super().generic_visit(Loops().visit(tree))
                return ast.fix_missing_locations(found)

        made.rewriter.ast_transformer = Transformer()
        return made

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        alias = next(
            one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name
        )
        if isinstance(statement, ast.Import):
            return _triton_or(alias.name if alias.asname else name)
        module = statement.module or ""
        if alias.name in _LIBDEVICE or module.endswith(".libdevice"):
            library = Libdevice()
            return library if alias.name in _LIBDEVICE else getattr(library, alias.name)
        if alias.name in ("tl", "triton", "language"):  # vllm.triton_utils, for example
            return _triton_or("triton" if alias.name == "triton" else "triton.language")
        file = _module_file(self.path, self.root, module, statement.level)
        if file is None:
            within = f"{module}.{alias.name}".strip(".")
            if inner := _module_file(self.path, self.root, within, statement.level):
                return _ModuleView(file_of(inner, self.root, self._files))
        else:
            other = file_of(file, self.root, self._files)
            found = other.namespace.get(alias.name)
            if not isinstance(found, Missing):
                return found
        if module.partition(".")[0] in _REAL and statement.level == 0:
            return getattr(_triton_or(module), alias.name)
        return Missing(f"{module}.{alias.name}")


class Namespace(dict):  # type: ignore[type-arg]
    """The globals of a file's functions, made when they are first used."""

    def __init__(self, file: KernelFile) -> None:
        super().__init__(__name__=file.path.stem, __file__=str(file.path), __builtins__=builtins)
        self._file = file

    def get(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self.prepare(name)
        return dict.get(self, name, default)

    def prepare(self, name: str) -> None:
        """Make a name, and every name that its functions use."""
        if name in self or hasattr(builtins, name):
            return
        self[name] = None
        for statement in self._file.definitions.get(name, []):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id in self._file.definitions:
                    self.prepare(node.id)
        made = self._file.make(name)
        # An alias, such as exp2 = tl.exp2.
        if callable(made) and getattr(made, "__triton_builtin__", False) is True:
            from triton.runtime import interpreter

            made = functools.partial(made, _semantic=interpreter.interpreter_semantic)
        self[name] = made


class _ModuleView(ModuleType):
    """A module of the source, whose names are made when they are used."""

    def __init__(self, file: KernelFile) -> None:
        super().__init__(file.path.stem)
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._file.namespace.get(name)


def file_of(path: Path, root: Path, files: dict[Path, KernelFile]) -> KernelFile:
    """Return a file, loaded once."""
    return files.get(path) or KernelFile(path, root, files)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those in its ``if`` and ``try``."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try):
            yield from _flat([*one.body, *one.orelse])
            for handler in getattr(one, "handlers", []):
                yield from _flat(handler.body)


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for node in targets:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _is_jit(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return _JIT.search(text) is not None and not _GLUON.search(text) and "cute" not in text


def _triton_or(name: str) -> Any:
    if name == "triton":
        return interpreted_triton()
    if name.partition(".")[0] not in _REAL:
        return Missing(name)
    return importlib.import_module(name)


def _module_file(path: Path, root: Path, module: str, level: int) -> Path | None:
    """Return the file of a module in the source, or None."""
    base = path.parents[min(level, len(path.parents)) - 1] if level else root
    target = base.joinpath(*module.split(".")) if module else base
    for candidate in (target.with_suffix(".py"), target / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def kernel_files(source: Path) -> tuple[Path, list[Path]]:
    """Return the root of a source, and its files that have kernels."""
    source = source.resolve()
    if source.is_file() and source.suffix == ".py":
        return _root_of(source), [source]
    if source.is_file() and source.suffix == ".whl":
        source = _unpacked(source)
    if not source.is_dir():
        raise InvalidCase(f"source must be a Python file, a wheel or a folder, got {source}")
    found = [one for one in sorted(source.rglob("*.py")) if _HAS_KERNEL.search(one.read_bytes())]
    return (_root_of(found[0]) if found else source), found


def load_kernels(
    source: Path, only: Sequence[Path] | None = None
) -> tuple[list[Kernel], dict[Path, KernelFile], dict[str, str]]:
    """Return the kernels of a source, its loaded files, and the files that are no Python, with the reason.

    ``only``: the files of the folder ``source``, which contains the package, to take kernels from.
    """
    root, paths = kernel_files(source) if only is None else (source, list(only))
    files: dict[Path, KernelFile] = {}
    broken: dict[str, str] = {}
    for path in paths:
        try:
            file_of(path, root, files)
        except (SyntaxError, UnicodeDecodeError) as error:
            broken[path.name] = f"{type(error).__name__}: {error}"
    given = [files[path] for path in paths if path in files]
    called = {pair for file in given for pair in file.called()}
    return [one for file in given for one in file.kernels(called)], files, broken


def _root_of(file: Path) -> Path:
    """Return the folder that contains the package of a file."""
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def _unpacked(wheel: Path) -> Path:
    """Return a folder with the Python files of a wheel that have kernels, or that such files import."""
    stat = wheel.stat()
    key = hashlib.sha256(
        f"{wheel.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()
    ).hexdigest()
    folder = private_folder("horizon", key[:16])
    if not (folder / ".complete").exists():
        with writing(), zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                parts = Path(name).parts
                if name.endswith(".py") and ".." not in parts and not name.startswith("/"):
                    archive.extract(name, folder)
            (folder / ".complete").touch()
    return folder


_TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\s*strides\s*\[(?P<strides>[^\]]*)\])?(?:\s*=\s*(?P<values>.*))?$"
)
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.List, ast.Tuple)
_OPERATORS = (ast.operator, ast.unaryop, ast.cmpop, ast.expr_context)
_LEAVES = (ast.Name, ast.Constant, ast.Attribute)
_NODES = (ast.Expression, *_OPERATIONS, *_OPERATORS, *_LEAVES)
# CUDA C++ Programming Guide, technical specifications.
GRID = (LAST_X := (1 << 31) - 1, 65535, 65535)


_FUNCTIONS: dict[str, Any] = {
    "cdiv": lambda a, b: -(-a // b),
    "where": np.where,
    "min": min,
    "max": max,
    "minimum": np.minimum,
    "power_of_2": lambda n: 1 << max(0, int(n) - 1).bit_length(),
}


@functools.cache
def _compiled(text: str) -> Any:
    """Return the code of an expression. Raises InvalidCase for anything but arithmetic."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise InvalidCase(f"expression must be arithmetic, got {text!r}", field="launch") from error
    for node in ast.walk(tree):
        is_method = isinstance(node, ast.Attribute) and node.attr not in ("stride", "numel")
        if not isinstance(node, _NODES) or is_method:
            raise InvalidCase(f"expression must be arithmetic, got {text!r}", field="launch")
    return compile(tree, "<launch>", "eval")


def evaluate(text: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or of anything that is not text, itself."""
    if not isinstance(text, str):
        return text
    try:
        return eval(_compiled(text), {"__builtins__": {}, **_FUNCTIONS}, dict(names))
    except (NameError, TypeError, ZeroDivisionError, IndexError) as error:
        raise InvalidCase(
            f"expression {text!r} of a launch is wrong: {error}", field="launch"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The description of a launch of ``kernel``.

    - ``file``: the end of the path of its file, "" for any; ``sizes``: the named sizes with their values.
    - ``sweep``: the sizes whose horizon is asked for; ``most``: the largest value of some sizes.
    - ``needs``: a condition on the sizes, "" for none; ``within``: what is at most a limit of a deployment.
    - ``tail``: how many programs run at the end of each axis of the grid.
    - ``is_assumed``: whether attnlab guessed it from the kernel's text.
    """

    kernel: str
    file: str = ""
    sizes: Mapping[str, int]
    grid: tuple[Any, ...]
    arguments: Mapping[str, Any]
    sweep: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    tail: tuple[int, ...] = (1, 1, 1)
    needs: str = ""
    within: Mapping[str, str] = field(default_factory=dict)
    is_assumed: bool = False

    def suits(self, path: str, kernel: str) -> bool:
        """Answer whether the description is one of a kernel in a file."""
        return kernel == self.kernel and f"/{path}".endswith(f"/{self.file}" if self.file else path)

    def at(self, sizes: Mapping[str, int]) -> "Launch":
        """Return the launch with other values of the sizes that it has."""
        found = {name: sizes.get(name, value) for name, value in self.sizes.items()}
        if self.needs and not evaluate(self.needs, found):
            got = ", ".join(f"{n} {v}" for n, v in found.items() if n in self.needs)
            raise InvalidCase(
                f"deployment must fit {self.kernel}, which needs {self.needs}, got {got}"
            )
        return replace(self, sizes=found)

    def bind(self, sizes: Mapping[str, int]) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return arguments and grid for values of the sizes; None if a GPU has no such grid."""
        names: dict[str, Any] = dict(sizes)
        found: dict[str, Any] = {}
        for name, text in self.arguments.items():
            found[name] = names[name] = self._argument(name, text, names)
        grid = tuple(max(1, int(evaluate(one, names))) for one in self.grid)
        return None if any(n > m for n, m in zip(grid, GRID, strict=False)) else (found, grid)

    def _argument(self, name: str, text: Any, names: Mapping[str, Any]) -> Any:
        if isinstance(text, list):
            return tuple(self._argument(f"{name}[{i}]", one, names) for i, one in enumerate(text))
        if not isinstance(text, str):
            return text
        match = _TENSOR.match(text)
        if match is None or match["dtype"] not in ELEMENT_BYTES:
            if text == "none":
                return None
            if text.startswith("'"):
                return text.strip("'")
            if text.startswith("tl."):
                import triton.language as tl

                return getattr(tl, text[3:])
            return evaluate(text, names)
        shape = tuple(int(n) for n in evaluate(f"[{match['shape']}]", names))
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(1, shape[i + 1])
        if match["strides"]:
            strides = [int(n) for n in evaluate(f"[{match['strides']}]", names)]
        values = None
        if match["values"]:
            values = functools.partial(_values, match["values"], dict(names))
        return Tensor(
            name=name, dtype=match["dtype"], shape=shape, strides=tuple(strides), values=values
        )


def _values(text: str, names: Mapping[str, Any], index: Any) -> Any:
    return evaluate(text, {**names, "i": index})


def programs(grid: tuple[int, ...], tail: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the last programs of a grid, ``tail`` of them on each axis."""
    sizes = zip((*grid, 1, 1), (*tail, 1, 1), strict=False)
    x, y, z, *_ = ([n - 1 - i for i in range(min(n, k))] for n, k in sizes)
    return [*product(x, y, z)]


def read_launches(path: Path) -> dict[str, Launch]:
    """Return the descriptions in a TOML file by name. Raises InvalidCase, in one line, for a wrong one."""
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidCase(f"launch must be a TOML file, got {path}: {error}") from error
    return {name: _launch(name, tables, path) for name in tables}


def _launch(name: str, tables: Mapping[str, Any], path: Path) -> Launch:
    """Return the description ``name``; one that is ``like`` another states only what differs."""
    table = tables[name]
    if isinstance(table, dict) and "like" in table:
        base = tables.get(table["like"])
        if not isinstance(base, dict):
            raise InvalidCase(
                f"like of launch {name} must name a launch, got {table['like']!r}", field="launch"
            )
        arguments = {**base.get("arguments", {}), **table.get("arguments", {})}
        table = {**base, **table, "arguments": arguments}
    if not isinstance(table, dict) or not {"grid", "arguments"} <= set(table):
        raise InvalidCase(f"launch {name} must have grid and arguments, got {path}", field="launch")
    known = {"like", *(one.name for one in fields(Launch))} - {"is_assumed"}
    if unknown := set(table) - known:
        raise InvalidCase(
            f"launch {name} must have only {sorted(known)}, got {sorted(unknown)}", field="launch"
        )
    sizes = dict(table.get("sizes", {}))
    bad = [n for n, v in sizes.items() if type(v) is not int or v < 1]
    if bad:
        raise InvalidCase(
            f"size {bad[0]} of launch {name} must be a positive int, got {sizes[bad[0]]!r}",
            field="launch",
        )
    tuples = {key: tuple(table[key]) for key in ("grid", "sweep", "tail") if key in table}
    given = {key: value for key, value in table.items() if key != "like"}
    return Launch(**{"kernel": name, "sweep": tuple(sizes), **given, **tuples, "sizes": sizes})
