"""Tile configurations of the tensor-core rungs: frozen, validated, chosen for a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from fa2_numba.config import MAX_WARPS, RESERVED_SHARED_BYTES, DeviceLimits, require
from fa2_numba.constants import MAX_HEAD_DIM, WARP_SIZE
from fa2_numba.errors import ArgumentError

CHUNK_BYTES = 16
"""What one lane copies, stores or points an `ldmatrix` to at once: 8 elements."""

ELEMENT_BYTES = 2

CHUNK_ELEMENTS = CHUNK_BYTES // ELEMENT_BYTES

VECTOR = 4
"""float32 numbers in 16 bytes."""

FRAGMENT_ROWS = 16
"""Rows and columns of a tile of A, and of two tiles of B; what `ldmatrix` x4 loads."""

AMPERE = (8, 0)
"""The first compute capability with asynchronous copies, `mma` of depth 16 and bfloat16."""

SLICED_K_TILES = (
    (32, 512, 8),
    (32, 256, 8),
    (16, 256, 8),
    (16, 128, 8),
    (16, 128, 4),
    (16, 64, 4),
    (16, 64, 2),
    (16, 32, 2),
)
"""block_m, block_n and num_warps of `fa1_tensor_core`, from the best down.

Many keys are best: what crosses the warps for a tile is a part of O from each, whatever the keys.
"""


class SwizzledRows:
    """How the rows of a tile of `padded_dim` 16-bit columns lie in shared memory."""

    padded_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a tile's row."""
        return ELEMENT_BYTES * self.padded_dim

    @property
    def line_chunks(self) -> int:
        """Chunks of a row within which the swizzle permutes: 8 where rows have so many, else 4."""
        return 8 if self.padded_dim % 64 == 0 else 4

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return CHUNK_BYTES * self.line_chunks

    @property
    def line_cols(self) -> int:
        """Elements of a line."""
        return self.line_bytes // ELEMENT_BYTES

    @property
    def num_lines(self) -> int:
        """Lines of a row."""
        return self.row_bytes // self.line_bytes

    @property
    def line_fragments(self) -> int:
        """Fragments of 16 columns in a line."""
        return self.line_chunks // 2


