"""What a check ran, as a digest: the kernels' sources, and the versions of what ran them."""

import ast
import hashlib
import importlib.metadata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import attnlab
from attnlab.kernels.backend import Backend
from attnlab.kernels.cuda.backend import CudaBackend
from attnlab.kernels.cuda.source_text import source_files
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.vllm.backend import VllmBackend

_PACKAGES = ("torch", "triton", "numpy")
_OF_VERDICTS = (
    *("case", "tensors", "contracts", "kernels", "lab"),
    *("defects", "diagnosis", "checker"),
)


def source_digest(backend: Backend) -> str:
    """Return a digest of the sources of a backend's kernels; "" for the lab's models."""
    if isinstance(backend, VllmBackend):
        root = backend.source.root
        folders = (root / name for name in backend.source.ops_folders)
        return _digest(root, (file for folder in folders for file in folder.glob("*.py")))
    if isinstance(backend, CudaBackend):
        return _digest(backend.source.root, source_files(backend.source.root))
    if isinstance(backend, PluginBackend) and backend.file is not None:
        file = Path(backend.file)
        return _digest(file.parent, _with_imports(file))
    return ""


@cache
def versions() -> dict[str, str]:
    """Return the versions of attnlab, with a digest of its code that decides verdicts, and of packages."""
    root = Path(attnlab.__file__).parent
    files = (file for name in _OF_VERDICTS for file in (root / name).rglob("*.py"))
    found = {"attnlab": f"{attnlab.__version__} ({_digest(root, files)})"}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _digest(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files below ``root``."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _with_imports(file: Path) -> set[Path]:
    """Return a file and the files of its folder that it imports, directly or not."""
    found, new = set[Path](), {file}
    while new:
        path = new.pop()
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module else [alias.name for alias in node.names]
            paths = {file.parent / f"{name.split('.')[0]}.py" for name in names}
            new |= {path for path in paths if path.is_file()} - found
    return found
