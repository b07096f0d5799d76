"""Locate a fault in the source of an interpreted Triton kernel: lines, ranked, each with its reason.

The evidence, the strongest first:

1. "edit": a small change of one expression makes every wrong element of the output right and no right one
   wrong, here and in a second case.
2. "spectrum": programs with wrong elements execute the line, or reach it from another one, more often than
   programs with right ones do, by Ochiai's coefficient.
3. "outside": the line accesses memory outside its tensors, or feeds such an access.
4. "part": a change makes some of the wrong elements of a program right.
5. "load": the line loads a slot that has a weight although it must not count, by the X-ray.
6. "role": the line computes what the X-ray finds wrong, by the data flow of the source: a backward slice.

If there is no evidence, no line is stated.
"""

import ast
import difflib
import linecache
import re
from collections.abc import Iterable, Iterator

import torch

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.access_lines import lines_of_accesses
from attnlab.diagnosis.kernel_location import KernelLine, KernelLocation
from attnlab.diagnosis.kernel_trials import COSTS, FULL, Limit, Repair, Trials
from attnlab.diagnosis.repair_check import is_right
from attnlab.diagnosis.second_case import second_case
from attnlab.diagnosis.spectrum import comparable_units, excess, is_wrong, spectrum
from attnlab.diagnosis.trial_target import target_of
from attnlab.diagnosis.xray_lines import lines_of_xray
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import uncontrolled
from attnlab.kernels.triton.probe import Line, Probe, probing
from attnlab.kernels.triton.program_filter import Subset, estimated_s
from attnlab.kernels.triton.replay import Unit
from attnlab.lab.lab import Lab
from attnlab.weights.other_case import other_case
from attnlab.weights.xray import XRay

_MOST_LINES = 25
_WORD = re.compile(r"[^\W_]+|[^\w\s(),]+")
_LEAST_EXCESS = 0.05
# Suspicion of the first line by accesses or the X-ray, in units of the cost of an edit, and by how much that
# of the next lines is less. Costly edits of the first lines come before cheap ones of the others.
_FIRST, _STEP = 1.3, 0.03
_MOST_SUSPICIOUS = 40  # lines
_MOST_CASE_S = 4.0  # estimated time of a case that is small enough
_EVIDENCE = {
    "edit": 1.0, "spectrum": 0.6, "outside": 0.5, "part": 0.45, "load": 0.4, "role": 0.3,
}  # fmt: skip


Ranked = tuple[Line, str, float, str]  # line, evidence, score, reason


def locate_lines(
    lab: Lab, case: Case, found: XRay | None = None, limit: Limit = FULL
) -> KernelLocation:
    """Return the lines that may hold the fault of the kernels of a Case, which run in the lab.

    ``found``: an X-ray of the same kernels, if there is one. Raises what a run of the Case raises.
    """
    why = why_unavailable(lab.backend(case))
    small = case if why else locatable_case(lab, case)
    if why or small is None:
        return KernelLocation(why_none=why or "no case that is small enough has a wrong output")
    with uncontrolled(), probing(Probe(records=True)) as probe:
        ran = lab.run(small)
    if not probe.launches:
        return KernelLocation(why_none="no Triton kernel was launched")
    target = target_of(lab, small, ran, probe.launches)
    if target.replay.output is None:
        text = f"no tensor of the kernels was recognised as the output {tuple(ran.output.shape)}"
        return KernelLocation(why_none=f"{text}, so no program was examined")
    other = second_case(small)
    trials = Trials(
        replay=target.replay,
        judge=target.judge,
        right=target.right,
        holds=None if other is None else lambda repair: is_right(lab, other, repair) is True,
    )
    if not trials.suspects:
        return KernelLocation(why_none="no program of a Triton kernel writes a wrong row")
    return _located(lab, small, trials, found, limit)


def why_unavailable(backend: Backend) -> str:
    """Return why lines of a backend's kernels cannot be located, or ""."""
    if backend.device == "cuda":
        return "only Triton's interpreter records lines; the kernels ran on a GPU"
    if backend.name == "rocm":
        return (
            "only Triton's interpreter records lines; the kernels ran on the emulated ROCm device"
        )
    return "" if backend.traces_reads else f"{backend.name} has no Triton kernels"


def locatable_case(lab: Lab, case: Case) -> Case | None:
    """Return a Case with a wrong output that does not take long; None without one.

    It is the Case, or a smaller one. Unwritten memory holds finite numbers if the output is wrong then, too,
    so that a leak of such memory does not hide another fault.
    """
    for one in (case, _smaller(case)):
        if one is None or estimated_s(lab.call(one), decide(one).kernels, Subset()) > _MOST_CASE_S:
            continue
        for tried in (one.replace(empty_slots="zeros", output_init="zeros"), one):
            if is_right(lab, tried) is False:
                return tried
    return None


def _smaller(case: Case) -> Case | None:
    """Return a Case with few heads and other lengths for the same kernels."""
    few = case.replace(
        num_heads=min(case.num_heads, 2 * case.num_queries_per_kv), kv_head_range=None
    )
    return other_case(few)


def _layout(case: Case | None) -> Case | None:
    """Return a Case without what does not change the slots of the cache that a kernel must read."""
    return None if case is None else case.replace(empty_slots="zeros", output_init="zeros")


