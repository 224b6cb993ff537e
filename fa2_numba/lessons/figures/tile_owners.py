"""What warps do with a tile in sliced-K and in split-Q: who holds what, and what is exchanged.

Both come from runs. Who holds what is read off the registers: Q, K and V are chosen so that every
element of S and O has a value that tells its row and column. What a tile costs is a run over two
tiles of keys less a run over one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fa2_numba.config import EXCHANGE_COLS, TileConfig
from fa2_numba.constants import WARP_SIZE
from fa2_numba.kernels import fa2_seq_parallel, fa2_split_q
from fa2_numba.launch import ForwardTensors
from fa2_numba.simulator import Report, simulate
from fa2_numba.simulator.stepper import Stepper
from fa2_numba.testing import random_qkv

CONFIG = TileConfig(head_dim=EXCHANGE_COLS, block_m=32, block_n=32, num_warps=4)
"""The smallest tiles that four warps share both ways and a figure can show; partial O crosses the
warps in one exchange."""
SLICED_K, SPLIT_Q = "sliced-K", "split-Q"
RUNGS = {SLICED_K: fa2_seq_parallel, SPLIT_Q: fa2_split_q}

TILES, PARTIAL, STATISTICS = "Q, K, V tiles", "partial O", "m and its factor"
KINDS = TILES, PARTIAL, STATISTICS
PURPOSES = {
    "load_q_tile(": (TILES, None),
    "load_kv_tile(": (TILES, None),
    "compute_scores(": (None, TILES),
    "accumulate_values(": (None, TILES),
    "store_partial(": (PARTIAL, TILES),
    # It reads the factor of each row of O, too.
    "update_output(": (None, PARTIAL),
    "= max_across(": (None, STATISTICS),
    "max_lane[": (STATISTICS, None),
    "scale_lane[": (STATISTICS, None),
    "sum_lane[": (STATISTICS, None),
    "store_output(": (None, STATISTICS),
}
"""Statement of a kernel -> what it writes to shared memory, and what it reads there."""

HIDDEN_SCORE = -1000.0
"""So far below the maximum, 0, that the weight is 0 in float32."""
ROW_CODES = 64


@dataclass(frozen=True)
class Owners:
    """Which warp's registers hold what of one visited tile.

    S (BLOCK_M, BLOCK_N), O (BLOCK_M, HEAD_DIM): number of the warp that holds the element.
    parts (warps, BLOCK_M, HEAD_DIM): whether a warp holds a part of an element of O = P V that it
    has to add to those of others; none does in split-Q.
    """

    S: np.ndarray
    O: np.ndarray
    parts: np.ndarray


@dataclass(frozen=True)
class TileCost:
    """What one more visited tile costs a block: bytes of shared memory by purpose, and barriers."""

    written: Mapping[str, int]
    read: Mapping[str, int]
    barriers: int


def launched(partition: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple:
    """A simulated launch of the partition's rung in tiles of CONFIG, scale 1, and its arguments.

    q (1, BLOCK_M, 1, HEAD_DIM), k and v (1, keys, 1, HEAD_DIM) float32.
    """
    out, lse = np.full_like(q, np.nan), np.full((1, 1, q.shape[1]), np.nan, np.float32)
    # No workspace is asked for.
    tensors = ForwardTensors(q, k, v, out, lse, np.float32(1.0), False, "float32", np.empty)
    (launch,) = RUNGS[partition].plan_forward(tensors, CONFIG)
    simulation = simulate(launch.kernel, progress=False)
    return simulation[launch.grid, launch.threads, 0, launch.shared_bytes], launch.arguments


def random_inputs(key_tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query tile and so many key tiles of ordinary numbers."""
    keys = key_tiles * CONFIG.block_n
    return random_qkv(1, CONFIG.block_m, keys, 1, 1, CONFIG.head_dim, np.float32)


@cache
def who_holds(partition: str) -> Owners:
    """Run one tile and look into the registers of all threads."""
    rows, keys, head_dim = CONFIG.block_m, CONFIG.block_n, CONFIG.head_dim
    scores = _registers(partition, _numbered_scores(), "if needs_mask(", "S_reg")
    S = _only_owner([_held(values, rows * keys) for values in scores])
    finished = "i_row = first_row + row" if partition == SPLIT_Q else "store_output(O_head"
    O = _only_owner(_held_output(partition, finished, "O_reg", keys))
    parts = np.zeros((CONFIG.num_warps, rows, head_dim), dtype=bool)
    if partition == SLICED_K:
        statement, slice_keys = "partial_lane = partial_smem", keys // CONFIG.num_warps
        parts = np.stack(_held_output(partition, statement, "partial_reg", slice_keys))
    return Owners(
        S.reshape(rows, keys), O.reshape(rows, head_dim), parts.reshape(-1, rows, head_dim)
    )


