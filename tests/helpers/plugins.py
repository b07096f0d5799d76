"""Users' kernels with planted faults, and their check."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.case_check import check_case
from attnlab.checker.case_run import lab_of, remembering
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.plan import Plan
from attnlab.checker.report import check_library
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.tasks.local import LocalEngine

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


# One fault of a value, which is named and reduced, and two that need little time.
FAULTS = {
    "hidden |= away <= -call": "hidden |= away < -call",
    "call.sinks[:, None": "call.sinks[:, None, 0",
    "call.alibi_slopes[:, None, None] * away": "call.no_slopes * away",
}
RIGHT = (EXAMPLES / "my_attention.py").read_text()


def planted(folder: Path, text: str, name: str = "my_attention") -> Backend:
    """Return the backend of a file's text."""
    file = folder / "kernel.py"
    file.write_text(text)
    return find_backend(f"{file}:{name}")


def faulty_plan(folder: Path) -> Plan:
    """Return the plan of a kernel with three faults, which different cases show."""
    text = RIGHT
    for old, new in FAULTS.items():
        assert old in text
        text = text.replace(old, new)
    backend = planted(folder, text)
    return Plan(backend=backend, ops=backend.ops, cases=8)


def checked(backend: Backend, cases: int = 8, platform: str = "sm_90", seed: int = 0):
    """Return the report of a backend, in this process."""
    plan = Plan(backend=backend, ops=backend.ops, platform=platform, cases=cases, seed=seed)
    return check_library(plan)


def faults_of(backend: Backend, case: Case, *, searches: bool = False) -> list[Finding]:
    """Return the faults that the check of a Case finds.

    ``searches``: look for a rule of an output that no name explains, too, which takes seconds.
    """
    unnamed = Finding(op=case.op, kind="", case=case, evidence="", diagnosis="unexplained")
    with nullcontext() if searches else remembering(unnamed):
        return [one for one in check_case(lab_of(backend, "cpu"), backend, case) if one.is_fault]


def faults_of_cases(backend: Backend, cases: int) -> Iterator[Finding]:
    """Yield the faults of the first hostile cases of a backend's op, as :func:`faults_of` finds them."""
    for case in hostile_cases(backend, backend.ops[0], "sm_90", cases, 0):
        yield from faults_of(backend, case)


def checked_by_workers(backend: Backend, cases: int = 6, limit_s: float = 60.0, **options: Any):
    """Return the report of a backend, checked by two worker processes."""
    plan = Plan(backend=backend, ops=backend.ops, cases=cases, case_limit_s=limit_s)
    with LocalEngine(2) as engine:
        return check_library(plan, engine, **options)
