"""Draw docs/failure.png, the picture of the README: the failing stage and the table of stages."""

from pathlib import Path

import matplotlib.pyplot as plt

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.lab.stage_table import stage_table
from attnlab.show.plots import plot_error, plot_stages

SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


def main() -> None:
    """Run the seed case in every stage and save the figure."""
    lab, case = Lab(), Case.from_test_id(SEED_ID)
    failing = lab.run(case.replace(stage="int32_before_cumsum"))
    left, right = plt.subplots(
        ncols=2, figsize=(13, 5), layout="constrained", width_ratios=(1.2, 1)
    )[1]
    plot_error(failing.errors, unwritten=failing.unwritten_rows(), ax=left)
    plot_stages(
        stage_table(lab, case), title="elements over the tolerance, stage by stage", ax=right
    )
    path = Path(__file__).parent.parent / "docs" / "failure.png"
    plt.savefig(path, dpi=90)
    print(path)


if __name__ == "__main__":
    main()
