"""Which lane and register holds which element of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.device.layouts import LANES_PER_ROW
from fa2_numba.lessons.figures.style import (
    BLACK,
    LANE_COLOURS,
    LANE_TINT,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.fragments import Holding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_fragments(
    fragments: Mapping[str, Sequence[Holding]], signs: Sequence[str], title: str
) -> Figure:
    """Matrices side by side, with who holds what: a colour for each four lanes, framed registers.

    fragments: label -> all that lanes hold of it. signs: what stands after each matrix.
    """
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.2))
        figure.suptitle(title)
        widths = [_last(holdings)[1] for holdings in fragments.values()]
        panels = figure.subplots(1, len(fragments), width_ratios=widths)
        for axes, (label, holdings), sign in zip(panels, fragments.items(), signs, strict=True):
            _draw_fragment(axes, label, holdings)
            axes.text(1.06, 0.5, sign, fontsize=16, transform=axes.transAxes, va="center")
    return figure


def _last(holdings: Sequence[Holding]) -> tuple[int, int]:
    """How many rows and columns a matrix has."""
    cells = np.concatenate([holding.cells for holding in holdings])
    rows, cols = cells.max(axis=0) + 1
    return int(rows), int(cols)


def _draw_fragment(axes: Axes, label: str, holdings: Sequence[Holding]) -> None:
    rows, cols = _last(holdings)
    axes.set(xlim=(-0.1, cols + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal", frame_on=False)
    axes.set_title(label, pad=20)
    axes.set_xticks(np.arange(cols) + 0.5, range(cols), fontsize=7)
    axes.set_yticks(np.arange(rows) + 0.5, range(rows), fontsize=7)
    axes.tick_params(length=0)
    axes.set_xlabel(" ")  # room for the names of registers
    registers: dict[str, list[tuple[int, int]]] = {}
    rectangle = matplotlib_module("patches").Rectangle
    for holding in holdings:
        (top, left), size = _box(holding.cells)
        tint = LANE_COLOURS[holding.lane // LANES_PER_ROW], LANE_TINT
        look = {"facecolor": tint, "edgecolor": "white"}
        axes.add_patch(rectangle((left, top), *size[::-1], **look))
        middle = left + size[1] / 2, top + size[0] / 2
        axes.text(*middle, holding.lane, fontsize=7, ha="center", va="center")
        registers.setdefault(holding.register, []).extend(holding.cells)
    for name, cells in registers.items():
        (top, left), size = _box(cells)
        middle, side = left + size[1] / 2, -1 if top else 1
        edge, distance = (rows, 18) if top else (0, 6)
        place = {"xytext": (0, side * distance), "textcoords": "offset points"}
        align = {"ha": "center", "va": "top" if top else "bottom"}
        axes.annotate(name, (middle, edge), fontsize=9, **place, **align)
        frame = rectangle((left, top), *size[::-1], fill=False, edgecolor=BLACK, linewidth=1.5)
        axes.add_patch(frame)


def _box(cells: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """First row and column of the cells, and how many rows and columns they take."""
    first = np.min(cells, axis=0)
    return first, np.max(cells, axis=0) + 1 - first
