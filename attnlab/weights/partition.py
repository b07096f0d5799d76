"""Partition: how a kernel divides the keys of a row into steps: tiles, blocks, splits or segments."""

from dataclasses import dataclass

import torch

from attnlab.weights.setup import AttentionSetup

LAST, LAST_SEEN = (
    -1,
    -2,
)  # the last step of the sequence, and the last one in which the row sees a key


@dataclass(frozen=True, slots=True)
class Partition:
    """Steps of the keys of each row.

    - ``tile``: keys per step. ``parts``: if not 0, each sequence has at most so many steps, of equally many
      tiles. ``loop``: the steps concerned, "all", "context" or "new". ``only``: one of them, counted from 0,
      LAST, LAST_SEEN, or None for all.
    """

    tile: int
    parts: int = 0
    loop: str = "all"
    only: int | None = None

    def steps(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the step of each entry, [R, E] int64; those of new keys follow those of the cache."""
        is_new = setup.is_new
        old = int((~is_new).sum())
        index = torch.arange(len(is_new)).expand_as(setup.entry_position)
        if self.parts:
            size = -(-setup.seq_len // (self.parts * self.tile)) * self.tile
            return torch.minimum(index // size[:, None].clamp(min=1), index[:, -1:])
        return torch.where(
            is_new, self.first_new(old) + (index - old) // self.tile, index // self.tile
        )

    def first_new(self, old: int) -> int:
        """Return the first step of new keys after ``old`` entries of the cache."""
        return -(-old // self.tile)

    def concerned(self, setup: AttentionSetup, has_keys: torch.Tensor) -> torch.Tensor:
        """Return which steps are concerned, in the shape of ``has_keys`` [..., steps] bool."""
        numbers = torch.arange(has_keys.shape[-1])
        before = self.first_new(int((~setup.is_new).sum())) if not self.parts else len(numbers)
        inside = torch.ones_like(numbers, dtype=torch.bool)
        if self.loop != "all":
            inside = numbers >= before if self.loop == "new" else numbers < before
        inside = inside.expand(has_keys.shape)
        if self.only is None:
            return inside
        if self.only == LAST:
            length = setup.cached if self.loop == "context" else setup.seq_len
            at = (setup.entry_position < length[:, None]) & (setup.entry_slot >= 0)
            if self.loop == "context":
                at &= ~setup.is_new
            last = torch.where(at, self.steps(setup), -1).amax(-1, keepdim=True)
            return inside & (numbers == last[:, None] if has_keys.ndim == 3 else numbers == last)
        if self.only == LAST_SEEN:
            last = torch.where(inside & has_keys, numbers, -1).amax(-1, keepdim=True)
            return numbers == last
        return inside & (numbers == self.only + (before if self.loop == "new" else 0))

    @property
    def keys(self) -> str:
        """Return the size of the steps in words."""
        if self.parts:
            of = f" of tiles of {self.tile}" if self.tile > 1 else ""
            return f"up to {self.parts} parts{of}"
        return f"tiles of {self.tile} keys"

    @property
    def which(self) -> str:
        """Return the steps that are concerned in words, such as "tile 1 (tiles of 32 keys)"."""
        noun = "part" if self.parts else "tile"
        where = {"all": "", "context": " of the cached keys", "new": " of the new keys"}[self.loop]
        one = {LAST: f"the last {noun}", LAST_SEEN: f"the last {noun} that the row sees"}.get(
            self.only or 0, f"{noun} {self.only}"
        )
        return f"{one}{where} ({self.keys})"
