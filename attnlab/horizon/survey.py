"""The horizon of every kernel of a source, and what it means for a deployment."""

import ast
import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.shown import Shown
from attnlab.horizon.deployment import Deployment
from attnlab.horizon.launch import (
    Kernel,
    KernelFile,
    Launch,
    evaluate,
    load_kernels,
    programs,
    read_launches,
)
from attnlab.horizon.machine import LIMIT, Access, Observation, Runner, Site, running
from attnlab.kernels.triton.interpreter import cores

# A launch for a kernel whose launch is not described: arguments guessed from the kernel's text.
#
# What is guessed is only where the search starts: which parameters are pointers, which tensors hold integers,
# and the value of each size. Statements name these values, and hold for them. A tensor is as large as
# addresses allow.

_MEMORY = ("load", "store", "make_block_ptr", "advance", "make_tensor_descriptor")
_POINTER = re.compile(r"(_ptrs?|Ptr|_pointer)$|^(ptr|p)_")
_FLOAT = re.compile(
    r"scale|eps|soft_?cap|logit_cap|alpha|theta|slope|temperature|threshold|_(min|max|clamp)_val|dt_m|sm_|inv_|rcp|"
    r"factor|momentum|prob|fp8_m|limit|weight_decay|penalty|^lr$|(?-i:^p$)",
    re.IGNORECASE,
)
_FLOAT_CONSTANT = re.compile(
    r"scale$|eps|cap$|fp8_m(in|ax)|theta|slope|_max_val|clamp|log2e|r?ln2|alpha|beta", re.IGNORECASE
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
    for dtype, is_on in product(("bfloat16", "int32", "uint8", "float32"), (False, True)):
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
    missing = [None] * (len(given) - len(node.args.defaults))
    defaults = [*missing, *node.args.defaults, *node.args.kw_defaults]
    for parameter, default in zip([*given, *node.args.kwonlyargs], defaults, strict=True):
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
        is_text = isinstance(default, str) and not default.startswith("tl.")
        return f"'{default}'" if is_text else default
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
        queue = [n.id for a in self._addresses for n in ast.walk(a) if isinstance(n, ast.Name)]
        seen = set[str]()
        loads = [*self._addresses]
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            for value in self._assigned.get(name, []):
                loads.append(value)
                queue += [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
        for call in (node for value in loads for node in ast.walk(value)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".load"):
                self.integers |= self._roots(call.args[0]) if call.args else set()

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
        places = (named[n] for n in ("base", "pointer", "axis") if n in named)
        first = next(iter(call.args), None) or next(places, None)
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
            values = self._assigned.get(value.id, [])
            return {name for one in values for name in self._roots(one, depth + 1)}
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
        uses = Counter(one.id for one in self._nodes if isinstance(one, ast.Name))
        compares = [one for one in self._nodes if isinstance(one, ast.Compare)]
        sides = [side for one in compares for side in (one.left, *one.comparators)]
        compared = Counter(side.id for side in sides if isinstance(side, ast.Name))
        return {name for name in self.names & compared.keys() if uses[name] == compared[name]}


# Find the horizon of each integer expression in each size, and prove it by two runs.
#
# Two runs with different sizes give the growth of an expression, which predicts the size at which it wraps.
# Runs at that size and just below confirm it, or the search goes on from there. So a statement rests on a run
# without the wrap and on a run with it, at neighbouring sizes.


_MOST = LIMIT - 1
_EXTREME = LIMIT // 2
_BUDGET_S = 12.0  # processor time per kernel
_TRIES = 18  # sizes tried after a wrap, each twice as far, for an access that it makes wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The horizon of an expression in one size, the others as in ``sizes``.

    - ``wraps_at``: the smallest value at which the expression has a value that int32 does not have.
    - ``wrong_at``: the smallest value at which that makes an access wrong, or None; ``access``: the first.
    - Each was seen in a run, and not in the run with one less; without both runs there is no statement.
    """

    kernel: str
    site: Site
    size: str
    sizes: Mapping[str, int]
    wraps_at: int
    wrong_at: int | None
    access: Access | None

    @property
    def is_extreme(self) -> bool:
        """Answer whether the size itself nearly fills an int32, as in ``position + 1`` at 2^31 - 1."""
        return self.wrong_at is not None and self.wrong_at >= _EXTREME

    @property
    def effect(self) -> str:
        """Return what the wrap does, in words."""
        if self.access is None:
            return "no access uses the wrapped value"
        if self.access.kind == "skips":
            return f"skips elements of {self.access.tensor}"
        if self.access.kind.startswith("stores"):
            return f"{self.access.kind} in {self.access.tensor}"
        away = f"{abs(self.access.away) / 2**30:.3g} GiB {'before' if self.access.away < 0 else 'after'}"
        where = f", in {self.access.lands}" if self.access.lands else ", outside all tensors"
        if self.access.lands == self.access.tensor:
            where = ", in the same tensor"
        return f"{self.access.kind} {away} the element of {self.access.tensor}{where}"

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON has it."""
        return {
            "line": self.site.line,
            "expression": self.site.text,
            **{name: getattr(self, name) for name in ("size", "wraps_at", "wrong_at")},
            "access_line": None if self.access is None else self.access.site.line,
            "effect": self.effect,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHorizon:
    """The statements about a kernel, or why it could not be run."""

    kernel: str
    file: str
    line: int
    launch: Launch | None
    statements: tuple[Statement, ...] = ()
    why: str = ""
    runs: int = 0
    live: int = 0

    @property
    def is_described(self) -> bool:
        """Answer whether it ran with a launch that a table describes."""
        return self.launch is not None and not self.launch.is_assumed

    def to_dict(self) -> dict[str, Any]:
        """Return the horizon as JSON has it."""
        launch = "" if self.launch is None else "described" if self.is_described else "assumed"
        return {
            **{name: getattr(self, name) for name in ("kernel", "file", "line")},
            "why_not_run": self.why,
            "runs": self.runs,
            "launch": launch,
            "sizes": {} if self.launch is None else dict(self.launch.sizes),
            "statements": [one.to_dict() for one in self.statements],
        }


class Search:
    """Runs of a launch at different sizes, each run once; ``names``: the parameters of the kernel."""

    def __init__(self, run: Runner, names: Sequence[str], launch: Launch) -> None:
        self._run_programs, self._names, self.launch = run, names, launch
        self._known: dict[tuple[str, int], Observation | None] = {}
        self.runs = 0
        self._begin = time.process_time()

    def at(self, size: str, value: int) -> Observation | None:
        """Return the run with one size changed; None if it cannot be launched or leaves its tensors."""
        key = ("", 0) if value == self.launch.sizes.get(size) else (size, value)
        if key not in self._known:
            self._known[key] = self._run({**self.launch.sizes, **({size: value} if size else {})})
        return self._known[key]

    def _run(self, sizes: Mapping[str, int]) -> Observation | None:
        bound = self.launch.bind(sizes)
        if bound is None:
            return None
        self.runs += 1
        if time.process_time() - self._begin > _BUDGET_S:
            raise Unavailable(f"not done after {_BUDGET_S:.0f} s of processor time")
        arguments = {n: v for n, v in bound[0].items() if n in self._names}
        seen = self._run_programs(arguments, bound[1], programs(bound[1], self.launch.tail))
        return seen if seen.is_valid and (self.launch.is_assumed or not seen.outside) else None

    def statements(self) -> Iterator[Statement]:
        """Yield the statements about all expressions and sizes."""
        base = self.at("", 0)
        if base is None:
            why = "accesses memory outside of its tensors"
            if self.launch.bind(self.launch.sizes) is None:
                why = "has more programs than a GPU allows"
            raise Unavailable(f"the launch {why}")
        for size in self.launch.sweep:
            yield from self._of_size(size, base)

    def _of_size(self, size: str, base: Observation) -> Iterator[Statement]:
        value, most = self.launch.sizes[size], min(self.launch.most.get(size, _MOST), _MOST)
        other = min(2 * value, most) if value < most else max(1, value // 2)
        try:
            second = self.at(size, other)
        except Unavailable:
            return
        if second is None:
            return
        for site in {**base.peaks, **second.peaks}:
            first, last = base.peaks.get(site, 0), second.peaks.get(site, 0)
            growth = (last - first) / (other - value)
            if growth <= 0 or not site.line:
                continue
            guess = value + int((LIMIT - first) / growth)
            found = self._statement(site, size, max(1, min(guess, most)), most)
            if found is not None:
                yield found

    def _statement(self, site: Site, size: str, guess: int, most: int) -> Statement | None:
        """Return the statement about an expression, or None if it does not wrap up to ``most``."""
        try:
            wraps_at = self._boundary(lambda seen: site in seen.wraps, size, guess, most, 40)
            if wraps_at is None:
                return None
            seen = self.at(size, wraps_at)
            if seen is None or site in seen.follows:
                return None  # an operand had wrapped before: its statement is the one to make
            wrong_at = self._boundary(
                lambda seen: _hit(seen, site) is not None, size, wraps_at, most, _TRIES
            )
        except Unavailable:
            return None
        access = None
        if wrong_at is not None:
            last = self.at(size, wrong_at)
            access = None if last is None else _hit(last, site)
        return Statement(
            kernel=self.launch.kernel,
            site=site,
            size=size,
            wraps_at=wraps_at,
            access=access,
            wrong_at=None if access is None else wrong_at,
            sizes={n: v for n, v in self.launch.sizes.items() if n != size},
        )

    def _boundary(
        self, holds: Callable[[Observation], bool], size: str, guess: int, most: int, tries: int
    ) -> int | None:
        """Return the smallest value near ``guess`` at which something holds that does not hold just below."""

        def at(value: int) -> bool:
            seen = self.at(size, value)
            return seen is not None and holds(seen)

        low, high, step = 0, 0, 1
        if at(guess):
            high = guess
            while high - step > 0 and at(high - step):
                high, step = high - step, 2 * step
            low = max(0, high - step)
        else:
            low = guess
            for _ in range(tries):
                value = min(low + step, most)
                if value <= low:
                    return None
                if at(value):
                    high = value
                    break
                low, step = value, 2 * step
            if not high:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle) else (middle, high)
        return high if low and self.at(size, low) is not None else None


def _hit(seen: Observation, site: Site) -> Access | None:
    """Return the first access that an expression's wrap makes wrong."""
    return next((one for one in seen.accesses if site in one.sources), None)


def kernel_horizon(kernel: Any, launches: Iterable[Launch], files: list[str]) -> KernelHorizon:
    """Return the horizon of a kernel for the first launch that runs and accesses memory."""
    facts = functools.partial(
        KernelHorizon, kernel=kernel.name, file=kernel.shown, line=kernel.node.lineno
    )
    why = ""
    for launch in launches:
        try:
            with running(function := kernel.function, files) as run:
                search = Search(run, function.arg_names, launch)
                base = search.at("", 0)
                found = tuple(search.statements())
        except Unavailable as error:
            why = why or str(error)
            continue
        if base is not None and base.live:
            return facts(launch=launch, statements=found, runs=search.runs, live=base.live)
        why = why or "no access of the programs that ran is enabled by its mask"
    return facts(launch=None, why=why)


LAUNCHES = Path(__file__).parent / "launches.toml"
_Task = tuple[Kernel, Iterable[Launch]]
_ALONE = 8  # kernels that one process does alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A statement and what a deployment makes of it.

    - ``limits``: the largest value of each size in the deployment; empty without one.
    - ``also``: how many more expressions make the same access wrong, at the same or a larger size.
    """

    kernel: KernelHorizon
    statement: Statement
    limits: Mapping[str, int]
    also: int

    @property
    def margin(self) -> float | None:
        """Return how many times the deployment the horizon is; None if that is unknown."""
        one, launch = self.statement, self.kernel.launch
        if one.wrong_at is None or one.size not in self.limits:
            return None
        if launch is None or launch.is_assumed:
            return None
        own = {one.size: one.wrong_at}
        sizes = {**one.sizes, **own}
        needed = own | {n: evaluate(t, sizes) for n, t in launch.within.items()}
        return float(max(value / self.limits[name] for name, value in needed.items()))

    @property
    def is_described(self) -> bool:
        """Answer whether the kernel ran with a launch that a table describes."""
        return self.kernel.is_described

    @property
    def is_reached(self) -> bool:
        """Answer whether the deployment reaches the horizon."""
        return self.margin is not None and self.margin <= 1

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        limit = self.limits.get(self.statement.size)
        facts = {"kernel": self.kernel.kernel, "file": self.kernel.file}
        return {**facts, "limit": limit, "margin": self.margin, **self.statement.to_dict()}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Survey(Shown):
    """The horizons of a source's kernels."""

    source: str
    kernels: Sequence[KernelHorizon]
    deployment: Deployment | None
    broken: dict[str, str]
    seconds: float

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Return the statements whose access is wrong, one for each access and size, the nearest first.

        Those with a size from 2^30 on, which nearly fills an int32 itself, are in the JSON only.
        """
        found: dict[tuple[Any, ...], list[Row]] = {}
        limits = {} if self.deployment is None else self.deployment.limits
        for kernel in self.kernels:
            for one in kernel.statements:
                if one.access is None or one.is_extreme or kernel.launch is None:
                    continue
                sizes = str(kernel.launch.sizes.keys())
                key = (kernel.file, kernel.kernel, sizes, one.access.site, one.size)
                row = Row(kernel=kernel, statement=one, limits=limits, also=0)
                found.setdefault(key, []).append(row)
        return sorted(
            map(_nearest, found.values()),
            key=lambda row: (
                not row.is_described,
                row.margin if row.margin is not None else 1e9,
                row.statement.wrong_at or 0,
            ),
        )

    @property
    def reached(self) -> list[Row]:
        """Return the statements that the deployment reaches."""
        return [row for row in self.rows if row.is_reached]

    @property
    def not_run(self) -> list[KernelHorizon]:
        """Return the kernels that could not be run."""
        return [one for one in self.kernels if one.why]

    @property
    def exit_code(self) -> int:
        """Return 1 if the deployment reaches a horizon, 3 if not and something could not be run, else 0."""
        return 1 if self.reached else 3 if self.not_run or self.broken else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as JSON has it."""
        of = self.deployment
        return {
            "source": self.source,
            "deployment": of and {"name": of.name, **of.limits},
            "kernels": [one.to_dict() for one in self.kernels],
            "reached": [one.to_dict() for one in self.reached],
            "broken": self.broken,
            "processor_s": round(self.seconds, 1),
            "exit_code": self.exit_code,
        }


def _nearest(rows: list[Row]) -> Row:
    first = min(rows, key=lambda row: row.statement.wrong_at or 0)
    return dataclasses.replace(first, also=len(rows) - 1)


def survey(
    source: Path,
    *,
    op: str = "",
    deployment: Deployment | None = None,
    launches: Sequence[Launch] = (),
    is_assuming: bool = True,
    files: Sequence[Path] | None = None,
    sizes: Sequence[str] | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Return the horizons of the kernels of a source.

    - ``op``: part of the path or of the name of the kernels to run; "" for all.
    - ``launches``: descriptions that are tried before attnlab's own.
    - ``is_assuming``: whether kernels without a description are run with a launch that attnlab guesses.
    - ``files``: those of the folder ``source`` whose kernels are asked for, None for all.
    - ``sizes``: those whose horizon is asked for, if no other size is limited by their product; None for all.

    Raises InvalidCase for a source without such a kernel, and if ``op`` names kernels that the deployment
    does not fit.
    """
    begin = time.process_time()
    kernels, loaded, broken = load_kernels(source, files)
    kernels = [one for one in kernels if op in f"{one.shown}:{one.name}"]
    if not kernels:
        raise InvalidCase(
            f"op must be part of the path or name of a kernel of {source}, got {op!r}"
        )
    described = [*launches, *read_launches(LAUNCHES).values()]
    tasks: list[_Task] = []
    refused: list[InvalidCase] = []
    for one in kernels:
        own = [launch for launch in described if launch.suits(one.shown, one.name)]
        for launch in own:
            try:
                at = launch.at({} if deployment is None else deployment.sizes)
                asked = tuple(n for n in at.sweep if sizes is None or _is_asked(n, at, sizes))
                tasks.append((one, [dataclasses.replace(at, sweep=asked)]))
            except InvalidCase as error:  # the library takes another kernel for this deployment
                refused.append(error)
        if not own and is_assuming:
            tasks.append((one, assumed_launches(one)))
    if refused and not tasks:
        raise refused[0]
    paths = [str(path) for path in loaded]
    found, seconds = _run(tasks, paths, on_step)
    seconds += time.process_time() - begin
    return Survey(
        source=str(source), kernels=found, deployment=deployment, broken=broken, seconds=seconds
    )


def _is_asked(size: str, launch: Launch, sizes: Sequence[str]) -> bool:
    factors = [n for n, text in launch.within.items() if n != size and size in text]
    return size in sizes and not factors


def _run(
    tasks: list[_Task], paths: list[str], on_step: Callable[[int, int], None]
) -> tuple[list[KernelHorizon], float]:
    """Return the horizons of the tasks, and the processor time of other processes."""
    total = len(tasks)
    found: list[KernelHorizon] = []
    seconds = 0.0
    if total <= _ALONE or cores() == 1:
        for task in tasks:
            found.append(kernel_horizon(*task, paths))
            on_step(len(found), total)
        return found, seconds
    _TASKS[:] = [(*task, paths) for task in tasks]
    with ProcessPoolExecutor(cores(), mp_context=get_context("fork")) as pool:
        for one, used in pool.map(_horizon_of, range(total), chunksize=1):
            found.append(one)
            seconds += used
            on_step(len(found), total)
    return found, seconds


_TASKS: list[Any] = []  # what the processes of a survey share


def _horizon_of(index: int) -> tuple[KernelHorizon, float]:
    begin = time.process_time()
    return kernel_horizon(*_TASKS[index]), time.process_time() - begin
