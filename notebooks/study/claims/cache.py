"""Claims about the missing token and the fill of the cache."""

from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from study.claims.cases import MODEL, bits, decode_at_seed_size, decode_error, like_the_test
from study.claims.ledger import Claim, Finding, entry, found

OBSERVED = 1.685546875


@entry("C11", "001, 003", "the missing cache token causes the observed mismatch")
def missing_token(claim: Claim) -> Finding:
    """Compute its effect on the decode row of the test, and diagnose the failing stage."""
    size = decode_error(decode_at_seed_size())
    diagnosis = diagnose(like_the_test(stage="int32_before_cumsum"), propose=False)
    cause = diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status
    reading = f"it moves the row by {size:.2g}, not by 1.69; the diagnosis of the failing stage is {cause}"
    near = 0.5 <= size / OBSERVED <= 2
    return found(claim, near, reading, MODEL, predicted=size, observed=OBSERVED, cause=cause)


@entry("C12", "003", "an uninitialised slot explains a difference of 1.6855")
def uninitialised_slot(claim: Claim) -> Finding:
    """Measure the effect of zeros and of garbage, and compute what the slot would have to hold."""
    sizes = {
        empty: decode_error(decode_at_seed_size(empty_slots=empty))
        for empty in ("zeros", "garbage")
    }
    needed = OBSERVED * 930
    reading = (
        f"the caches of the test start as zeros, which gives {sizes['zeros']:.2g}; finite garbage up to 2 "
        f"gives {sizes['garbage']:.2g}; the slot would have to hold about {needed:.0f}"
    )
    return found(claim, sizes["zeros"] > 1, reading, MODEL, **sizes, needed=needed)


@entry("C13", "003", "Triton handles the boundary better")
def triton_boundary(claim: Claim) -> Finding:
    """Run the missing token on both kernels."""
    sizes = {name: decode_error(decode_at_seed_size(platform=name)) for name in ("gfx942", "sm_90")}
    ratio = sizes["gfx942"] / sizes["sm_90"]
    reading = f"both read the missing slot; the ratio of their errors is {ratio:.2f}"
    return found(claim, ratio > 1.5, reading, MODEL, **sizes)


@entry("C14", "003", "filling all tokens breaks prefill rows")
def filling_all(claim: Claim) -> Finding:
    """Compare the bits of the prefill rows for two fills."""
    outputs = [
        Lab().output(like_the_test(fill=fill, empty_slots="nan"))[:-1]
        for fill in ("context_only", "all_rows")
    ]
    same = bool(bits(outputs[0]).equal(bits(outputs[1])))
    reading = "no bit changes: the prefill kernel reads no cache position after the context"
    return found(claim, not same, reading, MODEL, same_bits=same)


ENTRIES = (missing_token, uninitialised_slot, triton_boundary, filling_all)
