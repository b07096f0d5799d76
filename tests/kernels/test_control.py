"""Controls: what rests on the comparison of runs, with kernels that are not deterministic."""

import json

import pytest
import torch
from helpers import faulty_attention, flaky_attention

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import NotDeterministic
from attnlab.checker.case_check import check_case
from attnlab.cli.main import main
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import run_again
from attnlab.kernels.control import controlled, repeated, rows_agree, uncontrolled
from attnlab.kernels.plugin import PluginBackend
from attnlab.lab.lab import Lab

FIELDS = {
    **{"op": "unified_attention", "num_heads": 2, "num_queries_per_kv": 2, "head_size": 32},
    **{"block_size": 16, "query_lens": (3, 9), "ctx_lens": (40, 67), "distribution": "normal"},
    **{"stage": "sound", "platform": "sm_90", "reference_dtype": "float64"},
}
FLAKY = ("first", "second", "fourth")


def spec(name):
    return f"{flaky_attention.__file__}:{name}"


def case_of(name, **changes):
    return Case(**{**FIELDS, "backend": spec(name), **changes})


def outputs(*numbers):
    """Return a function that gives outputs with these numbers in row 1, the last one for ever."""
    left = list(numbers)

    def run(given):
        output = torch.ones(4, 2, 8, dtype=torch.float16)
        output[1] = left.pop(0) if len(left) > 1 else left[0]
        return output

    return run


def test_equal_runs_that_differ_are_counted():
    """A, B, A, A, A, A, A, A: one run of 8 differs, in one row."""
    with controlled() as control:
        repeated(outputs(1.0, 2.5, 1.0))(None)
    assert (control.found.runs, control.found.others) == (8, 1)
    assert (control.found.rows, control.found.largest) == ((1,), 1.5)
    assert (
        "1 of 8 runs differ from the others, in 1 of 4 rows (1), by up to 1.5" in control.found.text
    )


def test_the_first_run_may_be_the_one_that_differs():
    with controlled() as control:
        repeated(outputs(torch.nan, 1.0))(None)
    assert (control.found.others, control.found.rows) == (1, (1,))
    assert "NaN in one of them" in control.found.text
    json.dumps(control.found.to_dict(), allow_nan=False)


def test_another_order_of_sums_is_no_instability():
    """Then rows that differ no more agree, and others do not; without it, bits decide."""
    one, near, far = (outputs(number)(None) for number in (1.0, 1.001, 1.5))
    assert rows_agree(one, near).tolist() == [True, False, True, True]
    with controlled() as control:
        repeated(outputs(1.0, 1.001))(None)
        assert control.reorders
        assert rows_agree(one, near).all()
        assert rows_agree(one, far).tolist() == [True, False, True, True]
    assert control.found is None


def test_a_caller_that_leaves_out_the_error_gets_it_again():
    with controlled() as control:
        with pytest.raises(NotDeterministic):
            repeated(outputs(1.0, 2.5, 1.0))(None)
        with pytest.raises(NotDeterministic):
            repeated(outputs(1.0))(None)
    assert control.found is not None


def test_runs_are_made_once_elsewhere():
    run = repeated(outputs(1.0, 2.5, 1.0))
    assert float(run(None)[1, 0, 0]) == 1.0
    with controlled() as control, uncontrolled():
        assert float(run(None)[1, 0, 0]) == 2.5
    assert control.found is None


def test_what_the_lab_runs_deterministically_is_run_once(monkeypatch):
    lab = Lab()
    case = Case(**FIELDS)
    backend = lab.backend(case)
    runs, run = [], type(backend).run
    monkeypatch.setattr(type(backend), "run", lambda *given: runs.append(1) or run(*given))
    with controlled():
        lab.output(case)
    assert len(runs) == 1
    monkeypatch.setattr(type(backend), "is_deterministic", False)
    with controlled() as control:
        lab.output(case)
    assert len(runs) == 3
    assert control.found is None


