"""A row of attention as a kernel computes it: its m, l and O after every key tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.data import load_smollm2
from fa2_numba.kernels import fa2_split_q
from fa2_numba.launch import ForwardTensors
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLUE,
    CURVE_COLOURS,
    CURVE_MARKERS,
    IDLE,
    ORANGE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    new_figure,
    styled,
)
from fa2_numba.simulator import simulate
from fa2_numba.simulator.stepper import Row, Stepper
from fa2_numba.testing import assert_attention, poisoned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK_N = 8
TILE_BEGINS, SCORES_ARE_THERE, FACTOR_IS_THERE, TILES_ARE_DONE = (
    "load_kv_tile(K_smem",
    "m = max(m_reg[i], row_max(S_reg, i))",
    "m_reg[i] = m",
    "scale = share(",
)
"""Statements of `fa2_split_q`: before FA2 Alg. 1 line 7, before line 9, in it, before line 12."""
SHOWN_COLUMNS = 3
BAR_GAP = 0.4


@dataclass(frozen=True)
class RowRun:
    """One query's row of a run over T key tiles.

    tokens: the N keys' words, the query's own last. S (N): scores. V (N, d). m, l (T + 1) and O
    (T + 1, d): before the first tile and after each, O not divided by l. factors (T): by what the
    kernel multiplied l and O in each tile, exp(m_old - m_new); 0 in the first, where they are 0.
    out (d), lse: what the kernel wrote.
    """

    tokens: tuple[str, ...]
    S: np.ndarray
    V: np.ndarray
    m: np.ndarray
    l: np.ndarray
    O: np.ndarray
    factors: np.ndarray
    out: np.ndarray
    lse: float

    @property
    def kept(self) -> np.ndarray:
        """What each tile leaves of the l before it (T)."""
        return self.factors * self.l[:-1]

    @property
    def added(self) -> np.ndarray:
        """What each tile adds to l (T)."""
        return self.l[1:] - self.kept


def follow_row(layer: int, head: int, token: int) -> RowRun:
    """Step `fa2_split_q` through one query of SmolLM2, keys in tiles of 8, and read its registers.

    The query is the last of its words, so a causal mask lets it see all of them.
    """
    data = load_smollm2(layer)
    group = data.q.shape[2] // data.k.shape[2]
    q = data.q[:, token : token + 1, head : head + 1]
    k, v = (x[:, : token + 1, head // group : head // group + 1] for x in (data.k, data.v))
    q, k, v = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, 1), np.float32)
    scale = np.float32(q.shape[-1] ** -0.5)
    # No workspace is asked for.
    tensors = ForwardTensors(q, k, v, out, lse, scale, True, "float32", np.empty)
    config = TileConfig(q.shape[-1], block_m=8, block_n=BLOCK_N, num_warps=1)
    (launch,) = fa2_split_q.plan_forward(tensors, config)
    simulation = simulate(launch.kernel, checks=False, counts=False, progress=False)
    configured = simulation[launch.grid, launch.threads, 0, launch.shared_bytes]
    with Stepper(configured, *launch.arguments) as stepper:
        S, factors, rows = _step(stepper, k.shape[1])
        stepper.finish()
    assert_attention(out, lse, q, k, v, causal=True)
    m, l, O = (np.array([getattr(row, name) for row in rows]) for name in "mlO")
    words = data.tokens[: token + 1]
    return RowRun(words, S, v[0, :, 0], m, l, O, factors, out[0, 0, 0], float(lse[0, 0, 0]))


def _step(stepper: Stepper, seqlen_k: int) -> tuple[np.ndarray, np.ndarray, list[Row]]:
    """The row's scores, its factor in each tile, and `Stepper.row` before and after each."""
    S, factors, rows = [], [], []
    for _ in range(0, seqlen_k, BLOCK_N):
        stepper.all_to_line(TILE_BEGINS)
        rows.append(stepper.row(0))
        stepper.all_to_line(SCORES_ARE_THERE)
        S.append(_scores(stepper, rows[-1].threads))
        # Row 0 is the first of its threads' rows, so the first time there is the row's own.
        stepper.all_to_line(FACTOR_IS_THERE)
        factors.append(stepper.locals(rows[-1].threads[0])["rescale"])
    stepper.all_to_line(TILES_ARE_DONE)
    rows.append(stepper.row(0))
    return np.concatenate(S)[:seqlen_k], np.array(factors), rows


def _scores(stepper: Stepper, threads: Sequence[int]) -> np.ndarray:
    """One tile's scores of row 0, from the lanes that share it: a lane has every so manyth key."""
    lanes = [stepper.locals(thread) for thread in threads]
    lanes.sort(key=lambda variables: variables["col"])
    return np.stack([variables["S_reg"][0].data for variables in lanes], axis=1).reshape(-1)


