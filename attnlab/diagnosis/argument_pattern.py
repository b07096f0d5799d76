"""What a wrong output of a Case with an op argument looks like: places, values, and what gives the output."""

import dataclasses
from collections.abc import Iterator

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.contracts.dispatch import decide
from attnlab.defects.problem import Problem
from attnlab.diagnosis.cells import Cells, limit_of
from attnlab.diagnosis.pattern import Fact, Pattern, Sizes, element_facts, place_facts
from attnlab.diagnosis.pattern_values import size_fact, value_facts
from attnlab.diagnosis.rules.addresses import OWN, ROW_TERMS, TensorMemory, rules_of, sizes_of
from attnlab.diagnosis.rules.outputs import MOST_ELEMENTS, features_of_rows
from attnlab.kernels.backend import RunOutput
from attnlab.lab.argument_reference import (
    bound_with_argument,
    reference_with_argument,
    wrong_masks,
    wrong_reads,
)
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import PagedCache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output
from attnlab.tensors.comparison import same_numbers
from attnlab.tensors.quantised import OUTPUT_SCALE

# ArgumentLab: a Lab whose kernels get an op argument that changes no number, so that all else is plain.
#
# An argument may change how the output is rounded.

_SAME = 1e-6  # of two references in float64
FP8_OUTPUT = "fp8_output"  # its reference is that of the plain Case, before it is rounded


@dataclasses.dataclass(slots=True)
class ArgumentLab(Lab):
    """A lab that runs Cases without an op argument with ``op_argument``.

    With an FP8 output, its calls have the output scale, from which the rounding follows.
    """

    op_argument: str = NONE

    def call(
        self, case: Case, cache: PagedCache | None = None, output: torch.Tensor | None = None
    ) -> KernelCall:
        """Return the Case's call, as a Lab does."""
        call = Lab.call(self, case, cache, output)
        if self.op_argument != FP8_OUTPUT:
            return call
        return dataclasses.replace(call, output_scale=OUTPUT_SCALE)

    def bound(self, case: Case, call: KernelCall) -> torch.Tensor:
        """Return the rounding bound of each element, with that of an FP8 output."""
        if self.op_argument != FP8_OUTPUT or case.backend == "model":  # which takes no argument
            return Lab.bound(self, case, call)
        plain = dataclasses.replace(call, output_scale=None)
        return Lab.bound(self, case.replace(op_argument=FP8_OUTPUT), plain)

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        plain = dataclasses.replace(call, output_scale=None)  # the op argument passes the scale
        return Lab._run_kernels(self, case.replace(op_argument=self.op_argument), plain)


def argument_lab(lab: Lab, case: Case) -> ArgumentLab | None:
    """Return the lab in which the Case without its op argument runs with it.

    None if the argument changes the right output or its rounding, as formats and masks do.
    """
    if case.op_argument == FP8_OUTPUT:
        return None
    expected = reference_with_argument(case, lab.batch(case)).output
    plain = lab.reference(case.replace(op_argument=NONE))
    if not torch.allclose(expected, plain, rtol=_SAME, atol=_SAME, equal_nan=True):
        return None
    return _lab_with(lab, case.op_argument)


def coarse_lab(lab: Lab, case: Case) -> ArgumentLab | None:
    """Return the lab in which the Case without its op argument runs with it, if that is an FP8 output."""
    return _lab_with(lab, FP8_OUTPUT) if case.op_argument == FP8_OUTPUT else None


def _lab_with(lab: Lab, op_argument: str) -> ArgumentLab:
    given = {one.name: getattr(lab, one.name) for one in dataclasses.fields(Lab) if one.init}
    return ArgumentLab(**given, op_argument=op_argument)


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
        is_kept = same_numbers(output, before)
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
