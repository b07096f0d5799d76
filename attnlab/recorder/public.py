"""The part of ``import attnlab`` that records calls."""

import contextlib
from collections.abc import Iterable

from attnlab.recorder import capture as recording
from attnlab.recorder.recorded_op import RecordedOp


def capture(
    *, keep: int = 16, ops: Iterable[RecordedOp | str] = ()
) -> contextlib.AbstractContextManager[recording.Calls]:
    """Record the attention calls that a block of code makes: ``with attnlab.capture() as calls: …``.

    Recorded are vLLM's attention ops, flash_attn_varlen_func with a block table, FlashInfer's stateless paged
    calls, torch's scaled_dot_product_attention, the ops of the entry-point group ``attnlab.ops``, and
    ``ops``. Each call is a :class:`attnlab.KernelCall` with copies of its inputs and of its output before
    and after the call; an op that another op calls is not recorded. The program is not changed: an error
    while recording is logged once.

    - ``keep``: how many of the last calls are kept.
    - ``ops``: further ops, "module:function". Their arguments are found by their names, for example
      query or q, key_cache or k_cache, block_table, seq_lens.
    """
    return recording.capture(keep=keep, ops=ops)
