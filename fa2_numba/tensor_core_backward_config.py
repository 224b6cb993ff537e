"""Tile configurations of `fa2_tensor_core`'s backward pass: frozen, validated, for a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from fa2_numba.config import MAX_WARPS, DeviceLimits, require
from fa2_numba.constants import MAX_HEAD_DIM, WARP_SIZE
from fa2_numba.errors import ArgumentError
from fa2_numba.tensor_core_config import (
    AMPERE,
    ELEMENT_BYTES,
    FRAGMENT_ROWS,
    SwizzledRows,
    TensorCoreConfig,
)

FLOAT_BYTES = 4

QUERY_HALVES = 2
"""For dQ the warps split the queries of a tile in halves, and the columns among the rest."""

TILES = {
    32: ((64, 128, 4, 4, 32, 2), (64, 64, 4, 4, 32, 1)),
    64: ((64, 128, 4, 4, 32, 2), (64, 64, 4, 4, 32, 1), (32, 64, 4, 4, 32, 1)),
    128: ((64, 128, 8, 4, 32, 2), (64, 64, 8, 4, 32, 1), (32, 64, 8, 4, 16, 1)),
    256: ((64, 64, 8, 2, 16, 2), (64, 64, 8, 2, 16, 1), (32, 32, 4, 2, 16, 1)),
}
"""padded_dim -> block_m, block_n, num_warps, key_warps, query_step and stages, the best first."""


@dataclass(frozen=True)
class ScoreRows(SwizzledRows):
    """Rows of P^T and dS^T: a key's, with a column for each query of a tile."""

    padded_dim: int


