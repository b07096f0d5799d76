"""The notebooks themselves, run headless at a reduced size under several sets of parameters."""

from pathlib import Path

import pytest
from conftest import sdist

from attnlab.errors import Unavailable
from attnlab.investigate import find_notebooks, investigate
from attnlab.kernels.source import fetch
from attnlab.production import check_available

NOTEBOOKS = find_notebooks([], Path(__file__).parent.parent / "notebooks")
CASED = [
    path for path in NOTEBOOKS if '"platform = ' in path.read_text()
]  # those with a Case's knobs
STORY = [path for path in CASED if path.stem[:2] in ("01", "03", "04")]  # what other kernels retell
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
        CASED, parameters={**SMALL, **changes}, reports=tmp_path, timeout_s=120, jobs=2
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in CASED
    ]
    assert all(one.verdicts for one in outcomes)


def test_every_verdict_is_as_expected_on_the_real_kernels(tmp_path: Path) -> None:
    """Two of the notebooks on vLLM's own source, at a size that its interpreter does in seconds."""
    try:
        source = str(fetch("0.33.0"))
    except Unavailable as error:
        pytest.skip(str(error))
    tiny = {"num_heads": 2, "draw_max_query_len": 16, "draw_max_ctx_len": 120, "seed": 5}
    outcomes = investigate(
        STORY[:2],
        parameters={**tiny, "origin": "vllm", "source": source, "release": "0.33.0"},
        reports=tmp_path,
        timeout_s=240,
        jobs=2,
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in STORY[:2]
    ]


@pytest.mark.parametrize("release", ["0.11.2", "0.33.0"])
def test_every_verdict_is_as_expected_on_the_rocm_source(tmp_path: Path, release: str) -> None:
    """The same story with the ROCm kernel's own source on the emulated device."""
    parameters = {**SMALL, "origin": "rocm", "source": str(sdist(release).path), "release": release}
    outcomes = investigate(STORY, parameters=parameters, reports=tmp_path, timeout_s=240, jobs=2)
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in STORY
    ]


KERNEL = next(path for path in NOTEBOOKS if path.stem.startswith("08-"))  # needs an sdist
PRODUCTION = [path for path in NOTEBOOKS if path.stem.startswith("06-")]


def why_unavailable() -> str:
    """Return why the engine cannot run here, or an empty string."""
    try:
        check_available()
    except Unavailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_lens": "1, 70, 7", "max_num_batched_tokens": 33, "dtype": "float32", "seed": 5},
        {"prompt_lens": "1", "max_num_batched_tokens": 8, "dtype": "float16", "block_size": 64},
    ],
    ids=["as committed", "cut in three", "decodes alone"],
)
def test_production_is_as_expected(tmp_path: Path, changes: dict[str, object]) -> None:
    """The engine's notebook passes on other prompts too, or says what it lacks here."""
    (outcome,) = investigate(PRODUCTION, parameters=changes, reports=tmp_path, timeout_s=240)
    if missing := why_unavailable():
        assert (outcome.status, outcome.message) == ("unavailable", missing)
        pytest.skip(missing)
    assert (outcome.status, outcome.message) == ("passed", "")
    assert len(outcome.verdicts) >= 15


@pytest.mark.parametrize(("release", "seed"), [("0.11.2", 0), ("0.33.0", 7)])
def test_the_kernel_nobody_could_run(tmp_path: Path, release: str, seed: int) -> None:
    """The notebook on the real ROCm source, on both releases' sdists."""
    parameters = {**SMALL, "seed": seed, "source": str(sdist(release).path)}
    (outcome,) = investigate([KERNEL], parameters=parameters, reports=tmp_path, timeout_s=120)
    assert (outcome.status, outcome.message) == ("passed", "")


def test_without_an_index_the_kernels_notebook_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sdist in the cache and an index that does not answer: unavailable, and why."""
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (outcome,) = investigate([KERNEL], parameters=SMALL, reports=tmp_path, timeout_s=120)
    assert outcome.status == "unavailable"
    assert "vllm 0.11.2" in outcome.message
    assert "\n" not in outcome.message


def test_every_notebook_is_run_here() -> None:
    """None is left out of the tests above."""
    assert {*CASED, *PRODUCTION, KERNEL} == {*NOTEBOOKS}


def test_a_wrong_verdict_is_found(tmp_path: Path) -> None:
    """A notebook that expects the wrong thing fails, with the verdict's name."""
    wrong = tmp_path / "01-wrong.ipynb"
    text = next(path for path in NOTEBOOKS if path.stem.startswith("01-")).read_text()
    assert '"accept\\": \\"0 wrong\\"' in text
    wrong.write_text(text.replace('"accept\\": \\"0 wrong\\"', '"accept\\": \\"1 wrong\\"'))
    parameters = {**SMALL, "platform": "sm_90"}
    (outcome,) = investigate(
        [wrong], parameters=parameters, reports=tmp_path / "reports", timeout_s=120
    )
    assert outcome.status == "failed"
    assert "int64 seq_lens" in outcome.message
