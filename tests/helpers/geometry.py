"""Faults of the layout of an explorer on a page: outside the viewport, overlapping, clipped."""

from collections.abc import Sequence
from typing import Any

_FAULTS = """(root, names) => {
  const parts = { verdict: '.attnlab-fact-verdict', errors: '.attnlab-middle .attnlab-picture img' };
  for (const name of names) parts[name] = `.attnlab-knob-${name}`;
  const boxes = {}, faults = [];
  const scroller = root.closest('.jp-WindowedPanel-outer').getBoundingClientRect();
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1
    && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const page = { left: Math.max(0, scroller.left), right: Math.min(innerWidth, scroller.right),
    top: Math.max(0, scroller.top), bottom: Math.min(innerHeight, scroller.bottom) };
  for (const [name, selector] of Object.entries(parts)) {
    const element = root.querySelector(selector);
    const box = boxes[name] = element.getBoundingClientRect();
    if (!box.width || !box.height) faults.push(`${name} is hidden`);
    if (!inside(box, page)) faults.push(`${name} is outside the viewport`);
    for (let up = element.parentElement; up !== root.parentElement; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== 'visible' && !inside(box, up.getBoundingClientRect()))
        faults.push(`${name} is clipped by ${up.className}`);
  }
  const list = Object.entries(boxes);
  list.forEach(([name, a], i) => list.slice(i + 1).forEach(([other, b]) => {
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (width > 1 && height > 1) faults.push(`${name} overlaps ${other}`);
  }));
  for (const label of root.querySelectorAll('label'))
    if (label.offsetParent && label.scrollWidth > label.clientWidth + 1)
      faults.push(`label ${label.textContent} is clipped`);
  return faults;
}"""


def layout_faults(panel: Any, names: Sequence[str]) -> list[str]:
    """Scroll to an explorer and return what is wrong with its verdict, errors and main controls.

    ``names``: the fields of the main controls.
    """
    panel.evaluate("root => root.scrollIntoView({ block: 'start' })")
    panel.page.wait_for_timeout(300)  # JupyterLab adjusts the position of the cell
    found: list[str] = panel.evaluate(_FAULTS, list(names))
    return found
