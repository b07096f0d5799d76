"""The command ``attnlab defects``."""

from typing import Any

from attnlab.cli.catalogue import Catalogue


def _load() -> dict[str, dict[str, Any]]:
    """Return the facts of each defect. This imports torch."""
    from attnlab.defects import DEFECTS

    return {
        name: {
            "what_happens": defect.text,
            "family": defect.family,
            "rows_it_can_change": defect.touches,
            "changes_only_rounding": defect.harmless,
            "violations_that_cause_it": list(defect.links),
            "reported_in": list(defect.seen_in),
        }
        for name, defect in DEFECTS.items()
    }


COMMAND = Catalogue(
    noun="defect",
    purpose="List the defects that a diagnosis recognises and that power plants in a test's kernels.",
    example="kv_head_modulo",
    columns=("what_happens", "family"),
    load=_load,
).command
