"""Check that a Case's tensors fit into the memory of this machine."""

import ctypes
import gc
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import Unavailable
from attnlab.case.machine import total_bytes
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.case.op_arguments import NONE
from attnlab.kernels.cache_folder import check_private


def check_memory(case: Case, cache_copies: int = 1) -> None:
    """Raise Unavailable if the Case's tensors need more memory than this machine has.

    ``cache_copies`` is how many times the cache is in memory. Blocks before ``first_block`` take none.
    """
    needed, total = needed_bytes(case, cache_copies), total_bytes()
    if needed > total:
        raise Unavailable(
            f"the case needs about {needed / 2**30:.0f} GiB of memory and this machine has "
            f"{total / 2**30:.0f}: use fewer or shorter sequences, fewer heads or blocks"
        )


def needed_bytes(case: Case, cache_copies: int = 1) -> int:
    """Return about how many bytes the batch, the cache, the outputs, the reference and its bound take."""
    element_bytes = DTYPE_BYTES[case.dtype]
    row = case.num_kv_heads * case.head_size
    slots = (case.total_blocks - case.first_block) * case.block_size
    cache = 2 * slots * row * (1 if case.is_fp8 else element_bytes)
    batch = 2 * sum(case.lengths.seq_lens) * row * element_bytes
    reference_bytes = DTYPE_BYTES.get(case.reference_dtype, 8)
    outputs = case.lengths.num_tokens * case.num_heads * case.head_size
    return cache_copies * cache + batch + outputs * (2 * element_bytes + reference_bytes + 4)


# Keys of a Lab's products: the values of the fields that a product depends on.
#
# Two Cases with the same key have the same product. A key is a plain tuple; nothing of it is validated.

Key = tuple[Any, ...]

_BATCH_FIELDS = (
    *("query_lens", "ctx_lens", "seed", "num_seqs"),
    *("draw_max_query_len", "draw_max_ctx_len", "force_decode"),
    *("num_heads", "num_queries_per_kv", "head_size", "dtype", "distribution", "alibi", "sinks"),
)
_STORED_FIELDS = (*_BATCH_FIELDS, "kv_cache_dtype", "k_scale", "v_scale", "cache_write")
_TABLE_FIELDS = (
    *("block_size", "num_blocks", "max_blocks_per_seq", "block_table"),
    *("x", "interleave_v", "freed", "first_block"),
)


def _values(case: Case, names: tuple[str, ...]) -> Key:
    """Return the values of some fields, by name, and whether the op reads numbers of 4 bits."""
    return (*(getattr(case, name) for name in names), case.spec.coarse)


def _written_format(case: Case) -> str | None:
    """Return the FP8 format that the cache is written in, as far as the key needs it."""
    if not case.is_fp8 or case.kv_cache_dtype == "fp8_e5m2":
        return case.cache_format
    return case.cache_format or case.machine.fp8_e4m3


def batch_key(case: Case) -> Key:
    """Return the key of the Case's batch."""
    return _values(case, _BATCH_FIELDS)


def cache_key(case: Case) -> Key:
    """Return the key of the Case's cache, provenance included."""
    window = (case.op, case.sliding_window) if case.freed != "kept" else ()  # it frees blocks
    names = (*_STORED_FIELDS, *_TABLE_FIELDS, "empty_slots")
    return (*_values(case, names), case.staging.fill, _written_format(case), *window)


def reference_key(case: Case) -> Key:
    """Return the key of the Case's reference.

    A window that no sequence exceeds hides nothing. Only an FP8 cache changes the tokens that are stored
    in it; which ones these are depends on the op.
    """
    window = case.sliding_window if case.sliding_window < max(case.lengths.seq_lens) else 0
    names = ("sm_scale", "softcap", "reference_dtype", "op_argument")
    values = _values(case, (*_BATCH_FIELDS, *names, "mask", *MASK_DATA))
    if case.mask != CAUSAL:  # a window to the right depends on the op
        values, window = (*values, case.op), case.sliding_window
    if case.op_argument != NONE:
        values = (*values, case.op, case.platform)
    if not case.is_fp8:
        return (*values, window)
    stored = _values(case, ("k_scale", "v_scale", "cache_write"))
    cached = case.lengths.cached_lens(case.spec.fill_read)
    return (*values, window, *stored, _written_format(case), cached)


