"""Recorded: one call as it was recorded, before it is converted to a KernelCall."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.recorder.argument_names import Reading
from attnlab.recorder.cache_writes import write_of_reading
from attnlab.recorder.comparisons import Comparison
from attnlab.recorder.reading import call_of_reading
from attnlab.recorder.snapshot import each_block_once
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import Origin


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """A recorded call.

    - ``reading``: its arguments, with copies of all tensors; ``op``, ``layout``: what describes them.
    - ``is_write``: whether it is a cache write.
    - ``writes``: during the call, the caller's tensors that it writes.
    - ``rejection``: the error that the op raised, or "".
    """

    reading: Reading
    op: str | None
    layout: str | None
    origin: Origin
    writes: dict[str, Any] = field(default_factory=dict)
    rejection: str = ""
    is_write: bool = False
    _call: KernelCall | None = None

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Return the copies of what the call wrote: its output, or both caches."""
        names = ("key_after", "value_after") if self.is_write else ("output",)
        found = [self.reading.fields.get(name) for name in names]
        return [one for one in found if one is not None]

    def shaped(self, comparison: Comparison) -> Iterator[Comparison]:
        """Yield a comparison as it is, and as one in the output's shape if the op returned another shape."""
        yield comparison
        result, sizes = self.reading.result, [one.numel() for one in self.outputs]
        if result is None or comparison.actual.numel() not in sizes:
            return
        actual, expected = (result(one)[0] for one in (comparison.actual, comparison.expected))
        if actual is not None and expected is not None:
            yield dataclasses.replace(comparison, actual=actual, expected=expected)

    @property
    def call(self) -> KernelCall:
        """Return the KernelCall; raise InvalidCall if the arguments contradict each other."""
        if self._call is None:
            self.reading.fields = each_block_once(self.reading.fields)
            if self.is_write:
                call = write_of_reading(self.reading, self.origin)
            else:
                call = call_of_reading(self.reading, self.origin, op=self.op, layout=self.layout)
            self._call = dataclasses.replace(call, rejection=self.rejection)
        return self._call
