"""Faults that are planted in a small Triton kernel are located in its source."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import faulty_attention
from helpers.triton_example import SMALL, TRITON, planted

from attnlab.case.case import Case
from attnlab.cli.main import main
from attnlab.diagnosis import confirmation, refinement
from attnlab.diagnosis.claims import KernelLocation
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.lines import locate_lines, preferred, why_unavailable
from attnlab.diagnosis.trials import COSTS, EditedForms, Limit, Repair, kernel_text
from attnlab.kernels import find_backend
from attnlab.kernels.triton.kernel_text import compile_text, statement_lines
from attnlab.kernels.triton.lockstep.edits import EditRun
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.replay import Replay, Unit
from attnlab.kernels.triton.run_log import TooLong
from attnlab.kernels.triton.source_edits import Edit, edits
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import xray

LOAD_Q = "    q = tl.load(place, mask=d < DIM, other=0.0).to(tl.float32)\n"


def located(case: Case, edits: int = 400, with_xray: bool = False) -> KernelLocation:
    lab = Lab(device="cpu")
    found = xray(case, lab=lab, limit_s=2, confirm=False) if with_xray else None
    return locate_lines(lab, case, found, Limit(edits=edits))


def test_an_edit_that_repairs_the_output_gives_the_line(tmp_path):
    old, new = "first // BLOCK).to", "first % BLOCK).to"
    case, line = planted(tmp_path, old, new)
    found = located(case, edits=400)
    assert [one.line for one in found.lines if one.evidence == "edit"] == [line]
    assert found.lines[0].line == line
    assert (found.lines[0].evidence, found.lines[0].score) == ("edit", 1.0)
    assert all(
        one.source == TRITON.replace(old, new).splitlines()[one.line - 1].strip()
        for one in found.lines
    )
    assert found.why_none == ""


def with_output(folder: Path, text: str, made: str) -> Case:
    """Return a Case for a kernel that gets ``made`` of the call's output as its buffer."""
    text = text.replace("seq, call.output,", "seq, out,")
    text = text.replace("    row_kernel[(", f"    out = {made}\n    row_kernel[(", 1)
    file = folder / "kernel.py"
    file.write_text(text)
    return SMALL.replace(backend=f"{file}:my_attention")


def test_an_output_with_a_leading_dimension_of_1_is_located(tmp_path):
    old, new = "first // BLOCK).to", "first % BLOCK).to"
    case = with_output(tmp_path, TRITON.replace(old, new), "call.output[None]")
    found = located(case, edits=400)
    text = Path(case.backend.partition(":")[0]).read_text().splitlines()
    assert [text[one.line - 1] for one in found.lines if one.evidence == "edit"] == [
        line for line in text if new in line
    ]


def test_nothing_is_said_of_programs_that_were_not_examined(tmp_path):
    """The kernel writes a tensor of one dimension, which may hold rows and heads in any order."""
    text = TRITON.replace("first // BLOCK).to", "first % BLOCK).to")
    found = located(with_output(tmp_path, text, "call.output.flatten()"), edits=400)
    assert found.lines == ()
    assert found.tried == 0
    expected = "no tensor of the kernels was recognised as the output (2, 2, 16)"
    assert found.why_none.startswith(expected)


def test_an_edit_that_keeps_the_operands_is_stated_first():
    text = "def kernel(out, a, b, n):\n    end = tl.maximum(a + b, n)\n    tl.store(out, end)\n"
    found = edits(text, {2}, 1, text)
    every = [Repair(kernel=None, text=text, edit=one, share=1.0) for one in found]
    some = [one for one in every if one.edit.after in ("(a)", "tl.minimum")]
    assert [one.edit.before for one in preferred(some)] == ["tl.maximum", "a + b"]


def test_rows_that_no_program_stores_are_located(tmp_path):
    """Each program takes its head from its row: the right programs store other rows than the wrong ones."""
    case, line = planted(
        tmp_path, "tl.program_id(0), tl.program_id(1)", "tl.program_id(0), tl.program_id(0)"
    )
    found = located(case, edits=200)
    assert (found.lines[0].line, found.lines[0].evidence) == (line, "edit")


