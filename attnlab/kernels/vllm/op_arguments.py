"""How the op argument of a Case is passed (:mod:`attnlab.case.op_arguments`)."""

from collections.abc import Callable
from dataclasses import replace

import torch

from attnlab.case.case import Case
from attnlab.case.errors import OutOfMemory
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import MERGE
from attnlab.kernels.model.cache_write import written_cache
from attnlab.kernels.vllm.cache_arguments import (
    VALUE_SCALE,
    diffkv,
    latent_cache,
    scaled_cache,
)
from attnlab.kernels.vllm.features import check_argument
from attnlab.kernels.vllm.passed import Arguments, Passed
from attnlab.kernels.vllm.strides import (
    USED_STRIDES,
    far_dim,
    far_heads,
    with_gaps,
    with_padded_heads,
)
from attnlab.kernels.vllm.write_arguments import write_diffkv, write_scaled
from attnlab.tensors.cache import interleaved
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.op_argument_data import OUTPUT_SCALE, QUERY_SCALE


def pass_argument(
    case: Case,
    arguments: Arguments,
    parameters: set[str],
    value_scale: torch.Tensor | None = None,
) -> Passed:
    """Return ``arguments`` with the op argument of a Case; they are those that the op gets without one.

    ``parameters``: the names of the op's parameters. ``value_scale``: as in RunOptions. Raises
    Unsupported if the release lacks one, OutOfMemory if the tensors do not fit on a GPU.
    """
    name = case.op_argument
    if name == NONE:
        return Passed(arguments=arguments)
    check_argument(case, parameters)
    try:
        made = _MAKERS[name](case, {**arguments, VALUE_SCALE: value_scale})
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"op_argument {name} needs more memory than the GPU has") from error
    found = made if isinstance(made, Passed) else Passed(arguments={**arguments, **made})
    if found.function is not None:  # it has parameters of its own
        return found
    lacking = set(found.arguments) - set(arguments) - parameters
    kept = {key: value for key, value in found.arguments.items() if key not in lacking}
    if "prefill_tokens_with_context" in lacking:  # then every prefix is read
        kept |= {key: arguments[key] for key in ("prefix_output", "prefix_lse")}
    return replace(found, arguments=kept)


def _fp8_query(case: Case, given: Arguments) -> Arguments:
    format = FORMATS[case.machine.fp8_e4m3]
    query = format.encode(given["q"], QUERY_SCALE).view(format.dtype)
    return {"q": query, "q_descale": torch.tensor([QUERY_SCALE], device=query.device)}


def _fp8_output(case: Case, given: Arguments) -> Passed:
    """Pass an FP8 output; :attr:`Passed.finish` decodes it.

    An element that no kernel writes keeps its number: the buffer is full of a NaN whose sign no kernel
    stores, if the format has two.
    """
    name = next(one for one in ("out", "output", "o") if one in given)
    scale = "fp8_out_scale" if name == "o" else "output_scale"
    format = FORMATS[case.machine.fp8_e4m3]
    stored = torch.full_like(given[name], float("nan")).neg().to(format.dtype)
    unwritten = stored.view(torch.uint8).flatten()[:1].clone()

    def finish(output: torch.Tensor) -> None:
        found = stored[: len(output)]
        is_unwritten = found.view(torch.uint8) == unwritten
        output.copy_(torch.where(is_unwritten, output.float(), found.float() * OUTPUT_SCALE))

    changed = {name: stored, scale: torch.tensor([OUTPUT_SCALE], device=stored.device)}
    if case.op == MERGE:
        changed |= _suffix_only(case, given)
    return Passed(arguments={**given, **changed}, finish=finish)


def _cached_new_tokens(case: Case, given: Arguments) -> Arguments:
    return {name: None for name in ("k", "v", "key", "value") if name in given}


def _block_pointers(case: Case, given: Arguments) -> Arguments:
    """Pass the address of each block in the key cache."""
    name = "block_table" if "block_table" in given else "b_loc"
    cache = given["key_cache" if "key_cache" in given else "k_cache"]
    stride = cache.stride(0) * cache.element_size()
    return {name: cache.data_ptr() + given[name].long() * stride, "is_block_table_ptr": True}


def _suffix_only(case: Case, given: Arguments) -> Arguments:
    """Pass the number of tokens before the last sequences without a context, and NaN as their prefix."""
    count, lengths = case.lengths.num_tokens, case.lengths
    for query_len, ctx_len in zip(lengths.query_lens[::-1], lengths.ctx_lens[::-1], strict=True):
        if ctx_len:
            break
        count -= query_len
    prefix, lse = given["prefix_output"].clone(), given["prefix_lse"].clone()
    prefix[count:], lse[:, count:] = float("nan"), float("nan")
    return {"prefill_tokens_with_context": count, "prefix_output": prefix, "prefix_lse": lse}


def _other_strides(case: Case, given: Arguments) -> Passed:
    """Pass tensors with gaps, or with a dimension far apart; :attr:`Passed.finish` reads the result from
    them."""
    changed: Arguments = {}
    dim = case.argument.far_dim
    for name, used in USED_STRIDES[case.op].items():
        tensor = given.get(name)
        if not isinstance(tensor, torch.Tensor) or (dim or 0) >= used:
            continue
        if dim is None:
            changed[name] = with_gaps(tensor, used)
        elif case.op == MERGE and tensor.dim() == 3:
            changed[name] = far_heads(tensor, dim)
        else:
            changed[name] = far_dim(tensor, dim)
    found = {**given, **changed}

    def finish(output: torch.Tensor) -> None:
        if case.spec.writes_cache:
            output.copy_(written_cache(found["key_cache"], found["value_cache"]))
        else:
            written = next(found[name] for name in ("out", "output", "o") if name in found)
            output.copy_(written[: len(output)])

    return Passed(arguments=found, finish=finish)


