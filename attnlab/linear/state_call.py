"""StateCall: the tensors of a call of an op of linear attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from attnlab.library.op import StateOp
from attnlab.linear.state_case import StateCase
from attnlab.tensors.formats import FORMATS

NONE = -1  # no slot: the state before the first token is 0
_FOREIGN = 4.0  # the standard deviation of the states of slots without a sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCall:
    """The tensors of a call; the record of an op names these, in vLLM's words.

    - ``query``, ``key``: [tokens, num_k_heads, head_k_dim]. ``value``: [tokens, num_v_heads, head_v_dim].
    - ``a``, ``b``, ``A_log``, ``dt_bias``: what a layer projects and learns. The gate, the logarithm of what
      a state is multiplied by, is -exp(A_log) * softplus(a + dt_bias), or with a ``gate_limit``
      -gate_limit * sigmoid(exp(A_log) * (a + dt_bias)); beta is sigmoid(b). ``a``: [tokens, num_v_heads], or
      [tokens, num_v_heads, head_k_dim]; ``b``: [tokens, num_v_heads]; ``A_log``: [num_v_heads]; ``dt_bias``:
      as a row of ``a``. ``D``: [num_v_heads], by which a state space model multiplies a token's own value.
    - ``query_start_loc``: [num_seqs + 1] int32.
    - ``states``: [num_slots, num_v_heads, head_v_dim, head_k_dim]; slot 0 belongs to no sequence, and slots
      without a sequence hold larger numbers.
    - ``state_indices``: [num_seqs] int32, or [num_seqs, spec_tokens]; -1 for a skipped sequence.
    - ``num_accepted_tokens``: [num_seqs] int32, or None. ``has_initial``: [num_seqs] bool.
    - ``state_v_first``: the op gets and returns states as ``states``; without it, keys come first.
    - ``reverse``: rows are numbered from the last token of a sequence to its first; the op gets the rows in
      ``order``.
    - ``options``: as of :class:`StateCase`.
    """

    op: StateOp
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    D: torch.Tensor
    query_start_loc: torch.Tensor
    states: torch.Tensor
    state_indices: torch.Tensor
    num_accepted_tokens: torch.Tensor | None
    has_initial: torch.Tensor
    passes_initial: bool
    scale: float
    use_norm: bool
    gate_dtype: torch.dtype
    use_gate_in_kernel: bool
    gate_limit: float | None
    state_v_first: bool
    reverse: bool
    options: tuple[str, ...]

    @cached_property
    def gate(self) -> torch.Tensor:
        """Return the gate as a layer passes it, in ``gate_dtype``, in the shape of ``a``."""
        return self.exact_gate.to(self.gate_dtype)

    @cached_property
    def exact_gate(self) -> torch.Tensor:
        """Return the gate, float64, in the shape of ``a``."""
        if self.op.gate == "constant":
            return self.gate_of(softplus=torch.ones_like)
        return self.gate_of()

    def gate_of(
        self,
        rate: Callable[[torch.Tensor], torch.Tensor] = torch.exp,
        bias: float = 1.0,
        softplus: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.softplus,
    ) -> torch.Tensor:
        """Return the gate, float64, in the shape of ``a``, also with other functions or more of the bias."""
        decay = rate(self.A_log.double()).view(-1, *[1] * (self.a.ndim - 2))
        inner = self.a.double() + bias * self.dt_bias.double()
        if self.gate_limit is not None:
            return -self.gate_limit * (decay * inner).sigmoid()
        return -decay * softplus(inner)

    @property
    def raw_gate(self) -> bool:
        """Answer whether the op computes gates and beta."""
        return self.op.raw_gate or self.use_gate_in_kernel

    @cached_property
    def step(self) -> torch.Tensor:
        """Return softplus(a + dt_bias), float64: the step of a state space model."""
        return torch.nn.functional.softplus(self.a.double() + self.dt_bias.double())

    @cached_property
    def beta(self) -> torch.Tensor:
        """Return beta as a layer passes it, in the dtype of the query, [tokens, num_v_heads]."""
        return self.b.double().sigmoid().to(self.query.dtype)

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Return the sequence and the first row of each chunk of each sequence."""
        seqs = ((seq, self.rows_of(seq)) for seq in range(self.num_seqs))
        return [(seq, row) for seq, rows in seqs for row in rows[:: self.op.chunk]]

    @property
    def chunk_starts(self) -> torch.Tensor:
        """Return the first row of each chunk, and the end, [chunks + 1] int32."""
        return torch.tensor([*(row for _, row in self.chunks), len(self.query)]).int()

    @property
    def chunk_seqs(self) -> torch.Tensor:
        """Return the sequence of each chunk, [chunks] int32."""
        return torch.tensor([seq for seq, _ in self.chunks]).int()

    @property
    def last_chunks(self) -> torch.Tensor:
        """Return the index of the last chunk of each sequence, [num_seqs] int32."""
        return (
            torch.searchsorted(self.chunk_seqs, torch.arange(self.num_seqs), right=True) - 1
        ).int()

    @property
    def order(self) -> torch.Tensor:
        """Return the rows in the order in which the op gets them, [tokens] int64; it is its own inverse."""
        step = -1 if self.reverse else 1
        rows = (row for seq in range(self.num_seqs) for row in self.rows_of(seq)[::step])
        return torch.tensor([*rows], dtype=torch.int64)

    @property
    def num_seqs(self) -> int:
        """Return the number of sequences."""
        return len(self.query_start_loc) - 1

    @cached_property
    def lens(self) -> torch.Tensor:
        """Return the number of tokens of each sequence, [num_seqs] int64."""
        return self.query_start_loc.diff().long()

    @cached_property
    def seq_of_row(self) -> torch.Tensor:
        """Return the sequence of each row, [tokens] int64."""
        return torch.arange(self.num_seqs).repeat_interleave(self.lens)

    @property
    def tables(self) -> torch.Tensor:
        """Return the slots of each sequence, [num_seqs, 1 or spec_tokens] int64."""
        return self.state_indices.long().view(self.num_seqs, -1)

    @property
    def loads(self) -> torch.Tensor:
        """Return the slot that each sequence begins from, [num_seqs] int64; NONE for the state 0."""
        at = torch.zeros(self.num_seqs, dtype=torch.int64)
        if self.num_accepted_tokens is not None:
            at = self.num_accepted_tokens.long() - 1
        found = self.tables.gather(1, at[:, None])[:, 0]
        return torch.where(self.has_initial, found, NONE)

    @property
    def initial_states(self) -> torch.Tensor | None:
        """Return the state of each sequence before the call, [num_seqs, …], or None if none is passed."""
        if not self.passes_initial:
            return None
        found = self.states[self.loads.clamp(min=0)]
        return torch.where(self.has_initial.view(-1, 1, 1, 1), found, 0.0).contiguous()

    @property
    def skipped(self) -> torch.Tensor:
        """Return which sequences have no slot, [num_seqs] bool."""
        return self.tables[:, 0] < 0

    def rows_of(self, seq: int) -> range:
        """Return the rows of a sequence."""
        return range(int(self.query_start_loc[seq]), int(self.query_start_loc[seq + 1]))


