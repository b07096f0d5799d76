"""X-ray attention kernels of torch on a GPU as black boxes, and measure how long that takes.

    python tools/xray_gpu.py --out docs/xray-gpu.json

Kernels: scaled_dot_product_attention as torch chooses, and with the FlashAttention backend alone. Sizes: 64
keys and 8 heads, and one sequence of vLLM's test. The exit code is 1 if an X-ray is not "right".
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

import torch
import xray_sound
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import attnlab
from attnlab.case.case import Case
from attnlab.tensors.call import KernelCall

SIZES = {  # heads, query_len, ctx_len, head_size
    "64 keys, 8 heads": (8, 16, 48, 128),
    "one sequence of the test, 8 heads": (8, 880, 410, 128),
    "one sequence of the test, 32 heads": (32, 880, 410, 128),
    "one sequence of the test, 64 heads": (64, 880, 410, 128),
}


def flash(call: KernelCall) -> None:
    """Run torch's FlashAttention kernel, sequence by sequence; it raises if torch cannot use it."""
    for seq, (query, key, value, _) in enumerate(xray_sound._sequences(call, "cuda")):
        mask = causal_lower_right(query.shape[1], key.shape[1])
        parts = [part[None] for part in (query, key, value)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = torch.nn.functional.scaled_dot_product_attention(
                *parts, mask, scale=call.sm_scale
            )
        xray_sound._write(call, seq, output[0].cpu())


flash.op, flash.kv_cache_dtypes = "unified_attention", ("auto",)  # type: ignore[attr-defined]
KERNELS = {
    "scaled_dot_product_attention": f"{xray_sound.__file__}:sdpa_gpu",
    "FlashAttention backend": f"{__file__}:flash",
}


def main() -> int:
    """Measure every kernel at every size; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    rows = [measure(name, size) for name in KERNELS for size in SIZES]
    document = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "measured": rows,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if all(row["status"] == "right" for row in rows) else 1


def measure(name: str, size: str) -> dict[str, object]:
    """Return what the second of two X-rays gives: the first one loads libraries."""
    heads, query_len, ctx_len, head_size = SIZES[size]
    case = Case(
        op="unified_attention",
        num_heads=heads,
        head_size=head_size,
        query_lens=(query_len,),
        ctx_lens=(ctx_len,),
        distribution="normal",
        stage="sound",
        platform="sm_90",
        backend=KERNELS[name],
    )
    lab = attnlab.Lab()
    attnlab.xray(case, lab=lab, confirm=False)
    began = time.perf_counter()
    found = attnlab.xray(case, lab=lab, confirm=False)
    seconds = time.perf_counter() - began
    off = (found.weights - found.expected).abs()
    return {
        "kernel": name,
        "size": size,
        "status": found.status,
        "runs": found.measurement.runs,
        "slots": found.setup.num_slots,
        "seconds": round(seconds, 3),
        "largest_error": float(off.max()),
        "largest_error_in_bounds": float((off / found.bound.clamp(min=1e-30)).max()),
        "sums": [float(found.weights.sum(-1).min()), float(found.weights.sum(-1).max())],
    }


if __name__ == "__main__":
    sys.exit(main())
