"""The two products of attention in `wgmma`, by a consumer: S = Q K^T and O += P V.

They are issued first and awaited later. A thread's elements of S, P and O are those that a lane of
`fa2_tensor_core` has, with 16 rows for each warp (`wgmma.accumulator`).
"""

from functools import cache

from numba.cuda import int32

from fa2_numba.device import device_function
from fa2_numba.device.hopper_pipeline import make_ring
from fa2_numba.device.wgmma import (
    LINE_BYTES,
    LINE_ELEMENTS,
    WGMMA_K,
    descriptor,
    wgmma_commit_group,
    wgmma_fence,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
)
from fa2_numba.hopper_config import HopperConfig

UNIT = 16
"""Descriptors count addresses in so many bytes."""


@cache
def make_issue_scores(config: HopperConfig, dtype: str):
    """`issue_scores(S_reg, Q_smem, K_smem)`: S = Q K^T, from this consumer's rows of Q."""
    PIECES, STEPS = config.pieces, config.padded_dim // WGMMA_K
    PIECE_STEPS = LINE_ELEMENTS // WGMMA_K
    STEP = 2 * WGMMA_K // UNIT
    Q_PIECE, K_PIECE = config.q_bytes // PIECES // UNIT, config.kv_bytes // PIECES // UNIT
    describe = device_function(descriptor)
    multiply = wgmma_ss(config.block_n, dtype, accumulate=False)
    multiply_add = wgmma_ss(config.block_n, dtype, accumulate=True)

    @device_function
    def issue_scores(S_reg, Q_smem, K_smem):
        Q, K = describe(Q_smem, 0), describe(K_smem, 0)
        # What was computed with S before is done.
        wgmma_fence()
        multiply(S_reg, 0, 0, int32(Q), int32(K))
        for k in range(1, STEPS):
            piece, step = k // PIECE_STEPS, k % PIECE_STEPS
            q, kv = piece * Q_PIECE + step * STEP, piece * K_PIECE + step * STEP
            multiply_add(S_reg, 0, 0, int32(Q + q), int32(K + kv))
        wgmma_commit_group()

    return issue_scores


@cache
def make_accumulate_values(config: HopperConfig, dtype: str):
    """`begin_values(O_reg, P_reg, smem, at)`: O += P V is issued, with P from registers and V at
    the cursor `at`; `end_values(O_reg, smem, at)`: it is done. Returns the next cursor of V.
    """
    STEPS = config.block_n // WGMMA_K
    STEP = WGMMA_K * LINE_BYTES // UNIT
    LEADING = config.kv_bytes // config.pieces
    v = make_ring(config.rings[2])
    v_tile, await_v, release_v, advance = v.tile, v.await_full, v.release, v.advance
    describe = device_function(descriptor)
    multiply_add = wgmma_rs(config.padded_dim, dtype)
    await_output = wgmma_wait_group(0, config.padded_dim)

    @device_function
    def begin_values(O_reg, P_reg, smem, at):
        await_v(smem, at)
        V = describe(v_tile(smem, at), LEADING)
        # P and O are written.
        wgmma_fence()
        for k in range(STEPS):
            multiply_add(O_reg, 0, 0, P_reg, 0, 2 * k, int32(V + k * STEP))
        wgmma_commit_group()

    @device_function
    def end_values(O_reg, smem, at):
        await_output(O_reg, 0, 0)
        release_v(smem, at)
        return advance(at)

    return begin_values, end_values
