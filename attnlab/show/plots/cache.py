"""Plots of a cache: the state of each slot that is read, for the whole cache or for some blocks."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.contracts.slot_states import EMPTY, FOREIGN, NOT_READ, STATES, SlotMap, SlotState
from attnlab.show.plots.artists import hatch_cells, put_legend, runs
from attnlab.tensors.cache import NOBODY

UNUSED = -2  # a slot that is neither written nor read, in the image; a written one is NOT_READ
_COLOURS = {
    SlotState.OWN: "#3f6f9f",
    SlotState.OWN_FUTURE: "#9c755f",
    SlotState.OUTSIDE_WINDOW: "#76b7b2",
    SlotState.FREED: "#59a14f",
    SlotState.UNWRITTEN: "#e15759",
    SlotState.UNWRITTEN_TAIL: "#f1ce63",
    SlotState.OTHER_POSITION: "#ff9da7",
    SlotState.OTHER_SEQUENCE: "#b07aa1",
    SlotState.NEVER_MAPPED: "#f28e2b",
    SlotState.UNKNOWN: "#79706e",
}
_NOT_READ = {UNUSED: ("#e3e3e3", "not used"), NOT_READ: ("#a8c5e2", "written, not read")}
_HATCHES = dict.fromkeys(EMPTY, "xx") | dict.fromkeys(FOREIGN, "//")


def plot_cache(slot_map: SlotMap, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw every slot of a cache: a column per block, a row per slot.

    Columns are in the order of the block table, with a line between sequences; blocks in no row of the
    table are at the right. A circle marks the first of adjacent blocks that have slots of a hatched state.
    """
    ax = ax or plt.subplots(figsize=(9, 2.6), layout="constrained")[1]
    frame_cache(ax, slot_map)
    draw_cache(ax, slot_map, title=title)
    return ax


def frame_cache(ax: Axes, slot_map: SlotMap) -> None:
    """Draw what :func:`plot_cache` draws of any cache with as many blocks, slots and rows of the table."""
    blocks, slots = slot_map.states.shape
    table = slot_map.provenance.block_table
    ax.set(xlim=(-0.5, blocks - 0.5), ylim=(slots - 0.5, -0.5))
    _block_ticks(ax, *table.shape)
    ax.set_yticks(sorted({0, slots // 2, slots - 1}))
    ax.set_ylabel("slot")


def draw_cache(ax: Axes, slot_map: SlotMap, *, title: str = "") -> None:
    """Draw the slots on the axes of :func:`frame_cache`; see :func:`plot_cache`."""
    codes = _codes(slot_map)[slot_map.order().numpy()].T
    _draw(ax, codes)
    for state in _HATCHES:
        _circle(ax, codes == state.code, _COLOURS[state])
    seqs, width = slot_map.provenance.block_table.shape
    for i in range(1, seqs + (codes.shape[1] > seqs * width)):
        ax.axvline(width * i - 0.5, color="black", linewidth=0.8)
    ax.set_title(title or _finding(slot_map))
    put_legend(ax, _entries(codes), below=True)


def plot_blocks(
    slot_map: SlotMap,
    *,
    blocks: Sequence[int] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw some blocks of a cache, or all: a row per block, a column per slot."""
    rows = list(range(len(slot_map.states))) if blocks is None else list(blocks)
    ax = ax or plt.subplots(figsize=(8, 1.1 + 0.35 * len(rows)), layout="constrained")[1]
    codes = _codes(slot_map)[rows]
    _draw(ax, codes)
    ax.set_yticks(range(len(rows)), [_block_label(slot_map, block) for block in rows])
    ax.set_xticks(range(0, codes.shape[1], 4))
    ax.set(xlabel="slot of the block", title=title or _finding(slot_map))
    put_legend(ax, _entries(codes))
    return ax


def _codes(slot_map: SlotMap) -> Any:
    """Return what the image shows, [num_blocks, block_size]: an index into STATES, NOT_READ or UNUSED."""
    used = slot_map.is_read | (slot_map.provenance.seq != NOBODY)
    return np.where(used.numpy(), slot_map.states.numpy(), UNUSED)


def _draw(ax: Axes, codes: Any) -> None:
    """Draw the image, with a hatch over slots that do not hold the reader's token."""
    colours = [colour for colour, _ in _NOT_READ.values()] + [_COLOURS[state] for state in STATES]
    ax.imshow(
        codes,
        cmap=ListedColormap(colours),
        vmin=UNUSED,
        vmax=len(STATES) - 1,
        aspect="auto",
        interpolation="none",
        interpolation_stage="rgba",  # a colour per slot, not per pixel
    )
    for state, hatch in _HATCHES.items():
        if (codes == state.code).any():
            hatch_cells(ax, codes == state.code, hatch, "white")


def _entries(codes: Any) -> list[Patch]:
    """Return the legend's entries for what the image shows."""
    entries = []
    for code in np.unique(codes).tolist():
        if code in _NOT_READ:
            colour, label = _NOT_READ[code]
            entries.append(Patch(facecolor=colour, label=label))
        else:
            state = STATES[code]
            style: dict[str, Any] = {"facecolor": _COLOURS[state], "hatch": _HATCHES.get(state)}
            entries.append(Patch(**style, edgecolor="white", label=f"read: {state}"))
    return entries


def _circle(ax: Axes, mask: Any, colour: str) -> None:
    """Circle the first slot of each run of columns of a mask, since one slot of many is too small."""
    firsts = [first for first, _ in runs(mask.any(0))]
    style: dict[str, Any] = {"ms": 11, "mfc": "none", "mec": colour, "mew": 2, "clip_on": False}
    if firsts:
        ax.plot(firsts, mask[:, firsts].argmax(0), "o", **style)


def _block_ticks(ax: Axes, seqs: int, width: int) -> None:
    """Label each sequence below its blocks, ``width`` of them."""
    ax.set_xticks([width * (i + 0.5) - 0.5 for i in range(seqs)], [str(i) for i in range(seqs)])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel(f"blocks of sequence ({width} each)")


def _block_label(slot_map: SlotMap, block: int) -> str:
    owner = slot_map.at(block, 0).owner
    return f"block {block}" if owner is None else f"block {block} (sequence {owner[0]})"


def _finding(slot_map: SlotMap) -> str:
    counts = slot_map.counts()
    if not counts:
        return "no slot is read"
    if set(counts) == {SlotState.OWN}:
        return f"all {counts[SlotState.OWN]} slots that are read hold the reader's token"
    return "slots read: " + ", ".join(f"{number} {state}" for state, number in counts.items())
