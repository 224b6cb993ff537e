"""The threads of a launch, a square each, while they come to one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa2_numba.constants import WARP_SIZE
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLUE,
    GREEN,
    IDLE,
    ORANGE,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.simulator.stepper import Stepper

NOT_BEGUN, THERE, DONE, PASSED_BY = range(4)
MEANINGS = ("has not begun", "is about to execute it", "has executed it", "has passed it by")
COLOURS = (IDLE, ORANGE, BLUE, GREEN)
# Squares differ in more than colour.
SIGNS = ("", "o", "", "x")
GAP = 0.06


@dataclass(frozen=True)
class Moment:
    """What each thread (blocks, threads of a block) is about when a block has come so far."""

    what: str
    states: np.ndarray


def follow(stepper: Stepper, statement: str, blocks: int, threads: int) -> list[Moment]:
    """Run a launch of one-dimensional blocks, each up to the statement, and then to its end."""
    states = np.full((blocks, threads), NOT_BEGUN)
    moments = [Moment("before the launch", states.copy())]
    while stepper.all_to_line(statement).kind == "line":
        states[states == THERE] = DONE
        block = stepper.block[0]
        there = [bool(stepper.frames(thread)) for thread in range(threads)]
        states[block] = np.where(there, THERE, PASSED_BY)
        moments.append(Moment(f"block {block} at the statement", states.copy()))
    states[states == THERE] = DONE
    return [*moments, Moment("after the launch", states)]


def draw_threads(moments: Sequence[Moment], statement: str) -> Picture:
    """The moments side by side; a row is a warp, a square a lane."""
    with styled():
        figure = new_figure((WIDTH_INCHES, 0.9 + 0.32 * _warps(moments[0])))
        panels = figure.subplots(1, len(moments), sharey=True, squeeze=False)[0]
        for axes, moment in zip(panels, moments, strict=True):
            _draw_moment(axes, moment)
        handles = [
            matplotlib_module("lines").Line2D(
                [], [], color=colour, marker="s", markersize=9, linestyle="", label=meaning
            )
            for colour, meaning in zip(COLOURS, MEANINGS, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
        figure.suptitle(f"Each square is a thread, each row a warp. The statement: {statement}")
    counts = [np.bincount(moment.states.flat, minlength=4).tolist() for moment in moments]
    alt = f"Threads of a launch and the statement {statement}. " + " ".join(
        f"{moment.what.capitalize()}: "
        + ", ".join(f"{n} {m}" for n, m in zip(count, MEANINGS, strict=True) if n)
        + "."
        for moment, count in zip(moments, counts, strict=True)
    )
    return Picture(figure, alt, {moment.what: moment.states.tolist() for moment in moments})


def _warps(moment: Moment) -> int:
    blocks, threads = moment.states.shape
    return blocks * -(-threads // WARP_SIZE)


def _draw_moment(axes: object, moment: Moment) -> None:
    blocks, threads = moment.states.shape
    warps = -(-threads // WARP_SIZE)
    for state, (colour, sign) in enumerate(zip(COLOURS, SIGNS, strict=True)):
        block, thread = np.nonzero(moment.states == state)
        row, lane = block * warps + thread // WARP_SIZE, thread % WARP_SIZE
        axes.add_patch(rectangles(lane + GAP, lane + 1 - GAP, row + GAP, 1 - 2 * GAP, colour))
        if sign:
            axes.scatter(lane + 0.5, row + 0.5, s=4, c="black", marker=sign, linewidths=0.5)
    for block in range(1, blocks):
        axes.axhline(block * warps, color="black", linewidth=1)
    rows = [f"block {block}, warp {warp}" for block in range(blocks) for warp in range(warps)]
    axes.set(xlim=(0, WARP_SIZE), ylim=(len(rows), 0), title=moment.what, xlabel="lane")
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, fontsize=8)
    axes.set_xticks([0.5, 15.5, 31.5], ["0", "15", "31"], fontsize=8)
    axes.tick_params(length=0)
