"""The versions of Triton and NumPy with which the lab's interpreter layer is tested.

``tools/interpreter_pairs.py`` checks a vLLM with each pair in an environment of its own and writes
``docs/interpreter-pairs.json``; a test compares the ranges below with that file.

The layer patches private functions of Triton's interpreter. With another Triton they may be missing, or do
something else without an error. So another Triton is rejected before anything runs. Of NumPy only public
functions are used; a later NumPy 2 is accepted, and a case that it breaks is reported as not run.
"""

import functools
import importlib.metadata
import re

from attnlab.case.errors import Unavailable

TRITON = ((3, 6), (3, 9))  # the oldest and the newest minor release
NUMPY = ((2, 0), (2, 4))  # measured; any NumPy 2 is accepted

Range = tuple[tuple[int, int], tuple[int, int]]


def check_installed_pair() -> None:
    """Check the versions of the installed packages, without an import of Triton.

    Raises Unavailable for a pair that is not tested. Does nothing if one is not installed under its own
    name.
    """
    versions = _installed()
    if versions is not None:
        check_pair(*versions)


@functools.cache
def _installed() -> tuple[str, str] | None:
    """Return the versions of Triton and NumPy; None if one is not installed under its own name."""
    try:
        return importlib.metadata.version("triton"), importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_pair(triton: str, numpy: str) -> None:
    """Raise Unavailable if the lab's interpreter is not tested with this Triton and this NumPy."""
    if _is_in(triton, TRITON) and numpy.partition(".")[0] == str(NUMPY[0][0]):
        return
    raise Unavailable(
        f"Triton's interpreter needs Triton {_text(TRITON)} and NumPy {NUMPY[0][0]}, got Triton {triton} and "
        f"NumPy {numpy}: pip install triton=={_newest(TRITON)}.0 'numpy>={NUMPY[0][0]},<{NUMPY[0][0] + 1}'"
    )


def _is_in(version: str, allowed: Range) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and allowed[0] <= (int(match[1]), int(match[2])) <= allowed[1]


def _text(allowed: Range) -> str:
    return f"{allowed[0][0]}.{allowed[0][1]} to {_newest(allowed)}"


def _newest(allowed: Range) -> str:
    return f"{allowed[1][0]}.{allowed[1][1]}"
