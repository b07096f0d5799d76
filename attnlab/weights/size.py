"""How large an X-ray may be."""

from attnlab.case.errors import InvalidCall
from attnlab.lab.memory_check import available_bytes
from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import num_slots
from attnlab.weights.device import BYTES

MOST_WEIGHTS = 1 << 26  # of a measurement, on any machine


def check_size(call: KernelCall, rows: int, heads: int) -> None:
    """Raise InvalidCall if the X-ray of so many rows and heads would be too large."""
    check_numbers(rows, heads, num_slots(call))


def most_weights() -> int:
    """Return how many weights a measurement may have: more than MOST_WEIGHTS if memory is available."""
    return max(MOST_WEIGHTS, available_bytes() // BYTES)


def check_numbers(rows: int, heads: int, slots: int) -> None:
    """Raise InvalidCall if an X-ray would hold too many numbers."""
    if rows * heads * slots > (most := most_weights()):
        raise InvalidCall(
            f"rows × heads × slots must be at most {most}, got {rows} × {heads} × {slots}; "
            "choose a part with --seq-range and --kv-head-range, or fewer blocks",
            field="num_blocks",
        )
