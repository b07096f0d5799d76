"""The command ``attnlab xray``."""

import argparse
import base64
import dataclasses
from typing import TYPE_CHECKING

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, NotDeterministic
from attnlab.case.fields import library_of
from attnlab.case.flags import flag
from attnlab.case.ops import check_weighs_values
from attnlab.case.output_file import check_input_path, check_output_file, write_bytes
from attnlab.cli import command
from attnlab.cli.command import Command, print_json, progress, show
from attnlab.lab.products import check_memory

if TYPE_CHECKING:
    from attnlab.diagnosis.claims import KernelLocation
    from attnlab.weights.xray import XRay


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure (default: the Case)")
    flag(
        group,
        "--call PATH",
        "a saved KernelCall, or a call in another format that attnlab diagnose reads; it holds no "
        "kernel, so give the one to measure: --kernel, --backend or --source; of the Case only the platform, "
        "the release and the backend are used",
    )
    command.add_kernel_flag(group)
    command.add_map_flag(group, has_call=True)
    flag(
        group,
        "--limit-s S",
        "seconds for the search for a description (default: 10)",
        type=float,
        default=10.0,
    )
    flag(group, "--no-confirm", "do not measure another case to confirm a description")
    flag(group, "--no-location", "do not look for the source lines of wrong weights")
    flag(group, "--picture FILE", "write the picture of the weights, a PNG")
    command.add_share_flags(parser)
    command.add_flags(parser)


def _checked_case(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; raise for a flag that cannot work, before anything is measured."""
    if not args.limit_s > 0:
        raise InvalidCase(f"limit-s must be positive, got {args.limit_s:g}", field="limit-s")
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


def _run(args: argparse.Namespace) -> int:
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
            given = [
                name
                for name in ("platform", "release")
                if getattr(args, f"field_{name}") is not None
            ]
            call = read_call(args.call, command.read_map(args), op=args.call_op)
            is_origin = args.kernel == ORIGIN
            if args.field_backend is None and case.backend == "model" and not is_origin:
                raise InvalidCase(NO_RUNNER, field="backend")
            ran = where_it_ran(call, case, given).case
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


COMMAND = Command(
    name="xray",
    purpose="Measure a kernel's effective attention weights, and describe how they differ.",
    examples=(
        "attnlab xray --query-lens 5,1 --ctx-lens 40,33 --num-heads 4",
        "attnlab xray mine.py:my_attention --query-lens 5,1 --ctx-lens 40,33 --html xray.html",
        "attnlab xray --call call.safetensors --source vllm-0.33.0.whl",
    ),
    exit_codes="0 the weights are right, up to precision; 1 they are not, or it cannot be decided",
    add_flags=_add_flags,
    run=_run,
)