@cache
def tile_cost(partition: str) -> TileCost:
    """The report of a run over two key tiles less that of a run over one."""
    one, two = (_report(partition, tiles) for tiles in (1, 2))
    before, after = bytes_by_purpose(one), bytes_by_purpose(two)
    written, read = (
        {purpose: after[purpose][way] - before[purpose][way] for purpose in KINDS} for way in (0, 1)
    )
    return TileCost(written, read, two.barriers - one.barriers)


def bytes_by_purpose(report: Report) -> dict[str, tuple[int, int]]:
    """Purpose -> bytes written to shared memory and read from it, by the statement of each line."""
    moved = {purpose: [0, 0] for purpose in KINDS}
    for line in report.lines:
        both = line.traffic.shared_store_bytes, line.traffic.shared_load_bytes
        if not any(both):
            continue
        named = [purposes for statement, purposes in PURPOSES.items() if statement in line.text]
        if len(named) != 1:
            raise ValueError(f"line {line.text!r}: must have one statement of PURPOSES")
        for way, (purpose, size) in enumerate(zip(named[0], both, strict=True)):
            if size and purpose is None:
                raise ValueError(f"line {line.text!r}: PURPOSES must say what it moves")
            if size:
                moved[purpose][way] += size
    return {purpose: tuple(sizes) for purpose, sizes in moved.items()}


def _report(partition: str, key_tiles: int) -> Report:
    simulation, arguments = launched(partition, *random_inputs(key_tiles))
    return simulation(*arguments)


# Inputs whose products tell their places


def _numbered_scores() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S[i, j] = BLOCK_N i + j: row i of Q is (i, 1, 0, ...), row j of K is (BLOCK_N, j, 0, ...)."""
    q, k, v = (np.zeros_like(array) for array in random_inputs(1))
    q[0, :, 0, 0], q[0, :, 0, 1] = np.arange(CONFIG.block_m), 1
    k[0, :, 0, 0], k[0, :, 0, 1] = CONFIG.block_n, np.arange(CONFIG.block_n)
    return q, k, v


def _numbered_output() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(P V)[i, d] = (i + 1) (1 + ROW_CODES d) from any 8 keys in a row, and so much from each 8.

    Row i sees, of every 8 keys, those whose bits the number i + 1 has; key j weighs 2^(j % 8).
    """
    q, k, v = (np.zeros_like(array) for array in random_inputs(1))
    bits, keys = np.arange(8), np.arange(CONFIG.block_n)
    codes = 1 + np.arange(CONFIG.block_m)
    q[0, :, 0, :8] = np.where(codes[:, None] >> bits & 1, 0.0, HIDDEN_SCORE)
    k[0, keys, 0, keys % 8] = 1
    v[0, :, 0] = 2.0 ** (keys[:, None] % 8) * (1 + ROW_CODES * np.arange(CONFIG.head_dim))
    return q, k, v


def _place_in_output(values: np.ndarray, keys: int) -> np.ndarray:
    """Number of the element of O that has such a value, summed over `keys` keys."""
    values = values / (keys // 8)
    row_code = values % ROW_CODES
    return (row_code - 1) * CONFIG.head_dim + (values / row_code - 1) / ROW_CODES


def _registers(partition: str, inputs: tuple, statement: str, name: str) -> list[np.ndarray]:
    """What the threads of each warp have in a local array when all stand before a statement."""
    simulation, arguments = launched(partition, *inputs)
    with Stepper(simulation, *arguments) as stepper:
        stepper.all_to_line(statement)
        held = [
            stepper.frames(thread)[0].variables[name].compressed()
            for thread in range(CONFIG.num_threads)
        ]
    return [np.concatenate(held[i : i + WARP_SIZE]) for i in range(0, len(held), WARP_SIZE)]


def _held_output(partition: str, statement: str, name: str, keys: int) -> list[np.ndarray]:
    size = CONFIG.block_m * CONFIG.head_dim
    return [
        _held(_place_in_output(values, keys), size)
        for values in _registers(partition, _numbered_output(), statement, name)
    ]


def _held(places: np.ndarray, size: int) -> np.ndarray:
    """Which of `size` elements these are; each may be there once."""
    numbers = places.astype(int)
    counts = np.bincount(numbers, minlength=size)
    if (numbers != places).any() or len(counts) != size or counts.max() > 1:
        raise ValueError("registers: must hold elements of the tile, each of them once")
    return counts == 1


def _only_owner(held: Sequence[np.ndarray]) -> np.ndarray:
    """Number of the one warp that holds each element."""
    if (np.sum(held, axis=0) != 1).any():
        raise ValueError("registers: every element must be in those of one warp")
    return np.argmax(held, axis=0)
