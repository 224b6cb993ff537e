"""What `fa2_tensor_core`'s backward pass does, in closed form: its part of `backward_traffic`."""

from __future__ import annotations

from math import ceil, log2

from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.device.layouts import GROUP_ROWS, LANES_PER_ROW
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.tensor_core_backward_config import QUERY_HALVES, BackwardConfig
from fa2_numba.tensor_core_config import (
    CHUNK_ELEMENTS,
    ELEMENT_BYTES,
    FRAGMENT_ROWS,
    TensorCoreConfig,
)
from fa2_numba.tensor_core_traffic import (
    WARP_BYTES,
    copied,
    fragments,
    matrix_loads,
    products,
    stored_rows,
    whole_rows,
)
from fa2_numba.traffic_parts import (
    FLOAT,
    KeyTile,
    QueryTile,
    loaded,
    query_tiles,
    seeing_rows,
    stored,
    visited_key_tiles,
)

FRAGMENT = FRAGMENT_ROWS**2
"""Elements that a matrix load fetches."""

PAIR = 2
"""Neighbouring elements of P^T or dS^T that a lane stores at once; so many float32 of statistics
it loads at once."""


def fa2_tensor_core(p: Problem, c: BackwardConfig, deterministic: bool) -> Counts:
    """All launches, for one key-value head and the query heads that share it."""
    group = p.heads // p.kv_heads
    total = group * _prepare(p, c, not deterministic)
    for tile in visited_key_tiles(p, c, all_visit_first=False):
        total += _key_tile(tile, group, c, not deterministic)
    if deterministic:
        tiles = c.query_parallel
        return total + group * sum((_dq_tile(t, tiles) for t in query_tiles(p, tiles)), Counts())
    return total + group * sum((_convert(t.rows, c) for t in query_tiles(p, c)), Counts())


