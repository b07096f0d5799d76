"""StateCase: one call of an op of linear attention, and hostile ones."""

import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Declared, Flag, Int, Lens, Maybe, Number, OneOf, group
from attnlab.case.ops import OPS
from attnlab.case.platforms import PLATFORMS
from attnlab.library.op import Op, StateOp, libraries, state_ops_of

STATE_OPS = {op.name: op for library in libraries() for op in state_ops_of(library)}
# Every op by name. OPS gets the records of users' libraries later.
RECORDS: Mapping[str, Op | StateOp] = ChainMap[str, Any](OPS, STATE_OPS)
_OPTIONS = ("state_v_first", "reverse", "use_gate_in_kernel", "gate_limit")
_GATES = {
    "usual": "half of a state is left after some tokens",
    "none": "states do not decay",
    "strong": "some tokens erase the state",
}
_op, _sizes, _lengths = group("the op"), group("sizes"), group("sequences and states")
_data = group("data")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCase(Declared):
    """One call of an op of linear attention.

    The help of each field says what it is. ``initial`` "none" passes no states. ``skipped`` is as in a batch
    that is padded for a CUDA graph. With ``spec_tokens``, each new token stores its state, and the state of
    the last accepted token is read. Without ``use_norm``, keys have the length 1 before the call.
    """

    _command = "linear"

    op: str = _op("vllm_fused_recurrent_gated_delta_rule", OneOf(tuple(STATE_OPS)), "the op")
    query_lens: tuple[int, ...] = _lengths((70, 3, 1), Lens(0), "new tokens of each sequence")
    num_k_heads: int = _sizes(2, Int(1, 64), "heads of queries and keys")
    num_v_heads: int = _sizes(2, Int(1, 64), "heads of values; a multiple of the key heads")
    head_k_dim: int = _sizes(16, Int(1, 256), "elements of a head's key")
    head_v_dim: int = _sizes(16, Int(1, 256), "elements of a head's value")
    initial: str = _lengths(
        "all",
        OneOf(("all", "some", "none")),
        "which sequences have a state before the call; some: every second has none",
    )
    skipped: int = _lengths(0, Int(0, 64), "sequences at the end with slot -1")
    reverse: bool = _lengths(
        False, Flag(), "the last token comes first; rows are numbered in this order"
    )
    spec_tokens: int = _lengths(
        0, Int(0, 16), "slots of each sequence in a speculative decode, 0 for none"
    )
    gates: str = _data("usual", OneOf(tuple(_GATES)), "how fast states decay")
    scale: float | None = _data(None, Maybe(Number(), "head_k_dim ** -0.5"), "scale of the output")
    use_norm: bool = _data(True, Flag(), "the op normalises queries and keys")
    dtype: str = _data("bfloat16", OneOf(tuple(DTYPE_BYTES)), "dtype of queries, keys and values")
    use_gate_in_kernel: bool = _data(False, Flag(), "the op computes gates and beta")
    gate_limit: float | None = _data(
        None, Maybe(Number(), "none"), "gates that the op computes are above -gate_limit"
    )
    gate_dtype: str = _data(
        "float32", OneOf(("float32", "bfloat16", "float16")), "dtype of the gates that are passed"
    )
    state_v_first: bool = _data(False, Flag(), "states are passed as [value_size, key_size]")
    state_dtype: str = _data("float32", OneOf(tuple(DTYPE_BYTES)), "dtype of the states")
    seed: int = _data(0, Int(0), "seed of the data")
    platform: str = _data("sm_90", OneOf(tuple(PLATFORMS)), "the platform that is modelled")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        op, of_op, lens = self.record, f"with {self.op}", self.query_lens
        yield "dtype", self.dtype not in op.dtypes, f"{' or '.join(op.dtypes)} {of_op}"
        allowed = op.state_dtypes
        yield "state_dtype", self.state_dtype not in allowed, f"{' or '.join(allowed)} {of_op}"
        gates = op.gate_dtypes
        yield "gate_dtype", self.gate_dtype not in gates, f"{' or '.join(gates)} {of_op}"
        computed = self.use_gate_in_kernel
        is_passed = computed and self.gate_dtype != "float32"
        yield "gate_dtype", is_passed, "float32 with use_gate_in_kernel"
        is_alone = self.gate_limit is not None and not computed
        yield "gate_limit", is_alone, "none without use_gate_in_kernel"
        is_uneven = self.num_v_heads % self.num_k_heads > 0
        yield "num_v_heads", is_uneven, f"a multiple of num_k_heads ({self.num_k_heads})"
        is_group = self.num_v_heads > self.num_k_heads and not op.groups
        yield "num_v_heads", is_group, f"num_k_heads ({self.num_k_heads}) {of_op}"
        yield "use_norm", self.use_norm and not op.norms, f"false {of_op}"
        yield "initial", self.initial != "all" and op.slots, f"all {of_op}"
        yield "skipped", self.skipped > 0 and not op.skips, f"0 {of_op}"
        yield "skipped", self.skipped >= len(lens) > 0, "less than the number of sequences"
        yield "spec_tokens", self.spec_tokens > 0 and not op.num_accepted, f"0 {of_op}"
        yield "scale", self.scale is not None and not op.scales, f"the default {of_op}"
        sizes = {self.head_k_dim, self.head_v_dim}
        is_odd = op.square > 0 and (len(sizes) > 1 or self.head_k_dim % op.square > 0)
        yield "head_v_dim", is_odd, f"head_k_dim, a multiple of {op.square}, {of_op}"
        yield "query_lens", op.one_sequence and len(lens) != 1, f"one sequence {of_op}"
        yield "query_lens", not op.empty and 0 in lens, f"above 0 for all sequences {of_op}"
        yield "query_lens", op.one_token and {*lens} != {1}, f"1 for all sequences {of_op}"
        many = op.slots and max(lens) > max(1, self.spec_tokens)
        yield "query_lens", many, f"at most spec_tokens ({self.spec_tokens}), or 1, {of_op}"
        yield "query_lens", not any(lens), "above 0 for at least one sequence"
        for name in self.options:
            yield name, not op.parameters(name), f"the default {of_op}"

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that the case sets; the arguments of an op's record name those that it has."""
        return tuple(name for name in _OPTIONS if getattr(self, name))

    @property
    def record(self) -> StateOp:
        """Return the record of the op."""
        return STATE_OPS[self.op]


