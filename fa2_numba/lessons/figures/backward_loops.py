"""What the blocks of a backward pass read and write, tile by tile, and what it costs over N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.backward_traffic import predict_backward
from fa2_numba.config import TileConfig
from fa2_numba.kernels.fa2_split_q_backward import plan_backward
from fa2_numba.ladder import RUNGS
from fa2_numba.launch import BackwardTensors, KernelLaunch
from fa2_numba.lessons.figures.accesses import record
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
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
from fa2_numba.problem import Problem
from fa2_numba.reference import attention_forward_same_precision
from fa2_numba.simulator import simulate
from fa2_numba.testing import assert_gradients, poisoned, random_qkv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TILES = TileConfig(head_dim=16, block_m=8, block_n=8, num_warps=2)
"""Small, so that a short run visits many."""
LADDER_TILES = TileConfig(head_dim=64, block_m=64, block_n=64)
ARRAYS = ("Q", "dO", "lse", "D", "K", "V", "dQ", "dK", "dV")
OF_QUERIES = ("Q", "dO", "lse", "D", "dQ")
NAMES = {"LSE": "lse", "dQ_sum": "dQ"}
"""Argument of a kernel -> its name in the paper, where that differs."""
READ, WRITTEN, ADDED = "read", "written", "added to"
LOOKS = {
    READ: (SKY, "↑", "reads ↑"),
    WRITTEN: (ORANGE, "↓", "writes ↓"),
    ADDED: (VERMILION, "↓ +", "adds ↓ + (atomics)"),
}
"""What is done -> colour, sign (the chip is above), label."""
FUSED = "one kernel: dQ, dK, dV"
KEYS_ONLY, QUERIES = "two kernels, first: dK, dV", "two kernels, second: dQ"
"""The kernels with products of the pass with atomics, and of the deterministic one."""
CURVES = {
    "standard": ("standard", False, VERMILION, "o", "-"),
    "fa2_split_q": ("fa2_split_q", False, BLUE, "s", "--"),
    "fa2_split_q, deterministic": ("fa2_split_q", True, GREEN, "D", "-."),
}
"""Name -> rung, deterministic, colour, marker, dashes."""
GAP = 0.05


@dataclass(frozen=True)
class Move:
    """A tile, or its rows' numbers, that a block moved from or to HBM."""

    array: str
    tile: int
    what: str


