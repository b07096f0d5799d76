"""What a wrong output of a Case with an op argument looks like: places, values, and what gives the output."""

from collections.abc import Iterator

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.contracts.dispatch import decide
from attnlab.defects.problem import Problem
from attnlab.diagnosis.address_memory import ROW_TERMS, TensorMemory, sizes_of
from attnlab.diagnosis.address_rules import OWN, rules_of
from attnlab.diagnosis.cells import Cells, limit_of
from attnlab.diagnosis.output_rules import MOST_ELEMENTS, features_of_rows
from attnlab.diagnosis.pattern import Fact, Pattern
from attnlab.diagnosis.pattern_places import Sizes, element_facts, place_facts
from attnlab.diagnosis.pattern_values import size_fact, value_facts
from attnlab.lab.argument_reads import wrong_masks, wrong_reads
from attnlab.lab.argument_reference import bound_with_argument, reference_with_argument
from attnlab.lab.lab import Lab
from attnlab.tensors.case_call import make_output

KIND = "argument"  # of the facts that give the output
_EVERY = "every row and head"


def argument_cells(lab: Lab, case: Case, output: torch.Tensor) -> Cells:
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


def argument_pattern(lab: Lab, case: Case, cells: Cells, dtype: torch.dtype) -> Pattern:
    """Return the places, and what gives the output, or else its values."""
    rows, heads = case.lengths.num_tokens, case.num_heads
    is_wrong = cells.is_wrong.view(rows, heads)
    rules = [*_reads(lab, case, cells), *_moves(lab, case, cells)][:1] or value_facts(cells, dtype)[
        0
    ]
    size = size_fact(cells, any(fact.accounts_for for fact in rules))
    facts = [
        *place_facts(is_wrong, range(heads), sizes_of_case(case)),
        *element_facts(cells),
        *([] if size is None else [size]),
        *rules,
    ]
    return Pattern(facts=tuple(facts), wrong_cells=int(is_wrong.sum()))


def argument_names(lab: Lab, case: Case, output: torch.Tensor) -> list[str]:
    """Return the names of the wrong reads and masks that give a wrong output, in words."""
    facts = _reads(lab, case, argument_cells(lab, case, output.cpu()))
    return [str(fact.values["name"]).replace("_", " ") for fact in facts]


def sizes_of_case(case: Case) -> Sizes:
    """Return the lengths and sizes of a Case."""
    lengths = case.lengths
    return Sizes(
        seqs=tuple(range(len(lengths.query_lens))),
        query_lens=tuple(lengths.query_lens),
        ctx_lens=tuple(lengths.ctx_lens),
        row_starts=tuple(lengths.token_start_loc),
        block_size=case.block_size,
        num_queries_per_kv=case.num_queries_per_kv,
    )


def _reads(lab: Lab, case: Case, cells: Cells) -> Iterator[Fact]:
    """Yield the wrong reads and masks that give the output, and whether it is that without the argument."""
    batch = lab.batch(case).cpu()
    found = {
        name: reference_with_argument(case, batch, read).output
        for name, read in wrong_reads(case).items()
    }
    found |= {
        name: reference_with_argument(other, batch).output
        for name, other in wrong_masks(case).items()
    }
    found["argument_ignored"] = lab.reference(case.replace(op_argument=NONE)).cpu()
    for name, expected in found.items():
        numbers = expected.double().flatten(0, 1)
        # Where a read meets a slot that holds nothing, the reference knows no number.
        is_same = numbers.isnan() & ~cells.output.isfinite() | _is_near(cells, numbers)
        if bool(is_same.all() & numbers[cells.is_wrong].isfinite().all(1).any()):
            yield _fact(cells, name, f"{name.replace('_', ' ')} gives this output")


def _moves(lab: Lab, case: Case, cells: Cells) -> Iterator[Fact]:
    """Yield the wrong addresses to which the right output may be written.

    An element that no row writes keeps what the buffer held.
    """
    rows, heads, size = case.lengths.num_tokens, case.num_heads, case.head_size
    if rows * heads * size > MOST_ELEMENTS:
        return
    plain = case.replace(op_argument=NONE)
    problem = Problem.of_case(plain, lab.batch(plain), lab.call(plain))
    features, memory = features_of_rows(problem), TensorMemory.of(problem.call.buffer, ROW_TERMS)
    factors = (
        dict(memory.strides) | sizes_of(problem.call) | {"num_heads × head_size": heads * size}
    )
    right, output = (one.view(rows, heads, size) for one in (cells.correct, cells.output))
    before = make_output(case).double()
    wrong = cells.is_wrong.view(rows, heads)
    own = OWN.address(ROW_TERMS, features, factors).expand(right.shape) + memory.base
    for rule in rules_of("output", memory, factors):
        to = rule.address(ROW_TERMS, features, factors).expand(right.shape) + memory.base
        inside = (to >= 0) & (to < len(memory.flat))
        flat = torch.full((len(memory.flat),), torch.nan, dtype=torch.float64)
        flat[to[inside]] = right[inside]
        moved = flat[own]
        is_kept = (output == before) | (output.isnan() & before.isnan())
        is_same = torch.where(
            moved.isnan(), is_kept, _is_near(cells, moved.flatten(0, 1)).view_as(moved)
        )
        if bool(is_same.all()) and bool(moved[wrong].isfinite().any()):
            yield _fact(cells, rule.name, rule.text(ROW_TERMS))


def _fact(cells: Cells, name: str, what: str) -> Fact:
    wrong = int(cells.is_wrong.sum())
    return Fact(kind=KIND, where=_EVERY, what=what, values={"name": name}, accounts_for=wrong)


def _is_near(cells: Cells, numbers: torch.Tensor) -> torch.Tensor:
    """Return which elements are the ``numbers`` up to the bound of the right output, or a larger one where
    the numbers, or those of their row and head, are larger."""
    sizes, right = numbers.abs().nan_to_num(0.0), cells.correct.abs().clamp(min=1e-12)
    larger = (sizes / right).clamp(min=1.0, max=16.0)
    larger = larger.maximum(sizes.amax(1, True) / right.amax(1, True))
    limit = limit_of(cells.bound * larger, cells.output, cells.correct, cells.bound)
    return (cells.output - numbers).abs() <= limit
