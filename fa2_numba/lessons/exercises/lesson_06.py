"""Lesson 06: a grid with a block for every query tile, and how much of a GPU a grid uses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import numpy as np

from fa2_numba.constants import MAX_GRID_X, MAX_GRID_YZ
from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import SEEDS, expect_close, expect_equal, run
from fa2_numba.lessons.timeline import schedule

PROBLEMS = ((1, 1, 8, 4), (2, 3, 10, 4), (1, 4, 3, 8), (3, 2, 50, 40), (2, 5, 1, 1))
"""Batch, heads, rows, rows of a tile: whole tiles; a ragged end; less than a tile; tiles of more
rows than the block has threads; one row."""
MANY_HEADS = (4096, 32, 64, 64)
"""More pairs of batch and head than the y and z of a grid hold."""
THREADS = 32
FLOAT = 4

COUNTS = (range(1, 41), (1, 2, 5, 8), (1, 2, 3))
LARGE = ((16, 132, 2), (264, 132, 2), (265, 132, 2), (400, 132, 2), (1024, 132, 2), (1000, 108, 1))
"""Blocks, multiprocessors, slots."""


def judge_grid(function: Callable) -> None:
    """One block for each query tile of each head, and every row written by the block it has."""
    _require_function("tile_grid", function)
    for problem in PROBLEMS:
        grid, kernel = _answer(function, problem)
        _expect_blocks(grid, problem)
        batch, heads, seqlen_q, _ = problem
        for seed in SEEDS:
            owner = np.full((batch, seqlen_q, heads), -1, np.int32)
            report = run(kernel, grid, THREADS, owner, seed=seed)
            _expect_owners(owner, problem)
            stored = report.global_store_bytes // FLOAT
            expect_equal(f"The number of rows written {_given(problem)}", stored, owner.size)
    _expect_legal(_answer(function, MANY_HEADS)[0], MANY_HEADS)


def _given(problem: tuple[int, ...]) -> str:
    names = ("batches", "heads", "seqlen_q", "block_m")
    return "({})".format(
        ", ".join(f"{name}={value}" for name, value in zip(names, problem, strict=True))
    )


def _answer(function: Callable, problem: tuple[int, ...]) -> tuple[tuple[int, ...], object]:
    found = function(*problem)
    if not isinstance(found, tuple) or len(found) != 2 or not callable(found[1]):
        raise NotSolved(f"tile_grid{_given(problem)} is {found!r}: must be (grid, kernel).")
    grid = found[0] if isinstance(found[0], (tuple, list)) else (found[0],)
    whole = all(isinstance(n, (int, np.integer)) and n > 0 for n in grid)
    if not 1 <= len(grid) <= 3 or not whole:
        raise NotSolved(
            f"The grid {_given(problem)} is {found[0]!r}: must be one to three positive integers."
        )
    return tuple(map(int, grid)), found[1]


def _expect_blocks(grid: tuple[int, ...], problem: tuple[int, ...]) -> None:
    batch, heads, seqlen_q, block_m = problem
    tiles = -(-seqlen_q // block_m)
    blocks = batch * heads * tiles
    if prod(grid) != blocks:
        lost = "rows would have no block" if prod(grid) < blocks else "blocks would have no rows"
        raise NotSolved(
            f"The grid {grid} has {prod(grid)} blocks {_given(problem)}: must be {blocks}, one for "
            f"each of {batch} x {heads} heads and {tiles} query tiles, of which the last may have "
            f"fewer rows; {lost}."
        )


def _expect_owners(owner: np.ndarray, problem: tuple[int, ...]) -> None:
    batch, heads, seqlen_q, block_m = problem
    seen: dict[int, str] = {}
    for b, head, first in product(range(batch), range(heads), range(0, seqlen_q, block_m)):
        rows = owner[b, first : first + block_m, head]
        tile = f"rows {first} to {first + len(rows) - 1} of head {head} of batch {b}"
        blocks = sorted({int(block) for block in rows})
        if -1 in blocks:
            raise NotSolved(
                f"{tile}: {int((rows == -1).sum())} of {len(rows)} never written {_given(problem)}."
                " What does the block with this tile take for its head, batch and first row?"
            )
        if len(blocks) > 1:
            raise NotSolved(
                f"{tile}: written by blocks {', '.join(map(str, blocks))} {_given(problem)}: must "
                "be one block, for the tile's m, l and O are in its registers."
            )
        if blocks[0] in seen:
            raise NotSolved(
                f"{tile} and {seen[blocks[0]]}: both written by block {blocks[0]} "
                f"{_given(problem)}: must be a block each, or they wait for each other."
            )
        seen[blocks[0]] = tile


def _expect_legal(grid: tuple[int, ...], problem: tuple[int, ...]) -> None:
    _expect_blocks(grid, problem)
    for axis, size, most in zip("xyz", grid, (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ), strict=False):
        if size > most:
            raise NotSolved(
                f"The grid {grid} has {size:,} blocks in {axis} {_given(problem)}: must be at most "
                f"{most:,}. What can grow without end belongs into x."
            )


def judge_utilisation(function: Callable) -> None:
    """Agrees with the model of the block scheduler, for blocks that all take equally long."""
    _require_function("share_used", function)
    for blocks, multiprocessors, slots in [*product(*COUNTS), *LARGE]:
        found = function(blocks, multiprocessors, slots)
        given = f"share_used(blocks={blocks}, multiprocessors={multiprocessors}, slots={slots})"
        if getattr(found, "shape", None) != (2,) and not _is_pair(found):
            raise NotSolved(f"{given} is {found!r}: must be (of multiprocessors, of slots).")
        used = schedule(np.ones(blocks), multiprocessors, slots).mean_utilisation
        waves = -(-blocks // (multiprocessors * slots))
        last = blocks - (waves - 1) * multiprocessors * slots
        for what, share, right in zip(("multiprocessors", "slots"), found, used, strict=True):
            try:
                expect_close("", share, right, 1e-9)
            except NotSolved:
                raise NotSolved(
                    f"The share of {what}, {given}, is {share!r}: must be {right:.6g}. Waves: "
                    f"{waves}; blocks in the last one: {last}; multiprocessors with one of them: "
                    f"{min(last, multiprocessors)}."
                ) from None


def _require_function(name: str, function: object) -> None:
    if not callable(function):
        raise NotSolved(f"{name} is a {type(function).__name__}: must be a function.")


def _is_pair(found: object) -> bool:
    return isinstance(found, (tuple, list)) and len(found) == 2


EXERCISES = (
    Exercise(
        id="06.grid",
        answer="tile_grid",
        points=2,
        hints=(
            "How many query tiles has a head, if the last one may have fewer rows? And how many "
            "heads are there in all batches together?",
            "Two numbers of a grid are enough: x counts batches and heads together, y the query "
            "tiles. A block finds its tile in cuda.blockIdx.y, and in cuda.blockIdx.x its batch "
            "and its head, by a division with a remainder.",
            "grid = (batches * heads, -(-seqlen_q // block_m)); batch = cuda.blockIdx.x // heads; "
            "head = cuda.blockIdx.x % heads; first_row = cuda.blockIdx.y * block_m",
        ),
        judge=judge_grid,
    ),
    Exercise(
        id="06.utilisation",
        answer="share_used",
        points=1,
        hints=(
            "multiprocessors * slots blocks run at once. How many such waves are there, if the "
            "last may be smaller? All waves take equally long.",
            "Slots: blocks there are, out of blocks there would be if every wave were full. "
            "Multiprocessors: all of them in every wave but the last. There each takes one block "
            "before any takes a second.",
            "waves = -(-blocks // (multiprocessors * slots)); last = blocks - (waves - 1) * "
            "multiprocessors * slots; busy = (waves - 1) * multiprocessors + min(last, "
            "multiprocessors); return busy / (waves * multiprocessors), blocks / (waves * "
            "multiprocessors * slots)",
        ),
        judge=judge_utilisation,
    ),
)
