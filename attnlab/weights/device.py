"""Where the weights of an X-ray are computed: on this machine's cores, or on its GPU if there are many."""

import dataclasses
from typing import Any, TypeVar

import torch

from attnlab.contracts.target import Target
from attnlab.tensors.call import KernelCall

MANY = 1 << 22  # weights, from which a GPU takes less time
BYTES = 100  # that an X-ray needs for each weight
_T = TypeVar("_T")


def device_for(weights: int, requested: str | None = None) -> torch.device:
    """Return the device for so many weights: a GPU that has the memory for them, else the CPU.

    ``requested``: "cpu" forbids the GPU.
    """
    cpu = torch.device("cpu")
    if weights < MANY or requested == "cpu" or not torch.cuda.is_available():
        return cpu
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.device("cuda") if weights * BYTES <= free + reserved else cpu


def moved(one: _T, device: torch.device | str) -> _T:
    """Return a dataclass with its tensors on a device, also those of dataclasses in it.

    A KernelCall stays where it is.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        value = getattr(one, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.to(device)
        elif dataclasses.is_dataclass(value) and not isinstance(value, KernelCall | Target):
            changes[field.name] = moved(value, device)
    return dataclasses.replace(one, **changes)  # type: ignore[type-var]
