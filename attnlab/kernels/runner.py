"""Runners: what maps a recorded call to its output, by the names that a user gives; without torch.

A :class:`Runner` names a backend; :mod:`attnlab.kernels.run_call` runs a call on it. Replay, shrink, probe,
X-ray and diagnosis of a call take their backend from here.
"""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import package_of_backend
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.source import VLLM, find_source, source_path
from attnlab.library.op import libraries, package_of

if TYPE_CHECKING:
    from attnlab.kernels.backend import Backend

ORIGIN = "origin"  # the name of a kernel: the op that a call's origin names


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A backend by name, the vLLM whose kernels it runs (None: the installed one) and its device.

    ``given``: the source as the user named it.
    """

    backend: str
    source: Path | None = None
    device: str | None = None
    given: str = ""

    @property
    def name(self) -> str:
        """Return the target as text: its source, or its backend."""
        if not _has_source(self.backend):
            return self.backend
        package = package_of_backend(self.backend) or VLLM
        source = f"installed {package.title}" if self.source is None else self.given
        return source if self.backend == "vllm" else f"{source} ({self.backend})"

    def find(self) -> "Backend":
        """Return the backend. Raises InvalidCase or Unavailable if it cannot be loaded."""
        return find_backend(self.backend, self.source, self.device)


def runners(
    sources: Sequence[str], backends: Sequence[str], device: str | None = None
) -> list[Runner]:
    """Return one target per source, and one per backend that needs no source; without any, the models.

    - ``sources``: paths of wheels, sdists and checkouts, or versions that ``attnlab fetch`` downloaded.
      Backend "rocm" runs each of them if it is named, otherwise backend "vllm" does, or that of the library
      that the first has.
    - ``backends``: names as in ``Case.backend``. "vllm" without a source is the installed vLLM.

    Raises InvalidCase for a source or a file of a backend that does not exist, and for a source that is no
    vLLM. A folder in git may be none: another of its commits may have the attention ops.
    """
    if not sources and not backends:
        return [Runner(backend="model")]
    names = list(dict.fromkeys(backends))
    if sources and not any(_has_source(name) for name in names):
        names.insert(0, backend_in(sources[0]))
    package = next((found for name in names if (found := package_of_backend(name))), VLLM)
    paths = [source_path(text, package) for text in sources]
    named: list[tuple[Path | None, str]] = [*zip(paths, sources, strict=True)]
    for path in paths:
        if not is_in_git(path):
            find_source(path, package)
    targets = []
    for name in names:
        if not _has_source(name):
            _check_backend(name)
            targets.append(Runner(backend=name))
            continue
        on = device if name == "vllm" else None
        targets += [
            Runner(backend=name, source=path, device=on, given=text)
            for path, text in named or [(None, "")]
        ]
    return targets


def backend_in(source: str) -> str:
    """Return the backend of the library that a source has, "vllm" if it has none that attnlab knows."""
    for library in ("vllm", *libraries()) if Path(source).expanduser().exists() else ():
        with suppress(InvalidCase):
            find_source(source, package_of(library))
            return library if library == "vllm" else f"library:{library}"
    return "vllm"


def _has_source(backend: str) -> bool:
    """Answer whether a backend runs a call by the kernels of a source."""
    return package_of_backend(backend) is not None and backend != "cuda"


def _check_backend(name: str) -> None:
    """Raise InvalidCase for a backend that does not exist; a file that cannot be loaded does."""
    file = name.rpartition(":")[0]
    if file.endswith(".py") and Path(file).expanduser().is_file():
        return
    find_backend(name)


def is_in_git(path: Path) -> bool:
    """Answer whether a folder is inside a git repository."""
    return path.is_dir() and bool(_git("rev-parse", "--git-dir", folder=path))


def is_bisecting(folder: Path) -> bool:
    """Answer whether git bisects the repository of a folder."""
    log = _git("rev-parse", "--git-path", "BISECT_LOG", folder=folder)
    return bool(log) and (folder / log).is_file()


def _git(*words: str, folder: Path) -> str:
    """Return what git prints, or "" if there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def one_backend(
    source: Path | str | None, backend: str | None, device: str | None
) -> "Backend | None":
    """Return the backend of a source, or of a name, or None without both. Raises InvalidCase or
    Unavailable."""
    if source is None and backend is None:
        return None
    sources = [] if source is None else [str(source)]
    found = runners(sources, [] if backend is None else [backend], device)
    if len(found) > 1:
        raise InvalidCase(f"backend must be vllm or rocm with a source, got {backend}")
    return found[0].find()
