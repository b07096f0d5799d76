"""Remove an int64 cast from kernels of a library, and compare the horizon with arithmetic.

Usage: python tools/horizon_planted.py NAME FOLDER [--count 15] [--out docs/horizon.json]

FOLDER is an unpacked wheel. Of each kernel, in the order of the files, the first cast is taken whose removal
lets an int32 expression grow with a size. The expected size follows from three runs with small sizes, by a
straight line through the largest values, and from the int64 values near it: no wrap is needed for it. A size
at which the launch cannot exist is left out. Where the kernel as it is accesses nothing that far, its masks
exclude the access, and silence is right. The plant is found if a statement has that size and a wrong access.
The kernel as it is must be silent about the expression.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlab.case.errors import Unavailable
from attnlab.horizon import machine
from attnlab.horizon.launch import Kernel, Launch, file_of, kernel_files
from attnlab.horizon.machine import LIMIT, Site, running
from attnlab.horizon.survey import KernelHorizon, Search, assumed_launches, kernel_horizon

CAST = re.compile(r"\.to\((tl|triton\.language)\.int64\)")


def _kernel(path: Path, root: Path, name: str) -> tuple[Kernel, list[str]]:
    files: dict[Any, Any] = {}
    kernel = next(one for one in file_of(path, root, files).kernels(set()) if one.name == name)
    _ = kernel.function
    return kernel, [str(one) for one in files]


def _key(site: Site) -> tuple[int, str]:
    return site.line, re.sub(r"\W", "", CAST.sub("", site.text))


def _launch(kernel: Kernel, files: list[str]) -> Launch | None:
    """Return the first assumed launch that runs and accesses memory."""
    for launch in assumed_launches(kernel):
        try:
            with running(kernel.function, files) as run:
                seen = Search(run, kernel.function.arg_names, launch).at("", 0)
        except Unavailable:
            continue
        if seen is not None and seen.live:
            return launch
    return None


def _peaks(
    kernel: Kernel, files: list[str], launch: Launch, size: str, value: int
) -> dict[Site, int]:
    with running(kernel.function, files) as run:
        search = Search(
            run, kernel.function.arg_names, replace(launch, sizes={**launch.sizes, size: value})
        )
        seen = search.at("", 0)
    return {} if seen is None else seen.peaks


def _exact(kernel: Kernel, files: list[str], launch: Launch, site: Site, size: str, at: int) -> int:
    """Return the first size at which the int64 value of an expression is 2^31, near ``at``; 0 for none."""
    with running(kernel.function, files) as run:
        search = Search(run, kernel.function.arg_names, launch)

        def is_past(value: int) -> bool:
            seen = search.at(size, value)
            return seen is not None and seen.peaks.get(site, 0) >= LIMIT

        low, high = launch.sizes[size], at + 64
        if high >= LIMIT or not is_past(high):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_past(middle) else (middle, high)
        return high


def _is_used(kernel: Kernel, files: list[str], launch: Launch, size: str, value: int) -> bool:
    """Answer whether the kernel as it is accesses an element 2^31 bytes or more into a tensor."""
    far = [0]
    check = machine._Watch._check_outside

    def noted(watch: Any, exact: Any, right: Any) -> None:
        live = exact[right]
        if live.size:
            far[0] = max(far[0], (int(live.max()) - machine._FIRST) % machine._APART)
        check(watch, exact, right)

    machine._Watch._check_outside = noted  # type: ignore[method-assign]
    try:
        with running(kernel.function, files) as run:
            Search(run, kernel.function.arg_names, launch).at(size, value)
    finally:
        machine._Watch._check_outside = check  # type: ignore[method-assign]
    return far[0] >= LIMIT


def _expected(
    kernel: Kernel, files: list[str], launch: Launch, known: set[Any]
) -> tuple[Site, str, int] | None:
    """Return an expression that is not among ``known``, and the size at which it wraps, by a line."""
    base = _peaks(kernel, files, launch, launch.sweep[0], launch.sizes[launch.sweep[0]])
    for size in launch.sweep:
        first = launch.sizes[size]
        points = [(v, _peaks(kernel, files, launch, size, v)) for v in (2 * first, 3 * first)]
        for site in base:
            if _key(site) in known or not all(site in peaks for _, peaks in points):
                continue
            one, two, three = base[site], points[0][1][site], points[1][1][site]
            if not (two - one == three - two > 0):
                continue
            at = first + -(-(LIMIT - one) * first // (two - one))
            at = _exact(kernel, files, launch, site, size, at)
            if 0 < at < LIMIT - 1:
                return site, size, at
    return None


def _plants(path: Path, root: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield a plant of a kernel, if one of its casts protects an expression that grows."""
    text = path.read_text()
    kernel, files = _kernel(path, root, name)
    launch = _launch(kernel, files)
    if launch is None:
        return
    sound = kernel_horizon(kernel, [launch], files)
    known = {
        _key(site)
        for site in _peaks(kernel, files, launch, launch.sweep[0], launch.sizes[launch.sweep[0]])
    }
    lines = text.splitlines(keepends=True)
    begin, end = kernel.node.lineno - 1, kernel.node.end_lineno or kernel.node.lineno
    for at in range(begin, end):
        if not CAST.search(lines[at]):
            continue
        changed = [*lines[:at], CAST.sub("", lines[at]), *lines[at + 1 :]]
        path.write_text("".join(changed))
        try:
            planted, files = _kernel(path, root, name)
            expected = _expected(planted, files, launch, known)
            if expected is None:
                continue
            _, size, value = expected
            found = kernel_horizon(planted, [replace(launch, sweep=(size,))], files)
            path.write_text(text)
            is_used = _is_used(*_kernel(path, root, name), launch, size, value)
            yield {**_row(kernel, at + 1, expected, found, sound, size, value), "is_used": is_used}
            if is_used:
                return
        except Unavailable:
            continue
        finally:
            path.write_text(text)