def make_call(case: StateCase) -> StateCall:
    """Return the tensors of a case."""
    op, draw = case.record, torch.Generator().manual_seed(case.seed)
    dtype, tokens, seqs = FORMATS[case.dtype].dtype, sum(case.query_lens), len(case.query_lens)
    heads, key_size = case.num_v_heads, case.head_k_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    query, key = (normal(tokens, case.num_k_heads, key_size) for _ in range(2))
    if not case.use_norm:
        query, key = (torch.nn.functional.normalize(one, dim=-1) for one in (query, key))
    tables, count = _slots(case, draw)
    states = _FOREIGN * normal(count, heads, case.head_v_dim, key_size)
    own = tables[tables > 0]
    states[own] /= _FOREIGN
    gate_shape = (heads, key_size) if op.gate == "key" else (heads,)
    has_initial = torch.full((seqs,), case.initial != "none")
    has_initial[1::2] &= case.initial != "some"
    accepted = None
    if case.spec_tokens:
        accepted = torch.randint(1, case.spec_tokens + 1, (seqs,), generator=draw).int()
    lens = torch.tensor(case.query_lens)
    return StateCall(
        op=op,
        query=query.to(dtype),
        key=key.to(dtype),
        value=normal(tokens, heads, case.head_v_dim).to(dtype),
        a=_raw_gate(case, normal(tokens, *gate_shape), draw).to(dtype),
        b=(2 * normal(tokens, heads)).to(dtype),
        A_log=0.5 * normal(heads) - 1,
        dt_bias=0.5 * normal(*gate_shape) - 1,
        D=torch.linspace(0.5, 1.5, heads),
        query_start_loc=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
        states=states.to(FORMATS[case.state_dtype].dtype),
        state_indices=tables if case.spec_tokens else tables[:, 0].contiguous(),
        num_accepted_tokens=accepted,
        has_initial=has_initial,
        passes_initial=case.initial != "none",
        scale=1.0 if not op.scales else key_size**-0.5 if case.scale is None else case.scale,
        use_norm=case.use_norm,
        use_gate_in_kernel=case.use_gate_in_kernel,
        gate_limit=case.gate_limit,
        gate_dtype=FORMATS[case.gate_dtype].dtype,
        state_v_first=case.state_v_first,
        reverse=case.reverse,
        options=case.options,
    )


def _slots(case: StateCase, draw: torch.Generator) -> tuple[torch.Tensor, int]:
    """Return the slots of each sequence in no order, with free ones between them, and their number."""
    seqs, width = len(case.query_lens), max(1, case.spec_tokens)
    count = seqs * width + seqs + 2
    order = 1 + torch.randperm(count - 1, generator=draw)
    tables = order[: seqs * width].view(seqs, width).int()
    if case.skipped:
        tables[-case.skipped :] = NONE
    return tables, count


def _raw_gate(case: StateCase, drawn: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return ``a``: small for gates that leave states as they are, large in some tokens for strong ones."""
    if case.gates == "none":
        return torch.full_like(drawn, -80.0)
    if case.gates == "strong":
        some = torch.rand(drawn.shape[:2], generator=draw) < 0.1
        return torch.where(some.view(*some.shape, *[1] * (drawn.ndim - 2)), 60.0, drawn - 2)
    return drawn
