"""Pages that are generated when the documentation is built: the benchmarks and the notebooks."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What attnlab and the widgets store for themselves; a page shows the picture or table next to it.
PRIVATE = ("application/vnd.attnlab", "application/vnd.jupyter.widget")
# Small enough to execute all notebooks in about two minutes.
REDUCED = {"num_heads": 8, "draw_max_query_len": 96, "draw_max_ctx_len": 300}


def write_notebooks(docs: Path, *, execute: bool) -> None:
    """Write docs/notebooks: the notebooks as pages, executed if ``execute``.

    Notebooks that are older than their executed copy here are not executed again.
    """
    root, pages = docs.parent, docs / "notebooks"
    sources = sorted((root / "notebooks").glob("*.ipynb"))
    folder = _executed(root, sources) if execute else root / "notebooks"
    pages.mkdir(exist_ok=True)
    for source in sources:
        found = folder / source.name
        text = (found if found.is_file() else source).read_text(encoding="utf-8")
        _write_if_changed(pages / source.name, _as_page(text))


def _executed(root: Path, sources: list[Path]) -> Path:
    """Return the folder with the executed notebooks; execute them if there is none up to date."""
    from attnlab.reports.investigate import investigate

    run = root / "docs" / "_generated" / "run"
    for folder in (root / "reports" / "executed", run / "executed"):
        copies = [folder / source.name for source in sources]
        if all(
            c.is_file() and c.stat().st_mtime > s.stat().st_mtime
            for c, s in zip(copies, sources, strict=True)
        ):
            return folder
    shutil.rmtree(run, ignore_errors=True)
    investigate(sources, parameters=REDUCED, reports=run, timeout_s=900, jobs=2)
    return run / "executed"


def _as_page(text: str) -> str:
    """Return a notebook's text with links that lead somewhere on the site, and without widget views."""
    notebook = json.loads(text)
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        cell["source"] = re.sub(
            r"\]\(\.\./README\.md[^)]*\)", "](../index.md)", "".join(cell["source"])
        )
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for mime in [mime for mime in data if mime.startswith(PRIVATE)]:
                del data[mime]
    return json.dumps(notebook, indent=1)


def write_benchmarks(docs: Path) -> None:
    """Write docs/_generated/benchmarks.md from the JSON files in docs/, which tools and commands wrote."""
    parts = [
        _machine_table(json.loads((docs / "cpu.json").read_text())),
        _speed(json.loads((docs / "speed.json").read_text())),
        _matrix(json.loads((docs / "h200-matrix.json").read_text())),
        _check(json.loads((docs / "h200-check.json").read_text())),
        _fills(json.loads((docs / "h200.json").read_text())),
    ]
    growth = docs / "growth.json"  # of tools/growth.py, which needs a quiet machine
    if growth.is_file():
        parts.insert(2, _growth(json.loads(growth.read_text())))
    folder = docs / "_generated"
    folder.mkdir(exist_ok=True)
    _write_if_changed(folder / "benchmarks.md", "\n\n".join(parts) + "\n")


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in lines)


def _heading(title: str, file: str, document: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    machine = document.get("gpu") or document["machine"]
    return f"## {title}\n\n{machine}, {document['date']}; {versions}. Data: `docs/{file}`."


def _machine_table(document: Mapping[str, Any]) -> str:
    parts = [_heading("The lab on a CPU", "cpu.json", document), document["note"]]
    for section in document["sections"]:
        rows = [
            [row["what"], row["measured"], row.get("goal", ""), row.get("note", "")]
            for row in section["rows"]
        ]
        parts.append(f"### {section['title']}\n\n`{section['command']}`")
        parts.append(_table(["measured", "result", "goal", "note"], rows))
    return "\n\n".join(parts)


def _speed(document: Mapping[str, Any]) -> str:
    rows = [[row["what"], row["before"], row["after"], row["how"]] for row in document["rows"]]
    return "\n\n".join(
        (
            _heading("Before and after", "speed.json", document),
            document["note"],
            _table(["measured", "before", "after", "how"], rows),
        )
    )


def _growth(document: Mapping[str, Any]) -> str:
    steps = list(dict.fromkeys(step for found in document["exponents"].values() for step in found))
    rows = [
        [axis, *(found.get(step, "") for step in steps)]
        for axis, found in document["exponents"].items()
    ]
    faster = ", ".join(document["faster_than_attention"]) or "none"
    return "\n\n".join(
        (
            _heading("How time and memory grow", "growth.json", document),
            f"{document['note']} Exponents over the upper half of the sizes; steps below 0.5 s are left "
            f"out. Steps that grow faster than attention: {faster}.",
            _table(["with", *steps], rows),
            "![Seconds by step and peak memory against tokens, heads and sequences.](growth.png)",
        )
    )


def _matrix(document: Mapping[str, Any]) -> str:
    whole = document["whole_matrix_warm_lab"]
    steps = ", ".join(
        f"{name} {seconds:.1f} s" for name, seconds in whole["by_step"].items() if seconds >= 0.05
    )
    rows = [
        [name, part["compared"], f"{part['vllm_seconds']:.1f}", f"{part['lab_seconds']:.2f}"]
        for name in ("cold", "warm")
        for part in (document[name],)
    ]
    return "\n\n".join(
        (
            _heading("All test ids on a GPU", "h200-matrix.json", document),
            f"All {document['ids']} ids of the plain and the ALiBi test of `test_prefix_prefill.py`, warm, "
            f"take the lab {whole['seconds']:.1f} s: {steps}. On a random sample, compared with vLLM's own "
            "test file (cold: nothing is compiled yet):",
            _table(["caches", "ids", "vLLM's file, s", "lab, s"], rows),
        )
    )


def _check(document: Mapping[str, Any]) -> str:
    rows = [[f"`{f['op']}`", f"`{f['kind']}`", f["diagnosis"]] for f in document["findings"]]
    return "\n\n".join(
        (
            _heading("`attnlab check` on a GPU", "h200-check.json", document),
            f"{document['cases_run']} cases in {document['seconds']:.0f} s, {len(rows)} findings:",
            _table(["op", "finding", "diagnosis"], rows),
        )
    )


def _fills(document: Mapping[str, Any]) -> str:
    rows = [
        [
            f["distribution"],
            f["empty_slots"],
            f["fill"],
            f["backend"],
            f"{f['decode_error']:.3g}"
            if isinstance(f["decode_error"], float)
            else f["decode_error"],
            f["mismatched"],
        ]
        for f in document["fills"]
    ]
    return "\n\n".join(
        (
            _heading("Models and kernels on the same data", "h200.json", document),
            "The largest error of the decode row, by distribution, content of empty slots, and cache fill:",
            _table(
                ["distribution", "empty slots", "fill", "backend", "decode error", "elements off"],
                rows,
            ),
        )
    )
