"""Measure how time and memory of the lab grow with tokens, heads and sequences; write JSON and a figure.

python tools/growth.py --out docs/growth.json --figure docs/growth.png --gib 12

Each point runs one Case in a process of its own, with the models, and records the seconds of every step and
the peak memory. For each step the exponent is fitted over the upper half of the sizes (log seconds against
log size). No step may grow faster than attention itself, whose exponent follows from its multiplications.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = ("batch", "cache", "kernels", "reference", "compare")
# By axis: the fields of a Case of size n, and the sizes. One Case of each axis needs 12 to 24 GiB.
AXES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "tokens": ({"num_heads": 2, "seqs": 1}, tuple(256 << i for i in range(7))),
    "heads": ({"tokens": 128, "seqs": 4}, tuple(16 << i for i in range(9))),
    "sequences": ({"tokens": 128, "num_heads": 64}, tuple(4 << i for i in range(8))),
}
_MARGIN = 1.1  # by how much an exponent may exceed attention's: times are noisy
_LEAST_POINTS = 4  # of an axis; the exponents are fitted over the last three
_NOTABLE_S = 0.5  # shorter steps are not fitted


def main() -> int:
    """Measure every point, write the files, and return 1 if a step grows faster than attention."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--figure", type=Path, help="the PNG file to write")
    parser.add_argument("--gib", type=float, default=12.0, help="leave out larger Cases")
    parser.add_argument("--note", default="", help="a sentence about the machine, for the JSON")
    parser.add_argument("--point", help=argparse.SUPPRESS)  # of a child process
    args = parser.parse_args()
    if args.point:
        print(json.dumps(point(json.loads(args.point))))
        return 0
    if args.out is None:
        parser.error("--out is required")
    document = measure(args.gib, args.note)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    if args.figure:
        draw(document, args.figure)
    print(json.dumps(document["exponents"], indent=1))
    return 1 if document["faster_than_attention"] else 0


def fields_of(axis: str, size: int) -> dict[str, Any]:
    """Return the fields of the Case of one size: each sequence has as many new tokens as context."""
    fixed, _ = AXES[axis]
    given = {**fixed, {"tokens": "tokens", "heads": "num_heads", "sequences": "seqs"}[axis]: size}
    lens = [given["tokens"]] * given["seqs"]
    return {"query_lens": lens, "ctx_lens": lens, "num_heads": given["num_heads"], "stage": "sound"}


def point(fields: dict[str, Any]) -> dict[str, Any]:
    """Run one Case; return seconds by step, peak memory, and the operations of attention."""
    import resource

    from bench import visible_flops

    from attnlab.case.case import Case
    from attnlab.lab.lab import Lab

    case = Case.from_dict({**fields, "atol": 1e-3})
    result = Lab().run(case)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "status": result.status,
        "seconds": result.seconds,
        "peak_gib": peak / (2**30 if sys.platform == "darwin" else 2**20),
        "gflop": visible_flops(case) / 1e9,
    }


def measure(gib: float, note: str) -> dict[str, Any]:
    """Return the document: the machine, every point, the exponents, and the steps that grow too fast."""
    import torch

    from attnlab.case.case import Case
    from attnlab.lab.products import needed_bytes

    points: dict[str, list[dict[str, Any]]] = {}
    for axis, (_, sizes) in AXES.items():
        points[axis] = []
        for size in sizes:
            fields = fields_of(axis, size)
            if needed_bytes(Case.from_dict(fields), cache_copies=2) > gib * 2**30:
                break
            command = [sys.executable, __file__, "--point", json.dumps(fields)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            points[axis].append({"size": size, **json.loads(done.stdout)})
            print(axis, size, points[axis][-1], file=sys.stderr, flush=True)
        if len(points[axis]) < _LEAST_POINTS:
            sys.exit(f"--gib must leave {_LEAST_POINTS} sizes of {axis}, got {len(points[axis])}")
    exponents = {axis: fit(found) for axis, found in points.items()}
    faster = [
        f"{step} with {axis}"
        for axis, found in exponents.items()
        for step, exponent in found.items()
        if exponent > found["attention"] * _MARGIN
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "note": note,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "limit_gib": gib,
        "points": points,
        "exponents": exponents,
        "faster_than_attention": faster,
    }


def fit(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the exponent of attention, of peak memory and of each step that takes long enough.

    A step counts by its total as well: a short step cannot matter, however it grows.
    """
    upper = points[len(points) // 2 - 1 :]
    found = {"attention": slope(upper, [one["gflop"] for one in upper])}
    found["peak memory"] = slope(upper, [one["peak_gib"] for one in upper])
    for step in STEPS:
        seconds = [one["seconds"].get(step, 0.0) for one in upper]
        if seconds[-1] >= _NOTABLE_S and min(seconds) > 0:
            found[step] = slope(upper, seconds)
    return {name: round(exponent, 2) for name, exponent in found.items()}


def slope(points: list[dict[str, Any]], values: list[float]) -> float:
    """Return the least-squares slope of log value against log size."""
    x = [math.log(one["size"]) for one in points]
    y = [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the figure: a column per axis, seconds above and peak memory below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for column, (axis, points) in enumerate(document["points"].items()):
        sizes, exponents = [one["size"] for one in points], document["exponents"][axis]
        top, bottom = axes[0][column], axes[1][column]
        for step in STEPS:
            label = f"{step}: {exponents[step]:.2f}" if step in exponents else f"{step}: short"
            top.loglog(sizes, [one["seconds"][step] for one in points], marker=".", label=label)
        last = points[-1]
        scale = max(last["seconds"].values()) / last["gflop"]
        operations = [one["gflop"] * scale for one in points]
        label = f"attention's operations: {exponents['attention']:.2f}"
        top.loglog(sizes, operations, "k:", label=label)
        top.legend(fontsize="x-small", title="exponent of growth", title_fontsize="x-small")
        top.set_title(f"growth with {axis}")
        label = f"peak memory: {exponents['peak memory']:.2f}"
        bottom.loglog(
            sizes, [one["peak_gib"] for one in points], marker=".", color="k", label=label
        )
        bottom.legend(fontsize="x-small")
        bottom.set_xlabel({"tokens": "new tokens of the sequence"}.get(axis, axis))
    axes[0][0].set_ylabel("seconds")
    axes[1][0].set_ylabel("peak memory, GiB")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
