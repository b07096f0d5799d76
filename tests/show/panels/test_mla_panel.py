"""The panel of MLA: toggles, verdict and heatmap."""

import numpy as np

from attnlab.mla.faults import faults_of
from attnlab.mla.mla_case import MlaCase
from attnlab.show.panels.mla_panel import SOUND, MlaPanel
from attnlab.show.plots.stages import mla_ratios, plot_mla

CASES = {
    "prefill": MlaCase(num_heads=2, query_lens=(2, 1), ctx_lens=(40, 0)),
    "ranks": MlaCase(path="shards", num_heads=2, query_lens=(1, 1), ctx_lens=(40, 9)),
}


def test_a_toggle_runs_its_fault_and_draws_its_steps():
    panel = MlaPanel(CASES)
    before = panel.picture.png
    assert panel.result.status == "match"
    assert panel.show("prefill", "weights_exchanged").cause == "weights_exchanged"
    assert "weights_exchanged" in panel.verdict.value
    assert panel.picture.png != before
    assert panel.picture.cells["rows"] == [one.name for one in panel.result.steps]


def test_the_toggles_are_those_of_the_case():
    panel = MlaPanel(CASES)
    for name, case in CASES.items():
        panel.case.value = name
        assert panel.fault.options == (SOUND, *(one.name for one in faults_of(case)))
        assert panel.result.case == case
        assert panel.result.status == "match"


def test_a_page_without_a_front_end_has_the_picture():
    bundle = MlaPanel(CASES)._repr_mimebundle_()
    assert "data:image/png" in bundle["text/html"]
    assert "<script" not in bundle["text/html"]


def test_the_heatmap_has_the_errors_and_marks_what_is_not_finite():
    panel = MlaPanel(CASES)
    ratios = mla_ratios(panel.show("prefill", "weights_exchanged"))
    assert ratios.shape == (len(panel.result.steps), 3)
    axes = plot_mla(panel.result)
    shown = np.asarray(axes.images[0].get_array())
    assert ((shown > 1) == (ratios > 1)).all()
