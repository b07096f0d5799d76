"""The benchmark: the figures of planted defects, and bad input."""

import json

import bench
import pytest
from bench import ROCM_CASE, bench_rocm
from helpers.sources import sdist


def test_bench_diagnose(capsys, tmp_path):
    """A trial depends on its index alone, so that any engine gives the same; a store has it once."""
    argv = ["diagnose", "--trials", "2", "--seed", "4"]
    documents = []
    for more in (["--out", str(tmp_path)], ["--engine", "local:1"]):
        assert bench.main([*argv, *more]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    found, other = documents
    assert (found["trials"], found["sound"], found["seed"]) == (2, 2, 4)
    times = ("median_seconds", "most_seconds")
    assert {**found, **dict.fromkeys(times)} == {**other, **dict.fromkeys(times)}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["diagnose", "--trials", "0"], "trials must be"),
        (["diagnose", "--seed", "-1"], "seed must be"),
        (["diagnose", "--source", "x"], "source must not"),
        (["diagnose", "--rocm"], "rocm must not"),
        (["--source", "/no/such"], "source must be"),
        (["--rocm", "--source", "/no/such"], "source must be"),
        (["--engine", "local"], "engine must not"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, text):
    assert bench.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"bench: {text}")


# The benchmark of the emulated device, on a small case.


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
