"""The command ``attnlab xray``."""

import json

import pytest
from helpers import faulty_attention

from attnlab.case.case import Case
from attnlab.cli.main import main
from attnlab.lab.lab import Lab

FLAGS = (
    *(
        "--op",
        "context_attention_fwd",
        "--num-heads",
        "2",
        "--head-size",
        "32",
        "--block-size",
        "16",
    ),
    *("--query-lens", "3,9", "--ctx-lens", "40,67", "--distribution", "normal"),
)
FIELDS = {
    **{"op": "context_attention_fwd", "num_heads": 2, "head_size": 32, "block_size": 16},
    **{"query_lens": (3, 9), "ctx_lens": (40, 67), "distribution": "normal"},
}
HALVED = f"{faulty_attention.__file__}:halved"


def test_exit_code_and_document(capsys):
    assert main(["xray", *FLAGS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "right"
    assert main(["xray", *FLAGS, "--kernel", HALVED, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "described"


def test_a_saved_call_is_measured_with_a_kernel_only(tmp_path, capsys):
    """A call holds no kernel; without one, the lab's model was measured and found right."""
    call = Lab().call(Case(**FIELDS))
    file = tmp_path / "call.safetensors"
    call.save(file)
    assert main(["xray", "--call", str(file)]) == 2
    captured = capsys.readouterr()
    assert "backend must be given to X-ray a saved call" in captured.err
    assert captured.out == ""
    assert main(["xray", "--call", str(file), "--kernel", HALVED, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "described"
    assert main(["xray", "--call", str(file), "--source", "/no/such"]) == 2
    assert "/no/such" in capsys.readouterr().err


def test_the_page_is_one_file_with_both_themes(tmp_path, capsys):
    page = tmp_path / "xray.html"
    assert main(["xray", *FLAGS, "--kernel", HALVED, "--no-confirm", "--html", str(page)]) == 1
    text = page.read_text()
    assert '"weights": {"0,0"' in text
    assert "prefers-color-scheme: dark" in text
    assert "multiplied by a further 1/2" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kernel", HALVED, "--backend", "model"], "kernel and backend must not"),
        (["--limit-s", "0"], "limit-s must be positive"),
        (["--call", "nowhere"], "nowhere"),
        (["--html", "/nowhere/x.html"], "html must be in an existing folder"),
        (["--op", "reshape_and_cache_flash"], "op must be an attention op"),
        (["--num-blocks", "20000", "--num-heads", "64"], "rows × heads × slots must be"),
    ],
)
def test_bad_input(argv, words, capsys):
    flags = [] if "--op" in argv else FLAGS
    assert main(["xray", *flags, *argv]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
