"""Write the script of a finding and run it on the ops of a source."""

import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from attnlab.case.case import Case
from attnlab.case.errors import Unsupported
from attnlab.case.platforms import PLATFORMS
from attnlab.checker.finding import Finding
from attnlab.kernels.triton.interpreter import load_triton
from attnlab.kernels.vllm.backend import Loaded, load_stock
from attnlab.kernels.vllm.source import Source
from attnlab.reports.upstream import write_reports
from helpers.forked import outcome_of

OPS_MODULES = (
    "chunked_prefill_paged_decode",
    "prefix_prefill",
    "triton_prefill_attention",
    "triton_unified_attention",
    "int4_per_token_head",
    "triton_decode_attention",
    "triton_merge_attn_states",
)


def written(folder: Path, case: Case, kind: str = "reads_unwritten_slots") -> Path:
    """Return the script of a finding at a Case."""
    found = Finding(op=case.op, kind=kind, case=case, evidence="seen", diagnosis="none")
    files = write_reports([found], folder / "out", "vllm 0")
    return next(file for file in files if file.suffix == ".py")


def script_outcome(
    script: Path,
    source: Source,
    load: Callable[[Source], Loaded] = lambda source: load_stock(source, PLATFORMS["sm_90"]),
) -> tuple[int, str]:
    """Run a script on the ops of a source; return its exit code and what it prints.

    The ops are offered as modules of an installed vLLM, on Triton's own interpreter unless ``load`` says
    otherwise.
    """

    load_triton(interpret=True)  # here and not in each copy of this process

    def run() -> None:
        _offer(source, load(source))
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")

    return outcome_of(run)


def _offer(source: Source, loaded: Loaded) -> None:
    """Make the ops importable as ``vllm``."""
    vllm, utils = ModuleType("vllm"), ModuleType("vllm.triton_utils")
    vllm.__version__, vllm.__path__, vllm.triton_utils = source.version, [], utils
    sys.modules |= {"vllm": vllm, "vllm.triton_utils": utils}
    for folder in source.ops_folders:
        for name in OPS_MODULES:
            with suppress(Unsupported):  # an op that the release lacks
                sys.modules[f"{folder.replace('/', '.')}.{name}"] = loaded.loader.load(name)
