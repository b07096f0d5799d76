"""Panels without a browser: controls, the question that counts, selections, texts, static pictures."""

import io
import threading
import time

import matplotlib.image
import pytest
from helpers.cases import hostile
from helpers.strategies import cases
from hypothesis import HealthCheck, given, settings

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable
from attnlab.case.fields import Flag, Int, Lens, Maybe, Number, OneOf, Span, Table
from attnlab.case.ops import OPS, WRITE
from attnlab.case.stages import STAGES
from attnlab.case.test_id import nearest_id
from attnlab.contracts.slot_use import FOREIGN, OWN, SPARE, UNUSED, UNWRITTEN, USES
from attnlab.lab.lab import Lab
from attnlab.show.panels import explorer, panel
from attnlab.show.panels.case_text import case_texts, read_case
from attnlab.show.panels.controls import Control, groups
from attnlab.show.panels.draft import Draft
from attnlab.show.panels.latest import Job, LatestOnly, Outdated
from attnlab.show.panels.panel_data import band_of, look, select, select_band
from attnlab.show.panels.progress import Progress, share_done
from attnlab.show.plots.errors import BAND

SMALL = Case(
    num_heads=4,
    head_size=32,
    block_size=16,
    query_lens=(5, 1, 40, 1),
    ctx_lens=(20, 33, 0, 31),
    x=8,
    platform="sm_90",
    stage="cast_after_cumsum",
)
LOST = SMALL.replace(platform="gfx942", head_size=64, stage="int32_before_cumsum")


def values_of(name: str) -> list[object]:
    """Return some values that a knob may hold, of every form that its kind has."""
    kind = field_type(name)
    inner = kind.kind if isinstance(kind, Maybe) else kind
    some: list[object] = {
        OneOf: lambda: list(inner.choices),
        Flag: lambda: [True, False],
        Int: lambda: [inner.least, inner.least + 7],
        Number: lambda: [0.5, 1e-6, 1 / 3],
        Lens: lambda: [(7,), (3, 1, 880)],
        Span: lambda: [(0, 1), (3, 17)],
        Table: lambda: [((3, 1), (0, 2))],
    }[type(inner)]()
    return [*some, None] if isinstance(kind, Maybe) else some


@pytest.mark.parametrize("name", FIELDS)
def test_every_control_round_trips(name: str) -> None:
    """What is put into a control is what it reads, and each change is told once."""
    told: list[str] = []
    control = Control(name, told.append, FIELDS[name].default)
    assert control.read() == FIELDS[name].default
    for value in values_of(name):
        before, old = len(told), control.read()
        control.show(value)
        assert control.read() == value
        assert type(control.read()) is type(value)
        assert len(told) == before + (value != old)


@given(case=cases())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_copied_texts_give_the_case_again(case: Case) -> None:
    """JSON, command line and test id with its changes; each parses back to the same Case."""
    texts = case_texts(case)
    assert read_case(texts["JSON"]) == case
    assert read_case(texts["command line"]) == case
    assert eval(texts["from a test id"], {"Case": Case}) == case
    if texts["test id"]:
        assert read_case(texts["test id"]) == case


def test_a_test_id_comes_out_as_it_went_in() -> None:
    """The Case of an id of the test is that id, without changes."""
    for test_id in (
        "test_contexted_kv_attention[chunked_prefill_paged_decode-16-cuda:0-fp8-dtype0-24-64-64]",
        "test_contexted_kv_attention_alibi[context_attention_fwd-cuda:0-auto-dtype0-128-1-64]",
        "test_contexted_kv_attention_f32"
        "[True-chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]",
    ):
        assert nearest_id(Case.from_test_id(test_id)) == (test_id, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "case must be a JSON object"),
        ('{"sinks_of_mine": 1}', "sinks_of_mine is not a field"),
        ("attnlab explain", "must begin with attnlab run"),
        ("attnlab run --num-heads eight", "num_heads must be an integer"),
        ("attnlab run --no-such-flag 1", "command line must be that of attnlab run"),
        ("attnlab run '", "well quoted"),
        ("some words", "test_id must be like"),
    ],
)
def test_a_text_that_is_no_case_is_explained(text: str, said: str) -> None:
    """Each way to be wrong is one InvalidCase, that of the form that the text begins like."""
    with pytest.raises(InvalidCase, match=said):
        read_case(text)


# The question that counts.


