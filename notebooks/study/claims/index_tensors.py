"""Claims about the dtypes of index tensors, and about which tests fail."""

import itertools

from attnlab.contracts.contract import ROCM_DECODE
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.diagnose import diagnose
from attnlab.tensors.case_call import make_query_start_loc
from study.claims.cases import MODEL, like_the_test, outcome, seed_size
from study.claims.ledger import Claim, Finding, entry, found

REFUSAL = "expected scalar type Int but found Long"


@entry("C1", "000, 001", "int64 tables raise 'expected scalar type Int but found Long'")
def int64_tables(claim: Claim) -> Finding:
    """Run the Case with one int64 table at a time, on the ROCm kernel and on Triton's."""
    seen = {
        f"{name} on {platform}": outcome(
            like_the_test(platform=platform, **{f"{name}_dtype": "int64"})
        )
        for name in ("block_table", "seq_lens")
        for platform in ("gfx942", "sm_90")
    }
    rocm = [text for name, text in seen.items() if "gfx942" in name]
    reading = "the ROCm kernel raises it for either table; Triton's accepts int64 and is right"
    return found(claim, all(text == REFUSAL for text in rocm), reading, MODEL, **seen)


@entry("C2", "000, 001", "all three index tensors are checked")
def all_checked(claim: Claim) -> Finding:
    """Pass each of the three as int64."""
    seen = {
        name: outcome(like_the_test(**{f"{name}_dtype": "int64"}))
        for name in ("block_table", "seq_lens", "query_start_loc")
    }
    reading = "two are; query_start_loc is read as int32 unchecked, and a row stays unwritten"
    return found(claim, all(text == REFUSAL for text in seen.values()), reading, MODEL, **seen)


@entry("C3", "000, 001", "changing dtype=torch.long to torch.int makes every index tensor int32")
def long_to_int(claim: Claim) -> Finding:
    """Build query_start_loc as the changed test does, and check its dtype."""
    dtype = str(make_query_start_loc((880, 410, 1), "int32_before_cumsum").dtype)
    reading = (
        f"torch.cumsum of an int32 tensor is {dtype.removeprefix('torch.')}: integers are promoted"
    )
    return found(claim, dtype == "torch.int32", reading, "torch itself", query_start_loc=dtype)


@entry("C4", "002, 003", "converting the index tensors in the op's wrapper fixes it")
def wrapper_cast(claim: Claim) -> Finding:
    """Run the stage in which the wrapper converts the tensors."""
    seen = {stage: outcome(like_the_test(stage=stage)) for stage in ("int64", "wrapper_cast")}
    reading = "with the conversion the same int64 tensors give the right output"
    return found(claim, seen["wrapper_cast"] == "0 wrong", reading, MODEL, **seen)


@entry("C7", "000, 001", "num_queries_per_kv = 1 means a GQA ratio of 64")
def ratio_of_64(claim: Claim) -> Finding:
    """Compute the ratio from the shapes of the tensors."""
    from attnlab.lab.lab import Lab

    call = Lab().call(like_the_test())
    reading = "the ratio is 64 query heads / 64 KV heads = 1, as note 003 states"
    heads = {"query_heads": call.query.shape[1], "kv_heads": call.key.shape[1]}
    return found(claim, call.num_queries_per_kv == 64, reading, "the call's shapes", **heads)


@entry("C8", "001, 003", "only head_size 128, num_queries_per_kv 1, sliding_window 0 fails")
def only_one_setting(claim: Claim) -> Finding:
    """Run the parameters of the test in the failing stage."""
    wrong = {}
    for head_size, group, window in itertools.product((24, 128), (1, 64), (0, 16)):
        case = like_the_test(
            stage="int32_before_cumsum",
            head_size=head_size,
            num_queries_per_kv=group,
            sliding_window=window,
        )
        wrong[f"{head_size}, {group}, {window}"] = outcome(case)
    failing = [name for name, text in wrong.items() if text != "0 wrong"]
    reading = f"of eight settings {len(failing)} fails: the one that reaches the ROCm kernel"
    return found(claim, failing == ["128, 1, 0"], reading, MODEL, **wrong)