@dataclass(frozen=True)
class BlockRun:
    """What one block did: the tile that it owns, those it visited, and its moves, in order.

    owns_keys: whether it owns a tile of keys and visited tiles of queries, or the other way round.
    """

    owns_keys: bool
    tile: int
    visited: tuple[int, ...]
    moves: tuple[Move, ...]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(query tile, key tile) of each visit."""
        return [(one, self.tile) if self.owns_keys else (self.tile, one) for one in self.visited]


def follow_backward(seqlen_q: int, seqlen_k: int, causal: bool) -> dict[str, list[BlockRun]]:
    """Run both backward passes of `fa2_split_q` on one head, in tiles of 8 x 8; judge the answers.

    Returns the blocks of each kernel with products: FUSED, KEYS_ONLY and QUERIES.
    """
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 1, TILES.head_dim, np.float32)
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    out, lse = attention_forward_same_precision(q, k, v, causal=causal)
    runs = {}
    for names in ((FUSED,), (KEYS_ONLY, QUERIES)):
        gradients = [poisoned(x.shape, np.float32) for x in (q, k, v)]
        tensors = BackwardTensors(
            *(q, k, v, out, lse, dout, *gradients),
            *(np.float32(TILES.head_dim**-0.5), causal, names != (FUSED,), "float32"),
            allocate=lambda shape: poisoned(shape, np.float32),
        )
        # D comes first; behind the one kernel, another one only rounds dQ.
        _, *done = [_run(launch) for launch in plan_backward(tensors, TILES)]
        runs |= dict(zip(names, done, strict=False))
        assert_gradients(*gradients, dout, q, k, v, causal=causal)
    return runs


def _run(launch: KernelLaunch) -> list[BlockRun]:
    """Its blocks, as they moved tiles; an array of HBM is as long as its heads' rows are."""
    simulation = simulate(launch.kernel, progress=False)
    configured = simulation[launch.grid, launch.threads, 0, launch.shared_bytes]
    accesses = [one for one in record(configured, *launch.arguments) if one.space == "global"]
    owns_keys = any(one.array == "dK_gmem" for one in accesses)
    # In an interval between barriers all threads are in the same visit, whatever their order.
    accesses.sort(key=lambda one: (one.block, one.interval))
    moves: dict[int, dict[Move, None]] = {}
    for one in accesses:
        argument = one.array.removesuffix("_gmem")
        width = 1 if argument in ("LSE", "D") else TILES.head_dim
        what = READ if not one.stored else ADDED if argument == "dQ_sum" else WRITTEN
        move = Move(NAMES.get(argument, argument), one.element // width // TILES.block_m, what)
        moves.setdefault(one.block[1], {})[move] = None
    return [_block_run(owns_keys, tile, tuple(done)) for tile, done in sorted(moves.items())]


def _block_run(owns_keys: bool, tile: int, moves: tuple[Move, ...]) -> BlockRun:
    first = "Q" if owns_keys else "K"
    visited = tuple(move.tile for move in moves if (move.array, move.what) == (first, READ))
    return BlockRun(owns_keys, tile, visited, moves)


def draw_blocks(blocks: Mapping[str, BlockRun]) -> Picture:
    """Title -> a block: which tiles it moves (down), before, in and after its visits (across)."""
    if not blocks:
        raise ValueError("blocks: must be at least one")
    widths = [len(one.visited) + 2 for one in blocks.values()]
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.9))
        panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False, width_ratios=widths)
        for axes, (title, one) in zip(panels[0], blocks.items(), strict=True):
            _draw_block(axes, title, one)
        used = {move.what for one in blocks.values() for move in one.moves}
        _legend(figure, [(LOOKS[what][0], LOOKS[what][2]) for what in LOOKS if what in used])
        figure.suptitle("What a block moves from and to HBM; the number is the tile's")
    alt = "Tiles that a block moves from and to HBM. " + " ".join(
        f"{title}: {_block_in_words(one)}" for title, one in blocks.items()
    )
    numbers = {
        title: {"visits": one.pairs, "moves": [(m.array, m.tile, m.what) for m in one.moves]}
        for title, one in blocks.items()
    }
    return Picture(figure, alt.replace("\n", ", "), numbers)


def _draw_block(axes: Axes, title: str, block: BlockRun) -> None:
    """A move of a tile that is visited stands in its visit, one of the own tile beside them."""
    last = len(block.visited) + 1
    for what, (colour, sign, _) in LOOKS.items():
        for move in (one for one in block.moves if one.what == what):
            passes_by = (move.array in OF_QUERIES) == block.owns_keys
            col = block.visited.index(move.tile) + 1 if passes_by else last * (what != READ)
            row = ARRAYS.index(move.array) + 1
            left, bottom = np.array([col + GAP]), np.array([row + GAP])
            axes.add_patch(rectangles(left, left + 1 - 2 * GAP, bottom, 1 - 2 * GAP, colour))
            text = f"{move.array} {move.tile} {sign}"
            axes.text(col + 0.5, row + 0.53, text, ha="center", va="center", fontsize=9)
    for col, (i, j) in enumerate(block.pairs, 1):
        text = f"S, P, dP, dS\n({i}, {j})"
        axes.text(col + 0.5, 0.5, text, ha="center", va="center", fontsize=8)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    for col in range(1, last + 1):
        axes.axvline(col, color=IDLE, linewidth=0.8, zorder=0)
    visits = [f"visit {number}" for number in range(1, last)]
    axes.set(title=title, xlim=(0, last + 1), ylim=(len(ARRAYS) + 1, 0))
    axes.set_xticks(np.arange(last + 1) + 0.5, ["before", *visits, "after"], fontsize=9)
    axes.set_yticks(np.arange(len(ARRAYS) + 1) + 0.5, ["on the chip", *ARRAYS])
    axes.tick_params(length=0)


