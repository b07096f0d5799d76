"""Run ``attnlab horizon`` on the published int32 faults and on their fixed versions; write docs/horizon.json.

Usage: python tools/horizon_published.py FOLDER [--out docs/horizon.json]

FOLDER has one folder for each source, as :data:`CASES` names them: unpacked wheels of PyPI (sglang,
fla-core, the attention ops of vLLM), and checkouts of SageAttention, mamba and exllamav3. Where no fixed
version exists, the change that the thread proposes is made in a copy, or the index tensor is int64.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnlab.horizon.launch import Launch, load_kernels, read_launches
from attnlab.horizon.survey import LAUNCHES, KernelHorizon, kernel_horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published fault: its thread, what is run, and the smallest wrong size that the thread implies.

    - ``fault``, ``fixed``: files below the folder; ``edits``: text that makes the faulty version sound.
    - ``sizes``: sizes of the thread; ``arguments``: arguments of the fixed run that differ.
    - ``expected``: the first wrong size; None where the thread has no number; ``says``: the thread's words.
    """

    thread: str
    launch: str
    fault: str
    size: str
    expected: int | None
    says: str
    fixed: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


_EXTEND = "sglang-0.5.9/sglang/srt/layers/attention/triton_ops/extend_attention.py"
_DECODE = "sglang-0.5.9/sglang/srt/layers/attention/triton_ops/decode_attention.py"
_WIDE = {"qo_indptr": "int64[seqs + 1] = i * tokens"}
CASES = (
    Published(
        thread="sglang #20389", launch="sglang_extend", fault=_EXTEND, fixed=_EXTEND, arguments=_WIDE,
        size="tokens", expected=131073, says="more than 131,072 tokens of 128 heads of 128",
    ),
    Published(
        thread="sglang #20389", launch="sglang_extend_unified", fault=_EXTEND, fixed=_EXTEND, arguments=_WIDE,
        size="tokens", expected=131073, says="the same in the second kernel",
    ),
    Published(
        thread="sglang #28788", launch="sglang_decode_grouped", fault=_DECODE,
        fixed="sglang-0.5.23/sglang/kernels/ops/attention/decode_attention.py", size="seqs", expected=None,
        sizes={"splits": 792, "ctx_len": 202752}, says="792 splits, large batches",
    ),
    Published(
        thread="fla #1080", launch="fla_scaled_dot_kkt", size="tokens", expected=17477,
        fault="fla_core-0.5.0/fla/ops/common/chunk_scaled_dot_kkt.py",
        fixed="fla_core-0.6.0/fla/ops/common/chunk_scaled_dot_kkt.py",
        says="batch 16: 17,476 right, 17,477 wrong",
    ),
    Published(
        thread="mamba #1015", launch="mamba_chunk_cumsum", size="tokens", expected=61313,
        fault="mamba/mamba_ssm/ops/triton/ssd_chunk_state.py",
        says="about 61K tokens, Nemotron 3 Ultra",
        edits=(("tl.program_id(axis=0)\n", "tl.program_id(axis=0).to(tl.int64)\n"),
               ("tl.program_id(axis=1)\n", "tl.program_id(axis=1).to(tl.int64)\n")),
    ),
    Published(
        thread="vllm #47671", launch="vllm_decode_grouped", size="blocks", expected=7768,
        sizes={"block_size": 480},
        fault="vllm-0.24.0/vllm/v1/attention/ops/triton_decode_attention.py",
        fixed="vllm-0.33.0/vllm/v1/attention/ops/triton_decode_attention.py",
        says="pages above about 7.7k of 480 × 576",
    ),
    Published(
        thread="SageAttention #386", launch="sage_quant_query", size="tokens", expected=99866,
        fault="SageAttention/sageattention/triton/quant_per_thread.py",
        says="99,866 and more tokens, 56 heads of 128",
        edits=tuple((f"tl.program_id({i})", f"tl.program_id({i}).to(tl.int64)") for i in range(3)),
    ),
    Published(
        thread="exllamav3 #263", launch="exllamav3_prefill", size="tokens", expected=262145,
        fault="exllamav3-before-263/exllamav3/modules/attention_fn/triton_paged.py",
        fixed="exllamav3-263/exllamav3/modules/attention_fn/triton_paged.py",
        says="262,144 rows of 32 heads of 256",
    ),
)  # fmt: skip


def _horizon(file: Path, launch: Launch) -> KernelHorizon:
    kernels, files, _ = load_kernels(file)
    kernel = next(one for one in kernels if one.name == launch.kernel)
    return kernel_horizon(kernel, [launch], [str(path) for path in files])


def _wrong(found: KernelHorizon) -> list[tuple[int, Any]]:
    if found.why:
        raise SystemExit(f"{found.kernel}: {found.why}")
    return sorted(
        ((one.wrong_at, one) for one in found.statements if one.wrong_at), key=lambda pair: pair[0]
    )


def run(folder: Path, cases: tuple[Published, ...] = CASES) -> Iterator[dict[str, Any]]:
    """Yield, for each published fault, what the faulty and the fixed version do."""
    launches = read_launches(LAUNCHES)
    for case in cases:
        base = launches[case.launch]
        launch = replace(base, sizes={**base.sizes, **case.sizes}, sweep=(case.size,))
        faulty = _wrong(_horizon(folder / case.fault, launch))
        sound = replace(launch, arguments={**launch.arguments, **case.arguments})
        with tempfile.TemporaryDirectory() as place:
            path = folder / (case.fixed or case.fault)
            if case.edits:
                path = Path(shutil.copy(path, place))
                text = path.read_text()
                for before, after in case.edits:
                    text = text.replace(before, after)
                path.write_text(text)
            fixed = _wrong(_horizon(path, sound))
        first = faulty[0] if faulty else (None, None)
        yield {
            "thread": case.thread, "kernel": launch.kernel, "size": case.size, "published": case.says,
            "expected": case.expected, "wrong_at": first[0], "line": first[1] and first[1].site.place,
            "expression": first[1] and first[1].site.text, "effect": first[1] and first[1].effect,
            "fixed": [value for value, _ in fixed],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = list(run(args.folder))
    for row in rows:
        print(row)
    if args.out is not None:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(
            json.dumps({**known, "published": rows}, indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
