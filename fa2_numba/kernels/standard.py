"""Textbook attention: three kernels, with S and P written to and read from HBM (FA2 section 2.2).

    scores:  S = softmax_scale Q K^T        one block a (query tile, key tile)
    softmax: P = softmax(S), row by row     one warp a row
    values:  O = P V                        one block a query tile

S and P have seqlen_q x seqlen_k elements a head, so memory and traffic grow with the square of the
sequence length. The two products use the tiles and the lane layout of the flash rungs.

What a head of N queries and keys costs, in float32 and whole tiles (T_m = N / BLOCK_M of queries,
T_n = N / BLOCK_N of keys; W = NUM_WARPS):

    global_load_bytes  = 4 * (4*N*N + N*D*(T_n + 2*T_m))
    global_store_bytes = 4 * (2*N*N + N*D + N)
    shared_load_bytes  = T_m*T_n * 32*D*(BLOCK_M + W*BLOCK_N)
    shared_store_bytes = T_m*T_n * 4*D*(BLOCK_M + 2*BLOCK_N)
    barriers           = 3 * T_m*T_n
    other_flops        = 6*N*N + 321*N

S is written once and read three times (for the maximum, the sum and P), P is written and read once;
besides, every pair of tiles loads its tile of Q, of K and of V. A causal mask changes none of it.
An element of S is scaled, compared, summed, divided and has the maximum subtracted from it twice:
6 operations. A row has two butterflies of 5 steps over 32 lanes, and one sum for LSE: 321.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.device.dtypes import FROM_FLOAT32
from fa2_numba.device.mask import make_mask_scores
from fa2_numba.device.products import make_accumulate_values, make_compute_scores
from fa2_numba.device.softmax import finite_max, log_sum_exp, make_over_lanes, share
from fa2_numba.device.tiles import (
    locate_head,
    make_load_tile,
    make_locate_element,
    shared_tile,
)
from fa2_numba.launch import ForwardTensors, KernelLaunch


@cache
def make_scores(config: TileConfig, dtype: str, causal: bool):
    """The kernel S = softmax_scale Q K^T, hidden scores -inf.

    Arguments: Q, K as in `ForwardTensors`; S (batch, heads, seqlen_q, seqlen_k) float32;
    softmax_scale (float32). Grid: (batch x heads, query tiles, key tiles).
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    ROW_STRIDE = config.row_stride
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    ROWS, COLS, _ = config.split_q_elements
    K_OFFSET = BLOCK_M * ROW_STRIDE

    locate_element = make_locate_element(config)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_k_tile = make_load_tile(config, BLOCK_N, dtype)
    compute_scores = make_compute_scores(ROWS, COLS, SPLIT_Q_LANES, HEAD_DIM)
    mask_scores = make_mask_scores(ROWS, COLS, SPLIT_Q_LANES, causal)

    def scores(Q_gmem, K_gmem, S_gmem, softmax_scale):
        seqlen_q, heads = Q_gmem.shape[1], Q_gmem.shape[2]
        seqlen_k, kv_heads = K_gmem.shape[1], K_gmem.shape[2]
        batch, head, kv_head = locate_head(heads, kv_heads)
        first_row, first_col = cuda.blockIdx.y * BLOCK_M, cuda.blockIdx.z * BLOCK_N
        row, col = locate_element()

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        S_reg = cuda.local.array((ROWS, COLS), float32)

        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)
        load_k_tile(K_smem, K_gmem, batch, kv_head, first_col)
        # Each warp reads what all warps have loaded.
        cuda.syncthreads()
        compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale)
        mask_scores(S_reg, first_row + row, first_col + col, seqlen_q, seqlen_k)
        for i in range(ROWS):
            for j in range(COLS):
                i_row, j_col = first_row + row + LANE_ROWS * i, first_col + col + LANE_COLS * j
                if i_row < seqlen_q and j_col < seqlen_k:
                    S_gmem[batch, head, i_row, j_col] = S_reg[i, j]

    scores.__name__ = f"standard_scores_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(scores)


