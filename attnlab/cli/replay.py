"""The commands of recorded calls: ``attnlab capture``, ``attnlab replay`` and ``attnlab shrink``."""

import argparse
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.declaration import field_type
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import Number, package_of_backend, refuse
from attnlab.case.ops import OPS
from attnlab.case.output_file import check_input_path, check_output_file, write_text
from attnlab.cli import command
from attnlab.cli.command import notice, print_json, progress, put, runs, show
from attnlab.cli.releases import ops_of_releases
from attnlab.library.op import package_of
from attnlab.serving.settings import (
    CaptureSettings,
    parse_bytes,
    parse_count,
    parse_range,
    parse_share,
)

if TYPE_CHECKING:
    from attnlab.kernels.backend import Backend
    from attnlab.kernels.runner import Runner
    from attnlab.replay.shrinking import Shrunk
    from attnlab.reports.close_up import TracedRun
    from attnlab.reports.shared_page import Picture
    from attnlab.serving.report import CaptureReport
    from attnlab.tensors.call import KernelCall
    from attnlab.weights.xray import XRay


_SCRIPT_S = 10.0  # to shrink a call for the script of a page
STOP_BISECT = 129  # from 128 on, git bisect stops
_DOCUMENT = """\
git bisect run attnlab replay CALL --source . names the commit of a vLLM clone that broke a call. With one
target, the exit code is 125, which skips the commit, if the commit cannot run the call, or states that it
does not accept it. While git bisects the current folder, bad input and an error in attnlab exit with 129,
which stops git, because it would take 2 for a bad commit."""


def read_given(args: argparse.Namespace) -> tuple["KernelCall", Case, tuple[str, ...]]:
    """Return the call, and a Case with the fields that were given, and their names."""
    given = tuple(name for name in ("platform", "release") if getattr(args, name) is not None)
    for name in given:
        field_type(name).check(name, getattr(args, name))
    case = Case(**{name: getattr(args, name) for name in given})
    if args.op is not None and args.op not in OPS:
        refuse("op", f"one of {', '.join(OPS)}", args.op)
    check_input_path(args.call)

    from attnlab.recorder.dumps import read_call

    return read_call(args.call, command.read_map(args), op=args.op), case, given


@runs("replay")
def _replay(args: argparse.Namespace) -> int:
    """Replay; while git bisects, an error stops git."""
    try:
        return _probe(args) if args.probe else _replay_replay(args)
    except Exception as error:
        from attnlab.kernels.runner import is_bisecting

        if not is_bisecting(Path.cwd()):
            raise
        if not isinstance(error, AttnLabError):
            traceback.print_exc()
        notice(str(error))
        return STOP_BISECT


def _targets(args: argparse.Namespace) -> "list[Runner]":
    """Return what runs the call; this imports no torch."""
    from attnlab.kernels.runner import runners

    check_input_path(args.call)
    if args.releases is not None:
        named = (package_of_backend(name) for name in args.backend)
        package = next((one for one in named if one is not None), package_of("vllm"))
        args.source = [*args.source, *ops_of_releases(args.releases, package)]
    return runners(args.source, args.backend, args.device)


def _probe(args: argparse.Namespace) -> int:
    command.check_share_flags(args)
    targets = _targets(args)
    if len(targets) > 1:
        raise InvalidCase("probe must be given with one source or backend")
    call, case, given = read_given(args)

    from attnlab.replay.probe import probe

    with progress("probing") as on_step:
        found = probe(
            call,
            targets[0].find(),
            case,
            given,
            on_variation=lambda name, done: on_step(f"probing, run {done + 1}: {name}"),
        )
    command.share(args, found)
    put(found, args.json)
    return 1 if found.is_wrong else 0


def _replay_replay(args: argparse.Namespace) -> int:
    command.check_share_flags(args)
    targets = _targets(args)
    call, case, given = read_given(args)

    from attnlab.replay.replay_call import replay_all

    with progress("replaying") as on_step:
        found = replay_all(
            call,
            targets,
            case,
            given,
            name=str(args.call),
            on_target=lambda name, done, total: on_step(f"replaying on {name}", done, total),
        )
    first = found.first_bad
    bad = None if first is None else first.target
    run = None
    if args.html is not None and first is not None:
        ran = next(one for one in targets if one.name == bad)
        run = traced_call(call, ran.find(), case, given)
    cause = "" if args.releases is None else found.first_bad_sentence()
    command.share(args, found, run=run, cause=cause)
    put(found, args.json, exit_code=found.exit_code, first_bad=bad)
    if args.releases is not None and not args.json:
        print(found.first_bad_sentence())
    return found.exit_code


