"""The part of ``import attnlab`` that records calls."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from attnlab.recorder import capture as recording
from attnlab.recorder import other_files
from attnlab.recorder.recorded_op import RecordedOp
from attnlab.tensors.call import KernelCall


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


def read_call(
    path: Path | str, names: Mapping[str, str] | None = None, *, op: str | None = None
) -> KernelCall:
    """Return the call in a file or folder of attnlab, FlashInfer's log or SGLang's dumper, or in a dict.

    - ``names``: for a dict of tensors (.pt, .npz, safetensors), the key of each field, for example
      {"query": "q"}; a number is the value itself. Other fields are found by the names that vLLM,
      FlashAttention and FlashInfer use.
    - ``op``: the op that describes the call.

    Nothing in a file is executed. Raises InvalidCall with one line.
    """
    return other_files.read_call(Path(path), names, op=op)
