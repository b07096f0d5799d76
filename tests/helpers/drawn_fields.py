"""Fields of random small Cases of unified_attention that do not depend on what is tested."""

import random

EDGES = (
    0,
    1,
    7,
    15,
    16,
    17,
    31,
    32,
    33,
    40,
)  # lengths of contexts, at the edges of blocks of 8, 16 and 32


def drawn_fields(rng: random.Random, number: int) -> dict[str, object]:
    """Return fields drawn from ``rng``, and those that make an error show; ``number`` seeds the data."""
    return {
        "block_size": rng.choice((8, 16, 32)),
        "sinks": rng.random() < 0.3,
        "softcap": rng.choice((None, None, 3.0)),
        "num_splits": rng.choice((None, 0, 4)),
        "dtype": rng.choice(("float16", "float32")),
        "platform": "sm_90",
        "distribution": "normal",
        "empty_slots": "nan",
        "output_init": "nan",
        "reference_dtype": "float64",
        "seed": number,
    }
