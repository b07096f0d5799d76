"""The command ``attnlab decode-error``."""

import argparse
import dataclasses

from attnlab.case.case import Case
from attnlab.case.flags import add_case_flags, case_of, read_text
from attnlab.case.platforms import machine_platform
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, show


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help="a file with the message of the failed assertion; - is standard input (default)",
    )
    add_case_flags(parser)


def _run(args: argparse.Namespace) -> int:
    from attnlab.lab.error_text import ErrorText

    found = ErrorText.read(read_text(args.file))
    if args.test_id is None and args.case is None:
        args.test_id = found.test_id
    else:  # the Case is given: an id in the text does not matter
        found = dataclasses.replace(found, test_id=args.test_id, refusal="")
    case, platform_by = _with_platform(args, case_of(args))

    from attnlab.lab.decode_error import decode

    decoded = decode(found, case, platform_by=platform_by)
    if args.json:
        print_json(decoded.to_dict())
    else:
        show(decoded)
    return 0


def _with_platform(args: argparse.Namespace, case: Case) -> tuple[Case, str]:
    """Return the Case with the platform that was given, else of the machine's GPU, else the default; and
    which of them it is."""
    if args.field_platform is not None or args.case is not None:
        return case, "case"
    platform = machine_platform()
    if platform is None:
        return case, "assumed"
    return case.replace(platform=platform), "machine"


COMMAND = Command(
    name="decode-error",
    purpose="Print which sequence, token and kernel the message of a failed test is about.",
    arguments="[FILE]",
    examples=("pytest … | attnlab decode-error --test-id 'test_contexted_kv_attention[…]'",),
    exit_codes="0 the text is decoded",
    add_flags=_add_flags,
    run=_run,
    notes="The text may be the whole output of pytest. It is read for the lines of "
    "torch.testing.assert_close in any order, a bare index, a dtype error, a failed torch.allclose, and a "
    "pytest id of vLLM. That test is the initial case, unless --test-id or --case is given. "
    "The kernel depends on the platform: it is that of --platform or --case, else of this machine's "
    "GPU; without a GPU, one is assumed, which the first line says.",
)
