"""Defects made of address rules: what rows attend to if a kernel reads at wrong addresses."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import ChangeInputs, Defect, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.address_memory import (
    Features,
    TensorMemory,
    key_features,
    memory_of,
    row_features,
    sizes_of,
)
from attnlab.diagnosis.address_rules import (
    FAMILY,
    OWN,
    AddressRule,
    Rule,
    SharedRule,
    rules_of,
    shared_rules,
)
from attnlab.diagnosis.rule_defect import rule_defect
from attnlab.tensors.call import KernelCall


def address_defects(problem: Problem) -> list[Defect]:
    """Return the rules about reads that a call allows, each as a defect."""
    if not _is_modelled(problem.call):
        return []
    memory = memory_of(problem.call)
    found = [
        _defect(rule.name, rule.text(one.terms), rule)
        for tensor, one in memory.items()
        for rule in rules_of(
            tensor, one, _sizes(problem.call, tensor), _of_others(problem.call, tensor)
        )
    ]
    return found + [_defect(one.name, one.text, one) for one in shared_rules(memory)]


def _defect(name: str, text: str, rule: Rule) -> Defect:
    return rule_defect(FAMILY, name, text, changing_inputs(_change(rule)))


def _is_modelled(call: KernelCall) -> bool:
    """Answer whether every scale is one number, and a cache is small enough to be copied."""
    scales = (call.k_scale, call.v_scale)
    is_plain = all(not isinstance(scale, torch.Tensor) or scale.numel() == 1 for scale in scales)
    return is_plain and call.key_cache.numel() <= 1 << 24 and call.spec.cache_layout is not None


def _sizes(call: KernelCall, tensor: str) -> dict[str, int]:
    """Return the strides of a tensor, other sizes, and those of other tensors that differ, by name."""
    memory = memory_of(call)
    other = {
        "key_cache": "value_cache",
        "value_cache": "key_cache",
        "key": "value",
        "value": "key",
    }.get(tensor, "")
    strides = dict(memory[tensor].strides)
    found = strides | sizes_of(call)
    rest = [name for name in memory if name not in (tensor, other)]
    for name in [other] * (other in memory) + rest:
        own = {f"{name} {stride}": size for stride, size in memory[name].strides.items()}
        found |= {text: size for text, size in own.items() if size not in found.values()}
    return found


def _of_others(call: KernelCall, tensor: str) -> list[str]:
    """Return the names of the strides of other tensors."""
    return [name for name in _sizes(call, tensor) if " stride" in name]


def _change(rule: Rule) -> ChangeInputs:
    """Return the change of the inputs under a rule."""
    tensors = rule.tensors if isinstance(rule, SharedRule) else (rule.tensor,)

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        memory = memory_of(problem.call)
        if tensors == ("query",):
            features = row_features(problem, row_slice.seq, row_slice.tokens, row_slice.heads)
            one = memory["query"]
            query = _read(one, _address(rule, problem, "query", one, features))
            return dataclasses.replace(inputs, query=query.expand_as(inputs.query))
        return dataclasses.replace(
            inputs,
            key=_keys(rule, tensors, problem, row_slice, inputs.key, ("key_cache", "key")),
            value=_keys(rule, tensors, problem, row_slice, inputs.value, ("value_cache", "value")),
        )

    return change


def _keys(
    rule: Rule,
    tensors: tuple[str, ...],
    problem: Problem,
    row_slice: RowSlice,
    right: torch.Tensor,
    names: tuple[str, str],
) -> torch.Tensor:
    """Return keys or values, [keys, heads, head_size], under a rule about some tensors.

    ``right``: what must be read. ``names``: the cache, and the tensor of new tokens.
    """
    memory, seq = memory_of(problem.call), row_slice.seq
    cached, length = problem.cached_len(seq), problem.seq_len(seq)
    old, new = right[:cached], right[cached:]
    cache, arguments = names
    if cached and cache in memory and (cache in tensors or tensors == ("block_table",)):
        features = _features(rule, problem, row_slice, torch.arange(cached))
        features["block"] = _blocks(rule, problem, features)
        size = problem.call.block_size
        features["slot"] = features["block"] * size + features["p % block_size"]
        scale = problem.call.number("k_scale" if cache == "key_cache" else "v_scale")
        address = _address(rule, problem, cache, memory[cache], features)
        old = _read_cache(problem, memory[cache], address, scale).expand_as(old)
    if length > cached and arguments in tensors and arguments in memory:
        features = _features(rule, problem, row_slice, torch.arange(cached, length))
        address = _address(rule, problem, arguments, memory[arguments], features)
        new = _read(memory[arguments], address).expand_as(new)
    return torch.cat([old, new])


def _features(
    rule: Rule, problem: Problem, row_slice: RowSlice, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the features of keys, with what a shared rule takes for one of them."""
    shift = rule.shift if isinstance(rule, SharedRule) else 0
    features = key_features(problem, row_slice.seq, positions + shift, row_slice.heads)
    if isinstance(rule, SharedRule):
        features[rule.feature] = features[rule.instead]
    return features


def _blocks(rule: Rule, problem: Problem, features: Features) -> torch.Tensor:
    """Return the block of each position; 0 for an entry outside of the block table."""
    table = memory_of(problem.call)["block_table"]
    block, inside = table.read(_address(rule, problem, "block_table", table, features))
    return torch.where(inside, block.long(), 0)


def _address(
    rule: Rule, problem: Problem, tensor: str, memory: TensorMemory, features: Features
) -> torch.Tensor:
    """Return the addresses of a tensor's elements: wrong ones if the rule is about its terms."""
    if isinstance(rule, AddressRule) and rule.tensor == tensor:
        return rule.address(memory.terms, features, _sizes(problem.call, tensor))
    return OWN.address(memory.terms, features, dict(memory.strides))


def _read(memory: TensorMemory, address: torch.Tensor) -> torch.Tensor:
    """Return what is read at addresses; the interpreter reads 0 outside of a tensor."""
    stored, inside = memory.read(address)
    return torch.where(inside, stored.double(), 0.0)


def _read_cache(
    problem: Problem, memory: TensorMemory, address: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the decoded elements of a cache at addresses; 0 outside of it."""
    stored, inside = memory.read(address)
    if problem.written.is_fp8:
        read = problem.written.decode(stored.contiguous()).double() * scale
    else:
        read = stored.double()
    return torch.where(inside, read, 0.0)
