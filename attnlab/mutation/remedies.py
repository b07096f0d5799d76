"""Remedies: what a test's data, cache and tolerance would have to be for a mutant to fall."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.defects import Defect
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.distinguish import problem_of, row_slices_of, separate
from attnlab.lab.lab import Lab
from attnlab.mutation.mutants import RIGHT

SEQS, TOKENS, HEADS = 4, 4, 4  # the sample; a decode has one token
_SHORT = {  # contexts so short that one key counts, and longer ones for blocks and partitions
    "query_lens": (1, 1, 17, 40),
    "ctx_lens": (3, 300, 260, 0),
    "max_query_len": None,
    "max_seq_len": None,
    "block_table": None,
    "num_blocks": None,
    "max_blocks_per_seq": None,
}
Sample = list[tuple[RowSlice, Predicted]]  # spots, and the right output there


def take(problem: Problem) -> Sample:
    """Return rows and heads to look at, with the right output of each."""
    row_slices = row_slices_of(problem, TOKENS, HEADS, SEQS)
    return [(row_slice, problem.right(row_slice)) for row_slice in row_slices]


def score(problem: Problem, sample: Sample, mutant: Defect, case: Case) -> tuple[float, float]:
    """Return the largest effect of a mutant and the largest share of what the test allows."""
    effect = margin = 0.0
    for row_slice, right in sample:
        wrong = mutant.compute(problem, row_slice).output
        if not bool(wrong.isfinite().all()):
            return float("inf"), float("inf")
        moved = (wrong - right.output).abs()
        allowed = case.tolerance + case.rtol * right.output.abs()
        share = torch.where(moved == 0, 0.0, moved / allowed)
        effect, margin = max(effect, float(moved.max())), max(margin, float(share.max()))
    return effect, margin


def derived_tolerance(sample: Sample) -> float:
    """Return the least atol under which no rounding of the kernels fails a test: the largest bound."""
    return max(float(right.noise.max()) for _, right in sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rung:
    """One set of changes of a test, and which mutants it kills."""

    changes: dict[str, Any]
    case: Case
    dead: frozenset[str]


def find_remedies(
    case: Case, alive: dict[str, Defect], on_step: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return for each survivor the cheapest change that kills it, and the least set that kills all."""
    rungs: list[_Rung] = []
    for changes in _ladder(case):
        on_step(changes_text(changes))
        changed = case.replace(**{n: v for n, v in changes.items() if n != "atol"})
        problem = problem_of(changed)
        sample = take(problem)
        changed = changed.replace(atol=derived_tolerance(sample))
        here = {name: mutant for name, mutant in alive.items() if mutant.applies(problem)}
        dead = {n for n, mutant in here.items() if score(problem, sample, mutant, changed)[1] > 1}
        gone = alive.keys() - here.keys()  # what cannot be there any more
        told = {**changes, "atol": changed.atol}
        rungs.append(_Rung(changes=told, case=changed, dead=frozenset(dead | gone)))
        if len(rungs[-1].dead) == len(alive):
            break
    best = max(rungs, key=lambda rung: len(rung.dead))
    cures = {
        name: next(rung.changes for rung in rungs if name in rung.dead)
        for name in alive
        if any(name in rung.dead for rung in rungs)
    }
    on_step("what no data can show")
    same = {name for name in alive.keys() - cures.keys() if is_equivalent(case, alive[name])}
    on_step("the models under the proposal")
    return cures, {
        "equivalent": same,
        "proposal": best.changes,
        "left": sorted(alive.keys() - best.dead - same),
        "models_pass": Lab().run(best.case).status == "match",
    }


def is_equivalent(case: Case, mutant: Defect) -> bool:
    """Answer whether a mutant is the right thing under all changes of the Case that are tried."""
    stored = case.replace(cache_write="scaled")
    return separate(stored, mutant, RIGHT, same_kernels=False).case is None


def _ladder(case: Case) -> Iterator[dict[str, Any]]:
    """Yield changes of a test, from the cheapest to all of them.

    Each comes with an atol that is derived, the least under which sound kernels pass; and, since under
    it the decode kernel must find what it reads, with the newest token in the cache.
    """
    atol: dict[str, Any] = {"atol": None}
    if case.staging.fill == "context_only" and decide(case).decode is not None:
        atol = {"fill": "decode_rows", **atol}
    data: dict[str, Any] = {"distribution": "normal"}
    store: dict[str, Any] = {}
    if case.is_fp8:
        store = {"cache_write": "scaled", "k_scale": 0.5, "v_scale": 0.25, "x": None}
    own = case.sm_scale is None and case.release == "0.11.2"
    scale = {"sm_scale": case.head_size**-0.5} if own else {}
    terms = decide(case).contracts(Target.of(case), case.op)
    leaks = any(one.reads_tail != "nothing" for one in terms)
    poison = {"empty_slots": "garbage" if leaks else "nan"}
    steps: list[dict[str, Any]] = [{}, data, {**data, **poison}]
    if store:
        steps += [{**store, **data}, {**store, **data, **poison}]
    steps.append({**steps[-1], **_SHORT})
    seen: list[dict[str, Any]] = []
    for step in steps:
        changed = {n: v for n, v in {**scale, **step}.items() if getattr(case, n) != v}
        if changed not in seen:
            seen.append(changed)
            yield {**changed, **atol}


def changes_text(changes: dict[str, Any]) -> str:
    """Return changes in words: "data=normal, atol=0.0021"."""
    return ", ".join(_change_text(name, value) for name, value in changes.items())


def _change_text(name: str, value: object) -> str:
    if name == "atol" and value is None:
        return "atol derived"
    return f"{name}={value:.2g}" if isinstance(value, float) else f"{name}={value}"
