"""The part of ``import attnlab`` that draws."""

from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.errors import named_extra
from attnlab.case.fields import refuse
from attnlab.lab.cache_write import owners_of
from attnlab.lab.lab import StageTable
from attnlab.lab.result import ErrorMap, Result
from attnlab.mla.run import MlaResult
from attnlab.mutation.power import MutationReport
from attnlab.tensors.case_call import longest_mask
from attnlab.weights.xray import XRay, key_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(noun: Any, *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw a Result, an ErrorMap, a StageTable, a MutationReport, an XRay, an MlaResult or a Case.

    Returns the Axes. Of a Case, the mask of the sequence with the most new tokens is drawn. Without
    ``title`` the title states the finding. Raises InvalidCase for anything else, and for a Result that was
    rejected, because it has no errors.
    """
    with named_extra("attnlab.plot"):
        from attnlab.show import plots

    if isinstance(noun, Result) and noun.errors is not None:
        unwritten, cache_of = noun.unwritten_rows().cpu(), owners_of(noun.case)
        return plots.plot_error(
            noun.errors, unwritten=unwritten, cache_of=cache_of, title=title, ax=ax
        )
    if isinstance(noun, ErrorMap):
        return plots.plot_error(noun, title=title, ax=ax)
    if isinstance(noun, StageTable):
        return plots.plot_stages(noun, title=title, ax=ax)
    if isinstance(noun, MutationReport):
        return plots.plot_power(noun.mutants, title=title, ax=ax)
    if isinstance(noun, XRay):
        return plots.plot_weights(key_columns(noun), which="difference", title=title, ax=ax)
    if isinstance(noun, MlaResult):
        return plots.plot_mla(noun, title=title, ax=ax)
    if isinstance(noun, Case):
        return plots.plot_mask(longest_mask(noun), title=title, ax=ax)
    nouns = (
        "a Result with errors, an ErrorMap, a StageTable, a MutationReport, an XRay, an MlaResult"
    )
    refuse("noun", f"{nouns} or a Case", noun)
