"""Numbers in JSON: strict JSON has neither NaN nor infinity.

Every ``to_dict`` of the package writes NaN as "nan", and infinities as "inf" and "-inf"; ``float()`` reads
them back. null is reserved for a value that does not exist. So ``json.dumps(…, allow_nan=False)`` works.
"""

import math
from typing import Any


def json_number(value: float) -> float | str:
    """Return a number as strict JSON has it: itself if finite, else "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else str(float(value))


def json_value(value: Any) -> Any:
    """Return a value with every float in it, at any depth of dicts, lists and tuples, as strict JSON has it.

    Tuples become lists. Other values are returned as they are.
    """
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
