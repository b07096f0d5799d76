"""Claims about what each kernel accepts and where it reads from."""

import dataclasses
import itertools

import torch

from attnlab.case.ops import PREFILL
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.lab.lab import Lab
from study.claims.cases import MODEL, bits, is_rejected, like_the_test, outcome
from study.claims.ledger import Claim, Finding, entry, found


@entry("C5", "000, 001", "fp8_e5m2 is rejected by the ROCm kernel")
def e5m2_rejected(claim: Claim) -> Finding:
    """Run the Case with an e5m2 cache."""
    text = outcome(like_the_test(kv_cache_dtype="fp8_e5m2", cache_write="numeric"))
    right = text == "Unsupported KV cache dtype: fp8_e5m2"
    return found(claim, right, f"it raises: {text}", MODEL, outcome=text)


@entry(
    "C6", "003", "the rejection needs head_size 128 and a GQA ratio of 1 to 16: the custom kernel's"
)
def rejection_needs(claim: Claim) -> Finding:
    """Run an e5m2 cache with the parameters of the test, and compare with the dispatch."""
    agree, rejected = True, []
    for head_size, group, window in itertools.product((24, 128), (1, 64), (0, 16)):
        case = like_the_test(
            kv_cache_dtype="fp8_e5m2",
            cache_write="numeric",
            head_size=head_size,
            num_queries_per_kv=group,
            sliding_window=window,
            x=8,
        )
        refused = is_rejected(case)
        agree &= refused == (ROCM_DECODE in decide(case).kernels)
        if refused:
            rejected.append(f"{head_size}, {group}, {window}")
    needed = all(name.startswith("128, 1,") for name in rejected)
    reading = (
        "it is raised exactly where that kernel is dispatched; sliding_window 0 is required too"
    )
    return found(claim, agree and needed and bool(rejected), reading, MODEL, rejected=rejected)


@entry("C15", "002, 004", "decode kernels read keys and values from the cache alone")
def decode_reads_cache(claim: Claim) -> Finding:
    """Put NaN in the arguments for new tokens and check whether a decode row changes."""
    same = {}
    for platform in ("gfx942", "sm_90"):
        case, lab = like_the_test(platform=platform, stage="sound"), Lab()
        target, kernels = Target.of(case), decide(case).kernels
        outputs = []
        for poison in (False, True):
            call = lab.call(case)
            if poison:
                nan = torch.full_like(call.key, torch.nan)
                call = dataclasses.replace(call, key=nan, value=nan)
            model.run(call, target, [name for name in kernels if name != PREFILL])
            outputs.append(bits(call.buffer[-1]))
        same[kernels[-1]] = bool(outputs[0].equal(outputs[1]))
    reading = "NaN in the arguments changes no bit of the decode row"
    return found(claim, all(same.values()), reading, MODEL, **same)


@entry("C16", "002, 004", "context_attention_fwd skips decode sequences")
def prefill_skips(claim: Claim) -> Finding:
    """Run the prefill kernel alone, as the op calls it and as a test calls it directly."""
    written = {}
    for op in ("chunked_prefill_paged_decode", "context_attention_fwd"):
        case = like_the_test(op=op, stage="sound")
        call = Lab().call(case)
        before = call.buffer.clone()
        model.run(call, Target.of(case), (PREFILL,))
        written[op] = not bool(bits(call.buffer[-1]).equal(bits(before[-1])))
    reading = "it does if chunked_prefill_paged_decode calls it (skip_decode); called directly it does not"
    right = not written["chunked_prefill_paged_decode"] and written["context_attention_fwd"]
    return found(claim, right, reading, MODEL, decode_row_written=written)


@entry(
    "C22",
    "003",
    "GFX11 and GFX12 use the custom kernel only for GQA ratios 3 to 16 and block_size 16",
)
def gfx11(claim: Claim) -> Finding:
    """Evaluate the dispatch predicate for seven ratios and two block sizes."""
    chosen = []
    for platform, size in itertools.product(("gfx1100", "gfx1201"), (16, 32)):
        for group in (1, 2, 3, 4, 8, 16, 32):
            case = like_the_test(
                platform=platform, block_size=size, num_queries_per_kv=group, num_heads=96
            )
            if TRITON_DECODE not in decide(case).kernels:
                chosen.append((size, group))
    right = bool(chosen) and all(size == 16 and 3 <= group <= 16 for size, group in chosen)
    reading = "this holds; head_size 128, no ALiBi and an unquantised cache are required too"
    return found(claim, right, reading, "the dispatch predicate", chosen=len(chosen))


ENTRIES = (e5m2_rejected, rejection_needs, decode_reads_cache, prefill_skips, gfx11)
