"""The pytest plugin: sections, properties, files, power, pytest-xdist, and what it leaves alone."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.recorded import KERNEL
from helpers.recorded_tests import properties, pytest_in
from helpers.sources import needs_triton

from attnlab.recorder.failure_report import MOST_LINES, FailureReport, folder_name
from attnlab.recorder.pytest_session import Session
from attnlab.tensors.call import KernelCall

ROOT = Path(__file__).parents[2]
TESTS = """
import sys

import kern
import numpy
import pytest
import torch

sys.path.insert(0, {helpers!r})
from helpers.recorded import batch
from kern import paged


def computed(monkeypatch, kernel=1.0, expected=1.0):
    given = batch()
    monkeypatch.setattr(kern, "FACTOR", expected)
    reference = torch.empty_like(given["out"])
    getattr(paged, "__wrapped__", paged)(**{{**given, "out": reference}})
    monkeypatch.setattr(kern, "FACTOR", kernel)
    paged(**given)
    return given["out"], reference


def test_kernel(monkeypatch):
    torch.testing.assert_close(*computed(monkeypatch, kernel=2.0), atol=1e-3, rtol=0)


@pytest.fixture
def default_device():
    yield
    torch.set_default_device(None)


def test_default_device(monkeypatch, default_device):
    output, expected = computed(monkeypatch, kernel=2.0)
    torch.set_default_device("meta")
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=0)


def test_odd_scale(monkeypatch):
    torch.testing.assert_close(*computed(monkeypatch, kernel=1.7), atol=1e-3, rtol=0)


def test_expected(monkeypatch):
    torch.testing.assert_close(*computed(monkeypatch, expected=2.0), atol=1e-3, rtol=0)


def test_tolerance(monkeypatch):
    output, expected = computed(monkeypatch)
    assert torch.allclose(output, expected + 1e-4, atol=1e-6, rtol=0)


def test_bits(monkeypatch):
    output, expected = computed(monkeypatch)
    assert torch.equal(output, expected + 1e-4)


def test_numpy(monkeypatch):
    output, expected = computed(monkeypatch, kernel=2.0)
    numpy.testing.assert_allclose(output.numpy(), expected.numpy(), atol=1e-3)


def test_good(monkeypatch):
    output, expected = computed(monkeypatch)
    torch.testing.assert_close(output, expected, atol=0.5, rtol=0)


def test_itself(monkeypatch):
    first, _ = computed(monkeypatch)
    second, _ = computed(monkeypatch)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=0)


def projected(monkeypatch, size, atol, **factors):
    matrix = size * torch.eye(256).flip(0).half()
    given = computed(monkeypatch, **factors)
    both = [torch.nn.functional.linear(one.flatten(1), matrix.clone()) for one in given]
    torch.testing.assert_close(both[0].float(), both[1].float(), atol=atol, rtol=0)


def test_product(monkeypatch):
    projected(monkeypatch, 2.0, 1.0)


def test_small_product(monkeypatch):
    projected(monkeypatch, 1e-3, 1.0)


def test_product_of_kernel(monkeypatch):
    projected(monkeypatch, 2.0, 1e-3, kernel=2.0)


def test_product_of_expected(monkeypatch):
    projected(monkeypatch, 2.0, 1e-3, expected=2.0)


def test_product_of_another_matrix(monkeypatch):
    output, expected = computed(monkeypatch)
    one, two = 2 * torch.eye(256).half(), 3 * torch.eye(256).half()
    output, expected = output.flatten(1) @ one, expected.flatten(1) @ two
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=0)


def test_the_second_of_two_calls(monkeypatch):
    first, _ = computed(monkeypatch)
    second, _ = computed(monkeypatch, kernel=2.0)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=0)


def test_both_of_two_calls(monkeypatch):
    first, _ = computed(monkeypatch, kernel=2.0)
    second, _ = computed(monkeypatch, kernel=1.7)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=0)


def test_an_earlier_call(monkeypatch):
    first, _ = computed(monkeypatch, kernel=2.0)
    second, _ = computed(monkeypatch)
    assert first.abs().sum() == second.abs().sum()


def test_plain_assert(monkeypatch):
    output, expected = computed(monkeypatch, kernel=2.0)
    assert (output - expected).abs().max() < 1e-3


def test_raises():
    kern.REJECT = "no such head size"
    try:
        paged(**batch())
    finally:
        kern.REJECT = ""


def test_broken_table():
    paged(**{{**batch(), "block_table": torch.full((2, 4), 99, dtype=torch.int32)}})


def sdpa():
    torch.manual_seed(0)
    query = torch.randn(2, 2, 6, 16)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_sdpa():
    output = sdpa()
    torch.testing.assert_close(output, output + 1e-3 * torch.eye(6, 16), atol=1e-4, rtol=0)


def test_no_op():
    assert 1 == 2


def test_no_op_passes():
    pass
