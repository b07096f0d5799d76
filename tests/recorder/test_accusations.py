"""Failing tests of small kernels, run through ``pytest --attnlab``: a sound kernel is accused of nothing, its
faulty twin is named, and what cannot be decided is said to be undecided."""

from pathlib import Path

import pytest
from helpers.kernel_tests import FILES
from helpers.recorded_tests import properties, pytest_in

from attnlab.tensors.call import KernelCall

pytestmark = pytest.mark.slow

KERNEL, EXPECTED = "the kernel", "the expected value"
# Of each failing test: the side, and a part of the diagnosis or of the evidence.
SIDES = {
    # A kernel that returns its output.
    "test_returned[right]": (EXPECTED, "exact up to rounding"),
    "test_returned[scale]": (KERNEL, "scale_doubled"),
    "test_returned_in_a_batch[right]": (EXPECTED, "exact up to rounding"),
    "test_returned_in_a_batch[scale]": (KERNEL, "scale_doubled"),
    "test_returned_with_heads_joined[right]": (EXPECTED, "exact up to rounding"),
    "test_returned_with_heads_joined[scale]": (KERNEL, "scale_doubled"),
    "test_nothing_returned": (None, "without a recorded output"),
    "test_output_of_nan": (KERNEL, "NaN"),
    "test_output_of_another_shape": (None, "output must have shape (6, 4, 32)"),
    # Which side.
    "test_float64": ("the test's dtypes", "float32 with float64"),
    "test_allclose_of_float64": ("the test's dtypes", "float32 with float64"),
    "test_float64_and_wrong[scale]": (KERNEL, "scale_doubled"),
    "test_tolerance_of_float64": ("the tolerance", "does not allow their difference"),
    "test_other_scale": ("the test's arguments", "sm_scale (0.125 and 0.25)"),
    "test_other_window": ("the test's arguments", "sliding_window (0 and 8)"),
    "test_other_query": ("the test's arguments", "query"),
    # What the test compares.
    "test_compared[float32-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[float32-scale]": (KERNEL, "scale_doubled"),
    "test_compared[half-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[half-scale]": (KERNEL, "scale_doubled"),
    "test_compared[double-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[cpu-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[rows-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[rows-scale]": (KERNEL, "scale_doubled"),
    "test_compared[head-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[elements-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[flat-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[turned-right]": (EXPECTED, "exact up to rounding"),
    "test_compared[turned-scale]": (KERNEL, "scale_doubled"),
    "test_rounded_to_half": (EXPECTED, "off by up to 1 in 1 rows"),
    "test_two_kernels[0]": (KERNEL, "scale_doubled"),
    "test_two_kernels[1]": (KERNEL, "scale_doubled"),
    "test_rows_of_two_kernels": (KERNEL, "scale_doubled"),
    "test_sdpa[scale]": (KERNEL, "scale_doubled"),
    "test_sdpa_with_the_mask_at_the_top_left": ("the test's arguments", "seq_lens"),
    # Arguments that attnlab does not know.
    "test_integer_window[right]": ("unknown", "window_size=8"),
    "test_integer_window[scale]": ("unknown", "window_size=8"),
    "test_unknown_at_its_default": (EXPECTED, "exact up to rounding"),
    "test_unknown_and_a_bad_table": ("unknown", "temperature=0.5"),
    "test_sizes_are_known": (EXPECTED, "exact up to rounding"),
    "test_request_index[right]": (EXPECTED, "exact up to rounding"),
    "test_request_index[scale]": (KERNEL, "scale_doubled"),
    # Ops of other libraries.
    "test_sglang_decode[right]": (EXPECTED, "exact up to rounding"),
    "test_sglang_decode[scale]": (KERNEL, "scale_doubled"),
    "test_sglang_requests[right]": (EXPECTED, "exact up to rounding"),
    "test_sglang_requests[scale]": (KERNEL, "scale_doubled"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run the tests once; return each test's properties."""
    folder = tmp_path_factory.mktemp("accusations")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    pytest_in(folder, "--attnlab", "-q", "--attnlab-seconds=0")
    return properties(folder)


def test_every_test_failed_and_has_a_report(found):
    """A test that passes, or that records no call, would show nothing."""
    assert set(found) == set(SIDES)
    assert [name for name, facts in found.items() if "attnlab_op" not in facts] == []


@pytest.mark.parametrize("name", SIDES)
def test_the_side_and_the_reason(found, name):
    side, text = SIDES[name]
    facts = found[name]
    assert facts.get("attnlab_wrong_side") == side, facts
    assert text in f"{facts.get('attnlab_evidence')}; {facts.get('attnlab_diagnosis')}", facts


def test_the_call_that_is_wrong_is_named(found):
    """Whichever of two kernels made the expected value."""
    for name, number in (("test_two_kernels[0]", 1), ("test_two_kernels[1]", 2)):
        assert f"call {number} of the last 2" in found[name]["attnlab_op"]


def test_an_unknown_argument_comes_first_and_is_saved(found):
    facts = found["test_integer_window[right]"]
    assert next(iter(facts)) == "attnlab_not_decided"
    assert "window_size=8" in facts["attnlab_not_decided"]
    call = KernelCall.load(Path(facts["attnlab_call"]))
    assert call.unknown_arguments == ("window_size=8",)
    assert "1 of 6 rows" not in facts["attnlab_evidence"]


def test_another_form_is_stated(found):
    read_as = found["test_returned_in_a_batch[right]"]["attnlab_read_as"]
    assert "query (1, 6, 4, 32) as (6, 4, 32)" in read_as
    assert "output (1, 6, 4, 32) as (6, 4, 32)" in read_as
    assert "request index" in found["test_request_index[right]"]["attnlab_read_as"]


def test_an_op_of_another_library_has_no_contracts_of_vllm(found):
    """SGLang's decode_attention_fwd has the name of vLLM's."""
    facts = found["test_sglang_decode[right]"]
    assert facts["attnlab_op"].startswith("sglang.")
    call = KernelCall.load(Path(facts["attnlab_call"]))
    assert call.op == "sglang_decode_attention"
    assert call.spec.library == "sglang"


_RUNS = """
import kernels
from test_kernels import batch, check, expected


def test_wrong(monkeypatch):
    monkeypatch.setattr(kernels, "FACTOR", 1.3)
    check(kernels.joined(**batch())[0], expected(batch(), "scale").flatten(1))


def test_mended_before_the_report(monkeypatch):
    monkeypatch.setattr(kernels, "FACTOR", 1.3)
    found = kernels.joined(**batch())[0]
    monkeypatch.setattr(kernels, "FACTOR", 1.0)
    check(found, expected(batch(), "scale").flatten(1))


def test_every_fourth_call(monkeypatch):
    attend, numbers = kernels.attend, iter(range(10_000))

    def damaged(*given):
        out = attend(*given)
        out[0] += next(numbers) % 4 == 0
        return out

    monkeypatch.setattr(kernels, "attend", damaged)
    check(kernels.joined(**batch())[0], expected(batch(), "right").flatten(1))


def test_slow(monkeypatch):
    monkeypatch.setattr(kernels, "FACTOR", 1.3)
    found = kernels.joined(**batch())[0]
    right = expected(batch(), "scale").flatten(1)

    def endless(*given):
        while True:
            pass

    monkeypatch.setattr(kernels, "attend", endless)
    check(found, right)
"""


def test_a_kernel_is_run_again_in_a_copy_of_the_process(tmp_path):
    """Its fault is then stated as that of a Case, with further cases; an endless run is ended."""
    for name, text in {**FILES, "test_runs.py": _RUNS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {}
    for seconds, tests in ((15, "not slow"), (1, "slow")):
        pytest_in(
            tmp_path, "--attnlab", "-q", f"--attnlab-seconds={seconds}", "-k", tests, "test_runs.py"
        )
        found |= properties(tmp_path)
    words = "the scores of keys are multiplied by a further 1.3 (confirmed on"
    assert words in found["test_wrong"]["attnlab_diagnosis"]
    assert "attnlab_not_run" not in found["test_wrong"]
    assert "--kernel kernels.py:joined" in Path(found["test_wrong"]["attnlab_page"]).read_text()
    for name in ("test_mended_before_the_report", "test_slow"):
        assert words not in found[name]["attnlab_diagnosis"]
    mended = found["test_mended_before_the_report"]
    assert "run on this call, it gives the right output" in mended["attnlab_unknown"]
    unstable = found["test_every_fourth_call"]["attnlab_diagnosis"]
    assert "not deterministic: the same call gives different outputs" in unstable
    assert "row 0" not in unstable
    assert "they take more than 1 s" in found["test_slow"]["attnlab_not_run"]
