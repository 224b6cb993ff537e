"""One look for all figures: a palette for every kind of colour vision, on white.

matplotlib is optional, so it is imported where a figure is drawn and not before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: the colours stay apart for every kind of colour vision.
BLUE, SKY, VERMILION, GREEN, ORANGE, PURPLE, BLACK = (
    "#0072B2 #56B4E9 #D55E00 #009E73 #E69F00 #CC79A7 #000000".split()
)
IDLE = "#EEEEEE"
YELLOW = "#F0E442"
CURVE_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, BLACK)
# Curves differ in more than colour.
CURVE_MARKERS, CURVE_DASHES = "osD^vP", ("-", "--", "-.", ":")

# A lane's number is read on top of its colour.
LANE_COLOURS = (BLUE, ORANGE, GREEN, YELLOW, SKY, VERMILION, PURPLE, BLACK)
LANE_TINT = 0.4

WIDTH_INCHES = 9.0
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": "black",
    "axes.labelcolor": "black",
    "xtick.color": "black",
    "ytick.color": "black",
    # Text stays text: it can be read, searched for and selected, and the file stays small.
    "svg.fonttype": "none",
    # Ids in the file are the same in every run.
    "svg.hashsalt": "fa2_numba",
}


def styled() -> AbstractContextManager:
    """All that is drawn inside has STYLE."""
    return matplotlib_module().rc_context(STYLE)


def new_figure(inches: tuple[float, float]) -> Figure:
    """An empty figure (width, height) that belongs to no window."""
    return matplotlib_module("figure").Figure(figsize=inches, layout="constrained")


def matplotlib_module(module: str = "") -> ModuleType:
    """matplotlib or one of its modules; ModuleNotFoundError says how to install it."""
    name = f"matplotlib.{module}" if module else "matplotlib"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        what = 'figures need matplotlib: pip install "fa2_numba[notebooks]"'
        raise ModuleNotFoundError(what, name=error.name) from error
