"""The probe: kernels with planted faults, and a correct one whose order of sums depends on the batch."""

import pytest
from helpers.commands import document, error_line
from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, call_of, kernel_file

import attnlab

END = "        call.output[rows] ="
NOISE = "import random\n" + RIGHT.replace(
    END, "        value = value + 0.1 * random.random()\n" + END
)
LEAK = (
    RIGHT.replace("[:seq_len]", "[:seq_len + 1]")
    .replace("torch.arange(seq_len) - at", "torch.arange(seq_len + 1).clamp(max=seq_len) - at")
    .replace("hidden = away > 0", "hidden = away > 1")
)
BATCH = RIGHT.replace(
    "scores = query @", "scale *= 1 + 0.2 * (len(starts) > 2)\n        scores = query @"
)
KEPT = RIGHT.replace(END, "        if query.shape[1] == 1:\n            continue\n" + END)
ORDERED = RIGHT.replace(
    "(weights @ value)",
    "((weights[..., 1::2] @ value[:, 1::2] + weights[..., ::2] @ value[:, ::2])"
    " if len(starts) > 2 else weights @ value)",
)


def probed(folder, text, **changes):
    return attnlab.probe_call(call_of(**changes), backend=kernel_file(folder, text, "kernel"))


@pytest.mark.parametrize(
    ("text", "verdict", "kind"),
    [
        (RIGHT, "no change", None),
        (WRONG, "wrong computation", None),
        (NOISE, "corruption", "repeat"),
        (LEAK, "corruption", "foreign"),
        (BATCH, "corruption", "batch"),
        (KEPT, "corruption", "foreign"),
        (ORDERED, "reduction order", "batch"),
    ],
    ids=["right", "wrong", "noise", "leak", "batch", "kept", "ordered"],
)
def test_verdicts(tmp_path, text, verdict, kind):
    found = probed(tmp_path, text, dtype="float32")  # float16 hides most orders of sums
    assert found.verdict == verdict
    assert found.conclusion.startswith(verdict)
    changed = {one.kind for one in found.variations if one.changes_bits}
    assert kind is None or kind in changed
    assert (verdict in ("wrong computation", "no change")) == (not changed)


def test_splits_of_an_op_that_has_them():
    """The model of an op ignores splits; a release without the argument is not asked for them."""
    names = [one.name for one in attnlab.probe_call(call_of()).variations]
    assert "4 splits" in names
    assert "without splits" in names
    call = call_of(op="chunked_prefill_paged_decode")
    assert not any("splits" in one.name for one in attnlab.probe_call(call).variations)


def test_the_command(capsys, tmp_path):
    path = tmp_path / "call.safetensors"
    call_of().save(path)
    assert document(capsys, ["replay", str(path), "--probe"], 0)["verdict"] == "no change"
    wrong = ["--backend", kernel_file(tmp_path, BATCH, "batch")]
    found = document(capsys, ["replay", str(path), "--probe", *wrong], 1)
    (alone,) = [one for one in found["variations"] if one["name"] == "each sequence alone"]
    assert alone["change"]["in_bounds"] > 2
    assert "probe must" in error_line(
        capsys, ["replay", str(path), "--probe", *wrong, "--backend", "model"]
    )
