"""The command ``attnlab stages``."""

from typing import Any

from attnlab.case.stages import STAGES
from attnlab.cli.catalogue import Catalogue


def _load() -> dict[str, dict[str, Any]]:
    """Return the facts of each stage."""
    return {
        name: {
            "meaning": stage.story,
            "block_table": stage.block_table,
            "seq_lens": stage.seq_lens,
            "query_start_loc": stage.query_start_loc,
            "fill": stage.fill,
            "wrapper_cast": stage.wrapper_cast,
        }
        for name, stage in STAGES.items()
    }


COMMAND = Catalogue(
    noun="stage",
    purpose="List the stages of vLLM's test: dtypes of its index tensors, and what it writes to the cache.",
    example="int32_before_cumsum",
    columns=("meaning", "query_start_loc", "fill"),
    load=_load,
).command
