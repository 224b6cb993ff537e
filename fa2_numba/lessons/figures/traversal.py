"""In which order a run visits pairs of tiles, and what each visit moves from and to HBM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS
from fa2_numba.launch import ForwardTensors
from fa2_numba.lessons.figures.accesses import Access, record
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
    new_figure,
    styled,
)
from fa2_numba.problem import Problem
from fa2_numba.simulator import simulate
from fa2_numba.testing import assert_attention, poisoned, random_qkv
from fa2_numba.traffic import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TILES = TileConfig(head_dim=16, block_m=8, block_n=8, num_warps=2)
"""Small, so that a short run visits many."""
LADDER_TILES = TileConfig(head_dim=64, block_m=64, block_n=64)
PARTS = ("Q", "K, V", "O, m, l")
PART_OF = {"Q": PARTS[0], "K": PARTS[1], "V": PARTS[1]}
"""Argument -> part; all others belong to the last one."""
COLOURS = {PARTS[0]: BLUE, PARTS[1]: SKY, PARTS[2]: ORANGE}
WRITTEN = VERMILION
PATH = "#BBBBBB"
LOOKS = ((VERMILION, "o", "-"), (BLUE, "s", "--"), (GREEN, "D", "-."))
"""Colour, marker and dashes of each rung's curves."""
MIB = 2**20


@dataclass
class Visit:
    """What a block did with a pair of tiles, up to the next one: bytes of HBM by part of PARTS."""

    query_tile: int
    key_tile: int
    read: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    written: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))


def follow_visits(rung: str, seqlen_q: int, seqlen_k: int) -> list[Visit]:
    """Run a rung with one block a head on one head, in tiles of 8 x 8, and judge its answer."""
    head_dim = TILES.head_dim
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 1, head_dim, np.float32)
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, seqlen_q), np.float32)
    tensors = ForwardTensors(
        *(q, k, v, out, lse),
        *(np.float32(head_dim**-0.5), False, "float32"),
        allocate=lambda shape: poisoned(shape, np.float32),
    )
    launches = RUNGS[rung].plan_forward(tensors, TILES)
    if len(launches) != 1 or prod(launches[0].grid) != 1:
        raise ValueError(f"rung={rung!r}: must compute a head in one block")
    (launch,) = launches
    simulation = simulate(launch.kernel, progress=False)
    configured = simulation[launch.grid, launch.threads, 0, launch.shared_bytes]
    accesses = record(configured, *launch.arguments)
    assert_attention(out, lse, q, k, v)
    return _visits([one for one in accesses if one.space == "global"])


