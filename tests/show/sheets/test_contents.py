"""Contents of tensors, batches and violations in a sheet."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from helpers.cases import hostile
from helpers.html import Page

from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.contracts.violations import Violation, Violations
from attnlab.lab.lab import Lab
from attnlab.show.sheets import html, line, plain, sheet_of
from attnlab.show.sheets.results import contents
from attnlab.show.sheets.sheet import Grid
from attnlab.tensors.call import KernelCall


def test_a_noun_without_a_sheet_is_an_error() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        line(type("Stranger", (Shown,), {})())


def test_a_batch_of_the_real_size_stays_short() -> None:
    """The page of a batch with 300 sequences is short, and folds most rows."""
    shape = Case(query_lens=(1,) * 300, ctx_lens=(3,) * 300, num_heads=2, head_size=64)
    batch = Lab().batch(shape)
    page = batch._repr_html_()
    Page(page)
    assert len(page) < 100_000
    assert "288 more rows" in page
    assert "… and 88 more" in page
    assert page.count("<svg") == 12 + 200
    assert len(plain(batch).splitlines()) < 25


def test_a_table_of_violations_escapes_its_text() -> None:
    """No text becomes markup, in HTML or in the terminal."""
    found = Violations(
        [
            Violation(
                kind="unsupported",
                effect="silent",
                kernel="[bold]a & b</td>",
                parameter="<u>[red]",
                value=1,
                required=2,
            )
        ]
    )
    page = html(found)
    assert "<u>" not in page
    assert "</td></td>" not in page
    assert "[bold]a & b</td>" in Page(page).text
    assert "<u>[red]" in plain(found)
    assert "[bold]a & b</td>" in plain(found)


def test_the_repr_of_a_case_makes_the_case_again() -> None:
    for one in (Case(), hostile(), Case(sm_scale=0.5, kv_head_range=(0, 2), backend="vllm")):
        assert eval(repr(one), {"Case": Case}) == one


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 0), "no elements"),
        (torch.tensor([3, 1, 2]), "3, 1, 2"),
        (torch.tensor([0.5, 1e-9]), "0.5, 1e-09"),
        (torch.zeros(3, 3), "zeros"),
        (torch.arange(40), "0 to 39"),
        (torch.full((2, 2), float("nan")), "NaN everywhere"),
        (torch.tensor([[1.0, float("nan")], [-2.0, 0.0]]), "-2 to 1; 1 NaN"),
        (torch.tensor([[1.0, float("inf")]]), "1 to inf"),
        (torch.tensor([[0x7F, 3]], dtype=torch.uint8), "3 to 127"),
    ],
)
def test_contents_of_a_tensor(tensor: torch.Tensor, expected: str) -> None:
    assert contents(tensor) == expected


def test_a_noun_is_displayed_without_importing_the_sheets() -> None:
    code = "from attnlab.case.case import Case; print(Case()._repr_html_()[:5], repr(Case(seed=3)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert done == "<div  Case(seed=3)\n"


def test_placeholders_of_new_tokens_have_no_row() -> None:
    """An op that reads new tokens from the cache may get none."""
    case = Case(op="unified_attention", num_heads=2, query_lens=(3, 1), ctx_lens=(4, 5))
    call = Lab().call(case)
    assert {"key", "value"} <= names_of_tensors(call)
    zero = call.query.new_zeros(()).expand(call.key.shape)
    found = names_of_tensors(dataclasses.replace(call, key=zero, value=zero))
    assert found == names_of_tensors(call) - {"key", "value"}


def names_of_tensors(call: KernelCall) -> set[str]:
    """Return the tensors in the table of a call."""
    (grid,) = (part for part in sheet_of(call).parts if isinstance(part, Grid))
    return {str(row[0]) for row in grid.rows}
