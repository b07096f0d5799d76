"""Which releases of vLLM the emulated device runs, and what their kernels do: the README's table.

python tools/releases_rocm.py 0.9.2 0.11.2 0.33.0    fetches the sdist of each
"""

import sys

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import PLAIN, DeviceOptions, has_source
from attnlab.kernels.vllm.source import Source, fetch_sdist, find_source
from attnlab.lab.lab import Lab

CASE = Case(
    query_lens=(1, 1, 1),
    ctx_lens=(20, 299, 600),
    distribution="normal",
    num_heads=8,
    sm_scale=128**-0.5,
    output_init="nan",
)


def output(source: Source, case: Case, how: DeviceOptions = PLAIN) -> torch.Tensor:
    """Return what the release's kernel writes."""
    call = Lab().call(case)
    rocm_source.run(call, Target.of(case), source, how)
    return call.output


def facts(version: str) -> str:
    """Return a release's line of the table."""
    source = find_source(fetch_sdist(version))
    if not has_source(source.root):
        return "no csrc/rocm attention"
    words = []
    for group in (1, 8):
        case = CASE.replace(num_queries_per_kv=group)
        off = output(source, case) - Lab().reference(case)
        words.append(f"gqa {group}: {float(off.abs().max()):.1e}")
    nan = bool(output(source, CASE.replace(empty_slots="nan")).isnan().any())
    words.append(f"NaN in the tail of V {'reaches' if nan else 'does not reach'} the output")
    try:
        half = CASE.replace(head_size=64, sm_scale=0.125)
        output(source, half, DeviceOptions(trace_reads=True))
        words.append("heads of 64: clean")
    except AttnLabError as error:
        words.append(f"heads of 64: {str(error)[:60]}")
    return "; ".join(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for release in sys.argv[1:]:
        try:
            told = facts(release)
        except AttnLabError as error:
            told = str(error)
        print(f"{release}: {told}", flush=True)
