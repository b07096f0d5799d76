"""Trying the diagnosis: defects planted in random cases, known and unknown to it, and sound runs."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.problem import Problem
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.fault_injection import (
    applicable,
    is_distinguishable,
    is_visible,
    plant,
    random_case,
    same_here,
    scopes_of,
    seqs_of,
    sound_scene,
)
from attnlab.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One planted defect and what the diagnosis said of it.

    - ``distinguishable``: whether no other defect of the catalogue gives the same output here.
    - ``found``: the cause's name, or "ambiguous", "unexplained", "nothing wrong".
    - ``named``: "right"; "equivalent" (another, or several, that give the same output here);
      "undecided" (several, of which some give another output, but none that rounding excludes);
      "abstained" (nothing); or "wrong" (a false explanation).
    - ``without``: the same with the planted defect left out of the catalogue.
    """

    case: Case
    planted: str
    scope: str
    distinguishable: bool
    found: str
    named: str
    without: str
    seconds: float


def bench_diagnose(
    trials: int = 500,
    sound: int = 500,
    seed: int = 1,
    on_step: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> dict[str, Any]:
    """Return how the diagnosis does on ``trials`` planted defects and ``sound`` sound runs.

    The cases are drawn from ``seed``; ``top_1`` counts those planted defects that no other of the
    catalogue equals in their case, ``false_explanations`` all trials in which a cause was named that
    gives another output than the planted one.
    """
    rng = random.Random(seed)
    done: list[Trial] = []
    invisible = 0
    planted = Counter[str]()
    while len(done) < trials:
        on_step("planted", len(done), trials)
        trial = _trial(rng, planted)
        if trial is None:
            invisible += 1
        else:
            done.append(trial)
    alarms = [case for case in _sound_alarms(rng, sound, on_step)]
    return {
        **_figures(done),
        "invisible": invisible,
        "sound": sound,
        "seed": seed,
        "alarms": [case.changes() for case in alarms],
    }


def _trial(rng: random.Random, planted: Counter[str]) -> Trial | None:
    """Return a trial of the applicable defect that was planted least so far, or None where it moves
    nothing further than rounding."""
    case, lab = random_case(rng), Lab()
    try:
        problem, output = sound_scene(lab, case)
    except KernelRejected:
        return None
    choices = applicable(problem)
    defect = min(choices, key=lambda one: (planted[one.name], rng.random()))
    scope = scopes_of(problem, rng)
    planted[defect.name] += 1
    if not is_visible(problem, defect, scope):
        return None
    broken = plant(problem, output, defect, scope)
    began = time.perf_counter()
    told = diagnose(case, broken, lab=lab, propose=False)
    seconds = time.perf_counter() - began
    if not told.is_wrong:
        return None  # visible by a hair, and rounding took it away
    rest = [one for one in CATALOGUE if one is not defect]
    blind = diagnose(case, broken, lab=lab, catalogue=rest, propose=False)
    return Trial(
        case=case,
        planted=defect.name,
        scope=scope,
        distinguishable=is_distinguishable(problem, defect, seqs_of(problem, scope), choices),
        found=told.cause.name if told.cause is not None else told.status,
        named=_named(problem, told, defect, scope),
        without=_named(problem, blind, defect, scope),
        seconds=seconds,
    )


def _named(problem: Problem, told: Diagnosis, planted: Defect, scope: str) -> str:
    """Return how what was named relates to what was planted."""
    if told.cause is not None and told.cause.name == planted.name:
        return "right"
    if not told.explanations:
        return "abstained"
    named = [told.cause] if told.cause is not None else told.explanations
    seqs = seqs_of(problem, scope)
    others = [candidate for candidate in named if candidate.name != planted.name]
    if all(same_here(problem, planted, seqs, one.defect, one.seqs) for one in others):
        return "equivalent"
    return "wrong" if told.cause is not None else "undecided"


def _sound_alarms(
    rng: random.Random, sound: int, on_step: Callable[[str, int, int], None]
) -> list[Case]:
    """Return the sound runs of which the diagnosis says that something is wrong."""
    alarms: list[Case] = []
    ran = 0
    while ran < sound:
        on_step("sound", ran, sound)
        case, lab = random_case(rng), Lab()
        try:
            output = lab.output(case)
        except KernelRejected:
            continue
        ran += 1
        if diagnose(case, output, lab=lab, propose=False).is_wrong:
            alarms.append(case)
    return alarms


def _figures(done: list[Trial]) -> dict[str, Any]:
    clear = [trial for trial in done if trial.distinguishable]
    matrix: dict[str, dict[str, int]] = {}
    for trial in done:
        row = matrix.setdefault(trial.planted, {})
        row[trial.found] = row.get(trial.found, 0) + 1
    seconds = sorted(trial.seconds for trial in done)
    return {
        "trials": len(done),
        "distinguishable": len(clear),
        "top_1": sum(trial.named == "right" for trial in clear) / max(1, len(clear)),
        "named": dict(Counter(trial.named for trial in done)),
        "named_distinguishable": dict(Counter(trial.named for trial in clear)),
        "without": dict(Counter(trial.without for trial in done)),
        "false_explanations": [
            {"planted": t.planted, "found": t.found, "case": t.case.changes(), "scope": t.scope}
            for t in done
            if t.named == "wrong"
        ],
        "matrix": matrix,
        "median_seconds": seconds[len(seconds) // 2] if seconds else 0.0,
        "most_seconds": seconds[-1] if seconds else 0.0,
        "missed": [
            {"planted": t.planted, "found": t.found, "case": t.case.changes(), "scope": t.scope}
            for t in clear
            if t.named != "right"
        ],
        "without_wrong": [
            {"planted": t.planted, "case": t.case.changes(), "scope": t.scope}
            for t in done
            if t.without == "wrong"
        ],
    }
