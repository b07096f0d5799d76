"""A table of many releases, for the tests of its page."""

from attnlab.case.case import Case
from attnlab.checker.finding import KINDS, Finding
from attnlab.checker.releases import Fault, ReleaseTable
from attnlab.checker.report import NotRun

OPS = ("unified_attention", "decode_attention_fwd", "merge_attn_states")
RELEASES = [f"0.{minor}.{patch}" for minor in range(9, 30) for patch in (0, 1)] + ["0.30.0.1"]
STATES = ("finding", "sound", "absent", "not run")


def fault(number: int) -> Fault:
    """Return a fault that the first, and some other, releases have."""
    op, kind = OPS[number % 3], [*KINDS][number % len(KINDS)]
    finding = Finding(
        op=op,
        kind=kind,
        case=Case(op=op, backend="vllm", num_heads=4, query_lens=(1,), ctx_lens=(300,)),
        evidence="1 of 1 rows is <wrong>",
        diagnosis=f"block offset beyond 2^31 elements, or_a_long_name_of_a_defect_{number}",
    )
    cells = {v: STATES[(i // (number + 2)) % 4] for i, v in enumerate(RELEASES)}
    return Fault(finding=finding, cells=cells)


TABLE = ReleaseTable(
    releases=RELEASES,
    device="cpu",
    platform="sm_90",
    ops={version: dict.fromkeys(OPS, version) for version in RELEASES},
    cases=100,
    cases_run=90,
    seconds=12.0,
    versions={"attnlab": "0.0.0", "torch": "2.0"},
    faults=sorted(map(fault, range(9)), key=lambda one: OPS.index(one.finding.op)),
    not_run=[NotRun(op="0.9.0 unified_attention", reason="no memory", cases=10, run="attnlab run")],
)
