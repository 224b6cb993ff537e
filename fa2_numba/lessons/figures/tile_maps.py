"""Which tiles of keys a run loaded and masked, and which key-value head each query head read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.kernels import fa2_split_q
from fa2_numba.launch import ForwardTensors
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    IDLE,
    LANE_COLOURS,
    ORANGE,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.reference import visible
from fa2_numba.simulator import simulate
from fa2_numba.simulator.stepper import Stepper
from fa2_numba.testing import assert_attention, poisoned, random_qkv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SKIP, MASK, FULL = range(3)
MEANINGS = ("skipped", "loaded and masked", "loaded, no mask")
COLOURS = (IDLE, ORANGE, BLUE)
TILE, HEAD_DIM = 8, 16
LOADS, MASKS = "load_kv_tile(K_smem", "mask_scores(S_reg, first_row"
"""The statements of `fa2_split_q` that load a tile of keys, and that mask one."""
GAP = 0.05


@dataclass(frozen=True)
class TileMap:
    """What a run did with each tile: kinds (query tiles, key tiles) of SKIP, MASK, FULL."""

    seqlen_q: int
    seqlen_k: int
    causal: bool
    kinds: np.ndarray

    @property
    def counts(self) -> dict[str, int]:
        """Meaning -> tiles."""
        return {name: int((self.kinds == kind).sum()) for kind, name in enumerate(MEANINGS)}


def follow_tiles(seqlen_q: int, seqlen_k: int, causal: bool) -> TileMap:
    """Run `fa2_split_q` on one head in tiles of 8 x 8, and see what each block loads and masks."""
    sizes = 1, seqlen_q, seqlen_k, 1, 1
    kinds = np.full((-(-seqlen_q // TILE), -(-seqlen_k // TILE)), SKIP)
    for statement, kind in ((LOADS, FULL), (MASKS, MASK)):
        for block, variables in _stops(sizes, causal, statement):
            kinds[block[1], variables["n_block"]] = kind
    return TileMap(seqlen_q, seqlen_k, causal, kinds)


def follow_heads(heads: int, kv_heads: int) -> np.ndarray:
    """Run `fa2_split_q`, and see which head's keys each block loads: bool (kv_heads, heads)."""
    loaded = np.zeros((kv_heads, heads), dtype=bool)
    for block, variables in _stops((1, TILE, TILE, heads, kv_heads), False, LOADS):
        loaded[variables["kv_head"], block[0]] = True
    return loaded


def draw_tile_maps(maps: Sequence[TileMap]) -> Picture:
    """Maps side by side; the black line is the edge of what exact attention lets a row see."""
    if not maps:
        raise ValueError("maps: must be at least one")
    rows = max(len(one.kinds) for one in maps)
    widths = [one.kinds.shape[1] for one in maps]
    with styled():
        figure = new_figure((WIDTH_INCHES, 1.6 + 0.76 * rows * WIDTH_INCHES / sum(widths)))
        panels = figure.subplots(1, len(maps), squeeze=False, width_ratios=widths)[0]
        for axes, one in zip(panels, maps, strict=True):
            _draw_map(axes, one)
        panels[0].set_ylabel("tile of queries (a block)")
        patch = matplotlib_module("patches").Patch
        handles = [
            patch(facecolor=colour, label=meaning + " (o)" * (kind == MASK))
            for kind, (colour, meaning) in enumerate(zip(COLOURS, MEANINGS, strict=True))
        ]
        line = matplotlib_module("lines").Line2D([], [], color=BLACK, label="edge of what is seen")
        figure.legend(handles=[*handles[::-1], line], loc="outside lower center", ncols=4)
    alt = "Tiles of keys that each block of fa2_split_q visits. " + " ".join(map(_said, maps))
    return Picture(figure, alt, {_name(one): one.kinds.tolist() for one in maps})


