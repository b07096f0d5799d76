"""Run a write by vLLM's op, or by its model, and compare the bytes of the cache with what they must be."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable, Unsupported
from attnlab.case.shown import Shown, json_fields
from attnlab.kernels.cuda.backend import cache_ops, has_source
from attnlab.kernels.vllm.backend import calling, load
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.writes.write_case import (
    CUDA_FORMATS,
    DIFFKV,
    DS_LATENT,
    FP8,
    INT4,
    INT8,
    LATENT,
    PER_TOKEN_HEAD,
    PLAIN,
    X_SPLIT,
    ExpectedHalf,
    Stored,
    WriteCase,
    WriteInputs,
    by_slot,
    expected_half,
    make_write_inputs,
    scale_of_half,
    write_latents,
    write_variants,
    written_latents,
)

# Run a write by vLLM's CUDA op, compiled from csrc/cache_kernels.cu for the emulated device.


def cuda_write(source: Source) -> Callable[[WriteCase, WriteInputs], None]:
    """Return the writer that calls the CUDA op of a format; it raises Unsupported without the source."""

    def write(case: WriteCase, inputs: WriteInputs) -> None:
        op, tensors = _op(case, inputs)
        if not has_source(source.root):
            raise Unsupported(
                f"{op} is a C++ op: its source csrc/cache_kernels.cu is in an sdist or a checkout, not in "
                f"this vLLM ({source.kind}); attnlab fetch --sdist 0.33.0 downloads one"
            )
        if case.machine.is_rocm:
            raise Unsupported(f"platform must be one of NVIDIA with {op}, got {case.platform}")
        dtype = DS_LATENT if case.cache_format == DS_LATENT else case.kv_cache_dtype
        cache_ops(source.root)(op, tensors, dtype)

    return write


def _op(case: WriteCase, inputs: WriteInputs) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of a format's op, and its tensors by the names of its parameters."""
    first = case.first_block * case.block_size
    caches = {name: _whole(view, case.first_block) for name, view in inputs.caches.items()}
    slots = torch.where(inputs.slots < 0, inputs.slots, inputs.slots + first)
    scales = {name: torch.tensor([getattr(case, name)]) for name in ("k_scale", "v_scale")}
    if case.cache_format in (LATENT, DS_LATENT):
        return "concat_and_cache_mla", {
            "kv_c": inputs.key[:, 0],
            "k_pe": inputs.value[:, 0],
            "kv_cache": caches["kv_cache"][:, :, 0],
            "slot_mapping": slots,
            "scale": scales["k_scale"],
        }
    tensors = {"key": inputs.key, "value": inputs.value, "slot_mapping": slots, **caches, **scales}
    if case.cache_format == X_SPLIT:
        tensors["key_cache"] = caches["key_cache"].permute(0, 2, 3, 1, 4)
        tensors["value_cache"] = caches["value_cache"].permute(0, 2, 3, 1)
        return "reshape_and_cache", tensors
    return "reshape_and_cache_flash", tensors


def _whole(view: torch.Tensor, first_block: int) -> torch.Tensor:
    """Return the view of a cache from block 0 on."""
    return view.as_strided((first_block + view.shape[0], *view.shape[1:]), view.stride(), 0)


