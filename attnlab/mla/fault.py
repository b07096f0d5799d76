"""Fault: one way in which an MLA path can be wrong, as a change of one of its steps.

A fault changes what the path does, not numbers: the same change is made in the exact path, which predicts the
output (:mod:`attnlab.mla.explain`), and in the path that runs the ops, which plants the fault.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.mla.mla_case import DECODE, PREFILL, SHARDS, MlaCase
from attnlab.mla.partial import Partial

_Rows = Callable[[MlaCase, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A change of a path; each field is one step of it, unchanged by default.

    - ``paths``: where it exists. ``applies``: whether it can change the output of a case.
    - ``seen_in``: reports of the same fault.
    - ``spans``: (start, end) of a chunk's keys; the arguments are the case and whether the chunk continues
      one.
    - ``partial``: a partial attention. ``operands``: the two parts of a merge; ``merged``: the merge of two
      parts. ``ranks``: the parts of a combination.
    - ``overwrites``: a chunk replaces the parts before it. ``tokens_with_context``: the argument of the last
      merge. ``keeps_scale``: the output is not divided by output_scale. ``read_scale``: the cache is read
      without its scale.
    - ``rows``: block tables and lengths of the decode rows. ``slots``: the cache as the decode op addresses
      it. ``value_from``: the first element of the value in a latent.
    - ``is_blur``: it is an error of unknown sign within a bound, such as a rounding.
    """

    name: str
    text: str
    paths: tuple[str, ...]
    applies: Callable[[MlaCase], bool] = lambda case: True
    seen_in: tuple[str, ...] = ()
    spans: Callable[[MlaCase, bool, int, int], tuple[int, int]] = lambda case, more, start, end: (
        start,
        end,
    )
    partial: Callable[[MlaCase, Partial], Partial] = lambda case, one: one
    operands: Callable[[Partial, Partial], tuple[Partial, Partial]] = lambda one, other: (
        one,
        other,
    )
    ranks: Callable[[list[Partial]], list[Partial]] = lambda parts: parts
    merged: Callable[[Partial, Partial, Partial], Partial] = lambda one, other, both: both
    overwrites: bool = False
    tokens_with_context: Callable[[MlaCase, int], int] = lambda case, count: count
    keeps_scale: bool = False
    read_scale: Callable[[MlaCase], float] = lambda case: case.k_scale
    rows: _Rows = lambda case, tables, lens: (tables, lens)
    slots: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache
    value_from: Callable[[MlaCase], int] = lambda case: 0
    is_blur: bool = False


SOUND = Fault(name="sound", text="nothing is wrong", paths=(PREFILL, DECODE, SHARDS))
