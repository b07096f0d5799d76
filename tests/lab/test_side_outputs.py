"""The log-sum-exp and the rows of padding: part of a Result, compared with what they must be."""

import pytest
import torch
from helpers.cases import hostile

import attnlab.lab.lab as lab_module
from attnlab.kernels.backend import RunOutput
from attnlab.kernels.triton.run_log import RunLog
from attnlab.lab.lab import Lab
from attnlab.lab.result import LSE, PADDING, lse_error, padding_error
from attnlab.show.sheets import plain

CASE = hostile(op="merge_attn_states", atol=1.0)
ROWS, HEADS = CASE.lengths.num_tokens, CASE.num_heads


def lse_errors(lse, case=CASE):
    """Return the errors of an LSE of a Case."""
    return Lab().side_errors(case, lse, None)


def test_an_lse_is_wrong_beyond_its_rounding():
    expected, bound = Lab().expected_lse(CASE)
    assert float(bound.max()) < 1e-3
    assert lse_errors((expected + 0.9 * bound).float()) == ()
    off = expected.float().clone()
    off[5, 2] += 1.0
    off[7, 0] = torch.nan
    (error,) = lse_errors(off)
    assert (error.subject, error.quantity, error.row, error.head) == (LSE, "lse", 5, 2)
    assert error.rows == 2
    assert error.value == pytest.approx(error.expected + 1.0)
    assert f"{error.value:.6g}" in error.text()


def test_heads_and_sequences_that_did_not_run_are_not_compared():
    expected, bound = Lab().expected_lse(CASE)
    part = torch.full_like(expected, torch.nan).float()
    rows = slice(1, 1 + CASE.query_lens[1])  # sequence 1
    part[rows, 2:4] = expected[rows, 2:4].float()  # KV head 1
    share = {"kv_head_range": (1, 2), "seq_range": (1, 2)}
    some = CASE.replace(op="unified_attention", backend="vllm", **share)
    assert lse_error(CASE, part, expected, bound) is not None
    assert lse_error(some, part, expected, bound) is None


@pytest.mark.parametrize(
    ("output", "log", "wrong"),
    [
        (0.0, -torch.inf, None),
        (0.0, 0.0, "lse"),
        (0.0, torch.nan, "lse"),
        (torch.nan, -torch.inf, "output"),
        (1.0, -torch.inf, "output"),
    ],
)
def test_rows_of_padding_are_empty(output, log, wrong):
    padded, lse = torch.zeros(2, HEADS, 64), torch.full((ROWS + 2, HEADS), -torch.inf)
    padded[1, 3, 7], lse[ROWS + 1, 3] = output, log
    error = padding_error(CASE, padded, lse)
    assert (error and (error.subject, error.quantity, error.row, error.head)) == (
        wrong and (PADDING, wrong, 1, 3)
    )
    assert padding_error(CASE.replace(op="unified_attention"), padded, lse) is None


@pytest.mark.parametrize("wrong", [(), (LSE,), (PADDING,), (LSE, PADDING)])
def test_a_match_requires_the_side_outputs(monkeypatch, wrong):
    """The output itself is right in every case."""
    lab, case = Lab(), CASE.replace(reference_dtype="float32")
    lse = torch.cat([lab.expected_lse(case)[0].float(), torch.full((1, HEADS), -torch.inf)])
    lse[4] += 1.0 if LSE in wrong else 0.0
    padded = torch.full((1, HEADS, 64), 1.0 if PADDING in wrong else 0.0)

    def run_kernels(self, case, call):
        call.output.copy_(self.reference(case))
        return RunOutput(log=RunLog(lse=lse, padded=padded))

    monkeypatch.setattr(lab_module.Lab, "_run_kernels", run_kernels)
    result = lab.run(case)
    assert result.errors.mismatched == 0
    assert result.status == ("mismatch" if wrong else "match")
    document = result.to_dict(0)
    assert document["side_outputs"] == [LSE, PADDING]
    assert [error["subject"] for error in document["side_errors"]] == list(wrong)
    text = plain(result)
    assert text.count("matches") == 2 - len(wrong)
    assert all(error.short() in result.verdict for error in result.side_errors)
    assert "log-sum-exp" in text
    assert "padding" in text
