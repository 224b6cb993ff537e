"""The backward pass of `standard`: S, P, dP and dS live in HBM (FA2 section 2.2).

    delta:      D = rowsum(dO o O)                       `backward_parts`
    scores:     S = softmax_scale Q K^T, dP = dO V^T     `standard`, launched twice
    weights:    P = exp(S - LSE), dS = P o (dP - D)      one warp a row
    values:     dQ = softmax_scale dS K                  `standard`
    transposed: dV = P^T dO, dK = softmax_scale dS^T Q   one block a (key tile, KV head), twice

P takes the place of S and dS that of dP: two arrays of seqlen_q x seqlen_k elements a head. dS is
stored with softmax_scale in it, since both products that it enters have that factor.

Every sum lies in one block and has one order: the result is the same in every run.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import float32

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.backward import make_clear, make_store_rows, weight_exponent
from fa2_numba.device.products import make_accumulate_values
from fa2_numba.device.tiles import (
    locate_head,
    make_load_tile,
    make_locate_element,
    shared_tile,
)
from fa2_numba.kernels.backward_parts import key_grid, plan_delta, query_grid
from fa2_numba.kernels.standard import make_scores, make_values
from fa2_numba.launch import BackwardTensors, KernelLaunch


@cache
def make_weights(config: TileConfig):
    """The kernel P = exp(S - LSE), dS = P o (dP - D), one warp a row.

    Arguments: S, which becomes P, and dP, which becomes softmax_scale dS (batch, heads, seqlen_q,
    seqlen_k); LSE, D (batch, heads, seqlen_q), float32; softmax_scale (float32).
    Grid: (batch x heads, query tiles).
    """
    BLOCK_M, NUM_WARPS = config.block_m, config.num_warps

    def weights(P_gmem, dS_gmem, LSE_gmem, D_gmem, softmax_scale):
        heads, seqlen_q, seqlen_k = P_gmem.shape[1], P_gmem.shape[2], P_gmem.shape[3]
        batch, head, _ = locate_head(heads, heads)
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        first_row = cuda.blockIdx.y * BLOCK_M
        for row in range(first_row + warp, min(first_row + BLOCK_M, seqlen_q), NUM_WARPS):
            lse, delta = weight_exponent(LSE_gmem[batch, head, row]), D_gmem[batch, head, row]
            for j_col in range(lane, seqlen_k, WARP_SIZE):
                p = math.exp(P_gmem[batch, head, row, j_col] - lse)
                dS = p * (dS_gmem[batch, head, row, j_col] - delta)
                P_gmem[batch, head, row, j_col] = p
                dS_gmem[batch, head, row, j_col] = softmax_scale * dS

    weights.__name__ = f"standard_weights_m{BLOCK_M}_w{NUM_WARPS}"
    return cuda.jit(weights)


@cache
def make_transposed(config: TileConfig, dtype: str):
    """The kernel X = W^T Y, summed over the query heads that share a key-value head.

    Arguments: W (batch, heads, seqlen_q, seqlen_k) float32; Y like Q, X like K in
    `BackwardTensors`. Grid: (batch x KV heads, key tiles).
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    ROWS, COLS, OUT_COLS = config.transposed.split_q_elements

    locate_element = make_locate_element(config.transposed)
    load_tile = make_load_tile(config, BLOCK_M, dtype)
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SPLIT_Q_LANES)
    clear = make_clear(ROWS, OUT_COLS)
    store_rows = make_store_rows(ROWS, OUT_COLS, dtype)

    def transposed(W_gmem, Y_gmem, X_gmem):
        heads, seqlen_q, seqlen_k = W_gmem.shape[1], W_gmem.shape[2], W_gmem.shape[3]
        kv_heads = X_gmem.shape[2]
        group = heads // kv_heads
        batch, kv_head, _ = locate_head(kv_heads, kv_heads)
        row, col = locate_element()
        first_key = cuda.blockIdx.y * BLOCK_N + row

        Y_smem = shared_tile(cuda.shared.array(0, float32), 0, (BLOCK_M, HEAD_DIM))
        W_reg = cuda.local.array((ROWS, COLS), float32)  # W^T
        X_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        clear(X_reg)

        for head in range(kv_head * group, (kv_head + 1) * group):
            for first_row in range(0, seqlen_q, BLOCK_M):
                # A slower warp may still be reading the previous tile of Y.
                cuda.syncthreads()
                load_tile(Y_smem, Y_gmem, batch, head, first_row)
                # Each warp reads what all warps have loaded.
                cuda.syncthreads()
                for i in range(ROWS):
                    for j in range(COLS):
                        W_reg[i, j] = float32(0.0)
                        j_col, i_row = first_key + LANE_ROWS * i, first_row + col + LANE_COLS * j
                        if i_row < seqlen_q and j_col < seqlen_k:
                            W_reg[i, j] = W_gmem[batch, head, i_row, j_col]
                accumulate_values(X_reg, W_reg, Y_smem, 0, col)

        store_rows(X_gmem, batch, kv_head, first_key, col, X_reg, float32(1.0))

    transposed.__name__ = f"standard_transposed_{config}_{dtype}"
    return cuda.jit(transposed)


def plan_backward(tensors: BackwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The seven launches, with float32 S, P, dP and dS in HBM between them."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    seqlen_k = tensors.K.shape[1]
    D = tensors.allocate((batch, heads, seqlen_q))
    P = tensors.allocate((batch, heads, seqlen_q, seqlen_k))
    dS = tensors.allocate((batch, heads, seqlen_q, seqlen_k))
    scale, no_scale = tensors.softmax_scale, np.float32(1)
    weights = KernelLaunch(
        kernel=make_weights(config),
        grid=query_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=0,
        arguments=(P, dS, tensors.LSE, D, scale),
    )
    return [
        plan_delta(tensors, config, D),
        _plan_scores(tensors, config, tensors.causal, (tensors.Q, tensors.K, P, scale)),
        _plan_scores(tensors, config, False, (tensors.dO, tensors.V, dS, no_scale)),
        weights,
        _plan_values(tensors, config, (dS, tensors.K, tensors.dQ)),
        _plan_transposed(tensors, config, (P, tensors.dO, tensors.dV)),
        _plan_transposed(tensors, config, (dS, tensors.Q, tensors.dK)),
    ]


def _plan_scores(
    tensors: BackwardTensors, config: TileConfig, causal: bool, arguments: tuple
) -> KernelLaunch:
    return KernelLaunch(
        kernel=make_scores(config, tensors.dtype, causal),
        grid=(*query_grid(tensors, config), key_grid(tensors, config)[1]),
        threads=config.num_threads,
        shared_bytes=4 * (config.block_m + config.block_n) * config.row_stride,
        arguments=arguments,
    )


def _plan_values(tensors: BackwardTensors, config: TileConfig, arguments: tuple) -> KernelLaunch:
    return KernelLaunch(
        kernel=make_values(config, tensors.dtype),
        grid=query_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=4 * config.block_n * config.head_dim,
        arguments=arguments,
    )


def _plan_transposed(
    tensors: BackwardTensors, config: TileConfig, arguments: tuple
) -> KernelLaunch:
    return KernelLaunch(
        kernel=make_transposed(config, tensors.dtype),
        grid=key_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=4 * config.block_m * config.head_dim,
        arguments=arguments,
    )
