"""Tile configurations: frozen, validated when made, and chosen from the device's own limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from operator import attrgetter

from fa2_numba.constants import MAX_HEAD_DIM, WARP_SIZE

HEAD_DIM_STEP = 16
"""Tiles pad the head dim to a multiple of this; the loads fill the rest with zeros."""

EXCHANGE_COLS = 16
"""Columns of O that sliced-K warps sum through shared memory at a time."""

MAX_WARPS = 8
BACKWARD_WARPS = (4, 2)
"""Warps of a block of a CUDA-core backward pass, the first number with which it fits."""

RESERVED_SHARED_BYTES = 1024
"""What CUDA keeps of a multiprocessor's shared memory for each block that runs on it.

A multiprocessor has so much more than one block may ask for. (A T4 keeps nothing and has no more.)
"""

# Lanes of a warp as rows x columns of its score tile; together 32.
SPLIT_Q_LANES = (4, 8)
SLICED_K_LANES = (8, 4)


@dataclass(frozen=True)
class DeviceLimits:
    """What a device lets a kernel use: its compute capability, opt-in shared bytes of a block.

    multiprocessors: how many blocks of one each run at once; the simulator's device has one.
    """

    compute_capability: tuple[int, int]
    shared_bytes_per_block: int
    multiprocessors: int = 1


def row_step(num_warps: int) -> int:
    """The fewest query rows that give every lane of both layouts whole rows; block_m's divisor."""
    return math.lcm(SPLIT_Q_LANES[0] * num_warps, SLICED_K_LANES[0])


def col_step(num_warps: int) -> int:
    """The fewest keys that give every lane of both layouts whole columns; block_n's divisor."""
    return math.lcm(SLICED_K_LANES[1] * num_warps, SPLIT_Q_LANES[1])


@dataclass(frozen=True)
class TileConfig:
    """The geometry of one kernel: what a thread block keeps on chip and how many warps share it.

    head_dim: columns of a tile, the padded head dim: a multiple of 16, at most 256.
    block_m: query rows of a tile (the paper's B_r).
    block_n: key rows of a tile (the paper's B_c).
    num_warps: warps of a thread block, 1 to 8.
    """

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(field.name, value, isinstance(value, Integral), "an integer")
        require("num_warps", self.num_warps, 1 <= self.num_warps <= MAX_WARPS, "1 to 8")
        require(
            "head_dim",
            self.head_dim,
            0 < self.head_dim <= MAX_HEAD_DIM and self.head_dim % HEAD_DIM_STEP == 0,
            f"a positive multiple of {HEAD_DIM_STEP}, at most {MAX_HEAD_DIM}",
        )
        require(
            "block_m",
            self.block_m,
            self.block_m > 0 and self.block_m % row_step(self.num_warps) == 0,
            f"a positive multiple of {SLICED_K_LANES[0]} and of {SPLIT_Q_LANES[0]} x num_warps",
        )
        require(
            "block_n",
            self.block_n,
            self.block_n > 0 and self.block_n % col_step(self.num_warps) == 0,
            f"a positive multiple of {SPLIT_Q_LANES[1]} and of {SLICED_K_LANES[1]} x num_warps",
        )

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return WARP_SIZE * self.num_warps

    @property
    def split_q_elements(self) -> tuple[int, int, int]:
        """What a split-Q lane owns: rows of S and O, columns of S, columns of O."""
        lane_rows, lane_cols = SPLIT_Q_LANES
        rows = self.block_m // self.num_warps // lane_rows
        return rows, self.block_n // lane_cols, self.head_dim // lane_cols

    @property
    def sliced_k_elements(self) -> tuple[int, int, int]:
        """What a sliced-K lane owns: rows of S and O, columns of S, columns of an exchange."""
        lane_rows, lane_cols = SLICED_K_LANES
        cols = self.block_n // self.num_warps // lane_cols
        return self.block_m // lane_rows, cols, EXCHANGE_COLS // lane_cols

    @property
    def owned_elements(self) -> tuple[int, int, int]:
        """What a sliced-K thread sums over the warps: rows of O, columns, steps between its rows.

        It sums one column of every exchange, neighbouring threads neighbouring columns.
        """
        row_step = self.num_threads // EXCHANGE_COLS
        return self.block_m // row_step, self.head_dim // EXCHANGE_COLS, row_step

    @property
    def row_stride(self) -> int:
        """Elements from one row of a Q or K tile to the next.

        One more than a row: threads that read one column of neighbouring rows then hit different
        shared-memory banks (32 banks of 4 bytes).
        """
        return self.head_dim + 1

    @property
    def split_q_shared_bytes(self) -> int:
        """Shared memory of a split-Q kernel: the Q, K and V tiles in float32."""
        q_and_k = (self.block_m + self.block_n) * self.row_stride
        return 4 * (q_and_k + self.block_n * self.head_dim)

    @property
    def transposed(self) -> TileConfig:
        """The same tiles with queries and keys swapped: in it, split-Q warps own rows of keys."""
        return TileConfig(self.head_dim, self.block_n, self.block_m, self.num_warps)

    @property
    def ds_stride(self) -> int:
        """Elements from one key of a backward pass's dS tile to the next.

        So many more than it holds queries: eight keys of four neighbouring queries, which a warp
        reads at once, then lie in 32 different banks.
        """
        return self.block_m + SPLIT_Q_LANES[0]

    @property
    def query_parallel_shared_bytes(self) -> int:
        """Shared memory of a backward kernel that keeps dS in registers: Q, dO, K and V tiles."""
        return 4 * 2 * (self.block_m + self.block_n) * self.row_stride

    @property
    def backward_shared_bytes(self) -> int:
        """Shared memory of a backward kernel: the Q, dO, K and V tiles and the dS tile."""
        return self.query_parallel_shared_bytes + 4 * self.block_n * self.ds_stride

    @property
    def sliced_k_shared_bytes(self) -> int:
        """Shared memory of a sliced-K kernel: split-Q's tiles, partial O, row statistics.

        The statistics are a maximum and a sum a row and warp, and two factors a row; rungs that
        rescale by one factor leave the room of the other empty, so that all ask for the same.
        """
        partial_o = self.num_warps * self.block_m * EXCHANGE_COLS
        statistics = 2 * self.num_warps * self.block_m + 2 * self.block_m
        return self.split_q_shared_bytes + 4 * (partial_o + statistics)

    def __str__(self) -> str:
        return f"d{self.head_dim}_m{self.block_m}_n{self.block_n}_w{self.num_warps}"


