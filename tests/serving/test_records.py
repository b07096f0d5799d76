"""Records, saved calls, and the report that is read from them."""

import dataclasses
import json
import os

import pytest

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.lab.lab import Lab
from attnlab.replay.parts import KeptSequence, with_kv_heads, with_sequences
from attnlab.reports.shared_page import page_of
from attnlab.serving.capture_state import (
    CALLS,
    MOST_WRONG,
    KeptCalls,
    Observation,
    RecordFile,
    Tally,
    read_records,
)
from attnlab.serving.report import read_report, with_diagnoses
from attnlab.serving.settings import (
    CaptureSettings,
    parse_bytes,
    parse_count,
    parse_range,
    parse_share,
)
from attnlab.tensors.call import KernelCall, Origin


def observation(**changes) -> Observation:
    values = {"kind": "value", "text": "off", "layer": "layers.0", "step": 3, "request": "a"}
    return Observation(**{**values, **changes})


@pytest.fixture
def call() -> KernelCall:
    case = Case(num_heads=2, head_size=32, query_lens=(3,), ctx_lens=(5,), stage="sound")
    made = Lab().call(case)
    return dataclasses.replace(made, output=Lab().run(case).output, origin=Origin(layer="layers.0"))


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    RecordFile(tmp_path).write("note", {"text": "one", "value": float("nan")})
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text() + '{"event": "note", "te')
    ((lines),) = read_records(tmp_path).values()
    assert lines == [{"event": "note", "text": "one", "value": "nan"}]


def test_a_forked_process_has_a_record_of_its_own(tmp_path):
    file = RecordFile(tmp_path)
    file.write("note", {"text": "parent"})
    child = os.fork()
    if child == 0:
        file.write("note", {"text": "child"})
        os._exit(0)
    os.waitpid(child, 0)
    found = sorted(lines[0]["text"] for lines in read_records(tmp_path).values())
    assert found == ["child", "parent"]


def test_repeated_observations_are_counted(tmp_path):
    tally = Tally(RecordFile(tmp_path))
    tally.counts["steps"] = 9
    for step in (3, 4, 8):
        tally.observe([observation(step=step)])
    tally.observe([observation(kind="recycled", block=1), observation(kind="recycled", block=2)])
    tally.observe([observation(kind="never_written", block=1, step=9)])
    tally.write()
    found = {one.first.kind: one for one in read_report(tmp_path).found}
    assert (found["value"].times, found["value"].first.step, found["value"].last_step) == (3, 3, 8)
    assert [one.first.block for one in read_report(tmp_path).found[1:]] == [1, 2]
    assert found["recycled"].times == 1
    assert read_report(tmp_path).found[1].times == 2


def test_equal_observations_of_layers_are_joined(tmp_path):
    tally = Tally(RecordFile(tmp_path))
    tally.observe(
        [observation(kind="arguments", argument="seq_lens", layer=f"layers.{i}") for i in (1, 3)]
    )
    (found,) = read_report(tmp_path).found
    assert found.layers == ("layers.1", "layers.3")


