"""attnlab bench: the figures of planted defects, and the sheets of all figures."""

import pytest
from helpers.commands import document, printed

from attnlab.cli.bench import sheets
from attnlab.show.sheets import plain


def test_bench_diagnose(capsys):
    argv = ["bench", "diagnose", "--trials", "2", "--seed", "4"]
    found = document(capsys, argv, 0)
    assert (found["trials"], found["sound"], found["seed"]) == (2, 2, 4)
    text = printed(capsys, argv, 0)
    assert f"{found['top_1']:.1%}" in text


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
            sheets.speed(SPEED),
            ["1.25", "101", "31%", "0.125", "0.062", "50%", "52%", "2.75", "22.0", "9.5", "3.33"],
        ),
        (sheets.interpreter(INTERPRETER), ["60.00", "20.00", "10.00", "6.0", "3.0", "1.5e-05"]),
        (
            sheets.rocm({"source": "vLLM", "threads": 2, "by_gqa": {8: GROUP}}),
            ["gqa 8", "1.1", "2.2", "3.3", "4.4", "5.5", "6.6"],
        ),
    ],
    ids=["speed", "interpreter", "rocm"],
)
def test_a_sheet_has_every_figure(sheet, figures):
    assert [figure for figure in figures if figure not in plain(sheet)] == []
