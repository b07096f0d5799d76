"""Benchmark of the diagnosis: planted defects, the same without them among the candidates, correct runs."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.cli.bench.fault_injection import (
    applicable,
    are_equivalent,
    correct_run,
    is_distinguishable,
    is_visible,
    plant,
    random_case,
    random_rows,
    seqs_of,
)
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.problem import Problem
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One planted defect and its diagnosis.

    - ``planted``: the defect; ``rows``: where it was planted, "all", "decode" or "prefill".
    - ``distinguishable``: no other defect of the catalogue gives the same output in this Case.
    - ``found``: the name of the cause, or the status if there is none.
    - ``named``: "right"; "equivalent" (other defects that give the same output here); "undecided"
      (several, some of which give another output that rounding does not exclude); "abstained" (none); or
      "wrong" (a false explanation).
    - ``without``: ``named`` of a second diagnosis that does not have the planted defect as a candidate.
    """

    case: Case
    planted: str
    rows: str
    distinguishable: bool
    found: str
    named: str
    without: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return what is needed to repeat the trial."""
        return {
            "planted": self.planted,
            "found": self.found,
            "case": self.case.changes(),
            "scope": self.rows,
        }


def bench_diagnose(
    trials: int = 500,
    sound: int = 500,
    seed: int = 1,
    on_step: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> dict[str, Any]:
    """Diagnose ``trials`` planted defects and ``sound`` correct runs, drawn from ``seed``.

    - ``top_1``: share of the distinguishable planted defects that were named.
    - ``false_explanations``: trials whose cause gives another output than the planted defect.
    - ``alarms``: correct runs in which the diagnosis reports an error.
    - ``invisible``: planted defects that change nothing but rounding; they are not counted as trials.
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
    alarms = _false_alarms(rng, sound, on_step)
    return {
        **_figures(done),
        "invisible": invisible,
        "sound": sound,
        "seed": seed,
        "alarms": [case.changes() for case in alarms],
    }


def _trial(rng: random.Random, planted: Counter[str]) -> Trial | None:
    """Run a trial of the applicable defect that was planted least often so far.

    Returns None if the Case's kernel rejects it or the defect changes nothing but rounding.
    """
    case, lab = random_case(rng), Lab()
    try:
        problem, output = correct_run(lab, case)
    except KernelRejected:
        return None
    choices = applicable(problem)
    defect = min(choices, key=lambda choice: (planted[choice.name], rng.random()))
    rows = random_rows(problem, rng)
    planted[defect.name] += 1
    if not is_visible(problem, defect, rows):
        return None
    wrong_output = plant(problem, output, defect, rows)
    began = time.perf_counter()
    diagnosis = diagnose(case, wrong_output, lab=lab, propose=False)
    seconds = time.perf_counter() - began
    if not diagnosis.is_wrong:
        return None  # barely visible, and lost in the rounding of the output
    others = [other for other in DEFECTS.values() if other is not defect]
    blind = diagnose(case, wrong_output, lab=lab, defects=others, propose=False)
    seqs = seqs_of(problem, rows)
    return Trial(
        case=case,
        planted=defect.name,
        rows=rows,
        distinguishable=is_distinguishable(problem, defect, seqs, choices),
        found=diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status,
        named=_named(problem, diagnosis, defect, seqs),
        without=_named(problem, blind, defect, seqs),
        seconds=seconds,
    )


def _named(problem: Problem, diagnosis: Diagnosis, planted: Defect, seqs: set[int]) -> str:
    """Return how the explanations relate to the planted defect (see ``Trial.named``)."""
    cause = diagnosis.cause
    if cause is not None and cause.name == planted.name:
        return "right"
    if not diagnosis.explanations:
        return "abstained"
    named = diagnosis.explanations if cause is None else [cause]
    others = [candidate for candidate in named if candidate.name != planted.name]
    if all(
        are_equivalent(
            problem, planted, seqs, other.defect, other.scope.sequences if other.scope else ()
        )
        for other in others
    ):
        return "equivalent"
    return "undecided" if cause is None else "wrong"


def _false_alarms(
    rng: random.Random, sound: int, on_step: Callable[[str, int, int], None]
) -> list[Case]:
    """Return the Cases of ``sound`` correct runs for which the diagnosis reports an error."""
    alarms: list[Case] = []
    done = 0
    while done < sound:
        on_step("sound", done, sound)
        case, lab = random_case(rng), Lab()
        try:
            output = lab.output(case)
        except KernelRejected:
            continue
        done += 1
        if diagnose(case, output, lab=lab, propose=False).is_wrong:
            alarms.append(case)
    return alarms


def _figures(done: list[Trial]) -> dict[str, Any]:
    distinguishable = [trial for trial in done if trial.distinguishable]
    matrix: dict[str, dict[str, int]] = {}
    for trial in done:
        row = matrix.setdefault(trial.planted, {})
        row[trial.found] = row.get(trial.found, 0) + 1
    seconds = sorted(trial.seconds for trial in done)
    num_right = sum(trial.named == "right" for trial in distinguishable)
    return {
        "trials": len(done),
        "distinguishable": len(distinguishable),
        "top_1": num_right / max(1, len(distinguishable)),
        "named": dict(Counter(trial.named for trial in done)),
        "named_distinguishable": dict(Counter(trial.named for trial in distinguishable)),
        "without": dict(Counter(trial.without for trial in done)),
        "false_explanations": [trial.to_dict() for trial in done if trial.named == "wrong"],
        "matrix": matrix,
        "median_seconds": seconds[len(seconds) // 2] if seconds else 0.0,
        "most_seconds": seconds[-1] if seconds else 0.0,
        "missed": [trial.to_dict() for trial in distinguishable if trial.named != "right"],
        "without_wrong": [trial.to_dict() for trial in done if trial.without == "wrong"],
    }
