"""attnlab decode-error: the place of an assertion's largest difference."""

import io
import shlex

import pytest
import torch
from helpers.commands import SEED_ID, document, error_line, printed

import attnlab.cli.command as cli
from attnlab.case import platforms
from attnlab.case.case import Case

TEXT = (
    "Mismatched elements: 8192 / 43720704 (0.0%)\n"
    "Greatest absolute difference: 1.685546875 at index (5336, 0, 0) (up to 0.0001 allowed)"
)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """Answer the same on every machine."""
    monkeypatch.setattr(cli, "machine_platform", lambda: None)


def decoded(capsys, monkeypatch, text, *flags):
    """Return the document of a text; the printed text must have its sentences."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    found = document(capsys, ["decode-error", *flags], 0)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    shown = printed(capsys, ["decode-error", *flags], 0)
    assert found["sentences"]
    assert all(" ".join(sentence.split()) in shown for sentence in found["sentences"])
    return found


def test_the_recorded_failure(capsys, monkeypatch, tmp_path):
    """Sequence 9, its only token, all heads; the error is too large for a wrong average."""
    file = tmp_path / "assertion.txt"
    file.write_text(TEXT)
    found = document(capsys, ["decode-error", str(file), "--test-id", SEED_ID], 0)
    assert (found["seq"], found["token"], found["query_len"]) == (9, 0, 1)
    assert found["rows_worth"] == 1.0
    assert found["newest"] == [929, 29, 1]
    assert found["max_abs_error"] > found["largest_possible"]
    assert len(found["sentences"]) > 2
    assert decoded(capsys, monkeypatch, TEXT, "--test-id", SEED_ID) == found
    assert any("±0.001" in sentence for sentence in found["sentences"])


@pytest.mark.parametrize(
    "mismatches",
    [
        "(3, 0, 2) | 0.0 | 0.25 ± 0.001\n(5, 1, 7) | 0.0 | -0.5 ± 0.001",
        "Mismatch at indices:\n [3, 0, 2]: 0.0 (ACTUAL), 0.25 (DESIRED)\n"
        " [5, 1, 7]: 0.0 (ACTUAL), -0.5 (DESIRED)",
    ],
    ids=["pytest.approx", "numpy 2.4"],
)
def test_the_greatest_of_a_list_of_mismatches_counts(capsys, monkeypatch, mismatches):
    text = f"Mismatched elements: 2 / 384\nMax absolute difference: 9.5\n{mismatches}"
    sizes = ["--num-heads", "2", "--head-size", "32", "--query-lens", "5,1", "--ctx-lens", "40,33"]
    found = decoded(capsys, monkeypatch, text, *sizes)
    place = (found["row"], found["head"], found["element"], found["max_abs_error"])
    assert place == (5, 1, 7, 0.5)


def test_an_assertion_of_numpy_without_an_index(capsys, monkeypatch):
    text = "Not equal to tolerance rtol=0.001, atol=0\nMismatched elements: 2 / 384 (0.521%)"
    facts = decoded(capsys, monkeypatch, text)["sentences"]
    assert "2 of 384 elements differ; the text has no index" in facts


@pytest.mark.parametrize(
    "text",
    [
        "all fine",
        "Mismatched elements: 1 / 10 (10%)\nGreatest absolute difference: 1 at index (0, 0, 0)",
        "Mismatched elements: 1 / 43720704 (0%)\n"
        "Greatest absolute difference: 1 at index (9999, 0, 0)",
        "Mismatched elements: 1 / 2\nGreatest absolute difference: 1 at index (0, 0)",
        "Mismatched elements: 1 / 2\nGreatest absolute difference: 1 at index ( , )",
    ],
    ids=["no counts", "another size", "index outside", "two", "no numbers"],
)
def test_a_text_that_does_not_fit_is_refused(capsys, monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert error_line(capsys, ["decode-error"]).startswith("attnlab: text ")


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("unified_attention", "unified_attention"),
        ("context_attention_fwd", "context_attention_fwd"),
        ("chunked_prefill_paged_decode", "paged_attention_rocm"),
    ],
)
def test_the_kernel_is_one_that_runs(capsys, monkeypatch, op, kernel):
    total = 6 * 8 * 128
    text = (
        f"Mismatched elements: 8 / {total} (0.0%)\n"
        "Greatest absolute difference: 0.5 at index (0, 0, 0) (up to 0.0001 allowed)"
    )
    flags = ["--op", op, "--num-heads", "8", "--query-lens", "1,5", "--ctx-lens", "33,12"]
    found = decoded(capsys, monkeypatch, text, *flags)
    assert found["kernel"] == kernel
    if op == "unified_attention":
        assert found["newest"] == [33, 1, 1]


def test_the_test_id_is_read_from_the_text(capsys, monkeypatch):
    """The GQA ratio of the id selects another kernel than the default; a flag wins."""
    test_id = (
        "test_contexted_kv_attention"
        "[chunked_prefill_paged_decode-16-cuda:0-fp8_e5m2-dtype0-128-1-64]"
    )
    text = (
        f"{TEXT}\nFAILED tests/kernels/attention/test_prefix_prefill.py::{test_id} - AssertionError"
    )
    by_id, other = "kernel_paged_attention_2d", "paged_attention_rocm"
    for words, kernel in (("", by_id), (test_id, by_id), (SEED_ID, other)):
        flags = ["--test-id", words] if words else []
        assert decoded(capsys, monkeypatch, text, *flags)["kernel"] == kernel


def test_a_bare_index(capsys, monkeypatch):
    found = decoded(capsys, monkeypatch, "(5336, 0, 0)", "--test-id", SEED_ID)
    assert (found["seq"], found["token"], found["mismatched"]) == (9, 0, None)
    assert any("sequence 9" in sentence for sentence in found["sentences"])


def test_a_count_of_another_size_names_the_flags(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT.replace("43720704", "819200")))
    assert "--query-lens with 100 tokens" in error_line(capsys, ["decode-error"])


DTYPES = "E   RuntimeError: expected scalar type Int but found Long"


def test_a_dtype_error_names_kernel_tensors_and_stage(capsys, monkeypatch):
    found = decoded(capsys, monkeypatch, DTYPES)
    assert found["kind"] == "dtype"
    assert found["rejected"] == [
        ["int64", "paged_attention_rocm", "block_table"],
        ["int64", "paged_attention_rocm", "seq_lens"],
    ]
    assert found["command"] == "attnlab run --stage int64"
    text = f"FAILED x.py::{SEED_ID} - {DTYPES}"
    assert SEED_ID in decoded(capsys, monkeypatch, text)["command"]


def test_a_dtype_error_that_no_kernel_of_the_case_raises(capsys, monkeypatch):
    found = decoded(capsys, monkeypatch, DTYPES, "--op", "unified_attention")
    assert (found["rejected"], found["command"]) == ([], None)


def test_a_failed_allclose_names_what_to_run(capsys, monkeypatch):
    text = "E   assert torch.allclose(output, expected)\nE    +  where False = torch.allclose("
    found = decoded(capsys, monkeypatch, text)
    assert (found["kind"], found["command"], found["test_id"]) == ("allclose", None, None)
    found = decoded(capsys, monkeypatch, f"{text}\nFAILED a.py::{SEED_ID} - assert False")
    assert found["test_id"] == SEED_ID
    assert shlex.split(found["command"]) == ["attnlab", "run", "--test-id", SEED_ID]
    assert Case.from_dict(found["case"]) == Case.from_test_id(SEED_ID)


@pytest.mark.parametrize("text", ["(5336, 0, 0)", DTYPES, "assert torch.allclose(a, b)"])
def test_an_id_that_becomes_no_case_is_stated(capsys, monkeypatch, text):
    refused = "test_contexted_kv_attention[chunked_prefill_paged_decode-0]"
    found = decoded(capsys, monkeypatch, f"FAILED a.py::{refused}\n{text}")
    assert refused in found["refusal"]
    assert any(refused in sentence for sentence in found["sentences"])
    given = decoded(capsys, monkeypatch, f"{refused}\n{text}", "--test-id", SEED_ID)
    assert given["refusal"] == ""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{refused}\nno index"))
    assert refused in error_line(capsys, ["decode-error"])


WRITE = ["--op", "reshape_and_cache_flash", "--num-heads", "4", "--head-size", "32"]
WRITE += ["--query-lens", "3,1", "--ctx-lens", "20,5", "--block-size", "16"]


def test_an_index_of_a_cache(capsys, monkeypatch):
    """vLLM's caches have (block, offset, head, element); attnlab's rows are positions."""
    found = decoded(capsys, monkeypatch, "(2, 3, 1, 7)", *WRITE)
    assert (found["block"], found["offset"], found["slot"]) == (2, 3, 35)
    assert (found["head"], found["element"], found["seq"]) == (1, 7, None)
    found = decoded(capsys, monkeypatch, "(22, 1, 40)", *WRITE)
    assert (found["seq"], found["position"], found["head"], found["element"]) == (0, 22, 1, 8)
    assert any("value" in sentence for sentence in found["sentences"])
    case = Case(op="reshape_and_cache_flash", num_heads=4, head_size=32, block_size=16)
    slots = case.replace(query_lens=(3, 1), ctx_lens=(20, 5)).total_blocks * 16
    last = decoded(capsys, monkeypatch, f"({slots - 1}, 1, 4)", *WRITE)
    assert (last["seq"], last["position"]) == (None, None)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"({slots}, 0, 0)"))
    assert error_line(capsys, ["decode-error", *WRITE]).startswith("attnlab: text must")
    short = "Mismatched elements: 1 / 9\nGreatest absolute difference: 1.0 at index (0, 0)"
    monkeypatch.setattr("sys.stdin", io.StringIO(short))
    assert "3 or 4 numbers" in error_line(capsys, ["decode-error", *WRITE])
    text = "Mismatched elements: 1 / 99\nGreatest absolute difference: 1.0 at index (0, 0, 0, 0)"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert "--num-blocks" in error_line(capsys, ["decode-error", *WRITE])


PYTEST = f"""\
=================================== FAILURES ===================================
_ {SEED_ID} _

