"""The mask of one sequence of a call."""

import dataclasses
from typing import Any

from attnlab.tensors.call import KernelCall
from attnlab.tensors.visibility import SequenceMask


def mask_of(call: KernelCall, seq: int, **changes: Any) -> SequenceMask:
    """Return which keys the rows of a sequence see; ``changes``: of the call's Visibility."""
    rules = dataclasses.replace(call.visibility, **changes) if changes else call.visibility
    query_start_loc, seq_len = call.query_start_loc, int(call.seq_lens[seq])
    query_len = int(query_start_loc[seq + 1] - query_start_loc[seq])
    return rules.of_seq(seq, seq_len - query_len, seq_len)