"""
SIDES = {
    "test_kernel": "the kernel",
    "test_default_device": "the kernel",
    "test_odd_scale": "the kernel",
    "test_expected": "the expected value",
    "test_tolerance": "the tolerance",
    "test_bits": "the tolerance",
    "test_numpy": "the kernel",
    "test_plain_assert": "the kernel",
    "test_the_second_of_two_calls": "the kernel",
    "test_both_of_two_calls": "the kernel",
    "test_an_earlier_call": "the kernel",
    "test_product_of_kernel": "the kernel",
    "test_product_of_expected": "the expected value",
    "test_product_of_another_matrix": "unknown",
    "test_broken_table": "the arguments of the call",
    "test_raises": "the kernel",
    "test_sdpa": "the expected value, or the arguments",
}
FAILING = {*SIDES, "test_no_op"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the tests above once with every option; return the folder and the printed text."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "kern.py").write_text(KERNEL)
    (folder / "test_kern.py").write_text(TESTS.format(helpers=str(ROOT / "tests")))
    (folder / "pytest.ini").write_text("[pytest]\nattnlab_ops = kern:paged\n")
    options = ("--attnlab", "--attnlab-power-json", "power.json", "--attnlab-seconds=0")
    return folder, pytest_in(folder, *options, fresh=True)


def test_which_side_is_wrong(run):
    """The properties of each failing test name its side, and the planted defect."""
    found = properties(run[0])
    assert {name: found[name].get("attnlab_wrong_side") for name in SIDES} == SIDES
    doubled = ("test_kernel", "test_plain_assert", "test_default_device", "test_an_earlier_call")
    for name in (*doubled, "test_the_second_of_two_calls", "test_both_of_two_calls"):
        assert "scale_doubled" in found[name]["attnlab_diagnosis"]
    assert "call 2 of the last 2" in found["test_the_second_of_two_calls"]["attnlab_op"]
    assert "from another call" in found["test_both_of_two_calls"]["attnlab_evidence"]
    assert "call 1 of the last 2" in found["test_an_earlier_call"]["attnlab_op"]
    assert "1.7" in found["test_odd_scale"]["attnlab_diagnosis"]
    assert "no such head size" in found["test_raises"]["attnlab_evidence"]
    assert "block_table[0][0]" in found["test_broken_table"]["attnlab_diagnosis"]


def test_sections_are_short(run):
    """Every failing test with a call has one, and its paths."""
    sections = run[1].split("- attnlab -")[1:]
    assert len(sections) == len(FAILING) - 1
    for section in sections:
        lines = section.splitlines()[1:]
        end = next(i for i, line in enumerate(lines) if line.startswith("___") or "====" in line)
        assert 3 <= len(lines[:end]) <= MOST_LINES


def test_the_saved_call_and_the_page(run):
    """The call can be loaded; the page is one file that loads nothing."""
    found = properties(run[0])["test_kernel"]
    call = KernelCall.load(Path(found["attnlab_call"]))
    assert call.origin.test_id == "test_kern.py::test_kernel"
    page = Path(found["attnlab_page"]).read_text()
    assert "scale_doubled" in page
    assert "<script" not in page
    assert "src=" not in page
    assert "heads are wrong" in page
    assert '<g class="wrong">' in page
    assert Path(found["attnlab_page"]).is_relative_to(run[0] / "attnlab-failures")


def test_tests_without_an_op_are_unaffected(run):
    found = properties(run[0])
    assert found["test_no_op"] == found["test_no_op_passes"] == {}
    assert "5 passed" in run[1]


def test_power_of_a_passing_test(run):
    """With a tolerance of 0.5, the doubled scale is noticed, and a causal mask off by one is not."""
    powers = {one["node_id"]: one for one in json.loads((run[0] / "power.json").read_text())}
    names = ("test_good", "test_itself", "test_product", "test_small_product")
    assert set(powers) == {f"test_kern.py::{name}" for name in names}
    power = powers["test_kern.py::test_good"]
    assert not power["with_itself"]
    assert powers["test_kern.py::test_itself"]["with_itself"]
    assert "compares the op with itself" in run[1]
    assert (power["atol"], power["rtol"]) == (0.5, 0.0)
    assert "scale_doubled" in power["killed"]
    assert "causal_plus_one" in power["survived"]
    assert f"{len(power['killed']):>4} of " in run[1]


def test_power_of_a_test_that_compares_products(run):
    """Twice the output in another order of columns, and twice the tolerance, notice the same."""
    powers = {one["node_id"]: one for one in json.loads((run[0] / "power.json").read_text())}
    own, doubled, small = (
        powers[f"test_kern.py::{name}"]
        for name in ("test_good", "test_product", "test_small_product")
    )
    assert doubled["atol"] == 1.0
    assert (doubled["killed"], doubled["survived"]) == (own["killed"], own["survived"])
    assert "scale_doubled" in small["survived"]
    # The bound of the kernel is doubled, too, and the product rounds once more.
    name = "causal_plus_one"
    atols = [
        float(one["cheapest"][name].partition("atol=")[2].partition(",")[0])
        for one in (own, doubled)
    ]
    assert 2 * atols[0] <= atols[1] < 4 * atols[0]


@pytest.mark.slow
def test_under_xdist(run, tmp_path):
    """Two workers report what one process reports, here from copies in CPU memory; the controller prints the
    table."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    folder = run[0]
    before = properties(folder)
    options = ("--attnlab", "--attnlab-host", "--attnlab-power", "-n", "2")
    text = pytest_in(folder, *options, f"--attnlab-dir={tmp_path}")
    after = properties(folder)
    assert {n: p.get("attnlab_wrong_side") for n, p in after.items()} == {
        n: p.get("attnlab_wrong_side") for n, p in before.items()
    }
    assert text.count("- attnlab -") == len(FAILING) - 1
    assert "test_kern.py::test_good" in text.split("attnlab power")[1]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(run, tmp_path):
    """The section has the reason; the run goes on."""
    (tmp_path / "file").write_text("")
    text = pytest_in(run[0], "--attnlab", f"--attnlab-dir={tmp_path / 'file'}", "-k", "kernel")
    assert "not written" in text
    assert "INTERNALERROR" not in text


