"""The files and folders at a path of the user's choice: what must exist, and how the lab writes one.

A file is written next to its final place and then renamed, so that a reader never sees a part of it. Devices,
pipes, sockets and folders are never replaced.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnlab.case.errors import InvalidCall, InvalidCase

HTML = (".html", ".htm")  # suffixes of a page


def check_output_file(path: Path, field: str | None = None, suffixes: Sequence[str] = ()) -> None:
    """Check that a file can be written: it is new or a regular file, in a folder that can be written to.

    ``suffixes``: those that the file may have; () for any. Raises InvalidCase for ``field`` (default: the
    path itself) otherwise.
    """
    name = str(path) if field is None else field.replace("_", "-")
    got = "" if field is None else f", got {path}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise InvalidCase(f"{name} must be a file that ends with {suffixes[0]}{got}", field=field)
    target = path.resolve()
    if not target.parent.is_dir():
        raise InvalidCase(f"{name} must be in an existing folder{got}", field=field)
    if target.exists() and not target.is_file():
        raise InvalidCase(f"{name} must be a regular file or a new one{got}", field=field)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InvalidCase(f"{name} must be in a folder that you can write to{got}", field=field)


def check_input_path(path: Path) -> None:
    """Raise InvalidCall if there is no file or folder at a path of the user's."""
    if not path.exists():
        raise InvalidCall(f"{path} must be a file or a folder, got a path that does not exist")


def make_output_folder(path: Path, field: str) -> None:
    """Create a folder, with its parents. Raises InvalidCase for ``field`` if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        text = f"{field} must be a folder that can be created, got {path}: {why}"
        raise InvalidCase(text) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file; if the block succeeds, rename it to ``path``.

    An existing file keeps its permissions, and a link still points to it. Raises InvalidCase if the
    file cannot be written, and for an OSError of the block.
    """
    check_output_file(path)
    target = path.resolve()
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb"):  # fails if a file or link with this name exists
            pass
        yield part
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except OSError as error:
        raise InvalidCase(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file at once. Raises InvalidCase if it cannot be written."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in UTF-8 at once. Raises InvalidCase if it cannot be written."""
    write_bytes(path, text.encode())
