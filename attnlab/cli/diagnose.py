"""The command ``attnlab diagnose``."""

import argparse
import base64
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, NotDeterministic, Unsupported
from attnlab.case.fields import library_of
from attnlab.case.ops import check_weighs_values
from attnlab.case.output_file import check_input_path, check_output_file, write_bytes
from attnlab.cli import command
from attnlab.cli.command import print_json, progress, put, runs, show
from attnlab.cli.replay import smallest_script, traced_call
from attnlab.lab.products import check_memory

if TYPE_CHECKING:
    from attnlab.diagnosis.claims import KernelLocation
    from attnlab.diagnosis.diagnosis import Diagnosis
    from attnlab.kernels.backend import Backend
    from attnlab.reports.close_up import TracedRun
    from attnlab.tensors.call import KernelCall
    from attnlab.weights.xray import XRay


def _given(args: argparse.Namespace) -> list[str]:
    """Return which of the fields that a saved call may state were given as flags."""
    return [name for name in ("platform", "release") if getattr(args, f"field_{name}") is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Diagnosed:
    """A diagnosis, and what its page needs: the call, what ran it, and a traced run."""

    found: "Diagnosis"
    backend: "Backend | None"
    call: "Callable[[], KernelCall]"
    run_again: "Callable[[], TracedRun | None]"


def _of_call(
    case: Case, args: argparse.Namespace, op: str | None, on_step: Callable[..., None] | None
) -> _Diagnosed:
    """Diagnose the call at a path; the flags that were given win over its origin, and ``op`` over its op."""
    from attnlab.diagnosis.captured import diagnose_captured
    from attnlab.diagnosis.trials import FULL
    from attnlab.kernels.run_call import backend_of_origin, for_call
    from attnlab.kernels.runner import ORIGIN, one_backend
    from attnlab.recorder.dumps import read_call

    call = read_call(args.call, command.read_map(args), op=op)
    if args.kernel == ORIGIN:
        runner: Backend | None = backend_of_origin(call, args.device)
    else:
        runner = one_backend(args.source, args.field_backend, args.device)
    found = diagnose_captured(
        call,
        case,
        given=_given(args),
        runner=runner,
        limit=None if args.no_location else FULL,
        on_step=on_step,
    )

    return _Diagnosed(
        found=found,
        backend=None if runner is None else for_call(call, runner),
        call=lambda: call,
        run_again=lambda: traced_call(call, runner, case, _given(args), found.xray),
    )


def _of_case(case: Case, args: argparse.Namespace, on_step: Callable[..., None]) -> _Diagnosed:
    """Diagnose the Case of the flags or its output in a file."""
    from attnlab.diagnosis.captured import diagnose_file
    from attnlab.reports.close_up import trace_run

    lab = command.lab_of(args, on_step)
    found = diagnose_file(case, lab, args.output_file, locate=not args.no_location)
    is_run = args.output_file is None and found.status != "rejected"
    backend = lab.backend(case)
    return _Diagnosed(
        found=found,
        backend=backend if is_run else None,
        call=lambda: lab.run(case).recorded_call,
        run_again=lambda: trace_run(lab, case, found.xray) if is_run else None,
    )


@runs("diagnose")
def _run(args: argparse.Namespace) -> int:
    op = args.field_op or args.call_op
    command.check_share_flags(args)
    case = command.case_with_runner(args)
    if args.call is not None and args.output_file is not None:
        raise InvalidCase("output-file and call must not both be given", field="output-file")
    if args.map is not None and args.call is None:
        raise InvalidCase("map must be given with call, got no call")
    if args.call is not None:
        check_input_path(args.call)
    elif args.output_file is not None:
        check_input_path(args.output_file)
    else:
        check_memory(case)

    with progress("diagnosing") as on_step:
        is_call = args.call is not None
        one = _of_call(case, args, op, on_step) if is_call else _of_case(case, args, on_step)
        if command.is_shared(args):
            on_step("the smallest reproduction")
            script = _script(one, case, _given(args)) if args.html is not None else ("", "")
            command.share(args, one.found, run=one.run_again(), script=script)
    put(
        one.found, args.json, "" if is_call else args.assumed
    )  # a diagnosis of a call lists its own
    if one.found.status == "not decided":
        return 3
    return 1 if one.found.is_wrong else 0


def _script(one: _Diagnosed, case: Case, given: Sequence[str]) -> tuple[str, str]:
    """Return the smallest script of a wrong output, and why there is none, or ""."""
    if not one.found.is_wrong:
        return "", ""
    try:
        return smallest_script(one.call(), one.backend, case, tuple(given))
    except Unsupported as error:
        return "", str(error)


@runs("page")
def _page(args: argparse.Namespace) -> int:
    """Diagnose a call or a Case, and write the page."""
    args.html = args.html or Path(f"{args.call.stem}.html")
    if args.call.suffix == ".json":
        args.case, args.call = str(args.call), None
    code = _run(args)
    if not args.json:
        print(f"written: {args.html}")
    return code


def _checked_case(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; raise for a flag that cannot work, before anything is measured."""
    if not args.limit_s > 0:
        raise InvalidCase(f"limit-s must be positive, got {args.limit_s:g}")
    command.check_share_flags(args)
    if args.picture is not None:
        check_output_file(args.picture, "picture", (".png",))
    if args.call is not None:
        check_input_path(args.call)
    case = command.case_with_runner(args)
    if args.call is None:
        check_weighs_values(case.spec)
        check_memory(case)
    if args.picture is not None:
        from attnlab.reports.check_pages import check_packages as check_drawable

        check_drawable()
    return case


@runs("xray")
def _run_xray(args: argparse.Namespace) -> int:
    case = _checked_case(args)
    try:
        found, location = _xray(args, case)
    except NotDeterministic as error:
        return _not_deterministic(str(error), args.json)
    _write(args, found, location)
    if args.json:
        place = None if location is None else location.to_dict()
        print_json({**found.to_dict(), "location": place})
    else:
        show(_with_line(found, location))
    return 1 if found.is_wrong else 0


def _write(args: argparse.Namespace, found: "XRay", location: "KernelLocation | None") -> None:
    """Write the files of --picture, --html and --markdown."""
    if args.picture is not None:
        from attnlab.reports.check_pages import xray_picture

        data = xray_picture(found, is_dark=False, is_transparent=False)
        write_bytes(args.picture, base64.b64decode(data))
    if command.is_shared(args):
        claim = None if location is None else location.confirmed
        line = None if claim is None else (claim.file, claim.line)
        command.share(args, _with_line(found, location), line=line)


def _not_deterministic(why: str, is_json: bool) -> int:
    """Print that equal runs differ, which is the finding; return the exit code."""
    text = f"not deterministic: {why}; no weight can be read"
    if is_json:
        print_json({"status": "not deterministic", "sentences": [text]})
    else:
        print(f"XRay  {text}")
    return 1


def _with_line(found: "XRay", location: "KernelLocation | None") -> "XRay":
    """Return an X-ray with its source line: after the conclusion if reruns confirm one, else at the end."""
    if location is None:
        return found
    at = 1 if location.confirmed is not None else len(found.sentences)
    sentences = (*found.sentences[:at], *location.sentences(), *found.sentences[at:])
    return dataclasses.replace(found, sentences=sentences)


def _xray(args: argparse.Namespace, case: Case) -> "tuple[XRay, KernelLocation | None]":
    """Return the X-ray and, if the weights of a Case are wrong, the lines of the source that may be why."""
    from attnlab.diagnosis.captured import where_it_ran
    from attnlab.kernels.run_call import backend_of_origin
    from attnlab.kernels.runner import ORIGIN, one_backend
    from attnlab.recorder.dumps import read_call
    from attnlab.weights.conclude import NO_RUNNER, xray, xray_of_call

    with progress("measuring the weights") as on_step:
        lab = command.lab_of(args, on_step)
        if args.call is not None:
            call = read_call(args.call, command.read_map(args), op=args.call_op)
            is_origin = args.kernel == ORIGIN
            if args.field_backend is None and case.backend == "model" and not is_origin:
                raise InvalidCase(NO_RUNNER, field="backend")
            ran = where_it_ran(call, case, _given(args)).case
            runner = backend_of_origin(call, args.device) if is_origin else None
            if library_of(args.field_backend or "") not in (None, "vllm"):
                runner = one_backend(args.source, args.field_backend, args.device)
            return xray_of_call(call, ran, runner, lab=lab, limit_s=args.limit_s), None
        found = xray(case, lab=lab, limit_s=args.limit_s, confirm=not args.no_confirm)
        if not found.is_wrong or args.no_location or case.backend == "model":
            return found, None
        from attnlab.diagnosis.lines import locate_lines
        from attnlab.diagnosis.repair_check import with_confirmation

        on_step("trial edits of the source")
        return found, with_confirmation(lab, case, locate_lines(lab, case, found))
