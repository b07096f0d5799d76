"""The command ``attnlab check``."""

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.declaration import field_type
from attnlab.case.errors import AttnLabError, InvalidCase, Unsupported
from attnlab.case.fields import refuse
from attnlab.case.output_file import make_output_folder
from attnlab.cli import command
from attnlab.cli.command import COMMANDS, notice, notice_rules, progress, runs
from attnlab.cli.sharded import check_ci_files, print_report, write_ci_files
from attnlab.kernels.child_process import ONE_THREAD
from attnlab.library.op import ops_of, package_of, state_ops_of
from attnlab.tasks.run import Interrupt, interruptible

if TYPE_CHECKING:
    from attnlab.checker.report import Progress, Report
    from attnlab.kernels.backend import Backend


@runs("check")
def _run(args: argparse.Namespace) -> int:
    if state_ops_of(args.library):
        return _check_states(args)
    with interruptible() as interrupt:
        report = _checked(args, interrupt)
    if interrupt():
        notice("interrupted; the report has what ran")
    write_ci_files(args, report)
    command.share(args, report, **_page_facts(args, report))
    page = None if interrupt() else _draw(args, report)
    print_report(report, args.json, page)
    return interrupt.exit_code or report.exit_code


def _check_states(args: argparse.Namespace) -> int:
    """Check a library of linear attention, whose ops have states in place of a cache."""
    names = "library", "source", "installed", "op", "platform", "json", "html", "markdown", "note"
    parser = argparse.ArgumentParser()
    COMMANDS["check"].add_flags(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in names and getattr(args, name) != default:
            raise InvalidCase(f"{name} must not be given with {args.library}")
    from attnlab.kernels.vllm.source import source_path
    from attnlab.linear.state_check import check_states

    if args.source is not None:
        args.source = source_path(str(args.source), package_of(args.library))
    title = f"checking {args.library}"
    with progress(title) as on_step:
        report = check_states(
            args.library,
            args.source,
            ops=args.op,
            platform=args.platform or "sm_90",
            on_case=lambda done, total: on_step(title, done, total),
        )
    command.check_share_flags(args)
    command.share(args, report)
    command.put(report, args.json)
    return report.exit_code


def _library(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that select what is checked."""
    names = ("kernel", "source", "library", "installed", "csrc", "release", "device")
    return {name: getattr(args, name) for name in names}


def check_run_flags(args: argparse.Namespace) -> None:
    """Raise InvalidCase for a wrong value of :func:`add_conditions` and ``add_scaling``, without torch."""
    from attnlab.checker.check import check_conditions, check_scaling

    check_conditions(
        platform=args.platform,
        cases=args.cases,
        seconds=args.seconds,
        case_seconds=args.case_seconds,
        seed=args.seed,
    )
    check_scaling(engine=args.engine, shard=args.shard, times=args.times)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise InvalidCase for a flag that cannot work, without torch and before minutes are spent."""
    from attnlab.checker.check import Chosen
    from attnlab.checker.finding import read_known
    from attnlab.kernels.vllm.source import source_path

    command.check_share_flags(args)
    names = [one.name for one in ops_of(args.library)]
    for op in args.op or ():
        if args.library == "vllm":
            field_type("op").check("op", op)
        elif op not in names:
            refuse("op", f"one of {', '.join(names)}", op)
    if args.source is not None and args.kernel is None and not args.installed:
        args.source = source_path(str(args.source), package_of(args.library))
    Chosen(**_library(args)).check(coverage=_is_measured(args))
    check_run_flags(args)
    has_library = args.kernel is None and (args.source or args.installed)
    if args.report is not None and (args.csrc or not has_library):
        raise InvalidCase("report must be given with a library: --source PATH or --installed")
    # The op of a kernel is known once it is loaded.
    if args.known is not None and args.kernel is None:
        read_known(args.known)
    check_ci_files(args)
    if args.out is not None:
        from attnlab.tasks.store import check_can_store

        check_can_store(args.out)


def _backend(args: argparse.Namespace) -> "Backend":
    """Return what is checked, and create the folders of the files to write."""
    from attnlab.checker.check import backend_of

    _check_flags(args)
    backend = backend_of(**_library(args))
    command.notice_binding(backend)
    if args.source is not None and args.library == "vllm" and args.kernel is None:
        from attnlab.kernels.vllm.source import find_source

        notice_rules(find_source(args.source))
    if args.pictures is not None:
        from attnlab.reports.check_pages import check_folder as check_drawable

        check_drawable(args.pictures)
    if args.coverage_html is not None:
        from attnlab.reports.check_pages import check_writable

        check_writable(args.coverage_html)
    if args.report is not None:
        make_output_folder(args.report, "report")
    return backend


def _checked(args: argparse.Namespace, stop: Interrupt) -> "Report":
    """Check the library of the flags, and write the reports."""
    from attnlab.checker.check import check

    if args.device == "cpu":  # the workers are copies of this process
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")
    backend = _backend(args)
    title = f"checking {backend.version}"
    with progress(title) as on_step:
        report = check(
            **_library(args),
            ops=args.op,
            platform=args.platform,
            cases=args.cases,
            seconds=args.seconds,
            case_seconds=args.case_seconds,
            seed=args.seed,
            engine=args.engine,
            shard=args.shard,
            out=args.out,
            known=args.known,
            times=args.times,
            coverage=_is_measured(args),
            horizon=not args.no_horizon,
            on_progress=lambda progress: on_step(
                step_text(title, progress), progress.done, progress.total
            ),
            stop=stop,
        )
    if args.coverage_html is not None:
        from attnlab.reports.check_pages import write_coverage

        write_coverage(report, args.coverage_html, shlex.join(["attnlab", *sys.argv[1:]]))
    if args.locate and not stop():
        from attnlab.checker.report import with_source_lines

        with progress("locating the faults") as on_step:
            report = with_source_lines(report, backend, on_step)
    if args.report is None or stop():
        return report
    from attnlab.reports.upstream import write_reports

    written = write_reports(report.findings, args.report, report.version, backend.device, backend)
    return dataclasses.replace(report, reports=[str(path) for path in written])


def _page_facts(args: argparse.Namespace, report: "Report") -> dict[str, Any]:
    """Return what the page shows of the first finding: a run of its smallest case, a script, and its line."""
    found = [one for one in report.unexpected if not one.horizon and one.kind != "fails"]
    if args.html is None or not found:
        return {}
    from attnlab.checker.check import backend_of
    from attnlab.contracts.contract import Target
    from attnlab.lab.lab import Lab
    from attnlab.reports.close_up import trace_run
    from attnlab.reports.upstream import script_of

    case, backend = found[0].case, backend_of(**_library(args))
    lab = Lab(source=backend.path, device="cpu")
    lab.use(backend)
    try:
        run = trace_run(lab, case)
    except AttnLabError:
        return {}
    try:
        script = script_of(run.result.recorded_call, Target.of(case), backend, found[0].title)
    except Unsupported as error:
        script = "", str(error)
    line = next(((one.file, one.line) for one in found[0].lines), None)
    return {"run": run, "script": script, "line": line}


def _is_measured(args: argparse.Namespace) -> bool:
    return args.coverage or args.coverage_html is not None


def step_text(title: str, progress: "Progress") -> str:
    """Return how far a check has come, in words."""
    steps = {
        "naming": ": looking for causes",
        "shrinking": ": shrinking the findings",
        "native": ": the findings on a GPU",
    }
    parts = [title + steps.get(progress.step, "")]
    if progress.findings:
        parts.append(f"{progress.findings} with a fault")
    if progress.remaining_s is not None:
        parts.append(f"about {progress.remaining_s:.0f} s left")
    return ", ".join(parts)


def _draw(args: argparse.Namespace, report: "Report") -> Path | None:
    """Write the pictures of --pictures; return their page, or None without the flag."""
    if args.pictures is None:
        return None
    from attnlab.checker.check import backend_of
    from attnlab.reports.check_pages import write_pictures

    words = ["attnlab", *sys.argv[1:]]
    with progress("drawing"):
        return write_pictures(
            report, backend_of(**_library(args)), args.pictures, shlex.join(words)
        )
