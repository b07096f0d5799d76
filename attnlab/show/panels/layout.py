"""The layout of a panel: which widget is where on the screen. The style sheet is panel.css."""

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as ipw

from attnlab.show.panels.controls import Control, groups, labelled

# The controls of the explorer that are always visible, by section.
MAIN = {
    "what runs": ("stage", "platform", "release", "op", "backend"),
    "cache and data": ("fill", "empty_slots", "distribution"),
    "sizes": (
        "num_heads",
        "num_queries_per_kv",
        "head_size",
        "block_size",
        "num_seqs",
        "draw_max_query_len",
        "draw_max_ctx_len",
    ),
}
_MAIN_NAMES = {name for names in MAIN.values() for name in names}


def group_boxes(
    controls: Mapping[str, Control], extra: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a folded box for each group of controls that are not in MAIN.

    ``extra`` has further inputs by group and name. A group without controls has no box.
    """
    boxes = {}
    for group, names in groups([name for name in controls if name not in _MAIN_NAMES]).items():
        inputs = [controls[name].widget for name in names]
        inputs += [_with_label(*item) for item in extra.get(group, {}).items()]
        boxes[group] = ipw.Accordion(children=[ipw.VBox(inputs)], titles=[group])
        boxes[group].selected_index = None
    return boxes


def names_in(group: str, controls: Mapping[str, Control]) -> list[str]:
    """Return the fields in the box of a group."""
    return groups([name for name in controls if name not in _MAIN_NAMES]).get(group, [])


def small(
    controls: Mapping[str, Control],
    status: Any,
    texts: Mapping[str, Any],
    pictures: Mapping[str, Any],
    boxes: Sequence[Any],
) -> Any:
    """Return the layout of a panel in a notebook: controls in a row, the verdict, the pictures, the boxes."""
    line = _box([control.widget for control in controls.values()], "attnlab-line")
    plots = _box(list(pictures.values()), "attnlab-line")
    below = [text for name, text in texts.items() if name != "verdict"]
    return _root([line, texts["verdict"], status, plots, *below, *boxes], "attnlab-small")


def large(
    controls: Mapping[str, Control],
    boxes: Sequence[Any],
    status: Any,
    reset: Any,
    texts: Mapping[str, Any],
    pictures: Mapping[str, Any],
) -> Any:
    """Return the layout of the explorer.

    The main controls are at the left of the verdict and the errors; the selection, violations and dispatch
    are at the right of these if the page is wide, else below. ``boxes``, the folded groups, come last.
    """
    left = []
    for title, names in MAIN.items():
        head = ipw.HTML(f"<b>{title}</b>", tooltip="").add_class("attnlab-section")
        left.append(_box([head, *(controls[name].widget for name in names)], "attnlab-part"))
    grid = _box(
        [
            _box([reset, *left], "attnlab-left"),
            _box([texts["verdict"], status, pictures["error"]], "attnlab-middle"),
            _box(
                [texts[name] for name in ("selection", "violations", "dispatch")], "attnlab-facts"
            ),
            _box(
                [pictures["slots"], pictures["seqs"], pictures["mask"]],
                "attnlab-plots attnlab-line",
            ),
        ],
        "attnlab-grid",
    )
    return _root([grid, _box(boxes, "attnlab-groups")], "attnlab-explorer")


def _with_label(name: str, widget: Any) -> Any:
    """Return an input that is not a field of a Case with its label, as a control."""
    return ipw.VBox([labelled(name, widget)]).add_class("attnlab-control")


def _box(children: Sequence[Any], classes: str) -> Any:
    box = ipw.Box(list(children))
    for name in classes.split():
        box.add_class(name)
    return box


def _root(children: Sequence[Any], kind: str) -> Any:
    return _box(children, f"attnlab-panel {kind}")
