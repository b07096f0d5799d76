"""A panel as static HTML, for pages without JupyterLab's front-end."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from attnlab.show.panels.rendering import Rendered

_MAX_NAMES = 8  # fields that are listed; more are counted


def static_html(
    texts: Sequence[str], rendered: Mapping[str, Rendered], fields: Sequence[str]
) -> str:
    """Return texts and pictures as HTML without scripts and external resources."""
    pictures = [
        f'<img alt="{escape(picture.title)}" width="{picture.width}" style="max-width:100%" '
        f'src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
        for picture in rendered.values()
    ]
    names = (
        ", ".join(fields) if len(fields) <= _MAX_NAMES else f"all {len(fields)} fields of a Case"
    )
    note = f'<p class="note"><small>In JupyterLab: controls for {names}.</small></p>'
    return f'<div class="attnlab-static">{"".join([*texts, *pictures, note])}</div>'
