"""AddressMemory: the tensors of a call as flat memory, with the terms of their addresses.

An address is a sum of terms, each a feature times a stride: the address of an element of the value cache is
block × stride 0 + KV head × stride 1 + d × stride 2 + offset × stride 3.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import combinations

import torch

from attnlab.defects.edit import Defect, Rows, compute_of
from attnlab.diagnosis.divisions import divisions
from attnlab.kernels.triton.run_log import numbers_outside
from attnlab.lab.problem import AttentionInputs, Problem
from attnlab.tensors.cache import MOST_COPIED, to_flash
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import flash, strided

Term = tuple[str, str]  # feature, stride
_CONTIGUOUS = "contiguous"
Features = Mapping[str, torch.Tensor]

# Permutations of the query heads.
_BY_GROUP = "head % num_queries_per_kv * num_kv_heads + head // num_queries_per_kv"
_BY_KV_HEAD = "head % num_kv_heads * num_queries_per_kv + head // num_kv_heads"


def terms_of(*features: str) -> tuple[Term, ...]:
    """Return the terms of a tensor whose dimensions have these features."""
    return tuple((feature, f"stride {i}") for i, feature in enumerate(features))


ROW_TERMS = terms_of("row", "head", "d")
LSE_TERMS = terms_of("head", "row")
TOKEN_TERMS = terms_of("token", "KV head", "d")
_TRANSPOSABLE = (LSE_TERMS, ROW_TERMS, ROW_TERMS[:2], TOKEN_TERMS)
TABLE_TERMS = terms_of("sequence", "p // block_size")
_SPLIT_KEY_TERMS = terms_of("block", "KV head", "d // x", "p % block_size", "d % x")
_SPLIT_VALUE_TERMS = terms_of("block", "KV head", "d", "p % block_size")
_FLASH_TERMS = terms_of("block", "p % block_size", "KV head", "d")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMemory:
    """One tensor as the op gets it.

    - ``flat``: [n], the memory; ``base``: where the tensor begins in it.
    - ``terms``: of the address of an element. ``strides``: in elements, by name; ``contiguous``: those of a
      contiguous tensor of its shape, by name, if a kernel may take these for them.
    """

    flat: torch.Tensor
    base: int
    terms: tuple[Term, ...]
    strides: Mapping[str, int]
    contiguous: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: torch.Tensor, terms: tuple[Term, ...]) -> "TensorMemory":
        """Return the memory of a tensor on the CPU."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(
            flat=tensor.as_strided((size,), (1,), 0),
            base=int(tensor.storage_offset()),
            terms=terms,
            strides={f"stride {i}": stride for i, stride in enumerate(tensor.stride())},
            contiguous={
                f"{_CONTIGUOUS} stride {i}": tensor.shape[i + 1 :].numel()
                for i in range(tensor.dim())
            },
        )

    def read(self, address: torch.Tensor) -> torch.Tensor:
        """Return what a load gets from addresses relative to the base.

        Outside of the memory, those are the numbers that the interpreter loads there.
        """
        at, size = address + self.base, len(self.flat)
        stored = self.flat[at.clamp(0, size - 1)]
        return torch.where((at >= 0) & (at < size), stored, numbers_outside(at, stored.dtype))

    def after(
        self, numbers: torch.Tensor, to: torch.Tensor, at: torch.Tensor, is_moved: torch.Tensor
    ) -> torch.Tensor:
        """Return what is at the addresses ``at`` after numbers were written there, and then those of
        ``is_moved`` to the addresses ``to``; all relative to the base, each of the shape of ``numbers``.

        What is written outside of the memory is lost.
        """
        at, to = (one.expand(numbers.shape) + self.base for one in (at, to))
        flat, inside = self.flat.to(numbers.dtype, copy=True), (to >= 0) & (to < len(self.flat))
        for where, chosen in ((at, ~is_moved), (to, is_moved & inside)):
            flat[where[chosen]] = numbers[chosen]
        return flat[at]

    def full(self, number: float) -> "TensorMemory":
        """Return the memory with one number in all elements, in float64."""
        return dataclasses.replace(self, flat=torch.full((len(self.flat),), number).double())


