"""Looking at one Case: what a kernel does wrong there, and the smallest Case that shows it."""

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase, KernelFailed, KernelRejected
from attnlab.checker.finding import Finding
from attnlab.checker.slot_reads import TOLD, observations
from attnlab.checker.subject import RunOutput, Subject
from attnlab.checker.sums import wrong_padding, wrong_sums
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.reruns import rows_equal
from attnlab.lab.error_map import ErrorMap
from attnlab.lab.lab import Lab

_MOST_SHRINKS = 24
_LAYOUTS = (
    ("kv_layout", "contiguous", "strides ignored"),
    ("pad_batch", 0, "padding not left out"),
)


def look(
    lab: Lab,
    subject: Subject,
    case: Case,
    on_ran: Callable[[Case, RunOutput], None] = lambda case, ran: None,
) -> list[Finding]:
    """Return what goes wrong at a Case, and what is to be seen of it besides.

    The Case is run with NaN in empty slots and, where that is right, with finite garbage: the bits must
    be the same. ``on_ran`` hears of the first of these runs. Raises Unavailable for a Case that the
    subject has no op for.
    """
    try:
        ran = subject.run(lab, case, watch=True)
    except (KernelRejected, KernelFailed) as error:
        return [_finding(case, "fails", str(error), re.sub(r"\d+", "#", str(error))[:60])]
    on_ran(case, ran)
    found = [*observations(case, ran.memory)]
    if ran.outside:
        found.append(_finding(case, "out_of_bounds", ran.outside[0], ran.outside[0].split()[0]))
    if ran.wraps:
        found.append(_finding(case, "int32_wrap", ran.wraps[0], "int32_wrap"))
    wrong = _of_output(lab, subject, case, ran)
    return [*found, *([wrong] if wrong is not None else _beside_output(lab, case, ran))]


def _beside_output(lab: Lab, case: Case, ran: RunOutput) -> list[Finding]:
    """Return what is wrong with the logarithms of sums, and with rows that pad a batch."""
    found = []
    text = "" if ran.lse is None else wrong_sums(lab, case, ran.lse)
    if text:
        found.append(_finding(case, "wrong_lse", text, "logarithm of the sum"))
    text = "" if ran.padded is None else wrong_padding(case, ran.padded, ran.lse)
    if text:
        found.append(_finding(case, "wrong_output", text, "both parts empty"))
    return found


def _of_output(lab: Lab, subject: Subject, case: Case, ran: RunOutput) -> Finding | None:
    """Return what is wrong with an output, or an observation of what it depends on, or None."""
    if case.spec.writes_cache:
        return _of_cache(lab, subject, case, ran)
    told = diagnose(case, ran.output, lab=lab, propose=False)
    if told.is_wrong:
        return _wrong(lab, subject, case, ran.output, told)
    garbage = case.replace(empty_slots="garbage")
    other = subject.run(lab, garbage).output
    told = diagnose(garbage, other, lab=lab, propose=False)
    if told.is_wrong:
        return _leak(lab, subject, garbage, told)
    rows = torch.nonzero(~rows_equal(ran.output, other)).flatten().tolist()
    if not rows:
        return None
    text = f"rows {rows[:8]} change with what empty slots hold"
    return _finding(case, "follows_empty_slots", text, "finite contents")


def _wrong(
    lab: Lab, subject: Subject, case: Case, output: torch.Tensor, told: Diagnosis
) -> Finding:
    """Return what is wrong with an output that is, by a second run on zeros: in slots and buffer."""
    zeros = case.replace(empty_slots="zeros", output_init="zeros")
    again = subject.run(lab, zeros).output
    layout = _by_layout(lab, subject, zeros)
    kept = torch.nonzero((output.isnan() & (again == 0)).flatten(1).all(1)).flatten()
    if not layout and len(kept) and not (lab.reference(zeros)[kept] == 0).all():
        text = f"rows {kept[:8].tolist()} are as they were"
        return _finding(case, "rows_not_written", text, _name(told))
    told_again = diagnose(zeros, again, lab=lab, propose=False)
    near = case.replace(first_block=0, num_blocks=None)
    if case.first_block and told_again.is_wrong and _is_right(lab, subject, near):
        text = f"{told_again.sentences()[0]}; right where the blocks' numbers are small"
        return _finding(zeros, "wrong_output", text, "block offset beyond 2^31 elements")
    if told_again.is_wrong:
        return _finding(
            zeros, "wrong_output", told_again.sentences()[0], layout or _name(told_again)
        )
    return _leak(lab, subject, case, told)


def _by_layout(lab: Lab, subject: Subject, case: Case) -> str:
    """Return which knob of how tensors lie in memory makes the output wrong, in words; or ""."""
    for name, plain, words in _LAYOUTS:
        if getattr(case, name) != plain and _is_right(lab, subject, case.replace(**{name: plain})):
            return words
    return ""


