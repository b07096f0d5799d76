"""The command ``attnlab power``."""

import argparse

from attnlab.case.flags import add_case_flags
from attnlab.cli.case_source import case_of_flags
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress, show


def _run(args: argparse.Namespace) -> int:
    from attnlab.mutation.power import power

    case = case_of_flags(args)
    with progress("planting defects") as on_step:
        report = power(case, on_step=on_step)
    if args.json:
        print_json(report.to_dict())
    else:
        show(report)
    return 1 if report.survivors or report.partly_killed else 0


COMMAND = Command(
    name="power",
    purpose="Report which defects a test with the Case's data and tolerance detects.",
    examples=("attnlab power --test-id 'test_contexted_kv_attention[…]'",),
    exit_codes="0 it detects every defect that any data can show, in each kernel; 1 some survive",
    add_flags=add_case_flags,
    run=_run,
    notes="For each defect that survives, the report has the cheapest change of the test that detects it.",
)
