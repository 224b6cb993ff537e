"""Lesson 13's figure: who of a block loads, multiplies and computes softmax, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLUE,
    GREEN,
    IDLE,
    ORANGE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    YELLOW,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.roles import PRODUCER, Roles, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRODUCTS = {1: BLUE, 2: VERMILION}
SOFTMAXES = {1: SKY, 2: ORANGE}
LANES = ("copies", "tensor cores", "consumer 1", "consumer 2")


def draw_roles(runs: Mapping[str, Roles], until: float | None = None) -> Picture:
    """A chart for each run, on one time axis: a lane for copies, tensor cores, each consumer.

    until: where the axis ends; default: with the longest run.
    """
    if not runs:
        raise ValueError("runs: must be at least one")
    end = until or max(run.span for run in runs.values())
    with styled():
        figure = new_figure((WIDTH_INCHES, 0.5 + 1.25 * len(runs)))
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (title, run) in zip(panels, runs.items(), strict=True):
            _draw_run(axes, run)
            axes.set_title(
                f"{title}: {run.span:g} units, tensor cores busy {run.busy:.0%}, "
                f"{run.hidden():.0%} of softmax beside products"
            )
        panels[-1].set(xlim=(0, end), xlabel="time, in the model's units")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=5, fontsize=8)
    numbers = {
        title: {
            "span": run.span,
            "busy": run.busy,
            "hidden": run.hidden(),
            "steps": [[s.lane, s.group, s.what, s.start, s.end] for s in run.steps],
        }
        for title, run in runs.items()
    }
    said = "; ".join(
        f"{title}: {run.span:g} units, tensor cores busy {run.busy:.0%}, {run.hidden():.0%} of "
        "softmax beside products"
        for title, run in runs.items()
    )
    return Picture(figure, f"Steps of a block in a model of time. {said}.", numbers)


def _draw_run(axes: Axes, run: Roles) -> None:
    lanes = [lane for lane in LANES if any(step.lane == lane for step in run.steps)]
    for step in run.steps:
        place = lanes.index(step.lane)
        width = step.end - step.start
        bar = {"height": 0.8, "left": step.start, "color": _colour(step)}
        axes.barh(place, width, edgecolor="white", linewidth=0.5, **bar)
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, ylim=(len(lanes) - 0.5, -0.5))
    axes.set_facecolor(IDLE)


def _colour(step: Step) -> str:
    if step.group == PRODUCER:
        return GREEN
    if step.lane == "tensor cores":
        return PRODUCTS[step.group]
    return SOFTMAXES[step.group] if step.what == "softmax" else YELLOW


def _legend() -> list:
    patch = matplotlib_module("patches").Patch
    meanings = (
        (GREEN, "copy starts"),
        *((colour, f"product of consumer {n}") for n, colour in PRODUCTS.items()),
        *((colour, f"softmax of consumer {n}") for n, colour in SOFTMAXES.items()),
        (YELLOW, "rescale and round"),
        (IDLE, "nothing"),
    )
    return [patch(facecolor=colour, label=label) for colour, label in meanings]
