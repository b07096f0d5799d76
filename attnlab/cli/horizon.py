"""The command ``attnlab horizon``."""

import argparse
from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.cli import command
from attnlab.cli.command import progress, put, runs

if TYPE_CHECKING:
    from attnlab.horizon.deployment import Deployment
    from attnlab.horizon.survey import Survey

_SIZES = (
    *("heads", "kv_heads", "head_size", "layers", "block_size", "gpu_memory", "max_context"),
    *("batched_tokens", "seqs", "cache_bytes", "weights"),
)


@runs("horizon")
def _run(args: argparse.Namespace) -> int:
    from attnlab.horizon.deployment import SOURCES, read_deployment

    if args.deployment == "list":
        print("\n".join(f"{name:20s}{source}" for name, source in SOURCES.items()))
        return 0
    if args.source is None:
        raise InvalidCase("source must be given, but with --deployment list")
    if args.op and args.kernel:
        raise InvalidCase("op and kernel must not both be given", field="kernel")
    command.check_share_flags(args)
    if args.html is not None:
        from attnlab.reports.check_pages import check_packages

        check_packages()
    changes = {n: v for n in _SIZES if (v := getattr(args, n)) is not None}
    deployment = read_deployment(args.deployment, changes) if args.deployment or changes else None
    found = _survey(args, deployment)
    command.share(args, found, draw=lambda pages: pages.margin_pictures(found))
    put(found, args.json)
    return found.exit_code


def _survey(args: argparse.Namespace, deployment: "Deployment | None") -> "Survey":
    from attnlab.kernels.vllm.source import source_path

    source = source_path(args.source)
    from attnlab.horizon.launch import read_launches  # these import torch
    from attnlab.horizon.survey import survey

    launches = [] if args.launch is None else [*read_launches(args.launch).values()]
    with progress("running the kernels") as update:
        return survey(
            source,
            op=f":{args.kernel}" if args.kernel else args.op,
            deployment=deployment,
            launches=launches,
            is_assuming=not args.described,
            on_step=lambda done, total: update(done=done, total=total),
        )
