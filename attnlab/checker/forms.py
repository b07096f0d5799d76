"""Forms: how many cases of an op ran which kernels, such as unified_attention in one part or in several.

Two forms of one case are not compared with each other. Each is compared with the reference: if both are
within their bounds, they differ by no more than the sum of the bounds.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def kernels_of(launches: Iterable[str]) -> list[str]:
    """Return the names of the kernels of some launches, each once, in their order."""
    return list(dict.fromkeys(text.partition("[")[0] for text in launches))


def forms_of(verdicts: Iterable[tuple[Mapping[str, Any], str]]) -> dict[str, dict[str, int]]:
    """Return the number of cases of each op by the kernels that they launched, the most frequent first.

    ``verdicts``: of cases, each with its op. Kernels of one case are joined by " + ".
    """
    found: dict[str, dict[str, int]] = {}
    for verdict, op in verdicts:
        if verdict.get("kernels"):
            counts = found.setdefault(op, {})
            form = " + ".join(verdict["kernels"])
            counts[form] = counts.get(form, 0) + 1
    return {
        op: dict(sorted(counts.items(), key=lambda one: -one[1])) for op, counts in found.items()
    }
