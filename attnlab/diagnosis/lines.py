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
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.claims import KernelLine, KernelLocation
from attnlab.diagnosis.repair_check import is_right
from attnlab.diagnosis.reruns import second_case
from attnlab.diagnosis.trials import COSTS, FULL, Limit, Repair, Trials, target_of
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import uncontrolled
from attnlab.kernels.triton.kernel_text import (
    overwriting,
    roles,
    slice_of,
    statement_lines,
    statement_texts,
)
from attnlab.kernels.triton.launch_plan import Subset, estimated_s
from attnlab.kernels.triton.probe import Line, Probe, probing
from attnlab.kernels.triton.replay import Unit
from attnlab.kernels.triton.run_log import Region, Watched
from attnlab.lab.lab import Lab
from attnlab.lab.products import needed_bytes
from attnlab.tensors.call import KernelCall
from attnlab.weights.conclude import other_case
from attnlab.weights.xray import XRay

# Lines of a kernel that access memory outside its tensors, and what feeds their addresses.

_MOST_STEPS = 3  # of the data flow to the access


def lines_of(texts: Iterable[str]) -> set[str]:
    """Return the lines, "file:line", of texts of bad accesses."""
    return {text.split()[0] for text in texts}


def lines_of_accesses(trials: Trials, outside: Iterable[str]) -> list[tuple[Line, str, str]]:
    """Return lines with the evidence "outside" and the reason, those nearest to an access first.

    ``outside``: texts of bad accesses, "file:line …", as of :class:`attnlab.lab.result.Result`.
    """
    found: dict[Line, tuple[int, int, str]] = {}
    for place in sorted(lines_of(outside)):
        name, _, number = place.rpartition(":")
        for kernel in trials.kernels:
            at = statement_lines(kernel.text).get(int(number) - kernel.first)
            if Path(kernel.file).name != Path(name).name or at is None:
                continue
            for line, distance in slice_of(kernel.text, at).items():
                if distance > _MOST_STEPS or line not in kernel.executed:
                    continue
                why = f"it feeds line {number}, which accesses memory outside its tensors"
                if not distance:
                    why = "it accesses memory outside its tensors"
                one = (distance, abs(line - at), why)  # the last of several values of a name
                found[kernel.line(line)] = min(found.get(kernel.line(line), one), one)
    ranked = sorted(found.items(), key=lambda one: (*one[1][:2], one[0]))
    return [(line, "outside", why) for line, (_, _, why) in ranked]


# Spectrum: which lines and branch outcomes separate programs with wrong results from others.

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


# Lines of a kernel that compute what an X-ray finds wrong: by the data flow of the source, and by loads.

# What lines a rule of an X-ray is about: roles of attnlab.kernels.triton.kernel_text, the likeliest first.
_ROLES = {
    "KeyTimes": ("mask", "bounds"),
    "NoKeys": ("mask", "output", "bounds", "place"),
    "ZeroKeys": ("mask", "update", "carried"),
    "ScoreFactor": ("score", "address"),
    "Power": ("score", "update", "carried"),
    "AlibiFactor": ("score",),
    "AlibiOrigin": ("score", "mask"),
    "SlopeOf": ("score", "address"),
    "Softcap": ("score",),
    "MaskCapped": ("score", "mask"),
    "NotRescaled": ("update", "carried", "output"),
    "LoopBase": ("update", "score", "carried"),
    "Sinks": ("update", "carried", "output"),
    "Gain": ("output", "update", "carried", "score"),
    "OtherSlots": ("address",),
    "KeyHead": ("address",),
    "TileTimes": ("bounds", "mask", "update"),
    "HeadScore": ("address", "score"),
    "HeadGain": ("output", "address", "update"),
}
_ANY = ("score", "update", "output", "address", "carried", "mask", "bounds", "place")
_WORDS = {
    "mask": "a mask",
    "bounds": "the range of a loop",
    "address": "the address of a load",
    "score": "the scores",
    "update": "what a loop carries",
    "carried": "what updates a value that a loop carries",
    "output": "what is stored",
    "place": "the address of a store",
}
_OF_ROLE = 0.5  # steps of data flow by which lines of the next role of a rule are later
_OF_WORD = 1.5  # steps by which lines are earlier that have a name with a word of the rule
_WORD = re.compile(r"[a-z]{4,}")
Found = tuple[Line, str, str]  # line, evidence, reason


