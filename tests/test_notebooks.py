"""The notebooks themselves, run headless at a reduced size under several sets of parameters."""

from pathlib import Path

import pytest

from attnlab.investigate import find_notebooks, investigate

NOTEBOOKS = find_notebooks([], Path(__file__).parent.parent / "notebooks")
SMALL = {"num_heads": 8, "draw_max_query_len": 96, "draw_max_ctx_len": 300}
SETTINGS = {
    "as committed": {},
    "gfx942 of 0.11.2": {"release": "0.11.2", "seed": 7},
    "Triton decodes": {"platform": "sm_90", "release": "0.11.2"},
    "gfx1100, another seed": {"platform": "gfx1100", "seed": 3},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_every_verdict_is_as_expected(tmp_path: Path, changes: dict[str, object]) -> None:
    """Each notebook predicts its verdicts from the contracts, and runs into them."""
    outcomes = investigate(
        NOTEBOOKS, parameters={**SMALL, **changes}, reports=tmp_path, timeout_s=120, jobs=2
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in NOTEBOOKS
    ]
    assert all(one.verdicts for one in outcomes)


def test_a_wrong_verdict_is_found(tmp_path: Path) -> None:
    """A notebook that expects the wrong thing fails, with the verdict's name."""
    wrong = tmp_path / "01-wrong.ipynb"
    text = NOTEBOOKS[0].read_text()
    assert '"accept\\": \\"0 wrong\\"' in text
    wrong.write_text(text.replace('"accept\\": \\"0 wrong\\"', '"accept\\": \\"1 wrong\\"'))
    parameters = {**SMALL, "platform": "sm_90"}
    (outcome,) = investigate(
        [wrong], parameters=parameters, reports=tmp_path / "reports", timeout_s=120
    )
    assert outcome.status == "failed"
    assert "int64 seq_lens" in outcome.message
