"""Changes of the rules by which rows see keys, from which the defects of masks are made."""

import dataclasses
from typing import Any

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Applies, ChangeInputs, Compute, Defect, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.tensors.sequence_mask import mask_of
from attnlab.tensors.visibility import Visibility


def rules(problem: Problem) -> Visibility:
    return problem.call.visibility


def with_rules(
    problem: Problem, seq: int, inputs: AttentionInputs, **changes: Any
) -> AttentionInputs:
    """Return the inputs with what rows see under other rules."""
    mask = mask_of(problem.call, seq, **changes)
    return dataclasses.replace(
        inputs, visible=mask.visible(inputs.position), mask_bias=mask.bias(inputs.position)
    )


def other_rules(**changes: Any) -> Compute:
    """Return the ``compute`` of a defect that uses other rules for all sequences."""
    return changing_inputs(
        lambda problem, rows, inputs: with_rules(problem, rows.seq, inputs, **changes)
    )


def masked_defect(
    family: str,
    name: str,
    text: str,
    applies: Applies,
    *computes: tuple[str, Compute],
    change: ChangeInputs | None = None,
    seen_in: tuple[str, ...],
) -> Defect:
    """Return a defect of a family with one variant for each of ``computes``, or with ``change``."""
    found = computes if change is None else (("", changing_inputs(change)),)
    return Defect(
        name=name,
        family=family,
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=found[0][1],
        applies=applies,
        variants=found if len(found) > 1 else (),
    )
