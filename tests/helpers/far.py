"""A Case with block offsets beyond 2^31 elements."""

from attnlab.case.case import Case
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels.backend import Backend


def far_case(backend: Backend, op: str) -> Case:
    """Return the hostile Case of an op with block offsets beyond 2^31 elements, shortened."""
    case = next(c for c in hostile_cases(backend, op, "sm_90", None, 0) if c.first_block)
    lens = (1, 1) if op == "decode_attention_fwd" else (5, 1)
    return case.replace(query_lens=lens, ctx_lens=(40, 30), num_blocks=None)
