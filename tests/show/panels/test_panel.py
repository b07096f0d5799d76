"""Panel: fields in, results out, from Python and as static HTML."""

import pytest
from helpers.panels import LOST, SMALL

from attnlab.case.declaration import FIELDS
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.lab.lab import Lab
from attnlab.show.panels import Panel, explorer, panel


def test_a_panel_shows_the_result_of_a_lab() -> None:
    view, lab = explorer(SMALL), Lab()
    for changes in ({}, {"stage": "int64"}, {"platform": "gfx942"}, {"head_size": 64}):
        shown = view.show(**changes)
        case = view.case
        expected = lab.run(case)
        assert (shown.verdict, shown.status) == (expected.verdict, expected.status)
        assert shown.verdict in view.texts["verdict"].value.replace("&#x27;", "'")
        assert not view.is_stale
        has_errors = expected.errors is not None
        assert bool(view.pictures["error"].png) is has_errors
    assert shown.status == "rejected"  # the last case is: int64 tables on ROCm
    assert "expected scalar type Int but found Long" in view.to_html()


def test_a_control_changes_the_case() -> None:
    view = panel(SMALL, knobs=("stage", "query_lens", "alibi"))
    view.controls["stage"].input.value = "sound"
    view.controls["alibi"].input.value = True
    assert view.case == SMALL.replace(stage="sound", alibi=True)
    view.controls["query_lens"].input.value = "4,1,2,2"
    assert view.wait(30)
    assert view.result is not None
    assert view.result.case == SMALL.replace(stage="sound", alibi=True, query_lens=(4, 1, 2, 2))


def test_the_explorer_has_a_control_for_every_field() -> None:
    view = explorer(SMALL)
    assert view.wait(30)
    assert set(view.controls) == set(FIELDS)
    assert set(view._boxes) == {field.metadata["group"] for field in FIELDS.values()}


def test_an_unavailable_kernel_is_reported() -> None:
    """The old results remain and are stale."""
    view = explorer(SMALL, lab=Lab(source="/no/such/vllm.whl"))
    assert view.wait(30)
    view.set(backend="vllm", sm_scale=0.1)
    assert view.wait(30)
    assert isinstance(view.error, AttnLabError)
    assert str(view.error)[:20] in view.texts["verdict"].value.replace("&#x27;", "'")
    assert view.is_stale
    with pytest.raises(type(view.error)):
        view.show()
    assert view.show(backend="model").status == "match"


def test_an_internal_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its type and source line."""
    view = panel(SMALL, knobs=("stage",))
    assert view.wait(30)
    monkeypatch.setattr("attnlab.show.panels.case_panel.make_panel_data", lambda *_: {}["planted"])
    view.set(stage="sound")
    assert view.wait(30)
    text = view.texts["verdict"].value
    assert "Internal error" in text
    assert "KeyError" in text
    assert "test_panel.py" in text


def test_a_panel_without_front_end_is_static() -> None:
    """HTML without scripts and external resources."""
    view = panel(LOST, knobs=("stage", "platform"), views=("violations", "error", "slots"))
    bundle = view._repr_mimebundle_()
    html = bundle["text/html"]
    assert view.result.verdict in html
    assert "row 46 of output" in html
    assert html.count("data:image/png;base64,") == 2
    assert "script" not in html
    assert "controls for stage, platform" in html
    view_mime = bundle["application/vnd.jupyter.widget-view+json"]
    assert view_mime["model_id"] == view.widget.model_id


def test_an_unknown_field_or_view_is_rejected() -> None:
    with pytest.raises(InvalidCase, match="stages is not a field of a Case"):
        panel(SMALL, knobs=("stages",))
    with pytest.raises(AttnLabError, match=r"view must be one of .*, got errors"):
        panel(SMALL, knobs=("stage",), views=("errors",))
    view = panel(SMALL, knobs=("stage",))
    with pytest.raises(InvalidCase, match="stages is not a field"):
        view.set(stages="sound")


def changed(view: Panel) -> set[str]:
    """Return the fields whose controls are marked as changed."""
    return {n for n, c in view.controls.items() if "attnlab-changed" in c.widget._dom_classes}


def test_changed_fields_are_marked_until_a_reset() -> None:
    view = explorer(SMALL)
    assert view._reset.disabled
    view.controls["stage"].input.value = "int64"
    view.controls["num_heads"].input.value = "1e9"
    assert changed(view) == {"stage", "num_heads"}
    assert "2" in view._reset.description
    view._reset.click()
    assert changed(view) == set()
    assert view.case == SMALL
    assert view.controls["num_heads"].input.value == "4"


def test_texts_are_stale_with_the_pictures() -> None:
    view = explorer(SMALL)
    assert view.wait(30)
    stale = lambda: {n for n, t in view.texts.items() if "attnlab-stale" in t._dom_classes}  # noqa: E731
    assert stale() == set()
    view.controls["num_heads"].input.value = "1e9"
    assert stale() == set(view.texts)
    assert view.controls["num_heads"].message.layout.display == ""
    assert view.show(num_heads=4).status == "match"
    assert stale() == set()


def test_an_own_kernel_becomes_the_backend() -> None:
    view = explorer(SMALL)
    view._kernel.value = "no/such/file.py:mine"
    assert view._draft.values["backend"] == "no/such/file.py:mine"
    assert view.controls["backend"].read() == "no/such/file.py:mine"
