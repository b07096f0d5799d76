"""A report of a check with one entry of each kind, for the tests of its renderings."""

from attnlab.case.case import Case
from attnlab.checker.finding import Finding, KnownFinding, Location
from attnlab.checker.report import NotRun, Report

UNIFIED, PREFILL, MERGE = "unified_attention", "context_attention_fwd", "merge_attn_states"
CASE = Case(op=UNIFIED, num_heads=4, query_lens=(1, 17), ctx_lens=(16, 3))
KNOWN = Finding(
    op=UNIFIED,
    kind="wrong_output",
    case=CASE,
    evidence="row 3 | differs\nby <2>",
    diagnosis="sink_beside_alibi",
    seen=2,
)
NEW = Finding(
    op=PREFILL,
    kind="fails",
    case=CASE.replace(op=PREFILL),
    evidence="the kernel ended its process by SIGSEGV \x1b[0m",
    diagnosis="crash",
)
OUTSIDE = Finding(
    op=PREFILL,
    kind="out_of_bounds",
    case=CASE.replace(op=PREFILL),
    evidence="helper_kernels.py:321 reads 8 bytes after the end of K_cache",
    diagnosis="helper_kernels.py:321",
)
WRAP = Finding(
    op=PREFILL,
    kind="int32_wrap",
    case=CASE.replace(op=PREFILL),
    evidence="prefix_prefill.py:55 multiplies in int32: 65536 × 65536 = 4294967296 exceeds 2^31",
    diagnosis="int32_wrap",
)
LINK = "https://example.org/issues/1_2"

REPORT = Report(
    source="vllm-0.0.1.whl",
    version="vllm 0.0.1",
    cases=40,
    cases_run=31,
    ops={UNIFIED: 20, PREFILL: 11, MERGE: 0},
    locations={
        UNIFIED: Location(file="vllm/v1/attention/ops/triton_unified_attention.py", line=700),
        PREFILL: Location(file="vllm/v1/attention/ops/prefix_prefill.py", line=600),
    },
    seconds=12.5,
    findings=[KNOWN, NEW],
    observations=[OUTSIDE, WRAP],
    known=[
        KnownFinding(
            op=UNIFIED, kind="wrong_output", link=LINK, diagnosis="sink_beside_alibi", finding=KNOWN
        )
    ],
    missing=[KnownFinding(op=UNIFIED, kind="wrong_lse", link=LINK)],
    not_run=[NotRun(op=MERGE, reason="needs about 30.0 GiB", cases=9, run="attnlab run …")],
)
SOUND = Report(
    source="", version="models of 0.33.0", cases=5, cases_run=5, seconds=1.0, ops={UNIFIED: 5}
)
