"""Print which vLLM releases load and run, as a Markdown table.

python tools/releases.py                 the releases of the table in the README, fetched where missing
python tools/releases.py 0.10.2 0.33.0   others

A small batch of ragged lengths, N(0, 1) in float16, 6 heads on 3 KV heads, with both ops under Triton's
interpreter. "matches" is an error against the reference of at most 2e-3: two roundings to float16.
"""

import sys

from attnlab.case import Case
from attnlab.dispatch import Setting, decide
from attnlab.errors import AttnLabError
from attnlab.kernels import vllm_ops
from attnlab.kernels.source import Source, fetch, find_source
from attnlab.run import Lab

RELEASES = ("0.9.2", "0.11.2", "0.16.0", "0.20.2", "0.25.1", "0.29.0", "0.33.0")
CASE = Case(
    num_heads=6,
    num_queries_per_kv=2,
    head_size=64,
    block_size=16,
    query_lens=(1, 15, 1, 17, 40, 1),
    ctx_lens=(15, 1, 16, 16, 3, 300),
    platform="sm_90",
    data="normal",
    output="nan",
    sm_scale=0.125,
    atol=2e-3,
    origin="vllm",
)
OPS = ("chunked_prefill_paged_decode", "context_attention_fwd")


def main() -> None:
    """Print the table."""
    heads = ("release", "module path", *OPS, "default scale from", "NaN behind seq_len")
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for version in sys.argv[1:] or RELEASES:
        try:
            cells = row(find_source(fetch(version)))
        except AttnLabError as error:
            cells = [str(error)]
        print("| " + " | ".join([version, *cells]) + " |", flush=True)


def row(source: Source) -> list[str]:
    """Return the cells of one release behind its name."""
    case = CASE.replace(release=source.rules or CASE.release)
    lab = Lab(source=source.path)
    cells = [source.ops_folders[0]]
    for op in OPS:
        try:
            result = lab.run(case.replace(op=op))
            greatest = result.errors.greatest_abs.value if result.errors else float("nan")
            word = {"match": "matches", "mismatch": "differs"}.get(result.status, result.status)
            cells.append(f"{word}, {greatest:.1e}")
        except AttnLabError as error:
            cells.append(str(error))
    named = lab.run(case.replace(sm_scale=None))
    cells.append("head size" if named.status == "match" else "number of heads")
    call = lab.call(case.replace(empty="nan"))
    vllm_ops.run(call, Setting.of(case), decide(case).kernels, source)
    cells.append("reaches the output" if call.output.isnan().any() else "masked")
    return cells


if __name__ == "__main__":
    main()
