"""The command ``attnlab linear``."""

import argparse
from typing import Any

from attnlab.case.fields import refuse
from attnlab.case.flags import add_field_flags, flag, given_fields
from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.command import Command, add_share_flags, check_share_flags, progress, put, share
from attnlab.library.op import package_of
from attnlab.linear.state_case import STATE_FIELDS, STATE_OPS, StateCase, plain_fields


def _add_flags(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--source PATH", "the library of the op: a wheel, an sdist or a checkout")
    flag(parser, "--script FILE", "write a script that repeats the call without attnlab")
    add_share_flags(parser)
    add_field_flags(parser, STATE_FIELDS)


def _run(args: argparse.Namespace) -> int:
    given: dict[str, Any] = given_fields(args, STATE_FIELDS)
    op = given.get("op", STATE_FIELDS["op"].default)
    if op not in STATE_OPS:
        refuse("op", f"one of {', '.join(STATE_OPS)}", op)
    case = StateCase(**{**plain_fields(STATE_OPS[op]), **given})
    check_share_flags(args)
    if args.script is not None:
        check_output_file(args.script, "script")

    from attnlab.kernels.vllm.source import find_source, source_path
    from attnlab.linear.state_check import xray_state

    package = package_of(case.record.library)
    source = None if args.source is None else source_path(args.source, package)
    with progress(f"{case.op}: the case, and others with it") as _:
        found = xray_state(case, source)
    if args.script is not None or args.html is not None:
        from attnlab.reports.state_script import state_script

        script = state_script(case, find_source(source, package), found.sentences[0])
        if args.script is not None:
            write_text(args.script, script)
        share(args, found, script=(script, ""))
    else:
        share(args, found)
    put(found, args.json)
    return 0 if found.status == "right" else 1


COMMAND = Command(
    name="linear",
    purpose="Run an op of linear attention, measure the weights of tokens and states, and say what is wrong.",
    examples=(
        "attnlab linear --op fla_chunk_gated_delta_rule --source fla_core-0.6.0.whl --query-lens 70,3",
        "attnlab linear --op vllm_chunk_kda --source vllm-0.33.0.whl --html page.html --script repro.py",
        "attnlab linear --op vllm_fused_recurrent_gated_delta_rule --source vllm-0.33.0.whl --query-lens 1,1",
    ),
    exit_codes="0 outputs and states are right; 1 they are not",
    add_flags=_add_flags,
    run=_run,
    notes="attnlab check --library fla (or vllm_linear) --source PATH runs the hostile cases of all ops.",
)