num_heads = 64, num_queries_per_kv = 1, head_size = 128, sliding_window = 0
kv_cache_dtype = 'auto', device = 'cuda:0', op = <function chunked_prefill_paged_decode at 0x7f01>

>       torch.testing.assert_close(output, output_ref, atol=atol, rtol=0)
E       AssertionError: Tensor-likes are not close!
E
E       Mismatched elements: 8192 / 43720704 (0.0%)
E       Greatest absolute difference: 1.685546875 at index (5336, 0, 0) (up to 0.0001 allowed)
E       Greatest relative difference: inf at index (5336, 0, 0) (up to 0 allowed)

tests/kernels/attention/test_prefix_prefill.py:317: AssertionError
=========================== short test summary info ============================
FAILED tests/kernels/attention/test_prefix_prefill.py::{SEED_ID} - AssertionError
"""


def test_the_whole_output_of_pytest(capsys, monkeypatch):
    small = decoded(capsys, monkeypatch, PYTEST.replace("1.685546875", "1.5e-05"))
    assert small["max_abs_error"] == 1.5e-05
    found = decoded(capsys, monkeypatch, PYTEST)
    assert (found["seq"], found["row"], found["head"], found["element"]) == (9, 5336, 0, 0)
    assert (found["mismatched"], found["total"]) == (8192, 43720704)
    assert found["max_abs_error"] == 1.685546875
    assert found["kernel"] == "paged_attention_rocm"


@pytest.mark.parametrize(
    "text",
    [
        "Mismatched elements: 8192 / 43720704 … index (5336, 0, 0)",
        "at index (5336, 0, 0): Mismatched elements: 8192 / 43720704",
        "Greatest relative difference: inf at index (7, 0, 0)\nindex: (5336, 0, 0), Mismatched elements: "
        "8192 / 43720704",
        "Greatest absolute difference: 1.5 at index (5336, 0, 0), Mismatched elements: 8192 / 43720704",
    ],
)
def test_the_parts_of_a_text_may_have_any_order(capsys, monkeypatch, text):
    found = decoded(capsys, monkeypatch, text, "--test-id", SEED_ID)
    assert (found["mismatched"], found["total"], found["row"]) == (8192, 43720704, 5336)


def test_a_count_does_not_say_which_rows(capsys, monkeypatch):
    """8192 elements may be spread over many rows."""
    sentences = decoded(capsys, monkeypatch, TEXT, "--test-id", SEED_ID)["sentences"]
    (count,) = (one for one in sentences if one.startswith("8192"))
    assert "as many as 1 row of all heads; which rows they are in, the text does not say" in count


def test_weights_that_do_not_sum_to_1_are_not_ruled_out(capsys, monkeypatch):
    """A softmax without its division gives 0.0598 from values within 0.001; it is no average of them."""
    text = TEXT.replace("1.685546875", "0.0598")
    (why,) = (one for one in decoded(capsys, monkeypatch, text)["sentences"] if "0.0598" in one)
    assert "is no average: it was not written" in why
    assert "its weights do not sum to 1" in why
    assert "was not computed from them" not in why


@pytest.mark.parametrize(
    ("machine", "flags", "platform", "words"),
    [
        (None, [], "gfx942", "is assumed: no GPU is seen here"),
        ("sm_90", [], "sm_90", "of this machine's GPU"),
        (None, ["--platform", "sm_80"], "sm_80", "of the case"),
        ("sm_90", ["--platform", "gfx950"], "gfx950", "of the case"),
    ],
)
def test_the_first_sentence_is_about_the_platform(
    capsys, monkeypatch, machine, flags, platform, words
):
    """It decides which kernel is named."""
    monkeypatch.setattr(cli, "machine_platform", lambda: machine)
    for text in (TEXT, DTYPES):
        found = decoded(capsys, monkeypatch, text, "--test-id", SEED_ID, *flags)
        assert found["sentences"][0].startswith(f"platform {platform} (")
        assert words in found["sentences"][0]
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    first = printed(capsys, ["decode-error", "--test-id", SEED_ID, *flags], 0)[:90]
    assert ("assumed" in first) == (words.startswith("is assumed"))


def test_every_command_takes_the_platform_of_the_machine(capsys, monkeypatch):
    """Unless the user names one."""
    monkeypatch.setattr(cli, "machine_platform", lambda: "sm_90")
    for flags, platform in (([], "sm_90"), (["--platform", "gfx950"], "gfx950")):
        assert document(capsys, ["explain", *flags], 0)["platform"] == platform


def test_the_platform_of_a_machine(monkeypatch):
    """Without a driver torch is not asked; a GPU without rules here is none."""
    monkeypatch.setattr(platforms, "_DRIVERS", ("/no/such",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked"))
    assert platforms.machine_platform() is None
    monkeypatch.setattr(platforms, "_DRIVERS", ("/dev/null",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, found in (("sm_90", "sm_90"), ("gfx906", None)):
        monkeypatch.setattr(platforms, "platform_of", lambda device, name=name: name)
        assert platforms.machine_platform() == found
