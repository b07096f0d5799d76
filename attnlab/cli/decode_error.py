"""The command ``attnlab decode-error``."""

import argparse

from attnlab.case.flags import add_case_flags, case_of, read_text
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
    from attnlab.lab.decode_error import decode_error, test_id_in

    text = read_text(args.file)
    if args.test_id is None and args.case is None:
        args.test_id = test_id_in(text)
    decoded = decode_error(text, case_of(args))
    if args.json:
        print_json(decoded.to_dict())
    else:
        show(decoded)
    return 0


COMMAND = Command(
    name="decode-error",
    purpose="Print which sequence, token and kernel the message of a failed test is about.",
    arguments="[FILE]",
    examples=("pytest … | attnlab decode-error --test-id 'test_contexted_kv_attention[…]'",),
    exit_codes="0 always",
    add_flags=_add_flags,
    run=_run,
    notes="The message is that of torch.testing.assert_close, with its counts and its index. "
    "If the text names a pytest id of vLLM, that test is the initial case, unless "
    "--test-id or --case is given.",
)
