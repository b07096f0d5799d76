"""Artists that several plots share: hatched cells, the legend outside the axes, the status colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, ListedColormap

# White text on them has a contrast of at least 4.5 to 1.
STATUS_COLOURS = {"match": "#3d8049", "mismatch": "#bf4f37", "rejected": "#86639a"}


def hatch_cells(
    ax: Axes, mask: Any, hatch: str, colour: str, *, facecolour: str = "none"
) -> PolyCollection:
    """Lay a hatch over the cells of an image, and return the artist.

    ``mask``: [rows, columns] bool, in the image's coordinates, where the centre of a cell is an integer.
    """
    boxes = []
    for column in np.flatnonzero(np.asarray(mask).any(0)):
        for first, last in runs(np.asarray(mask)[:, column]):
            left, right, top, bottom = column - 0.5, column + 0.5, first - 0.5, last + 0.5
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    cells = PolyCollection(
        boxes, facecolors=facecolour, edgecolors=colour, hatch=hatch, linewidths=0
    )
    ax.add_collection(cells, autolim=False)
    return cells


def runs(flags: Any) -> list[tuple[int, int]]:
    """Return (first, last) of each run of true values in a one-dimensional array."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(flags).astype(int), [0]))))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def put_legend(ax: Axes, handles: Sequence[Any] | None = None, *, below: bool = False) -> None:
    """Put a legend outside the axes, at the right or below; without ``handles``, of the labelled artists."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    if below:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 5}
        place |= {"columnspacing": 1.2, "handlelength": 1.5}
    if handles is not None:
        place["handles"] = handles
    ax.legend(fontsize="small", frameon=False, **place)


_HALF = 128  # colours on each side of the tolerance
_DECADES_WITHIN = 3  # decades from the least error to the tolerance
AT_LIMIT = 0.499  # the place of the tolerance in the colours, from 0 to 1
_LEAST_ATOL = 1e-12  # takes the place of the tolerance 0
_WITHIN = LinearSegmentedColormap.from_list("within", ["#f3f5f8", "#87a0bd"])
_ABOVE = mpl.colormaps["YlOrRd"]
COLOURS = ListedColormap(
    [*_WITHIN(np.linspace(0, 1, _HALF)), *_ABOVE(np.linspace(0.4, 1, _HALF))], name="errors"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScale:
    """A logarithmic scale in two halves: errors within the tolerance, and larger ones up to ``most``."""

    atol: float
    most: float

    @classmethod
    def of(cls, atol: float, errors: Any) -> "ErrorScale":
        """Return the scale of some errors; its upper limit is a power of 10.

        The largest error takes the place of an infinite tolerance.
        """
        finite = errors[np.isfinite(errors)]
        largest = float(finite.max(initial=0.0))
        atol = max(atol if np.isfinite(atol) else largest, _LEAST_ATOL)
        largest = max(largest, 10 * atol)
        return cls(atol=atol, most=10.0 ** np.ceil(np.log10(largest) - 1e-6))

    @property
    def least(self) -> float:
        """Return the lower limit; smaller errors have the colour of this one."""
        return self.atol * 0.1**_DECADES_WITHIN

    def clip(self, errors: Any, is_wrong: Any) -> Any:
        """Return errors for an image: above the tolerance exactly where elements mismatch; NaN is kept.

        They differ if there is a relative tolerance.
        """
        right = np.clip(errors, self.least, self.atol)
        wrong = np.clip(errors, self.atol * 1.001, self.most)
        return np.where(is_wrong, wrong, right)

    def norm(self) -> FuncNorm:
        """Return the norm: the tolerance is at the middle of the colours."""
        return FuncNorm((self._to_share, self._to_error), vmin=self.least, vmax=self.most)

    def ticks(self) -> list[float]:
        """Return the errors to label: both limits, the tolerance, and some decades above it."""
        decades = round(np.log10(self.most / self.atol))
        step = max(1, -(-decades // 3))
        above = [self.most / 10**i for i in range(0, decades, step)]
        return [self.least, self.atol, *sorted(t for t in above if t > 3 * self.atol)]

    def _to_share(self, errors: Any) -> Any:
        """Return the place of errors in the colours, from 0 to 1."""
        errors = np.clip(np.asarray(errors, dtype=float), self.least, self.most)
        within = np.log10(errors / self.least) / _DECADES_WITHIN
        above = np.log10(errors / self.atol) / np.log10(self.most / self.atol)
        return np.where(errors <= self.atol, AT_LIMIT * within, 0.501 + 0.499 * above)

    def _to_error(self, shares: Any) -> Any:
        """Return the errors at some places in the colours."""
        shares = np.asarray(shares, dtype=float)
        within = self.least * 10 ** (np.minimum(shares, AT_LIMIT) / AT_LIMIT * _DECADES_WITHIN)
        rest = np.clip((shares - 0.501) / 0.499, 0, 1)
        return np.where(shares < 0.5, within, self.atol * (self.most / self.atol) ** rest)


def short(value: float) -> str:
    """Return a power of 10 as text: 1, 0.1, 1e-3."""
    if 0.1 <= value < 100:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