@dataclass(frozen=True)
class BackwardConfig(SwizzledRows):
    """Tiles of a tensor-core backward kernel, whose thread blocks own keys.

    head_dim: that of the arrays; tiles pad it to `padded_dim`. block_m, block_n: rows of a tile of
    queries, and of keys and values. num_warps: warps of a thread block. key_warps: into so many
    parts they split the keys; those with the same keys split the queries of S^T and dP^T, and the
    columns of dK and dV. query_step: queries whose S^T and dP^T a warp holds at a time.
    stages: 2 if the next tiles of Q and dO are loaded while these are in use, else 1.
    turing: only what compute capability 7.5 has, as in `TensorCoreConfig`.
    """

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    key_warps: int
    query_step: int
    stages: int = 2
    turing: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind, rule = (bool, "True or False") if field.name == "turing" else _INTEGER
            require(field.name, value, isinstance(value, kind), rule)
        require("head_dim", self.head_dim, 1 <= self.head_dim <= MAX_HEAD_DIM, "1 to 256")
        require("block_m", self.block_m, self.block_m in (32, 64), "32 or 64: one swizzled line")
        warps = self.num_warps
        legal = warps in (2, 4, MAX_WARPS) and self.query_gradient[1] >= FRAGMENT_ROWS
        require("num_warps", warps, legal, "2, 4 or 8, and at most padded_dim / 8")
        keys = self.key_warps
        legal = keys > 0 and warps % keys == 0
        legal = legal and self.padded_dim // (warps // keys) >= self.line_cols
        require("key_warps", keys, legal, "a divisor that leaves each warp whole lines of columns")
        step = FRAGMENT_ROWS * keys
        legal = self.block_n > 0 and self.block_n % step == 0
        rule = f"a positive multiple of {FRAGMENT_ROWS} x key_warps"
        require("block_n", self.block_n, legal, rule)
        legal = self.query_step in (16, 32, 64) and self.queries_of_a_warp % self.query_step == 0
        require("query_step", self.query_step, legal, "16, 32 or 64, a divisor of a warp's queries")
        require("stages", self.stages, self.stages in (1, 2), "1 or 2")

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return WARP_SIZE * self.num_warps

    @property
    def padded_dim(self) -> int:
        """Columns of a tile: the head dim and zeros, 32, 64, 128 or 256."""
        return next(size for size in TILES if size >= self.head_dim)

    @property
    def keeps_queries(self) -> bool:
        """Never: what stays in a lane's registers here is its part of dK and dV."""
        return False

    @property
    def query_warps(self) -> int:
        """Warps that have the same keys."""
        return self.num_warps // self.key_warps

    @property
    def queries_of_a_warp(self) -> int:
        """Queries of a tile whose S^T and dP^T one warp computes."""
        return self.block_m // self.query_warps

    @property
    def keys_of_a_warp(self) -> int:
        """Keys of a tile of which one warp has S^T, dP^T and its columns of dK and dV."""
        return self.block_n // self.key_warps

    @property
    def score_rows(self) -> ScoreRows:
        """How P^T and dS^T lie in shared memory."""
        return ScoreRows(self.block_m)

    @property
    def elements(self) -> tuple[int, int, int]:
        """What a lane owns: rows of S^T and dK, columns of S^T at a time, columns of dK."""
        rows = self.keys_of_a_warp // 8
        return rows, self.query_step // 4, self.padded_dim // self.query_warps // 4

    @property
    def query_gradient(self) -> tuple[int, int]:
        """Rows and columns of a tile of dQ that one warp computes."""
        return self.block_m // QUERY_HALVES, self.padded_dim * QUERY_HALVES // self.num_warps

    @property
    def query_elements(self) -> tuple[int, int]:
        """Rows and columns of a tile of dQ that a lane computes."""
        rows, cols = self.query_gradient
        return rows // 8, cols // 4

    @property
    def stage_bytes(self) -> int:
        """A tile of Q, one of dO, and the log-sum-exp and D of their rows."""
        return 2 * self.block_m * (self.row_bytes + FLOAT_BYTES)

    @property
    def score_bytes(self) -> int:
        """P^T or dS^T of a pair of tiles."""
        return self.block_n * ELEMENT_BYTES * self.block_m

    @property
    def shared_bytes(self) -> int:
        """K, V, the stages, P^T, dS^T."""
        tiles = 2 * self.block_n * self.row_bytes + self.stages * self.stage_bytes
        return tiles + 2 * self.score_bytes

    @property
    def query_parallel(self) -> TensorCoreConfig:
        """Tiles of the kernel that computes dQ alone, in a fixed order."""
        block_n = 64 if self.stages == 2 else 32
        return TensorCoreConfig(self.head_dim, 64, block_n, 4, self.turing)

    @property
    def query_parallel_shared_bytes(self) -> int:
        """Shared memory of that kernel: the tiles of Q, dO, K and V."""
        tiles = self.query_parallel
        return 2 * (tiles.block_m + tiles.block_n) * tiles.row_bytes

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory of the kernel that needs most."""
        return max(self.shared_bytes, self.query_parallel_shared_bytes)

    def __str__(self) -> str:
        turing = "_sm75" if self.turing else ""
        warps = f"w{self.key_warps}x{self.query_warps}"
        return f"d{self.head_dim}_m{self.block_m}_n{self.block_n}_{warps}{turing}"


_INTEGER = (Integral, "an integer")


def choose_backward_tiles(head_dim: int, limits: DeviceLimits) -> BackwardConfig:
    """The tiles of `fa2_tensor_core`'s backward pass: the best of `TILES` that fit the device."""
    turing = limits.compute_capability < AMPERE
    padded = next(size for size in TILES if size >= head_dim)
    candidates = [BackwardConfig(head_dim, *sizes, turing) for sizes in TILES[padded]]
    for config in candidates:
        if config.most_shared_bytes <= limits.shared_bytes_per_block:
            return config
    smallest = candidates[-1]
    raise ArgumentError(
        f"head_dim={head_dim}: the smallest tiles need {smallest.most_shared_bytes} bytes of "
        f"shared memory, the device has {limits.shared_bytes_per_block}; use another rung"
    )
