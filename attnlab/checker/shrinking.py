"""Shrink a finding: search for a smaller Case that shows the same fault or observation."""

from collections.abc import Iterator
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.masks import CAUSAL, DATA_OF_LENGTHS, MASK_DATA
from attnlab.checker.case_check import INT32_WRAP, OUT_OF_BOUNDS, check_case, wrong_accesses
from attnlab.checker.case_run import run_case
from attnlab.checker.evidence import remembering
from attnlab.checker.finding import Finding
from attnlab.checker.slot_reads import OBSERVED, observations
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.tensors.case_visibility import data_of_lengths, data_of_seq

MAX_TRIES = 40
# The plain value of each feature that a Case may not need, in the order in which they are removed.
_PLAIN = {
    "freed": "kept",
    "first_block": 0,
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


@remembering()
def shrink(lab: Lab, backend: Backend, finding: Finding) -> Finding:
    """Return the same finding at a smaller Case.

    The search is greedy: it takes the first smaller Case that still shows the finding, and starts again
    from there. It stops when no step succeeds, or after 40 tries. It does not depend on time, so that
    every machine returns the same Case.
    """
    tries = 0
    is_smaller = True
    while is_smaller and tries < MAX_TRIES:
        is_smaller = False
        for case in _smaller_cases(finding.case):
            tries += 1
            if tries > MAX_TRIES:
                break
            same = _same_finding(lab, backend, finding, case)
            if same is not None:
                finding, is_smaller = same, True
                break
    return finding


def _same_finding(lab: Lab, backend: Backend, finding: Finding, case: Case) -> Finding | None:
    """Return the finding of the same group at another Case, or None.

    An observation of slot reads, a wrong access and an overflow need one run; every other finding needs the
    whole check.
    """
    try:
        if finding.kind in OBSERVED:
            found = [*observations(case, run_case(lab, backend, case, trace_reads=True).memory)]
        elif finding.kind in (OUT_OF_BOUNDS, INT32_WRAP):
            found = wrong_accesses(case, run_case(lab, backend, case))
        else:
            found = check_case(lab, backend, case)
    except AttnLabError:
        return None
    is_named = finding.diagnosis in finding.names  # then a smaller Case must have the same name
    return next(
        (
            other
            for other in found
            if other.is_same(finding) and (other.diagnosis == finding.diagnosis or not is_named)
        ),
        None,
    )


def _smaller_cases(case: Case) -> Iterator[Case]:
    """Yield Cases that are smaller or plainer by one step, the largest steps first."""
    for step in (*_fewer(case), *_plainer(case), *_shorter(case)):
        try:
            smaller = case.replace(**{"num_blocks": None, **step})
            yield smaller.replace(num_blocks=smaller.total_blocks + 1)
        except InvalidCase:
            continue


def _fewer(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps to one sequence, one KV head, one query head."""
    query_lens, ctx_lens = case.lengths.query_lens, case.lengths.ctx_lens
    if len(query_lens) > 1:
        for i in range(len(query_lens)):
            one = {"query_lens": query_lens[i : i + 1], "ctx_lens": ctx_lens[i : i + 1]}
            yield {**one, **data_of_seq(case, i)}
    if case.num_kv_heads > 1:
        yield {"num_heads": case.num_queries_per_kv}
    if case.num_queries_per_kv > 1:
        yield {"num_heads": 1, "num_queries_per_kv": 1}


def _plainer(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps that remove one feature."""
    for field, plain in _PLAIN.items():
        if getattr(case, field) != plain:
            yield {field: plain}
    if case.mask != CAUSAL:
        yield {"mask": CAUSAL, **dict.fromkeys(MASK_DATA)}
        if case.sliding_window > 1:
            yield {"sliding_window": case.sliding_window // 2}
    if case.softcap is not None:
        yield {"softcap": None}
    if case.kv_cache_dtype != "auto":
        yield {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    if case.head_size > 32:
        yield {"head_size": 32}


def _shorter(case: Case) -> Iterator[dict[str, Any]]:
    """Yield steps that shorten a single sequence: half of its new tokens, half of its context, or one less.

    The data of a mask follow from the new lengths, if they were not given; otherwise, and as a second try,
    they are cut.
    """
    if len(case.lengths.query_lens) > 1:
        return
    query_len, ctx_len = case.lengths.query_lens[0], case.lengths.ctx_lens[0]
    lens = [(query_len // 2, ctx_len), (query_len, ctx_len // 2), (query_len, ctx_len - 1)]
    if case.mask != CAUSAL:  # a fault of a mask often needs the first and the last row of a range
        lens.append((query_len - 1, ctx_len))
    is_given = any(getattr(case, name) is not None for name in DATA_OF_LENGTHS)
    for shorter in dict.fromkeys(lens):
        if shorter[0] < 1 or shorter[1] < 0 or shorter == (query_len, ctx_len):
            continue
        step = {"query_lens": shorter[:1], "ctx_lens": shorter[1:]}
        data = data_of_lengths(case, *shorter)
        if not is_given or not data:
            yield step
        if data:
            yield {**step, **data}
