"""Which features of a Case an op of the vLLM at hand has, read from its source without running it.

A feature is a field with another value than the plain one, such as sinks or a mask. An op has it if its
source has the names that the feature needs: parameters of the op itself, or of the functions and kernels that
it runs. A feature that an op lacks is not applicable: no case, no finding. Release numbers play no part.
"""

import ast
import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS, Needs
from attnlab.case.ops import OPS, Op
from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.coverage import Branch, Marker
from attnlab.kernels.vllm.source import Source
from attnlab.library.op import libraries, package_of
from attnlab.tensors.call import KernelCall

# The functions that an op of vLLM can run: itself, the kernels that it launches, and what these call.
#
# They are found in the source, without running it. A function that is imported inside another function
# belongs to a further op, such as INT4 attention, and is not followed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function at the top level of a file, with the points that can run.

    - ``statements``: lines; ``branches``: by name (:mod:`attnlab.kernels.triton.coverage`).
    - ``parameters``: the names of its parameters. ``is_kernel``: Triton compiles it.
    - ``text``: the lines from ``line`` to ``last_line``.
    """

    file: Path
    name: str
    line: int
    last_line: int
    statements: frozenset[int]
    branches: dict[str, Branch]
    parameters: tuple[str, ...]
    is_kernel: bool
    text: tuple[str, ...]

    def to_dict(self, root: Path) -> dict[str, Any]:
        """Return the fields as JSON-able values, with the file relative to ``root``."""
        file = self.file.relative_to(root) if self.file.is_relative_to(root) else self.file
        statements = sorted(self.statements)
        return {**dataclasses.asdict(self), "file": file.as_posix(), "statements": statements}

    @classmethod
    def of_dict(cls, fields: Mapping[str, Any]) -> "Function":
        """Return the function of what :meth:`to_dict` returned."""
        branches = {
            name: Branch(**_with(one, then=tuple, otherwise=tuple))
            for name, one in fields["branches"].items()
        }
        changed = _with(fields, file=Path, statements=frozenset, parameters=tuple, text=tuple)
        return cls(**{**changed, "branches": branches})


def _with(fields: Mapping[str, Any], **kinds: Callable[[Any], Any]) -> dict[str, Any]:
    """Return fields with some of them converted."""
    return {**fields, **{name: kind(fields[name]) for name, kind in kinds.items()}}


def op_functions(source: Source, op: str) -> list[Function]:
    """Return the functions of an op, by file and line; none if the release does not have it."""
    found = [
        _function(file, module, node)
        for file, module, node in _reached(source, OPS[op].module, OPS[op].function)
    ]
    return sorted(found, key=lambda one: (one.file, one.line))


def reached(source: Source, module: str, function: str) -> list[ast.FunctionDef]:
    """Return a function of a module of ops, then those that it runs; none if the release does not have it.

    Nothing in the result may be changed.
    """
    return [node for _, _, node in _reached(source, module, function)]


def _reached(
    source: Source, module_name: str, function: str
) -> list[tuple[Path, "_Module", ast.FunctionDef]]:
    """Return what :func:`reached` returns, each with its file and module."""
    try:
        file = source.op_file(module_name)
    except Unsupported:
        return []
    found: dict[tuple[Path, str], tuple[Path, _Module, ast.FunctionDef]] = {}
    waiting = [(file, function)]
    while waiting:
        file, name = waiting.pop()
        module = _read(file, file.stat().st_mtime_ns)
        if (file, name) in found or name not in module.functions:
            continue
        node = module.functions[name]
        found[file, name] = (file, module, node)
        for used in _names(node):
            where, original = module.imports.get(used, (file.stem, used))
            other = (source.root if "/" in where else file.parent) / f"{where}.py"
            if other.is_file():
                waiting.append((other, original))
    return list(found.values())


def file_kernels(file: Path) -> list[Function]:
    """Return the kernels of a user's file, by line."""
    module = _read(file, file.stat().st_mtime_ns)
    every = (_function(file, module, node) for node in module.functions.values())
    return [one for one in every if one.is_kernel]


@dataclass(frozen=True, slots=True)
class _Module:
    """The functions of a module, what it imports from modules of ops as (module, name), and its lines.

    A module is a file of the same folder, or has a path in the source, both without ".py".
    """

    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str]]
    text: tuple[str, ...]


@lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> _Module:
    """Return a module; ``changed``, the time of its last change, keeps the cache correct."""
    source = file.read_text(encoding="utf-8")
    body = ast.parse(source).body
    return _Module(
        {node.name: node for node in body if isinstance(node, ast.FunctionDef)},
        dict(_imports(node for node in body if isinstance(node, ast.ImportFrom))),
        tuple(source.splitlines()),
    )


