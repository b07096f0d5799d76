"""Configuration of the documentation: ``make docs`` builds docs/_build/html.

The notebooks become pages with their outputs: from reports/executed if ``make investigate`` has run all of
them, else executed here at a reduced size. The first example of each how-to is run, and its page shows what
it prints; one that fails ends the build. ATTNLAB_DOCS_EXECUTE=0 runs nothing: notebooks have no outputs, and
how-tos those that they state.
"""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
sys.path.insert(0, str(DOCS.parent))
sys.path.insert(0, str(DOCS.parent / "tools"))

from typing import Any  # noqa: E402

import snippets  # noqa: E402
from build_pages import write_benchmarks, write_notebooks  # noqa: E402

import attnlab  # noqa: E402

project = "attnlab"
author = "The attnlab contributors"
copyright = f"2026, {author}"
version = release = attnlab.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "attnlab"
html_static_path = ["_static"]
html_css_files = ["notebooks.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
# Internal pages and anchors are checked. Python names in docstrings may refer to private modules, which
# have no page.
nitpick_ignore_regex = [(r"py:.*", r".*")]

IS_EXECUTED = os.environ.get("ATTNLAB_DOCS_EXECUTE", "1") != "0"
write_benchmarks(DOCS)
write_notebooks(DOCS, execute=IS_EXECUTED)


def run_example(app: Any, name: str, source: list[str]) -> None:
    """Run the first example of a how-to that Sphinx reads."""
    if IS_EXECUTED and name.startswith("howto/"):
        source[0] = snippets.with_first_example(DOCS / f"{name}.md")


def setup(app: Any) -> None:
    """Tell Sphinx what to do with a page before it is parsed."""
    app.connect("source-read", run_example)
