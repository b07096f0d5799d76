"""Passed: the arguments of an op with a Case's op argument, and the function that takes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.kernels.vllm.argument_facts import parameters_of
from attnlab.kernels.vllm.loader import Loader

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The arguments of an op with a Case's op argument.

    - ``finish``: writes the result into an output [num_tokens, num_heads, head_size] of the query's dtype, or
      into the cache of a cache write. None if the op wrote it there.
    - ``function``: module and name of the function that takes the arguments, or None for the op's own. It
      gets those that it has parameters for.
    """

    arguments: Arguments
    finish: Callable[[torch.Tensor], None] | None = None
    function: tuple[str, str] | None = None


def with_function(
    loader: Loader, function: Callable[..., None], passed: Passed
) -> tuple[Callable[..., None], Passed]:
    """Return the function that takes the arguments, by default ``function``, and those that it has.

    Whether the release has the function is checked before (:mod:`attnlab.kernels.vllm.features`).
    """
    if passed.function is None:
        return function, passed
    module, name = passed.function
    found: Callable[..., None] = getattr(loader.load(module), name)
    names = parameters_of(found)
    kept = {key: value for key, value in passed.arguments.items() if key in names}
    return found, replace(passed, arguments=kept)
