"""What each CUDA-core rung does, in closed form: the numbers that the simulator counts.

A rung's formula is put together like the rung itself, from one function for each verb of `device/`.
The leading terms stand in the docstring of each rung's kernel. Tests compare all of it with what
the simulator counts, number by number. Numbers of sectors take for granted that rows start where a
sector does: seqlen_q and seqlen_k are multiples of 8, head_dim of 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

OWNED_ROWS = WARP_SIZE // EXCHANGE_COLS
"""Rows whose elements the threads of one warp sum at a time."""

FLOAT = 4
"""Bytes of a float32: what tiles, statistics and workspaces are made of."""


@dataclass(frozen=True)
class _QueryTile:
    """Rows of one query tile, those of them that see a key, and what they visit of K and V."""

    rows: int
    seeing: int
    visits: int
    keys: int


def predict(rung: str, problem: Problem, config: TileConfig) -> Counts:
    """What a CUDA-core rung does on a problem, with the tiles of `config`, all launches together.

    Raises ArgumentError if there is no formula for the rung, or if no launch could be like this.
    """
    if rung not in _HEAD:
        raise ArgumentError(f"rung={rung!r}: must be one of {', '.join(_HEAD)}")
    if not config.head_dim - HEAD_DIM_STEP < problem.head_dim <= config.head_dim:
        rule = f"must be that of the tiles, {config.head_dim}, or up to {HEAD_DIM_STEP - 1} less"
        raise ArgumentError(f"head_dim={problem.head_dim}: {rule}")
    return problem.batch * problem.heads * _HEAD[rung](problem, config)


def _standard(p: Problem, c: TileConfig) -> Counts:
    lanes = SPLIT_Q_LANES
    rows, cols, out_cols = c.split_q_elements
    total = _softmax_rows(p)
    for tile, tiles in _alike(_query_tiles(p, c, skip=False)):
        total += tiles * _stored(_scattered(tile.rows, p.head_dim, p.itemsize))
        for keys, key_tiles in _alike(_key_tiles(p, c)):
            S_tile = _scattered(tile.rows, keys, FLOAT)
            scores = _load(tile.rows, c.block_m, p, c) + _load(keys, c.block_n, p, c)
            scores += Counts(barriers=1) + _scores(rows, cols, c) + _stored(S_tile)
            values = _load(keys, c.block_n, p, c) + Counts(barriers=2) + _loaded(S_tile)
            values += _products(rows, cols, out_cols, lanes, c)
            total += tiles * key_tiles * (scores + values)
    return total


def _softmax_rows(p: Problem) -> Counts:
    """The second kernel: a warp takes a row, reads it three times and writes it once."""
    steps = int(log2(WARP_SIZE))
    pieces, sectors = ceil(p.seqlen_k / WARP_SIZE), ceil(p.seqlen_k * FLOAT / SECTOR_BYTES)
    row = 3 * _loaded((pieces, p.seqlen_k * FLOAT, sectors))
    row += _stored((pieces, p.seqlen_k * FLOAT, sectors)) + _stored((1, FLOAT, 1))
    row += Counts(
        shuffles=2 * steps,
        maxima=p.seqlen_k + steps * WARP_SIZE,
        additions=3 * p.seqlen_k + steps * WARP_SIZE,
        special_calls=2 * p.seqlen_k,
    )
    seeing = Counts(divisions=p.seqlen_k, special_calls=1, additions=1)
    return p.seqlen_q * row + _seeing(p, p.seqlen_q) * seeing


def _fa1_sliced_k(p: Problem, c: TileConfig) -> Counts:
    total = Counts()
    for keys, key_tiles in _alike(_key_tiles(p, c)):
        total += key_tiles * 2 * _load(keys, c.block_n, p, c)
    last = ceil(p.seqlen_k / c.block_n) - 1
    passes = _alike((number == 0, number == last) for number in range(last + 1))
    for tile, tiles in _alike(_query_tiles(p, c, skip=False)):
        for (is_first, is_last), times in passes:
            one = _load(tile.rows, c.block_m, p, c) + Counts(barriers=3)
            one += _sliced_k_scores(c) + _to_warps_rows(c) + _partials(c)
            one += _fa1_statistics(tile, c, is_first, is_last)
            one += _fa1_output(tile, p, c, is_first, is_last)
            total += tiles * times * one
    return total


def _fa1_statistics(tile: _QueryTile, c: TileConfig, first: bool, last: bool) -> Counts:
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
    done += (0 if first else 2) * _loaded(rows) + (3 if last else 2) * _stored(rows)
    return done + last * Counts(special_calls=tile.seeing, additions=tile.seeing)


def _fa1_output(tile: _QueryTile, p: Problem, c: TileConfig, first: bool, last: bool) -> Counts:
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
    done += later * _loaded(O_acc) + _stored(O_acc)
    return done + last * _stored(_owned_in_hbm(tile.rows, p, p.itemsize))


def _fa2_fewer_flops(p: Problem, c: TileConfig) -> Counts:
    tiles = list(_query_tiles(p, c))
    # The barrier between one query tile and the next.
    return sum((_sliced_k_tile(tile, p, c) for tile in tiles), Counts(barriers=len(tiles)))


def _fa2_seq_parallel(p: Problem, c: TileConfig) -> Counts:
    return sum((_sliced_k_tile(tile, p, c) for tile in _query_tiles(p, c)), Counts())


def _sliced_k_tile(tile: _QueryTile, p: Problem, c: TileConfig) -> Counts:
    visit = Counts(barriers=2) + _sliced_k_scores(c) + _rescaled_statistics(c)
    visit += _partials(c) + _rescaled_output(c)
    total = _load(tile.rows, c.block_m, p, c) + 2 * _load(tile.keys, tile.visits * c.block_n, p, c)
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


def _sliced_k_epilogue(tile: _QueryTile, p: Problem, c: TileConfig) -> Counts:
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
    done += _stored(_owned_in_hbm(tile.rows, p, p.itemsize))
    return done + _stored((groups, tile.rows * FLOAT, groups))


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
    visit += _scores(rows, cols, c) + _row_max(rows, cols, lane_cols, c)
    visit += _exponentiate(rows, cols, lane_cols, c)
    visit += _products(rows, cols, out_cols, SPLIT_Q_LANES, c)
    total = Counts()
    for tile in _query_tiles(p, c):
        groups = ceil(tile.rows / SPLIT_Q_LANES[0])
        total += _load(tile.rows, c.block_m, p, c)
        total += 2 * _load(tile.keys, tile.visits * c.block_n, p, c) + tile.visits * visit
        total += _stored(_scattered(tile.rows, p.head_dim, p.itemsize))
        total += _stored((groups, tile.rows * FLOAT, groups))
        total += Counts(
            divisions=lane_cols * tile.seeing,
            multiplications=tile.rows * p.head_dim,
            special_calls=tile.seeing,
            additions=tile.seeing,
        )
    return total


_HEAD: dict[str, Callable[[Problem, TileConfig], Counts]] = {
    "standard": _standard,
    "fa1_sliced_k": _fa1_sliced_k,
    "fa2_fewer_flops": _fa2_fewer_flops,
    "fa2_seq_parallel": _fa2_seq_parallel,
    "fa2_split_q": _fa2_split_q,
}
"""Rung id -> what it does for one head."""


# Tiles


def _query_tiles(p: Problem, c: TileConfig, skip: bool = True) -> Iterator[_QueryTile]:
    """The query tiles; with `skip`, key tiles that a causal mask hides whole are not visited."""
    for first_row in range(0, p.seqlen_q, c.block_m):
        end = min(first_row + c.block_m, p.seqlen_q)
        keys = p.seqlen_k
        if p.causal and skip:
            keys = max(0, min(p.seqlen_k, end + p.seqlen_k - p.seqlen_q))
        visits = ceil(keys / c.block_n)
        seeing = _seeing(p, end) - _seeing(p, first_row)
        yield _QueryTile(end - first_row, seeing, visits, min(visits * c.block_n, p.seqlen_k))


def _alike(items: Iterable[object]) -> list[tuple[object, int]]:
    """Each different item, and how often it comes."""
    return list(Counter(items).items())


def _seeing(p: Problem, end: int) -> int:
    """How many of the first `end` queries see a key."""
    blind = max(0, p.seqlen_q - p.seqlen_k) if p.causal else 0
    return max(0, end - blind)


def _key_tiles(p: Problem, c: TileConfig) -> Iterator[int]:
    """Keys of each key tile."""
    for first_col in range(0, p.seqlen_k, c.block_n):
        yield min(c.block_n, p.seqlen_k - first_col)


# Verbs of device/


def _load(rows: int, tile_rows: int, p: Problem, c: TileConfig) -> Counts:
    """`load_tile`: a warp reads a row at a time, 32 columns a request, and stores a padded row."""
    row = (ceil(p.head_dim / WARP_SIZE), p.head_dim * p.itemsize)
    sectors = ceil(p.head_dim * p.itemsize / SECTOR_BYTES)
    return rows * _loaded((*row, sectors)) + Counts(
        shared_store_requests=tile_rows * ceil(c.head_dim / WARP_SIZE),
        shared_store_bytes=tile_rows * c.head_dim * FLOAT,
    )


def _scores(rows: int, cols: int, c: TileConfig) -> Counts:
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


def _products(rows: int, keys: int, cols: int, lanes: tuple[int, int], c: TileConfig) -> Counts:
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
        _scores(rows, cols, c)
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
    one = _products(rows, keys, cols, SLICED_K_LANES, c) + Counts(
        barriers=2,
        shared_store_requests=c.num_warps * rows * cols,
        shared_store_bytes=c.num_threads * rows * cols * FLOAT,
    )
    return c.head_dim // EXCHANGE_COLS * one


def _owned(rows: int, p: Problem) -> tuple[int, int]:
    """Elements of O, and requests for them by warps that own 16 columns of 2 rows."""
    return rows * p.head_dim, ceil(rows / OWNED_ROWS) * ceil(p.head_dim / EXCHANGE_COLS)


# Requests for HBM

Requests = tuple[int, int, int]
"""How many, bytes, sectors."""


def _owned_in_hbm(rows: int, p: Problem, itemsize: int) -> Requests:
    elements, requests = _owned(rows, p)
    sectors = (
        rows * ceil(p.head_dim / EXCHANGE_COLS) * ceil(EXCHANGE_COLS * itemsize / SECTOR_BYTES)
    )
    return requests, elements * itemsize, sectors


def _scattered(rows: int, cols: int, itemsize: int) -> Requests:
    """A tile whose elements lie in split-Q lanes: 4 rows x 8 columns a request."""
    lane_rows, lane_cols = SPLIT_Q_LANES
    pieces = ceil(cols / lane_cols)
    return ceil(rows / lane_rows) * pieces, rows * cols * itemsize, rows * pieces


def _loaded(requests: Requests) -> Counts:
    return Counts(**dict(zip(_LOAD, requests, strict=True)))


def _stored(requests: Requests) -> Counts:
    return Counts(**dict(zip(_STORE, requests, strict=True)))


_LOAD = ("global_load_requests", "global_load_bytes", "global_load_sectors")
_STORE = ("global_store_requests", "global_store_bytes", "global_store_sectors")
