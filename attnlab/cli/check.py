"""The command ``attnlab check``: the sanitizer over a library of kernels."""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlab.case.declaration import field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin, refuse
from attnlab.case.ops import RELEASES, TRITON_OPS

if TYPE_CHECKING:
    from attnlab.checker.library import Report
    from attnlab.kernels.backend import Backend

DEFAULT_CASES = 31  # of each op: every variant of the hostile cases once
_DOCUMENT = """
--json prints one object: source, version, cases_run, seconds; findings and observations, each {op, kind,
case, evidence, diagnosis, seen, run}; reads, {op: {own, own_future, outside_window, own_unwritten,
freed, unwritten_tail, other_position, other_sequence, never_mapped, unknown}}, how many slots were read
of each kind, of ops whose reads were seen; reads_allowed, {op: [kind]}, what the contracts let them
read; reports, the files of --report; left_out, what was not looked at.
"""
Progress = Callable[[str], AbstractContextManager[Any]]


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``attnlab check``, and say what its JSON holds."""
    parser.epilog = _DOCUMENT
    parser.add_argument(
        "kernel",
        nargs="?",
        metavar="FILE.py:FUNCTION",
        help="your own kernel, or plugin:NAME of an installed one: it takes a KernelCall and writes "
        "call.output; its attribute op names the op that it stands for",
    )
    parser.add_argument(
        "--source", type=Path, metavar="PATH", help="a vLLM: a wheel, an sdist or a checkout"
    )
    parser.add_argument("--installed", action="store_true", help="the vLLM that is installed")
    parser.add_argument(
        "--release",
        default=RELEASES[-1],
        metavar="VERSION",
        help="whose models to check, where neither kernel nor vLLM is given (default: %(default)s)",
    )
    parser.add_argument(
        "--op", action="append", choices=TRITON_OPS, help="an op; again for more (default: all)"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where a vLLM's kernels run: cpu, under Triton's interpreter, which sees every access, or cuda, "
        "natively (default: %(default)s)",
    )
    parser.add_argument("--platform", default="sm_90", help="where it would run (%(default)s)")
    parser.add_argument(
        "--cases",
        type=int,
        default=DEFAULT_CASES,
        metavar="N",
        help="cases of each op (%(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=150, help="about how long in all (%(default)s)"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="write a picture of what each finding got wrong, and a page with all of them, to DIR",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write for each finding of a vLLM a text for an issue and a script that shows it on torch, "
        "Triton and vLLM alone",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the cases' data (0)")


def run_check(args: argparse.Namespace, progress: Progress) -> "Report":
    """Run the sanitizer as the flags say; raises InvalidCase and Unavailable."""
    from attnlab.checker.library import check_library

    backend = _backend(args)
    if args.pictures is not None:
        from attnlab.reports.findings_page import check_drawable

        check_drawable(args.pictures)  # before minutes are spent
    field_type("platform").check("platform", args.platform)
    for name, least in (("cases", 1), ("seed", 0), ("seconds", 1)):
        if getattr(args, name) < least:
            raise InvalidCase(f"{name} must be at least {least}, got {getattr(args, name)}")
    ops = [op for op in args.op or backend.ops if op in backend.ops]
    if not ops:
        raise InvalidCase(f"op must be one of {', '.join(backend.ops)}, got {', '.join(args.op)}")
    if args.report is not None and backend.name != "vllm":
        raise InvalidCase("report must be given with a vLLM: --source PATH or --installed")
    processes = 1 if backend.name == "model" else max(2, os.cpu_count() or 1)
    with progress(f"checking {backend.version}") as show:
        report = check_library(
            backend,
            ops,
            args.platform,
            args.cases,
            args.seconds,
            args.seed,
            processes,
            lambda done, total: show(done=done, total=total),
        )
    if args.report is not None:
        from attnlab.reports.upstream import write_reports

        written = write_reports(report.findings, args.report, report.version, backend.device)
        report = dataclasses.replace(report, reports=[str(path) for path in written])
    return report


def draw_findings(args: argparse.Namespace, report: "Report", progress: Progress) -> Path | None:
    """Write the pictures that the flags ask for; return their page, or None where they ask for none."""
    if args.pictures is None:
        return None
    from attnlab.reports.findings_page import write_pictures

    words = ["attnlab", *sys.argv[1:]]
    with progress("drawing"):
        return write_pictures(report, _backend(args), args.pictures, shlex.join(words))


def _backend(args: argparse.Namespace) -> "Backend":
    """Return the backend that the flags name; raise InvalidCase or Unavailable."""
    from attnlab.kernels import find_backend
    from attnlab.kernels.model.backend import ModelBackend

    given = [args.kernel is not None, args.source is not None, args.installed]
    if sum(given) > 1:
        raise InvalidCase("kernel, source and installed must not be given together")
    if args.kernel is not None:
        if not is_plugin(args.kernel):
            refuse("kernel", "FILE.py:FUNCTION or plugin:NAME", args.kernel)
        return find_backend(args.kernel)
    if args.source is not None or args.installed:
        return find_backend("vllm", args.source, args.device)
    if args.device != "cpu":
        raise InvalidCase(f"device must be cpu without a vLLM, got {args.device}")
    field_type("release").check("release", args.release)
    return ModelBackend(rules=args.release)


def show_report(console: Console, report: "Report") -> None:
    """Print a Report: its findings, its observations, and what was left out."""
    for title, found in (("findings", report.findings), ("observed besides", report.observations)):
        if not found:
            console.print(f"{title}: [green]none[/]")
            continue
        table = Table(title=title, title_justify="left", show_lines=True)
        for name in ("op", "kind", "diagnosis", "seen in", "evidence, and the smallest case"):
            table.add_column(name, overflow="fold")
        for one in found:
            told = f"{escape(one.evidence)}\n[dim]{escape(one.case.to_cli())}[/]"
            table.add_row(one.op, one.kind, escape(one.diagnosis), str(one.seen), told)
        console.print(table)
    _show_reads(console, report)
    console.print(
        f"{report.version}: {report.cases_run} cases in {report.seconds:.0f} s, "
        f"{len(report.findings)} findings"
    )
    for path in report.reports:
        console.print(f"written: {escape(path)}", soft_wrap=True)
    for text in report.left_out:
        console.print(f"[dim]left out: {escape(text)}[/]")


def _show_reads(console: Console, report: "Report") -> None:
    """Print how many slots of each kind the kernels of each op read; what no contract asks for stands
    out."""
    for op, counts in report.reads.items():
        fine = [kind.replace(" ", "_") for kind in report.reads_allowed[op]]
        texts = {kind: f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items() if n}
        parts = [text if kind in fine else f"[yellow]{text}[/]" for kind, text in texts.items()]
        console.print(f"slots read by {op}: {', '.join(parts) or 'none'}")
