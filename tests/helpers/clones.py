"""Clones: folders with a copy of a release's attention ops, in which a fault is planted."""

from pathlib import Path

from attnlab.kernels.vllm.source import Source

_LINE = "query_abs_pos = context_len + query_pos[:, None]"
UNIFIED = "triton_unified_attention.py"
UNIFIED_FAULT = (UNIFIED, _LINE, f"{_LINE} + 1")  # every row is one position too far


def clone_of(source: Source, folder: Path, name: str = "", old: str = "", new: str = "") -> Path:
    """Copy the ops of a source to a folder, with a change of one of its files; return the folder."""
    own = folder / "vllm/v1/attention/ops"
    own.mkdir(parents=True)
    for file in (source.root / "vllm/v1/attention/ops").glob("*.py"):
        text = file.read_text()
        if file.name == name:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (own / file.name).write_text(text)
    return folder
