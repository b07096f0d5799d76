"""LeakClaim: an output that is wrong only because NaN in slots without a token reaches it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakClaim:
    """The statement that finite numbers in unwritten slots make every output right.

    ``cases``: the number of further cases in which NaN in these slots gives a wrong output.
    """

    cases: int

    @property
    def text(self) -> str:
        """Return the claim in words."""
        plural = "case" if self.cases == 1 else "cases"
        return (
            "slots that hold no token are read and multiplied by weight 0, so that only NaN in them reaches "
            f"the output: with finite numbers there, every output is right (confirmed on {self.cases} "
            f"further {plural})"
        )
