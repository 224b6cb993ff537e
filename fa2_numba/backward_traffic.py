"""What each backward pass does, in closed form: the numbers that the simulator counts.

Put together as `traffic` is, with its functions for the verbs of `device/`; the tensor-core rung's
is in `tensor_core_backward_traffic`. The leading terms stand in the docstring of each kernel.
Numbers of sectors take for granted what they do in `traffic`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.errors import ArgumentError
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_backward_traffic import fa2_tensor_core
from fa2_numba.traffic import (
    check_16_bits,
    check_head_dim,
    load_tile,
    products,
    scattered,
    scores,
    standard_scores,
    standard_values,
)
from fa2_numba.traffic_parts import (
    FLOAT,
    KeyTile,
    QueryTile,
    Requests,
    key_tiles,
    loaded,
    query_tiles,
    stored,
    visited_key_tiles,
)


def predict_backward(
    rung: str, problem: Problem, config: TileConfig | BackwardConfig, deterministic: bool = False
) -> Counts:
    """What a rung's backward pass does on a problem, all launches together.

    Of the tensor-core rung: with copies of 16 bytes and a positive softmax_scale.

    Raises ArgumentError if there is no formula for the rung, or if no launch could be like this.
    """
    if rung not in _KV_HEAD:
        raise ArgumentError(f"rung={rung!r}: must be one of {', '.join(_KV_HEAD)}")
    is_tensor_core = isinstance(config, BackwardConfig)
    if is_tensor_core != (rung == "fa2_tensor_core"):
        raise ArgumentError(f"config={config!r}: not of the kind that {rung} takes")
    (check_16_bits if is_tensor_core else check_head_dim)(problem, config)
    return problem.batch * problem.kv_heads * _KV_HEAD[rung](problem, config, deterministic)


def _standard(p: Problem, c: TileConfig, deterministic: bool) -> Counts:
    """Deterministic or not, it does the same."""
    group = p.heads // p.kv_heads
    total = _delta(p, clears_dq=False) + 2 * standard_scores(p, c) + p.seqlen_q * _weights(p)
    total = group * (total + standard_values(p, c))
    # Two launches, and a key tile visits all queries.
    visits, rows = ceil(p.seqlen_q / c.block_m), p.seqlen_q
    for keys in key_tiles(p, c):
        one = group * _transposed_visits(KeyTile(keys, visits, rows), p, c)
        total += 2 * (one + _scaled_rows(keys, p))
    return total


def _weights(p: Problem) -> Counts:
    """A row of S and dP: read, and written as P and dS; its statistics, read by every lane."""
    row, one = _whole_row(p.seqlen_k, FLOAT), (1, WARP_SIZE * FLOAT, 1)
    done = 2 * loaded(row) + 2 * stored(row) + 2 * loaded(one)
    return done + Counts(
        special_calls=p.seqlen_k, additions=2 * p.seqlen_k, multiplications=2 * p.seqlen_k
    )


def _transposed_visits(tile: KeyTile, p: Problem, c: TileConfig) -> Counts:
    """X += W^T Y over a head's queries; a request is for 4 keys x 8 queries of W."""
    lane_keys, lane_queries = SPLIT_Q_LANES
    pieces = ceil(tile.keys / lane_keys)
    W = ceil(tile.rows / lane_queries) * pieces, tile.rows * tile.keys * FLOAT, tile.rows * pieces
    visit = Counts(barriers=2) + products(*c.transposed.split_q_elements, SPLIT_Q_LANES, c)
    return load_tile(tile.rows, tile.visits * c.block_m, p, c) + loaded(W) + tile.visits * visit


def _fa2_split_q(p: Problem, c: TileConfig, deterministic: bool) -> Counts:
    group, with_dq = p.heads // p.kv_heads, not deterministic
    total = group * _delta(p, clears_dq=with_dq)
    for tile in visited_key_tiles(p, c, all_visit_first=True):
        total += 2 * load_tile(tile.keys, c.block_n, p, c) + 2 * _scaled_rows(tile.keys, p)
        total += group * _key_tile_visits(tile, p, c)
        if with_dq:
            total += group * tile.visits * _query_gradient(c)
            total += Counts(atomics=group * tile.rows * p.head_dim)
    if with_dq:
        return total + group * p.seqlen_q * _convert(p)
    return total + group * sum((_query_tile(t, p, c) for t in query_tiles(p, c)), Counts())


