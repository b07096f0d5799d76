"""Controls: an ipywidgets input for each field of a Case, made from the field's declaration.

The type of a field selects the input, its help text is the tooltip, its group is the section. A new field
of :class:`~attnlab.case.case.Case` therefore has a control without further code.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

import ipywidgets as ipw

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import BackendName, FieldType, Flag, Maybe, OneOf
from attnlab.case.masks import MASK_DATA, MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import OPS
from attnlab.case.platforms import PLATFORMS, STAGES


def sentence(text: str) -> str:
    """Return a help text as a sentence, with a capital letter unless it starts with a name."""
    word = text.partition(" ")[0]
    is_name = "_" in word or not word.islower()
    return (
        (text[:1] if is_name else text[:1].upper()) + text[1:] + ("" if text.endswith(".") else ".")
    )


_STATED = tomllib.loads((files(__package__) / "choices.toml").read_text(encoding="utf-8"))
CHOICES: dict[str, dict[str, str]] = {
    **_STATED,
    "seq_lens_dtype": _STATED["block_table_dtype"],
    "reference_dtype": _STATED["dtype"],
    "op": {name: sentence(op.summary) for name, op in OPS.items() if op.library == "vllm"},
    "mask": {name: sentence(one.summary) for name, one in MASKS.items()},
    "op_argument": {
        NONE: "No further argument is passed.",
        **{name: sentence(one.summary) for name, one in OP_ARGUMENTS.items()},
    },
    "stage": {name: sentence(stage.story) for name, stage in STAGES.items()},
    "platform": {
        name: sentence(f"{platform.family.upper()}: {platform.example}")
        for name, platform in PLATFORMS.items()
    },
}


def _takes(name: str, case: Case) -> bool:
    return MASKS[case.mask].data == name


_DRAWN = ("num_seqs", "draw_max_query_len", "draw_max_ctx_len", "force_decode")
_HAS_EFFECT: dict[str, Callable[[Case], bool]] = {
    **dict.fromkeys(_DRAWN, lambda case: case.query_lens is None),
    **{name: partial(_takes, name) for name in MASK_DATA},
    **dict.fromkeys(
        ("kv_head_range", "seq_range", "op_argument"), lambda case: case.backend == "vllm"
    ),
    **dict.fromkeys(
        ("rocm_custom_paged_attn", "aiter_paged_attn"),
        lambda case: case.machine.is_rocm and case.release == "0.11.2",
    ),
    "cache_write": lambda case: case.is_fp8,
    "freed": lambda case: case.sliding_window > 0,
}


def without_effect(case: Case) -> set[str]:
    """Return the fields that change nothing in this Case, or whose other values it does not allow."""
    fixed = {name for name, has_effect in _HAS_EFFECT.items() if not has_effect(case)}
    return {name for name in fixed if getattr(case, name) == FIELDS[name].default or name in _DRAWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A value for every field of a Case, not yet checked against the rules between fields.

    - ``values``: by field; for a field in ``unread`` its last valid value.
    - ``unread``: by field, why the text in its control cannot be parsed.
    - ``last``: the field that was changed last, or "".
    """

    values: Mapping[str, Any]
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)
    last: str = ""

    @classmethod
    def of(cls, case: Case) -> "Draft":
        """Return the draft with the values of a Case."""
        return cls(values=dataclasses.asdict(case))

    def with_value(self, name: str, value: Any) -> "Draft":
        """Return the draft with another value of one field."""
        unread = {other: why for other, why in self.unread.items() if other != name}
        return Draft(values={**self.values, name: value}, unread=unread, last=name)

    def with_unread(self, name: str, why: str) -> "Draft":
        """Return the draft with a field whose control holds a text that cannot be parsed."""
        return Draft(values=self.values, unread={**self.unread, name: why}, last=name)

    def case(self) -> Case:
        """Return the Case; raise InvalidCase if the values do not form one."""
        for name, why in self.unread.items():
            raise InvalidCase(why, field=name)
        return Case.from_dict(self.values)

    def problem(self) -> InvalidCase | None:
        """Return why the values do not form a Case, with the field at fault; None if they do.

        If the error names no field of a Case, the field that was changed last is at fault.
        """
        try:
            self.case()
        except InvalidCase as error:
            return error if error.field in FIELDS else InvalidCase(str(error), field=self.last)
        return None


OnChange = Callable[[str], None]
_NONE = ""  # the option for None; ipywidgets takes None for "nothing is selected"


