"""A launch for a kernel whose launch is not described: arguments guessed from the kernel's text.

What is guessed is only where the search starts: which parameters are pointers, which tensors hold integers,
and the value of each size. Statements name these values, and hold for them. A tensor is as large as
addresses allow.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

from attnlab.horizon.launch import Launch
from attnlab.horizon.source import Kernel, KernelFile

_MEMORY = ("load", "store", "make_block_ptr", "advance", "make_tensor_descriptor")
_POINTER = re.compile(r"(_ptrs?|Ptr|_pointer)$|^(ptr|p)_")
_FLOAT = re.compile(
    r"scale|eps|soft_?cap|logit_cap|alpha|theta|slope|temperature|threshold|_(min|max|clamp)_val|dt_m|sm_|inv_|rcp|"
    r"factor|momentum|prob|fp8_m|limit|weight_decay|penalty|^lr$|(?-i:^p$)",
    re.IGNORECASE,
)
_FLOAT_CONSTANT = re.compile(
    r"scale$|eps|cap$|fp8_m(in|ax)|theta|slope|_max_val|clamp|log2e|r?ln2|alpha|beta",
    re.IGNORECASE,
)
_INTEGERS = re.compile(
    r"indptr|indices|index|_idx|idx_|ids|table|seq_?len|lens|_loc|slot|cu_|offset|mapping|page|req_to|start|"
    r"lengths|positions|num_|token_to|block_map|cache_seq|map|topk_id|expert_id|locs|perm",
    re.IGNORECASE,
)
_PREFIX = re.compile(r"indptr|cu_|start_loc|_starts?$|cumsum|cumulative|offsets", re.IGNORECASE)
_LENGTH = re.compile(r"len|num_tokens_post|count", re.IGNORECASE)
_DTYPE = re.compile(r"dtype|_ty$|type$", re.IGNORECASE)
# Values of constants and of sizes by their names, the first that fits.
_CONSTANTS = (
    (r"block_?size$|page_?size|PAGE", 16),
    (r"BLOCK|TILE|CHUNK|^B[A-Z]{1,2}$|BLK", 32),
    (r"stage|warp|unroll|split", 2),
    (r"^H[QV]?$|heads?$|HEADS", 8),
    (r"GROUP", 4),
    (r"WINDOW", -1),
    (r"CAP", 0),
    (r"PAD|POW|DIM|SIZE|^[DKV]$|HEAD|WIDTH|hidden|dstate|^L[qkv]$", 64),
    (r"NUM|^N_|^N$|COUNT|TOPK", 4),
    (r"bits", 8),
    (r"", 16),
)
_SCALARS = (
    (r"stride.*head|stride.*h$", 128),
    (r"stride.*(_d|_k|dim|csize|state|elem\w*|last|[^a]d)$", 1),
    (r"stride", 4096),
    (r"head_?(size|dim)|^D$|dim$", 128),
    (r"^H[QV]?$|heads?$", 8),
    (r"group|ratio", 4),
    (r"page|block_size|chunk", 64),
    (r"len|tokens|^[TMNLS]$|numel|n_elem|size|rows|cols|hidden|vocab", 1024),
    (r"", 64),
)
_WHOLE = 1 << 44  # elements of a tensor: as many as addresses allow


def assumed_launches(kernel: Kernel) -> Iterator[Launch]:
    """Yield launches of a kernel, the likeliest first: flags off or on, and four kinds of data."""
    text = _Text.of(kernel.file, kernel.name)
    for dtype, is_on in (
        (d, f) for d in ("bfloat16", "int32", "uint8", "float32") for f in (False, True)
    ):
        arguments: dict[str, Any] = {}
        sizes: dict[str, int] = {f"programs_{axis}": 4 for axis in range(3)}
        sweep = [f"programs_{axis}" for axis in sorted(text.axes)]
        for parameter, default in _parameters(kernel.node):
            name = parameter.arg
            annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
            if "constexpr" in annotation:
                is_flag = name in text.flags or isinstance(default, bool)
                arguments[name] = is_on if is_flag else _constant(name, default, text)
            elif name in text.pointers or _POINTER.search(name):
                arguments[name] = _tensor(name, text, sizes, sweep, dtype)
            elif default is not _NONE and not isinstance(default, int):
                arguments[name] = "none" if default is None else default
            elif _FLOAT.search(name) and "stride" not in name.lower():
                arguments[name] = 0.5
            elif name in text.bounds:
                arguments[name] = (1 << 31) - 1
            else:
                arguments[name] = name
                sizes[name] = (
                    default if isinstance(default, int) and default else _by_name(name, _SCALARS)
                )
                sweep.append(name)
        grid = tuple(f"programs_{axis}" for axis in range(3))
        yield Launch(
            kernel=kernel.name,
            sizes=sizes,
            grid=grid,
            arguments=arguments,
            sweep=tuple(sweep),
            is_assumed=True,
        )


_NONE = object()


def _parameters(node: ast.FunctionDef) -> Iterator[tuple[ast.arg, Any]]:
    """Yield the parameters of a function with their defaults, _NONE where there is none."""
    given = [*node.args.posonlyargs, *node.args.args]
    defaults: list[Any] = [None] * (len(given) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [
        *zip(given, defaults, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    for parameter, default in pairs:
        value: Any = _NONE
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except ValueError:
                value = ast.unparse(default)
        yield parameter, value


def _by_name(name: str, table: tuple[tuple[str, int], ...]) -> int:
    return next(
        value
        for pattern, value in table
        if re.search(pattern, name, re.IGNORECASE if value != 32 else 0)
    )


def _constant(name: str, default: Any, text: "_Text") -> Any:
    if default is not _NONE and not (default is None and name not in text.optional):
        if default is None:
            return "none"
        return (
            f"'{default}'"
            if isinstance(default, str) and not default.startswith("tl.")
            else default
        )
    if name in text.strings:
        return f"'{text.strings[name]}'"
    if re.search("precision", name, re.IGNORECASE) and name not in text.bounds:
        return "'ieee'"
    if _DTYPE.search(name):
        return "tl.float32"
    if _FLOAT_CONSTANT.search(name) and name not in text.flags:
        return 0.0 if re.search(r"cap", name, re.IGNORECASE) else 1.0
    if "stride" in name.lower():
        return _by_name(name, _SCALARS)
    return _by_name(name, _CONSTANTS)


def _tensor(name: str, text: "_Text", sizes: dict[str, int], sweep: list[str], data: str) -> str:
    is_read = name not in text.stored
    if name not in text.integers and not (is_read and (data == "int32" or _INTEGERS.search(name))):
        is_wide = data == "bfloat16" and (_FLOAT.search(name) or "lse" in name.lower())
        return f"{'float32' if is_wide else data}[{_WHOLE}]"
    size = f"values_{name}"
    sweep.append(size)
    dtype = "int64" if "slot_mapping" in name else "int32"
    if _PREFIX.search(name):
        sizes[size] = 64
        return f"{dtype}[{_WHOLE}] = i * {size}"
    sizes[size] = 256 if _LENGTH.search(name) else 64
    return f"{dtype}[{_WHOLE}] = {size} + 0 * i"


class _Text:
    """What the text of a function says about its parameters.

    - ``pointers``; ``integers``: pointers to integers that become addresses; ``stored``: written ones.
    - ``flags``: constants that are conditions; ``strings``: constants that are compared with text;
      ``bounds``: parameters that are only compared; ``optional``: those compared with None; ``axes``: of
      program_id.
    """

    def __init__(self, file: KernelFile, node: ast.FunctionDef, depth: int) -> None:
        self._file, self._depth = file, depth
        self.names = {one.arg for one, _ in _parameters(node)}
        self.pointers: set[str] = set()
        self.integers: set[str] = set()
        self.stored: set[str] = set()
        self.strings: dict[str, str] = {}
        self.optional: set[str] = set()
        self.axes: set[int] = set()
        self._assigned: dict[str, list[ast.expr]] = {}
        self._addresses: list[ast.expr] = []
        self._nodes = list(ast.walk(node))
        for one in self._nodes:
            self._note(one)
        self.flags = self._conditions()
        self.bounds = self._compared()
        self._trace_integers()

    @staticmethod
    @functools.cache
    def of(file: KernelFile, name: str, depth: int = 0) -> "_Text":
        """Return what a function's text says; of the functions that it calls, up to three levels."""
        return _Text(file, file.functions[name], depth)

    def _note(self, one: ast.AST) -> None:
        if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and one.value is not None:
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                self._note_assigned(target, one.value)
        elif isinstance(one, ast.For) and isinstance(one.iter, ast.Call):
            self._addresses += one.iter.args
        elif isinstance(one, ast.Compare):
            sides = [one.left, *one.comparators]
            names = {n.id for n in sides if isinstance(n, ast.Name)}
            for value in (side.value for side in sides if isinstance(side, ast.Constant)):
                self.strings |= dict.fromkeys(names, value) if isinstance(value, str) else {}
                self.optional |= names if value is None else set()
        elif isinstance(one, ast.Call):
            self._note_call(one)

    def _note_assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for one, part in zip(target.elts, parts, strict=False):
                self._note_assigned(one, part)

    def _note_call(self, call: ast.Call) -> None:
        name = ast.unparse(call.func).rpartition(".")[2]
        named = {k.arg: k.value for k in call.keywords}
        first = (
            call.args[0]
            if call.args
            else next((named[n] for n in ("base", "pointer", "axis") if n in named), None)
        )
        if name == "program_id" and isinstance(first, ast.Constant):
            self.axes.add(int(first.value))  # type: ignore[arg-type]
        elif first is not None and (name in _MEMORY or name.startswith("atomic_")):
            self._addresses.append(first)
            roots = self._roots(first)
            self.pointers |= roots
            if name == "store" or name.startswith("atomic"):
                self.stored |= roots
        elif isinstance(call.func, ast.Name) and self._depth < 3:
            self._note_callee(call, named)

    def _note_callee(self, call: ast.Call, named: dict[str | None, ast.expr]) -> None:
        found = self._file.definition(call.func.id)  # type: ignore[attr-defined]
        if found is None:
            return
        file, node = found
        other = _Text.of(file, node.name, self._depth + 1)
        self.axes |= other.axes
        for (parameter, _), value in zip(_parameters(node), call.args, strict=False):
            named.setdefault(parameter.arg, value)
        for name, value in named.items():
            roots = self._roots(value) if name in other.pointers else set()
            self.pointers |= roots
            self.integers |= roots if name in other.integers else set()
            self.stored |= roots if name in other.stored else set()

    def _roots(self, value: ast.expr, depth: int = 0) -> set[str]:
        """Return the parameters at the left of an address."""
        if depth > 12:
            return set()
        if isinstance(value, ast.BinOp):
            return self._roots(value.left, depth + 1)
        if isinstance(value, ast.Name):
            if value.id in self.names:
                return {value.id}
            return {
                n for one in self._assigned.get(value.id, []) for n in self._roots(one, depth + 1)
            }
        if isinstance(value, ast.IfExp):
            return self._roots(value.body, depth + 1) | self._roots(value.orelse, depth + 1)
        if isinstance(value, ast.Call):
            base = next((k.value for k in value.keywords if k.arg == "base"), None)
            if base is None and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
                base = value.func.value
            if base is None and value.args and "load" not in ast.unparse(value.func):
                base = value.args[0]
            return set() if base is None else self._roots(base, depth + 1)
        return set()

    def _conditions(self) -> set[str]:
        found = set()
        for one in self._nodes:
            tests: list[Any] = []
            if isinstance(one, ast.If | ast.IfExp):
                tests = [one.test]
            elif isinstance(one, ast.BoolOp):
                tests = one.values
            elif isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not):
                tests = [one.operand]
            found |= {n.id for n in tests if isinstance(n, ast.Name) and n.id in self.names}
        return found

    def _compared(self) -> set[str]:
        """Return the parameters whose every use is a side of a comparison."""
        uses: dict[str, int] = {}
        compared: dict[str, int] = {}
        for one in self._nodes:
            if isinstance(one, ast.Name) and one.id in self.names:
                uses[one.id] = uses.get(one.id, 0) + 1
            elif isinstance(one, ast.Compare):
                for side in [one.left, *one.comparators]:
                    if isinstance(side, ast.Name):
                        compared[side.id] = compared.get(side.id, 0) + 1
        return {name for name, count in compared.items() if uses.get(name) == count}

    def _trace_integers(self) -> None:
        """Find the pointers from which numbers are loaded that become addresses."""
        queue, seen = (
            [n.id for a in self._addresses for n in ast.walk(a) if isinstance(n, ast.Name)],
            set(),
        )
        loads = [*self._addresses]
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            for value in self._assigned.get(name, []):
                loads.append(value)
                queue += [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
        for value in loads:
            for call in ast.walk(value):
                if (
                    isinstance(call, ast.Call)
                    and call.args
                    and ast.unparse(call.func).endswith(".load")
                ):
                    self.integers |= self._roots(call.args[0])
