"""Run the Triton kernels of any source in lockstep and one program after another, and compare every bit.

python tools/lockstep_kernels.py sglang-0.5.23.whl --out kernels.json
python tools/lockstep_kernels.py fla_core-0.6.0-py3-none-any.whl --step 5

Each kernel gets launches that `attnlab horizon` guesses from its text, on small tensors with random contents
and with several grids. The first counts that runs in lockstep, else the first that runs one program after
another. The numbers have no meaning; a difference between both ways is an error of lockstep.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.horizon import launch as source
from attnlab.horizon.launch import Launch
from attnlab.horizon.machine import Tensor
from attnlab.horizon.survey import assumed_launches
from attnlab.kernels.triton.interpreter import interpret

ELEMENTS = 1 << 16  # of a tensor at most
LIMIT_S = 10  # for a run
GRIDS = ((4, 4, 4), (4, 1, 1), (1, 4, 1), (1, 1, 4))
STRIDES = (4096, 512, 64, 1)  # in turn, so that programs rarely store the same element
SAME, ALONE, DIFFER, NOT_RUN = "in lockstep", "one by one", "differ", "not run"


class Late(Exception):
    """A run took longer than LIMIT_S."""


def main() -> int:
    """Run the kernels, print the counts, and return 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a Python file, a folder or a wheel")
    parser.add_argument("--step", type=int, default=1, help="take every n-th kernel")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    count = len(source.load_kernels(args.source)[0])
    numbers = range(0, count, args.step)
    # A worker ends after some kernels: the memory of a source's modules grows.
    with get_context("spawn").Pool(
        args.workers, _open, (args.source,), maxtasksperchild=60
    ) as pool:
        found = pool.map(_outcome, numbers, chunksize=1)
    counts = Counter(one["outcome"] for one in found)
    times = [one["one_by_one_s"] / one["lockstep_s"] for one in found if one["outcome"] == SAME]
    reasons = Counter(one["why"] for one in found if one["outcome"] == ALONE)
    document = {
        "source": args.source.name,
        "kernels": count,
        "taken": len(found),
        "counts": counts,
        "median_times": round(statistics.median(times), 2) if times else None,
        "one by one because": reasons.most_common(),
    }
    if args.out:
        args.out.write_text(json.dumps({**document, "each": found}, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    for one in found:
        if one["outcome"] == DIFFER:
            print(f"{one['file']}: {one['kernel']}: {one['why']}")
    return 1 if counts[DIFFER] else 0


_kernels: list[source.Kernel] = []


def _open(path: Path) -> None:
    """Load the kernels of a source with their own loops; horizon replaces these."""
    torch.set_num_threads(1)
    source.Loops = type("Loops", (), {"visit": lambda self, tree: tree})  # type: ignore[misc]
    _kernels[:] = source.load_kernels(path)[0]
    signal.signal(signal.SIGALRM, _raise_late)


def _raise_late(*ignored: Any) -> None:
    raise Late


@contextmanager
def _limited() -> Iterator[None]:
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _outcome(number: int) -> dict[str, Any]:
    """Run one kernel in both ways."""
    kernel = _kernels[number]
    found = {"kernel": kernel.name, "file": kernel.shown, "outcome": NOT_RUN, "why": ""}
    for launch in assumed_launches(kernel):
        for grid in GRIDS:
            try:
                one = _compared(kernel, launch, grid)
            except Exception as error:  # whatever a guessed launch makes a kernel raise
                if found["outcome"] == NOT_RUN:
                    found["why"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
                break  # the next grid would raise, too
            if one["outcome"] in (SAME, DIFFER):
                return found | one
            if found["outcome"] == NOT_RUN:
                found |= one
    return found


def _compared(kernel: source.Kernel, launch: Launch, grid: tuple[int, ...]) -> dict[str, Any]:
    """Return the outcome of a launch; raise what it raises one program after another."""
    sizes = {name: min(value, 64) for name, value in launch.sizes.items()}
    strides = [name for name in sizes if "stride" in name.lower()]
    sizes |= {name: STRIDES[i % len(STRIDES)] for i, name in enumerate(strides)}
    bound = launch.bind(sizes)
    if bound is None:
        raise ValueError("no such grid")
    given = bound[0]
    generator = np.random.default_rng(random.Random(kernel.name).randrange(1 << 30))
    arguments = {name: _argument(value, generator) for name, value in given.items()}
    alone, alone_s, _ = _run(kernel.function, arguments, grid, lockstep=False)
    try:
        together, together_s, why = _run(kernel.function, arguments, grid, lockstep=True)
    except Exception as error:
        return {"outcome": DIFFER, "why": f"{type(error).__name__}: {error}"[:200]}
    times = {"one_by_one_s": alone_s, "lockstep_s": together_s}
    wrong = [name for name, value in alone.items() if not _equal(value, together[name])]
    if wrong:
        return {"outcome": DIFFER, "why": f"{', '.join(wrong)} {why}", **times}
    return {"outcome": ALONE if why else SAME, "why": why, **times}


def _run(
    function: Any, arguments: dict[str, Any], grid: tuple[int, ...], lockstep: bool
) -> tuple[dict[str, torch.Tensor], float, str]:
    """Run a launch on copies; return the tensors after it, its seconds, and why it ran one by one."""
    copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with _limited(), interpret(lockstep=lockstep) as log:
        began = time.process_time()
        function[grid](**copies)
        seconds = time.process_time() - began
    tensors = {n: v for n, v in copies.items() if isinstance(v, torch.Tensor)}
    return tensors, seconds, "; ".join(log.alone.values())


def _argument(value: Any, generator: np.random.Generator) -> Any:
    """Return an argument of a launch: for a tensor without memory, one with random numbers."""
    if not isinstance(value, Tensor):
        return value
    size = min(value.size, ELEMENTS)
    dtype = getattr(
        torch, {"float8e4nv": "float8_e4m3fn", "int1": "bool"}.get(value.dtype, value.dtype)
    )
    if value.values is not None:
        numbers = np.broadcast_to(value.values(np.arange(size)), (size,))
        return torch.tensor(np.clip(numbers, -64, 64).astype(np.int64)).to(dtype)
    if dtype.is_floating_point:
        return torch.tensor(generator.standard_normal(size, dtype=np.float32)).to(dtype)
    return torch.tensor(generator.integers(0, 4, size)).to(dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


if __name__ == "__main__":
    sys.exit(main())
