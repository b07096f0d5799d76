"""The emulated device as notebook 08 uses it: single calls of the ROCm source, with options and traces."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend
from attnlab.kernels.rocm.device import (
    ADAPTATIONS,
    FOLDER,
    KERNELS,
    SINGLE,
    Adaptation,
    DeviceOptions,
)
from attnlab.kernels.rocm.findings import Findings
from attnlab.kernels.vllm.source import Source, fetch_sdist, find_source
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from study.html_table import Table, table

SWAPPED_LANES = ("MFMA4_LAYOUT",)  # a planted fault: a matrix instruction with swapped rows
_REDUCE = "paged_attention_ll4mi_reduce_kernel"


@dataclass(frozen=True, slots=True)
class Emulated:
    """A vLLM with csrc/rocm, and a Lab that runs it on the emulated device."""

    source: Source
    lab: Lab

    @property
    def release(self) -> str:
        """Return the release whose rules the source follows."""
        return self.source.rules or "0.11.2"

    def adaptations(self) -> Table:
        """Return what is changed in the source text before a C++ compiler takes it."""
        rows = [(one.what, times, one.why) for one, times in times_adapted(self.source.root)]
        return table("change", "times", "reason", rows=rows)

    def output(
        self, case: Case, *, order: int = 0, faults: tuple[str, ...] = (), **changes: Any
    ) -> torch.Tensor:
        """Return what the kernel alone writes; ``changes`` replace arguments of the call.

        ``order`` 0 runs threads forwards, 1 backwards, and another number shuffles them.
        """
        call = dataclasses.replace(self.lab.call(case), **changes)
        options = DeviceOptions(order=order, faults=faults)
        backend.run(call, Target.of(case), self.source, options)
        return call.buffer

    def traced(self, case: Case) -> Findings:
        """Return what the kernels read, from a run that checks every access."""
        options = DeviceOptions(checked=True)
        return backend.run(self.lab.call(case), Target.of(case), self.source, options)

    def rounding(self, case: Case) -> float:
        """Return a bound of the rounding error over the batch.

        The kernel rounds to the dtype six times (weights, the sums of four warps, the output), each time
        by at most 2**-11 of attention over the magnitudes of the values; float32 sums add less than two more.
        """
        batch = self.lab.batch(case)
        sizes = reference(case, dataclasses.replace(batch, value=batch.value.abs()))
        return 8 * 2**-11 * float(sizes.max())

    def error(self, case: Case, output: torch.Tensor, row: int | None = None) -> float:
        """Return the largest absolute difference from the reference, of all rows or of one."""
        difference = (output.double() - self.lab.reference(case)).abs()
        return float((difference if row is None else difference[row]).max())

    def fits(self, case: Case, row: torch.Tensor) -> dict[str, float]:
        """Return how far a row is from query 0 attended over the cache of each sequence."""
        batch, found = self.lab.batch(case), {}
        scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
        for seq, seq_len in enumerate(case.lengths.seq_lens):
            first = batch.kv_start_loc[seq]
            key, value = (t[first : first + seq_len].double() for t in (batch.key, batch.value))
            scores = torch.einsum("hd,thd->ht", batch.query[0].double(), key) * scale
            attended = torch.einsum("ht,thd->hd", scores.softmax(1), value)
            found[f"cache of sequence {seq}"] = float((row.double() - attended).abs().max())
        return found

    def nan_in_tail(self, case: Case) -> dict[str, float]:
        """Return the share of outputs that NaN in the unused slots of the last block reaches, by cache."""
        call, cache = self.lab.call(case), self.lab.cache(case)
        block, offset = cache.provenance.slot(0, case.lengths.seq_lens[0] - 1)
        unused = slice(offset + 1, None)
        tails = {
            "key_cache": (block, ..., unused, slice(None)),
            "value_cache": (block, ..., unused),
        }
        reached = {}
        for name, where in tails.items():
            poisoned = getattr(call, name).clone()
            poisoned[where] = float("nan")
            output = self.output(case, **{name: poisoned})
            reached[name] = output.isnan().float().mean().item()
        return reached

    def reads_of_sequence(self, case: Case) -> tuple[Any, list[int]]:
        """Return the slot map of the reads of sequence 0, and its blocks; the Case traces reads."""
        memory, provenance = self.lab.run(case).memory, self.lab.cache(case).provenance
        if memory is None:
            raise InvalidCase("trace_reads must be true, got false", field="trace_reads")
        last = -(-case.lengths.seq_lens[0] // case.block_size)
        return memory.slot_map(provenance, seq=0), provenance.block_table[0, :last].tolist()

    def merged(self, case: Case) -> torch.Tensor:
        """Return which entries of the scratch each head's merge reads, [num_heads, entries] bool."""
        by_head = self.traced(case).reads[_REDUCE, "exp_sums"]
        return torch.stack([by_head[head].flatten() for head in range(case.num_heads)])


def emulated(source: str | None) -> Emulated:
    """Return the emulated device for a vLLM with csrc/rocm; without ``source``, the sdist of 0.11.2.

    Raises Unavailable if the source cannot be found or fetched.
    """
    found = find_source(Path(source) if source else fetch_sdist("0.11.2"))
    return Emulated(found, Lab(source=found.path))


def times_adapted(root: Path) -> list[tuple[Adaptation, int]]:
    """Return the adaptations that the vLLM at ``root`` needs, each with its number of matches."""
    folder = root / FOLDER
    file = next((folder / n for n in (SINGLE, KERNELS) if (folder / n).is_file()), None)
    if file is None:
        raise Unavailable(f"{root} has no {FOLDER} attention")
    text = file.read_text()
    counts = [(change, len(re.findall(change.pattern, text))) for change in ADAPTATIONS]
    return [(change, times) for change, times in counts if times]
