"""Panels for JupyterLab: toggles for the knobs of a Case, and what comes of it, side by side.

A panel asks a Lab, in the background, for the Case that its controls say, and shows the answer. All that
it shows is a function's result that a notebook could call itself; nothing is computed here.
"""

from attnlab.widgets.panel import Panel, explorer, panel

__all__ = ["Panel", "explorer", "panel"]
