"""What the tensor-core rungs do, in closed form: their part of `traffic`."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.device.layouts import GROUP_ROWS, LANES_PER_ROW
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    FRAGMENT_ROWS,
    VECTOR,
    TensorCoreConfig,
)
from fa2_numba.traffic_parts import (
    FLOAT,
    QueryTile,
    Requests,
    key_tiles,
    loaded,
    query_tiles,
    stored,
)

Tiles = TensorCoreConfig | BackwardConfig

WARP_BYTES = CHUNK_BYTES * WARP_SIZE
"""What a warp loads or stores at once where each lane has 16 bytes."""

MMA_COLS = 8
"""Columns of C in an `mma`."""

STEPS = 2
"""Shuffles that reduce a row over its LANES_PER_ROW lanes."""


def _fa2_tensor_core(p: Problem, c: TensorCoreConfig) -> Counts:
    total = _forced_rescales(p, c) * rescaled(c)
    for tile in query_tiles(p, c):
        total += copied(tile.rows, c.block_m, c) + Counts(barriers=1)
        if c.keeps_queries:
            total += fragments(c.block_m, c)
        # A tile that sees nothing has loaded the first keys all the same.
        keys = tile.keys if tile.visits else min(c.block_n, p.seqlen_k)
        total += copied(keys, max(tile.visits, 1) * c.block_n, c)
        total += copied(tile.keys, tile.visits * c.block_n, c)
        total += tile.visits * _split_q_visit(c) + _split_q_epilogue(tile, c)
    return total


def _split_q_visit(c: TensorCoreConfig) -> Counts:
    """One key tile, but for its copies and what is done only if a row outgrows its m."""
    rows, cols, _ = c.split_q_elements
    lane_rows = c.num_threads * rows
    visit = Counts(
        barriers=2,
        votes=c.num_warps,
        maxima=lane_rows * (cols - 1),
        additions=2 * lane_rows,
        multiplications=2 * lane_rows,
    )
    if not c.keeps_queries:
        visit += fragments(c.block_m, c)
    visit += products(c) + _exponentiate(c)
    return visit + 2 * c.num_warps * fragments(c.block_n, c)


def rescaled(c: TensorCoreConfig) -> Counts:
    """`fa2_tensor_core`: a warp takes over a tile's maxima and rescales its rows of O and l."""
    rows, _, out_cols = c.split_q_elements
    lane_rows = WARP_SIZE * rows
    return Counts(
        shuffles=STEPS * rows,
        maxima=(1 + STEPS) * lane_rows,
        additions=lane_rows,
        multiplications=(2 + out_cols) * lane_rows,
        special_calls=lane_rows,
    )


