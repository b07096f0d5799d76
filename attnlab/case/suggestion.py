"""Suggest the allowed value that a wrong one was probably meant to be."""

import difflib
import re
from collections.abc import Iterable

# Names in use elsewhere, lower case, and what a Case calls them.
_GPUS = {
    "gfx90a": ("mi200", "mi210", "mi250", "mi250x"),
    "gfx942": ("mi300", "mi300a", "mi300x", "mi325", "mi325x"),
    "gfx950": ("mi350", "mi350x", "mi355", "mi355x"),
    "gfx1100": ("7900", "7900xtx", "7900xt", "w7900"),
    "gfx1201": ("9070", "9070xt", "r9700"),
    "sm_80": ("a100", "a800", "sm80", "ampere"),
    "sm_90": ("h100", "h200", "h20", "gh200", "sm90", "hopper"),
}
_OTHER = {
    "float16": ("fp16", "half", "f16"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "float", "f32"),
    "fp8_e4m3": ("e4m3", "e4m3fn", "e4m3fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    "fp8_e5m2": ("e5m2", "float8_e5m2"),
    "cuda": ("gpu",),
}
_MEANT = {
    word: name for table in (_GPUS, _OTHER) for name, words in table.items() for word in words
}
# GPUs without rules of their own: the nearest platform, and the difference.
_NEAR = {
    word: ("sm_90", f"attnlab has no rules for {architecture}")
    for architecture, words in {
        "sm_100": ("b100", "b200", "gb200", "sm100", "sm_100", "blackwell"),
        "sm_103": ("b300", "gb300", "sm103", "sm_103"),
        "sm_120": ("rtx5090", "sm120", "sm_120"),
        "sm_89": ("l4", "l40", "l40s", "rtx4090", "sm89", "sm_89"),
    }.items()
    for word in words
}


def suggestion(word: object, allowed: Iterable[str]) -> str:
    """Return "; did you mean …?" with the nearest of the allowed values, or "" if none is near.

    Releases are compared as versions, names by their common letters and by a table of synonyms.
    """
    if not isinstance(word, str):
        return ""
    known = [name for name in allowed if isinstance(name, str)]
    key = re.sub(r"[\s-]+", "", word.lower())
    key = re.sub(r"^(amd|nvidia|instinct|radeon|geforce|rx|torch\.)+", "", key)
    if key in _NEAR and _NEAR[key][0] in known:
        name, why = _NEAR[key]
        return f"; {why}, the nearest platform is {name}"
    found = next((name for name in (_MEANT.get(key), key) if name in known), None)
    if found is None and (release := _nearest_release(word, known)):
        return release
    if found is None:
        folded = {name.lower().replace("-", "_"): name for name in known}
        close = difflib.get_close_matches(word.lower().replace("-", "_"), folded, 1, 0.6)
        found = folded[close[0]] if close else None
    return "" if found is None or found == word else f"; did you mean {found}?"


def _version(text: str) -> tuple[int, ...] | None:
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?\S*", text)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def _nearest_release(word: str, known: list[str]) -> str:
    """Return the supported rules that a release follows most, as attnlab applies them to a --source."""
    releases = {version: name for name in known if (version := _version(name)) is not None}
    wanted = _version(word)
    if wanted is None or len(releases) != len(known):
        return ""
    first, last = min(releases), max(releases)
    name = releases[first if wanted[:2] <= first[:2] else last]
    return f"; the rules of {name} are used for {word}{difference(word)}"


def difference(release: str) -> str:
    """Return how a release between 0.11.2 and 0.33.0 differs from the rules that are used for it, or "".

    Measured on single releases (docs/findings.md, docs/emulated-device.md); a change is somewhere between
    the last release that has it and the first that does not.
    """
    version = _version(release)
    if version is None or version[:2] <= (0, 11) or version[:2] >= (0, 33):
        return ""
    changes = (
        ((0, 16, 0), "its default softmax scale may be that of 0.11.2"),
        (
            (0, 25, 1),
            "its Triton decode kernel lets NaN of the value cache's unwritten tail through",
        ),
        (
            (0, 25, 1),
            "its ROCm kernel reads past the query with head size 64 and a GQA ratio up to 4",
        ),
        ((0, 31, 0), "its ROCm kernel lets NaN of the value cache's unwritten tail through"),
    )
    differs = [text for first, text in changes if version < first]
    return f", but {'; '.join(differs)}" if differs else ""