def _padded_heads(case: Case, given: Arguments) -> Passed:
    """Pass outputs [num_tokens, num_heads, head_size] whose heads have a gap after them."""
    names = ("output", "prefix_output", "suffix_output")
    changed: Arguments = {name: with_padded_heads(given[name]) for name in names}

    def finish(output: torch.Tensor) -> None:
        output.copy_(changed["output"][: len(output)])

    return Passed(arguments={**given, **changed}, finish=finish)


def _short_scratch(case: Case, given: Arguments) -> Arguments:
    """Pass scratch memory for one token less."""
    names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    return {name: given[name][: len(given["q"]) - 1] for name in names}


def _fp8_tokens(case: Case, given: Arguments) -> Arguments:
    format = FORMATS[case.machine.fp8_e4m3]
    scales = {"key": case.k_scale, "value": case.v_scale}
    return {
        name: format.encode(given[name], scale).view(format.dtype) for name, scale in scales.items()
    }


def _byte_cache(case: Case, given: Arguments) -> Passed:
    """Pass the cache as bytes; the arguments of the caller keep the dtype."""
    key, value = given["key_cache"], given["value_cache"]
    changed = {"key_cache": key.view(torch.uint8), "value_cache": value.view(torch.uint8)}

    def finish(output: torch.Tensor) -> None:
        output.copy_(written_cache(key, value))

    return Passed(arguments={**given, **changed}, finish=finish)


def _head_major(case: Case, given: Arguments) -> Passed:
    """Pass the cache in the layout x-split; :attr:`Passed.finish` brings it into the form of the output."""
    is_packed = case.argument.base == "head_major_packed"
    key, value = given["key_cache"], given["value_cache"]
    x = 16 // key.element_size()
    split = key.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    turned = value.permute(0, 2, 3, 1).contiguous()
    turned = interleaved(turned) if is_packed else turned
    turned = with_gaps(turned, 1) if _has_far_values(case) else turned
    changed = {"key_cache": split, "value_cache": turned}

    def finish(output: torch.Tensor) -> None:
        stored = interleaved(turned, back=True) if is_packed else turned
        keys = split.permute(0, 3, 1, 2, 4).flatten(3)
        output.copy_(written_cache(keys, stored.permute(0, 3, 1, 2)))

    packs = {"interleaved_v_pack_factor": x} if is_packed else {}
    return Passed(arguments={**given, **changed, **packs}, finish=finish)


def _has_far_values(case: Case) -> bool:
    return case.op_argument.endswith("far_values")


def _far_values(case: Case, given: Arguments) -> Passed:
    """Pass a value cache whose blocks are farther apart than those of the key cache."""
    key, value = given["key_cache"], with_gaps(given["value_cache"], 1)

    def finish(output: torch.Tensor) -> None:
        output.copy_(written_cache(key, value))

    return Passed(arguments={**given, "value_cache": value}, finish=finish)


def _padded_tokens(case: Case, given: Arguments) -> Passed:
    """Pass key and value with padded heads, in the format of the argument that this one is based on."""
    base = case.argument.base
    made = {} if base == NONE else _MAKERS[base](case, given)
    passed = made if isinstance(made, Passed) else Passed(arguments={**given, **made})
    padded = {name: with_padded_heads(passed.arguments[name]) for name in ("key", "value")}
    return replace(passed, arguments={**passed.arguments, **padded})


def _by_op(
    attend: Callable[[Case, Arguments], Arguments | Passed],
    write: Callable[[Case, Arguments], Passed],
) -> Callable[[Case, Arguments], Arguments | Passed]:
    """Return the maker of an argument of attention and of cache writes."""
    return lambda case, given: (write if case.spec.writes_cache else attend)(case, given)


_MAKERS: dict[str, Callable[[Case, Arguments], Arguments | Passed]] = {
    "alibi_sqrt": lambda case, given: {"use_alibi_sqrt": True},
    "fp8_query": _fp8_query,
    "fp8_output": _fp8_output,
    **{name: _by_op(scaled_cache, write_scaled) for name, one in OP_ARGUMENTS.items() if one.cache},
    **{name: _padded_tokens for name, one in OP_ARGUMENTS.items() if one.strided is not None},
    "diffkv": _by_op(diffkv, write_diffkv),
    "tensor_descriptors": lambda case, given: {"use_td": True},
    "cached_new_tokens": _cached_new_tokens,
    "block_pointers": _block_pointers,
    "sinks_of_key_0": lambda case, given: {"sinks_bias_key0": True},
    "skip_decode": lambda case, given: {"skip_decode": True},
    "suffix_only_tokens": _suffix_only,
    "no_lse": lambda case, given: {**_suffix_only(case, given), "output_lse": None},
    "latent_cache": latent_cache,
    "default_scales": lambda case, given: {"k_scale": None, "v_scale": None},
    "flat_buffers": lambda case, given: {
        name: given[name].flatten(0, 1) for name in ("k_buffer", "v_buffer")
    },
    "gaps": _other_strides,
    "padded_heads": _padded_heads,
    **{name: _other_strides for name, one in OP_ARGUMENTS.items() if one.far_dim is not None},
    "short_scratch": _short_scratch,
    "no_max_seq_len": lambda case, given: {"max_seq_len": None},
    "fp8_tokens": _fp8_tokens,
    "byte_cache": _byte_cache,
    "named_cache_dtype": lambda case, given: {"kv_cache_dtype": "bfloat16"},
    "far_values": _far_values,
    **{
        name: _head_major
        for name in OP_ARGUMENTS
        if name.startswith("head_major") and not name.endswith("padded_tokens")
    },
}
