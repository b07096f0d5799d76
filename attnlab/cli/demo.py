"""The command ``attnlab demo``: find a planted fault in a kernel of our own."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.output_file import make_output_folder, write_text
from attnlab.cli.command import print_json, progress, runs, show
from attnlab.cli.replay import smallest_script

if TYPE_CHECKING:
    from attnlab.diagnosis.diagnosis import Diagnosis

KERNEL = Path(__file__).parents[1] / "reports" / "templates" / "paged_attention.py.j2"
RIGHT, WRONG = "head // num_queries_per_kv", "head % num_queries_per_kv"
# Small, and with KV heads that the fault exchanges.
_CASE: dict[str, Any] = {
    "op": "unified_attention",
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 16,
    "block_size": 16,
    "query_lens": (5, 1),
    "ctx_lens": (40, 64),
    "distribution": "normal",
}


def plant(folder: Path) -> tuple[Path, int]:
    """Write the faulty kernel into a folder; return its file and the number of the faulty line."""
    text = KERNEL.read_text(encoding="utf-8")
    if text.count(RIGHT) != 1:
        raise AttnLabError(f"{KERNEL.name} must have {RIGHT!r} once")
    path = folder / KERNEL.stem
    write_text(path, text.replace(RIGHT, WRONG))
    return path, text[: text.index(RIGHT)].count("\n") + 1


@runs("demo")
def _run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    make_output_folder(args.out, "out")
    kernel, line = plant(args.out)
    spec = f"{kernel}:paged_attention"
    call_file = args.out / "call.safetensors"
    page_file = args.out / "page.html"
    _say(args, f"1. planted in {kernel}, line {line}: `{WRONG}` instead of `{RIGHT}`")
    found = _diagnosed(args, spec, call_file, page_file)
    is_found = found.repair is not None and found.repair.line == line
    seconds = time.perf_counter() - began
    if args.json:
        files = {"kernel": str(kernel), "call": str(call_file), "page": str(page_file)}
        facts = {"found": is_found, "line": line, "seconds": seconds, "files": files}
        print_json({**facts, "diagnosis": found.to_dict()})
    else:
        show(found)
        again = _again(call_file, spec)
        print(_NEXT.format(page=page_file, seconds=seconds, again=again))
    return 0 if is_found else 1


def _diagnosed(
    args: argparse.Namespace, spec: str, call_file: Path, page_file: Path
) -> "Diagnosis":
    """Run the kernel, save its call, diagnose it and write the page."""
    import torch

    from attnlab.diagnosis.captured import diagnose_captured
    from attnlab.kernels.runner import one_backend
    from attnlab.kernels.triton.interpreter import load_triton
    from attnlab.lab.call_lab import call_lab
    from attnlab.lab.lab import run
    from attnlab.reports.close_up import trace_run
    from attnlab.reports.shared_page import page_of

    torch.set_num_threads(1)
    load_triton(interpret=not torch.cuda.is_available())
    with progress("running the kernel") as on_step:
        case = Case(**_CASE, backend=spec)
        call = run(case).recorded_call
        call.save(call_file)
        _say(args, f"2. its call, which raised no error, is saved: {call_file}")
        _say(args, "3. the cause, from the saved call and reruns of the kernel:\n")
        runner = one_backend(None, spec, None)
        assert runner is not None
        found = diagnose_captured(call, case, runner=runner, on_step=on_step)
        lab = call_lab(call, case, runner)
        traced = trace_run(lab, lab.case, found.xray)
        on_step("the smallest reproduction")
        script = smallest_script(call, runner, case)
    page_of(found, _again(call_file, spec), run=traced, script=script).write(page_file)
    return found


def _again(call_file: Path, spec: str) -> str:
    return f"attnlab page {call_file} --kernel {spec}"


_NEXT = """
4. the page to send: {page} ({seconds:.0f} s in all)

Next, your own kernel: a function of tensors, by vLLM's names (query, key_cache, value_cache, block_table,
seq_lens, query_start_loc, sm_scale), that returns the output.
  attnlab check mine.py:my_attention      run it over hostile cases
  attnlab page CALL --kernel mine.py:my_attention
                                          why is this output wrong? (as above: {again})
  pytest --attnlab                        why does this test fail?
To save a call of your program: with attnlab.capture() as calls: ..."""


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, flush=True)