def _prepare(p: Problem, c: BackwardConfig, with_sums: bool) -> Counts:
    """A lane has 8 columns of a row of O and dO; D and log-sum-exp of all rows of whole tiles."""
    lanes = c.padded_dim // CHUNK_ELEMENTS
    warp_rows = WARP_SIZE // lanes
    tile_rows = ceil(p.seqlen_q / c.block_m) * c.block_m
    warps, blind = tile_rows // warp_rows, p.seqlen_q - seeing_rows(p, p.seqlen_q)
    row_bytes = p.head_dim * ELEMENT_BYTES
    requests = ceil(p.seqlen_q / warp_rows)
    sectors = p.seqlen_q * ceil(row_bytes / SECTOR_BYTES)
    done = 2 * loaded((requests, p.seqlen_q * row_bytes, sectors))
    done += loaded((requests, p.seqlen_q * FLOAT, requests))
    done += 2 * stored((warps, tile_rows * FLOAT, warps))
    if with_sums:
        size = tile_rows * c.padded_dim * FLOAT
        done += stored((size // WARP_BYTES, size, size // SECTOR_BYTES))
    steps = int(log2(lanes))
    return done + Counts(
        multiply_adds=p.seqlen_q * c.padded_dim,
        multiplications=tile_rows - blind,
        shuffles=steps * warps,
        additions=steps * warps * WARP_SIZE,
    )


def _key_tile(tile: KeyTile, group: int, c: BackwardConfig, with_dq: bool) -> Counts:
    """One block of the main kernel."""
    of_head = 2 * copied(tile.rows, tile.visits * c.block_m, c)
    of_head += tile.visits * (_statistics(c) + _visit(c, with_dq))
    done = 2 * copied(tile.keys, c.block_n, c) + 2 * stored_rows(tile.keys, c.block_n, c)
    done += Counts(barriers=1, multiplications=c.block_n * c.padded_dim)
    return done + group * of_head


def _visit(c: BackwardConfig, with_dq: bool) -> Counts:
    """One pair of tiles, but for copies."""
    elements = c.block_m * c.block_n
    # P^T and dS^T, each stored once, and what a lane takes of log-sum-exp and D beside it.
    stores, reads = elements // (PAIR * WARP_SIZE), c.key_warps * c.block_m // GROUP_ROWS
    visit = Counts(
        barriers=2 if c.stages == 2 else 3,
        multiply_adds=elements,
        special_calls=elements,
        additions=elements,
        multiplications=elements,
        shared_store_requests=2 * stores,
        shared_store_bytes=2 * elements * ELEMENT_BYTES,
        shared_load_requests=2 * reads,
        shared_load_bytes=2 * reads * WARP_SIZE * PAIR * FLOAT,
    )
    visit += 2 * _scores(c) + 2 * _gradient(c)
    return visit + products(c, 4) + with_dq * _query_gradient(c)


def _statistics(c: BackwardConfig) -> Counts:
    """`load_statistics`: log-sum-exp and D of a query tile, by the first warp."""
    size = 2 * c.block_m * FLOAT
    return loaded((1, size, size // SECTOR_BYTES)) + Counts(
        shared_store_requests=1, shared_store_bytes=size, async_copies=0 if c.turing else 1
    )


def _scores(c: BackwardConfig) -> Counts:
    """Matrices of `compute_scores`: each warp loads its keys for every step of its queries."""
    steps = c.queries_of_a_warp // c.query_step
    keys = steps * fragments(c.keys_of_a_warp, c)
    return c.num_warps * (keys + fragments(c.queries_of_a_warp, c))


def _gradient(c: BackwardConfig) -> Counts:
    """Matrices of `accumulate_gradient`: each warp loads its rows of P^T, its columns of dO."""
    weights = matrix_loads(c.query_warps * c.block_n * c.block_m // FRAGMENT)
    return weights + c.key_warps * fragments(c.block_m, c)


def _query_gradient(c: BackwardConfig) -> Counts:
    """`multiply_keys`, `add_query_gradient`: a warp has half the rows and some of the columns."""
    weights = matrix_loads(c.num_warps // QUERY_HALVES * c.block_n * c.block_m // FRAGMENT)
    done = weights + QUERY_HALVES * fragments(c.block_n, c) + products(c, 1)
    return done + Counts(atomics=c.block_m * c.padded_dim)


def _convert(rows: int, c: BackwardConfig) -> Counts:
    """A query tile of `convert`: 8 rows of 4 chunks by a warp at once."""
    elements = c.block_m * c.padded_dim
    warp_rows, warp_cols = c.query_gradient
    in_warp = warp_rows * warp_cols // CHUNK_ELEMENTS // WARP_SIZE
    loads = 2 * c.num_warps * in_warp
    done = loaded((loads, elements * FLOAT, elements * FLOAT // SECTOR_BYTES))
    _, size, sectors = whole_rows(rows, c)
    done += stored((_converted(rows, c), size, sectors))
    return done + Counts(multiplications=elements)


def _converted(rows: int, c: BackwardConfig) -> int:
    """Requests by which `convert` stores a tile: those in which any row and column exists."""
    warp_rows, warp_cols = c.query_gradient
    chunks, at_once = warp_cols // CHUNK_ELEMENTS, WARP_SIZE // GROUP_ROWS
    # What a warp stores at once: all its columns of some groups of rows, or some of one group's.
    groups, wide = max(1, at_once // chunks), min(at_once, chunks) * CHUNK_ELEMENTS
    first_rows = range(0, c.block_m, groups * GROUP_ROWS)
    first_cols = range(0, c.padded_dim, wide)
    return sum(row < rows for row in first_rows) * sum(col < c.head_dim for col in first_cols)


def _dq_tile(tile: QueryTile, c: TensorCoreConfig) -> Counts:
    """A query tile of the kernel that computes dQ in a fixed order."""
    elements, groups = c.block_m * c.block_n, ceil(tile.rows / GROUP_ROWS)
    kept, loaded_again = (1, 0) if c.keeps_queries else (0, tile.visits)
    done = 2 * copied(tile.rows, c.block_m, c)
    done += 2 * loaded((groups, LANES_PER_ROW * tile.rows * FLOAT, groups))
    done += 2 * (kept + loaded_again) * fragments(c.block_m, c)
    done += 2 * copied(tile.keys, tile.visits * c.block_n, c)
    visit = Counts(
        barriers=2,
        multiply_adds=elements,
        special_calls=elements,
        additions=elements,
        multiplications=elements,
    )
    visit += products(c, 3) + 3 * c.num_warps * fragments(c.block_n, c)
    done += tile.visits * visit + stored_rows(tile.rows, c.block_m, c)
    return done + Counts(barriers=1, multiplications=c.block_m * c.padded_dim)
