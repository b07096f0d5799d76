"""Make the table of the faults of many releases, or print which releases load and run.

python tools/releases.py --sources DIR --page docs/releases.html     the page and its JSON, with a GPU's mark
python tools/releases.py                 the releases of the table in the README, fetched where missing
python tools/releases.py 0.10.2 0.33.0   others

The first form runs ``attnlab releases --native`` on a machine that needs no network: DIR has a wheel, an
sdist or a folder of each release. Every case runs under the interpreter, the smallest case of each fault on
the GPU, too. ``--triton FOLDER`` takes Triton from there. ``--out STORE`` keeps what ran, so that the same
command continues after ``--seconds``. Other flags are those of ``attnlab releases``. Exit codes: 0 all ran,
and each fault is confirmed or cannot run there; 1 the GPU does not confirm a fault; 2 bad input; 3 not all
ran.

The second form prints a Markdown table. A small batch of ragged lengths, N(0, 1) in float16, 6 heads on 3 KV
heads, with each op under Triton's interpreter. "matches" is an error against the reference of at most 2e-3:
two roundings to float16; a cache write must give the same bytes. The last column runs the prefill on a block
whose offset is beyond 2^31 elements; its caches have 8 GiB of addresses, of which little is touched.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.ops import DECODE_FWD, MERGE, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.cli.main import main as command_line
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source, fetch, find_source
from attnlab.lab.lab import Lab

RELEASES = ("0.9.2", "0.11.2", "0.16.0", "0.20.2", "0.25.1", "0.29.0", "0.33.0")
CASE = Case(
    num_heads=6,
    num_queries_per_kv=2,
    head_size=64,
    block_size=16,
    query_lens=(1, 15, 1, 17, 40, 1),
    ctx_lens=(15, 1, 16, 16, 3, 300),
    platform="sm_90",
    distribution="normal",
    output_init="nan",
    sm_scale=0.125,
    atol=2e-3,
    backend="vllm",
)
DECODES = CASE.replace(query_lens=(1,) * 6)
OPS = {
    WRAPPER: CASE,
    PREFILL: CASE.replace(op=PREFILL),
    f"{UNIFIED}, 2d": CASE.replace(op=UNIFIED),
    f"{UNIFIED}, 3d": DECODES.replace(op=UNIFIED),
    DECODE_FWD: DECODES.replace(op=DECODE_FWD),
    MERGE: CASE.replace(op=MERGE),
    WRITE: CASE.replace(op=WRITE, atol=None),
}
FAR = CASE.replace(
    num_heads=4,
    query_lens=(5, 1),
    ctx_lens=(20, 30),
    op=PREFILL,
    first_block=2**31 // (2 * 64 * 16) + 64,
)


def main() -> int:
    """Make the page, or print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, metavar="DIR")
    parser.add_argument("--page", type=Path, metavar="FILE.html")
    parser.add_argument("--triton", type=Path, metavar="FOLDER")
    args, more = parser.parse_known_args()
    if args.sources is None and (args.page or any(word.startswith("-") for word in more)):
        parser.error("--sources must be given with other flags")
    if args.sources is None:
        print_table(more or RELEASES)
        return 0
    if args.page is None:
        parser.error("--page must be given with --sources")
    return make_page(args.sources, args.page, args.triton, more)


def make_page(sources: Path, page: Path, triton: Path | None, more: Sequence[str]) -> int:
    """Run ``attnlab releases --native``, and print what the page has; return the exit code."""
    if triton is not None:  # also for the workers, which are new processes
        sys.path.insert(0, str(triton))
        paths = [str(triton), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    command = ["releases", *more, "--sources", str(sources), "--native", "--page", str(page)]
    code = command_line(command)
    if code not in (0, 1, 3):
        return code
    table = json.loads(page.with_suffix(".json").read_text())
    marks = Counter(fault["native"] for fault in table["faults"])
    left = {name: sum(entry["cases"] for entry in table[name]) for name in ("not_run", "left_out")}
    print(
        f"{len(table['faults'])} faults in {len(table['releases'])} releases; "
        f"{table['cases_run']} of {table['cases']} cases ran in {table['seconds']:.0f} s, "
        f"{left['left_out']} left out, {left['not_run']} not run; on a GPU: "
        + ", ".join(f"{mark} {count}" for mark, count in marks.items())
    )
    for fault in table["faults"]:
        if fault["native"] != "yes":
            print(f"{fault['native']}: {fault['op']}, {fault['kind']}, {fault['diagnosis']}")
            print(f"  {fault['run']}")
    if left["not_run"] or marks["not tried"]:
        return 3
    return 1 if marks["no"] else 0


def print_table(versions: Sequence[str]) -> None:
    """Print the table of which releases load and run."""
    heads = (
        "release",
        *OPS,
        "default scale from",
        "NaN behind seq_len",
        "block offset beyond 2^31",
    )
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for version in versions:
        try:
            cells = row(find_source(fetch(version)))
        except AttnLabError as error:
            cells = [str(error)]
        print("| " + " | ".join([version, *cells]) + " |", flush=True)


def row(source: Source) -> list[str]:
    """Return the cells of one release behind its name."""
    lab = Lab(source=source.path)
    release = source.rules or CASE.release
    cells = [told(lab, case.replace(release=release)) for case in OPS.values()]
    named = lab.run(CASE.replace(release=release, sm_scale=None))
    cells.append("head size" if named.status == "match" else "number of heads")
    cells.append(", ".join(leaks(lab, source, release)) or "masked")
    far = Lab(source=source.path, keep=1).run(FAR.replace(release=release))
    cells.append("; ".join(far.wraps) if far.wraps else far.status)
    return cells


def told(lab: Lab, case: Case) -> str:
    """Return in a word how a case went, and its greatest error."""
    try:
        result = lab.run(case)
    except AttnLabError as error:
        return str(error)
    greatest = result.errors.greatest_abs.value if result.errors else float("nan")
    word = {"match": "matches", "mismatch": "differs"}.get(result.status, result.status)
    return f"{word}, {greatest:.1e}"


def leaks(lab: Lab, source: Source, release: str) -> list[str]:
    """Return the ops whose output has NaN where only slots behind the sequences' ends have."""
    found = []
    for case in (OPS[WRAPPER], OPS[f"{UNIFIED}, 2d"], OPS[DECODE_FWD]):
        asked = case.replace(release=release, empty_slots="nan")
        call = lab.call(asked)
        vllm_ops.run(call, Target.of(asked), decide(asked).kernels, source)
        if call.output.isnan().any():
            found.append(f"reaches {case.op}")
    return found


if __name__ == "__main__":
    sys.exit(main())
