"""The part of ``import attnlab`` that checks a library of kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.declaration import field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    Int,
    Number,
    check_plugin_file,
    is_plugin,
    names_file,
    package_of_backend,
    refuse,
)
from attnlab.case.ops import OPS, RELEASES
from attnlab.library.op import libraries, package_of

if TYPE_CHECKING:
    from attnlab.checker.plan import Plan
    from attnlab.checker.releases import Release, ReleasePlan
    from attnlab.checker.report import OnProgress, Progress, Report
    from attnlab.kernels.backend import Backend
    from attnlab.tasks.task import Engine

_PLATFORM = "sm_90"
_CASE_SECONDS = {"cpu": 60.0, "cuda": 180.0}  # compiling a kernel takes long
_MODEL_SHARE = 0.1  # of the time of an interpreted kernel that a model takes
_SHORT_S = 10.0  # models that take less run in this process


def check(
    kernel: str | None = None,
    *,
    source: Path | str | None = None,
    library: str = "vllm",
    installed: bool = False,
    csrc: bool = False,
    release: str = RELEASES[-1],
    device: str = "cpu",
    ops: Sequence[str] | None = None,
    platform: str | None = None,
    cases: int | None = None,
    seconds: float | None = None,
    case_seconds: float | None = None,
    seed: int = 0,
    on_op: Callable[[int, int], None] = lambda done, total: None,
    on_progress: "OnProgress | None" = None,
    engine: str | None = None,
    shard: str = "1/1",
    out: Path | str | None = None,
    known: Path | str | None = None,
    times: Path | str | None = None,
    coverage: bool = False,
    horizon: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> "Report":
    """Run the ops of a library, or one kernel, over hostile Cases and report what is wrong.

    - ``kernel``: your own, "FILE.py:FUNCTION" or "plugin:NAME"; an op without a record, "MODULE:FUNCTION(…)",
      also of ``source``; or ``source``: a vLLM wheel, sdist or
      checkout; or ``installed``: the vLLM that is installed; or none of these: the lab's models of
      ``release``.
    - ``library``: which library ``source`` or the installed package is, a module of attnlab/library.
    - ``csrc``: instead of the Triton ops of ``source``, its CUDA cache write, on the emulated device.
    - ``platform``: what is modelled; None is sm_90, and for an op that does not run there its first one.
    - ``device``: "cpu" (Triton's interpreter, which traces every access) or "cuda" (native).
    - ``cases``: for each op, None for the whole covering design. All of them run unless ``seconds`` is
      given: after that time no other case starts, and ``not_run`` of the report has those that are left.
    - ``case_seconds``: a case that takes more processor time is stopped. If other cases ran at the same time,
      it runs again alone; then it is a finding. None for 60, or 180 s in all on a GPU, where kernels are
      compiled.
    - ``on_op`` is called with (ops done, ops in total), ``on_progress`` with a
      :class:`attnlab.checker.report.Progress`, after each case.
    - ``engine``: "local" or "local:N", N worker processes; "ray" or "ray://HOST:PORT", a Ray cluster; None
      for one process per core; on GPUs, as many as their memory allows.
    - ``shard``: "i/n", this part of the cases; ``attnlab merge`` joins the stores of all parts.
    - ``out``: a folder that keeps each verdict as it arrives; the same call continues there.
    - ``known``: a file of expected findings (:mod:`attnlab.checker.finding`).
    - ``times``: the store of an earlier check, whose times divide the shards.
    - ``coverage``: measure which lines and branches of the kernels the cases reach (device "cpu").
    - ``horizon``: ask at which sizes int32 addresses of the Triton kernels of a vLLM wrap (device "cpu").
    - ``stop``: called often; when it returns True, the check ends with a report of what ran.

    Raises InvalidCase for a wrong argument, Unavailable if a source or device is missing.
    """
    kernels = Chosen(
        kernel=kernel, source=source, library=library, installed=installed,
        csrc=csrc, release=release, device=device,
    )  # fmt: skip
    kernels.check(coverage=coverage)
    check_conditions(
        platform=platform, cases=cases, seconds=seconds, case_seconds=case_seconds, seed=seed
    )
    check_scaling(engine=engine, shard=shard, times=times)

    from attnlab.checker.finding import read_known
    from attnlab.checker.plan import Plan
    from attnlab.checker.report import check_library
    from attnlab.kernels.backend import cell_steps
    from attnlab.tasks.store import Shard

    backend = kernels.backend()  # whose records are ops from here on
    expected = () if known is None else read_known(Path(known))
    chosen = [op for op in ops or backend.ops if op in backend.ops]
    if not chosen:
        refuse("op", f"one of {', '.join(backend.ops)}", ", ".join(ops or ()))
    elsewhere = [op for op in chosen if platform and OPS[op].platform_of(platform) != platform]
    if elsewhere and (ops or elsewhere == chosen):
        where = " or ".join(OPS[elsewhere[0]].platforms or ())
        refuse("platform", f"{where} with op {elsewhere[0]}", str(platform))
    plan = Plan(
        backend=backend,
        ops=tuple(op for op in chosen if op not in elsewhere),
        left_out=tuple(f"{op}: it does not run on platform {platform}" for op in elsewhere),
        coverage=coverage,
        cases=cases,
        seed=seed,
        horizon=horizon,
        **_conditions(backend, chosen, platform, case_seconds, times),
    )

    def note(progress: "Progress") -> None:
        if progress.step == "cases":
            on_op(progress.ops_done, progress.ops)
        if on_progress is not None:
            on_progress(progress)
        else:
            cell_steps()(progress.step, progress.done, progress.total)

    part = Shard.parse(shard)
    with engine_of(engine, plan, stop) as workers:
        return check_library(
            plan,
            workers,
            seconds=seconds,
            shard=part,
            out=None if out is None else Path(out),
            known=expected,
            on_progress=note,
            stop=stop,
        )


def release_plan(
    releases: "Sequence[Release]",
    *,
    ops: Sequence[str] | None = None,
    platform: str | None = None,
    cases: int | None = None,
    case_seconds: float | None = None,
    seed: int = 0,
    times: Path | str | None = None,
    horizon: bool = True,
) -> "ReleasePlan":
    """Return the plan of a check of many releases; the arguments are those of :func:`check`.

    Raises InvalidCase for a wrong argument.
    """
    check_conditions(platform=platform, cases=cases, case_seconds=case_seconds, seed=seed)
    check_scaling(times=times)
    from attnlab.checker.releases import ReleasePlan

    backend = releases[0].backend
    known = backend.ops
    for op in ops or ():
        if op not in known:
            refuse("op", f"one of {', '.join(known)}", op)
    return ReleasePlan(
        releases=tuple(releases),
        ops=tuple(op for op in known if not ops or op in ops),
        cases=cases,
        seed=seed,
        horizon=horizon,
        **_conditions(backend, known, platform, case_seconds, times),
    )


def _conditions(
    backend: "Backend",
    ops: Sequence[str],
    platform: str | None,
    case_seconds: float | None,
    times: Path | str | None,
) -> dict[str, Any]:
    """Return the fields of a plan that have a usual value where a check states none."""
    from attnlab.checker.plan import costs_of_store, packaged_costs

    return {
        "platform": platform or usual_platform(ops),
        "case_limit_s": _CASE_SECONDS[backend.device] if case_seconds is None else case_seconds,
        "costs": packaged_costs() if times is None else costs_of_store(Path(times)),
    }


def usual_platform(ops: Sequence[str]) -> str:
    """Return the platform that is modelled if none is given: sm_90, or the first one that the ops have."""
    return (
        _PLATFORM if any(not OPS[op].platforms for op in ops) else (OPS[ops[0]].platforms or ())[0]
    )


def engine_of(name: str | None, plan: "Plan", stop: Callable[[], bool] = lambda: False) -> "Engine":
    """Return the engine of a name; without one, this process for short models, else ``local``."""
    from attnlab.tasks.run import find_engine
    from attnlab.tasks.task import InProcess

    total = sum(task.cost_s for task in plan.tasks())
    if name is None and plan.backend.name == "model" and total * _MODEL_SHARE < _SHORT_S:
        return InProcess()
    return find_engine(name or "local", plan.backend.device, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What :func:`check` checks: its arguments of these names."""

    kernel: str | None = None
    source: Path | str | None = None
    library: str = "vllm"
    installed: bool = False
    csrc: bool = False
    release: str = RELEASES[-1]
    device: str = "cpu"

    def check(self, *, coverage: bool = False) -> None:
        """Raise InvalidCase for what selects no library, without importing torch.

        Coverage needs Triton kernels under the interpreter: the models are none, and natively no Python line
        of a kernel runs.
        """
        kernel = self.kernel
        package = None if kernel is None else package_of_backend(kernel)
        has_kernel = kernel is not None and package is None
        if sum((has_kernel, self.source is not None, self.installed)) > 1:
            text = "kernel, source and installed must not be given together"
            raise InvalidCase(text, field="kernel")
        _check_library(self.library, kernel is not None or self.csrc or self.device != "cpu")
        is_source = self.source is not None or self.installed or self.library != "vllm"
        is_model = self.csrc or (kernel is None and not is_source)
        if self.csrc and self.source is None:
            text = "csrc must be given with source: an sdist or a checkout"
            raise InvalidCase(text, field="csrc")
        if self.device != "cpu" and is_model:
            refuse("device", f"cpu {'with csrc' if self.csrc else 'without a vLLM'}", self.device)
        if kernel is not None:
            if not is_plugin(kernel):
                refuse("kernel", "FILE.py:FUNCTION or plugin:NAME", kernel)
            if names_file(kernel):
                check_plugin_file(kernel)
        if self.source is not None:
            from attnlab.kernels.vllm.source import find_source

            find_source(self.source, package or package_of(self.library))
        field_type("release").check("release", self.release)
        if coverage and is_model:
            text = "given with Triton kernels: --source PATH, --installed or your own"
            raise InvalidCase(f"coverage must be {text}", field="coverage")
        if coverage and self.device != "cpu":
            text = "measured on device cpu, under Triton's interpreter"
            raise InvalidCase(f"coverage must be {text}", field="coverage")

    def backend(self) -> "Backend":
        """Return what is checked. Raises InvalidCase if more than one thing is given."""
        self.check()
        from attnlab.kernels import find_backend
        from attnlab.kernels.model import ModelBackend

        if self.csrc:
            return find_backend("cuda", self.source)
        if self.kernel is not None:
            return find_backend(self.kernel, self.source)
        if self.library != "vllm":
            return find_backend(f"library:{self.library}", self.source)
        if self.source is not None or self.installed:
            return find_backend("vllm", self.source, self.device)
        return ModelBackend(rules=self.release)


def backend_of(kernel: str | None = None, **given: Any) -> "Backend":
    """Return what :func:`check` runs; ``given``: fields of :class:`Chosen`. Raises InvalidCase if more than
    one thing is given."""
    return Chosen(kernel=kernel, **given).backend()


def _check_library(library: str, is_vllm: bool) -> None:
    """Raise InvalidCase for an unknown library, or another than vLLM where only that is possible."""
    if library not in libraries():
        refuse("library", f"one of {', '.join(libraries())}", library)
    if is_vllm and library != "vllm":
        refuse("library", "vllm with a kernel, csrc or device cuda", library)


def check_conditions(
    *,
    platform: str | None,
    cases: int | None = None,
    seconds: float | None = None,
    case_seconds: float | None = None,
    seed: int = 0,
) -> None:
    """Raise InvalidCase for a condition of :func:`check` that is not allowed, without importing torch."""
    if platform is not None:
        field_type("platform").check("platform", platform)
    if cases is not None:
        Int(1).check("cases", cases)
    for name, value in (("seconds", seconds), ("case_seconds", case_seconds)):
        if value is not None:
            Number().check(name, value)
    Int(0).check("seed", seed)


def check_scaling(
    *, engine: str | None = None, shard: str = "1/1", times: Path | str | None = None
) -> None:
    """Raise InvalidCase for arguments that say where a check runs, without importing torch."""
    from attnlab.tasks.run import check_engine
    from attnlab.tasks.store import Shard, read_header

    if engine is not None:
        check_engine(engine)
    Shard.parse(shard)
    if times is not None:
        read_header(Path(times), "times")