def answers(latest_of: list[int], quiet_s: float = 0.02) -> tuple[LatestOnly[int], list[int]]:
    """Return a Latest whose work appends what it computed, and gives it, and the list of what it gave."""
    given_out: list[int] = []

    def answer(question: int, turn: object) -> None:
        latest_of.append(question)
        turn.give(lambda: given_out.append(question))  # type: ignore[attr-defined]

    return LatestOnly(answer, lambda question, error: None, quiet_s), given_out


def test_a_series_computes_only_the_last() -> None:
    """Of ten questions, each soon after the one before, the last alone is worked on."""
    computed: list[int] = []
    latest, given_out = answers(computed, quiet_s=0.5)
    for question in range(10):
        latest.ask(question)
        time.sleep(0.02)
    assert latest.wait(10)
    assert (computed, given_out) == ([9], [9])
    latest.ask(10)
    assert latest.wait(10)
    assert given_out == [9, 10]


def test_work_that_is_under_way_is_dropped_for_the_next() -> None:
    """A question that comes while another is worked on ends that one, and its answer is not given."""
    begun, go_on, ended, given_out = threading.Event(), threading.Event(), [], []

    def answer(question: int, turn: object) -> None:
        begun.set()
        assert go_on.wait(10)
        try:
            turn.check()  # type: ignore[attr-defined]
        except BaseException:
            ended.append(question)
            raise
        turn.give(lambda: given_out.append(question))  # type: ignore[attr-defined]

    latest: LatestOnly[int] = LatestOnly(answer, lambda question, error: None, 0.0)
    latest.ask(1)
    assert begun.wait(10)
    latest.ask(2)
    go_on.set()
    assert latest.wait(10)
    assert (ended, given_out) == ([1], [2])


def test_cancelled_work_gives_nothing() -> None:
    """After cancel() not even work that never looks gives an answer, or an error."""
    begun, go_on, given_out = threading.Event(), threading.Event(), []

    def answer(question: int, turn: object) -> None:
        begun.set()
        assert go_on.wait(10)
        if question == 2:
            raise KeyError("broken")
        turn.give(lambda: given_out.append(question))  # type: ignore[attr-defined]

    latest: LatestOnly[int] = LatestOnly(
        answer, lambda question, error: given_out.append(error), 0.0
    )
    for question in (1, 2):
        begun.clear()
        go_on.clear()
        latest.ask(question)
        assert begun.wait(10)
        latest.cancel()
        assert latest.busy  # until its work has ended
        go_on.set()
        assert latest.wait(10)
    assert given_out == []
    latest.ask(3)
    assert latest.wait(10)
    assert given_out == [3]


def test_what_the_work_raises_is_told_and_the_next_is_answered() -> None:
    """An exception reaches on_error with its question; the thread lives on."""
    told: list[object] = []

    def answer(question: int, turn: object) -> None:
        if question == 1:
            raise KeyError("broken")
        turn.give(lambda: told.append(question))  # type: ignore[attr-defined]

    latest: LatestOnly[int] = LatestOnly(
        answer, lambda question, error: told.append((question, error)), 0
    )
    latest.ask(1)
    assert latest.wait(10)
    latest.ask(2)
    assert latest.wait(10)
    assert told[0][0] == 1
    assert isinstance(told[0][1], KeyError)
    assert told[1:] == [2]


# A panel from Python.


def test_a_panel_says_what_the_lab_says() -> None:
    """Stage and platform, turned one after the other; a Lab without a panel is the measure."""
    view, lab = explorer(SMALL), Lab()
    for changes in ({}, {"stage": "int64"}, {"platform": "gfx942"}, {"head_size": 64}):
        shown = view.show(**changes)
        case = view.case
        expected = lab.run(case)
        assert (shown.verdict, shown.status) == (expected.verdict, expected.status)
        assert shown.verdict in view.texts["verdict"].value.replace("&#x27;", "'")
        assert not view.is_stale
        has_errors = expected.errors is not None
        assert bool(view.pictures["error"].png) is has_errors
    assert shown.status == "rejected"  # the last case is: int64 tables on ROCm
    assert "expected scalar type Int but found Long" in view.to_html()


def test_a_toggle_in_the_front_end_reaches_the_case() -> None:
    """A control's own input, as a person changes it, asks anew; so does the text of a list."""
    view = panel(SMALL, knobs=("stage", "query_lens", "alibi"))
    view.controls["stage"].input.value = "sound"
    view.controls["alibi"].input.value = True
    assert view.case == SMALL.replace(stage="sound", alibi=True)
    view.controls["query_lens"].input.value = "4,1,2,2"
    assert view.wait(30)
    assert view.result is not None
    assert view.result.case == SMALL.replace(stage="sound", alibi=True, query_lens=(4, 1, 2, 2))