@pytest.mark.parametrize("empty_slots", ["nan", "zeros"])
def test_a_diagnosis_says_so_and_states_no_dependence(empty_slots):
    """It said that the row depends on unwritten cache slots."""
    found = attnlab.diagnose(case_of("first", empty_slots=empty_slots))
    assert found.status == "described"
    assert found.instability.rows == (0,)
    assert found.sentences()[0].startswith(
        "not deterministic: the same call gives different outputs"
    )
    assert not any("depends on" in one or "no kernel writes" in one for one in found.sentences())
    assert (found.cause, found.explanations, found.slot_dependent) == (None, [], None)
    assert found.to_dict()["instability"]["rows"] == (0,) or found.to_dict()["instability"][
        "rows"
    ] == [0]


def test_a_rerun_of_the_user_is_repeated():
    """The output is wrong in a way that does not change; the reruns damage another row now and then."""
    case, lab, calls = Case(**FIELDS, empty_slots="nan"), Lab(), []

    def rerun(one):
        calls.append(1)
        output = lab.output(one).clone()
        output[5] *= 2
        output[0] += 0.5 * (len(calls) % 4 == 3)
        return output

    right = lab.output(case).clone()
    right[5] *= 2
    found = diagnose(case, right, lab=lab, rerun=rerun)
    assert found.instability.rows == (0,)
    assert found.slot_dependent is None


@pytest.mark.parametrize("name", FLAKY)
def test_a_check_has_a_finding_of_its_own(name):
    """It found reads of unwritten slots, or of freed blocks."""
    backend, kinds = PluginBackend(spec=spec(name)), set()
    for fields in ({}, {"sliding_window": 20, "freed": "empty"}):
        case = case_of(name, empty_slots="nan", output_init="nan", **fields)
        kinds |= {one.kind for each in range(4) for one in check_case(Lab(), backend, case)}
    assert kinds == {"not_deterministic"}


@pytest.mark.parametrize("name", FLAKY)
def test_an_xray_reads_no_weights(name, capsys, monkeypatch):
    with pytest.raises(NotDeterministic, match="the same call gives different outputs"):
        attnlab.xray(case_of(name))
    assert main(["xray", *case_of(name).to_cli().split()[2:], "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "not deterministic"
    assert "no weight can be read" in document["sentences"][0]


def test_an_xray_of_a_wrong_kernel_is_the_same_with_controls():
    """The kernel is a user's, so each run is made twice."""
    found = attnlab.xray(
        Case(**{**FIELDS, "op": "context_attention_fwd"}), backend=faulty("halved")
    )
    assert found.status == "described"


def faulty(name):
    return f"{faulty_attention.__file__}:{name}"


@pytest.mark.parametrize("name", FLAKY)
def test_a_probe_blames_no_variation(name):
    found = attnlab.probe_call(attnlab.run(Case(**FIELDS)).call, backend=spec(name))
    assert found.verdict == "corruption"
    assert found.instability.rows == (0,)
    assert found.conclusion == f"corruption: {found.instability.text}"


def test_a_second_run_with_a_changed_field_is_not_compared():
    lab, case = Lab(), case_of("fourth", empty_slots="zeros")
    found = run_again(lab, case, lab.output(case), {"empty_slots": "garbage"})
    assert not found.is_equal
    assert found.rows == ()
    assert "is not compared: the same call gives different outputs" in found.text()


def test_a_row_with_nan_from_slots_is_not_unwritten():
    """Zeros in slots and in the buffer made the row 0: two fields had changed at once."""
    backend = PluginBackend(spec=spec("zeroes"))
    case = case_of("zeroes", empty_slots="nan", output_init="nan")
    kinds = {one.kind for one in check_case(Lab(), backend, case)}
    assert kinds
    assert "rows_not_written" not in kinds


def test_a_row_that_is_added_to_the_buffer_is_not_unwritten():
    """It keeps NaN, and it keeps zeros where its values are 0."""
    found = attnlab.xray(case_of("adds"), confirm=False, limit_s=1)
    assert not bool(found.measurement.unwritten.any())
    assert not any("not written" in one for one in found.sentences)