def _imports(nodes: Iterable[ast.ImportFrom]) -> Iterator[tuple[str, tuple[str, str]]]:
    packages = (package_of(name) for name in libraries())
    folders = {folder.replace("/", ".") for one in packages for folder in one.folders}
    for node in nodes:
        where = node.module or ""
        if node.level == 1 or where.rpartition(".")[0] in folders:
            path = where if node.level else where.replace(".", "/")
            yield from ((one.asname or one.name, (path, one.name)) for one in node.names)


def _names(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def _function(file: Path, module: _Module, node: ast.FunctionDef) -> Function:
    """Return a function with its points."""
    marker = Marker()
    marker.visit(copy.deepcopy(node))  # it changes the tree
    return Function(
        file=file,
        name=node.name,
        line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        statements=frozenset(marker.statements),
        branches=marker.branches,
        parameters=tuple(_parameters(node)),
        is_kernel=any("jit" in ast.unparse(one) for one in node.decorator_list),
        text=module.text[node.lineno - 1 : node.end_lineno],
    )


_ABSENT = Needs(own=("causal",))  # of an op without masks
# Fields of a Case that an op must have a parameter for, by the names of values that the parameter has.
_FIELDS: dict[str, tuple[str, ...]] = {
    "alibi": ("alibi_slopes",),
    "sliding_window": ("sliding_window", "window_left"),
    "sinks": ("sinks",),
    "softcap": ("softcap",),
    "num_splits": ("splits",),
    "sm_scale": ("sm_scale", "scale"),
    "interleave_v": ("interleave_v",),
    "output_scale": ("output_scale",),
}
# By the lab, for ops that compute no scores.
_PREPARED = ("alibi", "sliding_window", "interleave_v", "sm_scale")
_PLAIN: dict[str, Any] = {
    **{"mask": CAUSAL, "op_argument": NONE, "sliding_window": 0},
    **{"softcap": None, "num_splits": None, "output_scale": None, "sm_scale": None},
    "kv_cache_dtype": "auto",
}


def has_op(source: Source, op: str) -> bool:
    """Answer whether a vLLM has an op."""
    return _signature(source, OPS[op].module, OPS[op].function) is not None


def check_case(source: Source, case: Case) -> None:
    """Raise InvalidCase for a feature of a Case that the op of a vLLM lacks."""
    for field, value in _used(case):
        if lack := lacks(source, case.op, field, value):
            text = f"{field} must be {_plain_text(field)} with {case.op} of {source.text()}"
            raise InvalidCase(f"{text}, which has {lack}, got {_text(value)}")


def check_call(
    call: KernelCall, own: Collection[str], inside: Collection[str] | None = None
) -> None:
    """Raise Unsupported for a feature of a call that its op lacks.

    ``own``: the parameters of the op. ``inside``: as :func:`names_inside` returns them; None if unknown.
    """
    given = {
        "alibi": call.alibi_slopes,
        "sinks": call.sinks,
        "softcap": call.softcap,
        "num_splits": call.num_splits,
        "sm_scale": call.sm_scale,
        "output_scale": call.output_scale,
        "interleave_v": call.interleave_v or None,
        "sliding_window": call.sliding_window or None,
    }
    used = [(field, "") for field, value in given.items() if value is not None]
    for field, value in (*used, *(("mask", name) for name in call.visibility.masks)):
        if lack := _lack(_needs(call.op, field, value), own, inside):
            where = "vLLM" if call.spec.library == "vllm" else call.spec.library
            text = f"{field} must be {_plain_text(field)}: {call.op} of this {where} has {lack}"
            raise Unsupported(f"{text}, got {value}" if value else text)


def check_argument(case: Case, own: Collection[str]) -> None:
    """Raise Unsupported if an op lacks the op argument of a Case; ``own``: the parameters of the op."""
    needs = _needs(case.op, "op_argument", case.op_argument)
    if needs is not None and needs.function is None and (lack := _lack(needs, own, None)):
        text = f"op_argument must not be {case.op_argument}: {case.op} of this vLLM has {lack}"
        raise Unsupported(text)


def names_inside(source: Source, op: str) -> frozenset[str]:
    """Return the parameters, and the attributes that are read, of an op and of the functions that it runs."""
    found = _signature(source, OPS[op].module, OPS[op].function)
    return frozenset() if found is None else found.inside


def not_applicable(source: Source, op: str) -> list[str]:
    """Return a line with the features that an op lacks, of those that it has in some release, and a line for
    each that its record leaves out."""
    if not has_op(source, op):
        return [f"{op}: not applicable: {source.text()} has no function {OPS[op].function}"]
    found: dict[str, list[str]] = {}
    for field, value in features_of(OPS[op]):
        if lack := lacks(source, op, field, value):
            found.setdefault(lack, []).append(value or field)
    texts = [f"{', '.join(names)} ({lack})" for lack, names in found.items()]
    left_out = [f"{op}: left out: {what}: {why}" for what, why in OPS[op].left_out.items()]
    return [*([f"{op}: not applicable: {'; '.join(texts)}"] if texts else []), *left_out]


def features_of(op: Op) -> Iterator[tuple[str, str]]:
    """Yield the features that an op has in some release: a field of a Case, and its value or ""."""
    for field, names in _FIELDS.items():
        if field != "output_scale" and op.parameters(*names):
            yield field, ""
    if op.fp8_inside:
        yield "kv_cache_dtype", ""
    yield from (("mask", name) for name, mask in MASKS.items() if mask.is_of(op.name))
    yield from (
        ("op_argument", name) for name, one in OP_ARGUMENTS.items() if op.name in one.requires
    )


def lacks(source: Source, op: str, field: str, value: Any) -> str:
    """Return what an op of a vLLM lacks for a feature, as "no argument sinks", or ""."""
    needs = _needs(op, field, value)
    if needs is None:
        return ""
    module, name = needs.function or (OPS[op].module, OPS[op].function)
    found = _signature(source, module, name)
    return f"no function {name}" if found is None else _lack(needs, found.own, found.inside)


def _needs(op: str, field: str, value: Any) -> Needs | None:
    """Return what an op needs for a feature, or None for nothing."""
    record = OPS[op]
    if field == "op_argument":
        return OP_ARGUMENTS[value].requires.get(op)
    if field == "mask":
        mask = MASKS[value]
        if mask.is_of(op):
            return Needs(own=record.parameters(*mask.states), inside=mask.inside)
        return None if record.writes_cache else _ABSENT
    if not record.scores and field in _PREPARED:
        return None
    if field == "kv_cache_dtype":
        return Needs(inside=record.fp8_inside)
    return Needs(own=record.parameters(*_FIELDS[field]) or (field,))


def _lack(needs: Needs | None, own: Collection[str], inside: Collection[str] | None) -> str:
    """Return the first name that is needed and absent, as "no argument sinks", or ""."""
    if needs is None:
        return ""
    for name in needs.own:
        if name not in own:
            return f"no argument {name}"
    absent = (name for name in needs.inside if inside is not None and name not in inside)
    return next((f"no {name} inside" for name in absent), "")


def missing_scales(source: Source, case: Case) -> dict[str, tuple[str, ...]]:
    """Return what the op gets without its scales, with the arguments for them that it lacks."""
    op = case.spec
    needs = case.argument.requires.get(case.op)
    called = needs.function if needs is not None else None
    found = _signature(source, *(called or (op.module, op.function)))
    if found is None:
        return {}
    scales = dict[str, tuple[str, ...]]()
    if case.is_fp8 and op.k_scale is not None and op.cache_layout is not None:
        scales["FP8 cache"] = (op.k_scale, op.k_scale.replace("k_", "v_"))
    if case.op_argument == "fp8_query":
        scales["FP8 query"] = ("q_descale",)
    elif case.argument.cache is not None and called is None:
        scales[f"{case.argument.cache.numbers} cache"] = ("k_scale_cache", "v_scale_cache")
    absent = {
        what: tuple(name for name in names if name not in found.own)
        for what, names in scales.items()
    }
    return {what: names for what, names in absent.items() if names}


def _used(case: Case) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a Case that may need an argument, with their values."""
    for field in (*_FIELDS, "mask", "op_argument", "kv_cache_dtype"):
        value = getattr(case, field, None)
        if value is not None and value != _PLAIN.get(field, False):
            yield field, value


@dataclass(frozen=True, slots=True)
class _Signature:
    """The names of a function's parameters, and those :attr:`Needs.inside`."""

    own: frozenset[str]
    inside: frozenset[str]


def _signature(source: Source, module: str, function: str) -> _Signature | None:
    """Return the names of a function of a module of ops; None if the release does not have it."""
    seen = _SEEN.get()
    changed = None if seen is None else seen.get(source)
    if changed is None:
        folders = (source.root / name for name in source.ops_folders)
        files = (file for folder in folders for file in os.scandir(folder) if file.is_file())
        changed = hash(tuple((file.name, file.stat().st_mtime_ns) for file in files))
        if seen is not None:
            seen[source] = changed
    return _read_signature(source, module, function, changed)


_SEEN: ContextVar[dict[Source, int] | None] = ContextVar("seen", default=None)


def unchanged_sources() -> AbstractContextManager[dict[Source, int]]:
    """Look once inside the block whether the files of a source changed."""
    return setting(_SEEN, {})


@lru_cache(maxsize=256)
def _read_signature(source: Source, module: str, function: str, changed: int) -> _Signature | None:
    """Return the names of a function; ``changed``, the times of the files, keeps the cache correct."""
    functions = reached(source, module, function)
    if not functions:
        return None
    inside = frozenset(name for one in functions for name in _names_in(one))
    return _Signature(frozenset(_parameters(functions[0])), inside)


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _plain_text(field: str) -> str:
    """Return the plain value of a field, as text."""
    return _text(_PLAIN.get(field, False))


def _text(value: Any) -> str:
    return str(value).lower()


def _names_in(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of a function's parameters, and of the attributes that it reads."""
    yield from _parameters(function)
    yield from (node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute))