def _located(
    lab: Lab, case: Case, trials: Trials, found: XRay | None, limit: Limit
) -> KernelLocation:
    """Return the lines by all evidence."""
    units = comparable_units(trials.replay.units, trials.right)
    scores = spectrum(units, trials.right)
    is_same = found is not None and _layout(found.case) == _layout(case)
    by_xray = [
        *lines_of_accesses(trials, lab.run(case).outside),
        *lines_of_xray(trials, lab.call(case) if is_same else None, found),
    ]
    order = {line: at for at, line in enumerate(dict.fromkeys(line for line, _, _ in by_xray))}
    near = [line for line, at in order.items() if at < _MOST_SUSPICIOUS]

    def suspicion(line: Line) -> float:
        by_rule = max(0.0, _FIRST - _STEP * order[line]) if line in order else 0.0
        return by_rule + scores.get(line, 0.0) / 5

    trials.run(suspicion, near or scores, limit)
    ranked = [
        *_of_repairs(trials),
        *_of_spectrum(units, trials.right, scores),
        *(
            (line, kind, _EVIDENCE[kind] - 1e-3 * i, text)
            for i, (line, kind, text) in enumerate(by_xray)
        ),
    ]
    lines = _merged(ranked, scores)
    return KernelLocation(
        lines=lines,
        why_none="" if lines else _why_no_line(trials),
        repairs=preferred(trials.repairs),
        tried=trials.tried,
        programs=(len(trials.wrong_units), len(trials.replay.units)),
    )


def _of_repairs(trials: Trials) -> Iterator[Ranked]:
    """Yield the lines of edits; an edit that repairs everything must also hold in a second case."""
    wrong = int((~trials.right).sum())
    again = "" if trials.holds is None else ", and so is a second case"
    for repair in trials.repairs:
        if repair.is_full:
            text = f"with {repair.edit.text}, all {wrong} wrong rows × heads are right{again}"
            yield repair.line, "edit", 1.0 - 0.05 * COSTS.index(repair.edit.cost), text
        elif repair.share >= 0.5:
            text = f"with {repair.edit.text}, {repair.share:.0%} of a program's wrong rows × heads are right"
            yield repair.line, "part", _EVIDENCE["part"] * min(repair.share, 0.9), text


def preferred(repairs: Iterable[Repair]) -> tuple[Repair, ...]:
    """Return the edits that repair everything: those that use a name again that the statement may have lost,
    then the cheap ones, then those that keep all operands, then those that change little."""
    return tuple(
        sorted(
            (one for one in repairs if one.is_full),
            key=lambda one: (
                not one.edit.is_kin,
                one.edit.cost,
                not one.edit.revives,
                len(_operands(one.edit.before) - _operands(one.edit.after)),
                _changed_words(one.edit.before, one.edit.after),
            ),
        )
    )


def _operands(text: str) -> set[str]:
    """Return the names in an expression, without those of modules and of what it calls."""
    nodes = list(ast.walk(ast.parse(f"({text})", mode="eval")))
    called = {
        id(part) for node in nodes if isinstance(node, ast.Call) for part in ast.walk(node.func)
    }
    return {one.id for one in nodes if isinstance(one, ast.Name) and id(one) not in called}


def _changed_words(before: str, after: str) -> tuple[int, int]:
    """Return how many words of names, numbers and signs of two expressions differ, without parentheses and
    commas, and how many of the second are new."""
    words = [_WORD.findall(text) for text in (before, after)]
    blocks = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_matching_blocks()
    changed = len(words[0]) + len(words[1]) - 2 * sum(block.size for block in blocks)
    return changed, len(set(words[1]) - set(words[0]))


def _of_spectrum(
    units: list[Unit], right: torch.Tensor, scores: dict[Line, float]
) -> Iterator[Ranked]:
    """Yield lines that programs with wrong elements execute more often than others do."""
    wrong = [unit for unit in units if is_wrong(unit, right)]
    others = [unit for unit in units if not is_wrong(unit, right)]
    for line, score in scores.items():
        if not (above := excess(score, units, right)) > _LEAST_EXCESS:
            continue
        failed, passed = (sum(line in unit.lines for unit in group) for group in (wrong, others))
        text = f"it branches otherwise in programs with wrong rows (Ochiai {score:.2f})"
        if failed * len(others) > passed * len(wrong):
            text = (
                f"executed by {failed} of {len(wrong)} programs with wrong rows and by {passed} of "
                f"{len(others)} with right ones (Ochiai {score:.2f})"
            )
        yield line, "spectrum", _EVIDENCE["spectrum"] * above, text


def _merged(found: Iterable[Ranked], scores: dict[Line, float]) -> tuple[KernelLine, ...]:
    """Return one entry for each line, with its strongest evidence, the highest score first."""
    best: dict[Line, Ranked] = {}
    for one in found:
        if one[0] not in best or one[2] > best[one[0]][2]:
            best[one[0]] = one
    ranked = sorted(best.values(), key=lambda one: (-one[2], -scores.get(one[0], 0.0)))
    return tuple(
        KernelLine(
            file=file,
            line=line,
            source=linecache.getline(file, line).strip(),
            score=round(score, 3),
            evidence=evidence,
            reason=reason,
        )
        for (file, line), evidence, score, reason in ranked[:_MOST_LINES]
    )


def _why_no_line(trials: Trials) -> str:
    """Return why no line is stated."""
    wrong, units = len(trials.wrong_units), len(trials.replay.units)
    programs = "every program has" if wrong == units else f"{wrong} of {units} programs have"
    return (
        f"{programs} wrong rows, no line is executed by these alone, and none of {trials.tried} trial edits "
        "makes them right" + (f"; one ended the trials by {trials.ended}" if trials.ended else "")
    )
