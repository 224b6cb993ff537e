"""Tile configurations of `fa3_hopper`: frozen, validated, chosen for a head dim."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from numbers import Integral

from fa2_numba.config import DeviceLimits, require
from fa2_numba.constants import MAX_HEAD_DIM
from fa2_numba.device.mbarrier import MBARRIER_BYTES
from fa2_numba.device.warpgroups import WARPGROUP_SIZE
from fa2_numba.device.wgmma import EIGHT_ROWS_BYTES, LINE_BYTES, LINE_ELEMENTS, WGMMA_K, WGMMA_M
from fa2_numba.errors import ArgumentError

REGISTERS_PER_MULTIPROCESSOR = 65536
REGISTER_STEP = 8
MAX_REGISTERS = 256
"""Of a thread, as the hardware gives them out."""
MESSAGE_BYTES = 16
"""Of what the producer tells the consumers of a tile: its number in its head, and its head."""


@dataclass(frozen=True)
class Ring:
    """Stages in a block's shared memory, each with room for a tile and with two mbarriers.

    offset, barrier_offset: where stages and barriers begin, in bytes; readers: warps that read a
    stage, or other arrivals that empty it.
    """

    offset: int
    barrier_offset: int
    stage_bytes: int
    stages: int
    readers: int


@dataclass(frozen=True)
class HopperConfig:
    """Tiles and roles of a block: a producer warpgroup, and consumers of 64 query rows each.

    block_n: keys of a tile; num_consumers: 1 to 3; stages, q_stages: tiles of K and of V, and of Q,
    that shared memory holds; producer_registers, consumer_registers: of a thread, after the
    producer has given its own away; max_blocks: of a persistent grid, one a multiprocessor.

    What can be switched off, each to see what it is worth. overlap: the next S = Q K^T is issued
    before O += P V, so that the softmax runs beside products. ping_pong: consumers take turns in
    issuing products, so that the softmax of one runs beside those of another. lazy_rescale: O is
    rescaled only if a maximum grew much. persistent: a block goes on to the next tile, whose Q is
    loaded while the last one is computed.
    """

    head_dim: int
    block_n: int
    num_consumers: int
    stages: int
    q_stages: int
    producer_registers: int
    consumer_registers: int
    max_blocks: int = 1
    overlap: bool = True
    ping_pong: bool = True
    lazy_rescale: bool = True
    persistent: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                require(field.name, value, isinstance(value, bool), "True or False")
            else:
                require(field.name, value, isinstance(value, Integral), "an integer")
        require("head_dim", self.head_dim, 1 <= self.head_dim <= MAX_HEAD_DIM, "1 to 256")
        whole = self.block_n % WGMMA_K == 0 and WGMMA_K <= self.block_n <= 256
        require("block_n", self.block_n, whole, f"a multiple of {WGMMA_K} up to 256")
        require("num_consumers", self.num_consumers, 1 <= self.num_consumers <= 3, "1 to 3")
        for name in ("stages", "q_stages", "max_blocks"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("producer_registers", "consumer_registers"):
            value = getattr(self, name)
            legal = 24 <= value <= 256 and value % REGISTER_STEP == 0
            require(name, value, legal, f"a multiple of {REGISTER_STEP} from 24 to 256")
        given = self.launch_registers
        for name, legal, rule in (
            ("producer_registers", self.producer_registers <= given, f"at most {given}"),
            ("consumer_registers", self.consumer_registers >= given, f"at least {given}"),
        ):
            require(name, getattr(self, name), legal, f"{rule}, what a launch gives each thread")
        registers = self.producer_registers + self.num_consumers * self.consumer_registers
        most = (1 + self.num_consumers) * given
        rule = f"such that producer and consumers together have at most {most} at a time"
        require("consumer_registers", self.consumer_registers, registers <= most, rule)

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return WGMMA_M * self.num_consumers

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP_SIZE * (1 + self.num_consumers)

    @property
    def launch_registers(self) -> int:
        """Registers of a thread when the kernel begins: as many as there are for all threads."""
        each = REGISTERS_PER_MULTIPROCESSOR // self.num_threads // REGISTER_STEP * REGISTER_STEP
        return min(each, MAX_REGISTERS)

    @property
    def pieces(self) -> int:
        """Pieces of 64 columns that make a tile, one behind the other, the last padded by zeros."""
        return -(-self.head_dim // LINE_ELEMENTS)

    @property
    def padded_dim(self) -> int:
        """Columns of a tile."""
        return LINE_ELEMENTS * self.pieces

    @property
    def q_bytes(self) -> int:
        """Of a tile of Q."""
        return self.block_m * self.pieces * LINE_BYTES

    @property
    def kv_bytes(self) -> int:
        """Of a tile of K or V."""
        return self.block_n * self.pieces * LINE_BYTES

    @property
    def rings(self) -> tuple[Ring, Ring, Ring, Ring]:
        """Those of Q, K, V and of messages: first all their stages, then all their barriers."""
        warps = 4 * self.num_consumers
        sizes = (
            (self.q_bytes, self.q_stages, self.num_consumers),
            (self.kv_bytes, self.stages, warps),
            (self.kv_bytes, self.stages, warps),
            (MESSAGE_BYTES, 1, warps),
        )
        offsets = accumulate((size * stages for size, stages, _ in sizes), initial=0)
        *offsets, end = offsets
        barriers = accumulate((2 * MBARRIER_BYTES * s for _, s, _ in sizes), initial=end)
        return tuple(
            Ring(o, b, *size) for o, b, size in zip(offsets, barriers, sizes, strict=False)
        )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; tiles begin at a multiple of 1024 in it."""
        last = self.rings[-1]
        return EIGHT_ROWS_BYTES + last.barrier_offset + 2 * MBARRIER_BYTES * last.stages

    @property
    def elements(self) -> tuple[int, int]:
        """Columns of S and of O that a thread owns in each of its two rows."""
        return self.block_n // 4, self.padded_dim // 4

    def __str__(self) -> str:
        names = ("overlap", "ping_pong", "lazy_rescale", "persistent")
        missing = "".join(f"_no_{name}" for name in names if not getattr(self, name))
        return f"d{self.head_dim}_m{self.block_m}_n{self.block_n}{missing}"


TILES = {
    64: (128, 3, 3, 2, 32, 160),
    128: (128, 2, 2, 2, 40, 232),
    192: (96, 2, 2, 1, 40, 232),
    256: (80, 2, 2, 1, 40, 232),
}
"""Padded head dim -> block_n, num_consumers, stages, q_stages, registers of producer, consumer."""


def choose_hopper_tiles(head_dim: int, limits: DeviceLimits) -> HopperConfig:
    """The tiles that were fastest on an H200."""
    padded = -(-head_dim // LINE_ELEMENTS) * LINE_ELEMENTS
    config = HopperConfig(head_dim, *TILES[padded], max_blocks=limits.multiprocessors)
    if config.shared_bytes > limits.shared_bytes_per_block:
        raise ArgumentError(
            f"head_dim={head_dim}: the tiles need {config.shared_bytes} bytes of shared memory, "
            f"the device has {limits.shared_bytes_per_block}; use another rung"
        )
    return config
