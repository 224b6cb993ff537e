"""What each rung does, in closed form: the numbers that the simulator counts.

A rung's formula is put together like the rung itself, from one function for each verb of `device/`;
those of the tensor-core rungs are in `tensor_core_traffic`.
The leading terms stand in the docstring of each rung's kernel. Tests compare all of it with what
the simulator counts, number by number. Numbers of sectors take for granted that rows start where a
sector does: seqlen_q and seqlen_k are multiples of 8, head_dim of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil, log2

from fa2_numba.config import (
    EXCHANGE_COLS,
    HEAD_DIM_STEP,
    SLICED_K_LANES,
    SPLIT_Q_LANES,
    TileConfig,
)
from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.errors import ArgumentError
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import CHUNK_BYTES, ELEMENT_BYTES, TensorCoreConfig
from fa2_numba.tensor_core_traffic import TENSOR_CORE_HEAD, rescaled
from fa2_numba.traffic_parts import (
    FLOAT,
    QueryTile,
    Requests,
    alike,
    key_tiles,
    loaded,
    query_tiles,
    seeing_rows,
    stored,
)

OWNED_ROWS = WARP_SIZE // EXCHANGE_COLS
"""Rows whose elements the threads of one warp sum at a time."""


def predict(
    rung: str, problem: Problem, config: TileConfig | TensorCoreConfig, outgrown: int = 0
) -> Counts:
    """What a rung does on a problem, with the tiles of `config`, all launches together.

    Of the tensor-core rungs: with copies of 16 bytes and a positive softmax_scale. What
    `fa2_tensor_core` does depends on the data. outgrown: how often, over all warps and tiles, one
    of a warp's rows outgrew its m, the first keys that a row sees left out.

    Raises ArgumentError if there is no formula for the rung, or if no launch could be like this.
    """
    if rung not in _HEAD:
        raise ArgumentError(f"rung={rung!r}: must be one of {', '.join(_HEAD)}")
    is_tensor_core = isinstance(config, TensorCoreConfig)
    if is_tensor_core != (rung in TENSOR_CORE_HEAD):
        raise ArgumentError(f"config={config!r}: not of the kind that {rung} takes")
    if outgrown and rung != "fa2_tensor_core":
        raise ArgumentError(f"outgrown={outgrown}: must be 0, for {rung} rescales every tile")
    (check_16_bits if is_tensor_core else check_head_dim)(problem, config)
    total = problem.batch * problem.heads * _HEAD[rung](problem, config)
    return total + outgrown * rescaled(config) if outgrown else total


def check_head_dim(p: Problem, c: TileConfig) -> None:
    """Refuse a head dim for which the tiles of a CUDA-core rung are not made."""
    if not c.head_dim - HEAD_DIM_STEP < p.head_dim <= c.head_dim:
        rule = f"must be that of the tiles, {c.head_dim}, or up to {HEAD_DIM_STEP - 1} less"
        raise ArgumentError(f"head_dim={p.head_dim}: {rule}")


def check_16_bits(p: Problem, c: TensorCoreConfig | BackwardConfig) -> None:
    """Refuse what a tensor-core rung cannot copy 16 bytes at a time, or its tiles are not for."""
    if p.head_dim != c.head_dim or p.head_dim * ELEMENT_BYTES % CHUNK_BYTES:
        rule = f"must be that of the tiles, {c.head_dim}, and rows of it whole {CHUNK_BYTES} bytes"
        raise ArgumentError(f"head_dim={p.head_dim}: {rule}")
    if p.itemsize != ELEMENT_BYTES:
        raise ArgumentError(f"itemsize={p.itemsize}: must be {ELEMENT_BYTES}, for this rung")


def _standard(p: Problem, c: TileConfig) -> Counts:
    return standard_scores(p, c) + _softmax_rows(p) + standard_values(p, c)


def standard_scores(p: Problem, c: TileConfig) -> Counts:
    """The kernel that makes S: a block for every pair of tiles."""
    rows, cols, _ = c.split_q_elements
    total = Counts()
    for (tile, keys), times in _tile_pairs(p, c):
        one = load_tile(tile.rows, c.block_m, p, c) + load_tile(keys, c.block_n, p, c)
        one += Counts(barriers=1) + scores(rows, cols, c)
        total += times * (one + stored(scattered(tile.rows, keys, FLOAT)))
    return total


def standard_values(p: Problem, c: TileConfig) -> Counts:
    """The kernel that multiplies a matrix like S with one like V: a block for every query tile."""
    total = Counts()
    for tile, tiles in alike(query_tiles(p, c, skip=False)):
        total += tiles * stored(scattered(tile.rows, p.head_dim, p.itemsize))
    for (tile, keys), times in _tile_pairs(p, c):
        one = load_tile(keys, c.block_n, p, c) + Counts(barriers=2)
        one += loaded(scattered(tile.rows, keys, FLOAT))
        total += times * (one + products(*c.split_q_elements, SPLIT_Q_LANES, c))
    return total


def _tile_pairs(p: Problem, c: TileConfig) -> list[tuple[tuple[QueryTile, int], int]]:
    """Each query tile with the keys of each key tile, whatever the mask, and how often."""
    return alike(product(query_tiles(p, c, skip=False), key_tiles(p, c)))


def _softmax_rows(p: Problem) -> Counts:
    """The second kernel: a warp takes a row, reads it three times and writes it once."""
    steps = int(log2(WARP_SIZE))
    pieces, sectors = ceil(p.seqlen_k / WARP_SIZE), ceil(p.seqlen_k * FLOAT / SECTOR_BYTES)
    row = 3 * loaded((pieces, p.seqlen_k * FLOAT, sectors))
    row += stored((pieces, p.seqlen_k * FLOAT, sectors)) + stored((1, FLOAT, 1))
    row += Counts(
        shuffles=2 * steps,
        maxima=p.seqlen_k + steps * WARP_SIZE,
        additions=3 * p.seqlen_k + steps * WARP_SIZE,
        special_calls=2 * p.seqlen_k,
    )
    seeing = Counts(divisions=p.seqlen_k, special_calls=1, additions=1)
    return p.seqlen_q * row + seeing_rows(p, p.seqlen_q) * seeing


def _fa1_sliced_k(p: Problem, c: TileConfig) -> Counts:
    total = Counts()
    for keys, times in alike(key_tiles(p, c)):
        total += times * 2 * load_tile(keys, c.block_n, p, c)
    last = ceil(p.seqlen_k / c.block_n) - 1
    passes = alike((number == 0, number == last) for number in range(last + 1))
    for tile, tiles in alike(query_tiles(p, c, skip=False)):
        for (is_first, is_last), times in passes:
            one = load_tile(tile.rows, c.block_m, p, c) + Counts(barriers=3)
            one += _sliced_k_scores(c) + _to_warps_rows(c) + _partials(c)
            one += _fa1_statistics(tile, c, is_first, is_last)
            one += _fa1_output(tile, p, c, is_first, is_last)
            total += tiles * times * one
    return total


def _fa1_statistics(tile: QueryTile, c: TileConfig, first: bool, last: bool) -> Counts:
    """`update_statistics`: one thread a row, so 32 rows a request."""
    requests = ceil(tile.rows / WARP_SIZE)
    rows = (requests, tile.rows * FLOAT, ceil(tile.rows * FLOAT / SECTOR_BYTES))
    done = Counts(
        shared_load_requests=2 * c.num_warps * requests,
        shared_load_bytes=2 * c.num_warps * tile.rows * FLOAT,
        shared_store_requests=2 * requests,
        shared_store_bytes=2 * tile.rows * FLOAT,
        maxima=c.num_warps * tile.rows,
        additions=(c.num_warps + 2) * tile.rows,
        multiplications=2 * tile.rows,
        special_calls=2 * tile.rows,
        divisions=2 * tile.seeing,
    )
    done += (0 if first else 2) * loaded(rows) + (3 if last else 2) * stored(rows)
    return done + last * Counts(special_calls=tile.seeing, additions=tile.seeing)


def _fa1_output(tile: QueryTile, p: Problem, c: TileConfig, first: bool, last: bool) -> Counts:
    """`update_output`, all exchanges: O read from HBM but in the first pass, and written back."""
    elements, requests = _owned(tile.rows, p)
    later = 0 if first else 1
    factors = 1 + later
    done = Counts(
        shared_load_requests=(c.num_warps + factors) * requests,
        shared_load_bytes=(c.num_warps + factors) * elements * FLOAT,
        additions=(c.num_warps - 1 + later) * elements,
        multiplications=factors * elements,
    )
    O_acc = _owned_in_hbm(tile.rows, p, FLOAT)
    done += later * loaded(O_acc) + stored(O_acc)
    return done + last * stored(_owned_in_hbm(tile.rows, p, p.itemsize))


def _fa2_fewer_flops(p: Problem, c: TileConfig) -> Counts:
    tiles = list(query_tiles(p, c))
    # The barrier between one query tile and the next.
    return sum((_sliced_k_tile(tile, p, c) for tile in tiles), Counts(barriers=len(tiles)))


def _fa2_seq_parallel(p: Problem, c: TileConfig) -> Counts:
    return sum((_sliced_k_tile(tile, p, c) for tile in query_tiles(p, c)), Counts())


def _sliced_k_tile(tile: QueryTile, p: Problem, c: TileConfig) -> Counts:
    visit = Counts(barriers=2) + _sliced_k_scores(c) + _rescaled_statistics(c)
    visit += _partials(c) + _rescaled_output(c)
    total = load_tile(tile.rows, c.block_m, p, c)
    total += 2 * load_tile(tile.keys, tile.visits * c.block_n, p, c)
    return total + tile.visits * visit + _sliced_k_epilogue(tile, p, c)


def _rescaled_statistics(c: TileConfig) -> Counts:
    """One lane a row and warp: m against the maximum so far, l; of the first warp, O's factor."""
    rows = c.sliced_k_elements[0]
    one_lane = c.num_warps * c.block_m
    return Counts(
        maxima=one_lane,
        special_calls=one_lane,
        additions=2 * one_lane,
        multiplications=one_lane,
        shared_store_requests=rows,
        shared_store_bytes=c.block_m * FLOAT,
    )


