"""Random small Cases of vLLM's ops with an op argument, by its name."""

import random

from attnlab.case.case import Case
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, OPS, UNIFIED, WRAPPER
from helpers.drawn_fields import EDGES, drawn_fields

FORMATS = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "diffkv")
# Op arguments without random Cases: what 0.33.0 does wrong.
_NOT_DRAWN = ("tensor_descriptors", "padded_tokens", "spaced_values")
DRAWN = tuple(
    name
    for name in OP_ARGUMENTS
    if name not in FORMATS and not any(one in name for one in _NOT_DRAWN)
)


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


def random_argument_case(name: str, number: int, **changes: object) -> Case:
    """Return the Case of a number with an op argument of DRAWN; its ops of vLLM take turns."""
    rng, argument = random.Random(f"{name} {number}"), OP_ARGUMENTS[name]
    ops = tuple(one for one in argument.ops if OPS[one].library == "vllm")
    ops = (UNIFIED,) if name == "fp8_query" else ops  # others have no scale for it
    op = OPS[ops[number % len(ops)]]
    group, heads = rng.choice((1, 2, 4)), rng.choice((1, 2))
    is_fp8 = op.k_scale is not None and rng.random() < 0.3
    drawn = drawn_fields(rng, number)
    fields = {
        "op": op.name,
        "backend": "vllm",
        "op_argument": name,
        **_lengths(rng, name, op.name),
        "sliding_window": rng.choice((0, 5, 16)) if op.sliding_window else 0,
        "num_heads": group * (1 if name == "latent_cache" else heads),
        "num_queries_per_kv": group,
        "head_size": rng.choice((16, 32, 144) if name == "latent_cache" else (16, 32, 48)),
        **drawn,
        "sinks": drawn["sinks"] if op.sinks else False,
        "softcap": drawn["softcap"] if op.softcap else None,
        "num_splits": _splits(name, op.name, drawn["num_splits"]),
        "kv_cache_dtype": "fp8" if is_fp8 else "auto",
        "fill": None if op.writes_cache else "all_rows",
        **argument.needs,
        **changes,
    }
    if fields["kv_cache_dtype"] == "fp8":
        fields |= {"k_scale": rng.choice((0.25, 1.0)), "v_scale": rng.choice((0.5, 2.0))}
    if name == "head_major_packed":  # a block has whole packs of 16 bytes
        fields["block_size"] = max(16, fields["block_size"])
    if name == "latent_cache":  # keys and values are one tensor
        fields["v_scale"] = fields.get("k_scale", 1.0)
    if fields.get("alibi"):
        fields |= {"sliding_window": 0, "sinks": False}
    return Case(**fields)


def _lengths(rng: random.Random, name: str, op: str) -> dict[str, tuple[int, ...]]:
    """Return lengths that an op takes; the last sequence of a merge has no context."""
    count, longest = rng.randint(1, 3), 3 if op == MERGE else 17
    news = tuple(min(rng.choice((1, 1, 2, 5, 9, 17)), longest) for _ in range(count))
    contexts = tuple(rng.choice(EDGES) for _ in range(count))
    # 0.33.0 passes no addresses of blocks to the prefill kernel.
    if op == DECODE_FWD or (op == WRAPPER and name == "block_pointers"):
        news = (1,) * count
    if op == ENCODER:
        return {"query_lens": news, "ctx_lens": (0,) * count}
    if op == MERGE:
        return {"query_lens": (*news, 2), "ctx_lens": (*(max(1, one) for one in contexts), 0)}
    return {"query_lens": news, "ctx_lens": contexts}


def _splits(name: str, op: str, drawn: int | None) -> int | None:
    """Return the number of parts of a sequence that an op takes."""
    if OPS[op].num_splits is None:
        return None
    if name == "short_scratch":
        return 4
    return max(drawn, OPS[op].min_splits) if drawn is not None else None
