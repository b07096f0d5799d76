"""The example of a failing test: run it under the pytest plugin, and its kernel as a backend."""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from attnlab.case.case import Case, Lengths
from attnlab.case.errors import Unavailable
from attnlab.diagnosis.captured import where_it_ran
from attnlab.lab.result import ErrorMap, map_errors
from attnlab.replay.replay_call import expected_of
from attnlab.tensors.call import KernelCall

FAULT, REPAIR = "first + slot >= at - window", "first + slot > at - window"
_FOLDER = Path(__file__).parents[2] / "examples" / "failing_test"
_SECTION = re.compile(r"^-+ attnlab -+\n(.*?)(?=^[=-]{5})", re.MULTILINE | re.DOTALL)
_FACT = re.compile(r"^([a-z][a-z ]{1,10}\S) {2,}(.*(?:\n {4,}.*)*)", re.MULTILINE)
# A function that calls the example's kernel with the tensors of a KernelCall.
_ADAPTER = '''

from attnlab.tensors.cache import to_flash


def kernel(call):
    """Call paged_attention with the tensors of a KernelCall."""
    keys, values = to_flash(call.key_cache, call.value_cache)
    window = call.sliding_window or call.max_seq_len
    paged_attention(
        call.query, keys, values, call.block_table, call.seq_lens, call.query_start_loc, call.output, window
    )


kernel.op, kernel.kv_cache_dtypes = "unified_attention", ("auto",)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTest:
    """What pytest printed: ``summary``, its last line; ``facts``, the report of the first failing test by
    label; ``call``, the file of its call."""

    summary: str
    facts: dict[str, str]
    call: Path


def run_failing_test(folder: Path) -> FailedTest:
    """Run ``pytest --attnlab`` on the example in a process of its own; reports go to ``folder``.

    Raises Unavailable without a checkout of attnlab, or if no test is reported.
    """
    plugin = [] if entry_points(group="pytest11", name="attnlab") else ["-p", _PLUGIN]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q", "--attnlab"]
    done = subprocess.run(
        [*command, f"--attnlab-dir={folder}", "--color=no"],
        cwd=_example(),
        capture_output=True,
        text=True,
        check=False,
    )
    section = _SECTION.search(done.stdout)
    if section is None:
        raise Unavailable(f"pytest reported no call: {(done.stdout + done.stderr).strip()[-300:]}")
    facts = {label: " ".join(text.split()) for label, text in _FACT.findall(section[1])}
    (call,) = folder.glob("*/call.safetensors")
    return FailedTest(summary=done.stdout.strip().splitlines()[-1], facts=facts, call=call)


_PLUGIN = "attnlab.recorder.pytest_plugin"


def example_kernel(folder: Path, *, repaired: bool = False) -> str:
    """Write the example's kernel with an adapter to ``folder``, and return it as the name of a backend."""
    text = (_example() / "windowed_attention.py").read_text()
    if repaired:
        text = text.replace(FAULT, REPAIR)
    file = folder / ("repaired.py" if repaired else "faulty.py")
    file.write_text(text + _ADAPTER)
    return f"{file}:kernel"


def call_errors(call: KernelCall) -> ErrorMap:
    """Return the errors of a call's output against the correct one, by token and head."""
    expected = expected_of(call, where_it_ran(call, Case()).case)
    query_lens = tuple(call.query_lens.tolist())
    seq_lens = call.seq_lens.tolist()
    ctx_lens = tuple(seq - new for seq, new in zip(seq_lens, query_lens, strict=True))
    lengths = Lengths(query_lens=query_lens, ctx_lens=ctx_lens)
    return map_errors(call.buffer.cpu(), expected.output, lengths, expected.bound.float(), 0.0)


def case_of_call(call: KernelCall, backend: str) -> Case:
    """Return a Case of the sizes and lengths of a call, with other numbers, on a backend."""
    errors_of = call_errors(call).lengths
    return Case(
        op=call.op,
        num_heads=call.query.shape[1],
        num_queries_per_kv=call.num_queries_per_kv,
        head_size=call.query.shape[2],
        block_size=call.block_size,
        sliding_window=call.sliding_window,
        query_lens=errors_of.query_lens,
        ctx_lens=errors_of.ctx_lens,
        distribution="normal",
        stage="sound",
        platform="sm_90",
        backend=backend,
    )


def _example() -> Path:
    """Return the folder of the example; raise Unavailable if attnlab was installed without it."""
    if not _FOLDER.is_dir():
        raise Unavailable(
            "the example needs a checkout of attnlab: examples/failing_test is missing"
        )
    return _FOLDER