def _rescaled_output(c: TileConfig) -> Counts:
    """`update_output`, all exchanges: O = factor O + the parts of all warps, in registers."""
    elements = c.block_m * c.head_dim
    requests = elements // WARP_SIZE
    return Counts(
        shared_load_requests=(c.num_warps + 1) * requests,
        shared_load_bytes=(c.num_warps + 1) * elements * FLOAT,
        additions=c.num_warps * elements,
        multiplications=elements,
    )


def _sliced_k_epilogue(tile: QueryTile, p: Problem, c: TileConfig) -> Counts:
    """m and l cross the warps; `store_output`: 16 threads own a row."""
    groups = ceil(tile.rows / OWNED_ROWS)
    done = 2 * _to_warps_rows(c) + Counts(barriers=1)
    done += Counts(
        shared_load_requests=(c.num_warps + 1) * groups,
        shared_load_bytes=(c.num_warps * EXCHANGE_COLS + 1) * tile.rows * FLOAT,
        additions=(c.num_warps - 1) * EXCHANGE_COLS * tile.rows + tile.seeing,
        divisions=EXCHANGE_COLS * tile.seeing,
        multiplications=tile.rows * p.head_dim,
        special_calls=tile.seeing,
    )
    done += stored(_owned_in_hbm(tile.rows, p, p.itemsize))
    return done + stored((groups, tile.rows * FLOAT, groups))


