"""The part of ``import attnlab`` that checks a library of kernels."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.declaration import field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Int, Number, refuse
from attnlab.case.ops import RELEASES

if TYPE_CHECKING:
    from attnlab.checker.library import Report
    from attnlab.checker.subject import Subject

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
    seed: int = 0,
    on_op: Callable[[int, int], None] = lambda done, total: None,
) -> "Report":
    """Run the ops of a library, or one kernel, over hostile Cases and report what is wrong.

    - ``kernel``: your own, "FILE.py:FUNCTION"; or ``source``: a vLLM wheel, sdist or checkout; or
      ``installed``: the vLLM that is installed; or none of these: the lab's models of ``release``.
    - ``device``: "cpu" (Triton's interpreter, which traces every access) or "cuda" (native).
    - ``cases``: for each op; ``seconds``: about the time in total.
    - ``on_op`` is called with (ops done, ops in total).

    Raises InvalidCase for a wrong argument, Unavailable if a source or device is missing.
    """
    from attnlab.checker.library import check_library

    subject = subject_of(kernel, source=source, installed=installed, release=release, device=device)
    field_type("platform").check("platform", platform)
    cases, seed = Int(1).check("cases", cases), Int(0).check("seed", seed)
    seconds = Number().check("seconds", seconds)
    chosen = [op for op in ops or subject.ops if op in subject.ops]
    if not chosen:
        refuse("op", f"one of {', '.join(subject.ops)}", ", ".join(ops or ()))
    processes = 1 if subject.backend == "model" else max(2, os.cpu_count() or 1)
    return check_library(subject, chosen, platform, cases, seconds, seed, processes, on_op)


def subject_of(
    kernel: str | None = None,
    *,
    source: Path | str | None = None,
    installed: bool = False,
    release: str = RELEASES[-1],
    device: str = "cpu",
) -> "Subject":
    """Return what :func:`check` runs; raise InvalidCase if more than one thing is given."""
    from attnlab.checker.subject import models, plugin, vllm

    if sum((kernel is not None, source is not None, installed)) > 1:
        raise InvalidCase("kernel, source and installed must not be given together", field="kernel")
    if kernel is not None:
        return plugin(kernel)
    if source is not None or installed:
        return vllm(None if source is None else Path(source), device)
    if device != "cpu":
        refuse("device", "cpu without a vLLM", device)
    field_type("release").check("release", release)
    return models(release)
