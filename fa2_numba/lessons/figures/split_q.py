"""Sliced-K beside split-Q: the contrast between FlashAttention-1 and FlashAttention-2, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLACK,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.figures.tile_owners import (
    CONFIG,
    PARTIAL,
    RUNGS,
    SLICED_K,
    SPLIT_Q,
    STATISTICS,
    TILES,
    Owners,
    TileCost,
    tile_cost,
    who_holds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

WARP_COLOURS = (SKY, ORANGE, GREEN, PURPLE)
PURPOSE_COLOURS = {TILES: "#BBBBBB", PARTIAL: VERMILION, STATISTICS: BLACK}


def split_q_contrast() -> Picture:
    """Who holds what of one visited tile in sliced-K and in split-Q, and what the tile costs."""
    owners = {partition: who_holds(partition) for partition in RUNGS}
    costs = {partition: tile_cost(partition) for partition in RUNGS}
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.1))
        top, bottom = figure.subfigures(2, 1, height_ratios=(2.3, 1.6))
        _draw_owners(top, owners)
        _draw_costs(bottom, costs)
    return Picture(figure, _said(owners, costs), _numbers(owners, costs))


def _draw_owners(figure: SubFigure, owners: Mapping[str, Owners]) -> None:
    sliced, split = owners[SLICED_K], owners[SPLIT_Q]
    sizes = CONFIG.block_n, *[CONFIG.head_dim] * (len(sliced.parts) + 1), 6
    grid = figure.add_gridspec(1, len(sizes) + 2, width_ratios=(*sizes, *sizes[:2]))
    panels = [figure.add_subplot(grid[0, i]) for i in range(len(sizes) + 2)]
    panels[len(sizes) - 1].axis("off")
    _draw_owned(panels[0], sliced.S, "S = Q Kᵀ", "sliced-K (FlashAttention-1)")
    for warp, part in enumerate(sliced.parts):
        _draw_owned(panels[1 + warp], np.where(part, warp, -1), "partial O")
    _draw_owned(panels[len(sizes) - 2], sliced.O, "O, the sum")
    _draw_owned(panels[-2], split.S, "S = Q Kᵀ", "split-Q (FlashAttention-2)")
    _draw_owned(panels[-1], split.O, "O")
    panels[0].set_ylabel(f"{CONFIG.block_m} queries")
    patch = matplotlib_module("patches").Patch
    handles = [patch(facecolor=c, label=f"held by warp {w}") for w, c in enumerate(WARP_COLOURS)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)


def _draw_owned(axes: Axes, owner: np.ndarray, below: str, title: str = "") -> None:
    """A stripe of its warp's colour for all neighbours in a row that one warp holds."""
    rows, cols = owner.shape
    for warp, colour in enumerate(WARP_COLOURS):
        mine = np.pad(owner == warp, ((0, 0), (1, 1))).astype(int)
        row, left = np.nonzero(np.diff(mine, axis=1) == 1)
        _, right = np.nonzero(np.diff(mine, axis=1) == -1)
        if len(row):
            stripes = rectangles(left, right, row + 0.08, 0.84, colour)
            # What would clip them is named after numbers whose last digit differs between runs.
            stripes.set_clip_on(False)
            axes.add_patch(stripes)
    axes.set(xlim=(0, cols), ylim=(rows, 0), xlabel=below, xticks=(), yticks=())
    axes.set_aspect("equal", anchor="N")
    if title:
        axes.set_title(title, loc="left", fontweight="bold")


def _draw_costs(figure: SubFigure, costs: Mapping[str, TileCost]) -> None:
    written, read, barriers = figure.subplots(1, 3, sharey=True, width_ratios=(3, 3, 1.6))
    for axes, name in ((written, "written"), (read, "read")):
        axes.set_title(f"shared memory {name}, KiB a tile", loc="left")
        for place, cost in enumerate(costs.values()):
            _draw_bar(axes, place, getattr(cost, name))
        axes.margins(x=0.12)
    barriers.set_title("barriers a tile", loc="left")
    for place, cost in enumerate(costs.values()):
        for number in range(cost.barriers):
            barriers.plot([number + 1] * 2, [place - 0.3, place + 0.3], color=BLACK, linewidth=2.5)
        barriers.text(cost.barriers + 0.5, place, str(cost.barriers), va="center")
    barriers.set_xlim(0, max(cost.barriers for cost in costs.values()) + 2)
    for axes in (written, read, barriers):
        axes.set_xticks([])
        axes.set_yticks(range(len(costs)), list(costs))
        axes.set_ylim(len(costs) - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    patch = matplotlib_module("patches").Patch
    handles = [patch(facecolor=c, label=purpose) for purpose, c in PURPOSE_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)


def _draw_bar(axes: Axes, place: int, sizes: Mapping[str, int]) -> None:
    left = 0.0
    for purpose, size in sizes.items():
        axes.barh(place, size / 1024, 0.6, left, color=PURPOSE_COLOURS[purpose], linewidth=0)
        left += size / 1024
    beside = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(f"{left:.1f}", (left, place), va="center", **beside)


def _numbers(
    owners: Mapping[str, Owners], costs: Mapping[str, TileCost]
) -> dict[str, dict[str, object]]:
    return {
        partition: {
            # A row and a column tell all of S that the stripes show.
            "S": [owners[partition].S[0].tolist(), owners[partition].S[:, 0].tolist()],
            "O": owners[partition].O[:, 0].tolist(),
            "parts": owners[partition].parts.sum(axis=(1, 2)).tolist(),
            "written": dict(cost.written),
            "read": dict(cost.read),
            "barriers": cost.barriers,
        }
        for partition, cost in costs.items()
    }


def _said(owners: Mapping[str, Owners], costs: Mapping[str, TileCost]) -> str:
    said = []
    for partition, cost in costs.items():
        one = owners[partition]
        in_row, in_col = (len(np.unique(line)) for line in (one.S[0], one.S[:, 0]))
        adders = int(one.parts.any(axis=(1, 2)).sum())
        parts = f"{adders} warps hold partial O to be summed" if adders else "no partial O to sum"
        said.append(
            f"{partition}: a row of S lies in {in_row} warp{'s' * (in_row > 1)}, a column in "
            f"{in_col}; {parts}. A visited tile writes {_listed(cost.written)} to shared memory, "
            f"reads {_listed(cost.read)}, and has {cost.barriers} barriers."
        )
    return (
        f"Which warp holds what of a tile of {CONFIG.block_m} queries and {CONFIG.block_n} keys, "
        f"head dim {CONFIG.head_dim}. " + " ".join(said)
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{size:,} bytes of {name}" for name, size in sizes.items() if size)
