"""Write a script that repeats a call of an op of linear attention without attnlab."""

import base64
import zlib

import torch

from attnlab.kernels.vllm.source import Source
from attnlab.library.op import names_in
from attnlab.linear.state_call import StateCall, make_call
from attnlab.linear.state_case import StateCase
from attnlab.linear.state_plan import right_plan
from attnlab.reports.upstream import render

_FUNCTIONS = {"key_first", "packed", "nan_like", "True", "returned"}


def state_script(case: StateCase, source: Source, title: str) -> str:
    """Return a script that calls the op of an installed package with the call of a case, and compares its
    output and states with the recurrence in float64."""
    op, call = case.record, make_call(case)
    plan = right_plan(call)
    file = source.op_file(op.module).relative_to(source.root)
    used = set[str]().union(*map(names_in, op.arguments.values())) - _FUNCTIONS
    result = names_in(op.result) | names_in(op.states or op.final)
    names = sorted((used | result) - _FUNCTIONS - op.arguments.keys() | (used - {"states"}))
    reference = {
        **{"query": plan.query, "key": plan.key, "value": plan.value, "gate": plan.gate},
        **{"beta": plan.beta, "states": plan.states},
        "skip": torch.zeros(len(call.A_log)) if plan.skip is None else plan.skip,
    }
    stores = [one if plan.stores[i] else () for i, one in enumerate(plan.stores)]
    slots = [slot for one in stores for _, slot in one]
    return render(
        "state_repro.py.j2",
        {
            "title": f"{op.name}: {title}",
            "package": source.text(),
            "module": ".".join(file.with_suffix("").parts),
            "function": op.python_name,
            "tensors": {
                **{name: _text(getattr(call, name)) for name in {*names, "states"}},
                **{f"ref_{name}": _text(one) for name, one in reference.items()},
            },
            "arguments": op.arguments,
            "result": op.result,
            "states": op.states or op.final,
            "whole": bool(op.states),
            "sequences": [
                ((plan.starts[i], plan.starts[i + 1]), load, stores[i])
                for i, load in enumerate(plan.loads)
            ],
            "delta": plan.delta,
            "scale": repr(plan.scale),
            "rows": _rows(call),
            "slots": slots if op.states else call.tables[:, 0].tolist(),
        },
    )


def _rows(call: StateCall) -> list[int]:
    """Return the rows that a caller reads."""
    seqs = [seq for seq in range(call.num_seqs) if not call.skipped[seq]]
    return [row for seq in seqs for row in call.rows_of(seq)]


def _text(value: object) -> str:
    """Return a tensor, or a number, as an expression of the script."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    return f'tensor("{text}", {value.dtype}, {", ".join(map(str, value.shape))})'
