"""Compare the weights that an X-ray describes with the outputs of further cases."""

from collections.abc import Sequence

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.cells import limit_of, ratio_of
from attnlab.diagnosis.described_weights import DescribedWeights
from attnlab.diagnosis.examination import Examination, examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import Rerun
from attnlab.diagnosis.second_case import further_cases, with_known_contents
from attnlab.lab.lab import Lab
from attnlab.weights.description import Description
from attnlab.weights.predict import predict_case

_SLACK = 3.0  # a wrong description is off by hundreds of rounding bounds
_MOST = 4  # descriptions of an X-ray that are tried


def confirmed_weights(
    lab: Lab, case: Case, descriptions: Sequence[Description], rerun: Rerun
) -> DescribedWeights | None:
    """Return the first description from which every wrong output of the further cases follows, or None.

    Of a batch of decodes, only decodes must follow.
    """
    outputs = _further_outputs(lab, case, rerun)
    for description in descriptions[:_MOST]:
        cases, is_right = 0, True
        only_decodes = max(case.lengths.query_lens) == 1
        has_prefill, right_decodes = not only_decodes, False
        for other, output, found in outputs:
            is_wrong = bool(len(found.evidence.locations.wrong_rows))
            if follows_from(description, lab, other, output, found):
                cases += is_wrong
                only_decodes &= not (is_wrong and max(other.lengths.query_lens) > 1)
            elif has_prefill and not is_wrong and max(other.lengths.query_lens) == 1:
                right_decodes = True
            elif not only_decodes or max(other.lengths.query_lens) == 1:
                is_right = False
                break
        if is_right and cases:
            return DescribedWeights(
                description=description,
                cases=cases,
                only_decodes=only_decodes,
                right_decodes=right_decodes,
            )
    return None


def _further_outputs(
    lab: Lab, case: Case, rerun: Rerun
) -> list[tuple[Case, torch.Tensor, Examination]]:
    """Return further cases that run, with finite numbers in empty slots, and their outputs."""
    found = []
    for other in further_cases(case):
        known = with_known_contents(other)
        try:
            output = rerun(known)
            found.append((known, output, examine(lab, known, output, (), Pattern())))
        except AttnLabError:
            continue
    return found


def follows_from(
    description: Description, lab: Lab, case: Case, output: torch.Tensor, found: Examination
) -> bool:
    """Answer whether a description gives an output of a Case; ``found``: the examination of that output."""
    predicted = predict_case(description, case, lab)
    rows, heads = torch.arange(len(output)), torch.arange(output.shape[1])
    right = found.problem.correct_rows(rows, heads)
    size = predicted.abs().amax(-1) / lab.reference(case).abs().double().amax(-1)
    bound = _SLACK * right.bound * size.clamp(min=1)[..., None]
    limit = limit_of(bound, output.double(), right.output, _SLACK * right.bound)
    error = ratio_of(output.double() - predicted, limit.amax(-1, keepdim=True))
    return not bool((error > 1).any())