def test_an_invalid_combination_is_explained_where_it_is_wrong() -> None:
    """The text stands at the control that it names, in an open group; the picture stays, and is stale."""
    view = explorer(SMALL)
    assert view.wait(30)
    before = view.pictures["error"].png
    view.controls["num_queries_per_kv"].input.value = 3
    wrong = view.controls["num_queries_per_kv"]
    assert "num_queries_per_kv must be a divisor of num_heads (4), got 3" in wrong.message.value
    assert [c.name for c in view.controls.values() if c.message.value] == ["num_queries_per_kv"]
    assert view._boxes["the test's parameters"].selected_index == 0
    assert view.is_stale
    assert view.pictures["error"].stale
    assert view.pictures["error"].png == before
    with pytest.raises(InvalidCase, match="divisor"):
        view.show()
    wrong.input.value = 2
    assert view.wait(30)
    assert not view.is_stale
    assert not wrong.message.value


def test_a_rule_about_another_knob_is_explained_there() -> None:
    """alibi is turned on; what must give way is sliding_window, and its control says so."""
    view = panel(SMALL.replace(sliding_window=4), knobs=("alibi", "sliding_window"))
    view.controls["alibi"].input.value = True
    assert "must be 0 with alibi" in view.controls["sliding_window"].message.value
    assert not view.controls["alibi"].message.value
    hidden = panel(SMALL.replace(sliding_window=4), knobs=("alibi",))
    hidden.controls["alibi"].input.value = True
    assert "sliding_window must be 0" in hidden.controls["alibi"].message.value


def test_a_text_that_is_no_value_is_explained() -> None:
    """And two of them one after the other, each at its control."""
    view = panel(SMALL, knobs=("query_lens", "atol"))
    view.controls["query_lens"].input.value = "5,one"
    view.controls["atol"].input.value = "small"
    assert view.is_stale
    assert "query_lens must be a non-empty list" in view.controls["query_lens"].message.value
    view.controls["query_lens"].input.value = "5,1,40,1"
    assert "atol must be a finite number" in view.controls["atol"].message.value
    view.controls["atol"].input.value = ""
    assert view.wait(30)
    assert view.case == SMALL


def test_the_last_change_is_blamed_where_the_text_names_none() -> None:
    """seq_lens is no knob; max_blocks_per_seq, which made the row too short, is marked."""
    draft = Draft.of(SMALL).with_value("max_blocks_per_seq", 1)
    problem = draft.problem()
    assert problem is not None
    assert problem.text.startswith("seq_lens[0] must be at most 16")
    assert problem.knob == "max_blocks_per_seq"


def test_a_new_knob_has_a_control_by_its_declaration() -> None:
    """The explorer has every knob that Case declares, each in its group, and nothing else."""
    view = explorer(SMALL)
    assert view.wait(30)
    assert set(view.controls) == set(FIELDS)
    assert sum(map(len, groups(list(FIELDS)).values())) == len(FIELDS)
    assert set(view._boxes) == {field.metadata["group"] for field in FIELDS.values()}


def test_an_error_of_the_lab_is_shown_in_its_words() -> None:
    """A kernel that cannot run here is said to be so; the case is a case, and what it shows is stale."""
    view = explorer(SMALL, lab=Lab(source="/no/such/vllm.whl"))
    assert view.wait(30)
    view.set(backend="vllm", sm_scale=0.1)
    assert view.wait(30)
    assert isinstance(view.error, AttnLabError)
    assert str(view.error)[:20] in view.texts["verdict"].value.replace("&#x27;", "'")
    assert view.is_stale
    with pytest.raises(type(view.error)):
        view.show()
    assert view.show(backend="model").status == "match"


