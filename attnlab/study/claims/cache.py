"""Claims on the missing token and on what fills the cache."""

from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from attnlab.study.claims.cases import MODEL, bits, decode_at_seed_size, decode_error, like_the_test
from attnlab.study.claims.ledger import Claim, Finding, entry, found

OBSERVED = 1.685546875


@entry("C11", "001, 003", "the missing cache token causes the observed mismatch")
def missing_token(claim: Claim) -> Finding:
    """Compute what it predicts for the test's decode row, and diagnose the failing stage."""
    size = decode_error(decode_at_seed_size())
    told = diagnose(like_the_test(stage="int32_before_cumsum"), propose=False)
    cause = told.cause.name if told.cause is not None else told.status
    reading = f"it moves the row by {size:.2g}, not by 1.69; the failing stage is {cause}"
    near = 0.5 <= size / OBSERVED <= 2
    return found(claim, near, reading, MODEL, predicted=size, observed=OBSERVED, cause=cause)


@entry("C12", "003", "an uninitialised slot explains a difference of 1.6855")
def uninitialised_slot(claim: Claim) -> Finding:
    """Ask how large the slot would have to be, and what the test's caches are made of."""
    sizes = {
        empty: decode_error(decode_at_seed_size(empty_slots=empty))
        for empty in ("zeros", "garbage")
    }
    needed = OBSERVED * 930
    reading = (
        f"the test makes its caches of zeros, which gives {sizes['zeros']:.2g}; finite garbage up to 2 "
        f"gives {sizes['garbage']:.2g}; it would take numbers of about {needed:.0f}"
    )
    return found(claim, sizes["zeros"] > 1, reading, MODEL, **sizes, needed=needed)


@entry("C13", "003", "Triton handles the boundary better")
def triton_boundary(claim: Claim) -> Finding:
    """Run the missing token on both kernels."""
    sizes = {name: decode_error(decode_at_seed_size(platform=name)) for name in ("gfx942", "sm_90")}
    ratio = sizes["gfx942"] / sizes["sm_90"]
    reading = f"both read the missing slot and are off alike: {ratio:.2f} times as far"
    return found(claim, ratio > 1.5, reading, MODEL, **sizes)


@entry("C14", "003", "filling all tokens breaks prefill rows")
def filling_all(claim: Claim) -> Finding:
    """Compare the bits of the prefill rows under both fills."""
    outputs = [
        Lab().output(like_the_test(fill=fill, empty_slots="nan"))[:-1]
        for fill in ("context_only", "all_rows")
    ]
    same = bool(bits(outputs[0]).equal(bits(outputs[1])))
    reading = "their bits do not change: the prefill kernel reads nothing behind the context"
    return found(claim, not same, reading, MODEL, same_bits=same)


ENTRIES = (missing_token, uninitialised_slot, triton_boundary, filling_all)