@entry("C9", "001, 003", "8192 mismatches are exactly one token")
def one_token(claim: Claim) -> Finding:
    """Compute the elements of a row and of the output."""
    case = seed_size()
    row, rows = case.num_heads * case.head_size, case.lengths.num_tokens
    reading = f"64 × 128 = {row}, and {rows} such rows are the {rows * row} elements of the message"
    right = row == 8192 and rows * row == 43720704
    return found(claim, right, reading, "arithmetic", row=row, rows=rows)


@entry("C10", "001, 003", "index (5336, 0, 0) is the decode token")
def index_is_decode(claim: Claim) -> Finding:
    """Locate the row in the lengths that the test draws."""
    case = seed_size()
    seq, token = case.lengths.locate(5336)
    query_len = case.lengths.query_lens[seq]
    reading = f"row 5336 is sequence {seq}, token {token} of {query_len}"
    return found(claim, query_len == 1, reading, "the test's draw", seq=seq, query_len=query_len)


@entry("C19", "003", "after the cache is filled for decode the four failing tests pass")
def fix_passes(claim: Claim) -> Finding:
    """Run both cache fixes, and the merged cast, with both cache dtypes that failed."""
    seen = {}
    for stage, kv in itertools.product(
        ("fill_all", "fill_decode", "cast_after_cumsum"), ("auto", "fp8")
    ):
        write = "numeric" if kv == "fp8" else "scaled"
        seen[f"{stage}, {kv}"] = outcome(
            like_the_test(stage=stage, kv_cache_dtype=kv, cache_write=write)
        )
    passes = all(text == "0 wrong" for name, text in seen.items() if name.startswith("fill"))
    reading = "the row stays unwritten under both fills; with the cast after torch.cumsum they pass"
    return found(claim, passes, reading, MODEL, **seen)


@entry("C20", "001", "12 tests are skipped for fp8_e5m2 and 8 for accuracy")
def skip_counts(claim: Claim) -> Finding:
    """Count the tests that the two skip conditions of the notes select, for one and two devices."""
    counts = {}
    for devices, wrappers in itertools.product((1, 2), (1, 2)):
        grid = itertools.product(("plain", "alibi"), (0, 16), (24, 128), (1, 64))
        tests = [t for t in grid if t[0] == "plain" or t[1] == 0]
        e5m2 = len(tests)
        accuracy = 2 * sum(
            head == 128 and group == 1 and not window for _, window, head, group in tests
        )
        times = devices * wrappers
        counts[f"{devices} devices, {wrappers} kinds"] = f"{e5m2 * times} and {accuracy * times}"
    reading = "one device gives 12 and 4, two give 24 and 8: the two numbers are inconsistent"
    return found(claim, "12 and 8" in counts.values(), reading, "the test's parameters", **counts)


@entry("C21", "003", "GQA ratio 1 is special because errors are masked less")
def ratio_one(claim: Claim) -> Finding:
    """Run and diagnose the failing stage at each ratio that the ROCm kernel accepts."""
    causes = {}
    for group in (1, 2, 4, 8, 16, 64):
        case = like_the_test(stage="int32_before_cumsum", num_queries_per_kv=group)
        diagnosis = diagnose(case, propose=False)
        cause = diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status
        rocm = ROCM_DECODE in decide(case).kernels
        causes[f"{group}, {'ROCm' if rocm else 'Triton'}"] = f"{outcome(case)}, {cause}"
    special = len({text for name, text in causes.items() if "ROCm" in name}) > 1
    reading = "whole rows fail at every ratio from 1 to 16; the test has 1 and 64, and 64 runs on Triton's"
    return found(claim, special, reading, MODEL, **causes)


ENTRIES = (
    int64_tables,
    all_checked,
    long_to_int,
    wrapper_cast,
    ratio_of_64,
    only_one_setting,
    one_token,
    index_is_decode,
    fix_passes,
    skip_counts,
    ratio_one,
)
