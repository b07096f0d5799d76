"""The command line ``attnlab``: parse the arguments, run the command, map errors to exit codes.

Exit codes: 0 as expected, 1 not, 2 bad input or a file that cannot be used (one line), 70 an error in attnlab
itself (a traceback), 130 interrupted.
"""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

import shtab

from attnlab import __version__
from attnlab.case.errors import AttnLabError, named_extra
from attnlab.case.flags import Parser
from attnlab.cli import (
    bench_command,
    capture,
    catalogue,
    check,
    diagnose,
    env,
    horizon,
    investigate,
    matrix,
    merge,
    mla,
    power,
    releases,
    replay,
    run,
    xray,
)
from attnlab.cli.command import Command

COMMANDS: tuple[Command, ...] = (
    run.RUN_COMMAND,
    run.EXPLAIN_COMMAND,
    run.DECODE_ERROR_COMMAND,
    matrix.COMMAND,
    diagnose.COMMAND,
    xray.COMMAND,
    mla.MLA_COMMAND,
    mla.WRITES_COMMAND,
    replay.REPLAY_COMMAND,
    replay.SHRINK_COMMAND,
    power.COMMAND,
    check.COMMAND,
    horizon.COMMAND,
    capture.COMMAND,
    releases.COMMAND,
    merge.COMMAND,
    investigate.CLAIMS_COMMAND,
    investigate.INVESTIGATE_COMMAND,
    env.FETCH_COMMAND,
    catalogue.DEFECTS_COMMAND,
    catalogue.STAGES_COMMAND,
    catalogue.PLATFORMS_COMMAND,
    env.ENV_COMMAND,
    bench_command.COMMAND,
)


_COMPLETION = "print the completion of a shell, for example: attnlab --print-completion bash"
BAD_INPUT, BUG, INTERRUPTED = 2, 70, 130  # 70 is EX_SOFTWARE of sysexits.h


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without a command, print the help."""
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # an error at the interpreter's exit would change the exit code
    except AttnLabError as error:
        return _failed(str(error), BAD_INPUT)
    except OSError as error:
        return _failed(_text_of(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return BUG


def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the command; raise what it raises."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    if sys.stdout is None:
        raise OSError("standard output is closed")
    with named_extra(f"attnlab {args.name}"):
        code: int = args.command(args)
    return code


def _failed(text: str, code: int) -> int:
    """Print one line on standard error, drop output that cannot be written, and return ``code``."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        print(f"attnlab: {text}", file=sys.stderr)
    return code


def _text_of(error: OSError) -> str:
    """Return an OSError in one line."""
    if isinstance(error, BrokenPipeError):
        return "standard output was closed before the end of the output"
    if error.filename is None and error.errno == errno.ENOSPC:
        return f"the output cannot be written: {os.strerror(error.errno)}"
    where = "" if error.filename is None else f"{error.filename}: "
    return where + " ".join((error.strerror or str(error)).split())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="attnlab",
        description="Find out why a paged-attention kernel, or the test of one, is wrong.",
        epilog="Exit codes: 0 as expected, 1 not, 2 bad input, 70 a bug of attnlab. "
        "'attnlab COMMAND --help' has examples.",
    )
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help=_COMPLETION)
    commands = parser.add_subparsers(dest="name", title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