def _block_in_words(block: BlockRun) -> str:
    """Which arrays' tiles, by what is done with them."""
    done = {what: [] for what in LOOKS}
    for move in block.moves:
        done[move.what].append(f"{move.array} {move.tile}")
    return "; ".join(f"{what}: {', '.join(tiles)}" for what, tiles in done.items() if tiles) + "."


def draw_loops(runs: Mapping[str, Sequence[BlockRun]]) -> Picture:
    """Kernels side by side: a block's way through pairs of tiles, and who writes each gradient."""
    if not runs:
        raise ValueError("runs: must be at least one")
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.8))
        panels = figure.subplots(1, len(runs), squeeze=False)[0]
        for axes, (name, blocks) in zip(panels, runs.items(), strict=True):
            _draw_loop(axes, name, blocks)
        _legend(figure, [(LOOKS[what][0], label) for what, label in _WRITERS.items()])
        figure.suptitle(
            "An arrow is a block; a square is a pair of tiles whose S and P it computes"
        )
    numbers = {
        name: {
            "visits": {one.tile: one.pairs for one in blocks},
            "writers": {array: writers(blocks, array) for array in ("dQ", "dK", "dV")},
        }
        for name, blocks in runs.items()
    }
    alt = "Pairs of tiles that blocks visit, and how many blocks write each tile. " + " ".join(
        f"{name}: {sum(len(one.visited) for one in blocks)} pairs in {len(blocks)} blocks; "
        + ", ".join(
            f"{array} {', '.join(map(str, found.values()))}"
            for array, found in numbers[name]["writers"].items()
            if found
        )
        + "."
        for name, blocks in runs.items()
    )
    return Picture(figure, alt, numbers)


_WRITERS = {WRITTEN: "written once, by one block", ADDED: "added to (atomics), by so many blocks"}


def writers(blocks: Sequence[BlockRun], array: str) -> dict[int, int]:
    """Tile of a gradient -> how many blocks write it or add to it."""
    found: dict[int, int] = {}
    for block in blocks:
        for move in block.moves:
            if move.array == array and move.what != READ:
                found[move.tile] = found.get(move.tile, 0) + 1
    return dict(sorted(found.items()))


