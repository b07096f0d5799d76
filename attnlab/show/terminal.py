"""What the commands print for a person: tables and lines in the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from attnlab.case.case import Case
from attnlab.contracts.dispatch import Decision
from attnlab.lab.decode_error import DecodedError

if TYPE_CHECKING:  # these need torch, which the light commands do without
    from attnlab.contracts.violation import Violation
    from attnlab.lab.error_map import Place
    from attnlab.lab.result import Result
    from attnlab.lab.stage_table import Cell

_COLOUR = {"match": "green", "mismatch": "red", "rejected": "magenta"}
_EFFECT = {"rejected": "magenta", "silent": "red", "harmless": "dim"}


def show_result(console: Console, result: "Result") -> None:
    """Print a Result: what ran and why, the violations, what came of it and where it went wrong."""
    console.print(result)


def describe(case: Case) -> str:
    """Return the Case in one line."""
    where = f"{case.op} at stage {case.stage} on {case.platform}, vLLM {case.release}"
    return f"{where}; {_sizes(case)}"


def _sizes(case: Case) -> str:
    lengths = case.lengths
    return (
        f"{case.num_heads} heads of {case.head_size}, {case.num_queries_per_kv} a KV head, "
        f"{case.dtype}, KV cache {case.kv_cache_dtype}; {len(lengths.query_lens)} sequences, "
        f"{lengths.num_tokens} new tokens"
    )


def breach_lines(violations: Sequence["Violation"]) -> str:
    """Return a line of markup for each violation."""
    if not violations:
        return "[green]none[/]"
    return "\n".join(f"[{_EFFECT[b.effect]}]{b.effect}[/]  {escape(b.text)}" for b in violations)


def place_lines(places: Sequence["Place"], most: int = 8) -> list[str]:
    """Return a line for each place, the first ``most``."""
    lines = [
        f"sequence {p.seq}, token {p.token} of {p.query_len} (row {p.row}), "
        f"{head_range(p.heads)}: {p.elements} elements"
        for p in places[:most]
    ]
    if len(places) > most:
        lines.append(f"… and {len(places) - most} more rows")
    return lines


def head_range(heads: Sequence[int]) -> str:
    """Return heads as "head 3", "heads 0–63" or "heads 0, 2, 5"."""
    if len(heads) == 1:
        return f"head {heads[0]}"
    if heads[-1] - heads[0] == len(heads) - 1:
        return f"heads {heads[0]}–{heads[-1]}"
    return "heads " + ", ".join(map(str, heads))


def show_stages(console: Console, case: Case, cells: Sequence["Cell"]) -> None:
    """Print the table of stages."""
    title = f"{case.op}, vLLM {case.release}, backend {case.backend}: {_sizes(case)}"
    caption = "under each count: the largest error of rows in decode and in prefill sequences"
    table = Table(title=escape(title), title_justify="left", caption=caption)
    table.add_column("stage", style="bold", no_wrap=True)
    platforms = list(dict.fromkeys(cell.platform for cell in cells))
    for platform in platforms:
        table.add_column(platform, overflow="fold")
    cell_at = {(cell.stage, cell.platform): cell for cell in cells}
    for stage in dict.fromkeys(cell.stage for cell in cells):
        table.add_row(stage, *(_cell_text(cell_at[stage, platform]) for platform in platforms))
    console.print(table)


def _cell_text(cell: "Cell") -> str:
    sizes = [
        f"{name} {error:.1e}"
        for name, error in (("decode", cell.decode_error), ("prefill", cell.prefill_error))
        if error is not None
    ]
    text = f"[{_COLOUR[cell.status]}]{escape(cell.verdict)}[/]"
    return text + (f"\n[dim]{', '.join(sizes)}[/]" if sizes else "")


def show_decision(console: Console, decision: Decision) -> None:
    """Print who runs, the predicate term by term, and why the other kernel does not."""
    console.print(decision)


def show_decoded(console: Console, decoded: DecodedError) -> None:
    """Print what an assertion's text says."""
    console.print(Group(*(escape(sentence) for sentence in decoded.sentences())))


def show_bench(console: Console, figures: dict[str, Any]) -> None:
    """Print the figures of the benchmark, each with its yardstick."""
    reference, fill = figures["reference"], figures["fill"]
    table = Table(box=None, padding=(0, 2))
    for name in ("what", "seconds", "yardstick, same run", "ratio"):
        table.add_column(name)
    table.add_row(
        "reference, all heads",
        f"{reference['seconds']:.2f}",
        f"float32 matmul at {reference['matmul_gflops']:.0f} GFLOP/s",
        f"{reference['share']:.0%} of its rate, causal operations only",
    )
    table.add_row(
        "cache made and filled",
        f"{fill['seconds']:.3f}",
        f"the cache cloned in {fill['clone_seconds']:.3f} s",
        f"{fill['share']:.0%} of its bandwidth",
    )
    table.add_row(
        "its tokens alone",
        f"{fill['tokens_seconds']:.3f}",
        f"the same bytes copied in {fill['tokens_copy_seconds']:.3f} s",
        f"{fill['tokens_share']:.0%} of its bandwidth",
    )
    table.add_row(
        "cache made and filled",
        f"{fill['seconds']:.3f}",
        f"a loop over tokens and blocks in {fill['token_loop_seconds']:.2f} s",
        f"{fill['times_faster']:.1f} times faster",
    )
    table.add_row("table of stages", f"{figures['stage_table']['seconds']:.1f}", "", "")
    console.print(table)
    console.print(f"peak memory {figures['peak_memory_gib']:.2f} GiB")


def show_interpreter(console: Console, figures: dict[str, Any]) -> None:
    """Print what the decode kernel takes under the interpreter, and what it took."""
    table = Table(box=None, padding=(0, 2))
    for name in (f"decode kernel at seed size, {figures['source']}", "seconds", "times faster"):
        table.add_column(name)
    stock = figures["stock_seconds"]
    for what, name in (
        ("Triton's own launch", "stock_seconds"),
        ("the lab's, 1 process", "one_process_seconds"),
        (f"the lab's, {figures['processes']} processes", "seconds"),
    ):
        table.add_row(what, f"{figures[name]:.2f}", f"{stock / figures[name]:.1f}")
    console.print(table)
    console.print(f"largest error of the decode rows {figures['greatest_error']:.3g}")


def show_rocm(console: Console, figures: dict[str, Any]) -> None:
    """Print what the decode kernel takes on the emulated device, plain and checked."""
    title = f"one decode of 930 tokens, 64 heads, {figures['source']} csrc/rocm; seconds"
    table = Table(title=title, box=None, padding=(0, 2), title_justify="left")
    columns = ("first call", "1 core", f"{figures['threads']} threads", "checked", "times slower")
    for name in ("", *columns, "error"):
        table.add_column(name)
    for group, found in figures["by_gqa"].items():
        names = ("first_s", "seconds", "all_cores_s", "checked_s", "times_slower", "greatest_error")
        table.add_row(f"gqa {group}", *(f"{found[name]:.2g}" for name in names))
    console.print(table)


def show_adaptations(console: Console, root: Path) -> None:
    """Print what is changed in the text of csrc/rocm's attention of the vLLM at ``root``, and why."""
    from attnlab.kernels.rocm.adapt import times_adapted

    table = Table("what", "times", "why", box=None)
    for change, times in times_adapted(root):
        table.add_row(change.what, str(times), change.why)
    console.print(table)
