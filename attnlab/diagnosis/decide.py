"""Judgement: the suspects heard on the evidence, and what follows from it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.contracts.contract import contract, unwritten_rows
from attnlab.contracts.violations import Breach, Breaches
from attnlab.defects import Defect
from attnlab.defects.problem import Scene
from attnlab.diagnosis.candidates import Confirmed, Suspect, confirm, is_by_chance, screen
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.locate import Survey
from attnlab.diagnosis.reruns import rows_equal
from attnlab.diagnosis.row_sample import Sample, choose

_VERDICTS = ("explains", "less likely", "excluded by place", "excluded by value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All that is known before the suspects are heard."""

    scene: Scene
    output: torch.Tensor
    found: Survey
    breaches: Sequence[Breach]
    unwritten: torch.Tensor
    unwritten_by: str


def gather(
    scene: Scene, output: torch.Tensor, found: Survey, breaches: Sequence[Breach]
) -> Evidence:
    """Return the evidence, with the rows that nobody wrote by the best means there is without a run."""
    if scene.before is not None and _is_telling(scene.before):
        same = rows_equal(output, scene.before)
        unwritten, how = torch.nonzero(same).flatten(), "they hold what the buffer held"
    else:
        terms = [contract(name, scene.setting, scene.call.op) for name in scene.kernels]
        nobody = unwritten_rows(terms, scene.call) & found.touched.any(1)
        unwritten, how = torch.nonzero(nobody).flatten(), "by the kernels' contracts"
    return Evidence(
        scene=scene,
        output=output,
        found=found,
        breaches=breaches,
        unwritten=unwritten,
        unwritten_by=how if len(unwritten) else "",
    )


def _is_telling(before: torch.Tensor) -> bool:
    """Answer whether a buffer's contents give a row away that kept them: zeros and NaN do not."""
    return bool(before.isfinite().all()) and bool(before.count_nonzero() == before.numel())


def judge(evidence: Evidence, catalogue: Sequence[Defect], heads: range | None) -> Diagnosis:
    """Hear the suspects and return the verdict."""
    scene, found, output = evidence.scene, evidence.found, evidence.output
    facts = _facts(evidence)
    if not bool(found.touched.any()):
        return Diagnosis(status="nothing wrong", **facts)  # type: ignore[arg-type]
    kinds = {breach.kind for breach in evidence.breaches if breach.effect == "silent"}
    left = found.touched_rows[~torch.isin(found.touched_rows, evidence.unwritten)]
    known = any(defect.name == "rows_never_written" for defect in catalogue)
    if len(left) == 0 and scene.before is None and known:
        return _never_written(evidence, catalogue, kinds, facts, heads)
    ignore = evidence.unwritten[
        : len(evidence.unwritten) if scene.before is None and len(left) else 0
    ]
    sample = choose(scene, found, ignore, heads)
    heard = screen(scene, output, sample.first, catalogue)
    heard, candidates = _weigh(evidence, sample, heard, kinds)
    cause = decided(candidates)
    if len(ignore) and cause is not None:
        cause, candidates = None, []  # rows are unwritten besides: one defect does not explain both
    status = "unexplained" if not candidates else "ambiguous" if cause is None else "explained"
    return Diagnosis(
        status=status,
        cause=cause,
        candidates=candidates,
        suspects=heard,
        looked_at=(sum(len(spot.tokens) for spot in sample.many), len(output)),
        **facts,  # type: ignore[arg-type]
    )


def _facts(evidence: Evidence) -> dict[str, object]:
    """Return the fields of a Diagnosis that do not depend on the suspects."""
    found, scene = evidence.found, evidence.scene
    num_heads = found.ratio.shape[1]
    place, largest = None, 0.0
    if bool(found.touched.any()):
        worst = int(found.ratio.argmax())
        row, head = divmod(worst, num_heads)
        spot = scene.spot_of_row(row, torch.tensor([head]))
        place = {"seq": spot.seq, "token": int(spot.tokens[0]), "row": row, "head": head}
        largest = float(found.error[row, head])
    return {
        "wrong_rows": len(found.touched_rows),
        "wrong_heads": int(found.touched.any(0).sum()),
        "place": place,
        "largest": largest,
        "unwritten": evidence.unwritten.tolist(),
        "unwritten_by": evidence.unwritten_by,
        "breaches": Breaches(evidence.breaches),
    }