def lines_of_xray(trials: Trials, call: KernelCall | None, found: XRay | None) -> list[Found]:
    """Return lines with their evidence, "load" or "role"; none without an X-ray.

    ``call``: the call of the trials, None if the X-ray is of another one.
    """
    if found is None:
        return []
    is_wrong = found.status in ("described", "undecided")
    loads = [] if call is None or not is_wrong else list(_loads(trials, call, found))
    return [*_of_overwriting(trials), *loads, *_of_roles(trials, found)]


def _of_overwriting(trials: Trials) -> Iterator[Found]:
    """Yield the executed lines that replace a value which was computed and not used."""
    for kernel in trials.kernels:
        for number in sorted(overwriting(kernel.text) & kernel.executed):
            yield kernel.line(number), "role", "it replaces a value that was computed and not used"


def _of_roles(trials: Trials, found: XRay) -> list[Found]:
    """Return the executed lines of the roles that the X-ray is about, those nearest by data flow first.

    Of equally near lines, those of the first role come first, and those that share a word with the rule.
    """
    ranked: dict[Line, tuple[float, str]] = {}
    for order, (role, why) in enumerate(_wanted(found).items()):
        words = set(_WORD.findall(why.lower().replace("soft cap", "softcap")))
        for kernel in trials.kernels:
            texts = statement_texts(kernel.text)
            for number, distance in roles(kernel.text)[role].items():
                if number not in kernel.executed:
                    continue
                is_named = not words.isdisjoint(re.split(r"[^a-z]+", texts[number].lower()))
                cost = distance + _OF_ROLE * order - (_OF_WORD if is_named else 0.0)
                text = f"it feeds {_WORDS[role]}; X-ray: {why}"
                line = kernel.line(number)
                ranked[line] = min(ranked.get(line, (cost, text)), (cost, text))
    order_of = sorted(ranked.items(), key=lambda one: (one[1][0], one[0]))
    return [(line, "role", text) for line, (_, text) in order_of]


def _wanted(found: XRay) -> dict[str, str]:
    """Return the roles that an X-ray is about, with the reason, the likeliest first."""
    wanted: dict[str, str] = {}
    for description in found.descriptions:
        for rule in description.rules:
            for role in _ROLES.get(type(rule).__name__, ()):
                wanted.setdefault(role, rule.text)
    return wanted or dict(_by_weights(found))


def _by_weights(found: XRay) -> Iterator[tuple[str, str]]:
    """Yield the roles that the weights themselves show, if there is no rule."""
    extra, missing = _extra(found), _missing(found)
    if bool(found.measurement.unwritten.any()):
        yield from ((role, "rows are not written") for role in ("place", "bounds"))
    elif found.status == "right":
        what = "the weights are right and the output is not"
        yield from ((role, what) for role in ("address", "output", "place"))
    elif found.status == "unreadable":
        yield from ((role, "the output is not finite") for role in _ANY)
    elif bool(extra.any()) or bool(missing.any()):
        what = "keys count that must not" if bool(extra.any()) else "keys do not count that must"
        yield from ((role, what) for role in ("mask", "bounds", "address"))
    else:
        yield from ((role, "keys have other weights") for role in _ANY)


def _floor(found: XRay) -> torch.Tensor:
    return 8 * found.setup.fixed[:, None, None]


def _extra(found: XRay) -> torch.Tensor:
    """Return which weights must be 0 and are not, [R, H, N] bool."""
    return (found.expected == 0) & (found.weights.abs() > _floor(found))


def _missing(found: XRay) -> torch.Tensor:
    return (found.expected > 16 * _floor(found)) & (found.weights.abs() <= _floor(found))


