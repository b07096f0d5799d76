"""The command ``attnlab bench``; the measurements are in :mod:`attnlab.cli.bench`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Int
from attnlab.cli.command import Command, print_json, progress, show
from attnlab.cli.sharded import add_engine, add_shard

if TYPE_CHECKING:
    from attnlab.show.sheets.sheet import Sheet


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("speed", "diagnose"),
        default="speed",
        help="speed: speed and memory (default); diagnose: the diagnosis of planted defects",
    )
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="measure Triton's interpreter on the decode kernel of this vLLM instead of the lab",
    )
    speed.add_argument(
        "--rocm",
        action="store_true",
        help="measure the emulated AMD device on csrc/rocm of --source",
    )
    diagnose = parser.add_argument_group("diagnose")
    diagnose.add_argument(
        "--trials",
        type=int,
        default=500,
        metavar="N",
        help="planted defects, and as many sound runs (default: %(default)s)",
    )
    diagnose.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of the cases (default: %(default)s)"
    )
    add_engine(diagnose, "default: this process")
    add_shard(diagnose)


def _run(args: argparse.Namespace) -> int:
    if args.what == "diagnose":
        for name, given in (("source", args.source is not None), ("rocm", args.rocm)):
            if given:
                raise InvalidCase(f"{name} must not be given with diagnose", field=name)
    trials, seed = Int(1).check("trials", args.trials), Int(0).check("seed", args.seed)
    if args.what == "diagnose":
        return _diagnose(args, trials, seed)
    if args.shard != "1/1" or args.out is not None or args.engine is not None:
        text = "engine, shard and out must be given with diagnose only"
        raise InvalidCase(text, field="shard")
    if args.source is not None:
        from attnlab.kernels.vllm.source import find_source

        find_source(args.source)
    figures, sheet = _measure(args)
    if args.json:
        print_json(figures)
    else:
        show(sheet)
    return 0


def _diagnose(args: argparse.Namespace, trials: int, seed: int) -> int:
    """Run the trials, or a shard of them."""
    from attnlab.cli.bench.diagnosis import (
        DiagnoseJob,
        diagnose_header,
        diagnose_tasks,
        figures_of,
    )
    from attnlab.cli.sharded import check_flags, print_shard, run_sharded

    shard = check_flags(args.shard, args.out)
    tasks, header = diagnose_tasks(trials, trials), diagnose_header(trials, seed, shard)
    job = DiagnoseJob(seed=seed)
    outcomes, code = run_sharded("trials", job, tasks, header, shard, args.out, args.engine)
    if code or shard.count > 1:
        return print_shard(shard, outcomes, args.json) or code
    return print_diagnosis(figures_of(tasks, outcomes, seed), args.json)


def print_diagnosis(figures: dict[str, Any], as_json: bool) -> int:
    """Print the figures of the diagnosis and return the exit code."""
    from attnlab.cli.bench import sheets

    if as_json:
        print_json(figures)
    else:
        show(sheets.diagnosis(figures))
    return 3 if figures["failed"] else 0


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], "Sheet"]:
    """Return the figures that the flags select, and their sheet."""
    from attnlab.cli.bench import sheets

    with progress("measuring") as on_step:
        if args.rocm:
            from attnlab.cli.bench.rocm import bench_rocm

            figures = bench_rocm(args.source, on_step=on_step)
            return figures, sheets.rocm(figures)
        if args.source is not None:
            from attnlab.cli.bench.interpreter import bench_interpreter

            figures = bench_interpreter(args.source, on_step=on_step)
            return figures, sheets.interpreter(figures)
        from attnlab.cli.bench.lab import bench

        figures = bench(on_step=on_step)
        return figures, sheets.speed(figures)


COMMAND = Command(
    name="bench",
    purpose="Measure the lab on this machine, each figure with a yardstick of the same run.",
    arguments="[speed | diagnose]",
    examples=("attnlab bench", "attnlab bench diagnose --trials 100"),
    exit_codes="0 measured; 3 trials of diagnose that have no verdict",
    add_flags=_add_flags,
    run=_run,
)
