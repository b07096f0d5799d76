"""How many random examples a long test tries."""

import os


def examples(most: int) -> int:
    """Return ``most``, or a quarter of it if ATTNLAB_EXAMPLES is "fewer", as in CI."""
    return most // 4 if os.environ.get("ATTNLAB_EXAMPLES") == "fewer" else most
