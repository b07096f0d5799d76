"""Stages: the states of vLLM's test while its failure was investigated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How a test makes its index tensors, and which tokens it writes to the cache.

    - ``block_table``, ``seq_lens``, ``query_start_loc``: dtype, "int32" or "int64". ``query_start_loc``
      may also be "int32_before_cumsum": the input of torch.cumsum is int32, its result int64.
    - ``fill``: the tokens in the cache before the call, see :meth:`attnlab.case.lengths.Lengths.cached_lens`.
    - ``wrapper_cast``: the op's Python wrapper converts the index tensors to int32. This was proposed,
      not merged.
    - ``story``: what the stage is, for a person.
    """

    story: str
    block_table: str = "int32"
    seq_lens: str = "int32"
    query_start_loc: str = "int32"
    fill: str = "context_only"
    wrapper_cast: bool = False


INDEX_DTYPES = ("int32", "int64")
QUERY_START_LOC_DTYPES = ("int32", "int64", "int32_before_cumsum")
FILLS = ("context_only", "decode_rows", "all_rows")

STAGES: dict[str, Stage] = {
    "int64": Stage(
        story="the first form: every index tensor is torch.long",
        block_table="int64",
        seq_lens="int64",
        query_start_loc="int64",
    ),
    "int32_before_cumsum": Stage(
        story="the first dtype fix: torch.int inside torch.cumsum, which returns int64 again",
        query_start_loc="int32_before_cumsum",
    ),
    "fill_all": Stage(
        story="the first cache fix, in addition: every sequence written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="all_rows",
    ),
    "fill_decode": Stage(
        story="the second cache fix: only decode sequences written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="decode_rows",
    ),
    "wrapper_cast": Stage(
        story="the proposed fix: int64 everywhere, converted to int32 in the op's wrapper",
        block_table="int64",
        seq_lens="int64",
        query_start_loc="int64",
        wrapper_cast=True,
    ),
    "cast_after_cumsum": Stage(story="the merged fix: the cast to int32 after torch.cumsum"),
    "sound": Stage(
        story="as in production: int32, and every new token written before attention",
        fill="all_rows",
    ),
}
