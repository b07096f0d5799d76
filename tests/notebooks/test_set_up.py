"""What every notebook does first: alternative texts and colours of its figures."""

from helpers.notebooks import NOTEBOOKS
from nbclient import NotebookClient
from nbformat import v4

from study.html_table import table
from study.set_up import alt_text, plain_text

PLOT = "import matplotlib.pyplot as plt; ax = plt.subplots()[1]; ax.set_title('two rows');"


def alt_of_a_plot(*before: str) -> str | None:
    """Return the alternative text of a plot in a notebook, after the sources ``before``."""
    cells = [v4.new_code_cell(source) for source in (*before, PLOT)]
    where = {"metadata": {"path": str(NOTEBOOKS)}}
    notebook = NotebookClient(v4.new_notebook(cells=cells), timeout=120, resources=where).execute()
    (shown,) = notebook.cells[-1].outputs
    alt: str | None = shown.metadata.get("image/png", {}).get("alt")
    return alt


def test_a_figure_has_its_title_as_alternative_text() -> None:
    assert alt_of_a_plot() is None
    describe = "from study.set_up import describe_figures; describe_figures()"
    assert alt_of_a_plot(describe) == "two rows"


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
