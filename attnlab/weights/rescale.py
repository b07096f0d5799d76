"""Rescale: partial sums of a softmax that are rescaled wrongly when the maximum rises or parts are merged."""

from dataclasses import dataclass

import torch

from attnlab.weights.partition import Partition
from attnlab.weights.setup import AttentionSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Partial sums are rescaled by exp(power × rise of the running maximum); 1 is right, 0 is not at all.

    - ``of``: what is rescaled so: "values", "sum", or "both".
    - ``steps``: the keys of each step, and the steps that are affected.
    - ``split``: steps have maxima of their own and are merged; else they run on.
    - ``inner``: the exponential of score minus running maximum has this power.
    """

    of: str
    steps: Partition
    power: float
    split: bool = False
    inner: float = 1.0

    def log_factor(self, setup: AttentionSetup, logits: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the factor that each entry lacks, [R, H, E]; logits are -inf if hidden."""
        steps = self.steps.steps(setup)
        at = steps[:, None].expand(logits.shape)
        tops = logits.new_full((*logits.shape[:2], int(steps.max()) + 1), -torch.inf)
        tops.scatter_reduce_(2, at, logits, "amax")
        concerned = self.steps.concerned(setup, tops > -torch.inf)
        if self.split:
            rest = tops.amax(-1, keepdim=True) - tops
            lacks = torch.where(concerned, (1 - self.power) * rest, 0.0)
            return lacks.nan_to_num(0.0, 0.0, 0.0).gather(2, at)
        running = tops.cummax(-1).values
        rises = running.diff(dim=-1, prepend=running[..., :1]).nan_to_num(0.0, 0.0, 0.0)
        rises = torch.where(concerned, rises, 0.0)
        after = rises.flip(-1).cumsum(-1).flip(-1) - rises
        found = (1 - self.power) * after.gather(2, at)
        if self.inner == 1.0:
            return found
        depth = (logits - running.gather(2, at)).nan_to_num(0.0, 0.0, 0.0)
        return found + torch.where(concerned.gather(2, at), (self.inner - 1) * depth, 0.0)
