"""Show int32 overflows of vLLM 0.33.0 at the sizes that `attnlab horizon` states, without attnlab.

    python tools/horizon_native.py context --count 4097

Runs one op with many short sequences on a GPU, and compares the last sequence with float64. ``--count``: of
sequences (of ``merge``, of tokens); one less than the first count that fails is right. ``--one-query``: the
queries have one address, so that only the output overflows. Needs vLLM's Triton ops and up to 40 GB.
"""

import argparse

import torch

_FIRST = {"context": 4097, "decode": 233_017, "merge": 524_289}  # counts that fail
_GPU = {"device": "cuda", "dtype": torch.float16}
Pair = tuple[torch.Tensor, torch.Tensor]  # an output and what it must be


def context(count: int, one_query: bool, alibi: bool) -> Pair:
    """Run ``context_attention_fwd``: 128 new tokens after 16 cached ones, 32 heads of 128 on 8 KV heads."""
    from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd

    new, ctx, heads, kv_heads, size = 128, 16, 32, 8, 128
    rows = torch.randn(new, heads, size, **_GPU)
    query = rows[:1].expand(count * new, -1, -1) if one_query else rows.repeat(count, 1, 1)
    key, value = (torch.randn(new, kv_heads, size, **_GPU).repeat(count, 1, 1) for _ in range(2))
    output = torch.zeros(count * new, heads, size, **_GPU)
    keys = torch.randn(1, kv_heads, size // 8, ctx, 8, **_GPU)
    values = torch.randn(1, kv_heads, size, ctx, **_GPU)
    table = torch.zeros(count, (new + ctx) // ctx, device="cuda", dtype=torch.int32)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * new
    lens = torch.full((count,), new + ctx, device="cuda", dtype=torch.int32)
    slopes = torch.linspace(0.01, 0.5, heads, device="cuda") if alibi else None
    one = torch.ones(1, device="cuda")
    tensors = (key, value, output, "auto", keys, values, table, starts, lens, new + ctx, new)
    context_attention_fwd(query, *tensors, one, one, alibi_slopes=slopes)
    cached = keys[0].permute(2, 0, 1, 3).reshape(ctx, kv_heads, size), values[0].permute(2, 0, 1)
    every_key, every_value = (
        torch.cat([old, fresh[-new:]]).double().repeat_interleave(heads // kv_heads, 1)
        for old, fresh in zip(cached, (key, value), strict=True)
    )
    at = torch.arange(new + ctx, device="cuda")
    scores = torch.einsum("qhd,khd->hqk", query[-new:].double(), every_key) * size**-0.5
    if slopes is not None:
        scores += slopes.double()[:, None, None] * (at - at[ctx:, None])
    weights = scores.masked_fill(at > at[ctx:, None], -torch.inf).softmax(-1)
    return output[-new:], torch.einsum("hqk,khd->qhd", weights, every_value)


def decode(count: int, one_query: bool) -> Pair:
    """Run ``decode_attention_fwd`` on a latent cache: 16 heads of 576, values of 512, 32 keys."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    heads, size, value_size, keys = 16, 576, 512, 32
    query = torch.randn(1 if one_query else count, heads, size, **_GPU).expand(count, -1, -1)
    latent = torch.randn(keys, 1, size, **_GPU)
    output = torch.zeros(count, heads, value_size, **_GPU)
    lse = torch.zeros(count, heads, device="cuda")
    slots = torch.arange(keys, device="cuda", dtype=torch.int32).expand(count, -1)
    lens = torch.full((count,), keys, device="cuda", dtype=torch.int32)
    scratch = torch.empty(count, heads, 1, value_size + 1, device="cuda")
    caches, scale = (latent, latent[..., :value_size]), size**-0.5
    tensors = (*caches, output, lse, slots, lens, scratch, 1, scale)
    decode_attention_fwd(query, *tensors, is_mla=True)
    scores = query[-1].double() @ latent[:, 0].double().T * scale
    return output[-1], scores.softmax(-1) @ latent[:, 0, :value_size].double()


def merge(count: int) -> Pair:
    """Run ``merge_attn_states``: 32 heads of 128."""
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    parts = [torch.randn(count, 32, 128, **_GPU) for _ in range(2)]
    lse = [torch.randn(32, count, device="cuda") for _ in range(2)]
    output = torch.zeros(count, 32, 128, **_GPU)
    merge_attn_states(output, parts[0], lse[0], parts[1], lse[1])
    weights = torch.stack([one[:, -1] for one in lse]).double().softmax(0)[..., None]
    return output[-1], (weights * torch.stack([one[-1] for one in parts]).double()).sum(0)


def main() -> None:
    """Run one op, and print the largest error of the last sequence or token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("op", choices=_FIRST)
    parser.add_argument("--count", type=int, help="default: the first count that fails")
    parser.add_argument("--one-query", action="store_true")
    parser.add_argument("--alibi", action="store_true", help="of context")
    args = parser.parse_args()
    count = args.count or _FIRST[args.op]
    torch.manual_seed(0)
    if args.op == "context":
        found, right = context(count, args.one_query, args.alibi)
    else:
        found, right = decode(count, args.one_query) if args.op == "decode" else merge(count)
    torch.cuda.synchronize()
    print(f"{args.op}, {count}: largest error {float((found.double() - right).abs().max()):.3g}")


if __name__ == "__main__":
    main()