def _draw_loop(axes: Axes, name: str, blocks: Sequence[BlockRun]) -> None:
    pairs = np.array([pair for block in blocks for pair in block.pairs])
    row, col = pairs[:, 0].astype(float), pairs[:, 1].astype(float)
    rows, cols = (int(x.max()) + 1 for x in (row, col))
    axes.add_patch(rectangles(col + GAP, col + 1 - GAP, row + GAP, 1 - 2 * GAP, SKY))
    for block in blocks:
        (first_row, first_col), (last_row, last_col) = block.pairs[0], block.pairs[-1]
        down, right = (0.35, 0.0) if block.owns_keys else (0.0, 0.35)
        start = first_col + 0.5 - right, first_row + 0.5 - down
        end = last_col + 0.5 + right, last_row + 0.5 + down
        arrow = {"arrowstyle": "-|>", "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=arrow)
    adds = any(move.what == ADDED for block in blocks for move in block.moves)
    for tile, count in writers(blocks, "dQ").items():
        _draw_writers(axes, (cols + 0.3, tile), ADDED if adds else WRITTEN, f"dQ {tile}", count)
    for tile, count in writers(blocks, "dK").items():
        text = f"dK {tile}\ndV {tile}"
        _draw_writers(axes, (tile, rows + 0.3), WRITTEN, text, count)
    axes.set(title=name, xlabel="tile of keys", xlim=(-0.1, cols + 1.4), ylim=(rows + 1.4, -0.1))
    axes.set_xticks(np.arange(cols) + 0.5, range(cols), fontsize=9)
    axes.set_yticks(np.arange(rows) + 0.5, range(rows), fontsize=9)
    axes.set_ylabel("tile of queries")
    axes.set_aspect("equal", anchor="N")
    axes.tick_params(length=0)


def _draw_writers(axes: Axes, place: tuple[float, float], what: str, text: str, count: int) -> None:
    left, bottom = np.array([place[0] + GAP]), np.array([place[1] + GAP])
    height = 1 - 2 * GAP
    axes.add_patch(rectangles(left, left + height, bottom, height, LOOKS[what][0]))
    label = f"{text}\n{count} add{'s' * (count > 1)}" if what == ADDED else text
    axes.text(place[0] + 0.5, place[1] + 0.5, label, ha="center", va="center", fontsize=8)


def _legend(figure: object, looks: Sequence[tuple[str, str]]) -> None:
    patch = matplotlib_module("patches").Patch
    handles = [patch(facecolor=colour, label=label) for colour, label in looks]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def backward_workspace(rung: str, deterministic: bool, seqlen: int) -> int:
    """Bytes of HBM that a backward pass asks for besides its operands: one head, LADDER_TILES.

    No kernel is run: launches are planned for arrays that are never written.
    """
    asked: list[int] = []

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        asked.append(4 * prod(shape))
        return np.empty(0, np.float32)

    one = np.broadcast_to(np.float32(0), (1, seqlen, 1, LADDER_TILES.head_dim))
    arrays = {name: one for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")}
    tensors = BackwardTensors(
        **arrays,
        LSE=one[..., 0].swapaxes(1, 2),
        softmax_scale=np.float32(1),
        causal=False,
        deterministic=deterministic,
        dtype="float32",
        allocate=allocate,
    )
    RUNGS[rung].plan_backward(tensors, LADDER_TILES)
    return sum(asked)


def backward_bytes(rung: str, deterministic: bool, seqlen: int) -> int:
    """Bytes of HBM that loads, stores and atomics of one head name, in closed form."""
    problem = Problem(1, 1, 1, seqlen, seqlen, LADDER_TILES.head_dim)
    counts = predict_backward(rung, problem, LADDER_TILES, deterministic)
    return counts.global_load_bytes + counts.global_store_bytes + 4 * counts.atomics


def draw_backward_growth(lengths: Sequence[int]) -> Picture:
    """HBM that the backward passes ask for, and bytes that they move, over the length of a head."""
    if not lengths:
        raise ValueError("lengths: must be at least one")
    amounts = {
        "asked for": {
            name: [backward_workspace(rung, fixed, n) for n in lengths]
            for name, (rung, fixed, *_) in CURVES.items()
        },
        "moved": {
            name: [backward_bytes(rung, fixed, n) for n in lengths]
            for name, (rung, fixed, *_) in CURVES.items()
        },
    }
    titles = (
        "HBM asked for besides inputs and gradients",
        "HBM bytes moved (an atomic addition as 4)",
    )
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.2))
        panels = figure.subplots(1, 2)
        for axes, title, curves in zip(panels, titles, amounts.values(), strict=True):
            for name, sizes in curves.items():
                *_, colour, marker, dashes = CURVES[name]
                points = [size / 2**20 for size in sizes]
                axes.loglog(
                    lengths, points, dashes, color=colour, marker=marker, markersize=5, label=name
                )
            axes.set_title(title)
            axes.set_ylabel("MiB")
            axes.set_xlabel("N, queries and keys of one head")
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
            axes.minorticks_off()
            axes.grid(True, color=IDLE)
        panels[0].legend(fontsize=9)
    alt = f"Backward passes from N = {lengths[0]:,} to {lengths[-1]:,}, head dim 64. " + " ".join(
        f"{name}: bytes {what} from {sizes[0]:,} to {sizes[-1]:,}."
        for what, curves in amounts.items()
        for name, sizes in curves.items()
    )
    return Picture(figure, alt, amounts)
