"""When each thread block of a grid runs, and where: a model of the GPU's block scheduler.

FlashAttention-1 launches one block a head, so batch x heads blocks; with fewer heads than
multiprocessors the rest of the GPU idles. FlashAttention-2's grid also runs over the query tiles of
a head (FA2 section 3.2), which gives seqlen / BLOCK_M times as many blocks, each so much shorter.

The model hands out blocks in launch order, each to the first multiprocessor with a free slot, the
emptiest one if there are several. NVIDIA does not document the order; `stamps.py` records the real
one. The model's simplification: blocks on one multiprocessor do not slow each other. In truth they
share its arithmetic units, so where several are resident the span is a lower bound, and spans of
different grids must not be divided; how many multiprocessors have work is what the model shows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.device.tiles import make_count_n_blocks
from fa2_numba.simulator import Report


class Utilisation(NamedTuple):
    """Fractions from 0 to 1, at one time or at several.

    multiprocessors: with at least one block; slots: with a block.
    """

    multiprocessors: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Which block ran when and where, one element a block in launch order.

    start, end: in `unit`s of time; a block is there from `start` until just before `end`.
    multiprocessor: its number, from 0. multiprocessors: how many there are. slots: blocks that one
    multiprocessor has room for (`occupancy.py`).
    """

    start: np.ndarray
    end: np.ndarray
    multiprocessor: np.ndarray
    multiprocessors: int
    slots: int
    unit: str

    def __post_init__(self) -> None:
        _require_count("multiprocessors", self.multiprocessors)
        _require_count("slots", self.slots)
        shapes = {name: getattr(self, name).shape for name in ("start", "end", "multiprocessor")}
        if len(set(shapes.values())) != 1 or len(self.start.shape) != 1 or not self.start.size:
            raise ValueError(f"shapes {shapes}: must be one dimension, of one length, not empty")
        if not (self.end >= self.start).all():
            block = int(np.argmin(self.end >= self.start))
            times = f"start={self.start[block]}, end={self.end[block]}"
            raise ValueError(f"block {block}: {times}: a block must not end before it starts")
        numbers = int(self.multiprocessor.min()), int(self.multiprocessor.max())
        if numbers[0] < 0 or numbers[1] >= self.multiprocessors:
            rule = f"0 to {self.multiprocessors - 1}"
            raise ValueError(f"multiprocessor from {numbers[0]} to {numbers[1]}: must be {rule}")

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return len(self.start)

    @property
    def span(self) -> float:
        """From the start of the first block to the end of the last."""
        return float(self.end.max() - self.start.min())

    def utilisation(self, times: Sequence[float] | np.ndarray) -> Utilisation:
        """How much of the GPU has work at each of `times`."""
        times = np.asarray(times)
        busy = _count_at(times, *self._busy_intervals())
        resident = _count_at(times, self.start, self.end)
        slots = self.multiprocessors * self.slots
        return Utilisation(busy / self.multiprocessors, resident / slots)

    @property
    def mean_utilisation(self) -> Utilisation:
        """How much of the GPU has work on average over the span; NaN if the span is 0."""
        start, end = self._busy_intervals()
        whole = self.multiprocessors * self.span
        with np.errstate(invalid="ignore"):
            busy = np.divide((end - start).sum(), whole)
            filled = np.divide((self.end - self.start).sum(), whole * self.slots)
        return Utilisation(busy, filled)

    def _busy_intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of the times in which a multiprocessor has a block, of all of them."""
        intervals: list[list] = []
        for m in np.unique(self.multiprocessor):
            there = self.multiprocessor == m
            order = np.argsort(self.start[there], kind="stable")
            first = len(intervals)
            pairs = zip(self.start[there][order], self.end[there][order], strict=True)
            for start, end in pairs:
                if len(intervals) > first and start <= intervals[-1][1]:
                    intervals[-1][1] = max(intervals[-1][1], end)
                else:
                    intervals.append([start, end])
        start, end = np.array(intervals).T
        return start, end


def schedule(
    costs: Sequence[float] | np.ndarray, multiprocessors: int, slots: int, unit: str = "cost"
) -> Timeline:
    """Run blocks of these costs, in launch order, on an empty GPU.

    costs: how long each block runs, in `unit`s; finite, not negative. slots: blocks that one
    multiprocessor has room for. Raises ValueError that names the value and the rule.

    >>> timeline = schedule([4, 1, 1, 2], multiprocessors=2, slots=1)
    >>> timeline.start.tolist(), timeline.multiprocessor.tolist(), timeline.span
    ([0.0, 0.0, 1.0, 2.0], [0, 1, 1, 1], 4.0)
    """
    costs = np.asarray(costs, np.float64)
    _require_costs(costs)
    _require_count("multiprocessors", multiprocessors)
    _require_count("slots", slots)
    start = np.empty(len(costs))
    multiprocessor = np.empty(len(costs), np.int64)
    resident = np.zeros(multiprocessors, np.int64)
    running: list[tuple[float, int]] = []  # a heap of (end, multiprocessor)
    now = 0.0
    for block, cost in enumerate(costs):
        while running and (running[0][0] <= now or len(running) == multiprocessors * slots):
            now, freed = heapq.heappop(running)
            resident[freed] -= 1
        m = int(resident.argmin())
        resident[m] += 1
        heapq.heappush(running, (now + cost, m))
        start[block], multiprocessor[block] = now, m
    return Timeline(start, start + costs, multiprocessor, multiprocessors, slots, unit)


def tile_costs(
    config: TileConfig, heads: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> np.ndarray:
    """Key tiles that each block of FlashAttention-2's grid visits, in launch order.

    heads: batch x heads. The grid is (heads, query tiles), so the blocks of one query tile of all
    heads come together. Counted by the device function that the kernels use.

    >>> tile_costs(TileConfig(64, 64, 64), heads=2, seqlen_q=192, seqlen_k=192, causal=True)
    array([1, 1, 2, 2, 3, 3])
    """
    for name, value in (("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        _require_count(name, value)
    count_n_blocks = make_count_n_blocks(config, causal).py_func
    first_rows = range(0, seqlen_q, config.block_m)
    visited = [count_n_blocks(first_row, seqlen_q, seqlen_k) for first_row in first_rows]
    return np.repeat(visited, heads)


def measured_costs(report: Report) -> np.ndarray:
    """float32 operations of each block of a counted launch, in launch order."""
    return np.array(
        [block.counts.matmul_flops + block.counts.other_flops for block in report.blocks]
    )


def head_costs(
    config: TileConfig, heads: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> np.ndarray:
    """The same work in FlashAttention-1's grid: one block a head visits the tiles of all its rows.

    It is the grid alone that differs: that `fa1_sliced_k` also computes the tiles which a causal
    mask hides is not counted.

    >>> head_costs(TileConfig(64, 64, 64), heads=2, seqlen_q=192, seqlen_k=192, causal=True)
    array([6, 6])
    """
    costs = tile_costs(config, heads, seqlen_q, seqlen_k, causal)
    return costs.reshape(-1, heads).sum(axis=0)


def _count_at(times: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many of the half-open intervals [start, end) each time lies in."""
    begun = np.searchsorted(np.sort(start), times, side="right")
    return begun - np.searchsorted(np.sort(end), times, side="right")


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive integer")


def _require_costs(costs: np.ndarray) -> None:
    if costs.ndim != 1 or not costs.size:
        raise ValueError(f"costs of shape {costs.shape}: must be one dimension, not empty")
    wrong = ~np.isfinite(costs) | (costs < 0)
    if wrong.any():
        block = int(np.argmax(wrong))
        raise ValueError(f"costs[{block}]={costs[block]}: must be finite and not negative")
