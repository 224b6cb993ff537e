"""Two grids for the same attention: a block a head, and a block a query tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda

from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS, tiles_for
from fa2_numba.launch import ForwardTensors, GpuMachine
from fa2_numba.lessons.draw import TIMELINE_RUNGS
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    IDLE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.figures.timelines import draw_timeline, in_milliseconds, timeline_numbers
from fa2_numba.lessons.stamps import record_launch
from fa2_numba.lessons.timeline import Timeline, head_costs, schedule, tile_costs
from fa2_numba.testing import random_qkv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRIDS = {"a block a head": head_costs, "a block a query tile": tile_costs}
"""What a grid has a block for -> what its blocks cost."""
LOOKS = ((VERMILION, "-"), (BLUE, "--"), (GREEN, "-."))
"""Colour and dashes of each curve."""


def measured_timelines() -> dict[str, Timeline]:
    """Where and when the blocks of the two rungs ran on an H200, in ms; bench/stamps.py."""
    stamps = recorded("stamps")["timelines"]
    return {rung: in_milliseconds(numbers) for rung, numbers in stamps.items()}


def record_timelines(heads: int, seqlen: int, head_dim: int = 64) -> dict[str, Timeline]:
    """Where and when (in ms) both rungs' blocks run on this machine's GPU; causal, float32."""
    machine = GpuMachine(cuda.get_current_device().id)
    qkv = random_qkv(1, seqlen, seqlen, heads, heads, head_dim, np.float32)
    timelines = {}
    for rung in TIMELINE_RUNGS:
        Q, K, V, O = (cuda.to_device(x) for x in (*qkv, np.full_like(qkv[0], np.nan)))
        LSE = cuda.device_array((1, heads, seqlen), np.float32)
        scale = np.float32(head_dim**-0.5)
        tensors = ForwardTensors(Q, K, V, O, LSE, scale, True, "float32", cuda.device_array)
        config = tiles_for(RUNGS[rung], head_dim, machine.limits)
        (launch,) = RUNGS[rung].plan_forward(tensors, config)
        timelines[rung] = in_milliseconds(timeline_numbers(record_launch(launch, machine)))
    return timelines


def picture_of(timelines: Mapping[str, Timeline], title: str) -> Picture:
    """`draw_timeline` with one time axis for all, and in words."""
    figure = draw_timeline(timelines, title, same_time_axis=True)
    said = " ".join(f"{name}: {_in_words(timeline)}." for name, timeline in timelines.items())
    return Picture(figure, f"{title} {said}", {n: _numbers(t) for n, t in timelines.items()})


def _in_words(timeline: Timeline) -> str:
    busy = timeline.mean_utilisation.multiprocessors
    return (
        f"{timeline.blocks:,} blocks in {timeline.span:,.4g} {timeline.unit}, "
        f"{busy:.0%} of {timeline.multiprocessors} multiprocessors busy on average"
    )


def _numbers(timeline: Timeline) -> dict[str, float]:
    busy, filled = timeline.mean_utilisation
    return {
        "blocks": timeline.blocks,
        "span": timeline.span,
        "multiprocessors busy": float(busy),
        "slots filled": float(filled),
    }


def draw_lengths(
    lengths: Sequence[int], heads: int, config: TileConfig, multiprocessors: int
) -> Picture:
    """The two grids at several lengths, scheduled by the model with one block a multiprocessor."""
    if not lengths:
        raise ValueError("lengths: must be at least one")
    runs = {
        grid: [
            schedule(costs(config, heads, n, n, False), multiprocessors, 1, "key tiles")
            for n in lengths
        ]
        for grid, costs in GRIDS.items()
    }
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.4))
        figure.suptitle(
            f"A model: {heads} heads, {multiprocessors} multiprocessors, a block at a time on each"
            "\nBusy: on average, until the last block has ended"
        )
        panels = figure.subplots(len(runs), len(lengths), sharex="col", sharey=True, squeeze=False)
        for row, (grid, timelines) in zip(panels, runs.items(), strict=True):
            for axes, n, timeline in zip(row, lengths, timelines, strict=True):
                _chart(axes, timeline)
                busy = timeline.mean_utilisation.multiprocessors
                axes.set_title(f"N = {n:,}: {timeline.blocks:,} blocks, {busy:.0%} busy")
            row[0].set_ylabel(f"{grid}\nmultiprocessor")
        for axes, timeline in zip(panels[-1], runs["a block a head"], strict=True):
            axes.set(xlim=(0, timeline.span), xlabel=f"time ({timeline.unit})")
        patch = matplotlib_module("patches").Patch
        meanings = ((BLUE, "a block"), (SKY, "the next one there"), (IDLE, "no block"))
        shades = [patch(facecolor=colour, label=label) for colour, label in meanings]
        figure.legend(handles=shades, loc="outside lower center", ncols=3, fontsize=8)
    said = " ".join(
        f"{grid}, N = {n:,}: {_in_words(timeline)}."
        for grid, timelines in runs.items()
        for n, timeline in zip(lengths, timelines, strict=True)
    )
    numbers = {
        grid: {str(n): _numbers(one) for n, one in zip(lengths, timelines, strict=True)}
        for grid, timelines in runs.items()
    }
    return Picture(figure, f"{heads} heads, two grids. {said}", numbers)


def _chart(axes: Axes, timeline: Timeline) -> None:
    """A row a multiprocessor; blocks there one after the other in two shades."""
    axes.set_facecolor(IDLE)
    number = np.empty(timeline.blocks, np.int64)
    for m in np.unique(timeline.multiprocessor):
        here = np.flatnonzero(timeline.multiprocessor == m)
        number[here[np.argsort(timeline.start[here], kind="stable")]] = np.arange(len(here))
    for shade, colour in enumerate((BLUE, SKY)):
        blocks = number % 2 == shade
        bars = timeline.start[blocks], timeline.end[blocks], timeline.multiprocessor[blocks]
        axes.add_patch(rectangles(*bars, 1, colour))
    axes.set_ylim(0, timeline.multiprocessors)


def busy_over_length(
    grid: str, lengths: Sequence[int], heads: int, config: TileConfig, sizes: tuple[int, int]
) -> list[float]:
    """Share of multiprocessors busy, causal, by the model; sizes: multiprocessors, slots."""
    return [
        float(schedule(GRIDS[grid](config, heads, n, n, True), *sizes).mean_utilisation[0])
        for n in lengths
    ]


def draw_used(
    lengths: Sequence[int], heads: Sequence[int], config: TileConfig, most_blocks: int
) -> Picture:
    """How much of an H200 two grids use over N, beside what was measured; and waves of blocks.

    heads: for how many heads (batch x heads) the curves are; the recorded problem's among them.
    """
    measured, shape = measured_timelines(), recorded("stamps")["shape"]
    first = next(iter(measured.values()))
    sizes = first.multiprocessors, first.slots
    wanted = [("a block a head", max(heads))]
    wanted += [("a block a query tile", count) for count in heads]
    curves = {
        f"{count} head{'s' * (count > 1)}, {grid}": busy_over_length(
            grid, lengths, count, config, sizes
        )
        for grid, count in wanted
    }
    blocks = np.arange(1, most_blocks + 1)
    waves = [schedule(np.ones(n), *sizes).mean_utilisation for n in blocks]
    dots = {rung: float(one.mean_utilisation[0]) for rung, one in measured.items()}
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.2))
        left, right = figure.subplots(1, 2, sharey=True)
        for (label, shares), (colour, dash) in zip(curves.items(), LOOKS, strict=False):
            left.plot(lengths, shares, dash, color=colour, label=label)
        left.plot([shape[2]] * len(dots), list(dots.values()), "*", color=BLACK, markersize=11)
        left.plot([], [], "*", color=BLACK, label=f"measured, {shape[1]} heads")
        left.set(xscale="log", xlabel="N, causal", ylabel="used, on average over the run")
        ticks = [n for n in lengths if n & (n - 1) == 0][::2]
        left.set_xticks(ticks, [f"{n:,}" for n in ticks])
        left.set_xticks([], minor=True)
        left.set_title("multiprocessors with a block")
        right.plot(blocks, [one.multiprocessors for one in waves], color=BLUE)
        right.plot(blocks, [one.slots for one in waves], "--", color=VERMILION)
        right.set(xlabel="blocks, all equally long", title="the last wave")
        labels = (f"of {sizes[0]} multiprocessors", f"of {sizes[0]} x {sizes[1]} slots")
        right.legend(right.get_lines(), labels, fontsize=8, loc="lower right")
        left.legend(fontsize=8, loc="upper left")
        for axes in (left, right):
            axes.set_ylim(0, 1.08)
            axes.grid(True, color=IDLE)
        left.yaxis.set_major_formatter(matplotlib_module("ticker").PercentFormatter(1.0))
    return Picture(figure, _used_alt(curves, lengths, dots), {"model": curves, "measured": dots})


def _used_alt(
    curves: Mapping[str, Sequence[float]], lengths: Sequence[int], dots: Mapping[str, float]
) -> str:
    said = " ".join(
        f"{label}: {shares[0]:.0%} of multiprocessors at N = {lengths[0]:,}, {shares[-1]:.0%} at "
        f"N = {lengths[-1]:,}."
        for label, shares in curves.items()
    )
    found = ", ".join(f"{TIMELINE_RUNGS[rung]} {share:.0%}" for rung, share in dots.items())
    return f"How much of an H200 has work, by the model. {said} Measured: {found}."
