"""Random small Cases of unified_attention whose cache has another format, by their op argument."""

import random

from attnlab.case.case import Case
from attnlab.case.ops import UNIFIED
from helpers.drawn_fields import EDGES, drawn_fields

FORMATS = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "diffkv")


def random_format_case(name: str, number: int, **changes: object) -> Case:
    """Return the Case of a number, with random lengths, window, sinks, sizes and number of splits."""
    rng = random.Random(f"{name} {number}")
    count, group = rng.randint(1, 3), rng.choice((1, 2, 4))
    is_decode = rng.random() < 0.4  # unified_attention splits those alone
    is_fp8 = name == "diffkv" and rng.random() < 0.3
    fields = {
        "op": UNIFIED,
        "backend": "vllm",
        "op_argument": name,
        "query_lens": tuple(1 if is_decode else rng.choice((1, 2, 5, 9, 17)) for _ in range(count)),
        "ctx_lens": tuple(rng.choice(EDGES) for _ in range(count)),
        "sliding_window": rng.choice((0, 0, 1, 5, 16)),
        "num_heads": group * rng.choice((1, 2)),
        "num_queries_per_kv": group,
        "head_size": rng.choice((16, 32, 48, 64)),
        **drawn_fields(rng, number),
        "kv_cache_dtype": "fp8" if is_fp8 else "auto",
        "k_scale": rng.choice((0.25, 1.0)) if is_fp8 else 1.0,
        "v_scale": rng.choice((0.5, 2.0)) if is_fp8 else 1.0,
        "stage": "sound",
        **changes,
    }
    return Case(**fields)