def test_a_fault_of_the_lab_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody meant is shown with its type and place."""
    view = panel(SMALL, knobs=("stage",))
    assert view.wait(30)
    monkeypatch.setattr("attnlab.show.panels.case_panel.look", lambda *_: {}["planted"])
    view.set(stage="sound")
    assert view.wait(30)
    text = view.texts["verdict"].value
    assert "a fault of the lab" in text
    assert "KeyError" in text
    assert "test_panels.py" in text


def test_cancel_leaves_what_was_shown() -> None:
    """The button ends a run at its next step; the old pictures stay, marked as stale."""
    stopped = threading.Event()
    reached = threading.Event()

    class Slow(Lab):
        def run(self, case: Case):  # type: ignore[no-untyped-def]
            if case.stage == "sound":
                while not stopped.wait(0.01):
                    assert self.on_step is not None
                    reached.set()
                    self.on_step("kernels, program 3 of 9")
            return super().run(case)

    view = panel(SMALL, knobs=("stage",), lab=Slow())
    assert view.wait(30)
    before, verdict = view.pictures["error"].png, view.texts["verdict"].value
    view.controls["stage"].input.value = "sound"
    assert reached.wait(30)
    deadline = time.monotonic() + 30
    while view.progress._bar.layout.display == "none":
        assert time.monotonic() < deadline, "progress never showed"
        time.sleep(0.01)
    assert "program 3 of 9" in view.progress._text.value
    view.progress._button.click()
    assert view.wait(30)
    assert view.is_stale
    assert view.pictures["error"].png == before
    assert view.texts["verdict"].value == verdict
    assert "cancelled" in view.progress._text.value
    assert view.progress._bar.layout.display == "none"
    stopped.set()
    assert view.show(stage="cast_after_cumsum").case == SMALL


def test_a_long_first_step_shows_itself() -> None:
    """Progress and the button come even while one step calls nobody, and go when it ends."""
    go_on = threading.Event()

    class Stuck(Lab):
        def run(self, case: Case):  # type: ignore[no-untyped-def]
            if case.stage == "sound":
                assert self.on_step is not None
                self.on_step("batch")
                assert go_on.wait(30)
            return super().run(case)

    view = panel(SMALL, knobs=("stage",), lab=Stuck())
    assert view.wait(30)
    view.set(stage="sound")
    deadline = time.monotonic() + 30
    while view.progress._button.layout.display == "none":
        assert time.monotonic() < deadline, "the button never showed"
        time.sleep(0.01)
    assert ">batch<" in view.progress._text.value
    go_on.set()
    assert view.wait(30)
    time.sleep(0.5)  # longer than the timer of a turn that has ended
    assert view.progress._button.layout.display == "none"
    assert not view.is_stale


def test_a_step_of_an_outdated_turn_ends_it() -> None:
    """At once, not when progress is next shown."""
    latest: LatestOnly[int] = LatestOnly(lambda question, turn: None, lambda question, error: None)
    step = Progress(latest.cancel).steps(Job(generation=latest.generation, latest=latest))
    step("batch")
    latest.cancel()
    with pytest.raises(Outdated):
        step("cache")


def test_progress_goes_forward() -> None:
    """Steps in their order, programs within the kernels' share, an unknown step where it was."""
    steps = ["batch", "cache", "kernels", "kernels, program 3 of 6", "kernels, program 6 of 6"]
    shares, before = [], 0.0
    for step in [*steps, "reference", "a notice", "compare", "picture of error"]:
        before = share_done(step, before)
        shares.append(before)
    assert shares == sorted(shares)
    assert shares[3] == pytest.approx(2.5 / 6)
    assert share_done("batch", 0.9) == 0.9


# Selections.


def test_a_selection_is_the_error_maps_way_back() -> None:
    """Each row and head of a hostile batch: sequence, token, slot, and the largest error's element."""
    lab, case = Lab(), hostile(fill="context_only", empty_slots="garbage", output_init="zeros")
    seen = look(lab, case, lambda step: None)
    errors, provenance = seen.result.errors, seen.result.cache.provenance
    assert errors is not None
    expected, output = lab.reference(case), seen.result.call.output
    for row in range(case.lengths.num_tokens):
        head = row % case.num_heads
        one = select(seen, row, head)
        seq, token = case.lengths.locate(row)
        position = case.lengths.ctx_lens[seq] + token
        assert (one.seq, one.token) == (seq, token)
        assert (one.place.block, one.place.slot) == provenance.slot(seq, position)
        assert one.place.owner == (seq, position)
        assert one.expected == float(expected[row, head, one.element])
        assert one.got == float(output[row, head, one.element])
        assert abs(one.got - one.expected) == pytest.approx(one.error, rel=1e-6)


