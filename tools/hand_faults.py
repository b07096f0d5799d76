"""Faults that were written by hand, in the style of real ones, for `tools/real_faults.py --by-hand`.

Each changes statements of a Triton kernel that no single rule of tools/source_mutation.py changes: a lost
statement, two expressions, an expression in all loops, another order. A change names a statement or an
expression as `ast.unparse` prints it, and replaces all of them in a function.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, PREFILL, UNIFIED, WRAPPER


class NoPlace(ValueError):
    """Raised if a source lacks what a fault changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandFault:
    """A fault of an op: ``changes`` of its ``functions``, each the text before and after."""

    name: str
    op: str
    functions: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "HandFault":
        """Return the fault of a JSON object with the fields of the class."""
        changes = tuple((before, after) for before, after in fields["changes"])
        return cls(
            name=fields["name"],
            op=fields["op"],
            functions=tuple(fields["functions"]),
            changes=changes,
        )

    def places(self, text: str) -> list[tuple[ast.stmt | ast.expr, str]]:
        """Return what is changed in a source, with its replacement; raise NoPlace if a change has none."""
        kernels = [
            one
            for one in ast.walk(ast.parse(text))
            if isinstance(one, ast.FunctionDef) and one.name in self.functions
        ]
        found = []
        for before, after in self.changes:
            nodes = [node for kernel in kernels for node in _equal(kernel, before)]
            if not nodes:
                raise NoPlace(f"{self.name}: no {before!r}")
            found += [(node, after) for node in nodes]
        return found

    def lines(self, text: str) -> list[int]:
        """Return the first line of each change; the changed source has the same lines."""
        return [node.lineno for node, _ in self.places(text)]

    def apply(self, text: str) -> str:
        """Return the source with the fault, with as many lines as before."""
        starts = [0]
        for row in text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(row))
        data = text.encode()
        places = sorted(self.places(text), key=lambda one: (one[0].lineno, one[0].col_offset))
        for node, after in reversed(places):
            last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
            start, end = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column
            first = data[starts[node.lineno - 1] : start].decode()
            # A row without the indentation would end a kernel inside an if: textwrap.dedent keeps all of it.
            margin = first[: len(first) - len(first.lstrip())]
            rows = f"\n{margin}" * (last - node.lineno)
            new = f"({after}{rows})" if isinstance(node, ast.expr) else f"{after}{rows}"
            data = data[:start] + new.encode() + data[end:]
        return data.decode()


def read_faults(path: Path) -> tuple[HandFault, ...]:
    """Return the faults of a JSON file: a list of objects with the fields of HandFault."""
    return tuple(HandFault.from_dict(fields) for fields in json.loads(path.read_text()))


