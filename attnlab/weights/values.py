"""Which value elements an output holds: KV head, element, and whether the output is linear in V."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.weights.codes import num_slots, random_codes, values_shape, with_values
from attnlab.weights.key_rules import HEAD_FORMS, other_head
from attnlab.weights.measurement import (
    Measurement,
    Run,
    residual_bound,
    values_are_right,
    weigh,
)
from attnlab.weights.rule import numbers
from attnlab.weights.setup import AttentionSetup

_BASE = 8  # 0 to 7 are exact in every format


_INSPECTS = (
    "the output is not linear in the values: the kernel inspects V, for example to scale it by its maximum; "
    "the weights are those for values of 0 and 1, and the heads and elements of V cannot be read"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueFaults:
    """What is wrong with the values.

    - ``rules``: clauses about heads and elements, which predict other calls, too; ``limits``: sentences
      about what cannot be read.
    - ``kernels``: those with the fault. ``form``: which KV heads the values come from, a key of HEAD_FORMS;
      or ``kv_heads``: pairs of query head and KV head.
    - ``elements``: [head_size] int64, the element of the values that each element of the output holds, if it
      is not its own.
    """

    rules: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    form: str = ""
    kv_heads: tuple[tuple[int, int], ...] = ()
    elements: torch.Tensor | None = None

    @property
    def is_rule(self) -> bool:
        """Answer whether anything is stated that another case must confirm."""
        return bool(self.rules)

    def kv_heads_of(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the KV head whose values each query head of a setup uses, [H]."""
        if self.form:
            return other_head(self.form, setup)
        known = dict(self.kv_heads)
        pairs = zip(setup.heads.tolist(), setup.kv_head.tolist(), strict=True)
        return torch.tensor([known.get(head, own) for head, own in pairs])


def predicts_values(setup: AttentionSetup, found: Measurement, faults: ValueFaults) -> torch.Tensor:
    """Return for which rows the faults give the output with random values, [R] bool."""
    codes = random_codes(values_shape(found.call))[..., : setup.width].double()
    kv_heads = faults.kv_heads_of(setup)
    predicted, _ = weigh(found.call, found.weights, codes, kv_heads)
    if faults.elements is not None:
        predicted = predicted[..., faults.elements]
    own, _ = weigh(found.call, found.weights, codes, setup.kv_head)
    inside = torch.tensor([name in faults.kernels for name in setup.kernels])
    predicted = torch.where(inside[:, None, None], predicted, own)
    bound = residual_bound(setup, found)
    rows: torch.Tensor = ((found.output - predicted).abs() <= bound).flatten(1).all(1)
    return rows


def value_faults(
    setup: AttentionSetup, found: Measurement, run: Run, coarse: float = 0.0
) -> ValueFaults:
    """Return what is wrong with the values of finite rows: heads, elements, or linearity."""
    right = values_are_right(setup, found, coarse) | ~found.finite[:, None]
    if bool(right.all()):
        return ValueFaults()
    rows = torch.nonzero(~right.all(1)).flatten()
    if not _is_linear(setup, found, run, rows):
        return ValueFaults(limits=(_INSPECTS,))
    form, pairs = _heads_of(setup, found, run, rows)
    elements, words = _elements_of(setup, found, run, rows)
    kernels = tuple(sorted({setup.kernels[row] for row in rows.tolist()}))
    scope = f"rows of {' and '.join(kernels)}: " if set(kernels) != set(setup.kernels) else ""
    texts = tuple(scope + text for text in (_head_text(form, pairs), words) if text)
    if texts:
        return ValueFaults(
            rules=texts, kernels=kernels, form=form, kv_heads=pairs, elements=elements
        )
    share = float((~right).double().mean())
    return ValueFaults(
        limits=(
            f"for {share:.0%} of rows and heads, the output with random values is not the weighted sum that "
            "the weights give: the kernel depends on the values in another way (it may scale or quantise V); "
            "the weights are those for values of 0 and 1",
        )
    )


