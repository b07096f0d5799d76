"""The explorer measures attention weights on demand only."""

from helpers.panels import SMALL

import attnlab
from attnlab.lab.lab import Lab
from attnlab.show.panels.boxes import VIEWS, XrayBox

CASE = SMALL.replace(query_lens=(3, 1), ctx_lens=(20, 33), num_heads=2, stage="sound")


def test_a_measurement_is_drawn_in_every_view_and_stale_after_a_change():
    box = XrayBox(lambda: Lab(), lambda: CASE)
    assert box.found is None
    box.measure()
    assert box.wait(120)
    assert box.found is not None
    assert box.found.status == "right"
    pictures = set()
    for view in VIEWS:
        box.view.value = view
        pictures.add(bytes(box.picture.png))
    assert len(pictures) == len(VIEWS)
    assert list(box.seq.options) == [0, 1]
    box.follow(CASE)
    assert not box.picture.stale
    box.follow(CASE.replace(seed=5))
    assert box.picture.stale


def test_a_case_without_weights_is_explained():
    box = XrayBox(lambda: Lab(), lambda: CASE.replace(op="reshape_and_cache_flash"))
    box.measure()
    assert box.wait(60)
    assert "weighs no values" in box.text.value


def test_the_explorer_has_one_and_a_panel_on_request():
    plain, explorer = attnlab.panel(CASE, knobs=("seed",)), attnlab.explorer(CASE)
    assert plain.xray is None
    assert explorer.xray is not None
    panel = attnlab.panel(CASE, knobs=("seed",), views=("error", "xray"))
    assert all(one.wait(60) for one in (plain, explorer, panel))  # none runs when the process ends
    assert panel.xray is not None
    assert panel.xray.widget in panel.widget.children
