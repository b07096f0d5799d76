"""XRay: the measured and the expected weights of a call, and what the difference is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.ops import DECODE_FWD, PREFILL
from attnlab.case.shown import Shown, json_value
from attnlab.contracts.contract import PARTITION_SIZE, ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels.model import format_of
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.cache import interleaved
from attnlab.weights.codes import (
    NONE,
    SlotOwners,
    random_codes,
    values_shape,
    with_values,
)
from attnlab.weights.fit import Law, Magnitudes
from attnlab.weights.measurement import (
    Examined,
    Measurement,
    Run,
    residual_bound,
    values_are_right,
    weigh,
)
from attnlab.weights.plan import Description, Rule, numbers
from attnlab.weights.rules import (
    HEAD_FORMS,
    KeyTimes,
    LoopBase,
    MaskCapped,
    NotRescaled,
    TileTimes,
    ZeroKeys,
    other_head,
)
from attnlab.weights.setup import AttentionSetup, has_new_slots, make_setup, one_number

STATUSES = ("right", "precision", "described", "undecided", "unreadable")
_MOST_ROWS = 200
_IN_JSON = ("status", "backend", "sentences", "descriptions", "confirmed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class XRay(Shown):
    """The effective attention weights of a kernel.

    - ``status``: "right"; "precision" (they differ by rounding that is coarser than the bound); "described"
      (a rule explains every weight within the bound); "undecided" (no rule does, or the bound is so large
      that right weights show nothing); "unreadable" (no row is finite).
    - ``examined``: the measurement, on the device that computed it. All other tensors are on the CPU: those
      of a GPU are copied when they are first asked for.
    - ``descriptions``: the rules that explain the weights, simplest first; all predict the same weights here.
    - ``confirmed``: whether the first also predicts another case that was measured; None if none was.
    - ``law``: the fit of the log weights; ``magnitudes``: the scales of keys, values and output; None if
      there are too few weights.
    - ``sentences``: the conclusion, then the pattern and the limits.
    """

    status: str
    case: Case | None
    backend: str
    examined: Examined
    descriptions: tuple[Description, ...]
    confirmed: bool | None
    law: Law | None
    magnitudes: Magnitudes | None
    sentences: tuple[str, ...]
    tried: int
    seconds: float

    @property
    def setup(self) -> AttentionSetup:
        """Return the rows, the heads, and the slots: of the cache, then of new tokens."""
        return self.examined.on_cpu.setup

    @property
    def measurement(self) -> Measurement:
        """Return what the runs gave."""
        return self.examined.on_cpu.measurement

    @property
    def expected(self) -> torch.Tensor:
        """Return the right weights, [rows, heads, slots] float64."""
        return self.examined.on_cpu.expected

    @property
    def owners(self) -> SlotOwners:
        """Return the sequence and the position of each slot."""
        return self.examined.on_cpu.owners

    @property
    def drawn(self) -> bool:
        """Answer whether query and keys were replaced by N(0, 1) numbers."""
        return self.examined.drawn

    @property
    def weights(self) -> torch.Tensor:
        """Return the measured weights, [rows, heads, slots] float64; NaN where the output was not finite."""
        return self.measurement.weights

    @property
    def is_wrong(self) -> bool:
        """Answer whether the weights are wrong, or cannot be judged."""
        return self.status not in ("right", "precision")

    @property
    def description(self) -> Description | None:
        """Return the simplest description, or None."""
        return self.descriptions[0] if self.descriptions else None

    @property
    def bound(self) -> torch.Tensor:
        """Return the rounding bound of each weight, [rows, heads, slots]."""
        return self.examined.on_cpu.bound

    @property
    def wrong(self) -> torch.Tensor:
        """Return which rows and heads are beyond the bound or not finite, [rows, heads] bool."""
        return ~((self.weights - self.expected).abs() <= self.bound).all(-1)

    def to_dict(self) -> dict[str, Any]:
        """Return the X-ray as values of strict JSON, with the sums of at most 200 rows."""
        law = self.law
        rows = [self._row(index) for index in range(min(len(self.setup.rows), _MOST_ROWS))]
        converted: dict[str, Any] = json_value(
            {
                **{name: getattr(self, name) for name in _IN_JSON},
                "law": None
                if law is None
                else {
                    "score_slope": law.score,
                    "score_slope_error": law.score_error,
                    "distance_slopes": list(law.distance),
                    "spread": law.spread,
                    "weights": law.count,
                },
                "magnitudes": None if self.magnitudes is None else self.magnitudes.to_dict(),
                "runs": self.measurement.runs,
                "slots": self.setup.num_slots,
                "relative_precision": float(self.setup.relative.max()),
                "absolute_precision": float(self.setup.fixed.max()),
                "drawn": self.drawn,
                "rows": rows,
                "rows_left_out": max(0, len(self.setup.rows) - _MOST_ROWS),
                "seconds": self.seconds,
            }
        )
        return converted

    def _row(self, index: int) -> dict[str, Any]:
        """Return one row: where it is, and its sums by head."""
        setup = self.setup
        return {
            "row": int(setup.rows[index]),
            "sequence": int(setup.seq[index]),
            "position": int(setup.position[index]),
            "kernel": setup.kernels[index],
            "wrong_heads": setup.heads[self.wrong[index]].tolist(),
            "sums": self.weights[index].sum(-1).tolist(),
        }


# Predict the output of a call under a description.


def predict_case(description: Description, case: Case, lab: Lab) -> torch.Tensor:
    """Return the output that a description predicts for a Case, [num_tokens, num_heads, head_size] float64.

    A key or value that is not finite makes the rows NaN that give it a weight.
    """
    call = Problem.of_case(case, lab.batch(case), lab.call(case)).call
    rows, heads = torch.arange(call.query.shape[0]), torch.arange(call.query.shape[1])
    setup = make_setup(call, Target.of(case), decide(case).kernels, rows, heads)
    weights = description.weights(setup).transpose(0, 1)
    values = slot_values(setup)[:, setup.kv_head].transpose(0, 1)
    output = weights @ values.nan_to_num(0.0, 0.0, 0.0)
    reached = (weights != 0).double() @ (~values.isfinite()).double() > 0
    return output.masked_fill(reached, torch.nan).transpose(0, 1)


def slot_values(setup: AttentionSetup) -> torch.Tensor:
    """Return the values of all slots as a right kernel reads them, [N, num_kv_heads, head_size] float64."""
    call, format = setup.call, format_of(setup.call, setup.target)
    cache = interleaved(call.value_cache, back=True) if call.interleave_v else call.value_cache
    stored = cache.cpu().permute(0, 3, 1, 2).flatten(0, 1).contiguous()
    value = format.decode(stored, one_number(call.v_scale)).double()
    return torch.cat([value, call.value.cpu().double()]) if has_new_slots(call) else value


# Tile edges: where a kernel begins a new step of keys, for pictures of weights.

_TILES = {PREFILL: 64, DECODE_FWD: 32, ROCM_DECODE: PARTITION_SIZE}  # of vLLM 0.11.2 and 0.33.0
_UNIFIED_TILE = 32
# Of kernel_paged_attention_2d, which takes 32 for other sizes than powers of two.
_LARGEST_BLOCK = 128


def tile_edges(one: XRay, kernel: str, context: int, cached: int, length: int) -> tuple[int, ...]:
    """Return the positions at which tiles begin, without the first.

    They are those of the rule that describes the weights, else those of vLLM's kernel. A kernel that reads
    new tokens from its arguments begins anew at the end of the context.
    """
    rules = () if one.description is None else one.description.rules
    size = next(filter(None, map(_of_rule, rules)), 0) or _of_kernel(kernel, one.setup)
    if 0 < cached < length:
        return (*range(size, context, size), *range(context + size, length, size))
    return tuple(range(size, length, size))


def _of_rule(rule: Rule) -> int:
    """Return the tile that a rule is about, 0 if it is about none."""
    if isinstance(rule, NotRescaled | LoopBase | TileTimes):
        steps = rule.steps if isinstance(rule, TileTimes) else rule.rescale.steps
        return steps.tile if not steps.parts else 0
    if isinstance(rule, MaskCapped):
        return rule.tile
    if isinstance(rule, KeyTimes | ZeroKeys):
        sizes = (
            one for edge in (rule.begin, rule.end) for one in (edge.within, edge.up, edge.down)
        )
        return next(filter(None, sizes), 0)
    return 0


def _of_kernel(kernel: str, setup: AttentionSetup) -> int:
    """Return the keys per tile of a kernel of vLLM."""
    size = setup.call.block_size
    if kernel in _TILES:
        return _TILES[kernel]
    if kernel == TRITON_DECODE:
        return min(size, _LARGEST_BLOCK) if size & (size - 1) == 0 else 32
    is_decode = bool((setup.query_len == 1).all()) and setup.call.key_cache.element_size() > 1
    return _UNIFIED_TILE // 2 if is_decode else _UNIFIED_TILE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyColumns:
    """Weights of some rows and one head.

    - ``measured``, ``expected``: [rows, columns]; columns are the positions of the sequence, from the cache
      or from new tokens, then the slots after its end in its own blocks, then one column for each of
      ``foreign``.
    - ``rows``: [rows] output rows. ``positions``: number of positions; ``tail``: number of slots after them.
    - ``foreign``: labels of the last columns, sums over the slots of another sequence or of unmapped blocks.
    - ``context``: the end of the context; ``block_size``: of the cache; ``tiles``: positions at which the
      kernel begins another tile.
    """

    measured: torch.Tensor
    expected: torch.Tensor
    wrong: torch.Tensor
    rows: torch.Tensor
    seq: int
    head: int
    positions: int
    tail: int
    foreign: tuple[str, ...]
    context: int
    block_size: int
    tiles: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """Return the number of columns of the sequence itself, those before ``foreign``."""
        return self.positions + self.tail

    @property
    def foreign_width(self) -> int:
        """Return how many columns wide a picture draws each foreign one, so that its label has room."""
        return max(1, self.own // 14)

    @property
    def difference(self) -> torch.Tensor:
        """Return measured minus expected, [rows, columns]."""
        return self.measured - self.expected


def key_columns(one: XRay, seq: int | None = None, head: int | None = None) -> KeyColumns:
    """Return the columns of a sequence and a head; by default those with the largest difference."""
    worst_row, worst_head = _worst(one)
    seq = int(one.setup.seq[worst_row]) if seq is None else seq
    head = int(one.setup.heads[worst_head]) if head is None else head
    setup, owners = one.setup, one.owners
    rows = torch.nonzero(setup.seq == seq).flatten()
    at = torch.nonzero(setup.heads == head).flatten()[0]
    length, context = int(setup.seq_len[rows[0]]), int(setup.ctx_len[rows[0]])
    own = owners.seq == seq
    last = _last_column(one, own, length, rows, int(at))
    own &= owners.position < last
    others = sorted(set(owners.seq[(owners.seq != seq) & (owners.seq != NONE)].tolist()))
    column = torch.where(own, owners.position, 0)
    for index, other in enumerate(others):
        column = torch.where(owners.seq == other, last + index, column)
    rest = (owners.seq == NONE) | ((owners.seq == seq) & ~own)  # the latter have no weight
    column = torch.where(rest, last + len(others), column)
    off = ~((one.weights[rows, at] - one.expected[rows, at]).abs() <= one.bound[rows, at])
    measured, expected, wrong = (
        torch.zeros(len(rows), last + len(others) + 1, dtype=torch.float64).index_add_(
            1, column, of
        )
        for of in (one.weights[rows, at], one.expected[rows, at], off.double())
    )
    return KeyColumns(
        measured=measured,
        expected=expected,
        wrong=wrong > 0,
        rows=setup.rows[rows],
        seq=seq,
        head=head,
        positions=length,
        tail=last - length,
        foreign=(*(f"seq {other}" for other in others), "unmapped"),
        context=context,
        block_size=setup.call.block_size,
        tiles=tile_edges(
            one, setup.kernels[int(rows[0])], context, int(setup.cached[rows[0]]), length
        ),
    )


def _last_column(one: XRay, own: torch.Tensor, length: int, rows: torch.Tensor, head: int) -> int:
    """Return the number of columns of a sequence: to the end of its last block, and of the last slot of its
    blocks that has a weight."""
    size = one.setup.call.block_size
    weighed = own & (one.weights[rows, head].nan_to_num(0.0) != 0).any(0)
    last = int(one.owners.position[weighed].max()) + 1 if bool(weighed.any()) else length
    most = int(one.owners.position[own].max()) + 1 if bool(own.any()) else length
    return min(most, -(-max(last, length) // size) * size)


def _worst(one: XRay) -> tuple[int, int]:
    """Return the indices of the row and the head with the largest difference; NaN counts as the largest."""
    off = (one.weights - one.expected).abs().nan_to_num(torch.inf).amax(-1)
    row, head = divmod(int(off.argmax()), off.shape[1])
    return row, head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawPoints:
    """Expected and measured logarithms of weights, each [n]: those of wrong rows and heads if ``wrong``."""

    expected: torch.Tensor
    measured: torch.Tensor
    wrong: torch.Tensor


def law_points(one: XRay, most: int = 4000) -> LawPoints:
    """Return at most about ``most`` pairs of weights above the absolute precision."""
    floor = 4 * one.setup.fixed[:, None, None]
    used = (one.expected > floor) & (one.weights > floor)
    wrong = one.wrong[..., None].expand_as(used)[used]
    step = max(1, len(wrong) // most)
    return LawPoints(
        expected=one.expected[used].log()[::step],
        measured=one.weights[used].log()[::step],
        wrong=wrong[::step],
    )


# Which value elements an output holds: KV head, element, and whether the output is linear in V.

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
    codes = random_codes(values_shape(found.call))
    once, twice = (
        _some(run(with_values(found.call, setup.target, times * codes)), setup, found)[rows]
        for times in (1, 2)
    )
    bound = 4 * residual_bound(setup, found)[rows] + 0.02 * once.abs()
    if not bool(((twice - 2 * once).abs() <= bound).all()):
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


def _powers(count: int) -> Iterator[int]:
    """Yield the place values of the digits that tell ``count`` codes apart."""
    power = 1
    while power < count:
        yield power
        power *= _BASE


def _ran(setup: AttentionSetup, found: Measurement, run: Run, code: torch.Tensor) -> torch.Tensor:
    """Return the output if the values of every slot are ``code``, over the sums.

    ``code``: [num_kv_heads, head_size], or a shape that broadcasts to it.
    """
    call = found.call
    codes = code.to(torch.int8).expand(values_shape(call)).contiguous()
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
    place = torch.zeros(len(setup.rows), len(setup.heads))
    for power in _powers(kv_heads):
        outputs = _ran(setup, found, run, (torch.arange(kv_heads) // power % _BASE)[:, None])
        place = place + outputs.median(-1).values.nan_to_num(0.0).round() * power
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
    size, of_value = setup.width, torch.arange(found.call.query.shape[2])
    place = torch.zeros(len(setup.rows), len(setup.heads), size)
    for power in _powers(size):
        outputs = _ran(setup, found, run, of_value // power % _BASE)
        place = place + outputs.nan_to_num(0.0).round() * power
    seen = place[rows].flatten(0, 1).median(0).values.long()
    own = torch.arange(size)
    if torch.equal(seen, own) or not _are_indices(seen, size):
        return None, ""
    off = torch.nonzero(seen != own).flatten()
    shift = (seen - own)[off].unique()
    pairs = ", ".join(f"{d} holds {int(seen[d])}" for d in off[:4].tolist())
    how = f"the one {int(shift[0]):+d}" if len(shift) == 1 else f"others, {pairs}"
    words = (
        f"elements {numbers(off.tolist())} of the output hold another element of the values: {how}"
    )
    return seen, words


def _are_indices(seen: torch.Tensor, count: int) -> bool:
    """Answer whether decoded codes are possible; a kernel that reads other memory gives any number."""
    return bool(((seen >= 0) & (seen < count)).all())