def _fa2_split_q(p: Problem, c: TileConfig) -> Counts:
    lane_cols = SPLIT_Q_LANES[1]
    rows, cols, out_cols = c.split_q_elements
    in_lanes = c.num_threads * rows
    visit = Counts(
        barriers=2,
        maxima=in_lanes,
        special_calls=in_lanes,
        additions=2 * in_lanes,
        multiplications=in_lanes * (1 + out_cols),
    )
    visit += scores(rows, cols, c) + _row_max(rows, cols, lane_cols, c)
    visit += _exponentiate(rows, cols, lane_cols, c)
    visit += products(rows, cols, out_cols, SPLIT_Q_LANES, c)
    total = Counts()
    for tile in query_tiles(p, c):
        groups = ceil(tile.rows / SPLIT_Q_LANES[0])
        total += load_tile(tile.rows, c.block_m, p, c)
        total += 2 * load_tile(tile.keys, tile.visits * c.block_n, p, c) + tile.visits * visit
        total += stored(scattered(tile.rows, p.head_dim, p.itemsize))
        total += stored((groups, tile.rows * FLOAT, groups))
        total += Counts(
            divisions=lane_cols * tile.seeing,
            multiplications=tile.rows * p.head_dim,
            special_calls=tile.seeing,
            additions=tile.seeing,
        )
    return total


_HEAD: dict[str, Callable[[Problem, TileConfig | TensorCoreConfig], Counts]] = {
    "standard": _standard,
    "fa1_sliced_k": _fa1_sliced_k,
    "fa2_fewer_flops": _fa2_fewer_flops,
    "fa2_seq_parallel": _fa2_seq_parallel,
    "fa2_split_q": _fa2_split_q,
    **TENSOR_CORE_HEAD,
}
"""Rung id -> what it does for one head."""


# Verbs of device/


