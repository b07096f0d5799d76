"""The command ``attnlab diagnose``."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.output_file import check_input_path
from attnlab.cli import command
from attnlab.cli.command import Command, progress, put
from attnlab.cli.replay import smallest_script, traced_call
from attnlab.lab.products import check_memory

if TYPE_CHECKING:
    from attnlab.diagnosis.diagnosis import Diagnosis
    from attnlab.kernels.backend import Backend
    from attnlab.reports.close_up import TracedRun
    from attnlab.tensors.call import KernelCall


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the output to diagnose (default: run the Case)")
    group.add_argument(
        "--call",
        type=Path,
        metavar="PATH",
        help="a call with its output: a saved KernelCall, a folder of FlashInfer's log, files of SGLang's "
        "dumper, or a dict of tensors (.pt, .npz, safetensors); of the Case only the op, the platform and "
        "the release are used, if they are given; it holds no kernel, so give the one that ran (--source, "
        "--kernel or --backend) for reruns, varied calls, an X-ray and source lines",
    )
    command.add_kernel_flag(group)
    _add_other_flags(parser, group)


def _add_other_flags(parser: argparse.ArgumentParser, group: Any) -> None:
    """Add the flags that diagnose and page share; ``group``: those of what is diagnosed."""
    group.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE",
        help="a safetensors file with the output of the Case, as the tensor 'output'",
    )
    command.add_map_flag(group, has_call=True)
    group.add_argument(
        "--no-location",
        action="store_true",
        help="do not look for the source lines of a fault, which takes up to half a minute",
    )
    command.add_share_flags(parser)
    command.add_flags(parser)


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


def _run(args: argparse.Namespace) -> int:
    op = args.field_op or args.call_op
    command.check_share_flags(args)
    case = command.case_with_runner(args)
    if args.call is not None and args.output_file is not None:
        raise InvalidCase("output-file and call must not both be given", field="output-file")
    if args.map is not None and args.call is None:
        raise InvalidCase("map must be given with call, got no call", field="map")
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


def _add_page_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to diagnose")
    group.add_argument(
        "call",
        type=Path,
        metavar="CALL",
        help="a call, as diagnose --call reads it, or the .json file of a Case",
    )
    command.add_kernel_flag(group, is_positional=False)
    _add_other_flags(parser, group)


def _page(args: argparse.Namespace) -> int:
    """Diagnose a call or a Case, and write the page."""
    args.html = args.html or Path(f"{args.call.stem}.html")
    if args.call.suffix == ".json":
        args.case, args.call = str(args.call), None
    code = _run(args)
    if not args.json:
        print(f"written: {args.html}")
    return code


PAGE_COMMAND = Command(
    name="page",
    purpose="Diagnose a call or a Case, and write the page to send.",
    arguments="CALL",
    examples=(
        "attnlab page call.safetensors --source vllm-0.33.0.whl --html page.html",
        "attnlab page call.safetensors --kernel mine.py:my_attention --note since=0.13.0 --note owner=me",
    ),
    exit_codes="0 nothing is wrong; 1 something is; 3 not decided",
    add_flags=_add_page_flags,
    run=_page,
    used=("--note",),
    notes="The page is CALL.html in the current folder, or --html FILE. Notes stay if it is written again.",
)
COMMAND = Command(
    name="diagnose",
    purpose="Find the defect that explains an output, or report that none of the known ones does.",
    examples=(
        "attnlab diagnose --query-lens 5,1 --ctx-lens 40,33 --stage int32_before_cumsum",
        "attnlab diagnose --call call.safetensors --source vllm-0.33.0.whl",
        "attnlab diagnose --call call.safetensors --kernel mine.py:my_attention",
        "attnlab diagnose --call dump.pt --map query=q,key_cache=k,value_cache=v --op unified_attention",
    ),
    exit_codes="0 nothing is wrong; 1 something is; 3 not decided",
    add_flags=_add_flags,
    run=_run,
)
