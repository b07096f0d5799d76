"""Plot a Timeline; like the functions of :mod:`attnlab.show.plots`, it only draws."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from study.timeline import Attention, CacheWrite, Timeline

_WRITTEN, _READ, _MISSING = "#e69f00", "#56b4e9", "#d62728"
_WIDTH = 0.86  # of a call's column


def plot_timeline(timeline: Timeline, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw every call in order, with one lane of cache positions for each prompt.

    A cache write covers the positions that it fills and shows their number. An attention call covers the
    positions that it reads and shows its seq_len; those that no earlier call wrote are red and hatched.
    Lines separate the steps.
    """
    if ax is None:
        size = (max(5.0, 0.37 * len(timeline.events) + 1.2), 1.2 * len(timeline.prompt_lens) + 1.2)
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    lane = max(max(event.seq_lens) for event in timeline.attentions) * 1.25
    count = len(timeline.prompt_lens)
    bottom = [lane * (count - 1 - seq) for seq in range(count)]  # the first prompt on top
    written: dict[tuple[int, int], set[int]] = {}
    for x, event in enumerate(timeline.events):
        batch = _batch_of(timeline, event)
        for row, seq in enumerate(timeline.seq_ids(batch)):
            filled = written.setdefault((event.layer, seq), set())
            for first, last, style in _spans(event, batch, row, filled):
                ax.add_patch(Rectangle((x, bottom[seq] + first), _WIDTH, last - first, **style))
            seq_len, new = batch.seq_lens[row], batch.query_lens[row]
            text = f"+{new}" if isinstance(event, CacheWrite) else str(seq_len)
            at = (x + _WIDTH / 2, bottom[seq] + seq_len)
            ax.text(*at, text, ha="center", va="bottom", size="small")
    _steps(ax, timeline, lane)
    _lanes(ax, timeline, lane)
    ax.set(xlabel="cache write and attention of each layer, in the order of the calls", title=title)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    ax.legend(handles=_legend(ax), frameon=False, fontsize="small", **below)
    return ax


def _batch_of(timeline: Timeline, event: CacheWrite | Attention) -> Attention:
    """Return the attention call of the event's step and layer."""
    place = (event.step, event.layer)
    return next(a for a in timeline.attentions if (a.step, a.layer) == place)


def _spans(
    event: CacheWrite | Attention, batch: Attention, row: int, written: set[int]
) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (first, last, style) of an event's spans in one sequence; a write adds to ``written``."""
    first, last = batch.ctx_lens[row], batch.seq_lens[row]
    if isinstance(event, CacheWrite):
        written.update(range(first, last))
        return [(first, last, {"facecolor": _WRITTEN, "linewidth": 0})]
    spans: list[tuple[int, int, dict[str, Any]]] = [
        (0, last, {"facecolor": _READ, "linewidth": 0, "alpha": 0.75})
    ]
    missing = [position for position in range(last) if position not in written]
    if missing:
        style = {"facecolor": _MISSING, "edgecolor": "white", "hatch": "///", "linewidth": 0}
        spans.append((missing[0], missing[-1] + 1, style))
    return spans


def _steps(ax: Axes, timeline: Timeline, lane: float) -> None:
    """Rule a line between steps, and label each column with its layer and each step with its number."""
    top = lane * len(timeline.prompt_lens)
    events = timeline.events
    begins = [x for x in range(len(events)) if x == 0 or events[x].step != events[x - 1].step]
    for x, end in zip(begins, [*begins[1:], len(events)], strict=True):
        if x:
            ax.axvline(x - 0.07, color="#707070", linewidth=0.8)
        ax.text((x + end) / 2, top, f"step {events[x].step}", ha="center", va="bottom")
    ax.set_xticks([x + _WIDTH / 2 for x in range(len(events))], [f"L{e.layer}" for e in events])
    ax.tick_params(axis="x", length=0, labelsize="small")
    ax.set_xlim(-0.2, len(events))
    ax.set_ylim(0, top * 1.08)


def _lanes(ax: Axes, timeline: Timeline, lane: float) -> None:
    """Draw a line under each lane and label it with its prompt."""
    names = [f"prompt {i}:\n{length} tokens" for i, length in enumerate(timeline.prompt_lens)]
    ax.set_yticks([lane * (i + 0.4) for i in range(len(names))], names[::-1])
    ax.tick_params(axis="y", length=0)
    for i in range(1, len(names)):
        ax.axhline(lane * i, color="#b0b0b0", linewidth=0.8)


def _legend(ax: Axes) -> list[Patch]:
    """Return a legend entry for each kind of span."""
    handles = [
        Patch(facecolor=_WRITTEN, label="cache write: new tokens"),
        Patch(facecolor=_READ, alpha=0.75, label="attention: positions read"),
    ]
    if any(patch.get_hatch() for patch in ax.patches):
        label = "read before it is written"
        handles.append(Patch(facecolor=_MISSING, edgecolor="white", hatch="///", label=label))
    return handles
