"""Labelled lines over logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from fa2_numba.lessons.figures.style import (
    CURVE_COLOURS,
    CURVE_DASHES,
    CURVE_MARKERS,
    IDLE,
    WIDTH_INCHES,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    x_label: str,
    y_label: str,
    points: Sequence[str] = (),
) -> Figure:
    """Labelled lines over logarithmic axes, with a tick at each x of the first one.

    curves: label -> (x, y), both positive. x_label, y_label: with units. points: what stands at
    the points of the first one.
    """
    if not curves:
        raise ValueError("curves={}: must hold at least one")
    for label, (x, y) in curves.items():
        if len(x) != len(y) or not len(x) or min(*x, *y) <= 0:
            rule = "must be as many x as y, at least one, all positive"
            raise ValueError(f"curves[{label!r}] has {len(x)} x and {len(y)} y: {rule}")
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.5))
        axes = figure.subplots()
        looks = zip(cycle(CURVE_COLOURS), cycle(CURVE_MARKERS), cycle(CURVE_DASHES), strict=False)
        for (label, (x, y)), (colour, marker, dash) in zip(curves.items(), looks, strict=False):
            axes.plot(x, y, color=colour, marker=marker, linestyle=dash, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks, heights = next(iter(curves.values()))
        for text, *point in zip(points, ticks, heights, strict=False):
            axes.annotate(text, point, (4, 4), textcoords="offset points")
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(True, color=IDLE)
        axes.legend()
    return figure