def test_calls_are_kept_up_to_a_number_of_bytes(tmp_path, call):
    records = RecordFile(tmp_path)
    kept = KeptCalls(records, 1 << 30)
    names = [kept.keep(call, why="wrong", name=f"w{i}") for i in range(MOST_WRONG + 2)]
    assert [bool(name) for name in names] == [True] * MOST_WRONG + [False] * 2
    assert kept.keep(call, why="requested", name="r")
    size = (tmp_path / names[0]).stat().st_size
    full = KeptCalls(records, records.saved_bytes() + size // 2)
    assert full.keep(call, why="requested", name="more") == ""
    assert full.keep(call, why="requested", name="more") == ""
    one_row = with_sequences(call, [KeptSequence(seq=0, first=0, last=1)])
    assert full.keep(with_kv_heads(one_row, range(1)), why="requested", name="small")
    assert len(list((tmp_path / CALLS).iterdir())) == MOST_WRONG + 2
    report = read_report(tmp_path)
    assert len(report.saved) == MOST_WRONG + 2
    assert sum("max-bytes" in note for note in report.notes) == 1


def test_a_wrong_call_is_diagnosed(tmp_path, call):
    records = RecordFile(tmp_path)
    output = call.output.clone()
    output[:, 1] = output[:, 0]
    wrong = dataclasses.replace(call, output=output)
    file = KeptCalls(records, 1 << 30).keep(wrong, why="wrong", name="w")
    Tally(records).observe([observation(facts={"call": file})])
    (found,) = with_diagnoses(read_report(tmp_path)).found
    assert found.diagnosis
    assert not found.diagnosis.startswith(("correct", "not possible"))
    (tmp_path / file).write_bytes(b"")
    (found,) = with_diagnoses(read_report(tmp_path)).found
    assert found.diagnosis.startswith("not possible")


def test_full_graphs_are_reported_with_the_way_out(tmp_path):
    records = RecordFile(tmp_path)
    records.write("started", {"rank": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"})
    records.write("counts", {"counts": {"steps": 10, "graph_steps": 7}, "unchecked": {"x": 2}})
    report = read_report(tmp_path)
    (note,) = report.notes
    for words in ("7 of 10", "--enforce-eager", "PIECEWISE"):
        assert words in note
    assert (report.is_wrong, report.has_checked, dict(report.unchecked)) == (False, True, {"x": 2})


def test_an_empty_folder_has_checked_nothing(tmp_path):
    report = read_report(tmp_path)
    assert not report.has_checked
    assert "VLLM_PLUGINS" in report.notes[0]


def test_the_page_has_what_was_found(tmp_path):
    pytest.importorskip("jinja2")
    Tally(RecordFile(tmp_path)).observe([observation(text="a < b")])
    page_of(read_report(tmp_path), "attnlab capture -- vllm serve 'x & y'").write(
        tmp_path / "a.html"
    )
    page = (tmp_path / "a.html").read_text()
    assert "a &lt; b" in page
    assert "x &amp; y" in page
    assert "http-equiv" in page
    json.dumps(read_report(tmp_path).to_dict(), allow_nan=False)


# Settings: their text in the environment and on the command line, and bad values.


def test_settings_as_text_and_as_a_file(tmp_path):
    one = CaptureSettings(out="x", layer=(3, 4), step=(40, 60), rank=(0, 1), sample=0.5, rows=None)
    assert CaptureSettings.of_text(one.to_json()) == one
    file = tmp_path / "settings.json"
    file.write_text(one.to_json())
    assert CaptureSettings.of_text(str(file)) == one
    assert CaptureSettings.of_text('{"out": "x"}') == CaptureSettings(out="x")


@pytest.mark.parametrize(
    "text", ["", "/no/such/file", "{", "[]", "{}", '{"out": 3}', '{"out": "x", "layers": 3}']
)
def test_bad_text_is_one_line(text):
    with pytest.raises(InvalidCase) as error:
        CaptureSettings.of_text(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer", (3, 3)),
        ("step", (-1, 2)),
        ("rank", (1,)),
        ("max_bytes", -1),
        ("sample", 0.0),
        ("sample", 1.5),
        ("rows", 0),
        ("heads", True),
    ],
)
def test_wrong_values_are_refused(name, value):
    with pytest.raises(InvalidCase):
        CaptureSettings(out="x", **{name: value})


@pytest.mark.parametrize(
    ("layer", "step", "requested"),
    [
        (None, None, {}),
        ((3, 4), None, {(3, 0), (3, 50)}),
        (None, (40, 60), {(2, 50), (3, 50), (None, 50)}),
        ((3, 4), (40, 60), {(3, 50)}),
    ],
)
def test_requested_calls(layer, step, requested):
    one = CaptureSettings(out="x", layer=layer, step=step)
    calls = [(2, 0), (3, 0), (2, 50), (3, 50), (None, 50)]
    assert {call for call in calls if one.is_requested(*call)} == set(requested)


def test_command_line_texts():
    assert parse_range("step", "40:60") == (40, 60)
    assert parse_range("layer", "3") == (3, 4)
    assert [parse_bytes("x", t) for t in ("2GiB", "1.5 MB", "7", "3kib")] == [
        2 << 30,
        1_500_000,
        7,
        3 << 10,
    ]
    assert (parse_count("rows", "all"), parse_count("rows", "5")) == (None, 5)
    assert (parse_share("sample", "1/16"), parse_share("sample", "0.5")) == (1 / 16, 0.5)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_range, "a:3"),
        (parse_range, ""),
        (parse_bytes, "2 parsecs"),
        (parse_bytes, "GiB"),
        (parse_bytes, "infGB"),
        (parse_count, "some"),
        (parse_share, "1/0"),
        (parse_share, "half"),
    ],
)
def test_bad_command_line_texts(parse, text):
    with pytest.raises(InvalidCase, match="name must be"):
        parse("name", text)
