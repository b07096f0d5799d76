"""The benchmark of the emulated device, on a small case."""

import pytest
from bench import ROCM_CASE, bench_rocm
from helpers.sources import sdist


@pytest.mark.releases
def test_figures_are_those_of_a_correct_run() -> None:
    """Every figure is positive, and the output is correct."""
    source = sdist("0.33.0")
    steps: list[str] = []
    small = ROCM_CASE.replace(num_heads=8, ctx_lens=(20,))
    figures = bench_rocm(source.path, small, on_step=steps.append)
    assert figures["source"] == "vllm 0.33.0"
    parts = ("first call", "", "checked")
    assert steps == [f"gqa {n}, {part}".removesuffix(", ") for n in (1, 8) for part in parts]
    assert set(figures["by_gqa"]) == {1, 8}
    for found in figures["by_gqa"].values():
        assert all(value > 0 for value in found.values())
        # N(0, 1) in float16; the error of a wrong kernel is at least 0.1
        assert found["greatest_error"] < 5e-3