def _key_tile_visits(tile: KeyTile, p: Problem, c: TileConfig) -> Counts:
    """What a block of dK and dV does for one head, but for dQ. Every warp loads the statistics."""
    lane_rows, lane_cols = SPLIT_Q_LANES
    rows, cols, out_cols = c.transposed.split_q_elements
    reads, size = c.num_warps * ceil(tile.rows / lane_cols), lane_rows * tile.rows * FLOAT
    done = 2 * load_tile(tile.rows, tile.visits * c.block_m, p, c)
    done += 2 * loaded((reads, c.num_warps * size, reads))
    visit = Counts(barriers=2) + _weighed(rows, cols, c)
    visit += 2 * products(rows, cols, out_cols, SPLIT_Q_LANES, c)
    return done + tile.visits * visit


def _weighed(rows: int, cols: int, c: TileConfig) -> Counts:
    """S, P, dP and dS of a pair of tiles, of which a lane has rows x cols."""
    elements = c.block_m * c.block_n
    return 2 * scores(rows, cols, c) + Counts(
        special_calls=elements, additions=2 * elements, multiplications=elements
    )


def _query_gradient(c: TileConfig) -> Counts:
    """A pair of tiles: dS through shared memory, and dQ = dS K but for the atomics."""
    elements = c.block_m * c.block_n
    requests = elements // WARP_SIZE
    return products(*c.split_q_elements, SPLIT_Q_LANES, c) + Counts(
        shared_store_requests=requests,
        shared_store_bytes=elements * FLOAT,
        # 4 keys of 8 neighbouring queries: two keys at a time share 4 of their banks.
        shared_store_replays=requests,
        shared_load_requests=requests,
        shared_load_bytes=elements * FLOAT,
    )


def _query_tile(tile: QueryTile, p: Problem, c: TileConfig) -> Counts:
    """A block of the kernel that computes dQ in a fixed order."""
    lane_rows, lane_cols = SPLIT_Q_LANES
    rows, cols, out_cols = c.split_q_elements
    groups = ceil(tile.rows / lane_rows)
    done = 2 * load_tile(tile.rows, c.block_m, p, c)
    done += 2 * loaded((groups, lane_cols * tile.rows * FLOAT, groups))
    done += 2 * load_tile(tile.keys, tile.visits * c.block_n, p, c)
    visit = Counts(barriers=2) + _weighed(rows, cols, c)
    visit += products(rows, cols, out_cols, SPLIT_Q_LANES, c)
    return done + tile.visits * visit + _scaled_rows(tile.rows, p)


_KV_HEAD: dict[str, Callable[[Problem, TileConfig | BackwardConfig, bool], Counts]] = {
    "standard": _standard,
    "fa2_split_q": _fa2_split_q,
    "fa2_tensor_core": fa2_tensor_core,
}
"""Rung id -> what it does for one key-value head and the query heads that share it."""


# What the CUDA-core rungs share


def _delta(p: Problem, clears_dq: bool) -> Counts:
    """The first kernel, for one head: a warp takes a row."""
    steps = int(log2(WARP_SIZE))
    row = 2 * loaded(_whole_row(p.head_dim, p.itemsize)) + stored((1, FLOAT, 1))
    row += Counts(multiply_adds=p.head_dim, shuffles=steps, additions=steps * WARP_SIZE)
    return p.seqlen_q * (row + clears_dq * stored(_whole_row(p.head_dim, FLOAT)))


def _convert(p: Problem) -> Counts:
    """A row of the last kernel."""
    row = loaded(_whole_row(p.head_dim, FLOAT)) + stored(_whole_row(p.head_dim, p.itemsize))
    return row + Counts(multiplications=p.head_dim)


def _scaled_rows(rows: int, p: Problem) -> Counts:
    """`store_rows`, which scales them."""
    done = stored(scattered(rows, p.head_dim, p.itemsize))
    return done + Counts(multiplications=rows * p.head_dim)


def _whole_row(cols: int, itemsize: int) -> Requests:
    """A row of HBM by a warp, 32 neighbouring elements a request."""
    size = cols * itemsize
    return ceil(cols / WARP_SIZE), size, ceil(size / SECTOR_BYTES)
