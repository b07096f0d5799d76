"""Flags: from a command line to a Case, and to parameters of a notebook."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Flag, Maybe


class Parser(argparse.ArgumentParser):
    """Tells a wrong command line in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every knob of a Case, grouped, and the two ways to start from a whole one."""
    base = parser.add_argument_group("the case to start from; the flags below change it")
    base.add_argument(
        "--test-id", metavar="ID", help="a pytest id of vLLM's test_prefix_prefill.py"
    )
    base.add_argument(
        "--case", type=Path, metavar="FILE", help="a Case as JSON; - is standard input"
    )
    groups: dict[str, Any] = {}
    for name, field in FIELDS.items():
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        kind = field_type(name)
        inner = kind.kind if isinstance(kind, Maybe) else kind
        optional = {"nargs": "?", "const": "true"} if isinstance(inner, Flag) else {}
        groups[title].add_argument(
            "--" + name.replace("_", "-"),
            dest="knob_" + name,
            metavar="VALUE",
            help=f"{field.metadata['help']}; {kind.allowed} (default: {field.default})".replace(
                "%", "%%"
            ),
            **optional,
        )


def add_source_flag(parser: argparse.ArgumentParser) -> None:
    """Add --source and --device, which say where vLLM's own kernels come from, and where they run."""
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="vLLM for --backend vllm and rocm: a wheel, an sdist or a checkout (default: the installed "
        "one); rocm needs an sdist or a checkout",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="where --backend vllm runs: on the GPU, or under Triton's interpreter (default: the GPU where "
        "torch can use one)",
    )


def case_of(args: argparse.Namespace) -> Case:
    """Return the Case that the flags give; raise InvalidCase."""
    if args.test_id and args.case:
        raise InvalidCase("test-id and case must not both be given")
    case = Case()
    if args.test_id:
        case = Case.from_test_id(args.test_id)
    elif args.case:
        case = Case.from_json(read_text(str(args.case)))
    flags = {name: getattr(args, "knob_" + name) for name in FIELDS}
    changes = {
        name: field_type(name).parse(name, text) for name, text in flags.items() if text is not None
    }
    return case.replace(**changes)


def read_text(file: str) -> str:
    """Return a file's text, or that of standard input for "-"; raise InvalidCase."""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCase(f"{file} must be a readable text file: {error}") from error


def notebook_parameters(words: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE words as notebook parameters; a Case's field is checked as one.

    Of the others whole numbers are numbers, and all else is text.
    """
    parameters: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidCase(f"parameter must be NAME=VALUE, got {word!r}")
        if name in FIELDS:
            kind = field_type(name)
            parameters[name] = kind.check(name, kind.parse(name, text))
        else:
            parameters[name] = int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
    return parameters
