"""Power of a test: which defects it would notice with its data, tolerance, cache and buffer.

Each defect of the catalogue is a mutant of the right output. It is killed where some element leaves the
test's tolerance, survives where none does, and is equivalent where no data would show it. Nothing is run:
the mutants are computed, on a sample of each sequence's rows and heads.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case import CACHE_WRITE, Case
from attnlab.contracts import contract
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.defect import always
from attnlab.defects.scene import Scene, Spot
from attnlab.defects.sight import Mixed
from attnlab.diagnosis import number
from attnlab.dispatch import Setting, decide
from attnlab.knobs import refuse
from attnlab.run import Lab
from attnlab.separate import scene_of, separate, spots_of

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
NINE = (  # the mutants of a reference that the two figures of this project's first study counted
    "scale_doubled",
    "scale_missing",
    "scores_ignored",
    "causal_plus_one",
    "causal_minus_one",
    "keys_of_next_sequence",
    "new_tokens_only",
    "values_of_next_sequence",
    "random_noise",
)


def _noise(scene: Scene, spot: Spot) -> Mixed:
    """Return random numbers of the size of the right output."""
    right = scene.right(spot)
    generator = torch.Generator().manual_seed(int(spot.seq))
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    size = right.output.square().mean().sqrt()
    return Mixed(output=drawn * size.clamp(min=scene.rounding(spot.seq).step), noise=right.noise)


def _standard_noise(scene: Scene, spot: Spot) -> Mixed:
    generator = torch.Generator().manual_seed(int(spot.seq))
    right = scene.right(spot)
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    return Mixed(output=drawn, noise=right.noise)


def _garbage(name: str, text: str, compute: Callable[[Scene, Spot], Mixed]) -> Defect:
    return Defect(
        name=name,
        family="rows",
        text=text,
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=compute,
        applies=always,
    )


_RIGHT = _garbage("right", "the right output", lambda scene, spot: scene.right(spot))
MUTANTS: tuple[Defect, ...] = (
    *(defect for defect in CATALOGUE if not defect.harmless),
    _garbage("noise_of_its_size", "random numbers, as large as the right output", _noise),
    _garbage("random_noise", "random numbers of N(0, 1)", _standard_noise),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """What a test does with one defect.

    - ``outcome``: "killed", "survived" or "equivalent".
    - ``effect``: how far it moves any element of the sample; ``margin``: the same in units of what the
      test allows there, above 1 it is seen; infinite for NaN.
    - ``remedy``: the cheapest change of the test that kills it, or None.
    """

    name: str
    text: str
    outcome: str
    effect: float
    margin: float
    remedy: dict[str, Any] | None = None

    @property
    def remedy_text(self) -> str:
        """Return the remedy in words; "" where none is needed."""
        if self.outcome != "survived":
            return ""
        if self.remedy is None:
            return "none found"
        return changes_text(self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a test would notice.

    - ``proposal``: the least set of changes under which every mutant dies that any data can show, or
      None; ``models_pass``: whether the lab's models still pass then.
    - ``sampled``: rows that were looked at, of how many.
    """

    case: Case
    mutants: list[Mutant]
    proposal: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    models_pass: bool | None = None
    sampled: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def of(self, outcome: str) -> list[Mutant]:
        """Return the mutants with an outcome."""
        return [mutant for mutant in self.mutants if mutant.outcome == outcome]

    @property
    def survivors(self) -> list[Mutant]:
        """Return what the test would not notice."""
        return self.of("survived")

    def named(self, names: Sequence[str]) -> list[Mutant]:
        """Return the mutants of these names, in their order, those that the test can have."""
        by_name = {mutant.name: mutant for mutant in self.mutants}
        return [by_name[name] for name in names if name in by_name]

    def sentences(self) -> list[str]:
        """Return what a person wants to know, a sentence each."""
        killed, survived, same = (len(self.of(o)) for o in ("killed", "survived", "equivalent"))
        told = [
            f"{killed} killed, {survived} survived, {same} equivalent: no data can show these "
            f"(computed on {self.sampled[0]} of {self.sampled[1]} rows, {HEADS} heads)"
        ]
        if self.proposal is not None and survived:
            passes = {True: "the models pass", False: "the models do not pass", None: "not run"}
            rest = f"; {', '.join(self.left)} survive" if self.left else "; all of them die"
            told.append(f"with {changes_text(self.proposal)}{rest}, and {passes[self.models_pass]}")
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the power as JSON-able values."""
        rows = [
            {name: number(v) if isinstance(v, float) else v for name, v in row.items()}
            for row in map(dataclasses.asdict, self.mutants)
        ]
        return {
            "case": self.case.changes(),
            "mutants": rows,
            "counts": {o: len(self.of(o)) for o in ("killed", "survived", "equivalent")},
            "proposal": self.proposal,
            "left": self.left,
            "models_pass": self.models_pass,
            "sampled": list(self.sampled),
            "sentences": self.sentences(),
            "seconds": self.seconds,
        }

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        head = (
            "<tr><th>defect</th><th>outcome</th><th>effect</th><th>margin</th><th>remedy</th></tr>"
        )
        rows = "".join(
            f"<tr><td>{m.name}</td><td>{m.outcome}</td><td>{m.effect:.3g}</td>"
            f"<td>{m.margin:.3g}</td><td>{m.remedy_text}</td></tr>"
            for m in self.mutants
        )
        lines = "".join(f"<p>{sentence}</p>" for sentence in self.sentences())
        return f"<table>{head}{rows}</table>{lines}"


def power(
    case: Case,
    *,
    mutants: Sequence[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
) -> Power:
    """Return which defects a test with the Case's data and tolerance would notice.

    With ``remedies``, look for the cheapest change that kills each survivor and for the least set of
    changes that kills all, and run the models under it.
    """
    began = time.perf_counter()
    if case.op == CACHE_WRITE:
        refuse("op", "an attention op to be scored", case.op)
    on_step("the test's own data")
    scene = scene_of(case)
    spots = _sample(scene)
    scores = {one.name: _score(scene, spots, one, case) for one in mutants if one.applies(scene)}
    known = [one for one in mutants if one.name in scores]
    alive = {one.name: one for one in known if scores[one.name][1] <= 1}
    sampled = (sum(len(spot.tokens) for spot, _ in spots), case.lengths.num_tokens)
    told: dict[str, Any] = {}
    cures: dict[str, dict[str, Any]] = {}
    if remedies and alive:
        cures, told = _remedies(case, alive, on_step)
    rows = [
        Mutant(
            name=one.name,
            text=one.text,
            outcome="killed"
            if one.name not in alive
            else "equivalent"
            if one.name in told.get("equivalent", ())
            else "survived",
            effect=scores[one.name][0],
            margin=scores[one.name][1],
            remedy=cures.get(one.name),
        )
        for one in known
    ]
    return Power(
        case=case,
        mutants=sorted(rows, key=lambda row: -row.margin),
        proposal=told.get("proposal"),
        left=told.get("left", []),
        models_pass=told.get("models_pass"),
        sampled=sampled,
        seconds=time.perf_counter() - began,
    )


Sample = list[tuple[Spot, Mixed]]  # spots, and the right output there


def _sample(scene: Scene) -> Sample:
    """Return rows and heads to look at, with the right output of each."""
    spots = spots_of(scene, TOKENS, HEADS, SEQS)
    return [(spot, scene.right(spot)) for spot in spots]


def _score(scene: Scene, sample: Sample, mutant: Defect, case: Case) -> tuple[float, float]:
    """Return the largest effect of a mutant and the largest share of what the test allows."""
    effect = margin = 0.0
    for spot, right in sample:
        wrong = mutant.compute(scene, spot).output
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


def _remedies(
    case: Case, alive: dict[str, Defect], on_step: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return for each survivor the cheapest change that kills it, and the least set that kills all."""
    rungs: list[_Rung] = []
    for changes in _ladder(case):
        on_step(changes_text(changes))
        changed = case.replace(**{n: v for n, v in changes.items() if n != "atol"})
        scene = scene_of(changed)
        sample = _sample(scene)
        changed = changed.replace(atol=derived_tolerance(sample))
        here = {name: mutant for name, mutant in alive.items() if mutant.applies(scene)}
        dead = {n for n, mutant in here.items() if _score(scene, sample, mutant, changed)[1] > 1}
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
    return separate(stored, mutant, _RIGHT, same_kernels=False).case is None


def _ladder(case: Case) -> Iterator[dict[str, Any]]:
    """Yield changes of a test, from the cheapest to all of them.

    Each comes with an atol that is derived, the least under which sound kernels pass; and, since under
    it the decode kernel must find what it reads, with the newest token in the cache.
    """
    atol: dict[str, Any] = {"atol": None}
    if case.staging.fill == "context_only" and decide(case).decode is not None:
        atol = {"fill": "decode_rows", **atol}
    data: dict[str, Any] = {"data": "normal"}
    store: dict[str, Any] = {}
    if case.is_fp8:
        store = {"cache_write": "scaled", "k_scale": 0.5, "v_scale": 0.25, "x": None}
    own = case.sm_scale is None and case.release == "0.11.2"
    scale = {"sm_scale": case.head_size**-0.5} if own else {}
    setting = Setting.of(case)
    terms = [contract(name, setting, case.op) for name in decide(case).kernels]
    leaks = any(one.reads_tail != "nothing" for one in terms)
    poison = {"empty": "garbage" if leaks else "nan"}
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
