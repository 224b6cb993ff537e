"""Who touches which shared element between which barriers, in the order of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.lessons.figures.accesses import Access
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    ORANGE,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK_POINTS = 11
RACE_WIDTH = 2.5


def racing_pairs(accesses: Sequence[Access]) -> list[tuple[int, int]]:
    """Positions of two accesses that no barrier of their block orders, one at least a store.

    They are by different threads of a block, to one element of shared memory, in one interval
    between barriers. Whichever came first in this run, the other could have.
    """
    places: dict[tuple, list[int]] = {}
    for position, one in enumerate(accesses):
        if one.space == "shared":
            key = one.block, one.interval, one.array, one.element
            places.setdefault(key, []).append(position)
    return sorted(
        (first, second)
        for here in places.values()
        for first, second in combinations(here, 2)
        if accesses[first].thread != accesses[second].thread
        and (accesses[first].stored or accesses[second].stored)
    )


def too_early(accesses: Sequence[Access]) -> list[int]:
    """Positions of the loads of shared elements that nothing had written when they ran."""
    written, early = set(), []
    for position, one in enumerate(accesses):
        element = one.block, one.array, one.element
        if one.stored:
            written.add(element)
        elif one.space == "shared" and element not in written:
            early.append(position)
    return early


def draw_race_timelines(runs: Mapping[str, Sequence[Access]]) -> Picture:
    """Runs side by side: to the right the order in which accesses ran, downward the elements.

    runs: title -> the accesses of one block to one shared array, others left out.
    """
    if not runs:
        raise ValueError("runs: must be at least one")
    shared = {name: [one for one in run if one.space == "shared"] for name, run in runs.items()}
    for name, run in shared.items():
        if len({(one.block, one.array) for one in run}) != 1:
            raise ValueError(f"run {name!r}: must be of one block with one shared array")
    rows = 1 + max(one.element for run in shared.values() for one in run)
    with styled():
        figure = new_figure((WIDTH_INCHES, 1.55 + 0.24 * rows))
        panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for axes, (name, run) in zip(panels, shared.items(), strict=True):
            _draw_run(axes, run)
            axes.set(title=name, xlabel="order in which they ran", ylim=(rows - 0.4, -0.6))
        panels[0].set_ylabel(f"element of {run[0].array}")
        panels[0].set_yticks(range(rows))
        figure.legend(handles=_handles(), loc="outside lower center", ncols=5, fontsize=9)
        figure.suptitle("Accesses to shared memory; the number in a mark is the thread's")
    numbers = {name: _numbers(run) for name, run in shared.items()}
    alt = "Accesses to shared memory in the order in which they ran. " + " ".join(
        f"{name.capitalize()}: writes {one['writes']}, reads {one['reads']}, barriers between "
        f"them {one['barriers']}, pairs that race {len(one['races'])}, reads of what nothing has "
        f"written {len(one['too_early'])}."
        for name, one in numbers.items()
    )
    return Picture(figure, alt, numbers)


def _numbers(run: Sequence[Access]) -> dict[str, object]:
    writes = sum(one.stored for one in run)
    return {
        "writes": writes,
        "reads": len(run) - writes,
        "barriers": max(one.interval for one in run) - min(one.interval for one in run),
        "races": racing_pairs(run),
        "too_early": too_early(run),
    }


def _draw_run(axes: Axes, run: Sequence[Access]) -> None:
    element = np.array([one.element for one in run])
    for pair in racing_pairs(run):
        axes.plot(pair, element[list(pair)], color=VERMILION, linewidth=RACE_WIDTH, zorder=1)
    for position in np.flatnonzero(np.diff([one.interval for one in run])):
        axes.axvline(position + 0.5, color=BLACK, linewidth=1.5, linestyle="--", zorder=0)
    early = set(too_early(run))
    for position, one in enumerate(run):
        look = _look(one.stored, position in early)
        axes.plot(position, one.element, markersize=MARK_POINTS, linestyle="", zorder=2, **look)
        colour = "white" if one.stored else BLACK
        place = position, one.element + 0.03
        axes.text(*place, str(one.thread), color=colour, fontsize=8, ha="center", va="center")
    axes.set(xlim=(-1, len(run)), xticks=[])
    axes.tick_params(length=0)


def _look(stored: bool, early: bool) -> dict[str, object]:
    face = BLUE if stored else "white" if early else ORANGE
    edge = BLUE if stored else VERMILION if early else ORANGE
    return {
        "marker": "s" if stored else "o",
        "markerfacecolor": face,
        "markeredgecolor": edge,
        "markeredgewidth": 1.5,
    }


def _handles() -> list[object]:
    line = matplotlib_module("lines").Line2D
    kinds = (("writes", True, False), ("reads", False, False))
    marks = [(*kind, _look(*kind[1:])) for kind in (*kinds, ("reads too early", False, True))]
    return [
        *(
            line([], [], linestyle="", markersize=MARK_POINTS - 2, label=name, **look)
            for name, _, _, look in marks
        ),
        line([], [], color=VERMILION, linewidth=RACE_WIDTH, label="no barrier between: a race"),
        line([], [], color=BLACK, linewidth=1.5, linestyle="--", label="barrier"),
    ]