def choose_tiles(head_dim: int, shared_bytes_limit: int, num_warps: int = 4) -> TileConfig:
    """The tiles that every CUDA-core rung uses for a head dim on a device.

    One choice for the whole ladder, so that neighbours differ in their idea alone: the largest
    tiles with which two blocks of the hungriest rung fit a multiprocessor, else the largest of
    which one fits. `shared_bytes_limit` is the device's opt-in shared memory of a block, in bytes.
    """
    shared_bytes = attrgetter("sliced_k_shared_bytes")
    return _largest_tiles(head_dim, shared_bytes_limit, (num_warps,), shared_bytes)


def choose_backward_tiles(head_dim: int, shared_bytes_limit: int) -> TileConfig:
    """The tiles of every CUDA-core backward pass, as `choose_tiles` chooses those of the forward.

    Four warps, or two where their tiles, twice as many as in the forward pass, do not fit.
    """
    shared_bytes = attrgetter("backward_shared_bytes")
    return _largest_tiles(head_dim, shared_bytes_limit, BACKWARD_WARPS, shared_bytes)


def _largest_tiles(
    head_dim: int,
    shared_bytes_limit: int,
    warps: tuple[int, ...],
    shared_bytes: Callable[[TileConfig], int],
) -> TileConfig:
    """The largest tiles with which two blocks fit, else one; of the first number of warps."""
    for num_warps in warps:
        candidates = _candidates(-(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, num_warps)
        for blocks in (2, 1):
            limit = shared_bytes_limit - (blocks - 1) * RESERVED_SHARED_BYTES
            for config in candidates:
                if blocks * shared_bytes(config) <= limit:
                    return config
    raise ValueError(
        f"head_dim={head_dim}, num_warps={num_warps}: the smallest tiles need "
        f"{shared_bytes(candidates[-1])} bytes of shared memory, the device has "
        f"{shared_bytes_limit}"
    )


def _candidates(head_dim: int, num_warps: int) -> list[TileConfig]:
    """Legal tiles for so many warps, from about 64 x 64 down."""
    rows, cols = _halvings(row_step(num_warps)), _halvings(col_step(num_warps))
    configs = [TileConfig(head_dim, m, n, num_warps) for m in rows for n in cols]
    return sorted(configs, key=lambda c: (c.block_m * c.block_n, c.block_m), reverse=True)


def _halvings(step: int) -> list[int]:
    """`step` and its doubles up to 64."""
    return [step] + [step << k for k in range(1, 7) if step << k <= 64]


def require(field: str, value: object, holds: bool, rule: str) -> None:
    """Refuse a field's value with a message that names both and the rule."""
    if not holds:
        raise ValueError(f"{field}={value!r}: must be {rule}")
