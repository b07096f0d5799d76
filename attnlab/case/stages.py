"""The states that vLLM's test went through while its failure was investigated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How a test makes its index tensors and which tokens it writes to the cache.

    The three index tensors are each "int32" or "int64"; ``query_start_loc`` may also be
    "int32_before_cumsum": int32 was asked for, before torch.cumsum promoted it to int64.
    ``wrapper_cast`` is the conversion to int32 that was proposed for the op's Python wrapper.
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
        story="the first type fix: torch.int inside torch.cumsum, which promotes it back",
        query_start_loc="int32_before_cumsum",
    ),
    "fill_all": Stage(
        story="the first cache fix on top: every sequence written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="all_rows",
    ),
    "fill_decode": Stage(
        story="the second cache fix: decode sequences written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="decode_rows",
    ),
    "wrapper_cast": Stage(
        story="the proposal: int64 everywhere, converted in the op's wrapper",
        block_table="int64",
        seq_lens="int64",
        query_start_loc="int64",
        wrapper_cast=True,
    ),
    "cast_after_cumsum": Stage(story="the merged fix: the cast moved behind torch.cumsum"),
    "sound": Stage(
        story="as production does it: int32, every new token written before attention",
        fill="all_rows",
    ),
}