def _forced_rescales(p: Problem, c: TensorCoreConfig) -> int:
    """How often a warp meets the first keys that some of its rows see: their m is still -inf."""
    warp_rows, times = c.block_m // c.num_warps, 0
    for first_row in range(0, p.seqlen_q, c.block_m):
        end = min(first_row + c.block_m, p.seqlen_q)
        if _last_key(end - 1, p) < 0:
            continue
        for first in range(first_row, first_row + c.block_m, warp_rows):
            last_keys = (_last_key(row, p) for row in range(first, first + warp_rows))
            times += len({key // c.block_n for key in last_keys if key >= 0})
    return times


def _last_key(row: int, p: Problem) -> int:
    """The last key that a row sees, negative if none; rows past the end see all of them."""
    return min(p.seqlen_k - 1, row + p.seqlen_k - p.seqlen_q) if p.causal else p.seqlen_k - 1


def _split_q_epilogue(tile: QueryTile, c: TensorCoreConfig) -> Counts:
    """O / l and LSE; O goes through shared memory, a register at a time, to be stored by rows."""
    rows, _, out_cols = c.split_q_elements
    lane_rows = c.num_threads * rows
    # Rows past the end see what the last row sees.
    seeing_rows = tile.seeing + (c.block_m - tile.rows if tile.visits else 0)
    groups = ceil(tile.rows / GROUP_ROWS)
    done = stored_rows(tile.rows, c.block_m, c) + stored((groups, tile.rows * FLOAT, groups))
    return done + Counts(
        shuffles=STEPS * c.num_warps * rows,
        additions=STEPS * lane_rows + tile.seeing,
        multiplications=out_cols * lane_rows + tile.rows + tile.seeing,
        special_calls=LANES_PER_ROW * seeing_rows + tile.seeing,
    )


def _fa1_tensor_core(p: Problem, c: TensorCoreConfig) -> Counts:
    total = Counts()
    for keys in key_tiles(p, c):
        total += 2 * copied(keys, c.block_n, c)
    for tile in query_tiles(p, c):
        # The first key tile is visited by all, also by those that see nothing.
        visits = max(tile.visits, 1)
        each = copied(tile.rows, c.block_m, c) + _sliced_k_visit(c) + _update(tile, c)
        total += visits * each + (visits - 1) * _passed_on(tile, c) + _finished(tile, c)
    return total


def _sliced_k_visit(c: TensorCoreConfig) -> Counts:
    """Products, maxima and sums of each warp's keys, and what the warps exchange of them."""
    rows, cols, out_cols = c.sliced_k_elements
    lane_rows, warps = c.num_threads * rows, c.num_warps
    warp_rows, all_rows = warps * rows, warps * c.block_m
    partials = warp_rows * out_cols
    visit = Counts(
        barriers=3,
        maxima=lane_rows * (cols - 1 + STEPS + warps - 1),
        shuffles=2 * STEPS * warp_rows,
        additions=STEPS * lane_rows,
        multiplications=2 * lane_rows + all_rows,
        shared_load_requests=warps * warp_rows,
        shared_load_bytes=warps * lane_rows * FLOAT,
        shared_store_requests=2 * warp_rows + partials,
        shared_store_bytes=(2 * all_rows + partials * WARP_SIZE) * FLOAT,
        # Every second column at once: rows 4 apart share their banks. A GPU's compiler joins
        # neighbouring columns into half as many stores of 8 bytes, which do not conflict.
        shared_store_replays=partials,
    )
    visit += products(c) + _exponentiate(c)
    return visit + warps * fragments(c.block_m, c) + 2 * fragments(c.block_n, c)


def _update(tile: QueryTile, c: TensorCoreConfig) -> Counts:
    """`update_owned`, but for what it stores: one more tile in O, m and l."""
    owners, groups = _owners(tile.rows, c)
    elements = tile.rows * c.padded_dim
    return Counts(
        shared_load_requests=c.num_warps * groups * (2 + c.num_lines),
        shared_load_bytes=c.num_warps * (2 * owners + elements) * FLOAT,
        maxima=c.num_warps * owners,
        additions=(c.num_warps + 2) * owners + c.num_warps * elements,
        multiplications=2 * owners + 2 * elements,
        special_calls=2 * owners,
        divisions=2 * tile.seeing * c.line_cols // VECTOR,
    ) + 2 * stored((groups, tile.rows * FLOAT, groups))


def _passed_on(tile: QueryTile, c: TensorCoreConfig) -> Counts:
    """O, m and l to HBM after one pass and back in the next; each owner of a row reads m and l."""
    owners, groups = _owners(tile.rows, c)
    size = tile.rows * c.padded_dim * FLOAT
    rows_of_O = (groups * c.num_lines, size, size // SECTOR_BYTES)
    return stored(rows_of_O) + loaded(rows_of_O) + 2 * loaded((groups, owners * FLOAT, groups))


def _finished(tile: QueryTile, c: TensorCoreConfig) -> Counts:
    """O and LSE after the last pass; of O every owner stores one element at a time."""
    _, groups = _owners(tile.rows, c)
    sectors = VECTOR * tile.rows * ceil(c.head_dim * ELEMENT_BYTES / SECTOR_BYTES)
    elements = tile.rows * c.head_dim
    done = Counts(special_calls=tile.seeing, additions=tile.seeing)
    done += stored((VECTOR * groups * c.num_lines, elements * ELEMENT_BYTES, sectors))
    return done + stored((groups, tile.rows * FLOAT, groups))


def _owners(rows: int, c: TensorCoreConfig) -> tuple[int, int]:
    """Threads that own a part of so many rows of O, and warps that they make up."""
    threads_a_row = c.line_cols // VECTOR
    return rows * threads_a_row, ceil(rows * threads_a_row / WARP_SIZE)


TENSOR_CORE_HEAD: dict[str, Callable[[Problem, TensorCoreConfig], Counts]] = {
    "fa1_tensor_core": _fa1_tensor_core,
    "fa2_tensor_core": _fa2_tensor_core,
}
"""Rung id -> what it does for one head."""


# Verbs of device/


def copied(rows: int, tile_rows: int, c: Tiles) -> Counts:
    """`load_tile`: 16 bytes a lane; what lies past the end is filled with zeros."""
    stores = tile_rows * c.row_bytes // WARP_BYTES
    return loaded(whole_rows(rows, c)) + Counts(
        shared_store_requests=stores,
        shared_store_bytes=stores * WARP_BYTES,
        async_copies=0 if c.turing else stores,
    )


def stored_rows(rows: int, tile_rows: int, c: Tiles) -> Counts:
    """`store_rows` by all warps, each by way of its own part of a tile: so many rows to HBM."""
    size = tile_rows * c.row_bytes
    return stored(whole_rows(rows, c)) + Counts(
        warp_syncs=2 * c.num_warps,
        # One register a lane.
        shared_store_requests=size // (FLOAT * WARP_SIZE),
        shared_store_bytes=size,
        shared_load_requests=ceil(rows * c.line_chunks / WARP_SIZE) * c.num_lines,
        shared_load_bytes=rows * c.row_bytes,
    )


def whole_rows(rows: int, c: Tiles) -> Requests:
    """Rows of the head dim in HBM, a line of each at a time, 16 bytes a lane."""
    # A backward tile may end in lines of nothing but zeros.
    requests = ceil(rows * c.line_chunks / WARP_SIZE) * ceil(c.head_dim / c.line_cols)
    size = c.head_dim * ELEMENT_BYTES
    return requests, rows * size, rows * ceil(size / SECTOR_BYTES)


def fragments(rows: int, c: Tiles) -> Counts:
    """`ldmatrix` x4 of all 16 x 16 elements of so many rows of a tile, once."""
    return matrix_loads(rows // FRAGMENT_ROWS * c.padded_dim // FRAGMENT_ROWS)


def matrix_loads(count: int) -> Counts:
    """`ldmatrix` x4, so many times."""
    return Counts(
        matrix_loads=count, shared_load_requests=count, shared_load_bytes=count * WARP_BYTES
    )


def products(c: Tiles, count: int = 2) -> Counts:
    """S = Q K^T and O += P V of a pair of tiles, by all warps together; or so many like them."""
    multiply_adds = count * c.block_m * c.block_n * c.padded_dim
    depth = FRAGMENT_ROWS // 2 if c.turing else FRAGMENT_ROWS
    return Counts(
        multiply_adds=multiply_adds,
        tensor_core_instructions=multiply_adds // (FRAGMENT_ROWS * MMA_COLS * depth),
    )


def _exponentiate(c: TensorCoreConfig) -> Counts:
    """P of one tile: a multiply-add, a power of 2 and an addition for each element."""
    elements = c.block_m * c.block_n
    return Counts(multiply_adds=elements, special_calls=elements, additions=elements)
