"""Attention maps as a figure: one panel a head, queries downwards, keys across."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fa2_numba.demo.heads import readable

MAX_LABELS = 64
PANEL_COLUMNS = 3
LABEL_POINTS = 6
INCHES_PER_LABEL = 0.1
MIN_PANEL_INCHES = 4.5
DOTS_PER_INCH = 120


def file_types() -> list[str]:
    """The file types that this matplotlib can write, without the dot."""
    return sorted(FigureCanvasBase.get_supported_filetypes())


def save_maps(file: Path, P: np.ndarray, tokens: tuple[str, ...], title: str) -> None:
    """Write the maps P (heads, seqlen, seqlen) to a file whose suffix says its type."""
    # Text stays text in an SVG: tokens can be searched for and selected.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_maps(P, tokens, title).savefig(file, dpi=DOTS_PER_INCH)


def draw_maps(P: np.ndarray, tokens: tuple[str, ...], title: str) -> Figure:
    """The figure of the maps; hidden keys are left blank."""
    heads, seqlen, _ = P.shape
    step = -(-seqlen // MAX_LABELS)
    columns = min(heads, PANEL_COLUMNS)
    rows = -(-heads // columns)
    panel = max(MIN_PANEL_INCHES, INCHES_PER_LABEL * math.ceil(seqlen / step) + 1)
    figure = Figure(figsize=(panel * columns + 0.5, panel * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for head, ax in enumerate(axes):
        if head < heads:
            image = _draw_head(ax, P[head], tokens, step)
            ax.set_title(f"head {head}", fontsize=9)
        else:
            ax.set_axis_off()
    bar = figure.colorbar(
        image, ax=list(axes), shrink=0.5, aspect=25, pad=0.01, format=lambda w, _: f"{w:.0%}"
    )
    bar.set_label("attention weight (square-root colour)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _draw_head(ax: Axes, P: np.ndarray, tokens: tuple[str, ...], step: int) -> AxesImage:
    hidden = np.triu(np.ones(P.shape, bool), k=1)
    shown = np.ma.masked_where(hidden, P)
    image = ax.imshow(shown, cmap="magma_r", norm=PowerNorm(0.5, vmin=0, vmax=1))
    positions = range(0, len(tokens), step)
    labels = [readable(tokens[i]) for i in positions]
    text = {"fontsize": LABEL_POINTS, "parse_math": False}
    ax.set_xticks(positions, labels, rotation=90, **text)
    ax.set_yticks(positions, labels, **text)
    ax.tick_params(length=0, pad=1)
    ax.set_xlabel("key", fontsize=8)
    ax.set_ylabel("query", fontsize=8)
    ax.spines[:].set_visible(False)
    return image
