"""A child process with vLLM's CPU engine and a small random model: first sound, then with planted faults.

python serving_engine.py RESULT          writes what it planted, and what the engine did, to RESULT as JSON
python serving_engine.py RESULT --rates  writes tokens per second of CPU time instead, without faults

The capture must be activated in its environment. The model is a Gemma2: layers 0 and 2 have a sliding window,
1 and 3 see all keys, so that there are two KV-cache groups. Faults are planted below the hooks of attnlab: in
the methods of vLLM's classes before attnlab wraps them, and in the op.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
from study.engine import hide_broken, refuse_network

WINDOW, BLOCK, VOCABULARY = 40, 32, 128
CONFIG = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "hidden_activation": "gelu_pytorch_tanh",
}


class Faults:
    """Plants one fault at a time: ``active`` is its name, ``planted`` what was done, by name."""

    def __init__(self) -> None:
        self.active = ""
        self.layer = -1
        self.request = ""
        self.planted: dict[str, dict[str, Any]] = {}
        self.runner: Any = None

    def install(self) -> None:
        """Change vLLM's CPU backend; attnlab is not active yet."""
        from vllm import _custom_ops
        from vllm.v1.attention.backends import cpu_attn
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        impl, builder = cpu_attn.CPUAttentionBackendImpl, cpu_attn.CPUAttentionMetadataBuilder
        update, forward, build = impl.do_kv_cache_update, impl.forward, builder.build
        attend, execute = _custom_ops.cpu_attention_with_kv_cache, GPUModelRunner.execute_model

        def do_kv_cache_update(
            self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
        ) -> Any:
            slot_mapping = FAULTS.slots(layer, slot_mapping)
            return update(self, layer, key, value, kv_cache, slot_mapping)

        def faulty_forward(
            self: Any,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            output_scale: Any = None,
            output_block_scale: Any = None,
        ) -> Any:
            with FAULTS.changed(self, layer, attn_metadata):
                return forward(
                    self,
                    layer,
                    query,
                    key,
                    value,
                    kv_cache,
                    attn_metadata,
                    output,
                    output_scale,
                    output_block_scale,
                )

        def faulty_build(
            self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            return build(
                self, common_prefix_len, FAULTS.metadata(self, common_attn_metadata), fast_build
            )

        import functools

        @functools.wraps(attend)
        def faulty_op(*args: Any, **kwargs: Any) -> Any:
            result = attend(*args, **kwargs)
            FAULTS.output(kwargs["output"])
            return result

        @functools.wraps(execute)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            FAULTS.runner = self
            return execute(self, *args, **kwargs)

        impl.do_kv_cache_update = functools.wraps(update)(do_kv_cache_update)
        impl.forward = functools.wraps(forward)(faulty_forward)
        builder.build = functools.wraps(build)(faulty_build)
        _custom_ops.cpu_attention_with_kv_cache = faulty_op
        GPUModelRunner.execute_model = watched

    # Where the fault is planted.

    def row(self) -> int | None:
        """Return the row of the request in the batch, None if it is not in it."""
        names = [name.split("-")[0] for name in self.runner.input_batch.req_ids]
        return names.index(self.request) if self.request in names else None

    def is_here(self, name: str, layer: Any) -> bool:
        """Answer whether a fault is planted in this layer now."""
        if self.active != name or f"layers.{self.layer}." not in layer.layer_name + ".":
            return False
        return self.row() is not None

    def note(self) -> None:
        """Note where the fault was planted, once."""
        from attnlab.serving.start import _started

        step = _started[0][0].state.step
        self.planted.setdefault(
            self.active,
            {"layer": self.layer, "request": self.request, "step": step.number if step else -1},
        )

    def rows(self) -> slice:
        """Return the new tokens of the request."""
        starts = self.runner.query_start_loc.np
        row = self.row()
        return slice(int(starts[row]), int(starts[row + 1]))

    # The faults.

    def slots(self, layer: Any, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return another slot_mapping: off by one, or without the first block of the request."""
        if self.is_here("slot_off_by_one", layer):
            slot_mapping = slot_mapping.clone()
            slot_mapping[self.rows()] += 1
            self.note()
        if self.is_here("recycled_block", layer):
            slot_mapping = slot_mapping.clone()
            slot_mapping[self.rows()][:BLOCK] = -1
            self.note()
        return slot_mapping

    @contextlib.contextmanager
    def changed(self, impl: Any, layer: Any, metadata: Any) -> Iterator[None]:
        """Change the block table or the window during a call of a layer."""
        window, table = impl.sliding_window, None if metadata is None else metadata.block_table
        if self.is_here("other_row", layer):
            row = self.row()
            assert row is not None
            metadata.block_table = table.clone()
            metadata.block_table[row] = table[(row + 1) % len(table)]
            self.note()
        if self.is_here("window", layer):
            impl.sliding_window = WINDOW
            self.note()
        try:
            yield
        finally:
            impl.sliding_window = window
            if metadata is not None:
                metadata.block_table = table
            self._layer = -1

    def metadata(self, builder: Any, common: Any) -> Any:
        """Return other metadata: seq_lens one too small."""
        if self.active != "seq_lens" or self.row() is None:
            return common
        if not any(f"layers.{self.layer}." in name for name in builder.layer_names):
            return common
        lens = common.seq_lens.clone()
        lens[self.row()] -= 1
        self.note()
        return common.replace(seq_lens=lens)

    def output(self, output: torch.Tensor) -> None:
        """Perturb one head of the request's rows, in the first layer that runs."""
        if self.active == "head" and self.row() is not None and "head" not in self.planted:
            output[self.rows(), 2] *= 1.001
            self.note()


FAULTS = Faults()
# Name, layer, request, and after how many of the request's steps it is planted.
PLAN = (
    ("slot_off_by_one", 1, "a", 4),
    ("other_row", 3, "b", 6),
    ("window", 1, "c", 8),
    ("head", 0, "a", 10),
    ("seq_lens", 1, "b", 12),
)


def engine(folder: Path) -> Any:
    """Return vLLM's engine with the random model: 24 blocks per group, so that requests are preempted."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    from vllm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=1_000_000,
        seed=0,
    ).llm_engine


class Drive:
    """Adds requests to the engine and runs its steps."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._draw = torch.Generator().manual_seed(0)
        self.shared = self.prompt(96)
        self.preempted = self.cached = self.steps = self.generated = 0
        scheduler = llm.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def prompt(self, length: int) -> list[int]:
        """Return random token ids."""
        found: list[int] = torch.randint(3, VOCABULARY, (length,), generator=self._draw).tolist()
        return found

    def add(self, name: str, tokens: list[int], count: int) -> None:
        """Add a request that generates ``count`` tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        self.llm.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def step(self) -> None:
        """Run one step."""
        self.steps += 1
        for output in self.llm.step():
            if output.finished:
                self.cached += output.num_cached_tokens or 0
                self.generated += len(output.outputs[0].token_ids)

    def run(self) -> None:
        """Run until no request is left."""
        while self.llm.has_unfinished_requests():
            self.step()

    def sound(self, name: str = "sound") -> None:
        """Run 16 requests: some share a prefix, some prompts are longer than a step."""
        for i in range(16):
            shared = self.shared + self.prompt(10 + 5 * (i % 8))
            self.add(f"{name}{i}", self.prompt(30 + 20 * (i % 8)) if i % 2 else shared, 40)
        self.run()

    def faulty(self) -> None:
        """Run three requests and plant a fault now and then; then one that gets used blocks."""
        for name, length in (("a", 70), ("b", 60), ("c", 50)):
            self.add(name, self.prompt(length), 24)
        plan = {after: (fault, layer, request) for fault, layer, request, after in PLAN}
        done = 0
        while self.llm.has_unfinished_requests():
            fault, FAULTS.layer, FAULTS.request = plan.get(done, ("", -1, ""))
            FAULTS.active = fault
            self.step()
            done += 1
        FAULTS.active, FAULTS.layer, FAULTS.request = "recycled_block", 3, "d"
        self.add("d", self.prompt(50), 1)
        self.step()
        FAULTS.active = ""
        self.run()


def rates(drive: Drive) -> dict[str, list[float]]:
    """Return tokens per second of CPU time of sound runs after a first pair, with and without the checks."""
    from attnlab.serving.start import _started

    session = _started[0][0]
    found: dict[str, list[float]] = {"with": [], "without": []}
    for repetition in range(4):
        for kind in ("with", "without") if repetition % 2 else ("without", "with"):
            session._is_off = kind == "without"
            for request in list(session.state.requests):
                request.is_running = False
            drive.llm.reset_prefix_cache()
            before, began = drive.generated, time.process_time()
            drive.sound(f"{kind}{repetition}")
            rate = (drive.generated - before) / (time.process_time() - began)
            if repetition:
                found[kind].append(rate)
    return found


def main() -> int:
    """Run the engine; write the result to the given file."""
    connections = refuse_network()
    hide_broken(("torchvision", "torchaudio", "torchcodec"))
    if "--rates" not in sys.argv:
        FAULTS.install()
    with tempfile.TemporaryDirectory(prefix="attnlab-model-") as folder:
        drive = Drive(engine(Path(folder)))
        if "--rates" in sys.argv:
            Path(sys.argv[1]).write_text(json.dumps(rates(drive)))
            return 0
        drive.sound()
        result = {
            "sound_steps": drive.steps,
            "preempted": drive.preempted,
            "cached_tokens": drive.cached,
            "connections": connections,
        }
        drive.faulty()
        result["planted"] = FAULTS.planted
    Path(sys.argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
