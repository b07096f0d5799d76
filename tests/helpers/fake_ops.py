"""A vLLM with made-up ops: a checkout whose op modules are given as text."""

from pathlib import Path

from attnlab.kernels.vllm.source import Source

_HEAD = "import torch\nfrom vllm.triton_utils import tl, triton\n"


def made(folder: Path, version: str = "0.33.0", **modules: str) -> Source:
    """Return a vLLM in ``folder`` with the given modules of ops, and a version in its metadata."""
    ops = folder / "vllm/v1/attention/ops"
    ops.mkdir(parents=True, exist_ok=True)
    (folder / "PKG-INFO").write_text(f"Version: {version}\n")
    for name, text in modules.items():
        (ops / f"{name}.py").write_text(_HEAD + text)
    return Source(kind="checkout", path=folder, root=folder, version=version)
