"""Many shapes as one path, which keeps files small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.lessons.figures.style import matplotlib_module

if TYPE_CHECKING:
    from matplotlib.patches import PathPatch


def rectangles(
    left: np.ndarray, right: np.ndarray, bottom: np.ndarray, height: float, colour: str
) -> PathPatch:
    """Rectangles of one height: thousands of bars as elements would be a file ten times big."""
    path = matplotlib_module("path").Path
    top = bottom + height
    corners = [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1).reshape(-1, 2)
    codes = np.tile([path.MOVETO, *[path.LINETO] * 3, path.CLOSEPOLY], len(left))
    bars = path(vertices, codes)
    bars.should_simplify = False
    return matplotlib_module("patches").PathPatch(bars, facecolor=colour, linewidth=0)
