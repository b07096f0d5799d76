"""The benchmark: the figures of planted defects, and the sheets of all figures."""

import json

import bench
import pytest

from attnlab.show.sheets import plain


def test_bench_diagnose(capsys, tmp_path):
    """A trial depends on its index alone, so that any engine gives the same; a store has it once."""
    argv = ["diagnose", "--trials", "2", "--seed", "4"]
    documents = []
    for more in (["--out", str(tmp_path)], ["--engine", "local:1"]):
        assert bench.main([*argv, *more, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    found, other = documents
    assert (found["trials"], found["sound"], found["seed"]) == (2, 2, 4)
    times = ("median_seconds", "most_seconds")
    assert {**found, **dict.fromkeys(times)} == {**other, **dict.fromkeys(times)}
    assert bench.main([*argv, "--out", str(tmp_path)]) == 0
    assert f"{found['top_1']:.1%}" in capsys.readouterr().out


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


SPEED = {
    "reference": {"seconds": 1.25, "matmul_gflops": 101.0, "share": 0.31},
    "fill": {
        "seconds": 0.125,
        "clone_seconds": 0.0625,
        "share": 0.5,
        "tokens_seconds": 0.02,
        "tokens_copy_seconds": 0.01,
        "tokens_share": 0.52,
        "token_loop_seconds": 2.75,
        "times_faster": 22.0,
    },
    "stage_table": {"seconds": 9.5},
    "peak_memory_gib": 3.33,
}
INTERPRETER = {
    "source": "vLLM 0.33.0",
    "processes": 2,
    "stock_seconds": 60.0,
    "one_process_seconds": 20.0,
    "seconds": 10.0,
    "greatest_error": 1.5e-5,
}
GROUP = {
    "first_s": 1.1,
    "seconds": 2.2,
    "all_cores_s": 3.3,
    "checked_s": 4.4,
    "times_slower": 5.5,
    "greatest_error": 6.6,
}


@pytest.mark.parametrize(
    ("sheet", "figures"),
    [
        (
            bench.speed_sheet(SPEED),
            ["1.25", "101", "31%", "0.125", "0.062", "50%", "52%", "2.75", "22.0", "9.5", "3.33"],
        ),
        (
            bench.interpreter_sheet(INTERPRETER),
            ["60.00", "20.00", "10.00", "6.0", "3.0", "1.5e-05"],
        ),
        (
            bench.rocm_sheet({"source": "vLLM", "threads": 2, "by_gqa": {8: GROUP}}),
            ["gqa 8", "1.1", "2.2", "3.3", "4.4", "5.5", "6.6"],
        ),
    ],
    ids=["speed", "interpreter", "rocm"],
)
def test_a_sheet_has_every_figure(sheet, figures):
    assert [figure for figure in figures if figure not in plain(sheet)] == []
