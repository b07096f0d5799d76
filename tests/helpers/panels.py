"""Cases for the tests of panels."""

from attnlab.case.case import Case

SMALL = Case(
    num_heads=4,
    head_size=32,
    block_size=16,
    query_lens=(5, 1, 40, 1),
    ctx_lens=(20, 33, 0, 31),
    x=8,
    atol=1e-4,
    platform="sm_90",
    stage="cast_after_cumsum",
)
# A Case whose decode rows are wrong: the kernel reads int64 offsets as int32.
LOST = SMALL.replace(platform="gfx942", head_size=64, stage="int32_before_cumsum")


def ignore_step(step: str, done: int | None = None, total: int | None = None) -> None:
    """Accept a step of a run and do nothing."""
