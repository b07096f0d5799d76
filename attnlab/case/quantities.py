"""CaseQuantities: what follows from the fields of a Case."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnlab.case.argument_record import OpArgument
from attnlab.case.declaration import DTYPE_BYTES, CaseFields
from attnlab.case.lengths import Lengths, draw_lengths
from attnlab.case.op_arguments import NO_ARGUMENT, OP_ARGUMENTS
from attnlab.case.ops import OPS, Op
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.case.stages import STAGES, Stage


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaseQuantities(CaseFields):
    """The fields of a Case and the quantities that follow from them."""

    @property
    def spec(self) -> Op:
        """Return the record of the op."""
        return OPS[self.op]

    @property
    def argument(self) -> OpArgument:
        """Return the record of the op argument."""
        return OP_ARGUMENTS.get(self.op_argument, NO_ARGUMENT)

    @property
    def machine(self) -> Platform:
        """Return the record of the platform."""
        return PLATFORMS[self.platform]

    @property
    def staging(self) -> Stage:
        """Return the stage with the fields that override it.

        Before an op that writes the cache, the cache holds only the context unless ``fill`` is given.
        """
        overrides = {
            "fill": self.fill or ("context_only" if self.spec.writes_cache else None),
            "block_table": self.block_table_dtype,
            "seq_lens": self.seq_lens_dtype,
            "query_start_loc": self.query_start_loc_dtype,
        }
        given: dict[str, Any] = {
            name: value for name, value in overrides.items() if value is not None
        }
        return dataclasses.replace(STAGES[self.stage], **given)

    @property
    def num_kv_heads(self) -> int:
        """Return num_heads / num_queries_per_kv."""
        return self.num_heads // self.num_queries_per_kv

    @property
    def query_heads(self) -> range | None:
        """Return the query heads that run, or None if all do."""
        if self.kv_head_range is None:
            return None
        return range(
            self.kv_head_range[0] * self.num_queries_per_kv,
            self.kv_head_range[1] * self.num_queries_per_kv,
        )

    @property
    def query_rows(self) -> range | None:
        """Return the output rows of the sequences that run, or None if all do."""
        if self.seq_range is None:
            return None
        starts = self.lengths.token_start_loc
        return range(starts[self.seq_range[0]], starts[self.seq_range[1]])

    @property
    def is_fp8(self) -> bool:
        """Answer whether the cache holds FP8 bytes."""
        return self.kv_cache_dtype != "auto"

    @property
    def lengths(self) -> Lengths:
        """Return the lengths, given or drawn."""
        if self.query_lens is not None and self.ctx_lens is not None:
            return Lengths(query_lens=self.query_lens, ctx_lens=self.ctx_lens)
        return draw_lengths(
            self.seed,
            self.num_seqs,
            self.draw_max_query_len,
            self.draw_max_ctx_len,
            self.force_decode,
        )

    @property
    def passed_max_query_len(self) -> int:
        """Return the argument max_query_len: given, the true maximum of given lengths, or the constant
        that the test passes for drawn ones."""
        if self.max_query_len is not None:
            return self.max_query_len
        return max(self.query_lens) if self.query_lens else self.draw_max_query_len

    @property
    def passed_max_seq_len(self) -> int:
        """Return the argument max_seq_len: given, the true maximum of given lengths, or MAX_CTX_LEN,
        which the test passes for drawn ones (vLLM 0.11.2)."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        return max(self.lengths.seq_lens) if self.query_lens else self.draw_max_ctx_len

    @property
    def blocks_per_seq(self) -> int:
        """Return the number of columns of the block table; 64 for the test's draw."""
        if self.block_table is not None:
            return len(self.block_table[0])
        if self.max_blocks_per_seq is not None:
            return self.max_blocks_per_seq
        drawn = self.draw_max_query_len + self.draw_max_ctx_len
        longest = max(self.lengths.seq_lens) if self.query_lens else drawn
        return -(-longest // self.block_size)

    @property
    def total_blocks(self) -> int:
        """Return the number of blocks of the cache; 640 for the test's draw."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.block_table is not None:
            return 1 + max(max(row) for row in self.block_table)
        return self.first_block + len(self.lengths.query_lens) * self.blocks_per_seq

    @property
    def key_x(self) -> int:
        """Return the size of the key cache's innermost dimension: given, or 16 bytes of elements."""
        return self.x or 16 // (1 if self.is_fp8 else DTYPE_BYTES[self.dtype])

    @property
    def tolerance(self) -> float | None:
        """Return atol if it is given, or 0 for a cache write, which is exact.

        None is the rounding bound of each element (:mod:`attnlab.lab.rounding_bound`).
        """
        if self.atol is None and self.spec.writes_cache:
            return 0.0
        return self.atol

    @property
    def has_own_tolerance(self) -> bool:
        """Answer whether the Case accepts other errors than rounding: atol or rtol is given."""
        return self.atol is not None or self.rtol > 0
