"""Where the bytes of a run went: to which memory, and in global memory to which array."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    IDLE,
    ORANGE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.simulator import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED_ARRAY = re.compile(r"\b(\w+)_gmem\b")
ARRAYS = {"S": VERMILION, "P": ORANGE, "Q": BLUE, "K": SKY, "V": GREEN, "O": BLACK, "LSE": IDLE}
"""The arrays of attention in global memory, as their bars are stacked, with their colours."""
KIB = 1024
LABELLED_KIB = 60
"""Parts of a bar of at least this size have their names in them."""
BAR_WIDTH = 0.38


def bytes_by_array(report: Report) -> dict[str, tuple[int, int]]:
    """Array -> bytes read from HBM and written there, by the one array that each line names."""
    moved: dict[str, tuple[int, int]] = {}
    for line in report.lines:
        read, written = line.traffic.global_load_bytes, line.traffic.global_store_bytes
        if not read and not written:
            continue
        named = set(NAMED_ARRAY.findall(line.text))
        if len(named) != 1:
            raise ValueError(f"line {line.text!r}: must name one array ..._gmem")
        (name,) = named
        before = moved.get(name, (0, 0))
        moved[name] = before[0] + read, before[1] + written
    return moved


def draw_levels(runs: Mapping[str, Mapping[int, Report]]) -> Picture:
    """Bytes of HBM, by array, and of shared memory.

    runs: two rungs -> sequence length, the same ones -> report.
    """
    if len(runs) != 2 or len({tuple(reports) for reports in runs.values()}) != 1:
        raise ValueError("runs: must be two rungs with the same lengths")
    hbm = {rung: {n: _hbm(report) for n, report in runs[rung].items()} for rung in runs}
    shared = {rung: {n: _shared(report) for n, report in runs[rung].items()} for rung in runs}
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.2))
        left, right = figure.subplots(1, 2)
        for place, rung in zip((-0.5, 0.5), runs, strict=True):
            _stack(left, place * (BAR_WIDTH + 0.06), hbm[rung])
            sums = {n: {"tiles": size} for n, size in shared[rung].items()}
            _stack(right, place * (BAR_WIDTH + 0.06), sums)
        lengths = list(next(iter(runs.values())))
        for axes, sizes in ((left, _totals(hbm)), (right, shared)):
            _label(axes, lengths, sizes)
        left.set(title="HBM (global memory): far and large", ylabel="KiB read and written")
        right.set(title="shared memory: near and small")
        used = [
            name for name in ARRAYS if any(name in one for r in hbm.values() for one in r.values())
        ]
        patch = matplotlib_module("patches").Patch
        handles = [patch(facecolor=ARRAYS[name], label=name) for name in used if name != "LSE"]
        left.legend(handles=handles[::-1], loc="upper left", fontsize=9)
        first, second = runs
        figure.suptitle(f"Each pair of bars: left {first}, right {second}")
    numbers = {"hbm": hbm, "shared": shared}
    return Picture(figure, _levels_alt(_totals(hbm), shared), _with_text_keys(numbers))


def _hbm(report: Report) -> dict[str, int]:
    moved = bytes_by_array(report)
    return {name: sum(moved[name]) for name in ARRAYS if name in moved}


def _shared(report: Report) -> int:
    return report.shared_load_bytes + report.shared_store_bytes


def _totals(hbm: Mapping[str, Mapping[int, Mapping[str, int]]]) -> dict[str, dict[int, int]]:
    return {rung: {n: sum(one.values()) for n, one in runs.items()} for rung, runs in hbm.items()}


def _stack(axes: Axes, shift: float, bars: Mapping[int, Mapping[str, int]]) -> None:
    for place, parts in enumerate(bars.values()):
        bottom = 0.0
        for name, size in parts.items():
            axes.bar(
                place + shift,
                size / KIB,
                BAR_WIDTH,
                bottom,
                color=ARRAYS.get(name, "#999999"),
                edgecolor="white",
                linewidth=0,
            )
            if name in ARRAYS and size / KIB >= LABELLED_KIB:
                middle = bottom + size / KIB / 2
                axes.text(place + shift, middle, name, ha="center", va="center", fontsize=9)
            bottom += size / KIB


def _label(axes: Axes, lengths: Sequence[int], sizes: Mapping[str, Mapping[int, int]]) -> None:
    axes.set_xticks(range(len(lengths)), [f"N = {n}" for n in lengths])
    for shift, runs in zip((-0.22, 0.22), sizes.values(), strict=True):
        for place, size in enumerate(runs.values()):
            axes.annotate(
                f"{size / KIB:,.0f}",
                (place + shift, size / KIB),
                (0, 2),
                fontsize=9,
                textcoords="offset points",
                ha="center",
            )
    axes.margins(y=0.1)


def _levels_alt(
    hbm: Mapping[str, Mapping[int, int]], shared: Mapping[str, Mapping[int, int]]
) -> str:
    said = [
        f"{rung} at N = {n}: {hbm[rung][n] / KIB:,.0f} KiB of HBM, "
        f"{shared[rung][n] / KIB:,.0f} KiB of shared memory."
        for rung in hbm
        for n in hbm[rung]
    ]
    return "Bars of bytes read and written by memory and array. " + " ".join(said)


def _with_text_keys(value: object) -> object:
    """The same with texts as keys, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(part) for key, part in value.items()}
    return value
