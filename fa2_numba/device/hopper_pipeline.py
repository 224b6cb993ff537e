"""A ring of stages in shared memory, between one who fills them and those who read them.

Every stage has two mbarriers. `full`: what was loaded is there; its bytes complete the phase.
`empty`: all readers are done with it, and it may be loaded again. Both sides go round the ring
alike, each with a cursor (stage, parity): where it is, and the parity of the phase it waits for
next, which changes with every round. A reader's begins at FIRST_FULL; the producer's at
FIRST_EMPTY, for stages that nobody has read yet count as empty (`mbarrier.Phases`).
"""

from functools import cache
from types import SimpleNamespace

from numba import cuda
from numba.cuda import int32

from fa2_numba.device import device_function
from fa2_numba.device.mbarrier import (
    MBARRIER_BYTES,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from fa2_numba.device.tma import tma_load_4d
from fa2_numba.device.wgmma import LINE_ELEMENTS
from fa2_numba.hopper_config import Ring

FIRST_FULL, FIRST_EMPTY = (int32(0), int32(0)), (int32(0), int32(1))
"""Where a reader's cursor begins, and the producer's."""


@cache
def make_ring(ring: Ring) -> SimpleNamespace:
    """The verbs of one ring; `at` is a cursor.

    `init(smem)`: its barriers, by one thread. `advance(at)`: the next place of a cursor.
    `tile(smem, at)`, `full(smem, at)`: addresses of a stage and of the barrier of its loads.
    `await_full(smem, at)`, `await_empty(smem, at)` wait. `release(smem, at)`: this warp, one of the
    ring's readers, is done with the stage.
    """
    STAGES, READERS, STAGE_BYTES = ring.stages, ring.readers, ring.stage_bytes
    STAGE_OFFSET, FULL_OFFSET = ring.offset, ring.barrier_offset
    EMPTY_OFFSET = FULL_OFFSET + MBARRIER_BYTES * STAGES

    @device_function
    def tile(smem, at):
        return int32(smem + STAGE_OFFSET + at[0] * STAGE_BYTES)

    @device_function
    def full(smem, at):
        return int32(smem + FULL_OFFSET + MBARRIER_BYTES * at[0])

    @device_function
    def empty(smem, at):
        return int32(smem + EMPTY_OFFSET + MBARRIER_BYTES * at[0])

    @device_function
    def init(smem):
        for stage in range(STAGES):
            mbarrier_init(full(smem, (stage, 0)), int32(1))
            mbarrier_init(empty(smem, (stage, 0)), int32(READERS))

    @device_function
    def await_full(smem, at):
        # Reads of the stage must not come before what was loaded into it.
        mbarrier_wait(full(smem, at), at[1])

    @device_function
    def await_empty(smem, at):
        # The stage must not be loaded while somebody reads it.
        mbarrier_wait(empty(smem, at), at[1])

    @device_function
    def release(smem, at):
        if cuda.laneid == 0:
            mbarrier_arrive(empty(smem, at))

    @device_function
    def advance(at):
        stage = int32(at[0] + 1)
        if stage == STAGES:
            return int32(0), int32(at[1] ^ 1)
        return stage, at[1]

    return SimpleNamespace(
        **{
            verb.py_func.__name__: verb
            for verb in (init, tile, full, await_full, await_empty, release, advance)
        }
    )


@cache
def make_load(ring: Ring, pieces: int):
    """`load(smem, at, X_map, row, head, batch)`: a tile into a stage of the ring, once it is empty.

    By one thread, which does not wait for the tile. pieces: of 64 columns each.
    """
    STAGE_BYTES, PIECES = ring.stage_bytes, pieces
    PIECE_BYTES = STAGE_BYTES // PIECES
    verbs = make_ring(ring)
    tile, full, await_empty = verbs.tile, verbs.full, verbs.await_empty

    @device_function
    def load(smem, at, X_map, row, head, batch):
        await_empty(smem, at)
        X_smem, loaded = tile(smem, at), full(smem, at)
        # The stage is full when all bytes of the tile are there, zeros beyond its array included.
        mbarrier_arrive_expect_tx(loaded, int32(STAGE_BYTES))
        for piece in range(PIECES):
            place, column = int32(X_smem + piece * PIECE_BYTES), int32(piece * LINE_ELEMENTS)
            tma_load_4d(place, X_map, column, row, head, batch, loaded)

    return load
