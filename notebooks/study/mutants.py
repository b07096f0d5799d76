"""What notebook 07 asks of a test's mutation report."""

from attnlab.case.case import Case
from attnlab.case.pytest_id import tolerance_of_test
from attnlab.mutation.power import MUTANTS, Mutant, MutationReport
from attnlab.mutation.power import measure_power as power

NINE = (  # the mutants that the study counted
    "scale_doubled",
    "scale_missing",
    "scores_ignored",
    "causal_plus_one",
    "causal_minus_one",
    "keys_of_next_sequence",
    "new_tokens_only",
    "values_of_next_sequence",
    "random_noise",
)


def mutant(case: Case, name: str) -> tuple[float, str]:
    """Return the effect of one mutant on a test's data, and its outcome. Raises KeyError for a name."""
    defect = {one.name: one for one in MUTANTS}[name]
    (scored,) = power(case, mutants=[defect], remedies=False).mutants
    return scored.effect, scored.outcome


def nine_mutants(report: MutationReport) -> list[Mutant]:
    """Return the nine mutants that an earlier count used."""
    return report.named(NINE)


def is_full_size(case: Case) -> bool:
    """Answer whether a Case has the sizes, lengths and data of the test."""
    test = Case(
        stage=case.stage,
        x=case.x,
        platform=case.platform,
        release=case.release,
        atol=tolerance_of_test("auto"),
    )
    return case == test
