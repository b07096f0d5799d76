"""The source of the Triton example kernel, and a small Case for it."""

from pathlib import Path

from attnlab.case.case import Case

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_triton_attention.py"
TRITON = EXAMPLE.read_text()

CASE = Case(
    op="unified_attention",
    platform="sm_90",
    num_heads=4,
    num_queries_per_kv=2,
    head_size=32,
    block_size=16,
    sm_scale=0.2,
    query_lens=(1, 3, 1),
    ctx_lens=(20, 14, 40),
    distribution="normal",
    empty_slots="nan",
    output_init="nan",
    reference_dtype="float64",
    num_blocks=12,
)
SMALL = CASE.replace(num_heads=2, query_lens=(2,), ctx_lens=(20,), num_blocks=3, head_size=16)


def planted(folder: Path, old: str, new: str) -> tuple[Case, int]:
    """Return a Case for the example with a change, and the line of the change."""
    assert old in TRITON
    file = folder / "kernel.py"
    file.write_text(TRITON.replace(old, new, 1))
    line = 1 + TRITON[: TRITON.index(old)].count("\n")
    return SMALL.replace(backend=f"{file}:my_attention"), line
