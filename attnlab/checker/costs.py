"""Recorded times of the hostile cases, by op and by what is special about a case.

They order the cases, divide them into shards of equal length, and estimate the remaining time. Only ratios
matter. ``costs.json`` was measured under Triton's interpreter; ``python tools/costs.py STORE`` writes it
anew from the store of a check.
"""

import json
import statistics
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.checker.hostile import DEFAULTS
from attnlab.tasks.store import read_store
from attnlab.tasks.task import DONE

Costs = Mapping[str, float]  # seconds by op and features, as "unified_attention/alibi=True"
_UNKNOWN_S = 1.0
# Fields in which all cases differ, or that do not change the time.
_COMMON = {
    *("op", "backend", "release", "platform", "seed", "atol"),
    *("query_lens", "ctx_lens", "num_blocks"),
}


def cost_key(case: Case) -> str:
    """Return the op of a hostile case and the fields that its variant sets."""
    special = {
        name: value
        for name, value in case.changes().items()
        if name not in _COMMON and DEFAULTS.get(name) != value
    }
    plain = {name: getattr(case, name) for name in DEFAULTS if name not in case.changes()}
    special |= {n: v for n, v in plain.items() if n not in _COMMON and DEFAULTS[n] != v}
    words = (f"{name}={value}" for name, value in sorted(special.items()))
    return f"{case.op}/{','.join(words) or 'plain'}"


@cache
def packaged_costs() -> Costs:
    """Return the times that the package was built with."""
    found: dict[str, float] = json.loads((files(__package__) / "costs.json").read_text())
    return found


def costs_of_store(folder: Path) -> Costs:
    """Return the mean times of the cases of a store. Raises InvalidCase if it has none.

    On a CPU it is the processor time, which does not depend on what else the machine does.
    """
    times: dict[str, list[float]] = {}
    header, outcomes = read_store(folder)
    is_cpu = header.get("library", {}).get("device") == "cpu"
    for key, outcome in outcomes.items():
        parts = key.split("/")
        if outcome.status == DONE and len(parts) >= 3 and parts[0] != "shrink":
            times.setdefault("/".join(parts[-3:-1]), []).append(
                outcome.cpu_s if is_cpu else outcome.seconds
            )
    if not times:
        raise InvalidCase(f"times must be the store of a check, got {folder}", field="times")
    return {key: round(statistics.fmean(seconds), 3) for key, seconds in sorted(times.items())}


def cost_s(costs: Costs, key: str) -> float:
    """Return the time of a key; if it was not recorded, the median of its op."""
    if key in costs:
        return costs[key]
    same_op = [s for name, s in costs.items() if name.partition("/")[0] == key.partition("/")[0]]
    return statistics.median(same_op) if same_op else _UNKNOWN_S
