"""Users' kernels with planted faults, and their check."""

from pathlib import Path

from attnlab.checker.library import check_library
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


RIGHT = (EXAMPLES / "my_attention.py").read_text()


def planted(folder: Path, text: str, name: str = "my_attention") -> Backend:
    """Return the backend of a file's text."""
    file = folder / "kernel.py"
    file.write_text(text)
    return find_backend(f"{file}:{name}")


def checked(backend: Backend, cases: int = 8, platform: str = "sm_90", seed: int = 0):
    """Return the report of a backend, in this process."""
    return check_library(backend, backend.ops, platform, cases, 600.0, seed)