def output_key(case: Case) -> Key:
    """Return the key of the output buffer's first contents."""
    if case.spec.writes_cache:
        names = (*_STORED_FIELDS, *_TABLE_FIELDS, "output_init", "op")
        return (*_values(case, names), case.platform if case.is_fp8 else None)
    return _values(case, (*_BATCH_FIELDS, "output_init"))


def prefill_key(case: Case) -> Key:
    """Return the key of the prefill kernel's rows: stage, fill and buffers do not reach them."""
    options = ("op", "sliding_window", "sm_scale", "max_query_len", "mask", *MASK_DATA)
    names = (*_STORED_FIELDS, *_TABLE_FIELDS, *options)
    # The scale depends on the release.
    by_heads = case.sm_scale is None and case.release == "0.11.2"
    return (
        *_values(case, names),
        case.platform if case.is_fp8 else None,
        case.release if by_heads else None,
        _written_format(case),
    )


# Files by which processes share products, such as the notebooks of ``attnlab investigate``.
#
# Most notebooks begin with the same Case. The first to need its batch, its reference or its prefill rows
# makes them, and the others map the file into their memory.

T = TypeVar("T")
FOLDER_VARIABLE = "ATTNLAB_SHARED_PRODUCTS"
_WORTHWHILE_S = 0.2  # a product that took less time is not written
_MOST_BYTES = 3 << 30  # of all files


@contextmanager
def sharing_between_processes() -> Iterator[dict[str, str]]:
    """Make a private folder in which processes share products; remove it at the end.

    Yields the environment variables for these processes, none if the system has no locks for it. The
    processes must run on one machine with the same torch and number of threads: then a shared product has
    the same bits as a new one.
    """
    if os.name != "posix":
        yield {}
        return
    with TemporaryDirectory(prefix="attnlab-shared-", ignore_cleanup_errors=True) as folder:
        yield {FOLDER_VARIABLE: folder}


def shared_folder() -> Path | None:
    """Return the folder in which this process shares products, from the environment; None for none.

    Its files are pickles, so a folder that others can write to is not used.
    """
    name = os.environ.get(FOLDER_VARIABLE)
    if not name:
        return None
    try:
        check_private(Path(name))
    except (OSError, Unavailable):
        return None
    return Path(name)


def product_file(folder: Path, kind: str, key: Hashable) -> Path:
    """Return the file of a product, which may not exist."""
    return folder / f"{kind}-{hashlib.sha256(repr(key).encode()).hexdigest()}.pt"