@lru_cache(maxsize=4)
def memory_of(call: KernelCall) -> dict[str, TensorMemory]:
    """Return the tensors of a call by name, with the strides with which the lab gives them to the op.

    A cache that is too large to be copied is left out.
    """
    ran = strided(call)
    found = {"query": TensorMemory.of(ran.query, ROW_TERMS)}
    if call.spec.cache_layout is not None:
        found["block_table"] = TensorMemory.of(ran.block_table, TABLE_TERMS)
    if call.spec.cache_layout == "x-split":
        found["key_cache"] = TensorMemory.of(ran.key_cache, _SPLIT_KEY_TERMS)
        if not call.interleave_v:
            found["value_cache"] = TensorMemory.of(ran.value_cache, _SPLIT_VALUE_TERMS)
    elif call.spec.cache_layout == "flash" and call.key_cache.numel() <= MOST_COPIED:
        key, value = flash(*to_flash(call.key_cache, call.value_cache), call.strides)
        found["key_cache"] = TensorMemory.of(key, _FLASH_TERMS)
        found["value_cache"] = TensorMemory.of(value, _FLASH_TERMS)
    if call.spec.scores and call.spec.new_tokens_from != "cache":
        found["key"] = TensorMemory.of(ran.key, TOKEN_TERMS)
        found["value"] = TensorMemory.of(ran.value, TOKEN_TERMS)
    return found


def sizes_of(call: KernelCall) -> dict[str, int]:
    """Return the sizes by which an address may be multiplied by mistake."""
    return {
        "1": 1,
        "head_size": call.query.shape[2],
        "num_heads": call.query.shape[1],
        "num_kv_heads": call.key.shape[1],
        "block_size": call.block_size,
        "x": call.key_cache.shape[4],
    }


