"""The command line ``attnlab``: parse the arguments, run the command, map errors to exit codes.

Exit codes: 0 as expected, 1 not, 2 bad input (one line that names the field), 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from attnlab import __version__
from attnlab.case.errors import AttnLabError
from attnlab.case.extras import named_extra
from attnlab.case.flags import Parser
from attnlab.cli import (
    bench_command,
    check,
    claims,
    decode_error,
    diagnose,
    explain,
    fetch,
    investigate,
    power,
    run,
)
from attnlab.cli.command import Command

COMMANDS: tuple[Command, ...] = (
    run.COMMAND,
    explain.COMMAND,
    decode_error.COMMAND,
    diagnose.COMMAND,
    power.COMMAND,
    check.COMMAND,
    claims.COMMAND,
    investigate.COMMAND,
    fetch.COMMAND,
    bench_command.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without a command, print the help."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    try:
        with named_extra(f"attnlab {args.name}"):
            code: int = args.command(args)
    except AttnLabError as error:
        print(f"attnlab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("attnlab: interrupted", file=sys.stderr)
        return 130
    return code


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="attnlab",
        description="Find out why a paged-attention kernel, or the test of one, is wrong.",
        epilog="Exit codes: 0 as expected, 1 not, 2 bad input. 'attnlab COMMAND --help' has examples.",
    )
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    commands = parser.add_subparsers(dest="name", title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
