"""Controls: one per field of a Case, with values, tooltips and groups."""

import pytest
import torch
from helpers.cases import refused
from helpers.panels import SMALL

from attnlab.case.declaration import FIELDS, OpName, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    ArgumentName,
    BackendName,
    Flag,
    Int,
    Lens,
    Maybe,
    Number,
    OneOf,
    Span,
    Table,
)
from attnlab.lab.lab import Lab
from attnlab.show.panels import explorer, panel
from attnlab.show.panels.case_panel import MAIN, Panel, group_boxes, names_in
from attnlab.show.panels.controls import (
    CHOICES,
    Control,
    Draft,
    check_knobs,
    groups,
    tooltip_of,
    without_effect,
)


def values_of(name: str) -> list[object]:
    """Return values of a field, of every form that its type has."""
    kind = field_type(name)
    inner = kind.kind if isinstance(kind, Maybe) else kind
    some: list[object] = {
        OneOf: lambda: list(inner.choices),
        OpName: lambda: list(inner.choices),
        ArgumentName: lambda: list(inner.choices),
        BackendName: lambda: [*inner.choices, "mine.py:fast", "plugin:fast"],
        Flag: lambda: [True, False],
        Int: lambda: [inner.least, inner.least + 7],
        Number: lambda: [0.5, 1e-6, 1 / 3],
        Lens: lambda: [(7,), (3, 1, 880)],
        Span: lambda: [(0, 1), (3, 17)],
        Table: lambda: [((3, 1), (0, 2))],
    }[type(inner)]()
    return [*some, None] if isinstance(kind, Maybe) else some


@pytest.mark.parametrize("name", FIELDS)
def test_control_round_trips(name: str) -> None:
    events: list[str] = []
    control = Control(name, events.append, FIELDS[name].default)
    assert control.read() == FIELDS[name].default
    for value in values_of(name):
        before, old = len(events), control.read()
        control.show(value)
        assert control.read() == value
        assert type(control.read()) is type(value)
        assert len(events) == before + (value != old)


def choices_of(name: str) -> tuple[str, ...]:
    """Return the choices of a field, or () if it has another type."""
    kind = field_type(name)
    inner = kind.kind if isinstance(kind, Maybe) else kind
    return inner.choices if isinstance(inner, OneOf) else ()


@pytest.mark.parametrize("name", FIELDS)
def test_tooltip_explains_the_field_and_each_choice(name: str) -> None:
    control = Control(name, lambda name: None)
    first, *rest = control.input.tooltip.split("\n")
    assert first.endswith(".")
    assert first[0] == first[0].upper() or first.startswith("vLLM ")
    for choice in choices_of(name):
        (line,) = [line for line in rest if line.startswith(f"{choice}: ")]
        assert line.endswith(".")
        assert len(line) > len(choice) + 8
    assert control.message.tooltip == ""


def test_a_choice_without_sentence_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CHOICES["fill"], "all_rows")
    assert "all_rows: " not in tooltip_of("fill")


def test_no_sentence_is_for_an_unknown_choice() -> None:
    for name, sentences in CHOICES.items():
        if name not in ("dtype", "reference_dtype"):  # these share a table
            assert set(sentences) == set(choices_of(name))


def test_every_field_is_in_one_group() -> None:
    names = [name for names in groups(list(FIELDS)).values() for name in names]
    assert sorted(names) == sorted(FIELDS)
    controls = {name: Control(name, lambda name: None) for name in FIELDS}
    boxes = group_boxes(controls, {})
    assert set(boxes) == {field.metadata["group"] for field in FIELDS.values()}
    assert all(box.selected_index is None for box in boxes.values())
    main = [name for names in MAIN.values() for name in names]
    in_boxes = [name for group in boxes for name in names_in(group, controls)]
    assert sorted([*main, *in_boxes]) == sorted(FIELDS)


def test_an_unknown_field_is_rejected() -> None:
    with refused("stages"):
        check_knobs(["stage", "stages"])


@pytest.mark.parametrize("text", ["1e9", "19x", "", "4.0"])
def test_a_text_that_is_no_integer_is_rejected(text: str) -> None:
    control = Control("num_heads", lambda name: None)
    control.input.value = text
    with refused("num_heads"):
        control.read()