def draw_head_maps(maps: Mapping[str, np.ndarray]) -> Picture:
    """Name -> (kv_heads, heads) as `follow_heads` sees them: a square where a block loads."""
    if not maps:
        raise ValueError("maps: must be at least one")
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.55))
        panels = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, (name, loaded) in zip(panels, maps.items(), strict=True):
            for kv_head, heads in enumerate(loaded):
                left, colour = np.flatnonzero(heads), LANE_COLOURS[kv_head % len(LANE_COLOURS)]
                bottom = np.full(len(left), kv_head + GAP)
                height = 1 - 2 * GAP
                axes.add_patch(rectangles(left + GAP, left + 1 - GAP, bottom, height, colour))
            axes.set(title=name, xlabel="query head")
            _number(axes, *loaded.shape)
            axes.set_aspect("equal", anchor="N")
        panels[0].set_ylabel("key-value head it reads")
    read = {name: loaded.argmax(axis=0).tolist() for name, loaded in maps.items()}
    alt = "The key-value head that each query head's block reads. " + " ".join(
        f"{name}: {', '.join(map(str, kv_heads))}." for name, kv_heads in read.items()
    )
    return Picture(figure, alt.replace("\n", ", "), read)


def _stops(
    sizes: tuple[int, ...], causal: bool, statement: str
) -> Iterator[tuple[tuple[int, int, int], dict[str, object]]]:
    """Block and variables of thread 0 whenever it comes to the statement; the answer is judged."""
    q, k, v = random_qkv(*sizes, HEAD_DIM, np.float32)
    batch, seqlen_q, heads, _ = q.shape
    out, lse = poisoned(q.shape, np.float32), poisoned((batch, heads, seqlen_q), np.float32)
    scale = np.float32(HEAD_DIM**-0.5)
    # No workspace is asked for.
    tensors = ForwardTensors(q, k, v, out, lse, scale, causal, "float32", np.empty)
    config = TileConfig(HEAD_DIM, TILE, TILE, num_warps=1)
    (launch,) = fa2_split_q.plan_forward(tensors, config)
    simulation = simulate(launch.kernel, checks=False, counts=False, progress=False)
    configured = simulation[launch.grid, launch.threads, 0, launch.shared_bytes]
    with Stepper(configured, *launch.arguments) as stepper:
        while stepper.to_line(statement, thread=0).kind == "line":
            yield stepper.block, stepper.locals(0)
    assert_attention(out, lse, q, k, v, causal=causal)


def _draw_map(axes: Axes, one: TileMap) -> None:
    for kind, colour in enumerate(COLOURS):
        row, col = np.nonzero(one.kinds == kind)
        axes.add_patch(rectangles(col + GAP, col + 1 - GAP, row + GAP, 1 - 2 * GAP, colour))
        if kind == MASK:
            axes.scatter(col + 0.22, row + 0.78, s=14, facecolor="white", edgecolor=BLACK)
    keys = visible(one.seqlen_q, one.seqlen_k, one.causal).sum(axis=1) / TILE
    edges = np.arange(one.seqlen_q + 1) / TILE
    axes.plot(np.repeat(keys, 2), np.repeat(edges, 2)[1:-1], color=BLACK, linewidth=1.2)
    axes.set(title=_name(one), xlabel="tile of keys")
    _number(axes, *one.kinds.shape)
    axes.set_aspect("equal", anchor="N")


def _number(axes: Axes, rows: int, cols: int) -> None:
    axes.set(xlim=(-0.1, cols + 0.1), ylim=(rows + 0.1, -0.1))
    axes.set_xticks(np.arange(cols) + 0.5, range(cols), fontsize=8)
    axes.set_yticks(np.arange(rows) + 0.5, range(rows), fontsize=8)
    axes.tick_params(length=0)


def _name(one: TileMap) -> str:
    mask = "causal" if one.causal else "not causal"
    return f"{mask}\n{one.seqlen_q} queries\n{one.seqlen_k} keys"


def _said(one: TileMap) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in one.counts.items())
    return f"{_name(one)}: {counts}.".replace("\n", ", ").capitalize()
