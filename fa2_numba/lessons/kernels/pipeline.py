"""Lesson 13: one thread loads, a warp computes, and a ring of stages lies between them."""

from collections.abc import Callable

from numba import cuda
from numba.cuda import float32, int32

from fa2_numba.device import device_function
from fa2_numba.device.mbarrier import (
    MBARRIER_BYTES,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from fa2_numba.device.ptx import global_address, shared_address
from fa2_numba.device.tma import bulk_load

CHUNK = 32
"""Numbers that are loaded at once: one a lane."""
CHUNK_BYTES = 4 * CHUNK
THREADS = 2 * CHUNK


def make_pipeline(cursor: Callable, stages: int):
    """The kernel (x, out) for two warps: out = 2 x, chunk by chunk, through a ring.

    cursor(number, stages, producer): stage of a chunk, and the parity that the producer, or the
    consumer, waits for there. x and out: float32, a multiple of CHUNK numbers.
    """
    STAGES, RING = stages, stages * CHUNK
    BARRIERS = RING * 4
    WORDS = RING + stages * 4
    where = device_function(cursor)

    @device_function
    def full(smem, stage):
        return int32(smem + BARRIERS + 2 * MBARRIER_BYTES * stage)

    @device_function
    def empty(smem, stage):
        return int32(full(smem, stage) + MBARRIER_BYTES)

    @cuda.jit
    def pipeline(x, out):
        ring_smem = cuda.shared.array(WORDS, float32, alignment=128)
        smem = shared_address(ring_smem)
        thread = cuda.threadIdx.x
        if thread == 0:
            for stage in range(STAGES):
                mbarrier_init(full(smem, stage), int32(1))
                mbarrier_init(empty(smem, stage), int32(1))
            # Copies meet the barriers by another way.
            fence_mbarrier_init()
        # The barriers are there for all.
        cuda.syncthreads()
        chunks = x.shape[0] // CHUNK
        if thread == 0:
            for number in range(chunks):
                stage, parity = where(number, STAGES, True)
                mbarrier_wait(empty(smem, stage), int32(parity))
                mbarrier_arrive_expect_tx(full(smem, stage), int32(CHUNK_BYTES))
                source = global_address(x) + CHUNK_BYTES * number
                place = int32(smem + CHUNK_BYTES * stage)
                bulk_load(place, source, int32(CHUNK_BYTES), full(smem, stage))
        elif thread >= CHUNK:
            lane = thread - CHUNK
            for number in range(chunks):
                stage, parity = where(number, STAGES, False)
                mbarrier_wait(full(smem, stage), int32(parity))
                out[CHUNK * number + lane] = float32(2.0) * ring_smem[CHUNK * stage + lane]
                # All lanes have read the stage before one says so.
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(empty(smem, stage))

    return pipeline


def first_pipeline(number, stages, producer):
    """The lesson's wrong cursor: both wait for the same parity."""
    return number % stages, number // stages % 2