def _visits(accesses: Sequence[Access]) -> list[Visit]:
    """A visit begins in an interval between barriers that loads a tile of Q, K or V."""
    visits: list[Visit] = []
    tile = {"Q": 0, "K": 0}
    # In an interval all threads are in the same visit, whatever their order.
    by_interval = sorted(accesses, key=lambda one: one.interval)
    for _, here in groupby(by_interval, key=lambda one: one.interval):
        here = list(here)
        loaded = {_name(one): one.element // TILES.head_dim for one in here if not one.stored}
        tile |= {name: row // TILES.block_m for name, row in loaded.items() if name in tile}
        if loaded.keys() & PART_OF.keys():
            visits.append(Visit(tile["Q"], tile["K"]))
        for one in here:
            moved = visits[-1].written if one.stored else visits[-1].read
            moved[PART_OF.get(_name(one), PARTS[2])] += one.size
    return visits


def _name(one: Access) -> str:
    return one.array.removesuffix("_gmem")


def draw_traversals(runs: Mapping[str, Sequence[Visit]]) -> Picture:
    """Rungs side by side: the order of the visits, and below what each of them moves."""
    if not runs:
        raise ValueError("runs: must be at least one")
    with styled():
        figure = new_figure((WIDTH_INCHES, 6.4))
        grid = figure.add_gridspec(2, len(runs), height_ratios=(1.25, 1))
        first = None
        for column, (rung, visits) in enumerate(runs.items()):
            _draw_order(figure.add_subplot(grid[0, column]), rung, visits)
            bars = figure.add_subplot(grid[1, column], sharey=first)
            first = first or bars
            _draw_bytes(bars, visits)
        first.set_ylabel("bytes of HBM\nwritten         read")
        handles, labels = first.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
        figure.suptitle("Pairs of tiles, numbered as they are visited; red: O, m or l is written")
    numbers = {rung: _numbers(visits) for rung, visits in runs.items()}
    alt = "Order in which pairs of tiles are visited, and bytes of HBM of each visit. " + " ".join(
        f"{rung}: {_said(visits)}" for rung, visits in runs.items()
    )
    return Picture(figure, alt, numbers)


def _numbers(visits: Sequence[Visit]) -> dict[str, object]:
    return {
        "order": [(one.query_tile, one.key_tile) for one in visits],
        "read": {part: [one.read[part] for one in visits] for part in PARTS},
        "written": [sum(one.written.values()) for one in visits],
    }


def _said(visits: Sequence[Visit]) -> str:
    pairs = ", ".join(f"({one.query_tile}, {one.key_tile})" for one in visits[:3])
    state = PARTS[2]
    reads = sum(one.read[state] > 0 for one in visits)
    writes = sum(one.written[state] > 0 for one in visits)
    moved = sum(one.read[state] + one.written[state] for one in visits)
    return (
        f"of {len(visits)} visits (query tile, key tile) the first are {pairs}; O, m and l are "
        f"read in {reads} visits and written in {writes}, {moved} bytes in all."
    )


def _draw_order(axes: Axes, rung: str, visits: Sequence[Visit]) -> None:
    row = np.array([one.query_tile for one in visits])
    col = np.array([one.key_tile for one in visits])
    axes.plot(col, row, color=PATH, linewidth=4, zorder=0)
    for number, (one, x, y) in enumerate(zip(visits, col, row, strict=True), 1):
        writes = any(one.written.values())
        edge, width = (WRITTEN, 2.4) if writes else (BLACK, 0.8)
        square = {"marker": "s", "markersize": 19, "markeredgewidth": width}
        axes.plot(x, y, markerfacecolor="white", markeredgecolor=edge, **square)
        axes.text(x, y + 0.02, str(number), ha="center", va="center")
    axes.set(
        title=rung,
        xlabel="tile of keys and values",
        ylabel="tile of queries",
        xlim=(-0.6, col.max() + 0.6),
        ylim=(row.max() + 0.6, -0.6),
        xticks=range(col.max() + 1),
        yticks=range(row.max() + 1),
    )
    axes.tick_params(length=0)


def _draw_bytes(axes: Axes, visits: Sequence[Visit]) -> None:
    number = np.arange(1, len(visits) + 1)
    below = np.zeros(len(visits))
    for part in PARTS:
        size = np.array([one.read[part] for one in visits])
        axes.bar(number, size, 0.8, below, color=COLOURS[part], label=f"read: {part}")
        below += size
    written = np.array([sum(one.written.values()) for one in visits])
    axes.bar(number, -written, 0.8, color=WRITTEN, label="written: O, m, l")
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set(xlabel="visit", xticks=number[::3])
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")


def workspace_bytes(rung: str, seqlen: int) -> int:
    """Bytes of HBM that a rung asks for besides its operands: one head of LADDER_TILES' head dim.

    No kernel is run: launches are planned for arrays that are never written.
    """
    asked: list[int] = []

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        asked.append(4 * prod(shape))
        return np.empty(0, np.float32)

    one = np.broadcast_to(np.float32(0), (1, seqlen, 1, LADDER_TILES.head_dim))
    lse = np.broadcast_to(np.float32(0), (1, 1, seqlen))
    scale = np.float32(LADDER_TILES.head_dim**-0.5)
    tensors = ForwardTensors(one, one, one, one, lse, scale, False, "float32", allocate)
    RUNGS[rung].plan_forward(tensors, LADDER_TILES)
    return sum(asked)


def moved_bytes(rung: str, seqlen: int, tiles: TileConfig = LADDER_TILES) -> int:
    """Bytes read from and written to HBM for one head, in closed form (`traffic`)."""
    counts = predict(rung, Problem(1, 1, 1, seqlen, seqlen, tiles.head_dim), tiles)
    return counts.global_load_bytes + counts.global_store_bytes


def draw_growth(rungs: Sequence[str], lengths: Sequence[int]) -> Picture:
    """How HBM that is asked for, and bytes moved, grow with the length of a head."""
    if not rungs or not lengths:
        raise ValueError("rungs and lengths: must be at least one each")
    if len(rungs) > len(LOOKS):
        raise ValueError(f"rungs: must be at most {len(LOOKS)}")
    looks = dict(zip(rungs, LOOKS, strict=False))
    asked = {rung: [workspace_bytes(rung, n) for n in lengths] for rung in rungs}
    moved = {rung: [moved_bytes(rung, n) for n in lengths] for rung in rungs}
    operands = [4 * 4 * n * LADDER_TILES.head_dim for n in lengths]
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.3))
        left, right = figure.subplots(1, 2)
        left.plot(lengths, np.array(operands) / MIB, ":", color=BLACK, label="Q, K, V, O")
        for rung, (colour, marker, dash) in looks.items():
            style = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
            if any(asked[rung]):
                left.plot(lengths, np.array(asked[rung]) / MIB, label=rung, **style)
            else:
                left.plot([], [], label=f"{rung}: none", linestyle="")
            right.plot(lengths, np.array(moved[rung]) / MIB, label=rung, **style)
        left.set(title="HBM asked for besides Q, K, V and O", ylabel="MiB")
        right.set(title="HBM bytes moved", ylabel="MiB")
        for axes in (left, right):
            axes.set(xscale="log", yscale="log", xlabel="N, queries and keys of one head")
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
            axes.set_xticks([], minor=True)
            axes.grid(True, color=IDLE)
            axes.legend(fontsize=9)
    numbers = {"asked": asked, "moved": moved, "operands": operands}
    alt = (
        f"Growth from N = {lengths[0]:,} to {lengths[-1]:,}, one head of head dim 64. "
        + " ".join(
            f"{rung}: asks for {asked[rung][0]:,} to {asked[rung][-1]:,} bytes, moves "
            f"{moved[rung][0]:,} to {moved[rung][-1]:,}."
            for rung in rungs
        )
    )
    return Picture(figure, alt, numbers)
