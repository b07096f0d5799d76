"""Diagnose a wrong output of a Case with an op argument: where it is wrong, by how much, and by which read.

The defects of the catalogue do not know the format that the argument asks for, so they are not compared. An
output that is wrong without the argument, too, is diagnosed as that one.
"""

import dataclasses
import time
from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.cells import Cells
from attnlab.diagnosis.diagnosis import Diagnosis, ErrorPlace
from attnlab.diagnosis.examination import check_output
from attnlab.diagnosis.pattern import Fact, Pattern
from attnlab.diagnosis.pattern_places import Sizes, element_facts, place_facts
from attnlab.diagnosis.pattern_values import size_fact, value_facts
from attnlab.lab.argument_reads import wrong_masks, wrong_reads
from attnlab.lab.argument_reference import bound_with_argument, reference_with_argument
from attnlab.lab.lab import Lab

KIND = "argument"  # of the facts about the op argument
_UNKNOWN = "which defect of the catalogue it is: they do not know what an op argument changes"


def diagnose_argument(
    lab: Lab,
    case: Case,
    output: torch.Tensor | None,
    diagnose_plain: Callable[[Case], Diagnosis],
) -> Diagnosis:
    """Diagnose the output of a Case with an op argument, or run the Case for it.

    ``diagnose_plain`` diagnoses the Case without its argument; it is called if the Case ran. Raises
    InvalidCall if ``output`` has another shape or dtype than the Case's output.
    """
    began, ran = time.perf_counter(), None
    if output is None:
        ran = lab.run(case)
        if ran.status == "rejected":
            return Diagnosis(status="rejected", rejection=str(ran.error))
        output = ran.output
    check_output(output, lab.call(case).output)
    cells = _cells(lab, case, output.cpu())
    if not bool(cells.is_wrong.any()):
        rows = len(output)
        return Diagnosis(status="nothing wrong", tolerance=case.tolerance, looked_at=(rows, rows))
    if ran is not None:
        plain = diagnose_plain(case.replace(op_argument=NONE))
        if plain.is_wrong:
            return _as_without(plain, case)
    facts = _read_facts(lab, case, cells)
    if ran is not None and facts:
        facts = _confirmed(lab, case, facts)
    found = _described(case, cells, output.dtype, facts)
    return dataclasses.replace(found, seconds=time.perf_counter() - began)


def argument_names(lab: Lab, case: Case, output: torch.Tensor) -> list[str]:
    """Return the names of the wrong reads and masks that give a wrong output, in words."""
    facts = _read_facts(lab, case, _cells(lab, case, output.cpu()))
    return [str(fact.values["name"]).replace("_", " ") for fact in facts]


def _cells(lab: Lab, case: Case, output: torch.Tensor) -> Cells:
    """Return every row and head of an output next to the right one and its bound."""
    batch, call = lab.batch(case).cpu(), lab.call(case)
    native, kernels = lab.is_native_run(case), decide(case).kernels
    bound = bound_with_argument(case, batch, call, kernels, is_native=native)
    correct = reference_with_argument(case, batch).output
    rows, heads, _ = output.shape
    row = torch.arange(rows).repeat_interleave(heads)
    seqs = torch.arange(len(case.lengths.query_lens))
    seq = seqs.repeat_interleave(torch.tensor(case.lengths.query_lens))[row]
    starts = torch.tensor(case.lengths.token_start_loc)
    return Cells(
        row=row,
        head=torch.arange(heads).repeat(rows),
        seq=seq,
        token=row - starts[seq],
        output=output.double().flatten(0, 1),
        correct=correct.double().flatten(0, 1),
        bound=bound.double().flatten(0, 1),
    )


