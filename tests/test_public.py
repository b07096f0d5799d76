"""The public names of attnlab: all resolve, nothing else is public, and the import is light."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.cases import hostile

import attnlab

ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
SMALL = {"num_heads": 4, "head_size": 64, "query_lens": (5, 1), "ctx_lens": (40, 33)}
FAILING = {**SMALL, "stage": "int32_before_cumsum"}
CASE = attnlab.Case(**FAILING)


@pytest.mark.parametrize("name", attnlab.__all__)
def test_every_name_resolves(name):
    assert getattr(attnlab, name) is not None
    assert name in dir(attnlab)


def test_no_other_name_is_public():
    """Folders of the package become attributes when they are imported; they are not public."""
    names = {
        name
        for name, value in vars(attnlab).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert names <= {*attnlab.__all__}
    assert {*dir(attnlab)} == {*attnlab.__all__, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Kase"):
        _ = attnlab.Kase


def test_type_checkers_see_the_same_names():
    """The imports for type checkers, the places of the lazy import, and __all__ agree."""
    tree = ast.parse(Path(attnlab.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        for alias in node.names
    }
    loaded = {
        name: place if ":" in place else f"{place}:{name}"
        for name, place in attnlab._PLACES.items()
    }
    assert seen == loaded
    assert sorted(loaded) == sorted(attnlab.__all__)


@pytest.mark.parametrize(
    "code",
    ["import attnlab", "import attnlab; attnlab.explain(attnlab.Case())"],
)
def test_the_import_is_light(code):
    heavy = "{'torch', 'matplotlib', 'IPython', 'ipywidgets'}"
    check = f"import sys; {code}; found = {heavy} & {{*sys.modules}}; sys.exit(str(found) if found else 0)"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_run_of_a_test_id_with_changes():
    result = attnlab.run(ID, **FAILING)
    assert result.case == attnlab.Case.from_test_id(ID).replace(**FAILING)
    assert result.status == "mismatch"


def test_the_default_lab_is_shared_and_another_is_used():
    first, second = attnlab.run(CASE), attnlab.run(CASE)
    assert second.cache is first.cache
    lab = attnlab.Lab()
    assert attnlab.run(CASE, lab=lab).cache is not first.cache
    assert attnlab.run(CASE, lab=lab).cache is lab.cache(CASE)


@pytest.mark.parametrize(
    "function", ["run", "stages", "explain", "violations", "diagnose", "power", "xray"]
)
@pytest.mark.parametrize("argument", [None, 3, "hello"])
def test_a_wrong_argument_is_an_invalid_case(function, argument):
    with pytest.raises(attnlab.InvalidCase):
        getattr(attnlab, function)(argument)


@pytest.mark.parametrize(
    "function", ["run", "stages", "explain", "violations", "diagnose", "power", "xray"]
)
def test_a_wrong_change_names_its_field(function):
    with pytest.raises(attnlab.InvalidCase) as error:
        getattr(attnlab, function)(CASE, num_heads=0)
    assert error.value.field == "num_heads"


def test_stages():
    cells = attnlab.stages(CASE, platforms=["gfx942"])
    assert {cell.platform for cell in cells} == {"gfx942"}
    assert {cell.status for cell in cells} == {"match", "mismatch", "rejected"}


def test_explain():
    assert attnlab.explain(CASE).decode == "paged_attention_rocm"
    assert attnlab.explain(CASE, platform="sm_90").decode == "kernel_paged_attention_2d"


def test_violations_and_diagnosis_of_a_case_and_of_a_call():
    call = attnlab.run(CASE).call
    assert {one.kind for one in attnlab.violations(CASE)} == {"index_dtype", "unwritten_rows"}
    assert {one.kind for one in attnlab.violations(call)} == {"index_dtype", "unwritten_rows"}
    assert attnlab.violations(call, platform="sm_90") == []
    assert attnlab.diagnose(CASE).cause.name == "query_start_loc_as_int32"
    assert attnlab.diagnose(call).is_wrong
    assert not attnlab.diagnose(CASE, stage="sound").is_wrong


def test_diagnosis_of_an_output():
    case = hostile()
    wrong = attnlab.run(case).call.output.clone()
    wrong[3] = wrong[4]
    assert attnlab.diagnose(case, wrong).is_wrong
    with pytest.raises(attnlab.AttnLabError):
        attnlab.diagnose(case, wrong[1:])


def test_compare_and_reference():
    case = hostile(atol=0.01)
    output = attnlab.run(case).call.output.clone()
    assert attnlab.compare(case, output).mismatched == 0
    output[7, 2, 5] += 1
    errors = attnlab.compare(case, output)
    assert (errors.mismatched, errors.first_index) == (1, (7, 2, 5))
    right = attnlab.reference(case)
    assert right.shape == output.shape
    assert right.dtype == torch.float64
    right.zero_()
    assert attnlab.reference(case).count_nonzero()


@pytest.mark.parametrize("change", [lambda t: t[1:], lambda t: t.float()], ids=["shape", "dtype"])
def test_compare_refuses_another_output(change):
    case = hostile()
    with pytest.raises(attnlab.AttnLabError, match="output"):
        attnlab.compare(case, change(attnlab.run(case).call.output))


def test_power():
    report = attnlab.power(CASE, remedies=False)
    assert report.survivors
    assert report.proposal is None


def test_check_of_the_models_and_of_a_planted_fault(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def zeros(call):\n    call.output.zero_()\n")
    found = attnlab.check(f"{file}:zeros", cases=2, seconds=60).findings
    assert "wrong_output" in {one.kind for one in found}
    assert attnlab.check(ops=["merge_attn_states"], cases=2, seconds=60).findings == []


def test_decode_error():
    message = attnlab.run(CASE).errors.message()
    decoded = attnlab.decode_error(message, CASE)
    assert (decoded.seq, decoded.token, decoded.row) == (1, 0, 5)
    assert attnlab.decode_error(message, ID, **FAILING) == decoded


def test_plot_of_each_noun():
    pytest.importorskip("matplotlib")
    result = attnlab.run(CASE)
    nouns = [result, result.errors, attnlab.stages(CASE), attnlab.power(CASE, remedies=False)]
    for noun in nouns:
        assert attnlab.plot(noun, title="t").get_title() == "t"
    for noun in ("a text", attnlab.run(CASE, stage="int64")):
        with pytest.raises(attnlab.InvalidCase):
            attnlab.plot(noun)


def test_plot_of_a_cache_write_labels_slots():
    pytest.importorskip("matplotlib")
    result = attnlab.run(CASE, op="reshape_and_cache_flash", fill=None)
    assert attnlab.plot(result).get_ylabel() == "slots of sequence"


def test_defects_are_the_catalogue():
    assert "newest_slot_unwritten" in attnlab.DEFECTS
