"""The command ``attnlab capture``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.cli import command
from attnlab.cli.command import progress, put, runs
from attnlab.serving.plugin import (
    CaptureSettings,
    parse_bytes,
    parse_count,
    parse_range,
    parse_share,
)

if TYPE_CHECKING:
    from attnlab.reports.shared_page import Picture
    from attnlab.serving.report import CaptureReport

_UNCHECKED = 3


def _settings(args: argparse.Namespace) -> CaptureSettings:
    ranges = {
        name: None if getattr(args, name) is None else parse_range(name, getattr(args, name))
        for name in ("layer", "step", "rank")
    }
    return CaptureSettings(
        out=str(args.out.resolve()),
        **ranges,
        max_bytes=parse_bytes("max-bytes", args.max_bytes),
        sample=parse_share("sample", args.sample),
        rows=parse_count("rows", args.rows),
        heads=parse_count("heads", args.heads),
    )


@runs("capture")
def _run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    command.check_share_flags(args)
    words = args.run[1:] if args.run[:1] == ["--"] else args.run
    if args.run and not words:
        raise InvalidCase("command must be given after --, got none", field="command")
    code = None
    if words:
        from attnlab.serving.plugin import run_command

        code = run_command(words, settings, to_stderr=args.json)
    report = _report(args.out, code)
    if command.is_shared(args):
        command.share(args, report, pictures=_pictures(report), cause=report.conclusion())
    put(report, args.json)
    return _exit_code(report)


def _report(folder: Path, code: int | None) -> "CaptureReport":
    from attnlab.serving.report import read_report

    report = read_report(folder, exit_code=code)

    from attnlab.serving.report import with_diagnoses

    with progress("reading the records") as on_step:
        return with_diagnoses(report, on_step)


def _pictures(report: "CaptureReport") -> "tuple[Picture, ...]":
    """Return which rows and heads of the first saved call are wrong."""
    from attnlab.reports.shared_page import call_pictures
    from attnlab.tensors.call import KernelCall

    calls = [found.call for found in report.found if found.call]
    return call_pictures(KernelCall.load(Path(report.folder) / calls[0])) if calls else ()


def _exit_code(report: "CaptureReport") -> int:
    """Return 1 if something is wrong, else the command's own code, else whether anything was checked."""
    if report.is_wrong:
        return 1
    if report.exit_code:
        return report.exit_code
    return 0 if report.has_checked else _UNCHECKED
