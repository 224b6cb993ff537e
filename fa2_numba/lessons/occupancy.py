"""How many thread blocks of a kernel one multiprocessor holds at once, and what limits them.

A block stays on its multiprocessor until its last thread has ended, and takes its share of four
things with it: registers, shared memory, threads and a block slot. Sources: CUDA C++ Programming
Guide, "Technical Specifications per Compute Capability" (limits); NVIDIA's occupancy calculator as
the CUDA toolkit ships it, `cuda_occupancy.h` (units of allocation). The calculator was compiled and
gave the same four limits on 200,000 random kernels over all architectures of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from fa2_numba.config import RESERVED_SHARED_BYTES
from fa2_numba.constants import MAX_THREADS_PER_BLOCK, SHARED_BYTES_PER_BLOCK, WARP_SIZE

REGISTERS = 65_536
"""32-bit registers of a multiprocessor, and the most that one block may take."""

PARTITIONS = 4
"""A multiprocessor's warps and registers lie in four parts; a warp lives in one of them."""

REGISTER_UNIT = 256
"""A warp takes registers in multiples of this many."""

MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor holds at most.

    max_warps, max_blocks: that are resident at once. shared_unit: bytes, blocks take shared memory
    in multiples of it. reserved_shared_bytes: what CUDA takes for itself of it, for each block.
    """

    max_warps: int
    max_blocks: int
    shared_unit: int = 128
    reserved_shared_bytes: int = RESERVED_SHARED_BYTES


MULTIPROCESSORS = {
    (7, 5): Multiprocessor(32, 16, shared_unit=256, reserved_shared_bytes=0),
    (8, 0): Multiprocessor(64, 32),
    (8, 6): Multiprocessor(48, 16),
    (8, 7): Multiprocessor(48, 16),
    (8, 9): Multiprocessor(48, 24),
    (9, 0): Multiprocessor(64, 32),
    (10, 0): Multiprocessor(64, 32),
    (10, 3): Multiprocessor(64, 32),
    (12, 0): Multiprocessor(48, 24),
    (12, 1): Multiprocessor(48, 24),
}
"""Compute capability -> its multiprocessor."""


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that one multiprocessor has room for, by each of the four resources."""

    registers: int
    shared_memory: int
    threads: int
    block_slots: int

    @property
    def blocks(self) -> int:
        """Blocks that are resident at once; 0 if a block does not fit even alone."""
        return min(getattr(self, field.name) for field in fields(self))

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more than that."""
        resources = (field.name for field in fields(self))
        return tuple(name for name in resources if getattr(self, name) == self.blocks)

    def __str__(self) -> str:
        limits = " and ".join(name.replace("_", " ") for name in self.limited_by)
        each = ", ".join(
            f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self)
        )
        return f"{self.blocks} blocks per multiprocessor, limited by {limits} ({each})"


def blocks_per_multiprocessor(
    registers_per_thread: int,
    shared_bytes: int,
    threads: int,
    compute_capability: tuple[int, int],
) -> Occupancy:
    """How many blocks of a kernel are resident on one multiprocessor at once.

    registers_per_thread: as ptxas reports them. shared_bytes: static and dynamic, of a block.
    threads: of a block. Raises ValueError for what no kernel can have; a block that no
    multiprocessor has room for gives 0 blocks. The L1 cache shares its memory with shared memory;
    as in NVIDIA's calculator, shared memory gets what it needs.

    >>> print(blocks_per_multiprocessor(145, 49_664, 128, (9, 0)))
    3 blocks per multiprocessor, limited by registers (registers 3, shared memory 4, threads 16, \
block slots 32)
    """
    _require_integer("registers_per_thread", registers_per_thread, 1, MAX_REGISTERS_PER_THREAD)
    _require_integer("shared_bytes", shared_bytes, 0, None)
    _require_integer("threads", threads, 1, MAX_THREADS_PER_BLOCK)
    if compute_capability not in MULTIPROCESSORS:
        known = ", ".join(f"{major}.{minor}" for major, minor in MULTIPROCESSORS)
        rule = f"one of {known}, as a pair like (9, 0)"
        raise ValueError(f"compute_capability={compute_capability!r}: must be {rule}")
    multiprocessor = MULTIPROCESSORS[compute_capability]
    warps = -(-threads // WARP_SIZE)
    return Occupancy(
        registers=_blocks_by_registers(registers_per_thread, warps),
        shared_memory=_blocks_by_shared_memory(shared_bytes, compute_capability),
        threads=multiprocessor.max_warps // warps,
        block_slots=multiprocessor.max_blocks,
    )


def _blocks_by_registers(registers_per_thread: int, warps: int) -> int:
    per_warp = _round_up(registers_per_thread * WARP_SIZE, REGISTER_UNIT)
    # The launch check counts as if every partition had to hold as many warps as the fullest.
    if per_warp * _round_up(warps, PARTITIONS) > REGISTERS:
        return 0
    warps_per_partition = REGISTERS // PARTITIONS // per_warp
    return warps_per_partition * PARTITIONS // warps


def _blocks_by_shared_memory(shared_bytes: int, compute_capability: tuple[int, int]) -> int:
    multiprocessor = MULTIPROCESSORS[compute_capability]
    reserved = multiprocessor.reserved_shared_bytes
    # One block may ask for all that there is, less what is reserved for it.
    available = SHARED_BYTES_PER_BLOCK[compute_capability] + reserved
    taken = _round_up(shared_bytes + reserved, multiprocessor.shared_unit)
    return available // taken if taken else multiprocessor.max_blocks


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _require_integer(name: str, value: object, least: int, most: int | None) -> None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        rule = f"an integer, {least} or more" if most is None else f"an integer, {least} to {most}"
        raise ValueError(f"{name}={value!r}: must be {rule}")
