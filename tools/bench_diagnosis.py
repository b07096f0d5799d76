"""Benchmark of the diagnosis: planted defects, the same without them among the candidates, correct runs."""

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fault_injection import (
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

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.case.shown import json_value
from attnlab.checker.case_run import versions
from attnlab.defects import DEFECTS, Defect
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tasks.run import TaskRun
from attnlab.tasks.store import ALL, Header
from attnlab.tasks.task import InProcess, Job, Outcome, Task

PLANTED, SOUND = "planted", "sound"
_COSTS = {PLANTED: 3.0, SOUND: 1.0}
_PATIENCE = 3  # Cases in which a defect may be invisible before the next one is planted


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

    def to_verdict(self) -> dict[str, Any]:
        """Return the trial as JSON-able values; :meth:`from_verdict` restores it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "case": self.case.changes()}

    @classmethod
    def from_verdict(cls, fields: Mapping[str, Any]) -> "Trial":
        """Return the trial of :meth:`to_verdict`."""
        return cls(**{**fields, "case": Case.from_dict(fields["case"])})


@dataclass(frozen=True, kw_only=True)
class DiagnoseJob(Job):
    """Runs trials; each draws its own numbers from the seed, its kind and its index."""

    seed: int

    def open(self) -> None:
        """Return no state: a trial shares nothing with others."""

    def run(self, state: None, payload: dict[str, Any]) -> dict[str, Any]:
        kind, index = payload["kind"], payload["index"]
        rng = random.Random(f"{self.seed}/{kind}/{index}")
        verdict = _planted(rng, index) if kind == PLANTED else _sound(rng)
        found: dict[str, Any] = json_value(verdict)
        return found


def diagnose_tasks(trials: int, sound: int) -> list[Task]:
    """Return a task for each planted defect, then one for each correct run."""
    counts = {PLANTED: trials, SOUND: sound}
    return [
        Task(key=f"{kind}/{i}", payload={"kind": kind, "index": i}, cost_s=_COSTS[kind])
        for kind, count in counts.items()
        for i in range(count)
    ]


def diagnose_header(trials: int, seed: int) -> Header:
    """Return the header of a store of the tasks."""
    return {
        "command": "bench diagnose",
        "options": {"trials": trials, "seed": seed},
        "versions": versions(),
        "shard": str(ALL),
    }


def bench_diagnose(
    trials: int = 500,
    sound: int = 500,
    seed: int = 1,
    on_step: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> dict[str, Any]:
    """Diagnose ``trials`` planted defects and ``sound`` correct runs, drawn from ``seed``.

    Returns :func:`figures_of` them.
    """
    tasks = diagnose_tasks(trials, sound)
    with InProcess() as engine:
        run = TaskRun(engine=engine, job=DiagnoseJob(seed=seed))
        run.run(tasks, lambda outcome: on_step("trials", len(run.outcomes), len(tasks)))
    return figures_of(tasks, run.outcomes, seed)


def figures_of(tasks: Sequence[Task], outcomes: Mapping[str, Outcome], seed: int) -> dict[str, Any]:
    """Return the figures of trials.

    - ``top_1``: share of the distinguishable planted defects that were named.
    - ``false_explanations``: trials whose cause gives another output than the planted defect.
    - ``alarms``: correct runs in which the diagnosis reports an error.
    - ``invisible``: planted defects that change nothing but rounding; they are not counted as trials.
    - ``failed``: trials without a verdict, each with the reason.
    """
    done: list[Trial] = []
    invisible, sound = 0, 0
    alarms, broken = list[dict[str, Any]](), dict[str, str]()
    for task in tasks:
        outcome = outcomes.get(task.key)
        if outcome is None or outcome.verdict is None:
            broken[task.key] = "it was not run" if outcome is None else outcome.text
        elif task.payload["kind"] == PLANTED:
            done.append(Trial.from_verdict(outcome.verdict["trial"]))
            invisible += outcome.verdict["invisible"]
        else:
            sound += 1
            alarms += [outcome.verdict["case"]] if outcome.verdict["alarm"] else []
    return {
        **_figures(done),
        "invisible": invisible,
        "sound": sound,
        "seed": seed,
        "alarms": alarms,
        "failed": broken,
    }


def _planted(rng: random.Random, index: int) -> dict[str, Any]:
    """Plant a defect in random Cases until one shows it; return that trial."""
    invisible = 0
    while True:
        trial = _trial(rng, index + invisible // _PATIENCE)
        if trial is not None:
            return {"trial": trial.to_verdict(), "invisible": invisible}
        invisible += 1


def _trial(rng: random.Random, turn: int) -> Trial | None:
    """Run a trial of the first applicable defect from number ``turn`` of the catalogue on.

    Returns None if the Case's kernel rejects it or the defect changes nothing but rounding.
    """
    case, lab = random_case(rng), Lab()
    try:
        problem, output = correct_run(lab, case)
    except KernelRejected:
        return None
    choices = applicable(problem)
    names = list(DEFECTS)
    defect = min(choices, key=lambda choice: (names.index(choice.name) - turn) % len(names))
    rows = random_rows(problem, rng)
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


def _sound(rng: random.Random) -> dict[str, Any]:
    """Diagnose a correct run; return its Case and whether the diagnosis reports an error."""
    while True:
        case, lab = random_case(rng), Lab()
        try:
            output = lab.output(case)
        except KernelRejected:
            continue
        found = diagnose(case, output, lab=lab, propose=False)
        return {"case": case.changes(), "alarm": found.is_wrong}


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