class Control:
    """The label and the input of one field, with a message below them if the value is wrong.

    ``on_change(name)`` is called when the input changes, by the user or by :meth:`show`.
    """

    def __init__(self, name: str, on_change: OnChange, value: Any = None) -> None:
        self.name = name
        self.type: FieldType = field_type(name)
        self.input = _make_input(name, self.type)
        self.message = ipw.HTML(tooltip="", layout={"display": "none"})
        self.message.add_class("attnlab-message")
        self.widget = ipw.VBox([labelled(name, self.input), self.message])
        self.widget.add_class("attnlab-control").add_class(f"attnlab-knob-{name}")
        self.show(FIELDS[name].default if value is None else value)
        self._on_change, self._is_silent = on_change, False
        self.input.observe(self._on_value, "value")

    def _on_value(self, change: Any) -> None:
        if not self._is_silent:
            self._on_change(self.name)

    def read(self) -> Any:
        """Return the value of the field; raise InvalidCase if the text cannot be parsed."""
        value = self.input.value
        if isinstance(self.input, ipw.Text):
            empty = "none" if isinstance(self.type, Maybe) else ""
            value = self.type.parse(self.name, value.strip() or empty)
        return self.type.check(self.name, None if value == _NONE else value)

    def show(self, value: Any) -> None:
        """Set the input to a value of the field."""
        if value is None:
            self.input.value = _NONE
            return
        if isinstance(self.type, BackendName) and value not in self.input.options:
            self._is_silent = True  # new options reset the value
            self.input.options = (*self.type.choices, value)  # a user's kernel
            self._is_silent = False
        is_text = isinstance(self.input, ipw.Text)
        self.input.value = self.type.text(value) if is_text else value

    def explain(self, text: str) -> None:
        """Show below the input why its value is wrong; "" hides the message."""
        self.message.value = f'<span class="attnlab-wrong">{escape(text)}</span>' if text else ""
        self.message.layout.display = "" if text else "none"

    def mark(self, is_changed: bool) -> None:
        """Mark the label of a field that the user has changed, or remove the mark."""
        set_class(self.widget, "attnlab-changed", is_changed)


def set_class(widget: Any, name: str, is_set: bool) -> None:
    """Add a CSS class to a widget or remove it; changes the widget."""
    if is_set:
        widget.add_class(name)
    else:
        widget.remove_class(name)


def labelled(name: str, widget: Any) -> Any:
    """Return a widget with a label at its left that has the same tooltip.

    The label is HTML, because ipywidgets shows no tooltip on the description of most inputs. It shows the
    tooltip on the input itself only if the description is empty.
    """
    title = escape(widget.tooltip, quote=True)
    label = ipw.HTML(f'<label title="{title}">{escape(name)}</label>', tooltip="")
    return ipw.HBox([label.add_class("attnlab-name"), widget]).add_class("attnlab-row")


def tooltip_of(name: str) -> str:
    """Return the tooltip of a field: its help text, then its choices or what it may hold.

    A browser shows one tooltip for a whole list, so each choice has a line with its sentence.
    """
    field, kind = FIELDS[name], field_type(name)
    inner = kind.kind if isinstance(kind, Maybe) else kind
    lines = [sentence(field.metadata["help"])]
    if isinstance(inner, OneOf):
        if isinstance(kind, Maybe):
            lines.append(f"({kind.meaning}): The default.")
        sentences = CHOICES.get(name, {})
        lines += [
            f"{choice}: {sentences[choice]}" for choice in inner.choices if choice in sentences
        ]
    elif not isinstance(inner, Flag):
        lines.append(f"It must be {kind.allowed}.")
    return "\n".join(lines)


def _make_input(name: str, kind: FieldType) -> Any:
    """Return the input for a field of a type.

    Numbers are typed as text: a browser's number input drops what it does not accept, so that 1e9 becomes
    another number without a message.
    """
    inner = kind.kind if isinstance(kind, Maybe) else kind
    shared: dict[str, Any] = {"layout": {"width": "auto"}, "tooltip": tooltip_of(name)}
    if isinstance(inner, Flag) and inner is kind:
        return ipw.Checkbox(indent=False, style={"description_width": "0"}, **shared)
    if isinstance(inner, OneOf):
        options = list(inner.choices)
        if isinstance(kind, Maybe):
            return ipw.Dropdown(
                options=[(f"({kind.meaning})", _NONE), *((c, c) for c in options)], **shared
            )
        return ipw.Dropdown(options=options, **shared)
    placeholder = kind.meaning if isinstance(kind, Maybe) else ""
    return ipw.Text(continuous_update=False, placeholder=placeholder, **shared)


def groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Return fields by group, both in the order of their declaration."""
    found: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        if name in names:
            found.setdefault(field.metadata["group"], []).append(name)
    return found


def check_knobs(names: Sequence[str]) -> None:
    """Raise InvalidCase for a name that is not a field of a Case."""
    for name in names:
        if name not in FIELDS:
            raise InvalidCase(
                f"{name} is not a field of a Case; the fields are {', '.join(FIELDS)}", field=name
            )


SOURCE = "Path of a vLLM wheel, sdist or checkout whose kernels the backends vllm and rocm run."
KERNEL = "Your own kernel as backend: FILE.py:FUNCTION, or plugin:NAME for an entry point."
AGAINST = "A second backend to compare with: model, vllm, rocm or FILE.py:FUNCTION."


def text_input(tooltip: str, value: str = "", placeholder: str = "FILE.py:FUNCTION") -> Any:
    """Return an input of what is no field of a Case: the Lab's source, a user's kernel, a second runner."""
    shared = {"continuous_update": False, "layout": {"width": "auto"}}
    return ipw.Text(value=value, placeholder=placeholder, tooltip=tooltip, **shared)