def key_features(
    problem: Problem, seq: int, positions: torch.Tensor, heads: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the features of keys and values: tensors that broadcast to [positions, heads, head_size]."""
    call = problem.call
    size, x = call.block_size, call.key_cache.shape[4]
    d, head, at = torch.arange(call.query.shape[2]), heads[:, None], positions[:, None, None]
    context = problem.seq_len(seq) - problem.query_len(seq)
    start = problem.row_starts()[seq]
    return {
        **_common(call, d, head),
        "sequence": torch.tensor(seq),
        "p": at,
        "p // block_size": at // size,
        "p % block_size": at % size,
        "d // x": d // x,
        "d % x": d % x,
        "new token of the sequence": at - context,
        "token": start + at - context,
        "first token of the sequence": torch.tensor(start),
    }


def row_features(
    problem: Problem, seq: int, tokens: torch.Tensor, heads: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the features of rows: tensors that broadcast to [tokens, heads, head_size]."""
    call, start = problem.call, problem.row_starts()[seq]
    at = tokens[:, None, None]
    return {
        **_common(call, torch.arange(call.query.shape[2]), heads[:, None]),
        "sequence": torch.tensor(seq),
        "row": start + at,
        "new token of the sequence": at,
        "first token of the sequence": torch.tensor(start),
    }


def _common(call: KernelCall, d: torch.Tensor, head: torch.Tensor) -> dict[str, torch.Tensor]:
    group, num_kv_heads = call.num_queries_per_kv, call.key.shape[1]
    return {
        "0": torch.tensor(0),
        "1": torch.tensor(1),
        "d": d,
        "head": head,
        "number of row": torch.tensor(len(call.query)),
        "number of token": torch.tensor(len(call.query)),
        "number of head": torch.tensor(call.query.shape[1]),
        "KV head": head // group,
        "KV head // 2": head // group // 2,
        "KV head // num_queries_per_kv": head // group // group,
        "head within its group": head % group,
        "head % num_kv_heads": head % num_kv_heads,
        _BY_GROUP: head % group * num_kv_heads + head // group,
        _BY_KV_HEAD: head % num_kv_heads * group + head // num_kv_heads,
    }


# What may be taken for a feature by mistake.
INSTEAD: Mapping[str, tuple[str, ...]] = {
    "block": ("p // block_size", "1", "0"),
    "KV head": (
        "head within its group",
        "head % num_kv_heads",
        "head",
        "KV head // 2",
        "KV head // num_queries_per_kv",
        "1",
        "0",
    ),
    "head": (
        "KV head",
        "head within its group",
        _BY_GROUP,
        _BY_KV_HEAD,
        "1",
        "0",
    ),
    "d": ("1", "0"),
    "slot": ("p", "block", "1", "0"),
    "part": ("head", "row", "1", "0"),
    "d // x": ("d % x", "d", "1", "0"),
    "d % x": ("d // x", "d", "1", "0"),
    "p % block_size": ("p // block_size", "p", "1", "0"),
    "p // block_size": ("p % block_size", "p", "1", "0"),
    "token": ("new token of the sequence", "first token of the sequence", "p", "1", "0"),
    "row": ("new token of the sequence", "first token of the sequence", "sequence", "1", "0"),
    "sequence": ("1", "0"),
}


# Address rules: a kernel reads queries, keys, values or the block table at wrong addresses.
#
# Each rule changes one term of one tensor's address. It is a Defect that is made for a call, so that it is
# compared with an output, and confirmed on further cases, as the catalogue's defects are.

FAMILY = "addresses"
# Stands for the terms of the block and of the slot in it together, which a kernel may compute as one.
SLOT = -2
_OF_SLOT = ("block", "p % block_size")
NOUNS = {
    "query": "queries",
    "key": "new keys",
    "value": "new values",
    "key_cache": "cached keys",
    "value_cache": "cached values",
    "block_table": "entries of the block table",
    "output": "the output",
    "lse": "the log-sum-exp",
    "prefix_output": "outputs of the prefix",
    "suffix_output": "outputs of the suffix",
    "prefix_lse": "log-sum-exps of the prefix",
    "suffix_lse": "log-sum-exps of the suffix",
}


@dataclass(frozen=True, slots=True)
class AddressRule:
    """Wrong addresses of the elements of some tensors.

    - ``name``: no other rule has it. ``text``: the rule as a clause.
    - ``terms``: of one tensor, the address is their sum, and always that of the first element without any.
    - ``instead``, ``shift``: of several tensors, whose addresses share a wrong number: the second feature is
      taken for the first, and positions are off by ``shift``.
    """

    tensors: tuple[str, ...]
    name: str
    text: str
    terms: tuple[Term, ...] = ()
    instead: tuple[str, str] = ("p", "p")
    shift: int = 0


def address_of(terms: Iterable[Term], features: Features, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return addresses relative to a tensor's begin.

    A feature may be a product, "head × number of row"; a stride that begins with "-" is subtracted.
    """
    found = features["0"]
    for feature, stride in terms:
        size = -sizes[stride[1:]] if stride[0] == "-" else sizes[stride]
        found = found + math.prod(features[part] for part in feature.split(" × ")) * size
    return found


def _braced(feature: str) -> str:
    return f"({feature})" if " " in feature else feature


def _term_text(right: str, feature: str, stride: str) -> str:
    """Return in words that a term has another feature or stride."""
    if feature == "0":
        return f"the term {right} is missing"
    factor = {"1": ""}.get(feature, f"{_braced(feature)} × ")
    return f"with {factor}{stride} in place of {right}"


def rules_of(
    tensor: str, memory: TensorMemory, sizes: Mapping[str, int], of_others: Iterable[str] = ()
) -> Iterator[AddressRule]:
    """Yield the rules of a tensor that differ by their numbers.

    ``sizes`` also has the strides; ``of_others`` are those of other tensors, which replace strides only.
    """
    verb = "is written to" if tensor in ("output", "lse") else "are read at"
    what = f"{NOUNS.get(tensor, tensor)} {verb} a wrong address"
    terms, others = memory.terms, {*of_others, *memory.contiguous}

    def rule(name: str, text: str, *wrong: Term) -> AddressRule:
        return AddressRule((tensor,), f"{tensor} {name}", f"{what}: {text}", wrong)

    yield rule("at 0", "always that of the first element")
    if terms in _TRANSPOSABLE:
        (first, _), (second, _) = terms[:2]
        inner, last = ("head_size", (("d", "1"),)) if len(terms) > 2 else ("1", ())
        text = f"as [{second}s, {first}s] in place of [{first}s, {second}s]"
        turned = (f"{second} × number of {first}", inner), (first, inner)
        yield rule("transposed", text, *turned, *last)
    for strides, text in _layouts(memory, sizes):
        pairs = zip(terms, strides, strict=True)
        yield rule(f"with {', '.join(strides)}", text, *((one, to) for (one, _), to in pairs))
    slot = [term for term in terms if term[0] in _OF_SLOT]
    for index in (*range(len(terms)), *([SLOT] if len(slot) > 1 else [])):
        own, stride = terms[index] if index != SLOT else ("slot", slot[1][1])
        kept = [one for one in terms if one not in (slot if index == SLOT else [terms[index]])]
        right, seen = f"{_braced(own)} × {stride}", {(own, sizes[stride])}
        options = [(feature, stride) for feature in INSTEAD.get(own, ())]
        options += [(own, other) for other in sizes if other != stride]
        options += [("1", other) for other in sizes if other not in others]
        for feature, other in options:
            key = ("0", 0) if feature == "0" else (feature, sizes[other])
            if key not in seen:
                seen.add(key)
                text = _term_text(right, feature, other)
                yield rule(f"term {index}: 1 × {feature} × {other}", text, *kept, (feature, other))
        text = f"the term {right} is subtracted"
        yield rule(f"term {index}: -1 × {own} × {stride}", text, *kept, (own, f"-{stride}"))


def _layouts(
    memory: TensorMemory, sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield strides of all terms that differ in two at least: those of a contiguous tensor and of other
    tensors with as many dimensions, and two that are exchanged."""
    own = [stride for _, stride in memory.terms]
    found = [[f"{name} {stride}" for stride in own] for name in (_CONTIGUOUS, *NOUNS)]
    for first, second in combinations(own, 2):
        exchanged = {first: second, second: first}
        found.append([exchanged.get(stride, stride) for stride in own])
    seen = set[tuple[int, ...]]()
    for strides in found:
        if not sizes.keys() >= set(strides) or f"{strides[0][:-1]}{len(own)}" in sizes:
            continue
        numbers = tuple(sizes[stride] for stride in strides)
        changed = sum(sizes[stride] != number for stride, number in zip(own, numbers, strict=True))
        if changed > 1 and numbers not in seen:
            seen.add(numbers)
            other = strides[0].removesuffix(" stride 0")
            pair = [one for one, new in zip(own, strides, strict=True) if one != new]
            text = f"{' and '.join(pair)} are exchanged"
            if other == _CONTIGUOUS:
                text = "as if the tensor were contiguous"
            elif other in NOUNS:
                text = f"with the strides of {NOUNS[other]}"
            yield tuple(strides), text


_CACHES, _NEW = ("key_cache", "value_cache"), ("key", "value")


def shared_rules(tensors: Iterable[str]) -> Iterator[AddressRule]:
    """Yield the rules that concern several of the tensors at once."""
    present = set(tensors)
    groups = [group for group in (_CACHES, _NEW, (*_CACHES, *_NEW)) if present >= set(group)]
    for group in groups:
        name, nouns = "+".join(group), [NOUNS[tensor] for tensor in group]
        what = f"{', '.join(nouns[:-1])} and {nouns[-1]} are read"
        features = ["KV head", *(["p % block_size"] if group == _CACHES else [])]
        features += ["token"] if group == _NEW else []
        for pair in ((feature, other) for feature in features for other in INSTEAD[feature]):
            own, other = pair
            text = f"{what} at wrong addresses: with {other} in place of {own}"
            yield AddressRule(group, f"{name}: {other} + 0 for {own}", text, instead=pair)
        for shift, sign in ((1, "+"), (-1, "-")) if group in (_CACHES, _NEW) else ():
            text = f"{what} from position p {sign} 1 in place of p"
            yield AddressRule(group, f"{name}: p + {shift} for p", text, shift=shift)


# Defects made of address rules: what rows attend to if a kernel reads at wrong addresses.


def address_defects(problem: Problem) -> list[Defect]:
    """Return the rules about reads that a call allows, each as a defect."""
    if not _is_modelled(problem.call):
        return []
    memory, found = memory_of(problem.call), list[AddressRule]()
    for tensor, one in memory.items():
        sizes = _sizes(problem.call, tensor)
        found += rules_of(tensor, one, sizes, [name for name in sizes if " stride" in name])
    return [_defect(one) for one in (*found, *shared_rules(memory))]


def _defect(rule: AddressRule) -> Defect:
    compute, is_shown = compute_of(partial(_inputs, rule)), partial(_is_shown, rule)
    return Defect(family=FAMILY, name=rule.name, text=rule.text, compute=compute, is_shown=is_shown)


def _is_shown(rule: AddressRule, problem: Problem, seqs: Sequence[int]) -> bool:
    """Answer whether rows of some sequences can show a rule.

    Without the term p // block_size of the block table, each key comes from one block. That needs a part of
    a sequence, however a kernel may divide it, in which the term has two values other than 0.
    """
    features = {feature for feature, _ in rule.terms}
    of_table = rule.tensors == ("block_table",)
    if not of_table or not features <= {"sequence", "0", "1"} or not features:
        return True
    size = problem.call.block_size
    return all(
        any(
            (tiles[-1][1] - 1) // size > max(1, tiles[0][0] // size)
            for seq in seqs
            for tiles in division.parts(problem, seq)
        )
        for division in divisions(problem)
        if division.merge
    )


def _is_modelled(call: KernelCall) -> bool:
    """Answer whether every scale is one number, and a cache is small enough to be copied."""
    scales = (call.k_scale, call.v_scale)
    is_plain = all(not isinstance(scale, torch.Tensor) or scale.numel() == 1 for scale in scales)
    return is_plain and call.key_cache.numel() <= MOST_COPIED and not call.spec.merges


def _sizes(call: KernelCall, tensor: str) -> dict[str, int]:
    """Return the strides of a tensor, other sizes, and the strides of other tensors, by name."""
    memory = memory_of(call)
    other = {
        "key_cache": "value_cache",
        "value_cache": "key_cache",
        "key": "value",
        "value": "key",
    }.get(tensor, "")
    one = memory[tensor]
    found = dict(one.strides) | sizes_of(call) | dict(one.contiguous)
    names = [other] * (other in memory) + [name for name in memory if name not in (tensor, other)]
    for name in names:
        found |= {f"{name} {stride}": size for stride, size in memory[name].strides.items()}
    return found | {f"output stride {i}": size for i, size in enumerate(call.buffer.stride())}


def _inputs(rule: AddressRule, at: Rows) -> AttentionInputs:
    """Return the inputs under a rule."""
    if rule.tensors == ("query",):
        features = row_features(at.problem, at.slice.seq, at.slice.tokens, at.heads)
        query = _read(rule, at.call, "query", features).double()
        return at.change(query=query.expand_as(at.inputs.query))
    return at.change(
        key=_keys(rule, at, at.inputs.key, "key"), value=_keys(rule, at, at.inputs.value, "value")
    )


def _keys(rule: AddressRule, at: Rows, right: torch.Tensor, name: str) -> torch.Tensor:
    """Return keys or values, [keys, heads, head_size], under a rule; ``name``: "key" or "value".

    ``right``: what must be read.
    """
    memory, cache, written = memory_of(at.call), f"{name}_cache", at.problem.written
    old, new = right[: at.cached], right[at.cached :]
    if len(old) and cache in memory and {cache, "block_table"} & {*rule.tensors}:
        features = _features(rule, at, at.keys[: at.cached])
        features["block"] = _read(rule, at.call, "block_table", features).long()
        features["slot"] = features["block"] * at.call.block_size + features["p % block_size"]
        stored = _read(rule, at.call, cache, features)
        if written.is_fp8:
            stored = written.decode(stored.contiguous()).double()
            stored = stored * at.call.number(f"{name[0]}_scale")
        old = stored.double().expand_as(old)
    if len(new) and name in rule.tensors and name in memory:
        features = _features(rule, at, at.keys[at.cached :])
        new = _read(rule, at.call, name, features).double().expand_as(new)
    return torch.cat([old, new])


def _features(rule: AddressRule, at: Rows, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the features of keys, with what a shared rule takes for one of them."""
    features = key_features(at.problem, at.slice.seq, positions + rule.shift, at.heads)
    own, other = rule.instead
    return {**features, own: features[other]}


def _read(rule: AddressRule, call: KernelCall, tensor: str, features: Features) -> torch.Tensor:
    """Return what is read of a tensor: at wrong addresses if the rule is about its terms."""
    memory = memory_of(call)[tensor]
    if rule.tensors == (tensor,):
        return memory.read(address_of(rule.terms, features, _sizes(call, tensor)))
    return memory.read(address_of(memory.terms, features, memory.strides))
