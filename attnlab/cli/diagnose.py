"""The command ``attnlab diagnose``."""

import argparse
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.cli import case_source
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress, show


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the output to diagnose (default: run the Case)")
    group.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE",
        help="a safetensors file with the output of the Case, as the tensor 'output'",
    )
    group.add_argument(
        "--call",
        type=Path,
        metavar="FILE",
        help="a saved KernelCall with its output; of the Case only the platform, the release and the "
        "switches of the op are used",
    )
    case_source.add_flags(parser)


def _given(args: argparse.Namespace) -> list[str]:
    """Return which of the fields that a saved call may state were given as flags."""
    return [name for name in ("platform", "release") if getattr(args, f"field_{name}") is not None]


def _run(args: argparse.Namespace) -> int:
    from attnlab.diagnosis.files import diagnose_files

    case = case_source.case_with_source(args)
    if args.call is not None and args.output_file is not None:
        raise InvalidCase("output-file and call must not both be given", field="output-file")
    with progress("diagnosing") as on_step:
        lab = case_source.lab_of(args, on_step)
        diagnosis = diagnose_files(case, lab, args.output_file, args.call, _given(args))
    if args.json:
        print_json(diagnosis.to_dict())
    else:
        show(diagnosis)
    return 1 if diagnosis.is_wrong else 0


COMMAND = Command(
    name="diagnose",
    purpose="Find the defect that explains an output, or report that none of the known ones does.",
    examples=(
        "attnlab diagnose --query-lens 5,1 --ctx-lens 40,33 --stage int32_before_cumsum",
        "attnlab diagnose --call call.safetensors --platform gfx942",
    ),
    exit_codes="0 nothing is wrong; 1 something is",
    add_flags=_add_flags,
    run=_run,
)
