"""A deployment: what a model and its server let grow, and how far."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase

GPUS = {"H200": 141, "MI355X": 288}  # GB of memory; data sheets of NVIDIA and AMD


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on one GPU.

    - ``head_size``: of a key; with multi-head latent attention that of the latent vector, and ``kv_heads`` 1.
    - ``max_context``, ``batched_tokens``: tokens of a sequence and of a step; ``seqs``: sequences of a step.
    - ``gpu_memory``: GB (10^9 bytes); ``weights``: GB of it that weights take. All of the rest may hold the
      cache: the number of blocks is an upper limit.
    - ``cache_bytes``: bytes of an element of the cache; ``block_size``: tokens of a block.
    """

    name: str = "given"
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    layers: int = 32
    max_context: int = 131072
    block_size: int = 16
    gpu_memory: int = 288
    batched_tokens: int = 8192
    seqs: int = 1024
    cache_bytes: int = 2
    weights: int = 0

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self)[1:]:
            value = getattr(self, one.name)
            least = 0 if one.name == "weights" else 1
            if type(value) is not int or value < least:
                raise InvalidCase(f"{one.name} must be an int of at least {least}, got {value!r}")
        if self.weights >= self.gpu_memory:
            text = f"weights must be less than gpu_memory {self.gpu_memory}"
            raise InvalidCase(f"{text}, got {self.weights}")
        if self.heads % self.kv_heads:
            text = f"heads must be a multiple of kv_heads {self.kv_heads}"
            raise InvalidCase(f"{text}, got {self.heads}")

    @property
    def is_latent(self) -> bool:
        """Answer whether keys and values are one latent vector (MLA)."""
        return self.head_size == 576 and self.kv_heads == 1

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in the cache of all layers."""
        tensors = 1 if self.is_latent else 2
        return tensors * self.kv_heads * self.head_size * self.cache_bytes * self.layers

    def cache_tokens(self, gpu_memory: int | None = None) -> int:
        """Return how many tokens the cache has if it takes all of the memory, in GB, but the weights."""
        return max(0, (gpu_memory or self.gpu_memory) - self.weights) * 10**9 // self.token_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of a launch that the model determines."""
        names = ("heads", "kv_heads", "head_size", "block_size")
        return {name: getattr(self, name) for name in names}

    @property
    def limits(self) -> dict[str, int]:
        """Return the largest value of each size that grows."""
        slots = self.cache_tokens()
        return {
            "tokens": self.batched_tokens,
            "seqs": self.seqs,
            "ctx_len": self.max_context,
            "slots": slots,
            "blocks": slots // self.block_size,
            "splits": -(-self.max_context // 256),
            **self.sizes,
        }

    def needed(self, size: str, context: int) -> int | None:
        """Return the value of a size that a sequence of ``context`` tokens needs; None if it needs none."""
        per_token = {"tokens": 1, "ctx_len": 1, "slots": 1, "blocks": 1 / self.block_size}
        return max(1, int(context * per_token[size])) if size in per_token else None


# Facts of models, and where they were read (2026-11-25): the project, its commit, and the file.
_LITGPT = "Lightning-AI/litgpt@26857050, litgpt/config.py"
_MAXTEXT = "AI-Hypercomputer/maxtext, MaxText/configs/models/"
_FIELDS = ("heads", "kv_heads", "head_size", "layers", "max_context")
_MODELS: dict[str, tuple[tuple[int, ...], str]] = {
    "Llama-3.1-8B": ((32, 8, 128, 32, 131072), _LITGPT),
    "Llama-3.1-70B": ((64, 8, 128, 80, 131072), _LITGPT),
    "Llama-3.1-405B": ((128, 8, 128, 126, 131072), _LITGPT),
    "Qwen3-8B": ((32, 8, 128, 36, 40960), _LITGPT),
    "Qwen3-32B": ((64, 8, 128, 64, 40960), _LITGPT),
    "Qwen3-235B-A22B": ((64, 4, 128, 94, 40960), _LITGPT),
    "Mistral-7B-v0.3": ((32, 8, 128, 32, 32768), _LITGPT),
    "Mixtral-8x22B-v0.1": ((48, 8, 128, 56, 65536), _LITGPT),
    "DeepSeek-V3": (
        (128, 1, 576, 61, 163840),
        f"{_MAXTEXT}deepseek3-671b.yml; max_context in src/{_MAXTEXT[26:]}deepseek3-671b.yml",
    ),
    "DeepSeek-V2-Lite": ((16, 1, 576, 27, 163840), f"{_MAXTEXT}deepseek2-16b.yml"),
    "gpt-oss-120b": ((64, 8, 64, 36, 131072), "openai/gpt-oss@0568dfc9, gpt_oss/torch/model.py"),
    "phi-4": ((40, 10, 128, 40, 16384), _LITGPT),
}
# GB of weights in 16 bits, rounded up: parameters counted from the same files.
_WEIGHTS = {"Llama-3.1-8B": 17, "DeepSeek-V2-Lite": 32}
PRESETS: Mapping[str, Deployment] = {
    name: Deployment(
        name=name, weights=_WEIGHTS.get(name, 0), **dict(zip(_FIELDS, facts, strict=True))
    )
    for name, (facts, _) in _MODELS.items()
}
SOURCES: Mapping[str, str] = {name: source for name, (_, source) in _MODELS.items()}


def read_deployment(text: str, changes: Mapping[str, Any]) -> Deployment:
    """Return the deployment that a preset or a TOML file names, with changes by field."""
    base: dict[str, Any] = {}
    if text in PRESETS:
        base = dataclasses.asdict(PRESETS[text])
    elif text:
        path = Path(text)
        if not path.is_file():
            raise InvalidCase(
                f"deployment must be a TOML file or one of {', '.join(PRESETS)}, got {text}"
            )
        try:
            base = {"name": path.stem, **tomllib.loads(path.read_text())}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidCase(f"deployment must be TOML, got {path}: {error}") from error
    known = {one.name for one in dataclasses.fields(Deployment)}
    if unknown := sorted(set(base) - known):
        raise InvalidCase(f"deployment must have only {', '.join(sorted(known))}, got {unknown[0]}")
    return Deployment(**{**base, **changes})
