"""Lesson 08: which tiles of keys a block visits and masks, and which head's keys it reads."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import expect_equal
from fa2_numba.reference import visible

LENGTHS = range(1, 9)
BLOCKS = range(1, 5)
LARGE = ((512, 512, 64, 64), (1, 1000, 64, 64), (300, 130, 64, 32), (130, 300, 32, 64))
"""seqlen_q, seqlen_k, block_m, block_n."""
HEADS = range(1, 13)
HIDDEN, PART, ALL = "hidden", "in part", "seen"


def judge_loop_bounds(function: Callable) -> None:
    """Agrees with the oracle's mask for every query tile of all small problems."""
    _require_function("n_block_range", function)
    for first_row, block_m, block_n, seqlen_q, seqlen_k, causal in _cases():
        given = (
            f"n_block_range(first_row={first_row}, block_m={block_m}, block_n={block_n}, "
            f"seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, causal={causal})"
        )
        found = function(first_row, block_m, block_n, seqlen_q, seqlen_k, causal)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise NotSolved(f"{given} is {found!r}: must be (tiles visited, first one to mask).")
        tiles = tile_kinds(first_row, block_m, block_n, seqlen_q, seqlen_k, causal)
        visited = len(tiles) - tiles.count(HIDDEN)
        try:
            expect_equal(f"The number of tiles visited, {given},", found[0], visited)
            expect_equal(f"The first tile to mask, {given},", found[1], tiles.count(ALL))
        except NotSolved as error:
            raise NotSolved(f"{error}{_why(found, tiles)}") from None


def judge_head_map(function: Callable) -> None:
    """Query heads in order share key-value heads in order, equally many each."""
    _require_function("kv_head_of", function)
    for heads, kv_heads in product(HEADS, HEADS):
        if heads % kv_heads:
            continue
        shared = np.repeat(np.arange(kv_heads), heads // kv_heads)
        for head, kv_head in enumerate(shared):
            given = f"kv_head_of(head={head}, heads={heads}, kv_heads={kv_heads})"
            found = function(head, heads, kv_heads)
            groups = ", ".join(map(str, shared))
            try:
                expect_equal(given, found, kv_head)
            except NotSolved as error:
                raise NotSolved(
                    f"{error} Query heads 0 to {heads - 1} read key-value heads {groups}."
                ) from None
            if not isinstance(found, (int, np.integer)):
                kind = type(found).__name__
                raise NotSolved(f"{given} is a {kind}: must be an int, for it is an index.")


def tile_kinds(
    first_row: int, block_m: int, block_n: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> list[str]:
    """What the oracle's mask says of every tile of keys, for the rows of one query tile.

    Keys past the end are hidden ones, rows past the end are no rows.
    """
    seen = visible(seqlen_q, seqlen_k, causal)[first_row : first_row + block_m]
    seen = np.pad(seen, ((0, 0), (0, -seqlen_k % block_n)))
    tiles = seen.reshape(len(seen), -1, block_n).swapaxes(0, 1)
    return [ALL if tile.all() else PART if tile.any() else HIDDEN for tile in tiles]


def _cases() -> Iterator[tuple[int, int, int, int, int, bool]]:
    small = product(LENGTHS, LENGTHS, BLOCKS, BLOCKS)
    for (seqlen_q, seqlen_k, block_m, block_n), causal in product([*small, *LARGE], (False, True)):
        for first_row in range(0, seqlen_q, block_m):
            yield first_row, block_m, block_n, seqlen_q, seqlen_k, causal


def _why(found: tuple[object, object], tiles: list[str]) -> str:
    visited, masked = len(tiles) - tiles.count(HIDDEN), tiles.count(ALL)
    if found[0] != visited:
        cost = "keys would be lost" if found[0] < visited else "time would be lost on hidden tiles"
    else:
        cost = "rows would see hidden keys" if found[1] > masked else "masking would cost time"
    said = ", ".join(tiles) if len(tiles) < 9 else f"{masked} seen, then {visited - masked} in part"
    return f" The mask says of the tiles: {said}; {cost}."


def _require_function(name: str, function: object) -> None:
    if not callable(function):
        raise NotSolved(f"{name} is a {type(function).__name__}: must be a function.")


EXERCISES = (
    Exercise(
        id="08.loop_bounds",
        answer="n_block_range",
        points=2,
        hints=(
            "The last row of the tile sees most keys: it decides how many tiles are visited. The "
            "first row sees fewest: it decides where masking begins. How many keys does a row see "
            "at most?",
            "Row i sees i + 1 + seqlen_k - seqlen_q keys, but not fewer than 0 nor more than "
            "seqlen_k; all seqlen_k without a mask. Tiles that hold a key of the last row: round "
            "up. Tiles that the first row sees to their end: round down.",
            "most, fewest = keys(first_row + block_m - 1), keys(first_row); "
            "return -(-most // block_n), fewest // block_n",
        ),
        judge=judge_loop_bounds,
    ),
    Exercise(
        id="08.head_map",
        answer="kv_head_of",
        points=1,
        hints=(
            "How many query heads share one key-value head? They are neighbours.",
            "With 6 query heads and 2 key-value heads, groups are 3 long: 0, 0, 0, 1, 1, 1.",
            "Divide the query head by the length of a group, in whole numbers.",
        ),
        judge=judge_head_map,
    ),
)
