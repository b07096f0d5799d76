"""Draw the pictures of the documentation.

- docs/failure.png, of the README: the failing stage and the table of stages.
- docs/xray.png: the weights of a kernel whose causal mask admits one key too many.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.lab.run import stage_table
from attnlab.show.plots import plot_error, plot_stages, plot_weights
from attnlab.weights.conclude import xray
from attnlab.weights.xray import key_columns

ROOT = Path(__file__).parent.parent
SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


def main() -> None:
    """Draw the pictures."""
    draw_xray()
    draw_failure()


def draw_xray() -> None:
    """X-ray a faulty copy of the example kernel and save the figure."""
    text = (ROOT / "examples" / "my_attention.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "masked.py"
        kernel.write_text(text.replace("hidden = away > 0", "hidden = away > 1"))
        case = Case(
            op="unified_attention", num_heads=2, head_size=64, query_lens=(12, 1), ctx_lens=(20, 30)
        )
        columns = key_columns(xray(case, backend=f"{kernel}:my_attention"), seq=0, head=0)
    axes = plt.subplots(ncols=3, figsize=(15, 4), layout="constrained")[1]
    for ax, which in zip(axes, ("measured", "expected", "difference"), strict=True):
        plot_weights(columns, which=which, ax=ax)
    save("xray.png")


def save(name: str) -> None:
    """Save the current figure in docs/."""
    path = ROOT / "docs" / name
    plt.savefig(path, dpi=90)
    print(path)


def draw_failure() -> None:
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
    save("failure.png")


if __name__ == "__main__":
    main()