@cache
def make_softmax(config: TileConfig):
    """The kernel P = softmax(S) and LSE, one warp a row.

    Arguments: S, P (batch, heads, seqlen_q, seqlen_k), LSE (batch, heads, seqlen_q), float32.
    Grid: (batch x heads, seqlen_q / warps of a block).
    """
    NUM_WARPS = config.num_warps
    max_over_lanes, sum_over_lanes = make_over_lanes(WARP_SIZE)

    def softmax(S_gmem, P_gmem, LSE_gmem):
        heads, seqlen_q, seqlen_k = S_gmem.shape[1], S_gmem.shape[2], S_gmem.shape[3]
        batch, head, _ = locate_head(heads, heads)
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        i_row = cuda.blockIdx.y * NUM_WARPS + warp
        # i_row is one for all lanes of a warp: all of them take part in the shuffles, or none.
        if i_row < seqlen_q:
            m = NEG_INF
            for j_col in range(lane, seqlen_k, WARP_SIZE):
                m = max(m, S_gmem[batch, head, i_row, j_col])
            m = finite_max(max_over_lanes(m))
            l = float32(0.0)
            for j_col in range(lane, seqlen_k, WARP_SIZE):
                l += math.exp(S_gmem[batch, head, i_row, j_col] - m)
            l = sum_over_lanes(l)
            for j_col in range(lane, seqlen_k, WARP_SIZE):
                p = math.exp(S_gmem[batch, head, i_row, j_col] - m)
                P_gmem[batch, head, i_row, j_col] = share(p, l)
            if lane == 0:
                LSE_gmem[batch, head, i_row] = log_sum_exp(m, l)

    softmax.__name__ = f"standard_softmax_w{NUM_WARPS}"
    return cuda.jit(softmax)


@cache
def make_values(config: TileConfig, dtype: str):
    """The kernel O = P V.

    Arguments: P (batch, heads, seqlen_q, seqlen_k) float32; V, O as in `ForwardTensors`.
    Grid: (batch x heads, query tiles).
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    ROWS, COLS, OUT_COLS = config.split_q_elements

    locate_element = make_locate_element(config)
    load_v_tile = make_load_tile(config, BLOCK_N, dtype)
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SPLIT_Q_LANES)
    from_float32 = FROM_FLOAT32[dtype]

    def values(P_gmem, V_gmem, O_gmem):
        heads, seqlen_q, seqlen_k = P_gmem.shape[1], P_gmem.shape[2], P_gmem.shape[3]
        kv_heads, head_dim = V_gmem.shape[2], V_gmem.shape[3]
        batch, head, kv_head = locate_head(heads, kv_heads)
        first_row = cuda.blockIdx.y * BLOCK_M
        row, col = locate_element()

        V_smem = shared_tile(cuda.shared.array(0, float32), 0, (BLOCK_N, HEAD_DIM))
        P_reg = cuda.local.array((ROWS, COLS), float32)
        O_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        for i in range(ROWS):
            for c in range(OUT_COLS):
                O_reg[i, c] = float32(0.0)

        for n_block in range((seqlen_k + BLOCK_N - 1) // BLOCK_N):
            first_col = n_block * BLOCK_N
            # A slower warp may still be reading the previous V tile.
            cuda.syncthreads()
            load_v_tile(V_smem, V_gmem, batch, kv_head, first_col)
            # Each warp reads what all warps have loaded.
            cuda.syncthreads()
            for i in range(ROWS):
                for j in range(COLS):
                    P_reg[i, j] = float32(0.0)
                    i_row, j_col = first_row + row + LANE_ROWS * i, first_col + col + LANE_COLS * j
                    if i_row < seqlen_q and j_col < seqlen_k:
                        P_reg[i, j] = P_gmem[batch, head, i_row, j_col]
            accumulate_values(O_reg, P_reg, V_smem, 0, col)

        for i in range(ROWS):
            for c in range(OUT_COLS):
                i_row, d = first_row + row + LANE_ROWS * i, col + LANE_COLS * c
                if i_row < seqlen_q and d < head_dim:
                    O_gmem[batch, i_row, head, d] = from_float32(O_reg[i, c])

    values.__name__ = f"standard_values_{config}_{dtype}"
    return cuda.jit(values)


def plan_forward(tensors: ForwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The three launches, with float32 S and P in HBM between them."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    seqlen_k = tensors.K.shape[1]
    S = tensors.allocate((batch, heads, seqlen_q, seqlen_k))
    P = tensors.allocate((batch, heads, seqlen_q, seqlen_k))
    m_blocks, n_blocks = -(-seqlen_q // config.block_m), -(-seqlen_k // config.block_n)
    q_and_k_bytes = 4 * (config.block_m + config.block_n) * config.row_stride
    return [
        KernelLaunch(
            kernel=make_scores(config, tensors.dtype, tensors.causal),
            grid=(batch * heads, m_blocks, n_blocks),
            threads=config.num_threads,
            shared_bytes=q_and_k_bytes,
            arguments=(tensors.Q, tensors.K, S, tensors.softmax_scale),
        ),
        KernelLaunch(
            kernel=make_softmax(config),
            grid=(batch * heads, -(-seqlen_q // config.num_warps)),
            threads=config.num_threads,
            shared_bytes=0,
            arguments=(S, P, tensors.LSE),
        ),
        KernelLaunch(
            kernel=make_values(config, tensors.dtype),
            grid=(batch * heads, m_blocks),
            threads=config.num_threads,
            shared_bytes=4 * config.block_n * config.head_dim,
            arguments=(P, tensors.V, tensors.O),
        ),
    ]
