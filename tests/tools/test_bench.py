"""The benchmark: the figures of planted defects, and bad input."""

import json

import bench
import pytest


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
