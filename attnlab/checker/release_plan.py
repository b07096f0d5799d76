"""The plan of a check of many releases: what runs, and which releases share a result.

The verdict of a case depends on the op's files, on those that they import, and on the rules that the lab
applies to the release. An op that is the same in several releases runs in the first of them.
"""

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.ops import OPS
from attnlab.checker.case_job import CheckJob
from attnlab.checker.costs import Costs, packaged_costs
from attnlab.checker.plan import Plan
from attnlab.checker.sources import versions
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.kernels.vllm.source import Source
from attnlab.tasks.shard import ALL, Shard
from attnlab.tasks.store import Header
from attnlab.tasks.task import Task

COMMAND = "releases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release: its ``version`` and the backend that runs its ops."""

    version: str
    backend: VllmBackend


def releases_of(paths: Mapping[str, Path], device: str) -> list[Release]:
    """Return the releases at some paths, which are given by version, with their ops on a device."""
    return [
        Release(version=version, backend=VllmBackend(path=path, requested_device=device))
        for version, path in paths.items()
    ]


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """What a check of releases runs. ``releases``: the oldest first; the other fields as in :class:`Plan`."""

    releases: tuple[Release, ...]
    ops: tuple[str, ...]
    platform: str = "sm_90"
    cases: int | None = None
    seed: int = 0
    case_limit_s: float = 60.0
    costs: Costs = field(default_factory=packaged_costs, repr=False)

    @cached_property
    def runs(self) -> dict[str, dict[str, str]]:
        """Return, by release and op, the release in which the op runs; an op that is absent is left out."""
        first: dict[tuple[str, str], str] = {}
        found: dict[str, dict[str, str]] = {}
        for release in self.releases:
            found[release.version] = {}
            for op in self.ops:
                digest = op_digest(release.backend.source, op)
                if digest is not None:
                    owner = first.setdefault((op, digest), release.version)
                    found[release.version][op] = owner
        return found

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Return the plan of each release that has an op to run."""
        found = {}
        for release in self.releases:
            own = self.runs[release.version].items()
            ops = tuple(op for op, owner in own if owner == release.version)
            if ops:
                found[release.version] = Plan(
                    backend=release.backend,
                    ops=ops,
                    platform=self.platform,
                    cases=self.cases,
                    seed=self.seed,
                    case_limit_s=self.case_limit_s,
                    library=release.version,
                    costs=self.costs,
                )
        return found

    def tasks(self) -> list[Task]:
        """Return the cases of all releases, release by release."""
        return [task for plan in self.plans.values() for task in plan.tasks()]

    @property
    def rules(self) -> dict[str, str]:
        """Return, by release, the release whose rules the lab applies to it."""
        return {release.version: release.backend.release for release in self.releases}

    def job(self, device: str | None = None) -> CheckJob:
        """Return the job that runs all of the plan's tasks; ``device``: another one than that of the plan."""
        libraries = {
            one.version: one.backend
            if device is None
            else VllmBackend(path=one.backend.path, requested_device=device)
            for one in self.releases
            if one.version in self.plans
        }
        return CheckJob(libraries=dict(libraries), device=device or self.releases[0].backend.device)

    def header(self, tasks: Sequence[Task], shard: Shard = ALL) -> Header:
        """Return the header of a store: everything that the verdicts depend on, without paths."""
        keys = "\n".join(f"{task.key} {task.cost_s}" for task in tasks)
        digests = {
            release.version: {op: op_digest(release.backend.source, op) for op in self.ops}
            for release in self.releases
        }
        return {
            "command": COMMAND,
            "device": self.releases[0].backend.device,
            "options": {
                "releases": [release.version for release in self.releases],
                "ops": [*self.ops],
                "platform": self.platform,
                "cases": self.cases,
                "seed": self.seed,
                "case_seconds": self.case_limit_s,
            },
            "digests": digests,
            "runs": self.runs,
            "rules": self.rules,
            "versions": versions(),
            "shard": str(shard),
            "digest of cases and costs": hashlib.sha256(keys.encode()).hexdigest()[:16],
            "cases": [
                {"key": task.key, "payload": task.payload, "cost_s": task.cost_s} for task in tasks
            ],
        }


def op_digest(source: Source, op: str) -> str | None:
    """Return a digest of what decides the verdicts of an op in a release; None if it has no such op."""
    try:
        first = source.op_file(OPS[op].module)
    except Unsupported:
        return None
    digest = hashlib.sha256(f"{source.rules}\0".encode())
    for file in sorted(_with_imports(source, first)):
        digest.update(f"{file.name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _with_imports(source: Source, file: Path) -> set[Path]:
    """Return an op file and the op files that it imports, directly or not."""
    folders = {folder.replace("/", "."): source.root / folder for folder in source.ops_folders}
    found, new = set[Path](), {file}
    while new:
        path = new.pop()
        found.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError as error:
            raise InvalidCase(f"{path} is no Python: {error.msg}", field="source") from error
        names = {name for node in ast.walk(tree) for name in _imported(node)}
        for name in names:
            package, _, leaf = name.rpartition(".")
            folder = folders.get(package) if package else path.parent
            candidate = None if folder is None else folder / f"{leaf}.py"
            if candidate is not None and candidate.is_file() and candidate not in found:
                new.add(candidate)
    return found


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement may import; a relative one without its package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = "" if node.level else node.module or ""
    if node.level:  # "from .name import x" and "from . import name"
        return [node.module] if node.module else [alias.name for alias in node.names]
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]