@dataclass(frozen=True)
class TensorCoreConfig(SwizzledRows):
    """Tiles of a tensor-core rung.

    head_dim: that of the arrays; tiles pad it to `padded_dim`. block_m, block_n: rows of a tile of
    queries, and of keys and values. num_warps: warps of a thread block, 2, 4, 6 or 8.
    turing: only what compute capability 7.5 has: `mma` of depth 8, no asynchronous copies, float16.
    sliced_k: the warps slice the keys (FlashAttention-1), not the queries.
    """

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int = 4
    turing: bool = False
    sliced_k: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("turing", "sliced_k"):
                require(field.name, value, isinstance(value, bool), "True or False")
            else:
                require(field.name, value, isinstance(value, Integral), "an integer")
        require("head_dim", self.head_dim, 1 <= self.head_dim <= MAX_HEAD_DIM, "1 to 256")
        # An even number of warps loads a multiple of 8 rows at a time, where the swizzle repeats.
        legal = 2 <= self.num_warps <= MAX_WARPS and self.num_warps % 2 == 0
        require("num_warps", self.num_warps, legal, "2, 4, 6 or 8")
        shares = {"block_m": 1 if self.sliced_k else self.num_warps}
        shares["block_n"] = self.num_warps if self.sliced_k else 1
        for name, share in shares.items():
            value, step = getattr(self, name), FRAGMENT_ROWS * share
            rule = f"a positive multiple of {FRAGMENT_ROWS}" + " x num_warps" * (share > 1)
            require(name, value, value > 0 and value % step == 0, rule)

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return WARP_SIZE * self.num_warps

    @property
    def padded_dim(self) -> int:
        """Columns of a tile: the head dim and zeros, a multiple of 32."""
        return -(-self.head_dim // 32) * 32

    @property
    def split_q_elements(self) -> tuple[int, int, int]:
        """What a lane owns: rows of S and O, columns of S, columns of O."""
        return self.block_m // self.num_warps // 8, self.block_n // 4, self.padded_dim // 4

    @property
    def split_q_shared_bytes(self) -> int:
        """Shared memory of a split-Q kernel: the Q, K and V tiles."""
        return (self.block_m + 2 * self.block_n) * self.row_bytes

    @property
    def sliced_k_elements(self) -> tuple[int, int, int]:
        """What a sliced-K lane owns: rows of S and O, columns of S, columns of its part of O."""
        return self.block_m // 8, self.block_n // self.num_warps // 4, self.padded_dim // 4

    @property
    def owned_rows(self) -> tuple[int, int]:
        """Rows of which a sliced-K thread sums VECTOR columns a line over the warps; their step."""
        step = self.num_threads * VECTOR // self.line_cols
        return -(-self.block_m // step), step

    @property
    def partial_stride(self) -> int:
        """float32 numbers from one row of the exchanged partial O to the next.

        8 more than a row has: the rows of a fragment, 8 of 8 numbers, then hit different banks.
        """
        return self.padded_dim + 8

    @property
    def partial_offset(self) -> int:
        """Bytes before the partial O: the K and V tile and two Q tiles."""
        return 2 * (self.block_m + self.block_n) * self.row_bytes

    @property
    def sliced_k_shared_bytes(self) -> int:
        """Shared memory of a sliced-K kernel: K, V, two Q tiles, partial O, row statistics."""
        return self.partial_offset + 4 * self.num_warps * self.block_m * (self.partial_stride + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the kernel that has this configuration."""
        return self.sliced_k_shared_bytes if self.sliced_k else self.split_q_shared_bytes

    @property
    def keeps_queries(self) -> bool:
        """Whether a lane has the registers to keep its part of Q, instead of loading it again."""
        return not self.sliced_k and self.padded_dim <= 64

    def __str__(self) -> str:
        turing = "_sm75" if self.turing else ""
        return f"d{self.head_dim}_m{self.block_m}_n{self.block_n}_w{self.num_warps}{turing}"


def choose_split_q_tiles(head_dim: int, limits: DeviceLimits) -> TensorCoreConfig:
    """The tiles of `fa2_tensor_core`: those that were fastest on an H200, smaller where they must.

    32 rows of O a warp where registers hold them, else 16; the most keys, 64 or 32, with which two
    blocks fit a multiprocessor, else with which one fits.
    """
    turing = limits.compute_capability < AMPERE
    block_m = 128 if head_dim <= 128 else 64
    candidates = [TensorCoreConfig(head_dim, block_m, n, 4, turing) for n in (64, 32)]
    return _first_that_fits(candidates, limits)


def choose_sliced_k_tiles(head_dim: int, limits: DeviceLimits) -> TensorCoreConfig:
    """The tiles of `fa1_tensor_core`: those that were fastest on an H200, smaller where they must.

    Its grid is one block a head, seldom more than a multiprocessor each: one that fits is enough.
    """
    turing = limits.compute_capability < AMPERE
    candidates = [
        TensorCoreConfig(head_dim, *sizes, turing, sliced_k=True) for sizes in SLICED_K_TILES
    ]
    return _first_that_fits(candidates, limits, most_blocks=1)


def _first_that_fits(
    candidates: list[TensorCoreConfig], limits: DeviceLimits, most_blocks: int = 2
) -> TensorCoreConfig:
    for blocks in range(most_blocks, 0, -1):
        room = limits.shared_bytes_per_block - (blocks - 1) * RESERVED_SHARED_BYTES
        for config in candidates:
            if blocks * config.shared_bytes <= room:
                return config
    smallest = candidates[-1]
    raise ArgumentError(
        f"head_dim={smallest.head_dim}: the smallest tiles need {smallest.shared_bytes} bytes of "
        f"shared memory, the device has {limits.shared_bytes_per_block}; use another rung"
    )
