"""Diagnose a cache write: which slots are wrong, what they hold instead, and the line of the fault.

A cell is one KV head of one slot. The rules are tried in order, and each takes the wrong cells that it
reproduces: a token that was not written, a token in another token's slot, keys or values that were
exchanged or stored with another scale, another head of the same token.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attnlab.contracts.contract import Target
from attnlab.diagnosis.decision import check_output
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import Fact, Pattern, list_text
from attnlab.kernels import model as paged
from attnlab.lab.cache_write import ExpectedWrite, expected_write, numbers_of, scale_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import same_numbers

_SHOWN = 4  # slots in a text
_Scale = float | torch.Tensor
_KEPT = "is not written: the slot holds what was there before"


def diagnose_write(
    call: KernelCall, target: Target, *, output: torch.Tensor | None = None
) -> Diagnosis:
    """Diagnose the cache after a write. ``call.output`` has it slot by slot, as a cache write's output.

    Raises InvalidCall if ``output`` has another shape or dtype.
    """
    call = call.cpu()
    output = call.buffer if output is None else output.cpu()
    if call.output is None:
        call = dataclasses.replace(call, output=output)
    check_output(output, call.buffer)
    right = expected_write(call, target)
    difference = right.difference(output)
    wrong = (difference > right.bound).any(2)
    facts = []
    if bool(wrong.any()):
        found = _Found(
            call=call, target=target, right=right, output=output.view(right.dtype).double()
        )
        facts = [_place(call, right, difference, wrong), *_rules(found, wrong)]
    pattern = Pattern(facts=tuple(facts), wrong_cells=int(wrong.sum()))
    status = "described" if pattern.is_complete else "unexplained" if facts else "nothing wrong"
    slots = int(wrong.any(1).sum())
    return Diagnosis(
        status=status,
        pattern=pattern,
        wrong_rows=slots,
        wrong_heads=int(wrong.any(0).sum()),
        largest=float(difference[wrong].max()) if slots else 0.0,
        observed=_foreign(pattern, right.token),
        looked_at=(len(wrong), len(wrong)),
        unknown=_unknown(call, right),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """What the rules look at: the call, the correct cache, and the numbers of the stored one."""

    call: KernelCall
    target: Target
    right: ExpectedWrite
    output: torch.Tensor


def _place(
    call: KernelCall, right: ExpectedWrite, difference: torch.Tensor, wrong: torch.Tensor
) -> Fact:
    """Return where the cache is wrong."""
    slots = torch.nonzero(wrong.any(1)).flatten()
    worst = int(difference.masked_fill(~wrong[:, :, None], -1.0).flatten(1).amax(1).argmax())
    token = int(right.token[worst])
    owner = f"of token {token}" if token >= 0 else "of no token"
    text = (
        f"{len(slots)} of {len(wrong)} slots are wrong; the worst is {_slot(call, worst)}, {owner}, off by "
        f"{float(difference[worst].max()):.4g} as stored"
    )
    return Fact("slots", text, values={"slots": slots.tolist()})


def _foreign(pattern: Pattern, token: torch.Tensor) -> tuple[str, ...]:
    """Return in words how many slots of no token are wrong that no rule reproduces, if there are any.

    ``token``: the token of each slot, negative for none.
    """
    reproduced = {slot for fact in pattern.rules for slot in fact.values["slots"]}
    wrong = {slot for fact in pattern.of("slots") for slot in fact.values["slots"]}
    count = sum(int(token[slot]) < 0 for slot in wrong - reproduced)
    if not count:
        return ()
    slots = "1 slot that holds" if count == 1 else f"{count} slots that hold"
    return (f"{slots} none of its tokens changed",)


def _slot(call: KernelCall, slot: int) -> str:
    """Return a slot as text, with the numbers of the caller's cache."""
    size = call.block_size
    block = slot // size
    if call.block_ids is not None:
        block = int(call.block_ids[block])
    return f"slot {block * size + slot % size} (block {block}, offset {slot % size})"


def _rules(found: _Found, wrong: torch.Tensor) -> Iterator[Fact]:
    """Yield the rules that reproduce wrong cells; each cell belongs to one."""
    left = wrong.clone()
    for rule in (_not_written, _misplaced, _altered, _other_heads):
        for kind, what, cells in rule(found, left):
            slots = torch.nonzero(cells.any(1)).flatten().tolist()
            if slots:
                yield Fact(kind, what(slots), "", {"slots": slots}, int(cells.sum()))
                left = left & ~cells


_Rule = Iterator[tuple[str, Callable[[list[int]], str], torch.Tensor]]


def _not_written(found: _Found, left: torch.Tensor) -> _Rule:
    """Tokens whose slots hold what they held before the write.

    NaN that was decoded with a scale may also be what was stored.
    """
    right = found.right
    decides = ~right.before.isnan().all(2) | (not found.call.spec.coarse)
    same = _equal(found.output, right.before) & (right.token >= 0)[:, None] & left & decides

    def text(slots: list[int]) -> str:
        tokens = right.token[slots].sort().values.tolist()
        what = (
            "is not written: its slot holds"
            if len(tokens) == 1
            else "are not written: their slots hold"
        )
        return f"{list_text('token', tokens)} {what} what was there before"

    yield "not_written", text, same


