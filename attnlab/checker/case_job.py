"""The job of a check: run a case, or shrink a finding, in a worker that keeps what cases share."""

from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, DeviceLost, InvalidCase, OutOfMemory, Unsupported
from attnlab.case.json import json_value
from attnlab.checker.case_check import check_case, is_callers_fault
from attnlab.checker.case_run import CaseRun, lab_of, release_memory
from attnlab.checker.coverage import relative_points
from attnlab.checker.finding import Finding
from attnlab.checker.forms import kernels_of
from attnlab.checker.shrinking import shrink
from attnlab.checker.slot_reads import allowed_reads, read_counts
from attnlab.checker.sources import source_digest, versions
from attnlab.kernels.backend import Backend
from attnlab.kernels.triton.coverage import measuring
from attnlab.lab.lab import Lab
from attnlab.tasks.task import Job

Verdict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckJob(Job):
    """Checks cases of one or more libraries.

    ``libraries``: the backends by name. A payload has the name of its ``library``, and either a ``case``
    or a ``finding`` to shrink. ``coverage``: record which points of the kernels a case reaches.
    """

    libraries: dict[str, Backend]
    device: str = "cpu"
    coverage: bool = False

    def open(self) -> "_State":
        """Return the state of a worker. Raises Unavailable if the kernels cannot be loaded."""
        import torch

        from attnlab.kernels.triton import interpreter

        torch.set_num_threads(1)  # the other cores have workers of their own
        interpreter.limit_processes(1)
        return _State(libraries=self.libraries)

    def run(self, state: "_State", payload: dict[str, Any]) -> Verdict:
        backend, lab = state.library(payload["library"])
        verdict: Verdict
        if "finding" in payload:
            small = shrink(lab, backend, Finding.from_verdict(payload["finding"]))
            verdict = {"finding": small.to_verdict()}
        elif self.coverage:
            with measuring() as measured:
                verdict = case_verdict(lab, backend, Case.from_dict(payload["case"]))
            verdict["points"] = relative_points(backend, measured.points)
            verdict["arguments"] = {n: sorted(facts) for n, facts in measured.arguments.items()}
        else:
            verdict = case_verdict(lab, backend, Case.from_dict(payload["case"]))
        found: Verdict = json_value(verdict)
        return found

    def identity(self) -> dict[str, str]:
        digests = {name: source_digest(backend) for name, backend in self.libraries.items()}
        return {
            **versions(),
            **{f"source {name}".strip(): value for name, value in digests.items()},
        }

    def free_bytes(self, state: "_State") -> int | None:
        if self.device != "cuda":
            return None
        import torch

        release_memory()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


@dataclass(slots=True)
class _State:
    """The library that a worker has used last; its Lab keeps batches, caches and references."""

    libraries: dict[str, Backend]
    _name: str | None = None
    _lab: Lab = field(default_factory=Lab, repr=False)

    def library(self, name: str) -> tuple[Backend, Lab]:
        """Return a library's backend and its Lab."""
        backend = self.libraries[name]
        if name != self._name:
            self._name, self._lab = name, lab_of(backend, "cpu")
        return backend, self._lab


def case_verdict(lab: Lab, backend: Backend, case: Case) -> Verdict:
    """Check a Case and return its verdict.

    - ``ran``: whether it counts as run; ``findings``: as :meth:`Finding.to_verdict` returns them.
    - ``unsupported``: a limit that the kernel or the release states, or "".
    - ``not_run``: why the case could not run on this machine, or "".
    - ``reads``: the number of slots read, by state, and ``allowed``: the states that the contracts allow;
      None if the reads were not traced. ``kernels``: the names of the kernels that were launched.
    """
    verdict: Verdict = {"ran": False, "findings": [], "unsupported": "", "not_run": ""}
    reads: Verdict = {"reads": None, "allowed": None, "kernels": []}

    def count(case: Case, run: CaseRun) -> None:
        reads["kernels"] = kernels_of(run.launches)
        if run.memory is not None:
            reads.update(reads=read_counts(run.memory), allowed=allowed_reads(case))

    try:
        if is_callers_fault(lab, case):
            return {**verdict, **reads}
        findings = check_case(lab, backend, case, count)
    except (DeviceLost, OutOfMemory):
        raise
    except (Unsupported, InvalidCase) as error:  # InvalidCase: a field that this release's op lacks
        return {**verdict, **reads, "unsupported": str(error)}
    except AttnLabError as error:
        return {**verdict, **reads, "not_run": str(error)}
    return {**verdict, **reads, "ran": True, "findings": [one.to_verdict() for one in findings]}
