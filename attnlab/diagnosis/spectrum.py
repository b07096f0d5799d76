"""Spectrum: which lines and branch outcomes separate programs with wrong results from others."""

from collections.abc import Collection, Sequence

import torch

from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.replay import Unit

_OF_BRANCH = 0.95


def comparable_units(units: Sequence[Unit], right: torch.Tensor) -> list[Unit]:
    """Return the units of the kernels that have a unit with a wrong element; ``right``: [rows, heads] bool.

    Programs of another kernel execute other lines, which says nothing about the lines of this one.
    """
    wrong = {unit.kernel for unit in units if is_wrong(unit, right)}
    return [unit for unit in units if unit.kernel in wrong]


def is_wrong(unit: Unit, right: torch.Tensor) -> bool:
    """Answer whether a unit writes a wrong element."""
    return bool((unit.cells & ~right).any())


def spectrum(units: Sequence[Unit], right: torch.Tensor) -> dict[Line, float]:
    """Return Ochiai's coefficient of each executed line, from 0 to 1.

    The coefficient is wrong(e) / sqrt(wrong × (wrong(e) + right(e))) where wrong(e) and right(e) count units
    that execute it. A line has the largest one of itself and of the steps from it to another line, which
    are the outcomes of a branch and count a little less.
    """
    total = sum(is_wrong(unit, right) for unit in units)
    counts: dict[tuple[Line, Line | None], list[int]] = {}
    for unit in units:
        wrong = is_wrong(unit, right)
        for key in (*((line, None) for line in unit.lines), *unit.steps):
            counts.setdefault(key, [0, 0])[wrong] += 1
    found: dict[Line, float] = {}
    for (line, to), (passed, failed) in counts.items():
        score = failed / (total * (failed + passed)) ** 0.5 if failed else 0.0
        score *= 1.0 if to is None else _OF_BRANCH
        found[line] = max(found.get(line, 0.0), score)
    return found


def excess(score: float, units: Collection[Unit], right: torch.Tensor) -> float:
    """Return by how much a coefficient is above that of a line that every unit executes, from 0 to 1."""
    base = float(sum(is_wrong(unit, right) for unit in units) / len(units)) ** 0.5
    return max(0.0, (score - base) / (1 - base)) if base < 1 else 0.0
