"""Op arguments of cache writes in another format: scales per token and head, values of another width."""

import torch

from attnlab.case.case import Case
from attnlab.kernels.model.cache_write import written_cache
from attnlab.kernels.vllm.cache_arguments import scaled_cache
from attnlab.kernels.vllm.features import WRITE_DIFFKV, WRITE_SCALED
from attnlab.kernels.vllm.passed import Arguments, Passed
from attnlab.tensors.op_argument_data import narrow_size, scaled_numbers


def write_scaled(case: Case, given: Arguments) -> Passed:
    """Pass quantised caches with their scales; the result is the numbers times their scales."""
    caches = {"k": given["key_cache"], "v": given["value_cache"]}
    made = scaled_cache(case, caches)
    changed = {name: made[name] for name in ("kv_quant_mode", "k_scale_cache", "v_scale_cache")}
    # The op has a program for each row of key, so it needs a slot for each, -1 for padding.
    slots, rows = given["slot_mapping"], len(given["key"])
    changed["slot_mapping"] = torch.cat([slots, slots.new_full((rows - len(slots),), -1)])
    arguments = {**given, **changed, "key_cache": made["k"], "value_cache": made["v"]}

    def finish(output: torch.Tensor) -> None:
        # On the CPU, as the reference: a GPU gives NaN other bytes.
        pairs = ((made[name].cpu(), made[f"{name}_scale_cache"].cpu()) for name in ("k", "v"))
        halves = (scaled_numbers(case, *pair).to(output.dtype) for pair in pairs)
        output.copy_(written_cache(*halves))

    return Passed(
        arguments=arguments,
        finish=finish,
        function=WRITE_SCALED,
    )


def write_diffkv(case: Case, given: Arguments) -> Passed:
    """Pass narrower values, and one cache of both; the rest of the values in the result is 0."""
    size, key, value = narrow_size(case), given["key_cache"], given["value_cache"]
    parts = [one.view(torch.uint8) for one in (key, value[..., :size].contiguous())]
    cache = torch.cat(parts, -1).view(key.dtype)
    arguments = {**given, "value": given["value"][..., :size].contiguous(), "kv_cache": cache}

    def finish(output: torch.Tensor) -> None:
        output.view(torch.uint8).zero_()
        output[..., : cache.shape[-1]] = cache.flatten(0, 1)

    return Passed(arguments=arguments, finish=finish, function=WRITE_DIFFKV)
