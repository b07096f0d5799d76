"""What the contracts predict, without running a kernel: status of a Case, verdicts of the study."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.ops import PREFILL
from attnlab.case.platforms import STAGES
from attnlab.case.pytest_id import tolerance_of_test
from attnlab.contracts.contract import ROCM_DECODE, Contract, Target, contract, contracts_of
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import as_read, served, unwritten_rows
from attnlab.contracts.violations import find_violations
from attnlab.lab.lab import Cell, Lab
from attnlab.lab.result import Result
from attnlab.tensors.case_call import hollow_call, make_query_start_loc
from study.broken_kernel import is_available as can_break_kernels
from study.claims import FAILS, HOLDS, UNDECIDED
from study.claims.cache import OBSERVED
from study.claims.cases import decode_at_seed_size, like_the_test, seed_size
from study.head_tiles import predicted_heads
from study.mla_chain import predicted_cause
from study.production import is_available

INDEX_TENSORS = ("block_table", "seq_lens", "query_start_loc")
E5M2 = "fp8_e5m2"


def decode_contract(case: Case) -> Contract:
    """Return the contract of the kernel that decodes the Case."""
    return contract(decide(case).kernels[-1], Target.of(case), case.op)


def predict_stages(case: Case, platform: str) -> list[int | str]:
    """Predict the outcome of each stage on a platform from the contracts: wrong elements, or "rejected".

    No kernel runs. The elements of unwritten rows are wrong. The effect of a slot that lacks its token
    depends on the data; with the test's data it stays below the tolerance, so it counts as 0.
    """
    predicted: list[int | str] = []
    for stage in STAGES:
        staged = case.replace(stage=stage, platform=platform)
        call, kernels, target = hollow_call(staged), decide(staged).kernels, Target.of(staged)
        found = find_violations(call, target, kernels)
        unwritten = unwritten_rows(contracts_of(kernels, target, staged.op), call)
        wrong = int(unwritten.sum()) * call.buffer[0].numel()
        is_rejected = any(one.effect == "rejected" for one in found)
        predicted.append("rejected" if is_rejected else wrong)
    return predicted


def outcomes(cells: Sequence[Cell], platform: str) -> list[int | str]:
    """Return the outcome of each stage on a platform, in the form of :func:`predict_stages`."""
    column = [cell for cell in cells if cell.platform == platform]
    return ["rejected" if cell.mismatched is None else cell.mismatched for cell in column]


def on_int64(case: Case) -> dict[str, str]:
    """Return what the decode kernel does with each index tensor if it is int64.

    "reject", "convert", "accept" (reads int64) or "reinterpret" (reads the bytes as int32).
    """
    terms = decode_contract(case).on_int64
    return {name: terms.get(name, "accept") for name in INDEX_TENSORS}


def decodes_on_rocm(case: Case) -> bool:
    """Answer whether the ROCm custom kernel decodes the Case."""
    return decide(case).decode == ROCM_DECODE


def tail_reaches_output(case: Case) -> bool:
    """Answer whether a kernel of the Case passes NaN from unused slots of the last block to the output."""
    target = Target.of(case)
    terms = [contract(name, target, case.op) for name in decide(case).kernels]
    return any(one.reads_tail != "nothing" for one in terms)


def read_as_int32(result: Result) -> dict[str, list[int]]:
    """Return what the decode kernel makes of query_start_loc: the numbers, their lengths, and who is served.

    "read" [num_seqs + 1], "lengths" [num_seqs], "sequences": those with length 1, and "rows": the output
    row of each of them.
    """
    terms = decode_contract(result.case)
    read = as_read(terms, result.call, "query_start_loc")
    sequences = torch.nonzero(served(terms, result.call)).flatten().tolist()
    return {
        "read": read.tolist(),
        "lengths": read.diff().tolist(),
        "sequences": sequences,
        "rows": read[sequences].tolist(),
    }


def predict_status(lab: Lab, case: Case) -> str:
    """Return the status that the contracts predict: "rejected", "mismatch" or "match".

    A Case mismatches if a row stays unwritten, or if an unwritten slot that holds NaN is read.
    """
    cache = lab.cache(case)
    violations = find_violations(
        lab.call(case), Target.of(case), decide(case).kernels, cache.provenance
    )
    kinds = {violation.kind for violation in violations}
    if any(violation.effect == "rejected" for violation in violations):
        return "rejected"
    reads_nan = "unwritten_slot" in kinds and case.empty_slots == "nan"
    return "mismatch" if reads_nan or "unwritten_rows" in kinds else "match"


def missing_token_bound(case: Case) -> float:
    """Return the most by which one missing token moves the last sequence's row.

    With scores near 0 one of seq_len keys has the weight 1 / seq_len, and a value is at most 1e-3: the
    row loses at most that value and its other weights grow by as much.
    """
    return 2 * 1e-3 / case.lengths.seq_lens[-1]


def settings_on_rocm() -> list[str]:
    """Return the settings "head_size, num_queries_per_kv, sliding_window" on which the ROCm kernel runs."""
    return [
        f"{head_size}, {group}, {window}"
        for head_size, group, window in itertools.product((24, 128), (1, 64), (0, 16))
        if decodes_on_rocm(
            like_the_test(head_size=head_size, num_queries_per_kv=group, sliding_window=window)
        )
    ]


def predict_claims() -> dict[str, str]:
    """Return the verdict that contracts, dispatch and arithmetic predict for each claim, by number."""
    claims: dict[str, bool | None] = {number: is_so() for number, is_so in _CLAIMS.items()}
    return {
        number: UNDECIDED if is_so is None else HOLDS if is_so else FAILS
        for number, is_so in claims.items()
    }


def _is_refused(*names: str) -> bool:
    return all(on_int64(like_the_test())[name] == "reject" for name in names)


def _loc_is_int32() -> bool:
    return make_query_start_loc((2, 1), "int32_before_cumsum").dtype == torch.int32


def _has_effect_of_observed_size() -> bool:
    return missing_token_bound(decode_at_seed_size()) >= OBSERVED / 2


def _decodes_from_cache() -> bool:
    cases = (like_the_test(platform=name) for name in ("gfx942", "sm_90"))
    return all(decode_contract(case).new_tokens_from == "cache" for case in cases)


def _prefill_serves(op: str) -> str:
    return contract(PREFILL, Target.of(like_the_test(op=op)), op).serves


def _kernels_differ() -> bool:
    sources = {
        decode_contract(like_the_test(platform=name)).new_tokens_from
        for name in ("gfx942", "sm_90")
    }
    return len(sources) > 1


def _ratio_changes_contract() -> bool:
    cases = (like_the_test(num_queries_per_kv=group) for group in (1, 2, 4, 8, 16))
    return len({decode_contract(case).on_int64["query_start_loc"] for case in cases}) > 1


def _counts_agree() -> bool:
    """Count skips: 12 needs one device with both forms of the test, and there accuracy gives 4."""
    forms = [("plain", window) for window in (0, 16)] + [("alibi", 0)]
    settings = list(itertools.product(forms, (24, 128), (1, 64)))
    failing = sum((window, head, group) == (0, 128, 1) for (_, window), head, group in settings)
    return (len(settings), 2 * failing) == (12, 8)


def _rdna_settings() -> bool:
    taken = [
        (size, group)
        for size, group in itertools.product((16, 32), (1, 2, 3, 4, 8, 16, 32))
        if decodes_on_rocm(
            like_the_test(
                platform="gfx1100", block_size=size, num_queries_per_kv=group, num_heads=96
            )
        )
    ]
    return bool(taken) and all(size == 16 and 3 <= group <= 16 for size, group in taken)


def _in_production() -> bool | None:
    return _decodes_from_cache() if is_available() else None


def _is_decode_row() -> bool:
    lengths = seed_size().lengths
    return lengths.query_lens[lengths.locate(5336)[0]] == 1


_CLAIMS: dict[str, Callable[[], bool | None]] = {
    "C1": lambda: _is_refused("block_table", "seq_lens"),
    "C2": lambda: _is_refused(*INDEX_TENSORS),
    "C3": _loc_is_int32,
    "C4": lambda: {*on_int64(like_the_test(stage="wrapper_cast")).values()} == {"convert"},
    "C5": lambda: E5M2 not in decode_contract(like_the_test()).kv_cache_dtypes,
    "C6": lambda: all(name.startswith("128, 1,") for name in settings_on_rocm()),
    "C7": lambda: seed_size().num_queries_per_kv == 64,
    "C8": lambda: settings_on_rocm() == ["128, 1, 0"],
    "C9": lambda: seed_size().num_heads * seed_size().head_size == 8192,
    "C10": _is_decode_row,
    "C11": _has_effect_of_observed_size,
    "C12": _has_effect_of_observed_size,
    "C13": _kernels_differ,
    "C14": lambda: (
        contract(PREFILL, Target.of(like_the_test()), like_the_test().op).new_tokens_from == "cache"
    ),
    "C15": _decodes_from_cache,
    "C16": lambda: (
        (_prefill_serves("chunked_prefill_paged_decode"), _prefill_serves("context_attention_fwd"))
        == ("prefill", "all")
    ),
    "C17": _in_production,
    "C18": _in_production,
    "C19": lambda: on_int64(like_the_test())["query_start_loc"] != "reinterpret" or _loc_is_int32(),
    "C20": _counts_agree,
    "C21": _ratio_changes_contract,
    "C22": _rdna_settings,
}


def predict_chapters() -> dict[str, dict[str, Any]]:
    """Return what the contracts predict for the facts of each chapter, by the notebook's number."""
    failing, lab = like_the_test(stage="int32_before_cumsum"), Lab()
    decode = decode_at_seed_size()
    tensors = on_int64(like_the_test())
    kinds = find_violations(
        lab.call(decode), Target.of(decode), decide(decode).kernels, lab.cache(decode).provenance
    )
    seen = missing_token_bound(decode) > tolerance_of_test("auto")
    claims = predict_claims()
    return {
        "01": {
            "checked": [name for name, does in tensors.items() if does == "reject"],
            "taken": [name for name, does in tensors.items() if does != "reject"],
        },
        "02": {"rejected": settings_on_rocm(), "nonzero bytes": _nonzero_bytes()},
        "03": {
            "violations": sorted({one.kind for one in kinds}),
            "the test says": "mismatch" if seen else "match",
        },
        "04": {"cause": _predicted_cause(tensors)},
        "05": _predict_changes(lab, failing),
        "06": {number: claims[number] for number in ("C17", "C18")},
        "07": {"pass": _predict_survivors(), "zeros in FP8": _predict_zeros()},
        "08": _predict_rows(),
        "09": {"cause": "window_plus_one"},  # the mask admits the key one window away
        "10": {"rule": _predicted_rule()},
        "11": predicted_cause(),
        "12": {"wrong": _predicted_heads()},
    }


