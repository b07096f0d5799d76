"""Leave in the notebooks what a person wrote, and nothing that another machine would change.

python tools/strip.py          rewrites notebooks/*.ipynb
"""

from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT = ("tags", "jupyter")  # of a cell: papermill's parameters, and what is folded in JupyterLab


def stripped(text: str) -> str:
    """Return a notebook's text as it is committed: of metadata the kernel and KEPT."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        kept = {name: cell.metadata[name] for name in KEPT if cell.metadata.get(name)}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return str(nbformat.writes(notebook)) + "\n"


if __name__ == "__main__":
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        path.write_text(stripped(path.read_text(encoding="utf-8")), encoding="utf-8")
