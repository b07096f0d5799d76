"""Op arguments in an X-ray: how the op reads queries and keys, what it rounds, and how values are stored."""

import dataclasses
import functools
import math

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.defects.problem import Problem
from attnlab.kernels.backend import RunOptions
from attnlab.lab.argument_reference import argument_rounding, query_as_read
from attnlab.lab.int4_rounding import Int4Rounding
from attnlab.tensors.call import KernelCall
from attnlab.tensors.int4 import int4_scale, rotation_size
from attnlab.tensors.op_argument_data import decoded_numbers, narrow_size, stored_numbers
from attnlab.weights.bounds import bounds_of
from attnlab.weights.device import moved
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.stored_cache import key_tokens, store, value_scales


def check_readable(case: Case) -> None:
    """Raise InvalidCase for an op argument with which values of 0 and 1 do not show the weights."""
    if case.argument.no_xray:
        text = f"op_argument must let an X-ray read weights, got {case.op_argument}: {case.argument.no_xray}"
        raise InvalidCase(text, field="op_argument")


def with_value_scales(options: RunOptions, case: Case, call: KernelCall) -> RunOptions:
    """Return the options with the scales of values that are 1 in one element."""
    if case.argument.cache is None:
        return options
    return dataclasses.replace(options, value_scale=value_scales(call))


def with_argument(setup: AttentionSetup, case: Case | None, is_native: bool) -> AttentionSetup:
    """Return the setup with queries and keys as the op of a Case with an op argument reads them.

    ``is_native``: the op runs on a GPU, not under Triton's interpreter.
    """
    if case is None:
        return setup
    if case.op_argument == "diffkv":
        return dataclasses.replace(setup, value_size=narrow_size(case))
    if case.op_argument != "fp8_query" and case.argument.cache is None:
        return setup
    device, setup = setup.device, moved(setup, "cpu")
    query, key = query_as_read(case, setup.query.to(setup.call.query.dtype)).double(), setup.key
    extra, fixed = 0.0, 0.0
    if case.argument.cache is not None:
        numbers, scale = stored_numbers(case, key_tokens(setup.call))
        key = decoded_numbers(case, numbers, scale)
        if case.argument.is_packed:
            extra, fixed = _int4_errors(setup, key, scale, is_native)
    adjust = functools.partial(argument_rounding, case)
    kernels = tuple(dict.fromkeys(setup.kernels))
    problem = Problem.of_call(setup.call, setup.target, kernels)
    bounds = bounds_of(problem, setup.seq, query, key, adjust)
    relative = (1 + bounds[0]) * math.exp(2 * extra) - 1
    found = dataclasses.replace(
        setup, query=query, key=key, relative=relative, fixed=bounds[1] + fixed
    )
    return moved(found, device)


def _int4_errors(
    setup: AttentionSetup, key: torch.Tensor, scale: torch.Tensor, is_native: bool
) -> tuple[float, float]:
    """Return by how much a score may be off in addition, and a weight whose value is 1.

    The second is that of :meth:`Int4Rounding.bound` for numbers of at most 15 times the scale 1.
    """
    problem = Problem.of_call(setup.call, setup.target, tuple(dict.fromkeys(setup.kernels)))
    int4 = Int4Rounding.of(problem.rounding(0), is_native)
    size, longest = setup.query.shape[2], int(setup.seq_len.max())
    norms = float(setup.query.norm(dim=2).max()), float(key.norm(dim=2).max())
    largest = 15 * float(int4_scale(scale).max())
    score = int4.score_error(*norms, largest, size, setup.sm_scale)
    sums = 15 * (int4.weight + longest * 2.0**-23)
    return score, sums + int4.output_error(rotation_size(size))


def with_stored(
    setup: AttentionSetup, case: Case | None, lanes: torch.Tensor, is_exact: bool
) -> AttentionSetup:
    """Return the setup with what the cache holds, if it has a scale per token and head.

    ``lanes``: [N], the lane of each slot. ``is_exact``: every weight was measured in its lane.
    """
    if case is None or case.argument.cache is None or not is_exact:
        return setup
    return dataclasses.replace(setup, stored=store(case, setup.call, lanes.cpu()))