# WriteReport: the hostile cache writes that ran, and what they got wrong.


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """A hostile write: what it got wrong, by kind, or the error for which it could not run.

    ``failed``: the error is a failure of the op itself, for example an access outside of its tensors.
    """

    name: str
    case: WriteCase
    wrong: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    failed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        return json_fields(self, "status", without=("failed",))

    @property
    def status(self) -> str:
        """Return "match", "mismatch", "failed" or "unavailable"."""
        if self.failed:
            return "failed"
        if self.error is not None:
            return "unavailable"
        return "mismatch" if self.wrong else "match"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriteReport(Shown):
    """What hostile cache writes found. ``backend``: whose ops ran."""

    backend: str
    results: tuple[WriteResult, ...]

    @property
    def findings(self) -> tuple[WriteResult, ...]:
        """Return the writes that are wrong, and those that failed."""
        return tuple(one for one in self.results if one.status in ("mismatch", "failed"))

    @property
    def unavailable(self) -> tuple[WriteResult, ...]:
        """Return the writes that could not run."""
        return tuple(one for one in self.results if one.status == "unavailable")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of strict JSON."""
        counts = {name: len(getattr(self, name)) for name in ("findings", "unavailable")}
        return {**json_fields(self), **counts, "writes": len(self.results)}


NUMBERS, SCALES, ZERO_POINTS, ELSEWHERE = "numbers", "scales", "zero points", "elsewhere"
_MODES = {INT8: 2, FP8: 3, INT4: 4}  # KVQuantMode of vLLM 0.33.0
Writer = Callable[[WriteCase, WriteInputs], None]


def check_write(case: WriteCase, write: Writer) -> dict[str, int]:
    """Return what ``write`` gets wrong, by kind the number of wrong elements; empty if nothing is.

    Kinds: "numbers", "scales" and "zero points" of written tokens; "elsewhere", bytes of slots that no token
    has and of the gaps after pages. It mutates the memory of its inputs.
    """
    inputs = make_write_inputs(case)
    before = {name: one.clone() for name, one in inputs.memory.items()}
    write(case, inputs)
    wrong = dict.fromkeys((NUMBERS, SCALES, ZERO_POINTS, ELSEWHERE), 0)
    for kind, found, expected in _written(case, inputs):
        wrong[kind] += int(_is_wrong(found, expected).sum())
    wrong[ELSEWHERE] = _changed_elsewhere(inputs, before)
    return {name: count for name, count in wrong.items() if count}


def model_write(case: WriteCase, inputs: WriteInputs) -> None:
    """Write the correct bytes: a model of the op."""
    if case.cache_format == DS_LATENT:
        return write_latents(case, inputs)
    written = inputs.slots >= 0
    for cache, scale, columns, half in _halves(case, inputs):
        numbers = half.stored.numbers
        if case.cache_format == INT4:
            pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
            numbers = pairs[..., 0] | (pairs[..., 1] << 4)
        block, at = (
            inputs.slots[written] // case.block_size,
            inputs.slots[written] % case.block_size,
        )
        view = cache[..., columns]
        view[block, at] = numbers.to(case.element).reshape(-1, *view.shape[2:])
        if scale is not None and half.scale is not None:
            stored = half.scale.numbers.float()
            if half.zero is not None:
                bits = (stored.view(torch.int32) & -16) | half.zero.numbers.int()
                stored = bits.view(torch.float32)
            scale[block, at] = stored


def vllm_write(source: Source, where: str = "cpu") -> Writer:
    """Return the writer that calls the op of a release.

    Triton ops run under the interpreter or on a GPU, CUDA ops on the emulated device. It raises Unsupported
    for a format whose op the source does not have.
    """
    by_cuda = cuda_write(source)

    def write(case: WriteCase, inputs: WriteInputs) -> None:
        if case.cache_format in CUDA_FORMATS:
            return by_cuda(case, inputs)
        loader = load(source, case.machine, where).loader
        function, arguments = _write_op(case, inputs, loader)
        known = inspect.signature(function).parameters  # older releases have no kv_quant_mode
        with calling(function.__name__, source):
            function(**{name: one for name, one in arguments.items() if name in known})

    return write


def _write_op(
    case: WriteCase, inputs: WriteInputs, loader: Any
) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a format and its arguments."""
    given: dict[str, Any] = {
        "key": inputs.key,
        "value": inputs.value,
        "slot_mapping": inputs.slots,
        **inputs.caches,
    }
    if case.cache_format == INT4:
        module = loader.load("int4_per_token_head")  # without the rotation before it
        given |= {"packing_factor": 2, "kernel": module._reshape_cache_int4_kernel}
        return _named(module, "_run_reshape_kernel"), {**given, **inputs.scales}
    module = loader.load("triton_reshape_and_cache_flash")
    if case.cache_format == DIFFKV:
        scales = {name: torch.tensor([getattr(case, name)]) for name in ("k_scale", "v_scale")}
        return _named(module, "triton_reshape_and_cache_flash_diffkv"), {
            **given,
            **scales,
            "kv_cache_dtype": case.kv_cache_dtype,
        }
    mode = {"kv_quant_mode": _MODES[case.cache_format]}
    return _named(module, "triton_reshape_and_cache_flash_per_token_head_quant"), {
        **given,
        **inputs.scales,
        **mode,
    }


