"""The command ``attnlab explain``."""

import argparse

from attnlab.case.flags import add_case_flags, case_of
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, show


def _run(args: argparse.Namespace) -> int:
    from attnlab.contracts.dispatch import decide

    decision = decide(case_of(args))
    if args.json:
        print_json(decision.to_dict())
    else:
        show(decision)
    return 0


COMMAND = Command(
    name="explain",
    purpose="Print which kernels run for a Case, and each condition that decides it.",
    examples=("attnlab explain --platform gfx1100 --num-queries-per-kv 4",),
    exit_codes="0 always",
    add_flags=add_case_flags,
    run=_run,
)
