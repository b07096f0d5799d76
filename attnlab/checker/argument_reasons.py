"""Why some parameters of vLLM's ops do not change the result, and some strides and offsets do not occur.

The key of an entry is (op, parameter); the op "" stands for all.
"""

from collections.abc import Mapping

from attnlab.case.ops import DECODE_FWD, PREFILL, UNIFIED, WRAPPER, WRITE

Reasons = Mapping[tuple[str, str], str]
_WRITTEN = "The op writes it."
_SCRATCH = "Scratch memory of the split path; the result does not depend on it."
_PATH = "It selects a path of the op; the result is the same."
_UNREAD = "No Triton kernel reads it."

VALUE_REASONS: Reasons = {
    **{("", name): _WRITTEN for name in ("output", "out", "o", "lse", "output_lse")},
    (WRAPPER, "max_seq_len"): _UNREAD,
    (PREFILL, "max_seq_len"): _UNREAD,
    (UNIFIED, "max_seqlen_k"): _UNREAD,
    (UNIFIED, "seq_threshold_3D"): _PATH,
    (UNIFIED, "num_par_softmax_segments"): _PATH,
    (UNIFIED, "use_td"): _PATH,
    **{
        (UNIFIED, name): _SCRATCH
        for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    },
    (DECODE_FWD, "attn_logits"): _SCRATCH,
    (DECODE_FWD, "num_kv_splits"): _PATH,
}
# The dtypes of tensors of integers, if vLLM does not pass int32 and int64.
INDEX_DTYPES: Mapping[tuple[str, str], tuple[str, ...]] = {
    (UNIFIED, "causal"): ("int32",),
    (UNIFIED, "mm_prefix_range"): ("int32",),
    (UNIFIED, "rswa_prefix_lens"): ("int32",),
    (WRITE, "slot_mapping"): ("int64",),
}
NO_STRIDE = "The kernels get no stride of it; it must be contiguous."
NO_FAR = "The kernels compute its offsets from sizes, and it is small."
# Scratch memory of the split path, whose offsets the kernels compute from sizes as well.
FAR_REASONS: Reasons = {
    (UNIFIED, name): "An offset beyond 2^31 needs 2 million programs, hours under the interpreter."
    for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
}
