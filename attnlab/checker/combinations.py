"""Combinations: which pairs and triples of knob values the cases of a check cover, and which are refused."""

from collections.abc import Sequence
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.design import Tuple, uncovered
from attnlab.checker.hostile import covering_cases, covering_rows, hostile_design
from attnlab.kernels.backend import Backend


def combinations_of(
    backend: Backend, op: str, platform: str, seed: int, cases: Sequence[Case]
) -> dict[str, Any]:
    """Return the combinations that some Cases of an op cover, as JSON-able values.

    - ``knobs``: the names of the values of each knob that the op has.
    - ``pairs``, ``triples``: their number, ``covered`` and ``missing``.
    - ``refused``: the values, pairs and triples that no Case can have, each with the reason.
    """
    design = hostile_design(backend, op, platform)
    run = set(cases)
    made = zip(
        covering_rows(backend, op, platform, seed),
        covering_cases(backend, op, platform, seed),
        strict=True,
    )
    missing = uncovered(design, [row for row, case in made if case in run])
    found: dict[str, Any] = {"knobs": {knob: [*values] for knob, values in design.values.items()}}
    for name, size in (("pairs", 2), ("triples", 3)):
        absent = [entry for entry in missing if len(entry) == size]
        total = sum(len(entry) == size for entry in design.wanted())
        found[name] = {
            "total": total,
            "covered": total - len(absent),
            "missing": [_text(entry) for entry in absent],
        }
    found["refused"] = {_text(entry): why for entry, why in design.refused.items()}
    return found


def _text(entry: Tuple) -> str:
    """Return a combination as text, such as "mask causal, cache fp8"."""
    return ", ".join(f"{knob} {name}" for knob, name in entry)
