"""The engines by name.

``local[:N]``: N worker processes on this machine (:mod:`attnlab.tasks.local`).
``ray``: the Ray cluster at RAY_ADDRESS, or a local one; ``ray://HOST:PORT``: a cluster's client port
(:mod:`attnlab.tasks.ray_engine`).
"""

import os
import re

from attnlab.case.fields import refuse
from attnlab.tasks.engine import Engine, Stop, never
from attnlab.tasks.local import LocalEngine

ENGINES = "local, local:N, ray or ray://HOST:PORT"
_LOCAL = re.compile(r"local(:0*[1-9]\d{0,5})?")
_RAY = re.compile(r"ray(://[^/\s]+:\d{1,5})?")


def check_engine(name: str) -> None:
    """Raise InvalidCase if a name is not that of an engine."""
    if not (_LOCAL.fullmatch(name) or _RAY.fullmatch(name)):
        refuse("engine", ENGINES, name)


def find_engine(name: str, device: str = "cpu", stop: Stop = never) -> Engine:
    """Return the engine of a name; its workers use ``device``.

    ``stop``: returns True to give up reaching a cluster. Raises InvalidCase for an unknown name, Unavailable
    if a cluster cannot be reached.
    """
    check_engine(name)
    if _LOCAL.fullmatch(name):
        count = name.partition(":")[2]
        return LocalEngine(int(count) if count else default_processes(device), device)
    from attnlab.tasks.ray_engine import RayEngine

    address = name if "://" in name else os.environ.get("RAY_ADDRESS")
    return RayEngine(None if address in (None, "", "local") else address, device, stop)


def default_processes(device: str) -> int:
    """Return how many workers a machine has: one per GPU, or one per core."""
    if device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
