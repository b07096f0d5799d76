"""Keys that are missing, extra or weighted wrongly, and terms that the sum of the softmax has too much.

If the weights of some keys are multiplied by m, the output O becomes (O + (m - 1) p) / (1 + (m - 1) w),
with w the sum of their weights and p their part of O. This is linear in m, so each wrong cell gives its
own m by least squares, and the residual decides whether the rule of keys fits. For keys that a row must
not see, w is exp(score - log-sum-exp), and m - 1 is replaced by m.
"""

import dataclasses
from collections.abc import Sequence

import torch

from attnlab.defects.attention_inputs import score_error, scores_of
from attnlab.defects.problem import Problem
from attnlab.diagnosis.key_rules import KeyRule, key_rules
from attnlab.diagnosis.parts import Part, fits, is_over_determined, num_cells
from attnlab.diagnosis.pattern import Fact


def keys_fact(problem: Problem, worst: Sequence[Part], many: Sequence[Part]) -> Fact | None:
    """Find the simplest rule of keys that fits every wrong cell.

    ``worst``: a few parts, for the search; ``many``: those on which the fit is confirmed.
    """
    if not is_over_determined(many, fitted=1):
        return None
    weights = [_weights(part) for part in worst]
    all_weights: list[torch.Tensor] = []
    for rule in key_rules(problem):
        if _changes(worst, weights, rule) is None:
            continue
        all_weights = all_weights or [_weights(part) for part in many]
        changes = _changes(many, all_weights, rule)
        if changes is not None:
            return _fact(rule, changes, num_cells(many))
    return None


def _weights(part: Part) -> torch.Tensor:
    """Return exp(score - log-sum-exp) of all keys, also of those that a row must not see,
    [heads, rows, keys]; the sum over visible keys is 1, less the sink's weight."""
    every = torch.ones_like(part.inputs.visible)
    scores = scores_of(dataclasses.replace(part.inputs, visible=every))
    return (scores - _log_sum(part, scores)[..., None]).exp()


def _log_sum(part: Part, scores: torch.Tensor) -> torch.Tensor:
    """Return the correct log-sum-exp of each head and row, with the sink if any."""
    seen = scores.masked_fill(~part.inputs.visible, -torch.inf)
    log_sum = seen.logsumexp(-1)
    if part.inputs.sinks is None:
        return log_sum
    return torch.logaddexp(log_sum, part.inputs.sinks.to(log_sum.dtype)[:, None])


def _changes(
    parts: Sequence[Part], weights: Sequence[torch.Tensor], rule: KeyRule
) -> torch.Tensor | None:
    """Return by how much the multiplier of the keys changes in each clearly wrong cell, [n], or None if
    there is none or the rule does not fit a wrong cell."""
    found = []
    for part, weight in zip(parts, weights, strict=True):
        seen = part.inputs.visible
        chosen = rule.members(part.seq, part.inputs.position[:, None]) & (
            ~seen if rule.hidden else seen
        )
        some = weight * chosen
        total = some.sum(-1).transpose(0, 1)[..., None]  # [rows, heads, 1]
        partial = (some @ part.inputs.value.transpose(0, 1)).transpose(0, 1)
        direction, difference = total * part.output - partial, part.correct - part.output
        change = (direction * difference).sum(2) / direction.square().sum(2).clamp(min=1e-300)
        normaliser = 1 + change[..., None] * total
        residual = difference - change[..., None] * direction
        is_possible = (normaliser[..., 0] > 1e-9) & (change > (-0.1 if rule.hidden else -1.1))
        if not bool(is_possible[part.is_wrong].all()):
            return None
        residual = residual / normaliser.clamp(min=1e-9)
        if not fits(part, residual, _bound(part, weight, some, change)):
            return None
        found.append(change[part.is_clear])
    changes = torch.cat(found)
    return changes if len(changes) else None


def _bound(
    part: Part, weight: torch.Tensor, some: torch.Tensor, change: torch.Tensor
) -> torch.Tensor:
    """Return the rounding bound of the changed output, [rows, heads, head_size]; at least the correct
    one's. ``some``: the weights of the chosen keys."""
    changed = weight * part.inputs.visible + change.transpose(0, 1)[..., None] * some
    changed = changed.clamp(min=0.0)
    changed /= changed.sum(-1, keepdim=True).clamp(min=1e-300)
    value = part.inputs.value.transpose(0, 1)
    output = changed @ value
    bound = part.inputs.rounding.bound(changed, value, output, score_error(part.inputs))
    return torch.maximum(bound.transpose(0, 1), part.bound)


def _fact(rule: KeyRule, changes: torch.Tensor, count: int) -> Fact:
    multipliers = changes if rule.hidden else 1 + changes
    middle = float(multipliers.median())
    low, high = (float(multipliers.quantile(at)) for at in (0.02, 0.98))
    values = {"keys": rule.text, "multiplier": middle, "low": low, "high": high}
    return Fact(
        kind="keys",
        where="every wrong row and head",
        what=_text(rule, multipliers, low, middle, high),
        values=values,
        accounts_for=count,
    )


def _text(rule: KeyRule, multipliers: torch.Tensor, low: float, middle: float, high: float) -> str:
    """Return what happens to the keys of a rule, in words."""

    def is_near(value: float) -> bool:
        return bool(((multipliers - value).abs() < 0.1).double().mean() > 0.9)

    if rule.hidden:
        if is_near(1.0):
            return f"{rule.text} are attended to, although they must not be"
        return f"{rule.text} are attended to, with {low:.3g} to {high:.3g} times the weight of a visible key"
    if is_near(0.0):
        return f"{rule.text} are missing"
    if is_near(2.0):
        return f"{rule.text} count twice"
    if high - low < 0.1 * abs(middle):
        return f"the weights of {rule.text} are multiplied by {middle:.3g}"
    return (
        f"the weights of {rule.text} are multiplied by factors from {low:.3g} to {high:.3g} that differ "
        "between rows or heads"
    )


def sum_fact(many: Sequence[Part]) -> Fact | None:
    """Find the constant that the sum of the softmax has too much, if every wrong cell is a multiple of the
    correct output. The sum counts exp(score), so one more key with score 0 and value 0 adds 1."""
    terms = []
    for part in many:
        squares = part.correct.square().sum(2).clamp(min=1e-300)
        factor = (part.output * part.correct).sum(2) / squares
        limit = part.bound * factor.abs().clamp(min=1.0)[..., None]
        is_multiple = fits(part, part.output - factor[..., None] * part.correct, limit)
        if not is_multiple or bool((factor[part.is_wrong] <= 0).any()):
            return None
        log_sum = _log_sum(part, scores_of(part.inputs)).transpose(0, 1)
        weight = (factor * part.bound.norm(dim=2) / squares.sqrt()).reciprocal()
        added = (1 / factor - 1) * log_sum.exp()
        terms.append(torch.stack([added, weight / log_sum.exp()])[:, part.is_wrong])
    added, weight = torch.cat(terms, 1)
    constant = float((added * weight.square()).sum() / weight.square().sum())
    if abs(constant) < 1e-6 or not bool(((added - constant).abs() * weight <= 3).all()):
        return None
    what = f"the sum of the softmax is {'larger' if constant > 0 else 'smaller'} by {abs(constant):.3g}"
    if constant > 0 and abs(constant - round(constant)) < 0.02 * constant:
        count = round(constant)
        keys = "one more key" if count == 1 else f"{count} more keys"
        what += f", as {keys} with score 0 and value 0 would make it"
    return Fact(
        kind="sum",
        where="every wrong row and head",
        what=what,
        values={"added": constant},
        accounts_for=num_cells(many),
    )
