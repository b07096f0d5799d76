"""Files by which processes share products, such as the notebooks of ``attnlab investigate``.

Most notebooks begin with the same Case. The first to need its batch, its reference or its prefill rows
makes them, and the others map the file into their memory.
"""

import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from attnlab.case.errors import Unavailable
from attnlab.kernels.cache_folder import check_private

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
