"""The command ``attnlab run``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Number
from attnlab.case.flags import notebook_parameters
from attnlab.case.output_file import check_output_file
from attnlab.case.suggestion import suggestion
from attnlab.cli import case_source
from attnlab.cli.command import Command
from attnlab.cli.limited_run import run_limited
from attnlab.cli.output import print_json, progress, show
from attnlab.lab.memory_check import check_memory

_MOST_PLACES = 200  # in the JSON document


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--stages",
        action="store_true",
        help="run every stage of the test, and print a table with a column for each platform",
    )
    group.add_argument(
        "--platforms",
        metavar="A,B",
        help="the platforms of --stages, for example gfx942,sm_90 (default: these; for backend "
        "vllm-cpu the Case's platform)",
    )
    group.add_argument(
        "--save-call",
        type=Path,
        metavar="FILE",
        help="write the call and its output to a safetensors file, for diagnose --call",
    )
    group.add_argument(
        "--seconds",
        metavar="S",
        help="run in a process of its own, and reject a kernel that takes longer or ends the process "
        "(default: no limit)",
    )
    group.add_argument(
        "--against",
        action="append",
        metavar="FIELD=VALUE",
        help="run the Case a second time with this change, and compare the bits of both outputs, for "
        "example empty_slots=garbage; repeatable",
    )
    case_source.add_flags(parser)


def _run(args: argparse.Namespace) -> int:
    case = case_source.case_with_source(args)
    if args.stages and args.save_call is not None:
        raise InvalidCase("save-call must not be given with stages", field="save-call")
    if args.platforms is not None and not args.stages:
        raise InvalidCase("platforms must be given with --stages", field="platforms")
    if args.seconds is not None and args.stages:
        raise InvalidCase("seconds must not be given with stages", field="seconds")
    if args.against and args.stages:
        raise InvalidCase("against must not be given with stages", field="against")
    args.against = _changes(args.against or ())
    check_memory(case)
    if args.stages:
        return _run_stages(args, case)
    if args.save_call is not None:
        check_output_file(args.save_call, "save-call")  # before minutes are spent
    if args.seconds is not None:
        seconds = Number().check("seconds", Number().parse("seconds", args.seconds))
        return run_limited(_run_case, args, case, seconds)
    with progress("running") as on_step:
        return _run_case(args, case, on_step)


def _changes(words: Sequence[str]) -> dict[str, Any]:
    """Return FIELD=VALUE words as changes of a Case; raise InvalidCase."""
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals:
            raise InvalidCase(f"against must be FIELD=VALUE, got {word!r}", field="against")
        if name not in FIELDS:
            hint = suggestion(name, FIELDS)
            raise InvalidCase(
                f"against must name a field of a Case, got {name!r}{hint}", field="against"
            )
    return notebook_parameters(words)


def _run_case(args: argparse.Namespace, case: Case, on_step: Callable[..., None]) -> int:
    """Run the Case and print its Result; return the exit code."""
    from attnlab.diagnosis.other_run import run_again

    lab = case_source.lab_of(args, on_step)
    result = lab.run(case)
    if args.save_call is not None:
        result.call.save(args.save_call)
    other = None
    if args.against and result.error is None:
        other = run_again(lab, case, result.output, args.against)
    if args.json:
        document = result.to_dict(_MOST_PLACES)
        print_json(document if other is None else {**document, "against": other.to_dict()})
    else:
        show(result)
        if other is not None:
            show(other)
    return 0 if result.status == "match" and (other is None or other.is_equal) else 1


def _run_stages(args: argparse.Namespace, case: Case) -> int:
    platforms = [] if args.platforms is None else args.platforms.split(",")
    for platform in platforms:
        field_type("platform").check("platforms", platform)
    from attnlab.lab.stage_table import platforms_shown, stage_table, to_json

    platforms = platforms or platforms_shown(case)
    with progress("running the stages") as on_step:
        cells = stage_table(
            case_source.lab_of(args, on_step),
            case,
            platforms,
            on_cell=lambda done, total: on_step(done=done, total=total),
        )
    if args.json:
        print_json(to_json(case, cells))
    else:
        show(cells)
    return 0 if all(cell.status == "match" for cell in cells) else 1


COMMAND = Command(
    name="run",
    purpose="Run one Case and compare its output with the reference.",
    examples=(
        "attnlab run --query-lens 5,1 --ctx-lens 40,33 --stage int32_before_cumsum",
        "attnlab run --test-id 'test_contexted_kv_attention[…]' --stages",
        "attnlab run --op unified_attention --empty-slots nan --against empty_slots=garbage",
        "attnlab run --backend vllm --source vllm-0.33.0.whl --kv-head-range 0:1",
    ),
    exit_codes="0 the output matches; 1 it does not, or the kernel rejects the call, or --against gives "
    "another output",
    add_flags=_add_flags,
    run=_run,
)