class Options:
    """A pytest.Config with the default of every option, and some ops."""

    def __init__(self, *ops):
        self.ops, self.option, self.pluginmanager = ops, None, self

    def getini(self, name):
        return self.ops

    def getoption(self, name):
        return {"attnlab_keep": 8, "attnlab_seconds": 0}.get(name, "")

    def register(self, session, name):
        self.session = session


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "op must be MODULE:FUNCTION"),
        ("nowhere:paged", "must name a module nowhere"),
        ("importlib:nothing", "must name a function 'nothing' of importlib"),
        ("importlib:import_module", None),
    ],
)
def test_a_wrong_op_is_a_usage_error(name, words):
    """With pytest's own exit code for it."""
    options = Options(name)
    nothing = SimpleNamespace(items=[], config=SimpleNamespace(rootpath=ROOT / "nowhere"))
    with contextlib.ExitStack() as stack:
        if words:
            stack.enter_context(pytest.raises(pytest.UsageError, match=words))
        Session.start(options)
        stack.callback(options.session.pytest_unconfigure)
        options.session.pytest_collection_finish(nothing)


def test_the_plugin_costs_nothing_without_its_options(run):
    """Neither torch nor other modules of attnlab are imported."""
    folder = run[0]
    (folder / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n"
        "    assert 'attnlab.recorder.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'attnlab.recorder.capture', 'numpy'} & set(sys.modules)\n"
    )
    pytest_in(folder, "test_light.py", code=0, fresh=True)


@pytest.mark.slow
def test_an_error_in_the_report_does_not_fail_the_run(run):
    """A fault planted in the report is logged; the tests have the same outcomes."""
    (run[0] / "conftest.py").write_text(
        "import attnlab.recorder.pytest_session as session\n\n\n"
        "def broken(*args):\n    raise RuntimeError('planted')\n\n\n"
        "session.report_failure = broken\n"
    )
    try:
        text = pytest_in(run[0], "--attnlab", "-k", "test_kernel or no_op")
    finally:
        (run[0] / "conftest.py").unlink()
    assert "2 failed, 1 passed" in text
    assert "INTERNALERROR" not in text


@needs_triton  # it is not imported here: in this process it would be the compiler
@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path):
    """An interpreted Triton kernel with a window that is one key too wide."""
    folder = ROOT / "examples" / "failing_test"
    text = pytest_in(
        folder, "--attnlab", f"--attnlab-dir={tmp_path}", f"--junitxml={tmp_path / 'junit.xml'}"
    )
    assert "window_plus_one" in text
    found = properties(tmp_path)["test_paged_attention[8]"]
    assert found["attnlab_wrong_side"] == "the kernel"
    assert properties(tmp_path)["test_paged_attention[64]"] == {}


# The report itself.


def test_a_long_report_is_cut_to_its_lines():
    """The paths at the end stay."""
    report = FailureReport()
    for label in ("op", "evidence", "diagnosis", "violation", "violation"):
        report.add(label, "word " * 100)
    report.add("call", "a" * 300)
    report.add("page", "b" * 300)
    lines = report.lines()
    assert len(lines) == MOST_LINES
    assert lines[-1].endswith("b" * 300)
    assert any(line.endswith("…") for line in lines)


@pytest.mark.parametrize(
    "node_id", ["a.py::t", "a/b.py::t[x-1]", "a/b.py::t[x 1]", "é" * 50, "x" * 400, "::", "a..b"]
)
def test_names_of_folders(node_id):
    name = folder_name(node_id)
    assert len(name) <= 120
    assert name.isascii()
    assert not set("/\\:[] ") & set(name)
    assert folder_name(node_id + "!") != name
