"""Controls: one for each knob of a Case, made from the knob's declaration.

A knob that is declared in attnlab/case.py has a control by that alone: its kind says which one, its help
text is the tooltip, its group is where it stands.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as ipw

from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import FieldType, Flag, Int, Maybe, OneOf

OnChange = Callable[[str], None]
_STYLE = {"description_width": "138px"}
_NONE = ""  # of a choice; ipywidgets takes None for "nothing is chosen"


class Control:
    """The control of one knob: an input, and below it the reason where its value is wrong.

    ``on_change(name)`` is called when a person, or :meth:`show`, changed the input.
    """

    def __init__(self, name: str, on_change: OnChange, value: Any = None) -> None:
        self.name = name
        self.kind: FieldType = field_type(name)
        self.input = _input(name, self.kind)
        self.message = ipw.HTML(layout={"display": "none", "margin": "0 0 4px 8px"})
        self.widget = ipw.VBox([self.input, self.message], layout={"overflow": "visible"})
        self.widget.add_class("attnlab-control").add_class(f"attnlab-knob-{name}")
        self.show(FIELDS[name].default if value is None else value)
        self.input.observe(lambda change: on_change(name), "value")

    def read(self) -> Any:
        """Return the knob's value; raise InvalidCase where the text is none."""
        value = self.input.value
        if isinstance(self.input, ipw.Text):
            value = self.kind.parse(self.name, value.strip() or "none")
        return self.kind.check(self.name, None if value == _NONE else value)

    def show(self, value: Any) -> None:
        """Put a value of the knob into the input."""
        if value is None:
            self.input.value = _NONE
        else:
            is_text = isinstance(self.input, ipw.Text)
            self.input.value = self.kind.text(value) if is_text else value

    def explain(self, text: str) -> None:
        """Say below the input why its value is wrong; "" says nothing."""
        self.message.value = f'<span class="attnlab-wrong">{escape(text)}</span>' if text else ""
        self.message.layout.display = "" if text else "none"


def _input(name: str, kind: FieldType) -> Any:
    """Return the input that suits a knob's kind."""
    inner = kind.kind if isinstance(kind, Maybe) else kind
    field = FIELDS[name]
    tooltip = f"{field.metadata['help']}; {kind.allowed}"
    shared = {"description": name, "style": _STYLE, "layout": {"width": "auto"}, "tooltip": tooltip}
    if isinstance(inner, Flag) and inner is kind:
        return ipw.Checkbox(**{**shared, "style": {"description_width": "0"}}, indent=False)
    if isinstance(inner, OneOf):
        options = [(choice, choice) for choice in inner.choices]
        if isinstance(kind, Maybe):
            options = [(f"({kind.meaning})", _NONE), *options]
        return ipw.Dropdown(options=options, **shared)
    if kind == inner and isinstance(kind, Int):
        return ipw.IntText(continuous_update=False, **shared)
    placeholder = kind.meaning if isinstance(kind, Maybe) else ""
    return ipw.Text(continuous_update=False, placeholder=placeholder, **shared)


def groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Return knobs by their group, both in the order of their declaration."""
    found: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        if name in names:
            found.setdefault(field.metadata["group"], []).append(name)
    return found


def check_knobs(names: Sequence[str]) -> None:
    """Raise InvalidCase for a name that is no knob."""
    for name in names:
        if name not in FIELDS:
            raise InvalidCase(f"{name} is not a field of a Case; it has {', '.join(FIELDS)}")


def source_input(source: str) -> Any:
    """Return the input for what is no knob: where vLLM is taken from."""
    return ipw.Text(
        value=source,
        description="source",
        placeholder="the installed vLLM",
        tooltip="a vLLM wheel, sdist or checkout, for the backends vllm and rocm",
        continuous_update=False,
        style=_STYLE,
        layout={"width": "auto"},
    )