def _equal(kernel: ast.FunctionDef, before: str) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements or expressions of a kernel that print as a text; those that are read.

    A bare call is a statement and an expression with the same text: the statement alone is yielded.
    """
    done = set[ast.AST]()
    for node in ast.walk(kernel):  # a statement comes before its expression
        if not isinstance(node, ast.stmt | ast.expr) or ast.unparse(node) != before:
            continue
        if isinstance(node, ast.Expr):
            done.add(node.value)
        if node not in done and not isinstance(getattr(node, "ctx", None), ast.Store):
            yield node


_DECODES = ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1")
_UNIFIED = (
    "kernel_unified_attention",
    "kernel_unified_attention_2d",
    "kernel_unified_attention_3d",
)
_LOG2E = "1.4426950408889634"


def _fault(
    name: str, op: str, functions: str | tuple[str, ...], *changes: tuple[str, str]
) -> HandFault:
    names = (functions,) if isinstance(functions, str) else functions
    return HandFault(name=name, op=op, functions=names, changes=changes)


HAND_FAULTS = (
    _fault(
        "the accumulator is not rescaled, in both loops", PREFILL, "_fwd_kernel",
        ("acc = acc * alpha[:, None]", "pass"),
    ),
    _fault(
        "the scales of keys and values are exchanged", PREFILL, "_fwd_kernel",
        ("tl.load(k_scale)", "tl.load(v_scale)"), ("tl.load(v_scale)", "tl.load(k_scale)"),
    ),
    _fault(
        "the window has one key more, in all loops", PREFILL, "_fwd_kernel",
        ("SLIDING_WINDOW", "SLIDING_WINDOW + (SLIDING_WINDOW > 0)"),
    ),
    _fault(
        "exponentials have base 2 in place of e, in both loops", PREFILL, "_fwd_kernel",
        ("tl.exp", "tl.exp2"),
    ),
    _fault(
        "the sum is not rescaled, in both loops", PREFILL, "_fwd_kernel",
        ("l_i * alpha + l_ij", "l_i + l_ij"),
    ),
    _fault(
        "ALiBi has the opposite sign, in both loops", PREFILL, "_fwd_kernel_alibi",
        ("tl.load(Alibi_slopes + cur_head)", "0 - tl.load(Alibi_slopes + cur_head)"),
    ),
    _fault(
        "query heads are interleaved over KV heads", UNIFIED, _UNIFIED,
        (
            "kv_head_idx * num_queries_per_kv + offs_m % num_queries_per_kv",
            "kv_head_idx + tl.num_programs(1) * (offs_m % num_queries_per_kv)",
        ),
    ),
    _fault(
        "blocks are counted in tiles", UNIFIED, _UNIFIED,
        ("seq_offset // BLOCK_SIZE", "seq_offset // TILE_SIZE"),
    ),
    _fault(
        "the context has one token more", UNIFIED, _UNIFIED,
        ("seq_len - cur_batch_query_len", "seq_len - cur_batch_query_len + 1"),
    ),
    _fault(
        "the parts of segments are not rescaled before they are added", UNIFIED, "reduce_segments",
        ("segm_output *= segment_scale[:, None]", "pass"),
    ),
    _fault(
        "the sums of segments are not rescaled", UNIFIED, "reduce_segments",
        ("segm_expsum = segm_expsum * segment_scale", "pass"),
    ),
    _fault(
        "the sinks count in every segment", UNIFIED, _UNIFIED,
        (
            "init_softmax_M(sink_ptr, query_offset_1, query_mask_1, segm_idx, BLOCK_M, USE_SINKS, IS_3D)",
            "init_softmax_M(sink_ptr, query_offset_1, query_mask_1, 0, BLOCK_M, USE_SINKS, IS_3D)",
        ),
    ),
    _fault(
        "the soft cap is applied to masked scores", UNIFIED, _UNIFIED,
        ("S = apply_softcap(S, softcap)", "pass"),
        (
            "S = tl.where(query_mask_1[:, None] & query_mask_0[:, None] & seq_mask, S, float('-inf'))",
            "S = tl.where(query_mask_1[:, None] & query_mask_0[:, None] & seq_mask, S, float('-inf'))"
            "; S = apply_softcap(S, softcap) if USE_SOFTCAP else S",
        ),
    ),
    _fault(
        "the scale has log2(e), and exponentials base e", WRAPPER, "kernel_paged_attention_2d",
        ("scale", f"scale * {_LOG2E}"),
    ),
    _fault(
        "neither the accumulator nor the sum is rescaled", WRAPPER, "kernel_paged_attention_2d",
        ("acc = acc * alpha[:, None]", "pass"), ("L * alpha + l_j", "L + l_j"),
    ),
    _fault(
        "the scales of keys and values are exchanged", WRAPPER, "kernel_paged_attention_2d",
        ("tl.load(k_scale)", "tl.load(v_scale)"), ("tl.load(v_scale)", "tl.load(k_scale)"),
    ),
    _fault(
        "the last block is left out if it is not full", WRAPPER, "kernel_paged_attention_2d",
        ("num_blocks = cdiv_fn(seq_len, BLOCK_SIZE)", "num_blocks = seq_len // BLOCK_SIZE"),
    ),
    _fault(
        "the merge does not rescale the accumulator", DECODE_FWD, "_fwd_kernel_stage2",
        ("acc *= old_scale", "pass"),
    ),
    _fault(
        "the last split is left out", DECODE_FWD, "_fwd_kernel_stage2",
        ("range(0, NUM_KV_SPLITS)", "range(0, NUM_KV_SPLITS - 1)"),
    ),
    _fault(
        "the accumulator of a split is not rescaled", DECODE_FWD, _DECODES,
        ("acc *= re_scale[:, None]", "pass"), ("acc *= re_scale", "pass"),
    ),
    _fault(
        "the soft cap is applied before the scale", DECODE_FWD, _DECODES,
        ("qk *= sm_scale", "qk *= sm_scale if logit_cap <= 0 else 1.0"),
        ("qk = logit_cap * tanh(qk / logit_cap)", "qk = logit_cap * tanh(qk / logit_cap) * sm_scale"),
    ),
    _fault(
        "the weights of prefix and suffix are exchanged", MERGE, "merge_attn_states_kernel",
        ("p_out * p_scale + s_out * s_scale", "p_out * s_scale + s_out * p_scale"),
    ),
    _fault(
        "the maximum is subtracted from one log-sum-exp only", MERGE, "merge_attn_states_kernel",
        ("s_lse = s_lse - max_lse", "pass"),
    ),
    _fault(
        "the window has one key less on both sides", ENCODER, "_fwd_kernel",
        ("pos_q - pos_k <= SLIDING_WINDOW_Q", "pos_q - pos_k < SLIDING_WINDOW_Q"),
        ("pos_k - pos_q <= SLIDING_WINDOW_K", "pos_k - pos_q < SLIDING_WINDOW_K"),
    ),
    _fault(
        "the maximum is not kept for the next tile", ENCODER, "_fwd_kernel", ("m_i = m_ij", "pass"),
    ),
)  # fmt: skip
