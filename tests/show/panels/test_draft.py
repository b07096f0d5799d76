"""Drafts: values that do not form a Case are explained at the control at fault."""

import pytest
from helpers.panels import SMALL

from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase
from attnlab.show.panels import explorer, panel
from attnlab.show.panels.case_panel import Panel
from attnlab.show.panels.controls import Draft


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
    with pytest.raises(InvalidCase) as error:
        view.show()
    assert error.value.field == "num_queries_per_kv"
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
    draft = Draft.of(SMALL).with_value("max_blocks_per_seq", 1)
    problem = draft.problem()
    assert problem is not None
    assert problem.field == "max_blocks_per_seq"
