"""describe: the pattern of an error, from its places to the change of the weights that fits it."""

import dataclasses

import torch

from attnlab.defects.problem import Problem
from attnlab.diagnosis.cells import CLEAR, cells_of
from attnlab.diagnosis.error_location import ErrorLocations
from attnlab.diagnosis.parts import wrong_parts
from attnlab.diagnosis.pattern import Fact, Pattern
from attnlab.diagnosis.pattern_keys import keys_fact, sum_fact
from attnlab.diagnosis.pattern_moves import move_facts
from attnlab.diagnosis.pattern_places import Sizes, element_facts, place_facts
from attnlab.diagnosis.pattern_scale import scale_fact
from attnlab.diagnosis.pattern_values import size_fact, value_facts
from attnlab.diagnosis.row_sample import RowSample, sample_output

_SINGULAR = ("nonfinite", "zeros")  # kinds of facts next to which a change of the weights is tried


def describe(
    problem: Problem, output: torch.Tensor, locations: ErrorLocations, heads: range | None = None
) -> Pattern:
    """Return the pattern of an output's errors; empty if nothing is wrong.

    ``output``: [num_tokens, num_heads, head_size]; ``heads``: the query heads that ran, None for all.
    """
    if not len(locations.wrong_rows):
        return Pattern()
    ran = range(problem.num_heads) if heads is None else heads
    cells = cells_of(problem, output, locations.ratio, heads)
    places = place_facts(locations.is_wrong, list(ran), sizes_of(problem))
    wrong = int(cells.is_wrong.sum())
    if not wrong:
        return Pattern(facts=tuple(places))
    values, left = value_facts(cells, output.dtype)
    is_clear = bool((cells.ratio[left] > CLEAR).any())  # else any rule fits
    if is_clear:
        values += move_facts(cells, problem.row_starts(), left)
    only_singular = all(fact.kind in _SINGULAR for fact in values if fact.accounts_for)
    if (only_singular and is_clear) or any(fact.kind == "factors" for fact in values):
        sample = sample_output(problem, locations, torch.arange(0), heads)
        values = _with_weights(problem, output, sample, values, int(left.sum()))
    has_rule = any(fact.accounts_for for fact in values)
    size = size_fact(cells, has_rule)
    sizes = [] if size is None else [size]
    elements = [] if has_rule else element_facts(cells)
    return Pattern(facts=(*places, *elements, *sizes, *values), wrong_cells=wrong)


def _with_weights(
    problem: Problem, output: torch.Tensor, sample: RowSample, values: list[Fact], left: int
) -> list[Fact]:
    """Return the facts with the change of the weights that reproduces the ``left`` finite wrong cells,
    if there is one."""
    worst = wrong_parts(problem, output, sample.worst)
    many = wrong_parts(problem, output, sample.many)
    if not worst or not many:
        return values
    factors = [fact for fact in values if fact.kind == "factors"]
    if factors:
        fact = sum_fact(many)
        count = factors[0].accounts_for
        rest = [one for one in values if one.kind != "factors"]
    else:
        fact = scale_fact(problem, worst, many) or keys_fact(problem, worst, many)
        count, rest = left, values
    return values if fact is None else [*rest, dataclasses.replace(fact, accounts_for=count)]


def sizes_of(problem: Problem) -> Sizes:
    """Return the lengths and sizes of a problem."""
    query_lens = [problem.query_len(seq) for seq in range(problem.num_seqs)]
    return Sizes(
        seqs=tuple(seq for seq in problem.computed_seqs()),
        query_lens=tuple(query_lens),
        ctx_lens=tuple(problem.seq_len(seq) - n for seq, n in enumerate(query_lens)),
        row_starts=tuple(problem.row_starts()),
        block_size=problem.call.block_size,
        num_queries_per_kv=problem.call.num_queries_per_kv,
    )
