"""Where findings are in source code: the definition of an op, or the line that the evidence names."""

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from attnlab.case.errors import AttnLabError
from attnlab.case.ops import OPS
from attnlab.kernels.backend import Backend
from attnlab.kernels.plugin import PluginBackend

# As RunLog writes it: "prefix_prefill.py:123 reads …" and "prefix_prefill.py:123 multiplies in int32: …".
_EVIDENCE = re.compile(r"(?:^| )([\w.-]+\.py):(\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A line of a file: ``file`` relative to the root of the source, with "/"; ``line`` from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {"file": self.file, "line": self.line}


def op_locations(backend: Backend) -> dict[str, Location]:
    """Return where each op of a backend is defined; an op without a file, such as a model, is left out."""
    found = {}
    for op in backend.ops:
        located = _located(backend, op)
        if located is not None:
            path, name, function = located
            found[op] = Location(file=name, line=_line_of(path, function))
    return found


def location_of(op: str, evidence: str, ops: dict[str, Location]) -> Location | None:
    """Return the line that the evidence of a finding names, else the definition of its op, or None.

    The files of a kernel are in the folder of its op.
    """
    defined = ops.get(op)
    match = _EVIDENCE.search(evidence)
    if defined is None or match is None:
        return defined
    file = PurePosixPath(defined.file).with_name(match[1])
    return Location(file=str(file), line=int(match[2]))


def _located(backend: Backend, op: str) -> tuple[Path, str, str] | None:
    """Return the file of an op, its name in reports, and the name of the function."""
    if (source := backend.op_source) is not None:
        try:
            path = source.op_file(OPS[op].module)
        except AttnLabError:  # the release does not have the op
            return None
        return path, path.relative_to(source.root).as_posix(), OPS[op].function
    if isinstance(backend, PluginBackend) and backend.file is not None:
        path = Path(backend.file)
        return path, Path(os.path.relpath(path)).as_posix(), backend.kernel.__name__
    return None


def _line_of(path: Path, function: str) -> int:
    """Return the line of a function's ``def`` at the top of a file; 1 if it is not there."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node.lineno
    return 1
