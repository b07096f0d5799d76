"""Diagnosing an output: by place, by value and by size, and abstaining where that does not decide."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.breaches import Breach, check
from attnlab.call import KernelCall
from attnlab.case import CACHE_WRITE, Case
from attnlab.contracts import contract, unwritten_rows
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.scene import Scene
from attnlab.diagnosis import Diagnosis
from attnlab.dispatch import Setting, decide
from attnlab.errors import InvalidCall, KernelRejected
from attnlab.knobs import refuse
from attnlab.probes import Rerun, probe, rows_equal
from attnlab.run import Lab
from attnlab.separate import separate, spots_of
from attnlab.survey import Survey, survey
from attnlab.suspects import (
    Confirmed,
    Sample,
    Suspect,
    choose,
    confirm,
    fit,
    is_by_chance,
    screen,
)

_TWO_RUNS = "two runs with other contents of the buffer"
_VERDICTS = ("explains", "less likely", "excluded by place", "excluded by value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Evidence:
    """All that is known before the suspects are heard."""

    scene: Scene
    output: torch.Tensor
    found: Survey
    breaches: Sequence[Breach]
    unwritten: torch.Tensor
    unwritten_by: str


def diagnose(
    case: Case,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    rerun: Rerun | None = None,
    catalogue: Sequence[Defect] = CATALOGUE,
    propose: bool = True,
) -> Diagnosis:
    """Return what explains an output of the Case.

    - ``output``: [num_tokens, num_heads, head_size], of any origin; None runs the Case.
    - ``rerun``: runs a changed Case on whatever gave ``output``, to tell rows that nobody wrote, and
      rows that read slots that nobody wrote. With ``output`` None it is the lab; without it nothing
      is run again.
    - ``propose``: look for a Case that tells apart what this one does not.

    Raises InvalidCall for an output of another shape. A Case that its kernel refuses is "rejected".
    """
    began = time.perf_counter()
    if case.op == CACHE_WRITE:
        refuse("op", "an attention op to be diagnosed", case.op)
    lab = lab or Lab()
    if output is None:
        rerun = rerun or _on_cpu(lab.output)
        try:
            output = rerun(case)
        except KernelRejected as rejection:
            return _rejected(lab, case, str(rejection))
    lab = _by_hand(lab, case)
    first = _look(lab, case, output.cpu(), catalogue)
    told = first.told
    if rerun is not None and told.is_wrong:
        probes = probe(rerun, case, output.cpu())
        told = _again(lab, case, first, rerun, catalogue)
        told = dataclasses.replace(
            told,
            unwritten=probes.unwritten.tolist(),
            unwritten_by=_TWO_RUNS if len(probes.unwritten) else "",
            by_slots=probes.by_slots.tolist(),
        )
    told = dataclasses.replace(told, tolerance=case.tolerance)
    if propose and len(told.candidates) > 1:
        pair = tuple(suspect.defect for suspect in told.candidates[:2])
        told = dataclasses.replace(told, separation=separate(case, pair[0], pair[1]))
    return dataclasses.replace(told, seconds=time.perf_counter() - began)


def _on_cpu(run: Rerun) -> Rerun:
    """Return ``run`` with its output brought to the CPU."""
    return lambda case: run(case).cpu()


def _by_hand(lab: Lab, case: Case) -> Lab:
    """Return a Lab whose tensors lie on the CPU, where the suspects are computed."""
    return lab if lab.where(case) == "cpu" else Lab(source=lab.source, device="cpu")


def _rejected(lab: Lab, case: Case, text: str) -> Diagnosis:
    """Return the diagnosis of a Case that its kernel refuses: the breaches say why."""
    provenance = lab.cache(case).provenance
    breaches = check(lab.call(case), Setting.of(case), decide(case).kernels, provenance)
    return Diagnosis(status="rejected", rejection=text, breaches=breaches)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """A look at one output, and the scene that it was held against."""

    scene: Scene
    told: Diagnosis


def _look(lab: Lab, case: Case, output: torch.Tensor, catalogue: Sequence[Defect]) -> _Look:
    """Return what one output of a Case tells."""
    call = lab.call(case)
    _check_output(output, call.output)
    scene = Scene.of_case(case, lab.batch(case), call, call.output)
    breaches = check(call, scene.setting, scene.kernels, lab.cache(case).provenance)
    found = survey(scene, output, case.query_heads, lab.reference(case))
    evidence = _evidence(scene, output, found, breaches)
    return _Look(scene=scene, told=_judge(evidence, catalogue, case.query_heads))


def _again(
    lab: Lab, case: Case, first: _Look, rerun: Rerun, catalogue: Sequence[Defect]
) -> Diagnosis:
    """Run a Case that hides its numbers behind NaN or a plain buffer again with finite garbage there.

    NaN tells a place and nothing more. Where the garbage shows, it decides; where it does not, what
    remains are the candidates that it would not show either.
    """
    empty = "garbage" if case.empty == "nan" else case.empty
    finite = case.replace(empty=empty, output="recycled")
    if finite == case:
        return first.told
    second = _look(lab, finite, rerun(finite), catalogue)
    if second.told.is_wrong:
        return second.told
    hidden = [s for s in first.told.candidates if _is_hidden(second.scene, s)]
    cause = _cause(hidden)
    status = "unexplained" if not hidden else "ambiguous" if cause is None else "explained"
    return dataclasses.replace(first.told, status=status, cause=cause, candidates=hidden)


def _is_hidden(scene: Scene, suspect: Suspect) -> bool:
    """Answer whether a suspect changes nothing but rounding in another scene."""
    if not suspect.defect.applies(scene):
        return True
    for spot in spots_of(scene):
        told, right = suspect.defect.compute(scene, spot), scene.right(spot)
        if bool((fit(told.output, right, 1).ratio > 1).any()):
            return False
    return True


def diagnose_call(
    call: KernelCall,
    setting: Setting,
    kernels: Sequence[str],
    *,
    output: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    catalogue: Sequence[Defect] = CATALOGUE,
) -> Diagnosis:
    """Return what explains the output of a call that was captured elsewhere.

    The context is taken to be in the cache as it was meant, new tokens to be the arguments. ``output``
    is the call's own where none is given; ``before`` what the buffer held, where that is known.
    """
    began = time.perf_counter()
    output = call.output if output is None else output
    _check_output(output, call.output)
    scene = dataclasses.replace(Scene.of_call(call, setting, kernels), before=before)
    breaches = check(call, setting, kernels)
    evidence = _evidence(scene, output, survey(scene, output), breaches)
    told = _judge(evidence, catalogue, None)
    return dataclasses.replace(told, seconds=time.perf_counter() - began)


def _check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall where an output is not of the call's shape or dtype."""
    for name in ("shape", "dtype"):
        told, wanted = getattr(output, name), getattr(expected, name)
        if told != wanted:
            words = [str(tuple(one)) if name == "shape" else str(one) for one in (wanted, told)]
            raise InvalidCall(f"output must have {name} {words[0]}, got {words[1]}")


