"""Mask: a rule by which the rows of a call see keys, with the ops of vLLM that have an argument for it.

A Case names one in its field ``mask``. The data of a mask are fields, too: ``causal_seqs``,
``mm_prefix_range``, ``rswa_prefix_lens``, ``chunk_lookback`` and ``tree_parents``. Data that are not given
follow from the lengths and the seed (:mod:`attnlab.tensors.case_call`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attnlab.case.fields import FieldType, Int, Lens, Maybe, Table
from attnlab.case.ops import ENCODER, OPS, PREFILL, UNIFIED, WRAPPER

CAUSAL = "causal"
_NEW = ("0.33.0",)
_BOTH = ("0.11.2", "0.33.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A rule by which rows see keys.

    - ``summary``: what a row sees. ``states``: the fields of a KernelCall that state it, each with its value,
      or the name of what :mod:`attnlab.tensors.case_call` makes of a Case. An op has the mask if its
      record has arguments for them; ``inside``: names that the op's source must have, too.
    - ``ops``: the releases of vLLM whose op has these arguments, by the op's name. The records of other
      libraries state their masks.
    - ``needs_window``: sliding_window must be above 0. ``sees_beyond_window``: rows see keys before it.
    - ``data``: the field of a Case with the mask's data.
    """

    name: str
    summary: str
    states: Mapping[str, bool | str]
    ops: Mapping[str, tuple[str, ...]]
    needs_window: bool = False
    sees_beyond_window: bool = False
    data: str | None = None
    inside: tuple[str, ...] = ()

    def is_in(self, op: str, release: str) -> bool:
        """Answer whether an op of a release has the mask; every op is causal."""
        return self.name == CAUSAL or release in self.ops.get(op, ()) or self.name in OPS[op].masks

    def is_of(self, op: str) -> bool:
        """Answer whether an op has the mask in some release."""
        return op in self.ops or self.name in OPS[op].masks


_ALL = (
    Mask(
        name=CAUSAL,
        summary="each row sees the keys up to its own, within the sliding window if there is one",
        states={},
        ops={},
    ),
    Mask(
        name="bidirectional",
        summary="each row sees the new tokens after it, too; a window has two sides, but that of the "
        "prefill kernel only the left one",
        states={"causal": False},
        ops={WRAPPER: _NEW, PREFILL: _NEW, ENCODER: _NEW, UNIFIED: _NEW},
    ),
    Mask(
        name="causal_by_sequence",
        summary="some sequences are causal, the others bidirectional",
        states={"causal": "causal_seqs"},
        ops={UNIFIED: _NEW},
        data="causal_seqs",
        inside=("USE_PER_SEQ_CAUSAL",),
    ),
    Mask(
        name="ranges",
        summary="causal, and bidirectional within ranges of positions, as of images; a range extends beyond "
        "the window",
        states={"mm_prefix_range": "ranges"},
        ops={UNIFIED: _NEW},
        sees_beyond_window=True,
        data="mm_prefix_range",
    ),
    Mask(
        name="ranges_in_window",
        summary="causal, and bidirectional within ranges of positions that the window limits to the left",
        states={"mm_prefix_range": "ranges", "mm_prefix_clamp_sliding_window": True},
        ops={UNIFIED: _NEW},
        needs_window=True,
        data="mm_prefix_range",
    ),
    Mask(
        name="prefix_and_window",
        summary="each row sees a prefix of its sequence, and the keys of the window (R-SWA)",
        states={"rswa_prefix_lens": "prefix_lens"},
        ops={UNIFIED: _NEW},
        needs_window=True,
        sees_beyond_window=True,
        data="rswa_prefix_lens",
    ),
    Mask(
        name="chunks",
        summary="each row sees its own chunk, up to itself, and chunk_lookback chunks before; a chunk has "
        "sliding_window // (chunk_lookback + 1) tokens",
        states={"chunk_lookback": "lookback"},
        ops={UNIFIED: _NEW},
        needs_window=True,
        data="chunk_lookback",
    ),
    Mask(
        name="tree",
        summary="the new tokens are a tree of drafts: a bias for pairs of them, -inf off a row's branch",
        states={"qq_bias": "tree_bias"},
        ops={UNIFIED: _BOTH},
        data="tree_parents",
    ),
)
MASKS: dict[str, Mask] = {mask.name: mask for mask in _ALL}
MASK_DATA = tuple(dict.fromkeys(mask.data for mask in _ALL if mask.data is not None))
# Mask data that must fit the lengths of a Case: other lengths need other data.
DATA_OF_LENGTHS = tuple(name for name in MASK_DATA if name != "chunk_lookback")
# The type and the help text of each field with the data of a mask.
DATA_FIELDS: dict[str, tuple[FieldType, str]] = {
    "causal_seqs": (
        Maybe(Lens(0), "every second one, from the first"),
        "for each sequence 1 if it is causal, 0 if bidirectional (mask causal_by_sequence)",
    ),
    "mm_prefix_range": (
        Maybe(Table("positions"), "two per sequence, from its lengths"),
        "bidirectional ranges, for each sequence the first and last position of each (mask ranges or "
        "ranges_in_window); 0,0 is no range",
    ),
    "rswa_prefix_lens": (
        Maybe(Lens(0), "half of each context"),
        "number of keys at the begin of each sequence that all its rows see (mask prefix_and_window)",
    ),
    "chunk_lookback": (
        Maybe(Int(0), "1"),
        "number of earlier chunks that a row sees (mask chunks)",
    ),
    "tree_parents": (
        Maybe(Lens(0), "drawn from seed"),
        "index of the parent of each new token, its own for a root (mask tree)",
    ),
}
