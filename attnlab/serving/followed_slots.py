"""FollowedSlots: the cache slots of the layers, from its writes to its reads."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from attnlab.serving.batch import ReadArguments, Step
from attnlab.serving.layer_call import KnownLayer
from attnlab.serving.layers import Layers
from attnlab.serving.ownership import Ownership
from attnlab.serving.requests import Integers, Request
from attnlab.serving.state import CaptureState


class FollowedSlots:
    """Passes the writes and reads of the layers to its Ownership, where they can be followed."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._layers = Layers()
        self._ownership: Ownership | None = None
        self._host: dict[Any, Integers] = {}

    def begin(self, layers: Layers, unchecked: str) -> None:
        """Begin with an empty cache; ``unchecked``: why slots cannot be followed, or ""."""
        self._layers = layers
        if unchecked:
            self.stop(unchecked)
            return
        self._ownership = Ownership(self._state.requests, self._state.rank)
        for group in {id(one): one for one in layers.groups.values()}.values():
            self._ownership.shadows.add_group(group.layers, group.num_slots, group.block_size)

    def guarded(self) -> AbstractContextManager[None]:
        """Run a part of the following: after an error, slots are not followed any more."""
        return self._state.guarded("slots", lambda: self.stop("slots, after an error in attnlab"))

    def stop(self, why: str) -> None:
        """Follow no slots from now on."""
        self._ownership = None
        self._state.tally.unchecked[why] += 1

    def tokens_of(
        self, step: int, requests: list[Request], first: Integers, counts: Integers
    ) -> Integers:
        """Return the numbers of the new tokens of a step; zeros if slots are not followed."""
        self._host = {}
        if self._ownership is None:
            return np.zeros(int(counts.sum()), np.int64)
        return self._ownership.tokens_of(step, requests, first, counts)

    def follows(self, known: KnownLayer) -> bool:
        """Answer whether the slots that a layer reads are followed."""
        if self._ownership is None or not known.is_decoder:
            return False
        group = self._layers.groups.get(known.reads)
        if group is not None and group.unchecked:
            self._state.tally.unchecked[group.unchecked] += 1
        return group is not None and not group.unchecked

    def wrote(self, known: KnownLayer, step: Step, slot_mapping: torch.Tensor) -> None:
        """Follow a layer's cache write."""
        if self.follows(known):
            assert self._ownership is not None
            found = self._ownership.wrote(known.name, step, self.host(slot_mapping))
            self._state.tally.observe(found)

    def read(self, known: KnownLayer, step: Step, reads: ReadArguments) -> None:
        """Check the slots that a layer reads."""
        if self.follows(known):
            assert self._ownership is not None
            self._state.tally.observe(self._ownership.read(known, step, reads))

    def read_by_metadata(self, known: KnownLayer, step: Step) -> None:
        """Check the slots that a layer reads by the batch's metadata, if its op is unknown."""
        common, size = self._state.metadata[known.name]
        reads = ReadArguments(
            block_table=self.host(common.block_table_tensor),
            seq_lens=self.host(common.seq_lens),
            query_lens=None,
            block_size=size,
            sliding_window=int(getattr(known.layer, "sliding_window", None) or 0),
        )
        self.read(known, step, reads)

    def follow_graph(self, step: Step) -> None:
        """Follow a step inside a full CUDA graph, in which Python does not run, by its metadata."""
        metadata = self._state.metadata
        layers = [known for known in self._layers if known.name in metadata]
        for known in layers:
            if known.reads == known.name:
                self.wrote(known, step, metadata[known.name][0].slot_mapping)
        for known in layers:
            self.read_by_metadata(known, step)

    def host(self, tensor: torch.Tensor) -> Integers:
        """Return an index tensor as an array; from a GPU it is copied once per step."""
        if tensor.device.type == "cpu":
            return tensor.detach().numpy().astype(np.int64)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self._host:
            self._host[key] = tensor.detach().cpu().numpy().astype(np.int64)
        return self._host[key]
