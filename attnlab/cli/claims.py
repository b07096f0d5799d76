"""The command ``attnlab claims``."""

import argparse

from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress, show


def _run(args: argparse.Namespace) -> int:
    from attnlab.study.claims import judge_claims

    with progress("testing the claims") as on_step:
        findings = judge_claims(on_step=on_step)
    if args.json:
        print_json([finding.to_dict() for finding in findings])
    else:
        show(findings)
    return 0


COMMAND = Command(
    name="claims",
    purpose="Test each claim of the notes on vLLM #28490 with an experiment.",
    examples=("attnlab claims", "attnlab claims --json"),
    exit_codes="0 always, also if a claim fails or cannot be decided here",
    run=_run,
)