def test_a_tooltip_keeps_names_as_they_are() -> None:
    texts = "\n".join(tooltip_of(name) for name in FIELDS)
    assert "max_seq_len is None." in texts
    assert "Max_seq_len" not in texts
    assert tooltip_of("release").startswith("vLLM release")


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        SMALL.replace(query_lens=(5, 1), ctx_lens=(20, 33), platform="sm_90"),
        SMALL.replace(op="unified_attention", mask="ranges", release="0.33.0"),
    ],
    ids=["small", "sm_90", "mask"],
)
@pytest.mark.quick("mask")
def test_fields_without_effect_change_nothing(case) -> None:
    """Each other value of a disabled field is refused, or gives the same bits and the same kernels."""
    lab = Lab()
    right = lab.run(case)
    fixed = without_effect(case)
    assert {"freed", "cache_write", "op_argument", "causal_seqs"} <= fixed
    for name in fixed:
        for value in values_of(name):
            try:
                other = case.replace(**{name: value})
            except InvalidCase:
                continue
            again = lab.run(other)
            assert torch.equal(again.output.nan_to_num(), right.output.nan_to_num()), (name, value)
            assert again.decision.kernels == right.decision.kernels


def test_controls_without_effect_are_disabled() -> None:
    view = explorer(SMALL)
    disabled = lambda: {n for n, c in view.controls.items() if c.input.disabled}  # noqa: E731
    assert "cache_write" in disabled()
    assert "sliding_window" not in disabled()
    view.set(kv_cache_dtype="fp8")
    assert "cache_write" not in disabled()
    view.controls["num_heads"].input.value = "1e9"  # not a Case: nothing is disabled
    assert disabled() == set()
    view.cancel()


# Drafts: values that do not form a Case are explained at the control at fault.


def explained(view: Panel) -> list[str]:
    """Return the fields whose controls show a message."""
    return [name for name, control in view.controls.items() if control.message.value]


def test_a_contradiction_is_explained_at_its_control() -> None:
    """The old picture remains and is marked as stale."""
    view = explorer(SMALL)
    assert view.wait(30)
    before = view.pictures["error"].png
    view.controls["num_queries_per_kv"].input.value = "3"
    wrong = view.controls["num_queries_per_kv"]
    assert explained(view) == ["num_queries_per_kv"]
    assert view.is_stale
    assert view.pictures["error"].stale
    assert view.pictures["error"].png == before
    with refused("num_queries_per_kv"):
        view.show()
    wrong.input.value = "2"
    assert view.wait(30)
    assert not view.is_stale
    assert not wrong.message.value


def test_the_group_of_a_wrong_field_opens() -> None:
    view = explorer(SMALL)
    box = view._boxes[FIELDS["max_query_len"].metadata["group"]]
    assert box.selected_index is None
    view.controls["max_query_len"].input.value = "many"
    assert explained(view) == ["max_query_len"]
    assert box.selected_index == 0


def test_a_rule_is_explained_at_the_field_that_it_names() -> None:
    """Without a control for that field, the message is at the changed one."""
    case = SMALL.replace(sliding_window=4, freed="empty")
    view = panel(case, knobs=("sliding_window", "freed"))
    view.controls["sliding_window"].input.value = "0"
    assert explained(view) == ["freed"]
    hidden = panel(case, knobs=("sliding_window",))
    hidden.controls["sliding_window"].input.value = "0"
    assert explained(hidden) == ["sliding_window"]


def test_a_text_that_cannot_be_parsed_is_explained() -> None:
    """The first of two such texts is explained first."""
    view = panel(SMALL, knobs=("query_lens", "atol"))
    view.controls["query_lens"].input.value = "5,one"
    view.controls["atol"].input.value = "small"
    assert view.is_stale
    assert explained(view) == ["query_lens"]
    view.controls["query_lens"].input.value = "5,1,40,1"
    assert explained(view) == ["atol"]
    view.controls["atol"].input.value = "0.0001"
    assert view.wait(30)
    assert view.case == SMALL


def test_the_last_change_is_at_fault_if_the_error_names_no_field() -> None:
    """seq_lens is not a field; max_blocks_per_seq made the block table too short."""
    problem = Draft.of(SMALL).with_value("max_blocks_per_seq", 1).problem()
    assert problem.field == "max_blocks_per_seq"
