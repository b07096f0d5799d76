"""The cache folder: downloads, unpacked sources and compiled libraries, private to the user.

Code in this folder is executed later. So folders are created with mode 0700, and code that another user
could have written is not used.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnlab.case.errors import Unavailable

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the cache folder: $ATTNLAB_CACHE or ~/.cache/attnlab. It may not exist yet."""
    return Path(os.environ.get("ATTNLAB_CACHE") or Path.home() / ".cache" / "attnlab")


def private_folder(*parts: str) -> Path:
    """Return the folder ``parts`` below the cache folder; create missing folders with mode 0700."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        for part in parts:
            folder = folder / part
            folder.mkdir(mode=0o700, exist_ok=True)
            check_private(folder)
    except OSError as error:
        raise _unusable(error) from error
    return folder


def check_private(path: Path) -> None:
    """Raise Unavailable if another user can write to ``path`` or owns it."""
    facts = path.stat()
    if facts.st_mode & _OTHERS_WRITE or facts.st_uid not in (os.geteuid(), 0):
        raise Unavailable(
            f"{path} must be writable only by you, because its code is executed; "
            "remove it, and it is created again"
        )


@contextmanager
def writing() -> Iterator[None]:
    """Create files with mode 0600 inside the block, and restore the umask after it."""
    umask = os.umask(0o077)
    try:
        yield
    except OSError as error:
        raise _unusable(error) from error
    finally:
        os.umask(umask)


def _unusable(error: OSError) -> Unavailable:
    why = error.strerror or str(error)
    return Unavailable(
        f"the cache folder {cache_folder()} cannot be used: {why} (set ATTNLAB_CACHE to another folder)"
    )
