"""Who ran where and when on a GPU, and how much of it had work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLUE,
    IDLE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_ROWS, GAP = 16, 0.04
"""With few multiprocessors blocks have a gap between them, a share of their height."""


def draw_timeline(
    timelines: Mapping[str, Timeline], title: str, same_time_axis: bool = False
) -> Figure:
    """Side by side: a chart of who ran where and when, above how much of the GPU had work.

    timelines: name -> timeline, of the model or recorded. In a chart every multiprocessor has a
    row, with a lane for each slot; two shades tell one block from the next. same_time_axis: all
    charts are as long as the longest; without it the figure says that their axes differ.
    """
    if not isinstance(timelines, Mapping):
        kind = type(timelines).__name__
        raise TypeError(f"timelines is a {kind}: must be a mapping, name -> Timeline")
    if not timelines:
        raise ValueError("timelines={}: must hold at least one")
    for name, timeline in timelines.items():
        if not isinstance(timeline, Timeline):
            kind = type(timeline).__name__
            raise TypeError(f"timelines[{name!r}] is a {kind}: must be a Timeline")
    if len(timelines) > 1 and not same_time_axis:
        title += "\nThe time axes differ."
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.2))
        figure.suptitle(title)
        axes = figure.subplots(
            2,
            len(timelines),
            squeeze=False,
            sharex="all" if same_time_axis else "col",
            sharey="row",
            height_ratios=(3, 1),
        )
        for (name, timeline), (chart, curve) in zip(timelines.items(), axes.T, strict=True):
            _draw_chart(chart, name, timeline)
            _draw_utilisation(curve, timeline)
            shown = timelines.values() if same_time_axis else [timeline]
            first, last = min(t.start.min() for t in shown), max(t.end.max() for t in shown)
            chart.set_xlim(first, last if last > first else first + 1)
        axes[0, 0].set_ylabel("multiprocessor")
        axes[1, 0].set_ylabel("busy")
        patch = matplotlib_module("patches").Patch
        meanings = ((BLUE, "a block"), (SKY, "the next block in its slot"), (IDLE, "no block"))
        shades = [patch(facecolor=colour, label=label) for colour, label in meanings]
        curves = axes[1, 0].get_legend_handles_labels()[0]
        figure.legend(handles=[*shades, *curves], loc="outside lower center", ncols=5, fontsize=8)
    return figure


def timeline_numbers(timeline: Timeline) -> dict[str, object]:
    """What `draw_timeline` shows of a timeline, as JSON can hold it."""
    return {
        "multiprocessors": timeline.multiprocessors,
        "slots": timeline.slots,
        "unit": timeline.unit,
        "start": timeline.start.tolist(),
        "end": timeline.end.tolist(),
        "multiprocessor": timeline.multiprocessor.tolist(),
    }


def in_milliseconds(numbers: Mapping[str, object]) -> Timeline:
    """The timeline of `timeline_numbers` in nanoseconds, as stamps record it."""
    return Timeline(
        start=np.array(numbers["start"]) / 1e6,
        end=np.array(numbers["end"]) / 1e6,
        multiprocessor=np.array(numbers["multiprocessor"]),
        multiprocessors=numbers["multiprocessors"],
        slots=numbers["slots"],
        unit="ms",
    )


def _draw_chart(axes: Axes, name: str, timeline: Timeline) -> None:
    title = f"{name}\n{timeline.blocks:,} block{'s' * (timeline.blocks != 1)}"
    if timeline.span:
        busy = timeline.mean_utilisation.multiprocessors
        title += f", {busy:.0%} of multiprocessors busy on average"
    axes.set_title(title)
    axes.set_facecolor(IDLE)
    shade = np.empty(timeline.blocks, np.int64)
    lane = np.empty(timeline.blocks, np.int64)
    for m in np.unique(timeline.multiprocessor):
        blocks = np.flatnonzero(timeline.multiprocessor == m)
        lane[blocks], shade[blocks] = _lanes(timeline.start[blocks], timeline.end[blocks])
    height = 1 / max(timeline.slots, lane.max() + 1)
    gap = GAP * height * (timeline.multiprocessors <= FEW_ROWS)
    bottom = timeline.multiprocessor + lane * height + gap
    for colour, blocks in ((BLUE, shade == 0), (SKY, shade == 1)):
        bars = timeline.start[blocks], timeline.end[blocks], bottom[blocks]
        axes.add_patch(rectangles(*bars, height - 2 * gap, colour))
    axes.set_ylim(0, timeline.multiprocessors)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _lanes(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the blocks of one multiprocessor: a lane that is free, and a shade that alternates."""
    free_from: list[float] = []
    shades: list[int] = []
    lanes, shade_of = np.empty(len(start), np.int64), np.empty(len(start), np.int64)
    for block in np.argsort(start, kind="stable"):
        free = [lane for lane, time in enumerate(free_from) if time <= start[block]]
        if not free:
            free = [len(free_from)]
            free_from.append(end[block])
            shades.append(1)
        lane = free[0]
        free_from[lane], shades[lane] = end[block], 1 - shades[lane]
        lanes[block], shade_of[block] = lane, shades[lane]
    return lanes, shade_of


def _draw_utilisation(axes: Axes, timeline: Timeline) -> None:
    times = np.unique(np.concatenate([timeline.start, timeline.end]))
    used = timeline.utilisation(times)
    axes.step(times, used.multiprocessors, where="post", color=BLUE, label="multiprocessors busy")
    axes.step(times, used.slots, "--", where="post", color=VERMILION, label="block slots filled")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(matplotlib_module("ticker").PercentFormatter(1.0))
    axes.set_xlabel(f"time ({timeline.unit})")
