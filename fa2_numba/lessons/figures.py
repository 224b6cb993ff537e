"""Figures from data, and SVG files that carry the numbers they show.

matplotlib is optional, so it is imported where a figure is drawn and not before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from fa2_numba.device.layouts import LANES_PER_ROW
from fa2_numba.lessons.fragments import Holding
from fa2_numba.lessons.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

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
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


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
    with _style():
        figure = _figure((WIDTH_INCHES, 5.2))
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
        axes[1, -1].legend(loc="lower left", fontsize=8)
        patch = _matplotlib("patches").Patch
        meanings = ((BLUE, "a block"), (SKY, "the next block in its slot"), (IDLE, "no block"))
        shades = [patch(facecolor=colour, label=label) for colour, label in meanings]
        figure.legend(handles=shades, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_fragments(
    fragments: Mapping[str, Sequence[Holding]], signs: Sequence[str], title: str
) -> Figure:
    """Matrices side by side, with who holds what: a colour for each four lanes, framed registers.

    fragments: label -> all that lanes hold of it. signs: what stands after each matrix.
    """
    with _style():
        figure = _figure((WIDTH_INCHES, 5.2))
        figure.suptitle(title)
        widths = [_last(holdings)[1] for holdings in fragments.values()]
        panels = figure.subplots(1, len(fragments), width_ratios=widths)
        for axes, (label, holdings), sign in zip(panels, fragments.items(), signs, strict=True):
            _draw_fragment(axes, label, holdings)
            axes.text(1.06, 0.5, sign, fontsize=16, transform=axes.transAxes, va="center")
    return figure


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
    with _style():
        figure = _figure((WIDTH_INCHES, 4.5))
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


def save_svg(figure: Figure, path: Path, numbers: Mapping[str, object]) -> None:
    """Write a figure as an SVG file that holds all it needs, and `numbers` as JSON.

    Neither date nor version is in the file; the same matplotlib writes the same bytes. `numbers`
    are what the figure shows: a test compares them, for another matplotlib draws other bytes.
    """
    metadata = {
        "Description": json.dumps(numbers, separators=(",", ":"), allow_nan=False),
        "Creator": "fa2_numba",
        "Date": None,
        "Type": None,
    }
    with _style():
        figure.savefig(path, format="svg", metadata=metadata)
    # A hundredth of a point is enough, and half the file.
    text = Path(path).read_text(encoding="utf-8")
    text = re.sub(r' d="[^"]*"', lambda data: re.sub(r"(\.\d\d)\d+", r"\1", data[0]), text)
    # The document type names a file on the web; git hooks would cut blanks at the ends of lines.
    text = re.sub(r"<!DOCTYPE[^>]*>\n", "", text)
    Path(path).write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


def read_numbers(path: Path) -> dict[str, object]:
    """The numbers that `save_svg` left in a file; ValueError if there are none."""
    description = next(ElementTree.parse(path).iter(DESCRIPTION), None)
    if description is None or not description.text:
        raise ValueError(f"path={str(path)!r}: must be an SVG file that save_svg has written")
    return json.loads(description.text)


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
    rectangle = _matplotlib("patches").Rectangle
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


def _draw_chart(axes: Axes, name: str, timeline: Timeline) -> None:
    title = f"{name}\n{timeline.blocks:,} blocks"
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
    bottom = timeline.multiprocessor + lane * height
    for colour, blocks in ((BLUE, shade == 0), (SKY, shade == 1)):
        bars = timeline.start[blocks], timeline.end[blocks], bottom[blocks]
        axes.add_patch(_rectangles(*bars, height, colour))
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


def _rectangles(
    left: np.ndarray, right: np.ndarray, bottom: np.ndarray, height: float, colour: str
) -> PathPatch:
    """Many rectangles as one path: thousands of bars as elements would be a file ten times big."""
    path = _matplotlib("path").Path
    top = bottom + height
    corners = [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1).reshape(-1, 2)
    codes = np.tile([path.MOVETO, *[path.LINETO] * 3, path.CLOSEPOLY], len(left))
    bars = path(vertices, codes)
    bars.should_simplify = False
    return _matplotlib("patches").PathPatch(bars, facecolor=colour, linewidth=0)


def _draw_utilisation(axes: Axes, timeline: Timeline) -> None:
    times = np.unique(np.concatenate([timeline.start, timeline.end]))
    used = timeline.utilisation(times)
    axes.step(times, used.multiprocessors, where="post", color=BLUE, label="multiprocessors")
    axes.step(times, used.slots, "--", where="post", color=VERMILION, label="block slots")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(_matplotlib("ticker").PercentFormatter(1.0))
    axes.set_xlabel(f"time ({timeline.unit})")


def _style() -> AbstractContextManager:
    return _matplotlib().rc_context(STYLE)


def _figure(inches: tuple[float, float]) -> Figure:
    return _matplotlib("figure").Figure(figsize=inches, layout="constrained")


def _matplotlib(module: str = "") -> ModuleType:
    name = f"matplotlib.{module}" if module else "matplotlib"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        what = 'figures need matplotlib: pip install "fa2_numba[notebooks]"'
        raise ModuleNotFoundError(what, name=error.name) from error
