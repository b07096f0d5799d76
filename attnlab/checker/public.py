"""The part of ``import attnlab`` that checks a library of kernels."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.declaration import field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Int, Number, is_plugin, refuse
from attnlab.case.ops import RELEASES

if TYPE_CHECKING:
    from attnlab.checker.library import Report
    from attnlab.kernels.backend import Backend

DEFAULT_CASES = 31  # for each op: every variant of the hostile cases once
DEFAULT_SECONDS = 150.0


def check(
    kernel: str | None = None,
    *,
    source: Path | str | None = None,
    installed: bool = False,
    release: str = RELEASES[-1],
    device: str = "cpu",
    ops: Sequence[str] | None = None,
    platform: str = "sm_90",
    cases: int = DEFAULT_CASES,
    seconds: float = DEFAULT_SECONDS,
    case_seconds: float | None = None,
    seed: int = 0,
    on_op: Callable[[int, int], None] = lambda done, total: None,
) -> "Report":
    """Run the ops of a library, or one kernel, over hostile Cases and report what is wrong.

    - ``kernel``: your own, "FILE.py:FUNCTION" or "plugin:NAME"; or ``source``: a vLLM wheel, sdist or
      checkout; or ``installed``: the vLLM that is installed; or none of these: the lab's models of
      ``release``.
    - ``device``: "cpu" (Triton's interpreter, which traces every access) or "cuda" (native).
    - ``cases``: for each op; ``seconds``: about the time in total.
    - ``case_seconds``: a case that takes longer is stopped and is a finding; None for ``seconds``, but at
      least 20 and at most 60. The lab's models run without a limit.
    - ``on_op`` is called with (ops done, ops in total).

    Raises InvalidCase for a wrong argument, Unavailable if a source or device is missing.
    """
    from attnlab.checker.library import check_library

    backend = backend_of(kernel, source=source, installed=installed, release=release, device=device)
    field_type("platform").check("platform", platform)
    cases, seed = Int(1).check("cases", cases), Int(0).check("seed", seed)
    seconds = Number().check("seconds", seconds)
    limit_s = min(max(seconds, 20.0), 60.0)
    if case_seconds is not None:
        limit_s = Number().check("case_seconds", case_seconds)
    chosen = [op for op in ops or backend.ops if op in backend.ops]
    if not chosen:
        refuse("op", f"one of {', '.join(backend.ops)}", ", ".join(ops or ()))
    processes = 1 if backend.name == "model" else max(2, os.cpu_count() or 1)
    return check_library(backend, chosen, platform, cases, seconds, seed, processes, on_op, limit_s)


def backend_of(
    kernel: str | None = None,
    *,
    source: Path | str | None = None,
    installed: bool = False,
    release: str = RELEASES[-1],
    device: str = "cpu",
) -> "Backend":
    """Return what :func:`check` runs; raise InvalidCase if more than one thing is given."""
    from attnlab.kernels import find_backend
    from attnlab.kernels.model.backend import ModelBackend

    if sum((kernel is not None, source is not None, installed)) > 1:
        raise InvalidCase("kernel, source and installed must not be given together", field="kernel")
    if kernel is not None:
        if not is_plugin(kernel):
            refuse("kernel", "FILE.py:FUNCTION or plugin:NAME", kernel)
        return find_backend(kernel)
    if source is not None or installed:
        return find_backend("vllm", source, device)
    if device != "cpu":
        refuse("device", "cpu without a vLLM", device)
    field_type("release").check("release", release)
    return ModelBackend(rules=release)