def test_an_access_outside_a_tensor_gives_the_lines_that_feed_it(tmp_path):
    case, line = planted(tmp_path, "out + row * out_row", "out - row * out_row")
    found = located(case, edits=0)
    places = [(one.line, one.evidence) for one in found.lines[:3]]
    assert places[:2] == [(line + 1, "outside"), (line, "outside")]


def test_edits_that_run_together_have_the_outputs_that_each_has_alone(tmp_path):
    """Also those that raise something, change nothing or have several places."""
    case, _ = planted(tmp_path, "first // BLOCK", "first % BLOCK")
    with probing(Probe(records=True)) as probe:
        output = Lab(device="cpu").output(case)
    replay = Replay(probe.launches, output.shape)
    function, units = probe.launches[0].function, replay.units[:2]
    kernel = kernel_text(function, (), ())
    lines = set(statement_lines(kernel.text).values())
    found = [
        (kernel, kernel.text, edit)
        for cost in COSTS
        for at, edit in enumerate(edits(kernel.text, lines, cost, kernel.text))
        if edit.more or at % 23 == 0
    ]
    forms, plain = EditedForms(found), replay.run(units, {}).numpy().tobytes()
    kinds = Counter[str]()
    for number, (_, _, edit) in enumerate(found):
        together = forms.output(number, replay, units)
        if isinstance(together, str):
            kinds["alone"] += 1
            continue
        alone = outcome(
            replay, {function.fn: partial(compile_text, function, edit.apply(kernel.text))}, units
        )
        if together is None:
            assert isinstance(alone, type), edit.text
            kinds["raises"] += 1
        else:
            assert together.numpy().tobytes() == alone, edit.text
            kinds["same" if alone == plain else "differs", bool(edit.more)] += 1
    assert kinds["differs", False] > 20
    assert min(kinds["raises"], kinds["same", False], kinds["differs", True]) > 0, kinds
    assert kinds["alone"] < len(found) / 3


def test_edits_that_take_long_do_not_stop_those_that_run_with_them(tmp_path, monkeypatch):
    """Two loops with many iterations and an expression that takes long; one batch is enough."""
    case, _ = planted(tmp_path, "first // BLOCK", "first % BLOCK")
    with probing(Probe(records=True)) as probe:
        output = Lab(device="cpu").output(case)
    replay = Replay(probe.launches, output.shape)
    kernel = kernel_text(probe.launches[0].function, (), ())
    slow = "(scores + sum(tl.sum(scores, 0) for _ in range(1 << 30)))"
    changes = {"end + 1": ["(1 << 40)", "(1 << 30)", "end"], "scores - new": [slow, "scores"]}
    found = [(kernel, kernel.text, edit_at(kernel.text, a, b)) for a in changes for b in changes[a]]
    steps = list[int]()
    step = EditRun._step
    monkeypatch.setattr(EditRun, "_step", lambda run, *rest: (steps.append(1), step(run, *rest)))
    forms = EditedForms(found)
    outputs = [forms.output(number, replay, replay.units[:2]) for number in range(len(found))]
    assert [isinstance(one, torch.Tensor) for one in outputs] == [False, False, True, False, True]
    assert len(steps) == 1


def edit_at(text: str, before: str, after: str) -> Edit:
    """Return the edit that puts a text in the place of another, which a kernel has once."""
    start = text.index(before)
    line = text[:start].count("\n") + 1
    places = {"start": start, "end": start + len(before)}
    return Edit(line=line, statement=line, before=before, after=after, cost=1, **places)


@pytest.mark.slow
def test_what_is_wrong_so_far_is_announced_before_the_final_statement(tmp_path):
    case, _ = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    steps: list[str] = []
    found = diagnose(case, lab=Lab(on_step=lambda step, *rest: steps.append(step)), limit=None)
    known = [*dict.fromkeys(step.split("\n")[0] for step in steps if step.startswith("so far: "))]
    assert "rows are wrong; the largest absolute error" in known[0]  # a measurement, no name
    assert found.conclusion.split("; ")[0] in known[-1]
    assert not any("so far" in sentence for sentence in found.sentences())


def outcome(
    replay: Replay, edited: Mapping[object, object], units: Sequence[Unit] | None = None
) -> bytes | type:
    """Return the bytes of the output of a replay with edited kernels, or the error that it raises."""
    try:
        return replay.run(units, edited).numpy().tobytes()
    except (Exception, TooLong) as error:
        return type(error)


