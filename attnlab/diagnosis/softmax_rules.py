"""Rules about the softmax: one wrong step of a running softmax, or of the merge of its parts.

They go beyond the catalogue by the tiles, loops and parts in which a step may be wrong. Each is a Defect that
is made for a call, compared with an output and confirmed on further cases.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch

from attnlab.case.ops import MERGE
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Compute, Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.rule_defect import rule_defect
from attnlab.diagnosis.softmax_divisions import LOOPS, Division, divisions, with_tiles_to
from attnlab.diagnosis.softmax_law import ALL_KEYS, SoftmaxLaw

FAMILY = "running softmax"
_LN_2 = math.log(2)
# What a tile does wrongly.
_STEPS: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp in the weights": SoftmaxLaw(weight=_LN_2),
    "exp2 is used instead of exp in the weights and the rescaling": SoftmaxLaw(
        weight=_LN_2, rescale_sum=_LN_2, rescale_output=_LN_2
    ),
    "exp2 is used instead of exp in the rescaling of earlier tiles": SoftmaxLaw(
        rescale_sum=_LN_2, rescale_output=_LN_2
    ),
    "exp2 is used instead of exp in the rescaling of the sum": SoftmaxLaw(rescale_sum=_LN_2),
    "exp2 is used instead of exp in the rescaling of the accumulator": SoftmaxLaw(
        rescale_output=_LN_2
    ),
    "the sum of earlier tiles is not rescaled": SoftmaxLaw(rescale_sum=0.0),
    "the sum of earlier tiles, which begins at 1, is not rescaled": SoftmaxLaw(
        rescale_sum=0.0, first_sum=1.0
    ),
    "the accumulator of earlier tiles is not rescaled": SoftmaxLaw(rescale_output=0.0),
    "the sum of earlier tiles is lost": SoftmaxLaw(keep_sum=False),
    "the accumulator of earlier tiles is lost": SoftmaxLaw(keep_output=False),
    "earlier tiles are lost": SoftmaxLaw(keep_sum=False, keep_output=False),
    "earlier tiles are not rescaled": SoftmaxLaw(rescale_sum=0.0, rescale_output=0.0),
    "the sum of earlier tiles is rescaled by exp(old maximum)": SoftmaxLaw(sum_minus=0.0),
    "the accumulator of earlier tiles is rescaled by exp(old maximum)": SoftmaxLaw(
        output_minus=0.0
    ),
    "earlier tiles are rescaled by exp(old maximum)": SoftmaxLaw(sum_minus=0.0, output_minus=0.0),
    "earlier tiles are rescaled by exp(old maximum + new maximum)": SoftmaxLaw(
        sum_minus=-1.0, output_minus=-1.0
    ),
    "the weights lack the maximum in their exponent": SoftmaxLaw(weight_minus=0.0),
    "the maximum is added in the exponent of the weights": SoftmaxLaw(weight_minus=-1.0),
    "the sum of earlier tiles is taken for 1": SoftmaxLaw(sum_is_one=True),
    "the accumulator of earlier tiles is taken for 1": SoftmaxLaw(output_is_one=True),
    "the sums of the tiles are not added": SoftmaxLaw(added_sum=0.0),
    "the sums of the tiles are subtracted": SoftmaxLaw(added_sum=-1.0),
    "the slots of a tile after its last key count with score 0 and value 0": SoftmaxLaw(
        padding=ALL_KEYS
    ),
    "the first slot of a tile after its last key counts with score 0 and value 0": SoftmaxLaw(
        padding=1
    ),
}
# What a part begins with, or where it ends.
_PARTS: dict[str, SoftmaxLaw] = {
    "the maximum of each part begins at 0 and its sum at 1": SoftmaxLaw(
        first_max=0.0, first_sum=1.0
    ),
    "each part lacks its first key": SoftmaxLaw(start=1),
    "each part lacks its last key": SoftmaxLaw(stop=-1),
    "the first key of each part also counts in the part before": SoftmaxLaw(stop=1),
    "each part goes on to the end of the sequence": SoftmaxLaw(stop=ALL_KEYS),
    "each part begins at the first key": SoftmaxLaw(start=-ALL_KEYS),
}
# What a merge does wrongly.
_MERGES: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp to rescale the sums of the parts": SoftmaxLaw(merge_sum=_LN_2),
    "exp2 is used instead of exp to rescale the outputs of the parts": SoftmaxLaw(
        merge_output=_LN_2
    ),
    "exp2 is used instead of exp to rescale the parts": SoftmaxLaw(
        merge_sum=_LN_2, merge_output=_LN_2
    ),
    "the sums of the parts are not rescaled": SoftmaxLaw(merge_sum=0.0),
    "the outputs of the parts are not rescaled": SoftmaxLaw(merge_output=0.0),
    "the parts are not rescaled": SoftmaxLaw(merge_sum=0.0, merge_output=0.0),
    "the parts are rescaled with the opposite sign": SoftmaxLaw(merge_sum=-1.0, merge_output=-1.0),
    "the first part is missing": SoftmaxLaw(left_out="first"),
    "the last part is missing": SoftmaxLaw(left_out="last"),
    "the first part is missing in the sum": SoftmaxLaw(left_out="first", in_output=False),
    "the first part is missing in the output": SoftmaxLaw(left_out="first", in_sum=False),
    "the last part is missing in the sum": SoftmaxLaw(left_out="last", in_output=False),
    "the last part is missing in the output": SoftmaxLaw(left_out="last", in_sum=False),
}
_RUNNING: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp in the weight of the part that is added": SoftmaxLaw(
        merge_new=_LN_2
    ),
    "exp2 is used instead of exp in all weights of the parts": SoftmaxLaw(
        merge_new=_LN_2, merge_sum=_LN_2, merge_output=_LN_2
    ),
    "the part that is added has the weight 1": SoftmaxLaw(merge_new=0.0),
    "the outputs of the parts are not divided by their sums": SoftmaxLaw(divides=False),
    "the log-sum-exps of the parts lack the logarithm of the sum": SoftmaxLaw(log_of_sum=0.0),
    "the log-sum-exps of the parts subtract the logarithm of the sum": SoftmaxLaw(log_of_sum=-1.0),
}


def softmax_defects(problem: Problem) -> list[Defect]:
    """Return the rules about the softmax that a call allows, each as a defect."""
    if problem.call.op == MERGE or not problem.call.visibility.is_plain:
        return []
    return [
        rule_defect(FAMILY, text, text, _computed(law, division))
        for division in divisions(problem)
        for text, law in _rules(division)
    ]


def _rules(division: Division) -> Iterator[tuple[str, SoftmaxLaw]]:
    """Yield the laws of a division, each with its text."""
    for loop, where in LOOPS.items():
        if loop is None or division.has_loops:
            for text, law in _STEPS.items():
                if division.repeats and not law.is_of_every_tile:
                    continue
                yield f"with {division.text}, {where}{text}", dataclasses.replace(law, loop=loop)
    if division.merge:
        laws = {**_PARTS, **_MERGES, **(_RUNNING if division.merge == "running" else {})}
        for text, law in laws.items():
            yield f"with {division.text}, {text}", law


def _computed(law: SoftmaxLaw, division: Division) -> Compute:
    """Return the ``compute`` of a law."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        inputs, parts = problem.attention_inputs(row_slice), division.parts(problem, row_slice.seq)
        stops, is_empty = None, torch.zeros(len(row_slice.tokens), dtype=torch.bool)
        added = torch.zeros(len(row_slice.tokens), len(row_slice.heads), 1, dtype=torch.float64)
        if division.visited is not None and law.is_of_every_tile:
            stops = division.visited(problem, row_slice).stop
            parts = with_tiles_to(parts, int(stops.max()))

        def weigh(scores: torch.Tensor) -> torch.Tensor:
            found = law.weights(scores, parts, division.merge, inputs.sinks, stops)
            is_empty.copy_((found == 0).all(-1).all(0))
            if law.output_is_one:
                added.copy_(found[..., -1:].transpose(0, 1))
            return found[..., : scores.shape[-1]]

        predicted = problem.predict(dataclasses.replace(inputs, weigh=weigh))
        if law.output_is_one:
            error = 2 * inputs.rounding.unit * added.abs()
            predicted = dataclasses.replace(
                predicted, output=predicted.output + added, bound=predicted.bound + error
            )
        if not bool(is_empty.any()):
            return predicted
        return dataclasses.replace(
            predicted, sees_nothing=is_empty
        )  # 0, or the quotient of 0 and 0

    return compute
