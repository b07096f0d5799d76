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
from attnlab.cli import (  # noqa: F401 which register their commands
    catalogue,
    check,
    demo,
    diagnose,
    horizon,
    investigate,
    mla,
    releases,
    replay,
    run,
    sharded,
)
from attnlab.cli.command import COMMANDS as BY_NAME
from attnlab.cli.command import TABLE, Command, take_foreign_op

# What the user holds, and the commands for it; a bare "attnlab" prints their names.
GROUPS = {title: tuple(map(BY_NAME.__getitem__, names)) for title, names in TABLE["groups"].items()}
COMMANDS: tuple[Command, ...] = tuple(command for group in GROUPS.values() for command in group)
# What is no command: its text, by group.
_OTHER = {"a failing test": {"pytest --attnlab": "run the test; its section says why it fails"}}


class _Main(Parser):
    """The parser of all commands, whose help is grouped by what the user holds."""

    def format_help(self) -> str:
        """Return every command with its purpose."""
        parts = [f"usage: attnlab COMMAND [OPTIONS]\n\n{self.description}"]
        for title, group in GROUPS.items():
            shown = [*_OTHER.get(title, {}).items()]
            shown += [(one.name, _purpose(one)) for one in group if one in COMMANDS]
            parts.append("\n".join([f"{title}:", *(f"  {name:<17}{text}" for name, text in shown)]))
        return "\n\n".join(parts) + f"\n\n{self.epilog}\n"


def _purpose(command: Command) -> str:
    return command.purpose[0].lower() + command.purpose[1:].rstrip(".")


def overview() -> str:
    """Return what a bare ``attnlab`` prints: the names of the commands by what the user holds."""
    rows = [
        f"  {title:<23}{'  '.join([*_OTHER.get(title, ()), *(one.name for one in group)])}"
        for title, group in GROUPS.items()
    ]
    return "\n".join([_HEAD, *rows, _MORE])


_HEAD = "Find out why an attention kernel, or the test of one, is wrong. You have:"
_MORE = "attnlab --help says what each command does; attnlab COMMAND --help has examples and flags."
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
        print(overview())
        return 0
    if sys.stdout is None:
        raise OSError("standard output is closed")
    take_foreign_op(args)
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
    parser = _Main(
        prog="attnlab",
        description="Find out why a paged-attention kernel, or the test of one, is wrong.",
        epilog="Exit codes: 0 as expected, 1 not, 2 bad input, 70 a bug of attnlab.\n"
        "'attnlab COMMAND --help' has examples. Also: --version, --print-completion SHELL.",
    )
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help=_COMPLETION)
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_to(commands)
    return parser
