"""What every notebook does first: alternative texts of its figures, and texts of a size to read."""

import matplotlib.pyplot as plt
import pytest
import torch
from helpers.notebooks import NOTEBOOKS
from helpers.panels import LOST
from matplotlib.text import Text
from nbclient import NotebookClient
from nbformat import v4

import attnlab
from study import fp8_values, plot_blocks, plot_formats, plot_story, stage_stories
from study.html_table import table
from study.set_up import TEXTS, alt_text, plain_text

PLOT = "import matplotlib.pyplot as plt; ax = plt.subplots()[1]; ax.set_title('two rows');"


def test_a_figure_has_its_title_as_alternative_text() -> None:
    """Of two plots, the second one has it, because figures are described from then on."""
    describe = "from study.set_up import describe_figures; describe_figures()"
    cells = [v4.new_code_cell(source) for source in (PLOT, describe, PLOT)]
    where = {"metadata": {"path": str(NOTEBOOKS)}}
    notebook = NotebookClient(v4.new_notebook(cells=cells), timeout=120, resources=where).execute()
    shown = [output for cell in notebook.cells for output in cell.outputs]
    alts = [output.metadata.get("image/png", {}).get("alt") for output in shown]
    assert alts == [None, "two rows"]


def test_the_titles_of_all_axes_are_in_the_text() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    for ax, title in zip(figure.subplots(1, 3), ("one", "", "three\nlines"), strict=True):
        ax.set_title(title)
    assert alt_text(figure) == "one; three lines"


def test_plain_text_has_no_tags() -> None:
    assert plain_text('<span class="a">1 &lt; 2</span>') == "1 < 2"


# Tables of a notebook: text at the left, numbers at the right.


def test_sides_of_columns():
    found = table("name", "count", "text", rows=[("a", 1.25, "1 of 2"), ("b", "7e-06", "none")])
    sides = [cell.partition(";")[0] for cell in found._repr_html_().split("text-align: ")[1:]]
    assert [side.partition('"')[0] for side in sides] == ["left", "right", "left"] * 3
    assert repr(found).splitlines()[1].split() == ["a", "1.25", "1", "of", "2"]


# The first picture of each notebook, on the page of JupyterLab next to its list of files.

PAGE = 848  # pixels of a window of 1280 that a picture has
LAB, PLATFORMS = attnlab.Lab(), ("gfx942", "sm_90")
MLA = attnlab.MlaCase(num_heads=2, query_lens=(3, 2, 2), ctx_lens=(70, 20, 0))
FIRST = {
    "stages": lambda: plot_story(
        attnlab.stages(LOST, platforms=PLATFORMS, lab=LAB), stage_stories()
    ),
    "errors": lambda: attnlab.plot(LAB.run(LOST)),
    "formats": lambda: plot_formats(fp8_values(torch.arange(256, dtype=torch.uint8))),
    "blocks": lambda: plot_blocks(LAB.run(LOST).slot_map(), blocks=[0, 1, 2]),
    "power": lambda: attnlab.plot(attnlab.power(LOST.replace(stage="sound"))),
    "mla": lambda: attnlab.plot(attnlab.run_mla(MLA)),
}


def least_pixels(figure) -> float:
    """Return the size of the smallest text of a figure, as the page shows it."""
    figure.draw_without_rendering()
    sizes = [one.get_fontsize() for one in figure.findobj(Text) if one.get_text()]
    shown = min(1.0, PAGE / (figure.get_tightbbox().width * figure.dpi))
    return min(sizes) * figure.dpi / 72 * shown


@pytest.mark.parametrize("name", FIRST)
def test_texts_of_a_picture_have_12_pixels(name: str) -> None:
    with plt.rc_context(TEXTS):
        figure = FIRST[name]().get_figure(root=True)
        assert least_pixels(figure) > 11.9
        figure.set_size_inches(12, 4)
        assert least_pixels(figure) < 11
    plt.close(figure)