def _row(
    kernel: Kernel, line: int, expected: tuple[Site, str, int], found: KernelHorizon, sound: KernelHorizon,
    size: str, value: int,
) -> dict[str, Any]:  # fmt: skip
    site = expected[0]
    same = [
        one for one in found.statements if one.site.text == site.text
    ]  # it may occur on more lines
    stated = min(same, key=lambda one: (one.wrong_at is None, one.site != site), default=None)
    return {
        "file": kernel.shown, "kernel": kernel.name, "cast": line, "line": site.line,
        "expression": site.text, "size": size,
        "expected": value, "stated": stated and stated.wraps_at, "wrong_at": stated and stated.wrong_at,
        "sound_is_silent": all(_key(one.site) != _key(site) for one in sound.statements),
    }  # fmt: skip


def run(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield plants of a library, one for a kernel, at most ``count``."""
    root, paths = kernel_files(folder)
    done = 0
    for path in paths:
        if not CAST.search(path.read_text()):
            continue
        for kernel in file_of(path, root, {}).kernels(set()):
            try:
                plants = list(_plants(path, root, kernel.name))
            except Unavailable:
                continue
            for row in plants:
                yield row
                done += row["is_used"]
                if done == count:
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin, rows = time.process_time(), []
    for row in run(args.folder, args.count):
        print(row, flush=True)
        rows.append(row)
    used = [row for row in rows if row["is_used"]]
    right = sum(row["stated"] == row["expected"] and row["wrong_at"] is not None for row in used)
    masked = [row for row in rows if not row["is_used"]]
    silent = sum(row["sound_is_silent"] for row in rows)
    quiet = sum(row["wrong_at"] is None for row in masked)
    print(
        f"{right} of {len(used)} found, {silent} of {len(rows)} sound kernels silent, "
        f"{quiet} of {len(masked)} "
        f"with masks silent, {time.process_time() - begin:.0f} s"
    )
    if args.out is not None:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        known.setdefault("planted", {})[args.name] = rows
        args.out.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