def draw_row(run: RowRun) -> Picture:
    """Scores and m, what each tile makes of l, and some columns of O / l, over the key tiles."""
    columns = np.argsort(-np.abs(run.out))[:SHOWN_COLUMNS]
    starts = BLOCK_N * np.arange(len(run.factors))
    ends = np.minimum(starts + BLOCK_N, len(run.S))
    words = [word.strip() for word in run.tokens]
    with styled():
        figure = new_figure((WIDTH_INCHES, 7.2))
        scores, sums, outputs = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2.4, 2))
        _draw_scores(scores, run, starts, ends)
        _draw_sums(sums, run, starts, ends)
        _draw_outputs(outputs, run, ends, columns)
        for axes in (scores, sums, outputs):
            axes.tick_params(axis="x", length=0)
            for end in ends[:-1]:
                axes.axvline(end, color=IDLE, zorder=0)
        outputs.set_xlim(0, len(run.S))
        outputs.set_xticks(np.arange(len(run.S)) + 0.5, words, rotation=90, fontsize=8)
        figure.suptitle(f'The row of "{words[-1]}": what fa2_split_q has after each tile of 8 keys')
    return Picture(figure, _said(run, columns), _numbers(run, columns))


def _draw_scores(axes: Axes, run: RowRun, starts: np.ndarray, ends: np.ndarray) -> None:
    axes.plot(
        np.arange(len(run.S)) + 0.5, run.S, "o", color=BLUE, markersize=4, label="score of a key, S"
    )
    axes.step([0, *ends], [run.m[1], *run.m[1:]], color=VERMILION, label="maximum so far, m")
    for start, factor, m in zip(starts[1:], run.factors[1:], run.m[2:], strict=True):
        if factor < 1:
            axes.annotate(
                f"x {factor:.2f}", (start, m), (2, 3), textcoords="offset points", fontsize=9
            )
    axes.set_ylabel("score")
    axes.margins(y=0.15)
    axes.legend(loc="upper left", fontsize=8)


def _draw_sums(axes: Axes, run: RowRun, starts: np.ndarray, ends: np.ndarray) -> None:
    """Of each tile a bar: what is left of l, what is added, and an outline of the l before it."""
    left, width = starts + BAR_GAP, ends - starts - 2 * BAR_GAP
    axes.bar(left, run.kept, width, align="edge", color=SKY, label="l before the tile, rescaled")
    axes.bar(
        left,
        run.added,
        width,
        run.kept,
        align="edge",
        color=ORANGE,
        label="added: exp(S - m) of the tile",
    )
    axes.bar(
        left,
        run.l[:-1],
        width,
        align="edge",
        fill=False,
        linestyle="--",
        linewidth=1.2,
        label="l before the tile, as it was",
    )
    axes.set_ylabel("sum so far, l")
    axes.margins(y=0.12)
    axes.legend(loc="upper left", fontsize=8)


def _draw_outputs(axes: Axes, run: RowRun, ends: np.ndarray, columns: np.ndarray) -> None:
    for column, colour, marker in zip(columns, CURVE_COLOURS, CURVE_MARKERS, strict=False):
        values = run.O[1:, column] / run.l[1:]
        # The last marker lies on the edge.
        axes.plot(
            ends,
            values,
            f"{marker}-",
            color=colour,
            markersize=5,
            clip_on=False,
            zorder=3,
            label=f"column {column}",
        )
        axes.axhline(run.out[column], color=colour, linestyle=":", linewidth=1)
    axes.set_ylabel("O / l")
    axes.margins(y=0.3)
    axes.legend(loc="upper left", fontsize=8, ncols=SHOWN_COLUMNS)


def _said(run: RowRun, columns: np.ndarray) -> str:
    rescaled = [
        f"tile {tile} rescales by {factor:.2f}"
        for tile, factor in enumerate(run.factors[1:], start=2)
        if factor < 1
    ]
    tiles = ", ".join(f"{m + 0.0:.2f}" for m in run.m[1:].round(2))
    shown = ", ".join(f"column {c} ends at {run.out[c]:.2f}" for c in columns)
    return (
        f"m, l and O of the row of {run.tokens[-1].strip()!r} over {len(run.S)} keys in tiles of "
        f"{BLOCK_N}. m after each tile: {tiles}; {', '.join(rescaled) or 'none rescales'}. "
        f"l ends at {run.l[-1]:.2f}. O / l: {shown}."
    )


def _numbers(run: RowRun, columns: np.ndarray) -> dict[str, object]:
    return {
        "S": run.S.tolist(),
        "m": run.m[1:].tolist(),
        "l": run.l[1:].tolist(),
        "factors": run.factors.tolist(),
        "O": {str(c): run.O[1:, c].tolist() for c in columns},
    }