@runs("shrink")
def _shrink(args: argparse.Namespace) -> int:
    seconds = Number().check("seconds", Number().parse("seconds", args.seconds or "120"))
    if not seconds > 0:
        raise InvalidCase(f"seconds must be positive, got {seconds:g}")
    out = args.out or Path(f"{args.call.stem}-small.safetensors")
    if out.suffix == ".py":
        refuse("out", "a file that does not end with .py, which is the script's name", str(out))
    check_output_file(out, "out")
    command.check_share_flags(args)
    call, case, given = read_given(args)

    from attnlab.kernels.runner import one_backend
    from attnlab.replay.shrinking import Judge, shrink

    backend = one_backend(args.source, args.backend, args.device)
    judge = Judge(backend=backend, case=case, given=given)
    with progress("shrinking") as on_step:
        found = shrink(
            call,
            judge,
            seconds=seconds,
            on_try=lambda step, tries: on_step(f"shrinking, run {tries + 1}: {step}"),
        )
    files, why = _write(found, out, backend, judge.case) if found.is_failing else ([], "")
    texts = [Path(file).read_text(encoding="utf-8") for file in files if file.endswith(".py")]
    run = None if args.html is None else traced_call(found.call, backend, judge.case, given)
    command.share(args, found, run=run, script=("".join(texts), why))
    if args.json:
        print_json({**found.to_dict(), "files": files, "no_script": why})
    else:
        show(found)
        for line in (
            *(f"written: {file}" for file in files),
            *([f"no script: {why}"] if why else []),
        ):
            print(line)
    return 0 if found.status == "match" else 1


def _write(
    found: "Shrunk", out: Path, backend: "Backend | None", case: Case
) -> tuple[list[str], str]:
    """Write the call and its script; return the files, and why there is no script, or ""."""
    found.call.save(out)
    text, why = script_of_shrunk(found, backend, case)
    if not text:
        return [str(out)], why
    script = out.with_suffix(".py")
    write_text(script, text)
    return [str(out), str(script)], ""


def script_of_shrunk(
    found: "Shrunk", backend: "Backend | None", case: Case, given: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Return the script of the smallest call, and why there is none, or ""."""
    from attnlab.contracts.contract import Target
    from attnlab.replay.replay_call import where_to_run
    from attnlab.reports.upstream import script_of

    ran = case if backend is None else where_to_run(found.call, backend, case, given)
    return script_of(found.call, Target.of(ran), backend, found.sentences()[0])


def traced_call(
    call: "KernelCall",
    runner: "Backend | None",
    case: Case,
    given: Sequence[str],
    xray: "XRay | None" = None,
) -> "TracedRun | None":
    """Run a call for its page, see ``trace_run``; None if nothing runs it, or it cannot run."""
    from attnlab.replay.replay_call import lab_of_call
    from attnlab.reports.close_up import trace_run

    lab = lab_of_call(call, case, tuple(given), runner)
    try:
        return None if lab is None else trace_run(lab, lab.case, xray)
    except AttnLabError:
        return None


def smallest_script(
    call: "KernelCall", backend: "Backend | None", case: Case, given: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Shrink a wrong call for some seconds; return its script, and why there is none, or ""."""
    from attnlab.contracts.contract import Target
    from attnlab.replay.shrinking import Judge, shrink
    from attnlab.reports.upstream import has_scripts, script_of

    if backend is None or not has_scripts(backend):
        return script_of(call, Target.of(case), backend, "")
    try:
        found = shrink(call, Judge(backend=backend, case=case, given=given), seconds=_SCRIPT_S)
    except AttnLabError as error:
        return "", str(error)
    if not found.is_failing:
        return "", found.sentences()[0]
    return script_of_shrunk(found, backend, case, given)


_UNCHECKED = 3


@runs("capture")
def _capture(args: argparse.Namespace) -> int:
    ranges = {
        name: None if getattr(args, name) is None else parse_range(name, getattr(args, name))
        for name in ("layer", "step", "rank")
    }
    settings = CaptureSettings(
        out=str(args.out.resolve()),
        **ranges,
        max_bytes=parse_bytes("max-bytes", args.max_bytes),
        sample=parse_share("sample", args.sample),
        rows=parse_count("rows", args.rows),
        heads=parse_count("heads", args.heads),
        library=args.library,
    )
    command.check_share_flags(args)
    words = args.run[1:] if args.run[:1] == ["--"] else args.run
    if args.run and not words:
        raise InvalidCase("command must be given after --, got none")
    code = None
    if words:
        from attnlab.serving.plugin import run_command

        code = run_command(words, settings, to_stderr=args.json)
    report = _report(args.out, code)
    command.share(
        args, report, draw=lambda pages: _pictures(report, pages), cause=report.conclusion()
    )
    put(report, args.json)
    if report.is_wrong:
        return 1
    if report.exit_code:
        return report.exit_code
    return 0 if report.has_checked else _UNCHECKED


def _report(folder: Path, code: int | None) -> "CaptureReport":
    if not folder.is_dir():
        raise InvalidCase(f"out must be a folder with records of a capture, got {folder}")
    from attnlab.serving.report import read_report, with_diagnoses

    report = read_report(folder, exit_code=code)

    with progress("reading the records") as on_step:
        return with_diagnoses(report, on_step)


def _pictures(report: "CaptureReport", pages: Any) -> "tuple[Picture, ...]":
    """Return which rows and heads of the first saved call are wrong; ``pages``: the module of pages."""
    from attnlab.tensors.call import KernelCall

    call = next((found.call for found in report.found if found.call), "")
    return pages.call_pictures(KernelCall.load(Path(report.folder) / call)) if call else ()
