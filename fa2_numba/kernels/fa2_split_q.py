"""Split-Q, against `fa2_seq_parallel`: warps own query rows, not keys (FA2 section 3.3).

This is FlashAttention-2 whole. A thread block computes BLOCK_M rows of O for one head, as before,
but its warps split the rows of the Q tile (FA2 Fig. 3 right):

                 K tile, V tile: read by every warp
                 +---------------------------+
        warp 0   |  rows   0 .. 15 of S, O   |
        warp 1   |  rows  16 .. 31 of S, O   |   Q tile of 64 rows,
        warp 2   |  rows  32 .. 47 of S, O   |   4 warps
        warp 3   |  rows  48 .. 63 of S, O   |
                 +---------------------------+

A row of S lies within one warp, so its maximum, its sum and its product with V do too: the lanes of
the warp exchange them by shuffles. Shared memory holds the tiles of Q, K and V and nothing else,
and the only barriers are those around loading them.

What a head of N queries and keys costs, in float32 and whole tiles (T_m = N / BLOCK_M of queries,
T_n = N / BLOCK_N of keys, T visited pairs of them, with a causal mask about half; W = NUM_WARPS):

    global_load_bytes  = 4 * (N*D + 2*T*BLOCK_N*D)
    global_store_bytes = 4 * (N*D + N)
    shared_load_bytes  = T * 32*D*(BLOCK_M + W*BLOCK_N)
    shared_store_bytes = 4*D*(N + 2*T*BLOCK_N)
    barriers           = 2*T
    other_flops        = T * BLOCK_M*(4*BLOCK_N + D + 72) + N*(D + 9)

For S a lane reads BLOCK_M / 4W rows of Q and BLOCK_N / 8 of K, for O D / 8 columns of V, all keys.
other_flops: 4 for an element of S, 1 for one of O; a row lies in 8 lanes, each of which takes 9 to
combine lanes and update m, l and the factor; at the end D products, 8 divisions and LSE.

No part of O goes through shared memory, and two barriers a tile are left. An element of O costs one
operation a tile, for rescaling, in place of W + 1. The price: every warp reads all of K and V.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.constants import NEG_INF
from fa2_numba.device.dtypes import FROM_FLOAT32
from fa2_numba.device.mask import make_mask_scores, make_needs_mask
from fa2_numba.device.products import make_accumulate_values, make_compute_scores
from fa2_numba.device.softmax import (
    finite_max,
    log_sum_exp,
    make_exponentiate,
    make_row_max,
    share,
)
from fa2_numba.device.tiles import (
    locate_head,
    make_count_n_blocks,
    make_load_tile,
    make_locate_element,
    shared_tile,
)
from fa2_numba.launch import ForwardTensors, KernelLaunch


@cache
def make_forward(config: TileConfig, dtype: str, causal: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: Q, K, V, O, LSE as in `ForwardTensors`, softmax_scale (float32).
    Grid: (batch x heads, query tiles). Shared memory: the Q, K and V tiles, `split_q_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    ROW_STRIDE = config.row_stride
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    ROWS, COLS, OUT_COLS = config.split_q_elements
    K_OFFSET = BLOCK_M * ROW_STRIDE
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE

    locate_element = make_locate_element(config)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    count_n_blocks = make_count_n_blocks(config, causal)
    needs_mask = make_needs_mask(config, causal)
    compute_scores = make_compute_scores(ROWS, COLS, SPLIT_Q_LANES, HEAD_DIM)
    mask_scores = make_mask_scores(ROWS, COLS, SPLIT_Q_LANES, causal)
    row_max = make_row_max(COLS, LANE_COLS)
    exponentiate = make_exponentiate(COLS, LANE_COLS)
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SPLIT_Q_LANES)
    from_float32 = FROM_FLOAT32[dtype]

    def forward(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, softmax_scale):
        seqlen_q, heads, head_dim = Q_gmem.shape[1], Q_gmem.shape[2], Q_gmem.shape[3]
        seqlen_k, kv_heads = K_gmem.shape[1], K_gmem.shape[2]
        batch, head, kv_head = locate_head(heads, kv_heads)
        first_row = cuda.blockIdx.y * BLOCK_M  # FA2 Alg. 1 line 3: one block a query tile
        row, col = locate_element()

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, HEAD_DIM))
        S_reg = cuda.local.array((ROWS, COLS), float32)
        O_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        m_reg = cuda.local.array(ROWS, float32)
        l_reg = cuda.local.array(ROWS, float32)

        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA2 Alg. 1 line 4
        for i in range(ROWS):  # FA2 Alg. 1 line 5
            m_reg[i] = NEG_INF
            l_reg[i] = float32(0.0)
            for c in range(OUT_COLS):
                O_reg[i, c] = float32(0.0)

        # FA2 Alg. 1 line 6: only the key tiles that some row of this query tile can see
        for n_block in range(count_n_blocks(first_row, seqlen_q, seqlen_k)):
            first_col = n_block * BLOCK_N
            # A slower warp may still be reading the previous K and V tiles.
            cuda.syncthreads()
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA2 Alg. 1 line 7
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
            # Each warp reads what all warps have loaded.
            cuda.syncthreads()

            compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale)  # FA2 Alg. 1 line 8
            if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(S_reg, first_row + row, first_col + col, seqlen_q, seqlen_k)

            for i in range(ROWS):  # FA2 Alg. 1 line 9
                m = max(m_reg[i], row_max(S_reg, i))
                rescale = math.exp(m_reg[i] - finite_max(m))
                l_reg[i] = rescale * l_reg[i] + exponentiate(S_reg, i, finite_max(m))
                m_reg[i] = m
                for c in range(OUT_COLS):
                    O_reg[i, c] *= rescale
            accumulate_values(O_reg, S_reg, V_smem, 0, col)  # FA2 Alg. 1 line 10

        for i in range(ROWS):
            i_row = first_row + row + LANE_ROWS * i
            if i_row < seqlen_q:
                scale = share(float32(1.0), l_reg[i])  # FA2 Alg. 1 line 12
                for c in range(OUT_COLS):
                    d = col + LANE_COLS * c
                    if d < head_dim:  # FA2 Alg. 1 line 14
                        O_gmem[batch, i_row, head, d] = from_float32(O_reg[i, c] * scale)
                if col == 0:  # FA2 Alg. 1 lines 13, 15
                    LSE_gmem[batch, head, i_row] = log_sum_exp(m_reg[i], l_reg[i])

    forward.__name__ = f"fa2_split_q_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    return [
        KernelLaunch(
            kernel=make_forward(config, tensors.dtype, tensors.causal),
            grid=(batch * heads, -(-seqlen_q // config.block_m)),
            threads=config.num_threads,
            shared_bytes=config.split_q_shared_bytes,
            arguments=(*tensors.operands, tensors.softmax_scale),
        )
    ]
