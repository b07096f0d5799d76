"""Run the masks and op arguments of unified_attention on this machine's GPU; compare with the reference.

python tools/native_arguments.py --source vllm-0.33.0.whl --out docs/h100-arguments.json

The Cases are those of ``attnlab check``: masks, trees, an FP8 query and output, quantised caches and tensor
descriptors. Each runs with the tensors that the check passes to the interpreted op, copied to the GPU. Cases
with other strides are left out: a copy does not keep them.
"""

import argparse
import datetime
import inspect
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.masks import CAUSAL
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import UNIFIED
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.public import DEFAULT_CASES
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.kernels.vllm.backend import VllmBackend, load
from attnlab.kernels.vllm.op_arguments import pass_argument
from attnlab.kernels.vllm.op_calls import bind
from attnlab.lab.argument_reference import bound_with_argument, reference_with_argument
from attnlab.tensors.batch import make_batch
from attnlab.tensors.cache import make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output
from attnlab.tensors.layout import presented

_STRIDES = ("gaps", "far_rows", "int8_per_token_head", "fp8_per_token_head")


def main() -> int:
    """Run every Case, write the document and print it; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("native_arguments.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    import triton

    backend = VllmBackend(path=args.source, requested_device="cpu")
    cases = hostile_cases(backend, UNIFIED, "sm_90", DEFAULT_CASES, 0)
    chosen = [
        case
        for case in cases
        if case.op_argument not in _STRIDES and (case.op_argument, case.mask) != (NONE, CAUSAL)
    ]
    document = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "source": backend.source.text(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "cases": [outcome(backend, case) for case in chosen],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 0


def outcome(backend: VllmBackend, case: Case) -> dict[str, Any]:
    """Return what a Case passes, and how many elements are off by more than their rounding bound."""
    names = ("mask", "op_argument", "sliding_window", "num_splits")
    passed = {name: getattr(case, name) for name in names}
    batch = make_batch(case)
    call = make_call(case, batch, make_cache(case, batch), make_output(case))
    try:
        output = native_output(backend, case, presented(call))
    except Exception as error:  # what a kernel raises differs by release
        return {**passed, "error": " ".join(f"{type(error).__name__}: {error}".split())[:160]}
    expected = reference_with_argument(case, batch).output
    bound = bound_with_argument(case, batch, call, decide(case).kernels)
    difference = (output.double() - expected.double()).abs()
    wrong = ~(difference <= bound)
    return {
        **passed,
        "elements": wrong.numel(),
        "wrong": int(wrong.sum()),
        "nan": int(output.isnan().sum()),
        "largest_error": float(difference.nan_to_num(0).max()),
    }


def native_output(backend: VllmBackend, case: Case, call: KernelCall) -> torch.Tensor:
    """Run the op on the GPU; return the output, [num_tokens, num_heads, head_size], on the CPU."""
    target = Target.of(case)
    function = load(backend.source, target.platform, "cuda").function(call.op)
    parameters = set(inspect.signature(function).parameters)
    passed = pass_argument(case, bind(function, call, target), parameters)
    given = passed.arguments
    moved = {
        name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in given.items()
    }
    function(**moved)
    torch.cuda.synchronize()
    given["out"].copy_(moved["out"])
    if passed.finish is not None:
        passed.finish(call.output)
    return call.output[: case.lengths.num_tokens]


if __name__ == "__main__":
    sys.exit(main())