def test_a_click_selects_what_the_picture_shows_there() -> None:
    """The middle of each cell of the picture gives its head, and the worst token of its band."""
    view = panel(LOST, knobs=("stage",), views=("error", "slots"))
    assert view.wait(30)
    frame, errors = view._drawn["error"].frame, view.result.errors
    for band in range(BAND * 4):
        for head in range(4):
            left, top, width, height = frame.box(head, band)
            view.pointer.click_error(left + width / 2, top + height / 2)
            one = view.selection
            assert one is not None
            rows = errors.band_rows(band)
            assert one.row in rows
            assert one.head == head
            assert one.error == float(errors.error[rows.start : rows.stop, head].max())
            assert band_of(view.seen, one, BAND) <= band  # the first band that has the row
    assert view.selection.seq == 3
    assert "row 46" in view.texts["selection"].value
    view.pointer.click_error(0.001, 0.5)  # outside the axes: nothing
    assert view.selection.seq == 3


def test_the_frame_is_where_the_axes_are() -> None:
    """The pixel in the middle of a cell has the cell's colour: red for the NaN row, no other red."""
    case = LOST.replace(query_start_loc_dtype="int32", empty_slots="nan")
    view = panel(case, knobs=("stage",))
    assert view.wait(30)
    drawn = view._drawn["error"]
    pixels = matplotlib.image.imread(io.BytesIO(drawn.png))
    height, width = pixels.shape[:2]
    for band in range(BAND * 4):
        left, top, wide, tall = drawn.frame.box(1, band)
        column = int((left + wide / 2) * width)
        colours = pixels[int((top + tall * 0.2) * height) : int((top + tall) * height), column, :3]
        is_red = bool((colours[:, 0] > 0.7).any() and (colours[:, 2] < 0.3).any())
        nan = view.result.errors.error[view.result.errors.band_rows(band), 1].isnan().any()
        assert is_red == bool(nan), band


def test_arrow_keys_move_the_selection() -> None:
    """By a head, by a row of the picture, and not beyond the edges."""
    view = panel(SMALL, knobs=("stage",))
    assert view.wait(30)
    view.pointer.select(0, 0, 0)
    view.pointer.step(1, 0)
    assert (view.selection.row, view.selection.head) == (0, 1)
    view.pointer.step(-5, -1)
    assert (view.selection.row, view.selection.head) == (0, 0)
    view.pointer.step(0, BAND)
    assert view.selection.seq == 1


def test_a_selection_stays_where_it_can() -> None:
    """The same row and head of the next output; none where the next call is rejected."""
    view = panel(LOST, knobs=("stage",))
    assert view.wait(30)
    before = view.pointer.select(3, 0, 2)
    assert before.place.reader is None  # no sequence is served
    view.show(stage="sound")
    assert (view.selection.seq, view.selection.head) == (3, 2)
    assert view.selection.got != before.got
    assert view.selection.place.reader == (3, 31)
    view.show(stage="int64")
    assert view.selection is None
    with pytest.raises(ValueError, match="no output"):
        view.pointer.select(0, 0, 0)


def test_a_selection_of_a_cache_write_is_a_slot() -> None:
    """The rows of reshape_and_cache_flash are slots: the row's own place is told."""
    case = SMALL.replace(op=WRITE, x=None, num_blocks=40)
    view = panel(case, knobs=("stage",), views=("error", "slots"))
    assert view.wait(30)
    assert view.error is None
    slots = view.seen.row_slots
    for row in (0, 30, 95, len(slots) - 1):
        one = select(view.seen, row, 1)
        assert one.place.block * 16 + one.place.slot == int(slots[row])
    view.pointer.select(2, 7, 0)
    assert view.selection.place.owner == (2, 7)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_pictures(op: str) -> None:
    """Or, where its library is not here, says so."""
    changes = {"op": op, "x": None, "fill": "all_rows"}
    if op == "decode_attention_fwd":
        changes |= {"query_lens": (1, 1), "ctx_lens": (20, 3)}
    if op == "cpu_attention_with_kv_cache":
        changes |= {"backend": "vllm-cpu", "platform": "cpu"}
    view = explorer(SMALL.replace(**changes))
    assert view.wait(60)
    if isinstance(view.error, Unavailable):
        pytest.skip(str(view.error))
    assert view.error is None
    assert all(picture.png for picture in view.pictures.values())
    assert view.result.status == "match"


# Who wrote and who reads.