def _named(module: Any, name: str) -> Callable[..., None]:
    """Return a function of a module; raise Unsupported if this release does not have it."""
    found: Callable[..., None] | None = getattr(module, name, None)
    if found is None:
        raise Unsupported(f"this release has no {name}")
    return found


def _halves(
    case: WriteCase, inputs: WriteInputs
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, slice, ExpectedHalf]]:
    """Yield keys, then values: their cache, their scale cache, their columns, and what they must be."""
    written = inputs.slots >= 0
    for is_key, new in ((True, inputs.key), (False, inputs.value)):
        half = expected_half(case, new[: len(written)][written], scale_of_half(case, is_key))
        if case.cache_format in PER_TOKEN_HEAD:
            name = "key_cache" if is_key else "value_cache"
            scale = inputs.scales["k_scale_cache" if is_key else "v_scale_cache"]
            yield inputs.caches[name], scale, slice(None), half
        elif case.cache_format in PLAIN:
            yield inputs.caches["key_cache" if is_key else "value_cache"], None, slice(None), half
        else:
            columns = slice(0, case.head_size) if is_key else slice(case.head_size, None)
            yield inputs.caches["kv_cache"], None, columns, half


def _written(case: WriteCase, inputs: WriteInputs) -> Iterator[tuple[str, torch.Tensor, Stored]]:
    """Yield what the slots of written tokens hold, as kind, numbers and what they must be."""
    slots = inputs.slots[inputs.slots >= 0]
    if case.cache_format == DS_LATENT:
        for is_scale, found, expected in written_latents(
            case, inputs, by_slot(inputs.caches["kv_cache"])[slots, 0]
        ):
            yield SCALES if is_scale else NUMBERS, found, expected
        return
    for cache, scale, columns, half in _halves(case, inputs):
        found = by_slot(cache)[slots][..., columns].flatten(2)
        if case.cache_format == INT4:
            found = torch.stack([found & 0xF, found >> 4], -1).flatten(-2)
        yield NUMBERS, found.double(), half.stored
        if scale is None or half.scale is None:
            continue
        one = by_slot(scale)[slots]
        yield SCALES, one.double(), half.scale
        if half.zero is not None:
            yield ZERO_POINTS, (one.view(torch.int32) & 0xF).double(), half.zero


def _is_wrong(found: torch.Tensor, expected: Stored) -> torch.Tensor:
    return ~((found - expected.numbers).abs() <= expected.bound)


def _changed_elsewhere(inputs: WriteInputs, before: dict[str, torch.Tensor]) -> int:
    """Return how many bytes outside the slots of written tokens changed."""
    count, slots = 0, inputs.slots[inputs.slots >= 0]
    for name, view in {**inputs.caches, **inputs.scales}.items():
        block, at = slots // view.shape[1], slots % view.shape[1]
        marks = torch.zeros_like(inputs.memory[name])
        marked = marks.view(view.dtype).as_strided(view.shape, view.stride())
        marked[block, at] = 1
        each = view.element_size()
        is_own = marks.view(-1, each).any(1).repeat_interleave(each)
        count += int(((inputs.memory[name] != before[name]) & ~is_own).sum())
    return count


# The part of ``import attnlab`` that checks cache writes in further formats.


def check_writes(
    *, backend: str = "vllm", source: Path | str | None = None, device: str = "cpu"
) -> WriteReport:
    """Run hostile cache writes in further formats, and compare the bytes of the cache.

    ``backend``: "vllm" for the ops of ``source`` (None: the installed vLLM), or "model". The CUDA ops need an
    sdist or a checkout: their source is compiled, and runs on the emulated device. Raises
    InvalidCase for a source that is no vLLM, and Unavailable if none is installed.
    """
    found = find_source(source) if backend == "vllm" else None
    write = model_write if found is None else vllm_write(found, device)
    results = []
    for name, case in write_variants().items():
        try:
            wrong = check_write(case, write)
            results.append(WriteResult(name=name, case=case, wrong=wrong))
        except KernelFailed as error:
            results.append(WriteResult(name=name, case=case, error=str(error), failed=True))
        except (Unavailable, Unsupported, KernelRejected) as error:
            results.append(WriteResult(name=name, case=case, error=str(error)))
    text = "model" if found is None else found.text()
    return WriteReport(backend=text, results=tuple(results))