def _is_linear(setup: AttentionSetup, found: Measurement, run: Run, rows: torch.Tensor) -> bool:
    """Answer whether twice the random values give twice the output in some rows."""
    codes = random_codes(values_shape(found.call))
    once, twice = (
        _some(run(with_values(found.call, setup.target, times * codes)), setup, found)[rows]
        for times in (1, 2)
    )
    bound = 4 * residual_bound(setup, found)[rows] + 0.02 * once.abs()
    return bool(((twice - 2 * once).abs() <= bound).all())


def _ran(
    setup: AttentionSetup, found: Measurement, run: Run, code: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return the output for values that ``code(kv_heads, head_size)`` gives every slot, over the sums."""
    call = found.call
    codes = code(call.key.shape[1], call.query.shape[2]).to(torch.int8)
    codes = codes.expand(num_slots(call), *codes.shape[-2:]).contiguous()
    output = _some(run(with_values(call, setup.target, codes)), setup, found)
    # with FP8, cached values are multiplied by v_scale: the run with ones measures that, too
    ones = torch.ones_like(codes)
    total = _some(run(with_values(call, setup.target, ones)), setup, found)
    return output / total.clamp(min=1e-12)


def _some(output: torch.Tensor, setup: AttentionSetup, found: Measurement) -> torch.Tensor:
    """Return the rows, heads and elements of an output that were measured, [R, H, width]."""
    return output[found.rows][:, found.heads][..., : setup.width]


def _heads_of(
    setup: AttentionSetup, found: Measurement, run: Run, rows: torch.Tensor
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the form of the KV heads that the values come from, and pairs of query and wrong KV head."""
    kv_heads = found.call.key.shape[1]
    place, power = torch.zeros(len(setup.rows), len(setup.heads)), 1
    while power < kv_heads:
        step = power
        outputs = _ran(
            setup,
            found,
            run,
            lambda h, d, s=step: (torch.arange(h) // s % _BASE)[:, None].expand(h, d),
        )
        place = place + outputs.median(-1).values.nan_to_num(0.0).round() * power
        power *= _BASE
    seen = place[rows].median(0).values.long()
    if not _are_indices(seen, kv_heads):
        return "", ()
    pairs = tuple(
        (head, kv)
        for head, kv, own in zip(
            setup.heads.tolist(), seen.tolist(), setup.kv_head.tolist(), strict=True
        )
        if kv != own
    )
    forms = [form for form in HEAD_FORMS if pairs and torch.equal(other_head(form, setup), seen)]
    return (forms[0] if forms else ""), pairs


def _head_text(form: str, pairs: tuple[tuple[int, int], ...]) -> str:
    if not pairs:
        return ""
    which = form or ", ".join(f"{head} uses {kv}" for head, kv in pairs[:6])
    return f"query heads use the values of other KV heads: {which}"


def _elements_of(
    setup: AttentionSetup, found: Measurement, run: Run, rows: torch.Tensor
) -> tuple[torch.Tensor | None, str]:
    """Return which elements of the values the output has, if not its own."""
    size = setup.width
    place, power = torch.zeros(len(setup.rows), len(setup.heads), size), 1
    while power < size:
        step = power
        outputs = _ran(
            setup, found, run, lambda h, d, s=step: (torch.arange(d) // s % _BASE).expand(h, d)
        )
        place = place + outputs.nan_to_num(0.0).round() * power
        power *= _BASE
    seen = place[rows].flatten(0, 1).median(0).values.long()
    own = torch.arange(size)
    if torch.equal(seen, own) or not _are_indices(seen, size):
        return None, ""
    off = torch.nonzero(seen != own).flatten()
    shift = (seen - own)[off].unique()
    how = f"the one {int(shift[0]):+d}" if len(shift) == 1 else f"others, {_pairs(off, seen)}"
    words = (
        f"elements {numbers(off.tolist())} of the output hold another element of the values: {how}"
    )
    return seen, words


def _are_indices(seen: torch.Tensor, count: int) -> bool:
    """Answer whether decoded codes are possible; a kernel that reads other memory gives any number."""
    return bool(((seen >= 0) & (seen < count)).all())


def _pairs(off: torch.Tensor, seen: torch.Tensor) -> str:
    return ", ".join(f"{d} holds {int(seen[d])}" for d in off[:4].tolist())