def _read_facts(lab: Lab, case: Case, cells: Cells) -> list[Fact]:
    """Return the wrong reads that give the output, and whether it is that without the argument."""
    batch, wrong = lab.batch(case).cpu(), int(cells.is_wrong.sum())
    found = {
        name: reference_with_argument(case, batch, read).output
        for name, read in wrong_reads(case).items()
    }
    found |= {
        name: reference_with_argument(other, batch).output
        for name, other in wrong_masks(case).items()
    }
    found["argument_ignored"] = lab.reference(case.replace(op_argument=NONE)).cpu()
    facts = []
    for name, expected in found.items():
        numbers = expected.double().flatten(0, 1)
        off = (cells.output - numbers).abs()
        # Where a read meets a slot that holds nothing, the reference knows no number.
        is_same = numbers.isnan() & ~cells.output.isfinite() | (off <= _near(cells, numbers))
        if bool(is_same.all() & numbers[cells.is_wrong].isfinite().all(1).any()):
            what = f"{name.replace('_', ' ')} gives this output"
            where, values = "every row and head", {"name": name}
            facts.append(Fact(kind=KIND, where=where, what=what, values=values, accounts_for=wrong))
    return facts


def _near(cells: Cells, numbers: torch.Tensor) -> torch.Tensor:
    """Return the bound of the right output, larger where the expected ``numbers`` are."""
    larger = (numbers.abs() / cells.correct.abs().clamp(min=1e-12)).clamp(min=1.0, max=16.0)
    return cells.bound * larger.nan_to_num(1.0)


def _confirmed(lab: Lab, case: Case, facts: list[Fact]) -> list[Fact]:
    """Return the facts that also give the output with other data."""
    other = case.replace(seed=case.seed + 1)
    ran = lab.run(other)
    if ran.status == "rejected":
        return []
    cells = _cells(lab, other, ran.output.cpu())
    names = {fact.values["name"] for fact in _read_facts(lab, other, cells)}
    return [fact for fact in facts if fact.values["name"] in names]


def _described(case: Case, cells: Cells, dtype: torch.dtype, reads: list[Fact]) -> Diagnosis:
    """Return the diagnosis: places, reads or values, and the worst element."""
    rows, heads = case.lengths.num_tokens, case.num_heads
    is_wrong = cells.is_wrong.view(rows, heads)
    values, _ = value_facts(cells, dtype)
    rules = reads[:1] or values
    size = size_fact(cells, any(fact.accounts_for for fact in rules))
    facts = [
        *place_facts(is_wrong, range(heads), _sizes(case)),
        *element_facts(cells),
        *([] if size is None else [size]),
        *rules,
    ]
    pattern = Pattern(facts=tuple(facts), wrong_cells=int(is_wrong.sum()))
    worst = int(cells.ratio.argmax())
    error = (cells.output - cells.correct).abs().nan_to_num(torch.inf)[worst].max()
    place = ErrorPlace(
        seq=int(cells.seq[worst]),
        token=int(cells.token[worst]),
        row=int(cells.row[worst]),
        head=int(cells.head[worst]),
    )
    return Diagnosis(
        status="described" if pattern.is_complete else "unexplained",
        pattern=pattern,
        wrong_rows=int(is_wrong.any(1).sum()),
        wrong_heads=int(is_wrong.any(0).sum()),
        place=place,
        largest=float(error),
        tolerance=case.tolerance,
        unknown=[_UNKNOWN],
        looked_at=(rows, rows),
    )


def _sizes(case: Case) -> Sizes:
    lengths = case.lengths
    return Sizes(
        seqs=tuple(range(len(lengths.query_lens))),
        query_lens=tuple(lengths.query_lens),
        ctx_lens=tuple(lengths.ctx_lens),
        row_starts=tuple(lengths.token_start_loc),
        block_size=case.block_size,
        num_queries_per_kv=case.num_queries_per_kv,
    )


def _as_without(plain: Diagnosis, case: Case) -> Diagnosis:
    """Return the diagnosis of the Case without its argument, with a note."""
    what = (
        f"what op_argument {case.op_argument} adds: this is about the output without it, wrong, too"
    )
    return dataclasses.replace(plain, unknown=[*plain.unknown, what])
