"""Recorded: one call as it was recorded, before it is converted to a KernelCall."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.recorder.argument_names import Reading
from attnlab.recorder.comparisons import Comparison
from attnlab.recorder.reading import call_of_reading
from attnlab.recorder.snapshot import each_block_once
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import Origin


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """A recorded call.

    - ``reading``: its arguments, with copies of all tensors; ``op``, ``layout``: what describes them.
    - ``writes``: during the call, the caller's tensors that it writes.
    - ``rejection``: the error that the op raised, or "".
    """

    reading: Reading
    op: str | None
    layout: str | None
    origin: Origin
    writes: dict[str, Any] = field(default_factory=dict)
    rejection: str = ""
    _call: KernelCall | None = None

    @property
    def output(self) -> torch.Tensor | None:
        """Return the copied output."""
        found: torch.Tensor | None = self.reading.fields.get("output")
        return found

    def shaped(self, comparison: Comparison) -> Iterator[Comparison]:
        """Yield a comparison as it is, and as one in the output's shape if the op returned another shape."""
        yield comparison
        result, output = self.reading.result, self.output
        if result is None or output is None or comparison.actual.numel() != output.numel():
            return
        actual, expected = (result(one)[0] for one in (comparison.actual, comparison.expected))
        yield dataclasses.replace(comparison, actual=actual, expected=expected)

    @property
    def call(self) -> KernelCall:
        """Return the KernelCall; raise InvalidCall if the arguments contradict each other."""
        if self._call is None:
            self.reading.fields = each_block_once(self.reading.fields)
            call = call_of_reading(self.reading, self.origin, op=self.op, layout=self.layout)
            self._call = dataclasses.replace(call, rejection=self.rejection)
        return self._call