def from_file(file: Path, make: Callable[[], T]) -> tuple[T, bool]:
    """Return the product in a file, and whether it was there; make and write it if not.

    A process that finds another one making the product waits for it. The tensors of a file are mapped:
    the processes have one copy in memory, and a change stays in the process that makes it. If the file
    cannot be written or read, for example on a full disk, the product is made without it.
    """
    import torch  # attnlab investigate only makes the folder

    with _locked(file.with_suffix(".lock")) as is_locked:
        if is_locked and file.is_file():
            with suppress(OSError, RuntimeError, EOFError):
                return torch.load(file, mmap=True, weights_only=False), True
        start = time.perf_counter()
        product = make()
        if is_locked and time.perf_counter() - start > _WORTHWHILE_S:
            _write(file, product)
        return product, False


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock between processes inside the block; yield False if there can be none."""
    import fcntl

    try:
        lock = path.open("wb")
    except OSError:
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process ends
        yield True


def _write(file: Path, product: object) -> None:
    """Write a product, unless the folder holds enough already; a file that is not complete is removed."""
    import torch

    part = file.with_suffix(".part")
    try:
        if sum(one.stat().st_size for one in file.parent.iterdir()) < _MOST_BYTES:
            torch.save(product, part)
            part.replace(file)
    except (OSError, RuntimeError):
        part.unlink(missing_ok=True)


# Products that the runs of a Lab share: the last few of each kind, by key.

_KEPT_BYTES = 64 << 20  # of all products of a store; the newest of each kind is kept in any case
_STORES: "WeakSet[SharedProducts]" = WeakSet()


def drop_products() -> None:
    """Drop what all Labs of this process keep, and give the memory back; it is made again when needed."""
    for store in [*_STORES]:
        store.clear()
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True, weakref_slot=True, eq=False)
class SharedProducts:
    """A store of products by kind and key; it keeps the ``keep`` last used of each kind, if they are small.

    Of large products it keeps the newest of each kind. Any other is there as long as something else holds it,
    such as a Result. Threads may share a store: one makes a product, and others that need it wait for it.
    ``folder``: where processes share products as files, None for no files.
    """

    keep: int
    folder: Path | None = field(default_factory=shared_folder)
    _kept: "OrderedDict[tuple[str, Hashable], Any]" = field(default_factory=OrderedDict, repr=False)
    _held: "WeakValueDictionary[tuple[str, Hashable], Any]" = field(
        default_factory=WeakValueDictionary, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _making: dict[Hashable, threading.RLock] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Let :func:`drop_products` find the store."""
        _STORES.add(self)

    def clear(self) -> None:
        """Drop every product that nothing else holds."""
        with self._lock:
            self._kept.clear()

    def has(self, kind: str, key: Hashable) -> bool:
        """Return whether the product is there, in this process or in a file."""
        if (kind, key) in self._kept or (kind, key) in self._held:
            return True
        return self.folder is not None and product_file(self.folder, kind, key).is_file()

    def count(self, kind: str) -> int:
        """Return how many products of a kind this store keeps."""
        return sum(one == kind for one, _ in self._kept)

    def get(
        self, kind: str, key: Hashable, make: Callable[[], T], *, in_file: bool = False
    ) -> tuple[T, bool]:
        """Return the product of a key, made if it is missing, and whether it was there."""
        name = (kind, key)
        with self._lock:
            if (found := self._find(name)) is not None:
                return found, True
            making = self._making.setdefault(name, threading.RLock())
        with making:  # products are made from others, never in a circle, so no thread waits forever
            with self._lock:
                if (found := self._find(name)) is not None:
                    return found, True
                self._drop(kind, self.keep - 1)
            try:
                if in_file and self.folder is not None:
                    product, was_there = from_file(product_file(self.folder, kind, key), make)
                else:
                    product, was_there = make(), False
                with self._lock:
                    self._add(name, product)
            finally:
                with self._lock:
                    self._making.pop(name, None)
            return product, was_there

    def _find(self, name: tuple[str, Hashable]) -> Any:
        """Return a product, now the last used one, or None."""
        product = self._kept.get(name)
        if product is None and (product := self._held.get(name)) is not None:
            self._drop(name[0], self.keep - 1)
            self._add(name, product)
        elif product is not None:
            self._kept.move_to_end(name)
        return product

    def _add(self, name: tuple[str, Hashable], product: Any) -> None:
        self._kept[name] = product
        with suppress(TypeError):  # a tuple cannot be held
            self._held[name] = product
        kinds, total = set[str](), 0
        for one in reversed([*self._kept]):
            total += bytes_of(self._kept[one])
            if total > _KEPT_BYTES and one[0] in kinds:
                del self._kept[one]
            kinds.add(one[0])

    def _drop(self, kind: str, most: int) -> None:
        """Keep at most so many products of a kind."""
        names = [one for one in self._kept if one[0] == kind]
        for one in names[: max(0, len(names) - most)]:
            del self._kept[one]


def bytes_of(product: Any) -> int:
    """Return the bytes of the tensors of a product: a tensor, a tuple, or a dataclass with tensors."""
    if isinstance(product, tuple):
        return sum(map(bytes_of, product))
    if is_dataclass(product):
        return sum(bytes_of(getattr(product, one.name)) for one in fields(product))
    return int(getattr(product, "nbytes", 0))