def _never_written(
    evidence: Evidence,
    catalogue: Sequence[Defect],
    kinds: set[str],
    facts: dict[str, object],
    heads: range | None,
) -> Diagnosis:
    """Return the diagnosis where all wrong rows are rows that nobody wrote."""
    sample = choose(evidence.scene, evidence.found, torch.arange(0), heads)
    heard = screen(evidence.scene, evidence.output, sample.first, catalogue)
    known = next(defect for defect in catalogue if defect.name == "rows_never_written")
    own = [suspect for suspect in heard if suspect.name == known.name]
    rows = evidence.unwritten.tolist()
    seqs = {evidence.scene.spot_of_row(row, torch.arange(0)).seq for row in rows}
    cause = own[0] if own else _unheard(known, evidence)
    cause = dataclasses.replace(
        cause,
        verdict="explains",
        scope="sequences " + ", ".join(map(str, sorted(seqs)[:8])),
        rows=len(evidence.found.touched_rows),
        linked=_linked(known, kinds),
    )
    others = [
        dataclasses.replace(suspect, verdict="less likely")
        if suspect.verdict == "explains"
        else suspect
        for suspect in heard
        if suspect.name != known.name
    ]
    return Diagnosis(
        status="explained",
        cause=cause,
        candidates=[cause],
        suspects=_sorted([cause, *others]),
        **facts,  # type: ignore[arg-type]
    )


def _unheard(defect: Defect, evidence: Evidence) -> Suspect:
    """Return rows never written as a suspect where the buffer is not known: any size is theirs."""
    size = float(evidence.found.error[evidence.found.touched].max())
    return Suspect(
        name=defect.name,
        text=defect.text,
        seen_in=defect.seen_in,
        verdict="explains",
        predicted=size,
        observed=size,
        residual=0.0,
        ratio=0.0,
        defect=defect,
    )


def _weigh(
    evidence: Evidence, sample: Sample, heard: Sequence[Suspect], kinds: set[str]
) -> tuple[list[Suspect], list[Suspect]]:
    """Confirm those that survived, and set aside what is less likely than the best of them."""
    left = [suspect for suspect in heard if suspect.verdict == "explains"]
    confirmed = confirm(evidence.scene, evidence.output, sample, evidence.found, left)
    good = [one for one in confirmed if one.suspect.verdict == "explains"]
    good.sort(key=lambda one: one.squares / max(1, one.freedom))
    kept: list[Confirmed] = [one for one in good if one is good[0] or is_by_chance(good[0], one)]
    told = {
        one.suspect.name: dataclasses.replace(
            one.suspect,
            verdict="explains" if one in kept else "less likely",
            linked=_linked(one.suspect.defect, kinds),
        )
        if one.suspect.verdict == "explains"
        else one.suspect
        for one in confirmed
    }
    everyone = [told.get(suspect.name, suspect) for suspect in heard]
    return _sorted(everyone), [told[one.suspect.name] for one in kept]


def _linked(defect: Defect, kinds: set[str]) -> tuple[str, ...]:
    return tuple(kind for kind in defect.links if kind in kinds)


def _sorted(suspects: Sequence[Suspect]) -> list[Suspect]:
    return sorted(suspects, key=lambda one: (_VERDICTS.index(one.verdict), one.ratio))


def decided(candidates: Sequence[Suspect]) -> Suspect | None:
    """Return the one candidate; or, among several, the one that a breach of the call would cause.

    Where breaches would cause several, the one goes before that says of itself which rows it touches,
    instead of being fitted to the rows that are wrong.
    """
    if len(candidates) == 1:
        return candidates[0]
    linked = [suspect for suspect in candidates if suspect.linked]
    widest = min((_width(suspect.scope) for suspect in linked), default=0)
    fewest = [suspect for suspect in linked if _width(suspect.scope) == widest]
    return fewest[0] if len(fewest) == 1 else None


def _width(scope: str) -> int:
    """Return how much of a scope was fitted: nothing, the kernel, or the sequences."""
    return 0 if scope == "all" else 1 if scope in ("decode", "prefill") else 2
