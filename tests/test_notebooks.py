"""The notebooks themselves, run headless at a reduced size under several sets of parameters."""

from pathlib import Path

import pytest
from conftest import sdist

from attnlab.investigate import find_notebooks, investigate

NOTEBOOKS = find_notebooks([], Path(__file__).parent.parent / "notebooks")
KERNEL = next(path for path in NOTEBOOKS if path.stem.startswith("08-"))  # needs an sdist
OTHERS = [path for path in NOTEBOOKS if path != KERNEL]
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
        OTHERS, parameters={**SMALL, **changes}, reports=tmp_path, timeout_s=120, jobs=2
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in OTHERS
    ]
    assert all(one.verdicts for one in outcomes)


@pytest.mark.parametrize(("release", "seed"), [("0.11.2", 0), ("0.33.0", 7)])
def test_the_kernel_nobody_could_run(tmp_path: Path, release: str, seed: int) -> None:
    """The notebook on the real ROCm source, on both releases' sdists."""
    parameters = {**SMALL, "seed": seed, "source": str(sdist(release).path)}
    (outcome,) = investigate([KERNEL], parameters=parameters, reports=tmp_path, timeout_s=120)
    assert (outcome.status, outcome.message) == ("passed", "")


def test_without_an_index_the_kernels_notebook_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sdist in the cache and an index that does not answer: an error that names the file."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (outcome,) = investigate([KERNEL], parameters=SMALL, reports=tmp_path, timeout_s=120)
    assert outcome.status == "error"
    assert outcome.message.startswith("Unavailable: ")
    assert "vllm 0.11.2" in outcome.message
    assert "\n" not in outcome.message


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
