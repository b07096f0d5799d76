"""The attention layers and KV-cache groups of a vLLM model runner."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnlab.serving.layer_call import KnownLayer


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A KV-cache group: its layers, which share block tables and slot numbers.

    - ``num_slots``, ``block_size``: of the cache, as the block manager counts.
    - ``unchecked``: why slots of the group are not followed, or "".
    """

    layers: tuple[str, ...]
    num_slots: int
    block_size: int
    unchecked: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Layers:
    """The layers of a runner: by the id of their implementation, and their groups by layer name."""

    by_impl: dict[int, KnownLayer] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    builders: set[type] = field(default_factory=set)

    def __iter__(self) -> Iterator[KnownLayer]:
        return iter(self.by_impl.values())


def layers_of(runner: Any) -> Layers:
    """Return the layers of a runner whose cache is allocated (vLLM 0.11.2 to 0.33.0)."""
    found = Layers()
    context = runner.vllm_config.compilation_config.static_forward_context
    for name, layer in context.items():
        impl = getattr(layer, "impl", None)
        if impl is None:
            continue
        digits = re.search(r"\d+", name)
        found.by_impl[id(impl)] = KnownLayer(
            name=name,
            number=int(digits.group()) if digits else None,
            index=len(found.by_impl),
            layer=layer,
            impl=impl,
            reads=getattr(layer, "kv_sharing_target_layer_name", None) or name,
            is_decoder=str(getattr(layer, "attn_type", "decoder")).rpartition(".")[2].lower()
            == "decoder",
        )
    config = runner.kv_cache_config
    for group in config.kv_cache_groups:
        one = _group(group, config.num_blocks)
        found.groups |= dict.fromkeys(one.layers, one)
    for groups in runner.attn_groups:
        for attention_group in groups:
            builders = getattr(attention_group, "metadata_builders", None) or []
            found.builders |= {type(builder) for builder in builders}
            if getattr(attention_group, "kernel_block_stride", None):
                for name in attention_group.layer_names:
                    found.groups[name].unchecked = "slots of layers in a packed KV cache"
    return found


def _group(group: Any, num_blocks: int) -> Group:
    spec, unchecked = group.kv_cache_spec, ""
    kinds = {type(spec).__name__, *(type(s).__name__ for s in _members(spec))}
    for kind in kinds:
        if kind.startswith(("Chunked", "Cross", "Encoder", "Mamba")):
            unchecked = f"slots of layers with a {kind}"
    size = int(spec.block_size)
    return Group(
        layers=tuple(group.layer_names),
        num_slots=num_blocks * size,
        block_size=size,
        unchecked=unchecked,
    )


def _members(spec: Any) -> list[Any]:
    members = getattr(spec, "kv_cache_specs", None)
    return list(members.values()) if isinstance(members, dict) else []


def unchecked_slots(runner: Any) -> str:
    """Return why slots are not followed in this engine, or ""."""
    config, parallel = runner.vllm_config, runner.vllm_config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None:
        return "slots: a KV connector writes the cache, too"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            return f"slots: {name} is above 1"
    if getattr(parallel, "enable_dbo", False) or int(getattr(parallel, "num_ubatches", 1) or 1) > 1:
        return "slots: the batch is split into microbatches"
    return ""
