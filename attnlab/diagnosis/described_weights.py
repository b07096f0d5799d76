"""DescribedWeights: what an X-ray says of the weights, as far as outputs of further cases follow from it."""

from dataclasses import dataclass

from attnlab.weights.description import Description


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedWeights:
    """A description and the number of further cases with wrong outputs that follow from it.

    ``only_decodes``: it holds for batches of decodes; other batches were right, or follow another rule.
    ``right_decodes``: batches of decodes alone were right, as if another kernel computed them.
    """

    description: Description
    cases: int
    only_decodes: bool = False
    right_decodes: bool = False

    @property
    def text(self) -> str:
        """Return the description in words."""
        plural = "case" if self.cases == 1 else "cases"
        scope = " (only decodes ran)" if self.only_decodes else ""
        if self.right_decodes:
            scope = " (batches of decodes alone are right)"
        return f"{self.description.text}{scope} (confirmed on {self.cases} further {plural})"