def _loads(trials: Trials, call: KernelCall, found: XRay) -> Iterator[Found]:
    """Yield the lines that load slots of the cache that count although they must not."""
    extra = _extra(found)[..., : found.setup.cache_slots]
    done = set[Line]()
    for row, _, slot in extra.nonzero().tolist()[:200]:
        at, seq = int(found.setup.rows[row]), int(found.setup.seq[row])
        kind = found.owners.kind(slot, seq, int(found.setup.position[row]))
        for line in _loading(trials, call, at, slot):
            if line not in done:
                done.add(line)
                yield (
                    line,
                    "load",
                    f"it loads slot {slot} for row {at}, which must not count: it is {kind}",
                )


def _loading(trials: Trials, call: KernelCall, row: int, slot: int) -> Iterator[Line]:
    """Yield the lines that load a slot of the cache in programs that write a row."""
    watched = Watched.of(call)
    for unit in trials.suspects:
        if trials.wrong_units and not bool(unit.cells[row].any()):
            continue
        for index, log in unit.programs:
            arguments = trials.replay.launches[index].arguments
            tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
            dims = {name: watched.dims(tensor) for name, tensor in tensors.items()}
            caches = [
                Region.of(name, tensors[name], found)
                for name, found in dims.items()
                if found is not None and len(found) == 2
            ]
            for line, parts in log.loads.items():
                if any(slot in cache.indices(part) for cache in caches for part in parts):
                    yield line


_MOST_LINES = 25
_LINE_WORD = re.compile(r"[^\W_]+|[^\w\s(),]+")
_LEAST_EXCESS = 0.05
# Suspicion of the first line by accesses or the X-ray, in units of the cost of an edit, and by how much that
# of the next lines is less. Costly edits of the first lines come before cheap ones of the others.
_FIRST, _STEP = 1.3, 0.03
_MOST_SUSPICIOUS = 40  # lines
# Of a case that is small enough, estimated.
_MOST_CASE_S = 4.0
_MOST_CASE_BYTES = 1 << 30
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
    is_same = found is not None and _layout(found.case) == _layout(small)
    by_xray = [
        *lines_of_accesses(trials, lab.run(small).outside),
        *lines_of_xray(trials, lab.call(small) if is_same else None, found),
    ]
    return located(trials, by_xray, limit)


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
    """Return a Case with a wrong output that takes neither long nor much memory; None without one.

    It is the Case, without unused blocks before its first one, or a smaller one. Launches are recorded with
    copies of their tensors. Unwritten memory holds finite numbers if the output is wrong then, too, so that a
    leak of such memory does not hide another fault.
    """
    near = case.replace(first_block=0, num_blocks=None) if case.first_block else case
    for one in (near, _smaller(near)):
        if one is None or needed_bytes(one) > _MOST_CASE_BYTES:
            continue
        if estimated_s(lab.call(one), decide(one).kernels, Subset()) > _MOST_CASE_S:
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


def located(trials: Trials, by_xray: Sequence[Found], limit: Limit) -> KernelLocation:
    """Return the lines by all evidence, that of accesses and weights in ``by_xray``."""
    units = comparable_units(trials.replay.units, trials.right)
    scores = spectrum(units, trials.right)
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
        ended=trials.ended,
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
    """Return the names in an expression or a statement, without those of modules and of what it calls."""
    try:
        nodes = list(ast.walk(ast.parse(f"({text})", mode="eval")))
    except SyntaxError:  # a statement
        nodes = list(ast.walk(ast.parse(text.strip())))
    called = {
        id(part) for node in nodes if isinstance(node, ast.Call) for part in ast.walk(node.func)
    }
    return {one.id for one in nodes if isinstance(one, ast.Name) and id(one) not in called}


def _changed_words(before: str, after: str) -> tuple[int, int]:
    """Return how many words of names, numbers and signs of two expressions differ, without parentheses and
    commas, and how many of the second are new."""
    words = [_LINE_WORD.findall(text) for text in (before, after)]
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
    ranked = sorted(best.values(), key=lambda one: (-one[2], -scores.get(one[0], 0.0), one[0]))
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
