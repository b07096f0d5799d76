"""The command ``attnlab writes``."""

import argparse
from pathlib import Path

from attnlab.case.fields import refuse
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, show

_BACKENDS = ("vllm", "model")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", default="vllm", help="vllm (default): vLLM's own ops; or model"
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a wheel, an sdist or a checkout of vLLM; CUDA ops need an sdist or a checkout",
    )


def _run(args: argparse.Namespace) -> int:
    if args.backend not in _BACKENDS:
        refuse("backend", f"one of {', '.join(_BACKENDS)}", args.backend)
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)

    from attnlab.lab.writes.public import check_writes

    report = check_writes(backend=args.backend, source=args.source)
    if args.json:
        print_json(report.to_dict())
    else:
        show(report)
    return 1 if report.findings else 3 if report.unavailable else 0


COMMAND = Command(
    name="writes",
    purpose="Check the bytes that cache writes store in further formats, and that they change no others.",
    examples=(
        "attnlab writes --backend model",
        "attnlab writes --source vllm-0.33.0.tar.gz --json",
    ),
    exit_codes="0 every write is right; 1 one is not; 3 none is wrong, but one could not run",
    add_flags=_add_flags,
    run=_run,
    notes="Formats: a scale per token and head with int8, FP8 or INT4; diffkv; and those of CUDA ops, "
    "whose csrc/cache_kernels.cu is compiled for an emulated device: mla, fp8_ds_mla, nhd, hnd, x-split.",
)