def _leak(lab: Lab, subject: Subject, case: Case, told: Diagnosis) -> Finding:
    """Return the finding of an output that depends on what it should not read: blocks that the window has
    freed, where it is right with these kept, or slots that nobody wrote."""
    if case.freed != "kept" and _is_right(lab, subject, case.replace(freed="kept")):
        text = f"{told.sentences()[0]}; right where these blocks hold what they held"
        return _finding(case, "reads_freed_blocks", text, f"{case.freed} blocks")
    return _finding(case, "reads_unwritten_slots", told.sentences()[0], "empty slots")


def _is_right(lab: Lab, subject: Subject, case: Case) -> bool:
    """Answer whether a Case's output is off by rounding at most."""
    ran = subject.run(lab, case)
    if case.spec.writes_cache:
        return not _cache_errors(lab, case, ran).mismatched
    return not diagnose(case, ran.output, lab=lab, propose=False).is_wrong


def _cache_errors(lab: Lab, case: Case, ran: RunOutput) -> ErrorMap:
    call = lab.call(case)
    call.output.copy_(ran.output)
    return lab.errors(case, call, lab.reference(case))


def _of_cache(lab: Lab, subject: Subject, case: Case, ran: RunOutput) -> Finding | None:
    """Return what is wrong with a cache, or None."""
    errors = _cache_errors(lab, case, ran)
    if not errors.mismatched:
        return None
    place = errors.places()[0]
    nobody = place.seq == len(case.lengths.query_lens)
    where = "nobody's slot" if nobody else f"sequence {place.seq}, position {place.token}"
    text = f"{errors.mismatched} elements differ, first in {where}"
    name = _by_layout(lab, subject, case) or ("nobody's slot" if nobody else "own slot")
    return _finding(case, "wrong_bytes", text, name)


def _name(told: Diagnosis) -> str:
    """Return a diagnosis in a word or two."""
    return told.cause.name if told.cause is not None else told.status


def _finding(case: Case, kind: str, evidence: str, diagnosis: str) -> Finding:
    return Finding(op=case.op, kind=kind, case=case, evidence=evidence, diagnosis=diagnosis)


def shrink(lab: Lab, subject: Subject, finding: Finding, seconds: float = math.inf) -> Finding:
    """Return the finding at a smaller Case that shows the same, as small as a few steps make it, or as
    many as ``seconds`` allow."""
    until = time.perf_counter() + seconds
    tries = 0
    smaller = True
    while smaller and tries < _MOST_SHRINKS:
        smaller = False
        for case in _smaller(finding.case):
            tries += 1
            if tries > _MOST_SHRINKS or time.perf_counter() > until:
                break
            same = _same(lab, subject, finding, case)
            if same is not None:
                finding, smaller = same, True
                break
    return finding


def _same(lab: Lab, subject: Subject, finding: Finding, case: Case) -> Finding | None:
    """Return the finding of the same group at another Case, or None; what was read shows in one run."""
    try:
        if finding.kind in TOLD:
            found = [*observations(case, subject.run(lab, case, watch=True).memory)]
        else:
            found = look(lab, subject, case)
    except AttnLabError:
        return None
    return next((one for one in found if one.group == finding.group), None)


def _smaller(case: Case) -> Iterator[Case]:
    """Yield Cases that are smaller or plainer by one step, the largest steps first."""
    for step in (*_fewer(case), *_plainer(case), *_shorter(case)):
        try:
            changed = case.replace(**{"num_blocks": None, **step})
            yield changed.replace(num_blocks=changed.total_blocks + 1)
        except InvalidCase:
            continue


def _fewer(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps to one sequence, one KV head, one query head."""
    query_lens, ctx_lens = case.lengths.query_lens, case.lengths.ctx_lens
    if len(query_lens) > 1:
        for i in range(len(query_lens)):
            yield {"query_lens": query_lens[i : i + 1], "ctx_lens": ctx_lens[i : i + 1]}
    if case.num_kv_heads > 1:
        yield {"num_heads": case.num_queries_per_kv}
    if case.num_queries_per_kv > 1:
        yield {"num_heads": 1, "num_queries_per_kv": 1}


def _plainer(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps that turn off what may not matter."""
    plain = {
        "alibi": False,
        "sinks": False,
        "sliding_window": 0,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "kv_layout": "contiguous",
        "pad_batch": 0,
        "block_size": 16,
        "max_blocks_per_seq": None,
    }
    off = {"freed": "kept", "first_block": 0}
    yield from ({name: value} for name, value in off.items() if getattr(case, name) != value)
    yield from ({name: off} for name, off in plain.items() if getattr(case, name) != off)
    if case.softcap is not None:
        yield {"softcap": None}
    if case.kv_cache_dtype != "auto":
        yield {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    if case.head_size > 32:
        yield {"head_size": 32}


def _shorter(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps that halve the lengths of a single sequence, or take a token off."""
    if len(case.lengths.query_lens) > 1:
        return
    query_len, ctx_len = case.lengths.query_lens[0], case.lengths.ctx_lens[0]
    if query_len > 1:
        yield {"query_lens": (query_len // 2,)}
    if ctx_len > 1:
        yield {"ctx_lens": (ctx_len // 2,)}
        yield {"ctx_lens": (ctx_len - 1,)}