def _misplaced(found: _Found, left: torch.Tensor) -> _Rule:
    """Slots that hold a token of another slot, or of none."""
    right = found.right
    tokens = {row.numpy().tobytes(): token for token, row in enumerate(right.stored)}
    held = {
        slot: tokens.get(found.output[slot].numpy().tobytes(), -1)
        for slot in torch.nonzero(left.any(1)).flatten().tolist()
    }
    held = {slot: token for slot, token in held.items() if token >= 0}
    cells = torch.zeros_like(left)
    cells[list(held)] = left[list(held)]

    def text(slots: list[int]) -> str:
        away = Counter(slot - int(right.slots[held[slot]]) for slot in slots)
        if len(away) == 1 and all(int(right.slots[held[slot]]) >= 0 for slot in slots):
            ((step, count),) = away.items()
            tokens = "1 token is" if count == 1 else f"{count} tokens are"
            away_by = "1 slot" if abs(step) == 1 else f"{abs(step)} slots"
            side = "after" if step > 0 else "before"
            return f"{tokens} {away_by} {side} the slot in slot_mapping"
        some = "; ".join(
            f"{_slot(found.call, slot)} holds token {held[slot]}" for slot in slots[:_SHOWN]
        )
        return f"tokens are in slots of others: {some}{'; …' if len(slots) > _SHOWN else ''}"

    yield "misplaced", text, cells


def _altered(found: _Found, left: torch.Tensor) -> _Rule:
    """Tokens in their slots, with keys or values stored in another way."""
    for kind, words, stored in _alternatives(found):
        full = found.right.before.clone()
        rows = torch.nonzero(found.right.slots >= 0).flatten()
        full[found.right.slots[rows]] = stored[rows]
        same = _equal(found.output, full) & (found.right.token >= 0)[:, None] & left
        yield kind, _tokens_text(words), same
        left = left & ~same


def _alternatives(found: _Found) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield other ways to store the tokens: kind, words, and the numbers, [num_tokens, heads, width]."""
    call, slots = found.call, found.right.slots
    format = paged.format_of(call, found.target)
    new = call.key[: len(slots)], call.value[: len(slots)]
    scales = scale_of(call, "k_scale", slots), scale_of(call, "v_scale", slots)

    def stored(tokens: Sequence[torch.Tensor], used: Sequence[_Scale]) -> torch.Tensor:
        halves = [numbers_of(one, scale, format) for one, scale in zip(tokens, used, strict=True)]
        return torch.cat(halves, 2)

    right = stored(new, scales)
    size = new[0].shape[2]
    zero = torch.zeros_like(right)
    before = torch.zeros_like(right)
    rows = torch.nonzero(slots >= 0).flatten()
    before[rows] = found.right.before[slots[rows]]
    parts = {"the key": slice(size), "the value": slice(size, None)}
    for (name, part), kind in zip(parts.items(), ("key_missing", "value_missing"), strict=True):
        for words, numbers in ((_KEPT, before), ("is stored as zeros", zero)):
            yield kind, f"{name} {words}", _with_part(right, numbers, part)
    yield "zeros", "zeros are stored", zero
    if new[0].shape == new[1].shape:
        yield "exchanged", "key and value are exchanged", stored(new[::-1], scales)
        yield "key_twice", "the key is stored as the value, too", stored((new[0], new[0]), scales)
        yield "value_twice", "the value is stored as the key, too", stored((new[1], new[1]), scales)
    if format.is_fp8:
        for kind, words, used in _scale_changes(*scales):
            yield kind, words, stored(new, used)


def _with_part(stored: torch.Tensor, numbers: torch.Tensor, part: slice) -> torch.Tensor:
    """Return stored tokens with other numbers in their keys or their values."""
    changed = stored.clone()
    changed[..., part] = numbers[..., part]
    return changed


def _scale_changes(k: _Scale, v: _Scale) -> tuple[tuple[str, str, tuple[_Scale, _Scale]], ...]:
    """Return wrong scales of keys and values: kind, words, and the two numbers to divide by."""
    ignored, multiplied = "scale_ignored", "scale_multiplied"
    return (
        ("scales_exchanged", "k_scale and v_scale are exchanged", (v, k)),
        (ignored, "k_scale is not applied", (1.0, v)),
        (ignored, "v_scale is not applied", (k, 1.0)),
        (ignored, "neither scale is applied", (1.0, 1.0)),
        (multiplied, "k_scale multiplies instead of dividing", (1 / k, v)),
        (multiplied, "v_scale multiplies instead of dividing", (k, 1 / v)),
        (multiplied, "both scales multiply instead of dividing", (1 / k, 1 / v)),
        ("scale_of_keys", "values are divided by k_scale", (k, k)),
        ("scale_of_values", "keys are divided by v_scale", (v, v)),
    )


def _other_heads(found: _Found, left: torch.Tensor) -> _Rule:
    """Heads that hold another head of the same token."""
    right = found.right
    heads = left.shape[1]
    for step in range(1, heads):
        moved = torch.roll(right.numbers, step, 1)
        same = _equal(found.output, moved) & (right.token >= 0)[:, None] & left
        text = (
            f"head h holds head h − {step}"
            if step <= heads // 2
            else f"head h holds head h + {heads - step}"
        )
        yield "heads", _tokens_text(text), same
        left = left & ~same


def _tokens_text(what: str) -> Callable[[list[int]], str]:
    """Return the function that says of how many tokens something is true."""
    return lambda slots: f"{len(slots)} token{'s' if len(slots) > 1 else ''}: {what}"


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which cells of two caches are equal, [num_slots, num_kv_heads]; NaN equals NaN."""
    return same_numbers(one, other).all(2)


def _unknown(call: KernelCall, right: ExpectedWrite) -> list[str]:
    """Return what a diagnosis of a write cannot conclude."""
    found = ["whether slot_mapping names the right slots: it is taken as given"]
    several = int(right.bound.isinf().flatten(1).any(1).sum())
    if several:
        found.append(
            f"{several} slots that slot_mapping names more than once: the op may keep any token"
        )
    if call.block_ids is not None:
        found.append("blocks that slot_mapping does not name: they were not recorded")
    return found