@pytest.mark.parametrize("stage", STAGES)
def test_slots_by_writer_and_reader(stage: str) -> None:
    """Counted from the lengths alone, on a platform whose kernels take any index tensor."""
    seen = look(Lab(), SMALL.replace(stage=stage), lambda step: None)
    lengths, fill = SMALL.lengths, seen.result.case.staging.fill
    read = written = own = 0
    for query_len, ctx_len in zip(lengths.query_lens, lengths.ctx_lens, strict=True):
        reads = ctx_len + (query_len == 1)
        writes = {
            "context_only": ctx_len,
            "decode_rows": ctx_len + (query_len == 1),
            "all_rows": ctx_len + query_len,
        }[fill]
        read, written, own = read + reads, written + writes, own + min(reads, writes)
    counts = [int((seen.use.use == state).sum()) for state in range(len(USES))]
    assert counts[OWN] == own
    assert counts[SPARE] == written - own
    assert counts[UNWRITTEN] == read - own
    assert counts[FOREIGN] == 0
    assert sum(counts) == seen.use.use.numel()
    assert counts[UNUSED] == sum(counts) - written - (read - own)


def test_a_foreign_slot_is_seen() -> None:
    """A block table of the call that names another sequence's block: read as another token."""
    from dataclasses import replace

    from attnlab.contracts.dispatch import Target
    from attnlab.contracts.slot_use import slot_use

    seen = look(Lab(), SMALL, lambda step: None)
    table = seen.result.call.block_table.clone()
    table[0, 0] = table[1, 0]
    call = replace(seen.result.call, block_table=table)
    provenance = seen.result.cache.provenance
    kernels = seen.result.decision.kernels
    use = slot_use(call, Target.of(SMALL), kernels[:1], provenance)  # the prefill kernel alone
    assert int((use.use == FOREIGN).sum()) == 16
    block = int(provenance.block_table[1, 0])
    slot = use.at(block, 3)
    assert (slot.writer, slot.reader, slot.owner) == ((1, 3), (0, 3), (1, 3))


def test_blocks_stand_in_the_order_of_the_table() -> None:
    """Every block once; those of nobody last."""
    seen = look(Lab(), SMALL.replace(num_blocks=30), lambda step: None)
    order = seen.use.order().tolist()
    table = seen.result.cache.provenance.block_table.flatten().tolist()
    assert order[: len(table)] == table
    assert sorted(order) == list(range(30))


# Without a front-end.


def test_a_static_panel_needs_no_front_end() -> None:
    """Verdict and pictures as HTML beside the view of the widget; no script, nothing to load."""
    view = panel(LOST, knobs=("stage", "platform"), views=("violations", "error", "slots"))
    bundle = view._repr_mimebundle_()
    html = bundle["text/html"]
    assert view.result.verdict in html
    assert "row 46 of output" in html
    assert html.count("data:image/png;base64,") == 2
    assert "script" not in html
    assert "toggles for stage, platform" in html
    view_mime = bundle["application/vnd.jupyter.widget-view+json"]
    assert view_mime["model_id"] == view.widget.model_id


def test_a_panel_of_no_knob_or_view_is_refused() -> None:
    """With one line that names it."""
    with pytest.raises(InvalidCase, match="stages is not a field of a Case"):
        panel(SMALL, knobs=("stages",))
    with pytest.raises(AttnLabError, match=r"view must be one of .*, got errors"):
        panel(SMALL, knobs=("stage",), views=("errors",))
    view = panel(SMALL, knobs=("stage",))
    with pytest.raises(InvalidCase, match="stages is not a field"):
        view.set(stages="sound")


def test_pasting_a_text_takes_the_case_over() -> None:
    """A test id, then nonsense: the first is taken over by every control, the second explained."""
    view = explorer(SMALL)
    text = case_texts(LOST)["command line"]
    view.exchange.pasted.value = text
    assert view.wait(30)
    assert view.case == LOST
    assert view.controls["platform"].read() == "gfx942"
    assert view.exchange.outs["command line"].value == text
    view.exchange.pasted.value = "nonsense"
    assert "test_id must be like" in view.exchange.message.value
    assert view.case == LOST


def test_the_worst_row_of_a_band_is_selected() -> None:
    """A band of several rows with one NaN: that one."""
    seen = look(Lab(), SMALL, lambda step: None)
    errors = seen.result.errors
    rows = errors.band_rows(2 * BAND + 3)  # sequence 2 has 40 tokens
    assert len(rows) > 1
    errors.error[rows.stop - 1, 2] = float("nan")
    assert select_band(seen, 2 * BAND + 3, 2).row == rows.stop - 1