def load_tile(rows: int, tile_rows: int, p: Problem, c: TileConfig) -> Counts:
    """`load_tile`: a warp reads a row at a time, 32 columns a request, and stores a padded row."""
    row = (ceil(p.head_dim / WARP_SIZE), p.head_dim * p.itemsize)
    sectors = ceil(p.head_dim * p.itemsize / SECTOR_BYTES)
    return rows * loaded((*row, sectors)) + Counts(
        shared_store_requests=tile_rows * ceil(c.head_dim / WARP_SIZE),
        shared_store_bytes=tile_rows * c.head_dim * FLOAT,
    )


def scores(rows: int, cols: int, c: TileConfig) -> Counts:
    """`compute_scores`: each lane reads its rows of Q and K, element by element."""
    reads = c.head_dim * (rows + cols)
    return Counts(
        shared_load_requests=c.num_warps * reads,
        shared_load_bytes=c.num_threads * reads * FLOAT,
        multiply_adds=c.num_threads * c.head_dim * rows * cols,
        multiplications=c.num_threads * rows * cols,
    )


def _row_max(rows: int, cols: int, lane_cols: int, c: TileConfig) -> Counts:
    steps = int(log2(lane_cols))
    return Counts(
        maxima=c.num_threads * rows * (cols - 1 + steps),
        shuffles=c.num_warps * rows * steps,
    )


def _exponentiate(rows: int, cols: int, lane_cols: int, c: TileConfig) -> Counts:
    steps = int(log2(lane_cols))
    return Counts(
        special_calls=c.num_threads * rows * cols,
        additions=c.num_threads * rows * (2 * cols + steps),
        shuffles=c.num_warps * rows * steps,
    )


def products(rows: int, keys: int, cols: int, lanes: tuple[int, int], c: TileConfig) -> Counts:
    """`accumulate_values`: each weight comes by a shuffle, each element of V from its tile."""
    steps = lanes[1] * keys
    return Counts(
        shuffles=c.num_warps * steps * rows,
        shared_load_requests=c.num_warps * steps * cols,
        shared_load_bytes=c.num_threads * steps * cols * FLOAT,
        multiply_adds=c.num_threads * steps * rows * cols,
    )


def _sliced_k_scores(c: TileConfig) -> Counts:
    """S of every warp's keys; the maxima of its rows cross the warps."""
    lane_cols = SLICED_K_LANES[1]
    rows, cols, _ = c.sliced_k_elements
    reads = c.num_warps * rows
    return (
        scores(rows, cols, c)
        + _row_max(rows, cols, lane_cols, c)
        + _to_warps_rows(c)
        + Counts(
            shared_load_requests=c.num_warps * reads,
            shared_load_bytes=c.num_threads * reads * FLOAT,
            maxima=c.num_threads * rows * (c.num_warps - 1),
        )
        + _exponentiate(rows, cols, lane_cols, c)
    )


def _to_warps_rows(c: TileConfig) -> Counts:
    """One number a row from each warp, by one lane a row."""
    return Counts(
        shared_store_requests=c.num_warps * c.sliced_k_elements[0],
        shared_store_bytes=c.num_warps * c.block_m * FLOAT,
    )


def _partials(c: TileConfig) -> Counts:
    """`store_partial` of all exchanges, with the two barriers of each."""
    rows, keys, cols = c.sliced_k_elements
    one = products(rows, keys, cols, SLICED_K_LANES, c) + Counts(
        barriers=2,
        shared_store_requests=c.num_warps * rows * cols,
        shared_store_bytes=c.num_threads * rows * cols * FLOAT,
    )
    return c.head_dim // EXCHANGE_COLS * one


def _owned(rows: int, p: Problem) -> tuple[int, int]:
    """Elements of O, and requests for them by warps that own 16 columns of 2 rows."""
    return rows * p.head_dim, ceil(rows / OWNED_ROWS) * ceil(p.head_dim / EXCHANGE_COLS)


# Requests for HBM


def _owned_in_hbm(rows: int, p: Problem, itemsize: int) -> Requests:
    elements, requests = _owned(rows, p)
    sectors = (
        rows * ceil(p.head_dim / EXCHANGE_COLS) * ceil(EXCHANGE_COLS * itemsize / SECTOR_BYTES)
    )
    return requests, elements * itemsize, sectors


def scattered(rows: int, cols: int, itemsize: int) -> Requests:
    """A tile whose elements lie in split-Q lanes: 4 rows x 8 columns a request."""
    lane_rows, lane_cols = SPLIT_Q_LANES
    pieces = ceil(cols / lane_cols)
    return ceil(rows / lane_rows) * pieces, rows * cols * itemsize, rows * pieces
