"""X-ray sound implementations whose rounding differs from vLLM's, and count the statements about them.

    python tools/xray_sound.py --runs 300
    python tools/xray_sound.py --rules --runs 1600 --first 9000

Implementations: torch's scaled_dot_product_attention, sequences split and merged, base 2, other tiles,
weights, sums and scores in half precision. Anything but "right" and "precision" is a wrong statement; the
exit code is then 1. With --rules, the rules beyond the catalogue are searched in place of an X-ray, as for a
wrong output; any rule is a wrong statement.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn.attention.bias import causal_lower_right

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import faulty_attention  # noqa: E402

import attnlab  # noqa: E402
from attnlab.case.case import Case  # noqa: E402
from attnlab.case.errors import InvalidCase  # noqa: E402
from attnlab.diagnosis.confirmation import find_rule  # noqa: E402
from attnlab.lab.lab import Lab  # noqa: E402
from attnlab.tensors.cache import to_flash  # noqa: E402
from attnlab.tensors.call import KernelCall  # noqa: E402


def sdpa(call: KernelCall) -> None:
    """Run torch's scaled_dot_product_attention in the query's dtype, sequence by sequence."""
    for seq, (query, key, value, hidden) in enumerate(_sequences(call)):
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        if call.alibi_slopes is not None:
            bias = bias + call.alibi_slopes[:, None, None] * _away(call, seq)
        _write(
            call,
            seq,
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, bias.to(query.dtype), scale=call.sm_scale
            ),
        )


def sdpa_gpu(call: KernelCall) -> None:
    """Run torch's scaled_dot_product_attention on a GPU; without window and ALiBi that is a fused kernel."""
    for seq, (query, key, value, hidden) in enumerate(_sequences(call, "cuda")):
        plain = call.alibi_slopes is None and not call.sliding_window
        mask: object = causal_lower_right(query.shape[1], key.shape[1])
        if not plain:
            bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
            if call.alibi_slopes is not None:
                bias = bias + call.alibi_slopes[:, None, None] * _away(call, seq)
            mask = bias.to(query.dtype).cuda()
        output = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], mask, scale=call.sm_scale
        )
        _write(call, seq, output[0].cpu())


def split(call: KernelCall) -> None:
    """Compute parts of 24 keys with their own maximum, and merge them in base 2 in float32."""
    for seq, (query, key, value, hidden) in enumerate(_sequences(call)):
        scale = call.sm_scale or query.shape[2] ** -0.5
        scores = query.float() @ key.float().transpose(1, 2) * scale
        if call.alibi_slopes is not None:
            scores = scores + call.alibi_slopes[:, None, None] * _away(call, seq)
        scores = scores.masked_fill(hidden, -torch.inf) * 1.4426950408889634
        parts = []
        for part, values in zip(scores.split(24, 2), value.split(24, 1), strict=True):
            top = part.amax(-1, keepdim=True).clamp(min=-1e30)
            weights = torch.exp2(part - top)
            mixed = weights.to(value.dtype).float() @ values.float()
            parts.append((top, weights.sum(-1, keepdim=True), mixed))
        top = torch.stack([part[0] for part in parts]).amax(0)
        total = sum(torch.exp2(part[0] - top) * part[1] for part in parts)
        _write(call, seq, sum(torch.exp2(part[0] - top) * part[2] for part in parts) / total)


def _sequences(call: KernelCall, device: str = "cpu"):
    """Yield query, key, value [heads, tokens, head_size] on a device, and hidden keys, of each sequence."""
    caches = to_flash(call.key_cache.to(device), call.value_cache.to(device))
    queries, table = call.query.to(device), call.block_table.long().to(device)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(*call.query_start_loc[seq : seq + 2].tolist())
        blocks = table[seq]
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(call.num_queries_per_kv, 1)
            for cache in caches
        )
        away = _away(call, seq)
        hidden = away > 0
        if call.sliding_window:
            hidden = hidden | (away <= -call.sliding_window)
        yield queries[rows].transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), hidden


def _away(call: KernelCall, seq: int) -> torch.Tensor:
    seq_len, query_len = int(call.seq_lens[seq]), int(call.query_lens[seq])
    return torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]


def _write(call: KernelCall, seq: int, output: torch.Tensor) -> None:
    rows = slice(*call.query_start_loc[seq : seq + 2].tolist())
    call.output[rows] = output.transpose(0, 1).to(call.output.dtype)


for _kernel in (sdpa, sdpa_gpu, split):
    _kernel.op, _kernel.kv_cache_dtypes = "unified_attention", ("auto",)  # type: ignore[attr-defined]
TILED = ("sound", "tile_16", "tile_64", "bfloat16_sums", "bfloat16_weights", "bfloat16_scores")
KERNELS = {
    "sdpa": (f"{__file__}:sdpa", sdpa),
    "sdpa_gpu": (f"{__file__}:sdpa_gpu", sdpa_gpu),
    "split": (f"{__file__}:split", split),
    **{n: (f"{faulty_attention.__file__}:{n}", getattr(faulty_attention, n)) for n in TILED},
}


def draw_case(number: int, op: str, backend: str) -> Case:
    """Return a random valid Case; the same number gives the same Case."""
    draw = random.Random(number)
    while True:
        count = draw.randint(1, 4)
        fields = {
            "op": op,
            "backend": backend,
            "platform": "sm_90",
            "num_queries_per_kv": draw.choice((1, 2, 4)),
            "head_size": draw.choice((16, 32, 64)),
            "block_size": draw.choice((8, 16, 32)),
            "dtype": draw.choice(("float16", "bfloat16", "float32")),
            "query_lens": tuple(draw.choice((1, 1, 2, 7, 17)) for _ in range(count)),
            "ctx_lens": tuple(draw.choice((0, 1, 15, 16, 31, 33, 64, 90)) for _ in range(count)),
            "sliding_window": draw.choice((0, 0, 5, 16, 40)),
            "alibi": draw.random() < 0.2,
            "sm_scale": draw.choice((None, None, 0.05, 0.5)),
            "distribution": draw.choice(("normal", "uniform_1e-3")),
            "empty_slots": draw.choice(("zeros", "nan", "garbage")),
            "seed": number,
        }
        fields["num_heads"] = fields["num_queries_per_kv"] * draw.choice((1, 2, 3))
        try:
            return Case(**fields)
        except InvalidCase:
            continue


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rules", action="store_true", help="search rules, without an X-ray")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    began = time.perf_counter()
    wrong = 0
    names = [name for name in KERNELS if torch.cuda.is_available() or name != "sdpa_gpu"]
    for number in range(args.first, args.first + args.runs):
        name = names[number % len(names)]
        spec, kernel = KERNELS[name]
        case = draw_case(number, kernel.op, spec)
        if args.rules:
            lab = Lab()
            rule = find_rule(lab, case, lambda one, lab=lab: lab.run(one).output)
            counts[name]["no rule" if rule is None else "rule"] += 1
            wrong += rule is not None
            if rule is not None:
                print(f"{name} {number} {rule.text}\n  {case.to_cli()}", flush=True)
            continue
        found = attnlab.xray(case, limit_s=6)
        counts[name][found.status] += 1
        if found.status not in ("right", "precision"):  # a wrong statement, or none
            wrong += found.status == "described"
            print(
                f"{name} {number} {found.status}: {found.sentences[0]}\n  {case.to_cli()}",
                flush=True,
            )
    for name, found in counts.items():
        print(f"{name:18} {dict(found)}")
    seconds = time.perf_counter() - began
    print(f"{wrong} wrong statements in {args.runs} sound runs, {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
