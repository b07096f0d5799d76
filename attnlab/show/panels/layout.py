"""The layout of a panel: which widget is where on the screen."""

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as ipw

from attnlab.case.declaration import FIELDS
from attnlab.show.panels.controls import Control, groups

_OPEN = {FIELDS[name].metadata["group"] for name in ("stage", "platform")}  # open at first
_ROW = {"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "4px 16px"}


def group_boxes(controls: Mapping[str, Control], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a collapsible box for each group of controls; ``extra`` has further inputs by group."""
    boxes = {}
    for group, names in groups(list(controls)).items():
        inputs = [controls[name].widget for name in names]
        inputs += [extra[group]] if group in extra else []
        box = ipw.Accordion(children=[ipw.VBox(inputs)], titles=[group])
        box.selected_index = 0 if group in _OPEN else None
        boxes[group] = box
    return boxes


def small(controls: Sequence[Control], status: Any, texts: Mapping[str, Any], pictures: Any) -> Any:
    """Return the layout of a panel in a notebook: controls in a row, the verdict, the pictures."""
    for control in controls:
        control.input.style.description_width = "initial"
        control.widget.layout.max_width = "340px"
    line = ipw.Box([control.widget for control in controls], layout=_ROW)
    plots = ipw.Box(list(pictures.values()), layout=_ROW)
    below = [text for name, text in texts.items() if name != "verdict"]
    return _root([line, texts["verdict"], status, plots, *below])


def large(
    boxes: Sequence[Any], status: Any, texts: Mapping[str, Any], pictures: Any, case_text: Any
) -> Any:
    """Return the layout of the explorer: controls at the left, results at the right."""
    left = ipw.VBox(
        list(boxes),
        layout={"flex": "0 0 385px", "max_height": "820px", "overflow": "hidden auto"},
    )
    facts = ipw.VBox(
        [texts[name] for name in ("selection", "dispatch", "violations")],
        layout={"flex": "1 1 260px", "max_height": "400px", "overflow": "hidden auto"},
    )
    first = ipw.Box([pictures["error"], facts], layout=_ROW)
    second = ipw.Box([pictures["slots"], pictures["seqs"]], layout=_ROW)
    right = ipw.VBox(
        [texts["verdict"], status, first, second, case_text],
        layout={"flex": "1 1 560px", "min_width": "0"},
    )
    return _root([ipw.Box([left, right], layout=_ROW)])


def _root(children: Sequence[Any]) -> Any:
    return ipw.VBox(list(children), layout={"width": "100%"}).add_class("attnlab-panel")
