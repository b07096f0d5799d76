"""Check and replay a saved call natively on this machine's GPU.

python tools/native_capture.py CALL --source vllm-0.33.0-….whl --source vllm-0.11.2-….whl --out FILE.json

CALL is a call of a failing test that ``pytest --attnlab`` saved. The parts:

- replay: ``attnlab replay CALL`` on every source; probe: the same with ``--probe`` on the first source.
- hooks: those of ``attnlab capture`` on a runner and a layer of tests/helpers/fake_vllm.py, whose forward
  calls the op of the first source with the call's tensors on the GPU. Three steps: the op as it is, one query
  head perturbed by 5 %, and a NaN in one row. All rows and heads are compared with the reference. Slots are
  not followed: the step that wrote the cache is not known.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.fake_vllm import Impl, new_request, runner, scheduled  # noqa: E402

from attnlab.case.case import Case  # noqa: E402
from attnlab.contracts.contract import Target  # noqa: E402
from attnlab.diagnosis.captured import where_it_ran  # noqa: E402
from attnlab.kernels.binding import bind  # noqa: E402
from attnlab.kernels.run_call import on_device  # noqa: E402
from attnlab.kernels.vllm.backend import load  # noqa: E402
from attnlab.kernels.vllm.source import find_source  # noqa: E402
from attnlab.recorder.ops import vllm_ops  # noqa: E402
from attnlab.serving.record import RecordFile, read_records  # noqa: E402
from attnlab.serving.settings import CaptureSettings  # noqa: E402
from attnlab.serving.start import Session, attention_wrapper  # noqa: E402
from attnlab.tensors.call import KernelCall  # noqa: E402
from attnlab.tensors.case_call import presented  # noqa: E402

LAYER = "layers.0.attn"
FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda output: None,
    "one head perturbed": lambda output: output[:, 1].mul_(1.05),
    "NaN in one row": lambda output: output[-1, 0, 0].fill_(float("nan")),
}


def main() -> int:
    """Run the parts and write the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("call", type=Path)
    parser.add_argument("--source", type=Path, action="append", required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sources = [word for one in args.source for word in ("--source", str(one))]
    call = KernelCall.load(args.call)
    document = {
        "call": str(call),
        "origin": str(call.origin),
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "replay": replay(args, sources),
        "probe": replay(args, [*sources[:2], "--probe"]),
        "hooks": {name: step(call, args, name) for name in FAULTS},
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def replay(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Return what attnlab replay prints as JSON, its exit code and its seconds."""
    command = [sys.executable, "-m", "attnlab", "replay", str(args.call), "--json"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--device", args.device, *words], capture_output=True, text=True, check=False
    )
    facts = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - began, 1)}
    try:
        return {**facts, **json.loads(done.stdout)}
    except ValueError:
        return {**facts, "error": done.stderr[-500:]}


def step(saved: KernelCall, args: argparse.Namespace, fault: str) -> dict[str, Any]:
    """Run one step with the hooks; return the counts, what was observed, and what could not be checked."""
    call = on_device(saved, args.device)
    with tempfile.TemporaryDirectory() as folder:
        settings = CaptureSettings(out=folder, sample=1.0, rows=None, heads=None)
        session = Session(settings, RecordFile(Path(folder)))
        forward = functools.partial(run_op, session, call, args.source[0], args.device, fault)
        engine = runner(
            (LAYER,), type("OwnImpl", (Impl,), {"forward": forward}), decode_context_parallel_size=2
        )
        seconds = serve(session, engine, call)
        session.state.tally.write()
        lines = [one for lines in read_records(Path(folder)).values() for one in lines]
    found = [line for line in lines if line["event"] == "observation"]
    counts = [line for line in lines if line["event"] == "counts"][-1]
    return {
        "seconds": round(seconds, 3),
        "checked": counts["counts"],
        "unchecked": counts["unchecked"],
        "observations": [{"kind": one["kind"], "text": one["text"]} for one in found],
        "errors": [line["text"] for line in lines if line["event"] == "error"],
    }


def serve(session: Session, engine: Any, call: KernelCall) -> float:
    """Run one step of all sequences, each of them a request; return the seconds of the layer's call."""
    lens = call.query_lens.tolist()
    names = [f"r{seq}" for seq in range(len(lens))]
    requests = [new_request(name, [1]) for name in names]
    batch = scheduled(dict(zip(names, lens, strict=True)), scheduled_new_reqs=requests)
    ends = call.seq_lens.tolist()
    positions = [at for end, n in zip(ends, lens, strict=True) for at in range(end - n, end)]
    session.begin_step(engine, (batch,), {})
    engine.input_batch.req_ids = names
    engine.input_ids = torch.zeros(len(positions), dtype=torch.int32)
    engine.positions = torch.tensor(positions)
    engine.builder.kv_cache_spec = SimpleNamespace(block_size=call.block_size)
    session.batch_of_runner(engine)
    common = SimpleNamespace(
        block_table_tensor=call.block_table, seq_lens=call.seq_lens, causal=True, slot_mapping=None
    )
    began = time.perf_counter()
    engine.builder.build(0, common)
    engine.layers[LAYER].impl.forward(None, None, common)
    session.end_step()
    return time.perf_counter() - began


def run_op(
    session: Session, call: KernelCall, source: Path, device: str, fault: str, *layer: Any
) -> None:
    """Call the op of a source with the call's tensors, and plant a fault in its output."""
    target = Target.of(where_it_ran(call, Case()).case)
    function = load(find_source(source), target.platform, device).function(call.op)
    known = next(op for op in vllm_ops() if op.op == call.op and op.module.startswith("vllm.v1"))

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        FAULTS[fault](call.output)

    given = presented(call)
    attention_wrapper(session, known, faulty)(**bind(faulty, given, target))


if __name__ == "__main__":
    sys.exit(main())
