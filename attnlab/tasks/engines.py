"""The engines by name.

``local[:N]``: N worker processes on this machine (:mod:`attnlab.tasks.local`).
"""

import os

from attnlab.case.fields import refuse
from attnlab.tasks.engine import Engine
from attnlab.tasks.local import LocalEngine

ENGINES = "local or local:N"


def find_engine(name: str, device: str = "cpu") -> Engine:
    """Return the engine of a name; its workers use ``device``. Raises InvalidCase for an unknown name."""
    kind, _, count = name.partition(":")
    if kind != "local" or (":" in name and not (count.isdigit() and int(count))):
        refuse("engine", ENGINES, name)
    return LocalEngine(int(count) if count else default_processes(device), device)


def default_processes(device: str) -> int:
    """Return how many workers a machine has: one per GPU, or one per core."""
    if device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