def _predicted_heads() -> list[int] | None:
    """Return the first and the last wrong head of two groups of 20; None without a vLLM to read."""
    if not can_break_kernels():
        return None
    heads = predicted_heads(20)
    return [heads[0], heads[-1]]


def _predicted_rule() -> str | None:
    """Return what a loop over the context that starts with its second tile of 32 keys leaves out."""
    if not can_break_kernels():
        return None
    return "the keys from the cache from position 0 to 31 are missing"


def _nonzero_bytes() -> int:
    return int(torch.tensor([1e-3, -1e-3]).to(torch.uint8).count_nonzero())


def _predicted_cause(tensors: dict[str, str]) -> str:
    is_misread = tensors["query_start_loc"] == "reinterpret" and not _loc_is_int32()
    return "query_start_loc_as_int32" if is_misread else "newest_slot_unwritten"


def _predict_changes(lab: Lab, failing: Case) -> dict[str, list[str]]:
    from study.overview import CHANGES

    status = {
        name: predict_status(lab, failing.replace(**change)) for name, change in CHANGES.items()
    }
    fixing = [name for name, text in status.items() if text == "match"]
    return {"fixes": fixing, "does not": [name for name in status if name not in fixing]}


def _predict_survivors() -> list[str]:
    """Return the mutants whose effect stays below the tolerance for values of ±1e-3.

    Scores of at most head_size × 1e-6 leave all weights equal to four digits, so a mutant that keeps the
    values changes little. One key more moves a row by the distance of its value, at most 1e-3, from the
    mean of the others, about 1e-3 / sqrt(keys), divided by the number of keys.
    """
    case = like_the_test()
    scores = case.head_size * 1e-6 / case.head_size**0.5
    keys = min(case.lengths.ctx_lens) + 1
    one_key = (1e-3 + 1e-3 / keys**0.5) / (keys + 1)
    effects = {
        "scale_doubled": 1e-3 * 4 * scores,
        "causal_plus_one": one_key,
        "keys_of_next_sequence": 1e-3 * 4 * scores,
    }
    return [name for name, effect in effects.items() if effect <= tolerance_of_test("auto")]


def _predict_zeros() -> str:
    largest = 1e-3
    return "survived" if largest <= tolerance_of_test("fp8") else "killed"


def _predict_rows() -> dict[str, list[int]]:
    """Return who is served if int64 [0 … 8] is read as int32 pairs: 0, 0, 1, 0, 2, …"""
    pairs = [number for value in range(9) for number in (value, 0)][:9]
    served_seqs = [i for i in range(8) if pairs[i + 1] - pairs[i] == 1]
    return {"rows": [pairs[i] for i in served_seqs], "from sequences": served_seqs}