def test_a_branch_of_some_programs_is_found_by_the_spectrum(tmp_path):
    branch = "    if head == 1:\n        q = tl.sqrt(tl.abs(q)) + 0.3\n"
    case, line = planted(tmp_path, LOAD_Q, LOAD_Q + branch)
    found = located(case, edits=0)
    assert found.programs == (2, 4)
    assert (found.lines[0].line, found.lines[0].evidence) == (line + 2, "spectrum")


def test_a_fault_that_nothing_separates_has_no_line(tmp_path):
    case, _ = planted(tmp_path, LOAD_Q, LOAD_Q + "    q = tl.sqrt(tl.abs(q)) + 0.3\n")
    found = located(case, edits=10)
    assert found.lines == ()
    assert "every program has wrong rows" in found.why_none


def test_an_xray_names_the_lines_of_its_rule(tmp_path):
    """A sum that is not rescaled: without trials, the lines that update it come first."""
    case, line = planted(tmp_path, "total = total * keep + tl.sum", "total = total + tl.sum")
    found = located(case, edits=0, with_xray=True)
    assert line in [one.line for one in found.lines[:4]]
    assert {one.evidence for one in found.lines} == {"role"}


def test_a_right_kernel_has_no_line():
    assert located(SMALL.replace(backend=f"{planted_example()}:my_attention")).lines == ()


def planted_example() -> Path:
    return Path(__file__).parents[2] / "examples" / "my_triton_attention.py"


def test_other_backends_have_no_lines():
    assert "no Triton kernels" in why_unavailable(find_backend("model"))
    assert "emulated ROCm device" in why_unavailable(find_backend("rocm"))


def test_a_probe_changes_no_bit_and_restores_the_trace():
    case, lab, before = (
        SMALL.replace(backend=f"{planted_example()}:my_attention"),
        Lab(),
        sys.gettrace(),
    )
    output = lab.output(case)
    with probing(Probe(records=True)) as probe:
        assert torch.equal(lab.output(case), output)
    assert len(probe.launches[0].programs) == 4
    assert sys.gettrace() is before


def test_an_op_in_inference_mode_has_lines(tmp_path):
    """What such an op allocates can be written in inference mode alone; trials restore it before each run."""
    case, line = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    file = Path(case.backend.removesuffix(":my_attention"))
    text = file.read_text()
    text = text.replace("def my_attention", "@torch.inference_mode()\ndef my_attention")
    text = text.replace("row_kernel[", "scratch = torch.empty_like(call.output)\n    row_kernel[")
    text = text.replace("seq, call.output,", "seq, scratch,")
    file.write_text(
        text.replace(
            "\n\n\nmy_attention.op", "\n    call.output.copy_(scratch)\n\n\nmy_attention.op"
        )
    )
    found = located(case, edits=300)
    assert line in [one.line for one in found.lines[:3]]
    assert found.repairs


def test_the_diagnosis_states_no_line_that_no_rerun_confirms(tmp_path, monkeypatch):
    monkeypatch.setattr(
        confirmation, "rules_of", lambda problem, output: ()
    )  # none describes the fault,
    monkeypatch.setattr(refinement, "_XRAY_S", 0.1)  # nor does an X-ray
    case, line = planted(tmp_path, LOAD_Q, LOAD_Q + "    if head == 1:\n        q = q * q\n")
    found = diagnose(case, lab=Lab(), propose=False, defects=(), limit=Limit(edits=0))
    assert line + 2 in [one.line for one in found.locations]
    assert not any(f"line {line + 2}" in sentence for sentence in found.sentences())
    assert found.sentences()[-1].startswith("source line: unknown")
    assert found.to_dict()["locations"][0]["file"].endswith("kernel.py")


def test_the_command_states_why_there_is_no_line(tmp_path, capsys):
    """A kernel that is no Triton kernel."""
    kernel = f"{faulty_attention.__file__}:halved"
    flags = ["--op", "context_attention_fwd", "--query-lens", "3", "--ctx-lens", "20"]
    sizes = ["--num-heads", "2", "--head-size", "16", "--block-size", "16"]
    assert main(["xray", "--kernel", kernel, *flags, *sizes, "--no-confirm", "--json"]) == 1
    location = json.loads(capsys.readouterr().out)["location"]
    assert (location["lines"], location["why_none"]) == ([], "no Triton kernel was launched")
