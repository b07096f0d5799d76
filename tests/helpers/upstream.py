"""Write the script of a finding and run it on the ops of a source."""

from pathlib import Path

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.reports.upstream import write_reports

# Offers the ops of a source as modules of an installed vLLM, on Triton's own interpreter, and runs a script.
RUNNER = """
import os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"
from types import ModuleType
from attnlab.kernels.vllm.source import find_source
from attnlab.kernels.vllm.backend import load_stock
from attnlab.case.platforms import PLATFORMS
source = find_source(sys.argv[2])
loaded = load_stock(source, PLATFORMS["sm_90"])
vllm = ModuleType("vllm"); vllm.__version__ = source.version; vllm.__path__ = []
vllm.triton_utils = sys.modules["vllm.triton_utils"] = ModuleType("vllm.triton_utils")
sys.modules["vllm"] = vllm
for folder in source.ops_folders:
    for name in ("chunked_prefill_paged_decode", "prefix_prefill", "triton_unified_attention",
                 "triton_decode_attention"):
        sys.modules[f"{folder.replace('/', '.')}.{name}"] = loaded.loader.load(name)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def written(folder: Path, case: Case, kind: str = "reads_unwritten_slots") -> Path:
    """Return the script of a finding at a Case."""
    found = Finding(op=case.op, kind=kind, case=case, evidence="seen", diagnosis="none")
    files = write_reports([found], folder / "out", "vllm 0")
    return next(file for file in files if file.suffix == ".py")
