"""Random small Cases of triton_prefill_attention, the op of encoders."""

import random

from attnlab.case.case import Case
from attnlab.case.ops import ENCODER


def random_encoder_case(number: int, **changes: object) -> Case:
    """Return the Case of a number, with random lengths, mask, window, sizes and layout."""
    draw = random.Random(number)
    group = draw.choice((1, 2, 3, 5))
    sequences = range(draw.randint(1, 3))
    lens = tuple(draw.choice((1, 5, 31, 32, 33, 127, 128, 130)) for _ in sequences)
    fields = {
        "op": ENCODER,
        "mask": draw.choice(("causal", "bidirectional")),
        "sliding_window": draw.choice((0, 2, 5, 32, 129)),
        "num_heads": group * draw.choice((1, 2)),
        "num_queries_per_kv": group,
        "head_size": draw.choice((16, 48, 64, 80)),
        "dtype": draw.choice(("float16", "float32")),
        "sinks": draw.random() < 0.3,
        "sm_scale": draw.choice((None, 0.125, 2.0)),
        "kv_layout": draw.choice(("contiguous", "fused")),
        "pad_batch": draw.choice((0, 3)),
        "stage": draw.choice(("sound", "int64")),
        "query_lens": lens,
        "ctx_lens": (0,) * len(lens),
        "fill": "all_rows",
        "empty_slots": "nan",
        "output_init": "nan",
        "distribution": "normal",
        "platform": "sm_90",
        "seed": number,
        **changes,
    }
    return Case(**fields)
