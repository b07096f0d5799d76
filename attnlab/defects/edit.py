"""Defect, and Rows and fault: what the rows of the catalogue are written with.

A defect is one function of the :class:`Rows` that it changes. It returns the inputs of attention that a
wrong kernel uses, or the output where a wrong kernel writes what is no attention.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnlab.lab.problem import AttentionInputs, Predicted, Problem, RowSlice, softmax
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import mask_of

Compute = Callable[[Problem, RowSlice], Predicted]
Applies = Callable[[Problem], bool]
IsShown = Callable[[Problem, Sequence[int]], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Defect:
    """One way for a kernel, or for the code that calls it, to be wrong.

    - ``seen_in``: public issues and pull requests that report it, as "repository #number".
    - ``touches``: which rows it can change: "all", "cached" (rows with keys read from the cache),
      "decode" or "unwritten" (rows that the kernel never writes).
    - ``links``: kinds of Violation that would cause it.
    - ``compute``: returns the output of some rows under the defect; rows that it does not touch come out
      correct.
    - ``applies``: answers whether a call has the feature that the defect is about, such as a window.
    - ``harmless``: the defect changes only the rounding.
    - ``variants``: the same defect with other sizes, such as tiles, each as text and ``compute``. The
      diagnosis tries all of them; elsewhere ``compute`` stands for them.
    - ``is_possible``: answers whether the tensors at hand allow the defect; the diagnosis excludes others.
    - ``is_shown``: answers whether wrong rows of some sequences can show what the text says. Elsewhere the
      same rows follow from less: a lost sum of earlier tiles needs two tiles.
    """

    name: str
    family: str
    text: str
    compute: Compute
    seen_in: tuple[str, ...] = ()
    touches: str = "all"
    applies: Applies = lambda problem: True
    links: tuple[str, ...] = ()
    harmless: bool = False
    variants: tuple[tuple[str, Compute], ...] = ()
    is_possible: Applies = lambda problem: True
    is_shown: IsShown = lambda problem, seqs: True

    def expand(self) -> "tuple[Defect, ...]":
        """Return one Defect for each variant, with its text; the defect itself if it has none."""
        if not self.variants:
            return (self,)
        return tuple(
            dataclasses.replace(self, text=f"{self.text} ({text})", compute=compute, variants=())
            for text, compute in self.variants
        )


TILES = (16, 32, 64, 128)  # tile sizes of vLLM's kernels
Edit = Callable[..., AttentionInputs | Predicted]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some rows of one sequence with their correct inputs, and the changes that defects are made of."""

    problem: Problem
    slice: RowSlice

    @cached_property
    def inputs(self) -> AttentionInputs:
        """Return the correct inputs."""
        return self.problem.attention_inputs(self.slice)

    @property
    def call(self) -> KernelCall:
        """Return the call."""
        return self.problem.call

    @property
    def rules(self) -> Any:
        """Return the call's Visibility: the rules by which rows see keys."""
        return self.call.visibility

    @property
    def heads(self) -> torch.Tensor:
        """Return the query heads, [heads]."""
        return self.slice.heads

    @property
    def next_heads(self) -> torch.Tensor:
        """Return the query head after each, the first after the last, [heads]."""
        return (self.heads + 1) % self.problem.num_heads

    @property
    def kv(self) -> torch.Tensor:
        """Return the KV head of each query head, [heads]."""
        return self.problem.kv_heads_of(self.heads)

    @property
    def is_causal(self) -> bool:
        """Answer whether the sequence is causal."""
        return bool(self.rules.is_causal(self.slice.seq))

    @property
    def seq_len(self) -> int:
        """Return the number of tokens of the sequence, context and new."""
        return self.problem.seq_len(self.slice.seq)

    @property
    def ctx_len(self) -> int:
        """Return the number of tokens before the new ones."""
        return self.problem.ctx_len(self.slice.seq)

    @property
    def cached(self) -> int:
        """Return how many tokens are read from the cache."""
        return self.problem.cached_len(self.slice.seq)

    @property
    def keys(self) -> torch.Tensor:
        """Return the positions of the keys, [keys]."""
        return torch.arange(self.seq_len)

    @property
    def after(self) -> torch.Tensor:
        """Return how far each key is after each row, [rows, keys]."""
        return self.keys - self.inputs.position[:, None]

    @property
    def visible(self) -> torch.Tensor:
        """Return which keys the rows see, [rows, keys] bool."""
        return self.inputs.visible

    def change(self, **changes: Any) -> AttentionInputs:
        """Return the inputs with other fields."""
        return dataclasses.replace(self.inputs, **changes)

    def hide(self, hidden: torch.Tensor) -> AttentionInputs:
        """Return the inputs without the keys that are ``hidden``, [keys] or [rows, keys] bool."""
        return self.change(visible=self.visible & ~hidden)

    def show(self, shown: torch.Tensor) -> AttentionInputs:
        """Return the inputs in which rows also see the keys that are ``shown``, [rows, keys] bool."""
        return self.change(visible=self.visible | shown)

    def seen_under(self, **rules: Any) -> torch.Tensor:
        """Return what the rows see under other rules, [rows, keys] bool."""
        return mask_of(self.call, self.slice.seq, **rules).visible(self.inputs.position)

    def under(self, **rules: Any) -> AttentionInputs:
        """Return the inputs with what rows see under other rules."""
        bias = mask_of(self.call, self.slice.seq, **rules).bias(self.inputs.position)
        return self.change(visible=self.seen_under(**rules), mask_bias=bias)

    def window(self, wider: int | None) -> torch.Tensor:
        """Return what rows see through a window that is ``wider`` on each side, or without limit for
        None."""
        window = 0 if wider is None else self.rules.sliding_window + wider
        is_empty, right = wider is not None and window == 0, self.rules.window_right
        seen = self.seen_under(
            sliding_window=1 if is_empty else window,
            window_right=None if right is None else max(0, right + (wider or 0)),
        )
        return seen & (self.after != 0) if is_empty else seen

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the correct weights of scores."""
        return softmax(scores, self.inputs.sinks)

    def sink(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> AttentionInputs:
        """Return the inputs with the sinks that ``of`` makes of all heads' sinks, [num_heads] float64."""
        sinks = self.call.sinks
        return self.inputs if sinks is None else self.change(sinks=of(sinks.double()))

    def slope(self, of: Callable[[torch.Tensor], torch.Tensor]) -> AttentionInputs:
        """Return the inputs with the slopes that ``of`` makes of all heads' ALiBi slopes, as for ``sink``."""
        slopes = self.call.alibi_slopes
        return self.inputs if slopes is None else self.change(alibi_slopes=of(slopes.double()))

    def read(self, **changes: Any) -> AttentionInputs:
        """Return the inputs if the cache is read with changes of a CacheRead."""
        read = dataclasses.replace(self.problem.cache_read(self.slice.seq), **changes)
        return self.problem.inputs_read_by(self.slice, read)

    def in_cache(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that the cache holds at positions of the sequence."""
        read = self.problem.cache_read(self.slice.seq)
        return read.keys(self.call, positions, self.kv), read.values(self.call, positions, self.kv)


def fault(
    name: str,
    text: str,
    seen_in: str,
    edit: Edit,
    *applies: Applies,
    variants: Mapping[str, Any] | None = None,
    touches: str = "all",
    links: tuple[str, ...] = (),
    **others: Any,
) -> Defect:
    """Return a defect as a row of the catalogue; see :class:`attnlab.defects.edit.Defect`.

    - ``seen_in``: public issues and pull requests, separated by commas.
    - ``edit``: what a wrong kernel does with some Rows; with ``variants``, of their texts and arguments, it
      takes one argument more.
    - ``applies``: all of them must hold.
    """
    found = [(label, compute_of(edit, argument)) for label, argument in (variants or {}).items()]
    return Defect(
        name=name,
        family="",
        text=text,
        seen_in=tuple(filter(None, seen_in.split(", "))),
        touches=touches,
        compute=found[0][1] if found else compute_of(edit),
        applies=lambda problem: all(one(problem) for one in applies),
        links=links,
        variants=tuple(found),
        **others,
    )


def family(name: str, *defects: Defect) -> tuple[Defect, ...]:
    """Return defects as those of a family."""
    return tuple(dataclasses.replace(defect, family=name) for defect in defects)


def compute_of(edit: Edit, *argument: Any) -> Compute:
    """Return the ``compute`` of a defect that does with some Rows what ``edit`` does."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        found = edit(Rows(problem=problem, slice=row_slice), *argument)
        return found if isinstance(found, Predicted) else problem.predict(found)

    return compute


# What a call has, for ``applies``.


def any_seq(test: Callable[[Problem, int], object]) -> Applies:
    """Return whether a test is true of any sequence."""
    return lambda problem: any(test(problem, seq) for seq in range(problem.num_seqs))


def given(name: str) -> Applies:
    """Return whether a call has an optional argument."""
    return lambda problem: getattr(problem.call, name) is not None


def has_window(problem: Problem) -> bool:
    """Answer whether the call has a sliding window; chunks are none."""
    visibility = problem.call.visibility
    return visibility.sliding_window > 0 and not visibility.has_chunks


def has_cached(more_than: int) -> Applies:
    """Return whether any sequence reads more than so many tokens from the cache."""
    return any_seq(lambda problem, seq: problem.cached_len(seq) > more_than)


def has_several_seqs(problem: Problem) -> bool:
    """Answer whether the call has several sequences."""
    return problem.num_seqs > 1


def has_several_heads(problem: Problem) -> bool:
    """Answer whether the call has several query heads."""
    return problem.num_heads > 1


def has_head_groups(problem: Problem) -> bool:
    """Answer whether several query heads share a KV head."""
    return problem.call.num_queries_per_kv > 1


has_causal_rows = any_seq(lambda problem, seq: problem.call.visibility.is_causal(seq))
has_context = any_seq(lambda problem, seq: problem.ctx_len(seq) > 0)
# The cached tokens end within a block.
has_partial_block = any_seq(lambda problem, seq: problem.cached_len(seq) % problem.call.block_size)
