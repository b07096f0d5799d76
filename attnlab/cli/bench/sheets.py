"""Sheets of the figures that ``attnlab bench`` measures."""

from typing import Any

from attnlab.show.sheets.sheet import Grid, Lines, Row, Sheet, Value, Words


def speed(figures: dict[str, Any]) -> Sheet:
    """Return the speed and the peak memory of the lab, each with its yardstick."""
    reference, fill = figures["reference"], figures["fill"]
    rows: list[Row] = [
        [
            "reference, all heads",
            f"{reference['seconds']:.2f}",
            f"float32 matmul at {reference['matmul_gflops']:.0f} GFLOP/s",
            f"{reference['share']:.0%} of its rate, causal operations only",
        ],
        [
            "create and fill the cache",
            f"{fill['seconds']:.3f}",
            f"clone the cache: {fill['clone_seconds']:.3f} s",
            f"{fill['share']:.0%} of its bandwidth",
        ],
        [
            "write the tokens only",
            f"{fill['tokens_seconds']:.3f}",
            f"copy the same bytes: {fill['tokens_copy_seconds']:.3f} s",
            f"{fill['tokens_share']:.0%} of its bandwidth",
        ],
        [
            "create and fill the cache",
            f"{fill['seconds']:.3f}",
            f"loop over tokens and blocks: {fill['token_loop_seconds']:.2f} s",
            f"{fill['times_faster']:.1f} times faster",
        ],
        ["table of stages", f"{figures['stage_table']['seconds']:.1f}", "", ""],
    ]
    peak = f"peak memory {figures['peak_memory_gib']:.2f} GiB"
    columns = ["task", "seconds", "yardstick in the same run", "ratio"]
    return _sheet("speed and memory of the lab", columns, rows, peak)


def interpreter(figures: dict[str, Any]) -> Sheet:
    """Return the time of the decode kernel under the interpreter, with and without the lab's launcher."""
    stock = figures["stock_seconds"]
    rows: list[Row] = [
        [launcher, f"{figures[name]:.2f}", f"{stock / figures[name]:.1f}"]
        for launcher, name in (
            ("Triton's own", "stock_seconds"),
            ("the lab's, 1 process", "one_process_seconds"),
            (f"the lab's, {figures['processes']} processes", "seconds"),
        )
    ]
    head = f"decode kernel at seed size, {figures['source']}"
    error = f"largest error of the decode rows {figures['greatest_error']:.3g}"
    return _sheet(head, ["launcher", "seconds", "times faster"], rows, error)


def rocm(figures: dict[str, Any]) -> Sheet:
    """Return the time of the decode kernel on the emulated device, plain and checked."""
    names = ("first_s", "seconds", "all_cores_s", "checked_s", "times_slower", "greatest_error")
    rows: list[Row] = [
        [f"gqa {group}", *(f"{found[name]:.2g}" for name in names)]
        for group, found in figures["by_gqa"].items()
    ]
    columns = ["GQA ratio", "first call", "1 core", f"{figures['threads']} threads"]
    columns += ["checked", "times slower", "largest error"]
    head = f"one decode of 930 tokens, 64 heads, {figures['source']} csrc/rocm; seconds"
    return _sheet(head, columns, rows)


def diagnosis(figures: dict[str, Any]) -> Sheet:
    """Return how often the diagnosis of planted defects is right."""
    named, without = figures["named"], figures["without"]
    facts: dict[str, Value] = {
        "visible planted defects": figures["trials"],
        "distinguishable from all others": figures["distinguishable"],
        "named first, of the distinguishable": f"{figures['top_1']:.1%}",
        "false explanations": len(figures["false_explanations"]),
        "answers": ", ".join(f"{name} {n}" for name, n in named.items()),
        "answers without the planted defect in the catalogue": ", ".join(
            f"{name} {n}" for name, n in without.items()
        ),
        "sound runs": figures["sound"],
        "false alarms in sound runs": len(figures["alarms"]),
        "seconds, median": f"{figures['median_seconds']:.2f}",
        "seconds, maximum": f"{figures['most_seconds']:.2f}",
    }
    rows: list[Row] = [[name, Words(str(value))] for name, value in facts.items()]
    return _sheet("diagnosis of planted defects", ["figure", "value"], rows)


def _sheet(head: str, columns: list[str], rows: list[Row], note: str = "") -> Sheet:
    lines = [Lines([Words(note)])] if note else []
    table = Grid(columns, rows, most=len(rows))
    return Sheet(kind="Bench", line=f"<Bench: {head}>", head=head, parts=[table, *lines])