def _evidence(
    scene: Scene, output: torch.Tensor, found: Survey, breaches: Sequence[Breach]
) -> _Evidence:
    """Return the evidence, with the rows that nobody wrote by the best means there is without a run."""
    if scene.before is not None and _is_telling(scene.before):
        same = rows_equal(output, scene.before)
        unwritten, how = torch.nonzero(same).flatten(), "they hold what the buffer held"
    else:
        terms = [contract(name, scene.setting, scene.call.op) for name in scene.kernels]
        nobody = unwritten_rows(terms, scene.call) & found.touched.any(1)
        unwritten, how = torch.nonzero(nobody).flatten(), "by the kernels' contracts"
    return _Evidence(
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


def _judge(evidence: _Evidence, catalogue: Sequence[Defect], heads: range | None) -> Diagnosis:
    """Hear the suspects and return the verdict."""
    scene, found, output = evidence.scene, evidence.found, evidence.output
    facts = _facts(evidence)
    if not bool(found.touched.any()):
        return Diagnosis(status="nothing wrong", **facts)  # type: ignore[arg-type]
    kinds = {breach.kind for breach in evidence.breaches if breach.effect == "silent"}
    left = found.touched_rows[~torch.isin(found.touched_rows, evidence.unwritten)]
    if len(left) == 0 and scene.before is None:
        return _never_written(evidence, catalogue, kinds, facts, heads)
    ignore = evidence.unwritten if scene.before is None else evidence.unwritten[:0]
    sample = choose(scene, found, ignore, heads)
    heard = screen(scene, output, sample.first, catalogue)
    heard, candidates = _weigh(evidence, sample, heard, kinds)
    cause = _cause(candidates)
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


def _facts(evidence: _Evidence) -> dict[str, object]:
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
        "breaches": list(evidence.breaches),
    }


def _never_written(
    evidence: _Evidence,
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
    seqs = {
        evidence.scene.spot_of_row(row, torch.arange(0)).seq for row in evidence.unwritten.tolist()
    }
    worst = facts["largest"]
    assert isinstance(worst, float)
    cause = (
        own[0]
        if own
        else Suspect(
            name=known.name,
            text=known.text,
            seen_in=known.seen_in,
            verdict="explains",
            predicted=worst,
            observed=worst,
            residual=0.0,
            ratio=0.0,
            defect=known,
        )
    )
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


def _weigh(
    evidence: _Evidence, sample: Sample, heard: Sequence[Suspect], kinds: set[str]
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


def _cause(candidates: Sequence[Suspect]) -> Suspect | None:
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
