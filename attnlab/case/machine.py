"""The cores and the memory of this machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # larger limits of a control group are none


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return how much memory new allocations can use without swapping, the least of several limits.

    These are the kernel's own estimate (MemAvailable) and, for each control group of this process, its
    limit less what it uses now, page cache excluded. Where none can be read, it is the machine's memory.
    """
    limits = [*_machine(proc), *_control_groups(proc, cgroups)]
    return max(0, min(limits, default=total_bytes()))


def _machine(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _control_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what is left in each control group of this process, up to the root."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                names, folder = ("memory.max", "memory.current", "inactive_file"), cgroups
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                folder = cgroups / "memory"
            else:
                continue
            parts = Path(path.lstrip("/")).parts
            for count in range(len(parts), -1, -1):
                yield from _left(folder.joinpath(*parts[:count]), *names)


def _left(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    """Yield what is left in one control group, if it has a limit."""
    with contextlib.suppress(OSError, ValueError):
        most = int((folder / limit).read_text())  # "max" is a ValueError: no limit
        if most < _UNLIMITED:
            yield most - int((folder / used).read_text()) + _cached(folder / "memory.stat", cached)


def _cached(file: Path, name: str) -> int:
    """Return the page cache of a control group that the kernel can drop."""
    with contextlib.suppress(OSError, ValueError):
        stats = dict(line.split() for line in file.read_text().splitlines())
        return int(stats.get(name, 0))
    return 0
