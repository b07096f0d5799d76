"""Inline assembly in kernels: PTX that computes float32 numbers, element by element.

Approximate instructions, such as ``ex2.approx``, are as exact here as NumPy's functions. What is no
computation with float32 registers raises NotImplementedError, as in Triton's interpreter.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_Numbers = np.ndarray[Any, Any]

_INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>\w+)\s+)?(?P<name>[a-z]\w*)(?P<options>(?:\.\w+)*)\.f32\s+(?P<operands>.+)"
)
_COMPUTED: dict[str, Callable[..., _Numbers]] = {
    "mov": np.positive, "abs": np.abs, "neg": np.negative, "rcp": np.reciprocal, "sqrt": np.sqrt,
    "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "add": np.add, "sub": np.subtract,
    "mul": np.multiply, "min": np.fmin, "max": np.fmax,
    "setp.eq": np.equal, "setp.ne": np.not_equal, "setp.lt": np.less, "setp.le": np.less_equal,
    "setp.gt": np.greater, "setp.ge": np.greater_equal,
}  # fmt: skip
_ROUNDING = (".approx", ".rn")


class Results(list[Any]):
    """The results of an operation that may have several, as Triton's builder returns them."""

    def get_result(self, index: int) -> Any:
        """Return one of them."""
        return self[index]


def run_ptx(text: str, constraints: str, values: Sequence[_Numbers]) -> list[_Numbers]:
    """Return the outputs of inline assembly, float32 arrays of the shape of ``values``, float32 arrays.

    ``constraints``: as of LLVM. An output that nothing is written to is NaN. Raises NotImplementedError for
    what is not interpreted.
    """
    if not values or any(one.dtype != np.float32 for one in values):
        raise NotImplementedError("inline assembly must get float32 numbers")
    outputs = [f"${i}" for i in range(constraints.count("="))]
    unwritten = np.full(np.shape(values[0]), np.nan, np.float32)
    registers = dict.fromkeys(outputs, unwritten)
    registers |= {f"${i}": one for i, one in enumerate(values, len(outputs))}
    with np.errstate(all="ignore"):
        for line in filter(None, (one.strip(" \t\n{}") for one in text.split(";"))):
            if not line.startswith(".reg"):
                _run(line, registers, unwritten)
    return [registers[name] for name in outputs]


def _run(line: str, registers: dict[str, _Numbers], unwritten: _Numbers) -> None:
    """Run one instruction."""
    match = _INSTRUCTION.fullmatch(line)
    options = match["options"] if match is not None else ""
    name = options.replace(".ftz", "")
    for rounding in _ROUNDING:
        name = name.replace(rounding, "")
    function = None if match is None else _COMPUTED.get(f"{match['name']}{name}")
    if match is None or function is None:
        raise NotImplementedError(f"the assembly {line!r} is not interpreted")
    target, *sources = (one.strip() for one in match["operands"].split(","))
    found = function(*(_number(one, registers, unwritten) for one in sources))
    if ".ftz" in options and found.dtype == np.float32:
        found = np.where(np.abs(found) < np.finfo(np.float32).tiny, np.float32(0), found)
    if match["guard"]:
        holds = registers[match["guard"]] ^ bool(match["negated"])
        found = np.where(holds, found, registers.get(target, unwritten))
    registers[target] = found


def _number(text: str, registers: dict[str, _Numbers], like: _Numbers) -> _Numbers:
    """Return what a register holds, or a decimal number in each element."""
    if text in registers:
        return registers[text]
    try:
        return np.full_like(like, float(text))
    except ValueError as error:
        raise NotImplementedError(f"{text!r} in assembly is not interpreted") from error