STATE_FIELDS: dict[str, "dataclasses.Field[Any]"] = StateCase.__dataclass_fields__
_PREFILLS: dict[str, dict[str, Any]] = {
    "few tokens": {"query_lens": (3, 1, 5)},
    "lengths before, at and after the end of a chunk": {"query_lens": (63, 64, 65, 1)},
    "several chunks, and a part of one": {"query_lens": (150, 2)},
    "a sequence without a token": {"query_lens": (5, 0, 66)},
    "every second sequence without a state": {"query_lens": (40, 70, 9), "initial": "some"},
    "no states before the call": {"query_lens": (70, 17), "initial": "none"},
    "states that do not decay": {"query_lens": (70, 17), "gates": "none"},
    "tokens that erase the state": {"query_lens": (130, 17), "gates": "strong"},
    "values of other width than keys": {"query_lens": (70, 5), "head_v_dim": 32},
    "keys of more elements than a tile": {"query_lens": (70, 5), "head_k_dim": 128},
    "sizes that are not powers of two": {"query_lens": (70,), "head_k_dim": 24, "head_v_dim": 40},
    "from the last token to the first": {"query_lens": (40, 0, 7), "reverse": True},
    "from the last token to the first, without states before the call": {
        "query_lens": (9, 2),
        "reverse": True,
        "initial": "none",
    },
}
_DECODES: dict[str, dict[str, Any]] = {
    "one token of each sequence": {"query_lens": (1, 1, 1, 1)},
    "states that do not decay": {"query_lens": (1, 1), "gates": "none"},
    "tokens that erase the state": {"query_lens": (1,) * 9, "gates": "strong"},
    "a sequence without a slot": {"query_lens": (1, 1, 1), "skipped": 1},
    "states in bfloat16": {"query_lens": (1, 1, 1), "state_dtype": "bfloat16"},
    "speculative tokens": {"query_lens": (4, 4, 4), "spec_tokens": 4},
    "fewer tokens than slots": {"query_lens": (4, 2, 1), "spec_tokens": 4},
    "a sequence without a token": {"query_lens": (3, 0, 3), "spec_tokens": 3},
    "speculative tokens, with several value heads of one key head": {
        "query_lens": (3, 2, 4),
        "spec_tokens": 4,
        "num_k_heads": 2,
        "num_v_heads": 4,
    },
    "speculative tokens, and a sequence without a slot": {
        "query_lens": (3, 3, 3),
        "spec_tokens": 3,
        "skipped": 1,
    },
    "values of other width than keys": {"query_lens": (1, 1), "head_v_dim": 64},
    "sizes that are not powers of two": {"query_lens": (1,), "head_k_dim": 24, "head_v_dim": 40},
}
_BOTH: dict[str, dict[str, Any]] = {
    "several value heads of one key head": {"num_k_heads": 2, "num_v_heads": 6},
    "queries and keys as they are": {"use_norm": False},
    "another scale": {"scale": 0.7},
    "gates in bfloat16": {"gate_dtype": "bfloat16"},
    "gates in float16": {"gate_dtype": "float16", "dtype": "float32"},
    "gates that the op computes": {"use_gate_in_kernel": True},
    "gates that the op computes, some of them strong": {
        "use_gate_in_kernel": True,
        "gates": "strong",
        "dtype": "float32",
    },
    "gates that the op computes, above a limit": {"use_gate_in_kernel": True, "gate_limit": 5.0},
    "gates that the op computes, above another limit": {
        "use_gate_in_kernel": True,
        "gate_limit": 0.5,
        "dtype": "float32",
    },
    "states with the values first": {"state_v_first": True},
    "states with the values first, of other width than keys": {
        "state_v_first": True,
        "head_v_dim": 32,
    },
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
}


def variants_of(op: StateOp) -> dict[str, StateCase]:
    """Return the hostile cases that an op can run, by the reason why they are hostile."""
    plain = plain_fields(op)
    usual = {"query_lens": (1, 1, 1) if op.slots else (70,) if op.one_sequence else (70, 3)}
    own = {**(_DECODES if op.slots else _PREFILLS), **{n: {**usual, **f} for n, f in _BOTH.items()}}
    found = {}
    for reason, fields in own.items():
        if op.one_sequence:  # the longest, as many chunks of it
            longest = max(fields.get("query_lens", usual["query_lens"]))
            fields = {**fields, "query_lens": (longest * op.chunk // 64,)}
        try:
            found[reason] = StateCase(op=op.name, **{**plain, **fields})
        except InvalidCase:  # what the op does not have
            continue
    return found


def plain_fields(op: StateOp) -> dict[str, Any]:
    """Return the fields of a case that an op can run, in place of the defaults."""
    lens = (1, 1, 1) if op.slots else (150,) if op.one_sequence else (70, 3, 1)
    sizes = {"head_k_dim": op.square, "head_v_dim": op.square} if op.square else {}
    return {"use_norm": op.norms, "query_lens": lens, "dtype": op.dtypes[0], **sizes}
