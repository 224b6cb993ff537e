"""A film of one tile in sliced-K and in split-Q: shared memory, and the warps that wait.

Its frames are stops of a `Stepper` at each barrier of the tile: when two warps of four have come
there, and when all have. A notebook shows them as one picture, or one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.constants import WARP_SIZE
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.split_q import WARP_COLOURS
from fa2_numba.lessons.figures.style import (
    BLUE,
    IDLE,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.figures.tile_owners import (
    CONFIG,
    SPLIT_Q,
    launched,
    random_inputs,
    tile_cost,
)
from fa2_numba.simulator.stepper import Stepper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEVER, EARLIER, NEW = range(3)
STATES = ("nothing written", "written before", "written since the last barrier")
STATE_COLOURS = (IDLE, BLUE, VERMILION)
BARRIER = "cuda.syncthreads()"
TWO_COME, ALL_COME = "two have come", "all have come"
END = "end of the tile"

LABELS = {
    "Q": "Q",
    "K": "K",
    "V": "V",
    "partial": "partial O",
    "max": "m",
    "sum": "l",
    "scale": "f",
}
"""Shared array -> what is written over it; f: the factor by which a row of O is rescaled."""
NARROW, WIDENED, APART = 4, 2, 3
"""Arrays with so few columns are drawn so much wider; columns between two arrays."""
ROWS = CONFIG.block_m
FULL_WIDTH = 154
"""Of a frame: the arrays of a sliced-K kernel, and what lies between them, fit."""


@dataclass(frozen=True)
class Frame:
    """One stop: NEVER, EARLIER or NEW for every element of shared arrays (32 rows each).

    when: which stop. arrays: name -> states (ROWS, columns), in the order of LABELS. waiting: warps
    of which all threads have come to the barrier, and cannot go on before the others do.
    """

    when: str
    arrays: Mapping[str, np.ndarray]
    waiting: tuple[int, ...]


@cache
def follow_tile(partition: str) -> tuple[Frame, ...]:
    """Run one tile from barrier to barrier."""
    simulation, arguments = launched(partition, *random_inputs(1))
    frames: list[Frame] = []
    written: dict[str, np.ndarray] = {}
    third_warp = 2 * WARP_SIZE
    with Stepper(simulation, *arguments) as stepper:
        for number in range(1, tile_cost(partition).barriers + 1):
            stepper.to_line(BARRIER, thread=third_warp)
            frames.append(_frame(stepper, f"barrier {number}: {TWO_COME}", written, "waiting"))
            stepper.to_barrier()
            frames.append(_frame(stepper, f"barrier {number}: {ALL_COME}", written, "done"))
            written = _written(stepper)
        if partition == SPLIT_Q:
            stepper.all_to_line("i_row = first_row + row")
            frames.append(_frame(stepper, END, written, "waiting"))
    return tuple(frames)


def _written(stepper: Stepper) -> dict[str, np.ndarray]:
    """Name -> whether elements have been written, as rows and columns, without padding."""
    arrays = {name.removesuffix("_smem"): array for name, array in stepper.shared().items()}
    return {
        name: ~_rows(name, np.ma.getmaskarray(arrays[name])) for name in LABELS if name in arrays
    }


def _rows(name: str, array: np.ndarray) -> np.ndarray:
    """(warps, rows, columns) and (warps, rows) become rows x columns; the padding column goes."""
    if name == "partial":
        return array.swapaxes(0, 1).reshape(ROWS, -1)
    if name in ("max", "sum"):
        return array.T
    return array.reshape(ROWS, -1)[:, : CONFIG.head_dim]


def _frame(stepper: Stepper, when: str, before: Mapping[str, np.ndarray], state: str) -> Frame:
    """state: how that of a thread begins which has come to the barrier."""
    states = {
        name: np.where(now, np.where(before.get(name, False), EARLIER, NEW), NEVER)
        for name, now in _written(stepper).items()
    }
    groups = [g for g in stepper.waiting() if BARRIER in g.line and g.state.startswith(state)]
    stopped = [thread for group in groups for thread in group.threads]
    warps = np.bincount(np.array(stopped, dtype=int) // WARP_SIZE, minlength=CONFIG.num_warps)
    return Frame(when, states, tuple(np.flatnonzero(warps == WARP_SIZE).tolist()))


# As one picture


def draw_films(films: Mapping[str, Sequence[Frame]]) -> Picture:
    """Name -> frames: a row for each partition and kind of stop, a column for each barrier."""
    if not films or not all(films.values()):
        raise ValueError("films: must be at least one, and have frames")
    rows = [(name, when) for name in films for when in (TWO_COME, ALL_COME)]
    columns = max(-(-len(frames) // 2) for frames in films.values())
    with styled():
        figure = new_figure((WIDTH_INCHES, 1.15 * len(rows) + 0.5))
        panels = figure.subplots(len(rows), columns, squeeze=False)
        for axes in panels.flat:
            axes.axis("off")
        for row, (name, when) in enumerate(rows):
            shown = [frame for frame in films[name] if frame.when.endswith((when, END))]
            shown = [frame for frame in shown if when == TWO_COME or frame.when != END]
            for axes, frame in zip(panels[row], shown, strict=False):
                _draw_frame(axes, frame, name)
        patch = matplotlib_module("patches").Patch
        handles = [
            patch(facecolor=colour, label=state)
            for colour, state in zip(STATE_COLOURS, STATES, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    numbers = {name: [_numbers(frame) for frame in frames] for name, frames in films.items()}
    return Picture(figure, _said(films), numbers)


def _draw_frame(axes: Axes, frame: Frame, name: str) -> None:
    blocks = list(_blocks(frame))
    for state, colour in enumerate(STATE_COLOURS):
        shapes = [block[1:] for block in blocks if block[0] == state]
        if shapes:
            left, right, top, height = np.array(shapes, dtype=float).T
            axes.add_patch(rectangles(left, right, top, height, colour))
    for array, left, right in _places(frame):
        axes.text((left + right) / 2, -1, LABELS[array], ha="center", fontsize=8)
    for warp, colour in enumerate(WARP_COLOURS):
        waits = warp in frame.waiting
        axes.plot(
            31 + 9 * warp,
            ROWS + 6,
            marker="s",
            markersize=7,
            markerfacecolor=colour if waits else "white",
            markeredgecolor=colour,
            clip_on=False,
        )
    axes.text(0, ROWS + 6, "waits", fontsize=8, va="center")
    axes.set(xlim=(0, FULL_WIDTH), ylim=(ROWS + 10, -8))
    axes.set_title(f"{name}, {frame.when}", fontsize=8, loc="left")


def _places(frame: Frame) -> Iterator[tuple[str, int, int]]:
    """Array, and where it begins and ends in the row of arrays."""
    left = 0
    for name, states in frame.arrays.items():
        right = left + states.shape[1] * _widened(states)
        yield name, left, right
        left = right + APART


def _widened(states: np.ndarray) -> int:
    return WIDENED if states.shape[1] <= NARROW else 1


def _blocks(frame: Frame) -> Iterator[tuple[int, int, int, int, int]]:
    """State, left, right, top and height of the fewest rectangles that rows alike can share."""
    for name, first, _ in _places(frame):
        states = frame.arrays[name]
        top = 0
        for row, same in groupby(map(tuple, states.tolist())):
            height, left = len(list(same)), 0
            for state, run in groupby(row):
                width = len(list(run))
                begin, end = (first + _widened(states) * x for x in (left, left + width))
                yield state, begin, end, top, height
                left += width
            top += height


def _numbers(frame: Frame) -> dict[str, object]:
    counts = {
        name: np.bincount(states.ravel(), minlength=len(STATES)).tolist()
        for name, states in frame.arrays.items()
    }
    return {"when": frame.when, "waiting": list(frame.waiting), "states": counts}


def _said(films: Mapping[str, Sequence[Frame]]) -> str:
    return "Shared memory and waiting warps while a tile is computed. " + " ".join(
        f"{name}: " + " ".join(map(describe, frames)) for name, frames in films.items()
    )


def describe(frame: Frame) -> str:
    """What a frame shows, in words."""
    new = [
        f"{LABELS[name]} {'whole' if (states == NEW).all() else 'in part'}"
        for name, states in frame.arrays.items()
        if (states == NEW).any()
    ]
    waiting = ", ".join(map(str, frame.waiting)) or "none"
    return (
        f"{frame.when[0].upper()}{frame.when[1:]}; warps waiting: {waiting}; "
        f"newly written: {', '.join(new) or 'nothing'}."
    )


# One by one


@dataclass(frozen=True, repr=False)
class Film:
    """Frames that a notebook shows one by one: radio buttons and style rules, no scripts.

    A viewer that strips style rules shows all frames, one below the other.
    """

    name: str
    frames: Sequence[Frame]

    def __repr__(self) -> str:
        return f"<Film of {self.name}: {' '.join(map(describe, self.frames))}>"

    def _repr_html_(self) -> str:
        group = "film-" + self.name.lower()
        buttons = "".join(
            f'<input type="radio" name="{group}" id="{group}-{i}"{" checked" * (i == 0)}>'
            f'<label for="{group}-{i}">{i + 1}</label> '
            for i in range(len(self.frames))
        )
        rules = "".join(
            f"#{group}-{i}:checked~figure:nth-of-type({i + 1}){{display:block}}"
            for i in range(len(self.frames))
        )
        frames = "".join(map(_html, self.frames))
        colours = ", ".join(
            f'<span style="background:{colour}">&emsp;</span> {state}'
            for colour, state in zip(STATE_COLOURS, STATES, strict=True)
        )
        return (
            f'<div class="{group}" style="background:white;color:black;padding:8px">'
            f"<style>.{group} figure{{display:none;margin:8px 0}}{rules}</style>"
            f"<b>{escape(self.name)}</b>, stop {buttons}{frames}{colours}</div>"
        )


def _html(frame: Frame) -> str:
    shapes = "".join(
        f'<rect x="{left}" y="{top}" width="{right - left}" height="{height}" '
        f'fill="{STATE_COLOURS[state]}"/>'
        for state, left, right, top, height in _blocks(frame)
    )
    names = "".join(
        f'<text x="{(left + right) / 2}" y="-2" text-anchor="middle">{LABELS[name]}</text>'
        for name, left, right in _places(frame)
    )
    said = escape(describe(frame))
    return (
        f'<figure><svg role="img" width="660" viewBox="0 -8 {FULL_WIDTH} {ROWS + 9}" '
        f'font-size="5" font-family="sans-serif"><title>{said}</title>{shapes}{names}</svg>'
        f"<figcaption>{said}</figcaption></figure>"
    )
