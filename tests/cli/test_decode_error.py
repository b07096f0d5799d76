"""attnlab decode-error: the place of an assertion's largest difference."""

import io

import pytest
from helpers.commands import SEED_ID, document, error_line, printed

TEXT = (
    "Mismatched elements: 8192 / 43720704 (0.0%)\n"
    "Greatest absolute difference: 1.685546875 at index (5336, 0, 0) (up to 0.0001 allowed)"
)


def test_the_recorded_failure(capsys, monkeypatch, tmp_path):
    """Sequence 9, its only token, all heads; the error is too large for a wrong average."""
    file = tmp_path / "assertion.txt"
    file.write_text(TEXT)
    decoded = document(capsys, ["decode-error", str(file), "--test-id", SEED_ID], 0)
    assert (decoded["seq"], decoded["token"], decoded["query_len"]) == (9, 0, 1)
    assert decoded["rows_worth"] == 1.0
    assert decoded["newest"] == [929, 29, 1]
    assert decoded["max_abs_error"] > decoded["largest_possible"]
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    text = printed(capsys, ["decode-error", "--test-id", SEED_ID], 0)
    assert len(decoded["sentences"]) > 2
    assert all(" ".join(words.split()) in text for words in decoded["sentences"])


@pytest.mark.parametrize(
    "text",
    [
        "all fine",
        "Mismatched elements: 1 / 10 (10%)\nGreatest absolute difference: 1 at index (0, 0, 0)",
        "Mismatched elements: 1 / 43720704 (0%)\n"
        "Greatest absolute difference: 1 at index (9999, 0, 0)",
    ],
    ids=["no counts", "another size", "index outside"],
)
def test_a_text_that_does_not_fit_is_refused(capsys, monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert error_line(capsys, ["decode-error"]).startswith("attnlab: text ")


@pytest.mark.parametrize(
    ("op", "query_lens", "kernel"),
    [
        ("unified_attention", "1,5", "unified_attention"),
        ("context_attention_fwd", "1,5", "context_attention_fwd"),
        ("chunked_prefill_paged_decode", "1,5", "paged_attention_rocm"),
    ],
)
def test_the_kernel_is_one_that_runs(capsys, monkeypatch, op, query_lens, kernel):
    total = 6 * 8 * 128
    text = (
        f"Mismatched elements: 8 / {total} (0.0%)\n"
        "Greatest absolute difference: 0.5 at index (0, 0, 0) (up to 0.0001 allowed)"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    flags = ["--op", op, "--num-heads", "8", "--query-lens", query_lens, "--ctx-lens", "33,12"]
    decoded = document(capsys, ["decode-error", *flags], 0)
    assert decoded["kernel"] == kernel
    if op == "unified_attention":
        assert decoded["newest"] == [33, 1, 1]


def test_the_test_id_is_read_from_the_text(capsys, monkeypatch):
    """The GQA ratio of the id selects another kernel than the default; a flag wins."""
    test_id = (
        "test_contexted_kv_attention"
        "[chunked_prefill_paged_decode-16-cuda:0-fp8_e5m2-dtype0-128-1-64]"
    )
    text = (
        f"{TEXT}\nFAILED tests/kernels/attention/test_prefix_prefill.py::{test_id} - AssertionError"
    )
    kernels = []
    for flags in ([], ["--test-id", test_id], ["--test-id", SEED_ID]):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        kernels.append(document(capsys, ["decode-error", *flags], 0)["kernel"])
    assert kernels == [
        "kernel_paged_attention_2d",
        "kernel_paged_attention_2d",
        "paged_attention_rocm",
    ]


def test_the_assumption_about_the_values_is_stated(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    sentences = document(capsys, ["decode-error"], 0)["sentences"]
    assert any("±0.001" in sentence for sentence in sentences)


def test_an_empty_test_id_is_refused(capsys):
    assert error_line(capsys, ["run", "--test-id", ""]).startswith("attnlab: test_id must")


def test_a_bare_index(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("(5336, 0, 0)"))
    decoded = document(capsys, ["decode-error", "--test-id", SEED_ID], 0)
    assert (decoded["seq"], decoded["token"], decoded["mismatched"]) == (9, 0, None)
    monkeypatch.setattr("sys.stdin", io.StringIO("(5336, 0, 0)"))
    assert "sequence 9" in printed(capsys, ["decode-error", "--test-id", SEED_ID], 0)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RuntimeError: expected scalar type Int but found Long", "int32"),
        ("assert torch.allclose(o, o1)", "--output-file"),
        (TEXT.replace("43720704", "819200"), "--query-lens with 100 tokens"),
    ],
)
def test_a_text_without_a_place_names_what_to_do(capsys, monkeypatch, text, hint):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert hint in error_line(capsys, ["decode-error"])
