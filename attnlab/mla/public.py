"""The part of ``import attnlab`` that runs MLA paths."""

from collections.abc import Callable
from pathlib import Path

from attnlab.case.errors import KernelRejected, Unavailable, Unsupported
from attnlab.case.fields import refuse
from attnlab.mla.mla_case import MLA_BACKENDS, MlaCase
from attnlab.mla.mla_report import MlaReport, VariantResult
from attnlab.mla.mla_result import MlaResult
from attnlab.mla.ops import MlaOps, ModelOps, VllmOps
from attnlab.mla.run import run_path
from attnlab.mla.variants import variants_of


def run_mla(
    case: MlaCase,
    *,
    backend: str = "model",
    source: Path | str | None = None,
    device: str | None = None,
    fault: str | None = None,
) -> MlaResult:
    """Run a path of MLA attention and compare each step with exact attention.

    ``backend``: "model", or "vllm" for vLLM's Triton ops of ``source``, None for the installed vLLM.
    ``fault``: the name of a fault to plant, see ``attnlab.MLA_FAULTS``. Raises InvalidCase for values that
    are not allowed, and Unavailable if the ops cannot run here.
    """
    return run_path(case, ops_of(case, backend, source, device), fault)


def check_mla(
    release: str,
    *,
    backend: str = "model",
    source: Path | str | None = None,
    device: str | None = None,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> MlaReport:
    """Run the hostile cases of MLA for a release, and return what was found."""
    variants, found = variants_of(release), []
    for i, one in enumerate(variants):
        on_case(i, len(variants))
        try:
            result = run_path(one.case, ops_of(one.case, backend, source, device))
            found.append(VariantResult(reason=one.reason, case=one.case, result=result))
        except (Unavailable, Unsupported, KernelRejected) as error:
            found.append(VariantResult(reason=one.reason, case=one.case, error=str(error)))
    return MlaReport(release=release, backend=backend, results=tuple(found))


def ops_of(
    case: MlaCase, backend: str, source: Path | str | None = None, device: str | None = None
) -> MlaOps:
    """Return the ops of a backend; raise InvalidCase for one that does not exist."""
    if backend not in MLA_BACKENDS:
        refuse("backend", f"one of {', '.join(MLA_BACKENDS)}", backend)
    if backend == "model":
        return ModelOps()
    return VllmOps.of(source, case.machine, device)
