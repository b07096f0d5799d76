"""Stand-ins for vLLM's runner, scheduler and layers, for tests of the capture without vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from attnlab.serving.batch import KnownLayer, Request, Requests, Step
from attnlab.serving.slots import Ownership

BLOCK = 4


def known(name: str = "layers.0.attn", index: int = 0, reads: str = "") -> KnownLayer:
    """Return a decoder layer."""
    return KnownLayer(
        name=name,
        number=index,
        index=index,
        layer=None,
        impl=None,
        reads=reads or name,
        is_decoder=True,
    )


class Batches:
    """Makes the steps of a batch, and the slots of its tokens by the requests' blocks."""

    def __init__(self, layers: tuple[str, ...] = ("layers.0.attn",), num_blocks: int = 16) -> None:
        self.requests = Requests()
        self.ownership = Ownership(self.requests)
        self.ownership.shadows.add_group(layers, num_blocks * BLOCK, BLOCK)
        self.blocks: dict[str, list[int]] = {}
        self._next = 0

    def request(self, name: str, tokens: list[int], blocks: list[int]) -> Request:
        """Add a request with its prompt and its blocks."""
        one = self.requests.add(name)
        one.set_prompt(np.array(tokens))
        self.blocks[name] = blocks
        return one

    def step(self, **lens: tuple[int, int]) -> Step:
        """Return a step: for each request its first new position and the end."""
        requests = [self.requests[name] for name in lens]
        first = np.array([a for a, _ in lens.values()])
        counts = np.array([b - a for a, b in lens.values()])
        for one, (start, end) in zip(requests, lens.values(), strict=True):
            one.set_tokens(start, np.arange(start, end) + 1000 * one.number)
        number, self._next = self._next, self._next + 1
        tokens = self.ownership.tokens_of(number, requests, first, counts)
        return Step(
            number=number,
            requests=requests,
            query_lens=counts,
            seq_lens=first + counts,
            tokens=tokens,
        )

    def slots(self, step: Step) -> np.ndarray:
        """Return the slot of each new token."""
        found = []
        for one, end, count in zip(step.requests, step.seq_lens, step.query_lens, strict=True):
            positions = np.arange(end - count, end)
            blocks = np.array(self.blocks[one.name])
            found.append(blocks[positions // BLOCK] * BLOCK + positions % BLOCK)
        return np.concatenate(found)

    def table(self, step: Step) -> np.ndarray:
        """Return the block table."""
        width = max(len(self.blocks[one.name]) for one in step.requests)
        rows = [self.blocks[one.name] for one in step.requests]
        return np.array([row + [0] * (width - len(row)) for row in rows])


def scheduled(lens: dict[str, int], **more: Any) -> Any:
    """Return a SchedulerOutput: new tokens by request."""
    return SimpleNamespace(
        **{
            "num_scheduled_tokens": lens,
            "total_num_scheduled_tokens": sum(lens.values()),
            "finished_req_ids": set(),
            "preempted_req_ids": set(),
            "scheduled_new_reqs": [],
            **more,
        }
    )


def new_request(name: str, tokens: list[int]) -> Any:
    """Return a NewRequestData."""
    return SimpleNamespace(req_id=name, prompt_token_ids=tokens, mm_features=[], lora_request=None)


class Builder:
    """A metadata builder."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        self.layer_names = layers
        self.kv_cache_spec = SimpleNamespace(block_size=BLOCK)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Return the metadata itself."""
        return common_attn_metadata


class Impl:
    """An implementation of attention without any op; ``calls`` counts its calls."""

    calls = 0

    def forward(self, layer: Any, query: Any, attn_metadata: Any) -> str:
        """Count the call."""
        type(self).calls += 1
        return "output"

    def do_kv_cache_update(self, layer: Any, key: Any, slot_mapping: Any) -> None:
        """Write nothing."""


def runner(layers: tuple[str, ...], impl_class: type = Impl, **parallel: int) -> Any:
    """Return a model runner whose cache has 16 blocks."""
    found = {
        name: SimpleNamespace(impl=impl_class(), attn_type="decoder", sliding_window=None)
        for name in layers
    }
    spec = SimpleNamespace(block_size=BLOCK)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))
    builder = type("OwnBuilder", (Builder,), {})(layers)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=found, cudagraph_mode=SimpleNamespace(name="FULL")
            ),
            parallel_config=SimpleNamespace(rank=0, **parallel),
            kv_transfer_config=None,
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=16),
        attn_groups=[[SimpleNamespace(metadata_builders=[builder])]],
        input_batch=SimpleNamespace(req_ids=[]),
        input_ids=torch.zeros(0, dtype=torch.int32),
        positions=torch.zeros(0, dtype=torch.int64),
        builder=builder,
        layers=found,
    )
