"""The script of a mask that an op takes with an INT4 cache and ignores: its output is the same without it."""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.ops import UNIFIED

# By mask: the argument that carries it, and its value in a call without it.
_CARRIED = {
    "ranges_in_window": ("mm_prefix_clamp_sliding_window", False),
    "prefix_and_window": ("rswa_prefix_lens", None),
    "chunks": ("chunk_lookback", -1),
}


def has_ignored_script(case: Case) -> bool:
    """Answer whether a script can show that the op ignores the mask of a Case."""
    return case.op == UNIFIED and case.argument.is_packed and case.mask in _CARRIED


def ignored_facts(case: Case) -> dict[str, Any]:
    """Return what the templates need: the argument, "" without such a script, its other value, the mode."""
    if not has_ignored_script(case):
        return {"ignored": ""}
    name, neutral = _CARRIED[case.mask]
    cache = case.argument.cache
    assert cache is not None
    return {"ignored": name, "neutral": repr(neutral), "mode": cache.mode}
