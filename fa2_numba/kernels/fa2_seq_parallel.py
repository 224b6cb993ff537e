"""Parallel over queries, against `fa2_fewer_flops`: one block a query tile (FA2 section 3.2).

Now that query tiles are the outer loop, its passes share nothing: each has its own O, m and l. The
loop becomes a dimension of the grid, so a long sequence fills the GPU however few heads there are.
Within a block nothing changes but for the barrier between two query tiles, which goes.

What a head of N queries and keys costs, in float32 and whole tiles (T_m = N / BLOCK_M of queries,
T_n = N / BLOCK_N of keys, T visited pairs of them, with a causal mask about half; W = NUM_WARPS):

    global_load_bytes  = 4 * (N*D + 2*T*BLOCK_N*D)
    global_store_bytes = 4 * (N*D + N)
    shared_load_bytes  = 4*(T*(4*D*(W*BLOCK_M + 4*BLOCK_N) + BLOCK_M*(W*D+D + 4*W*W)) + N*(16*W+1))
    shared_store_bytes = 4*D*(N + 2*T*BLOCK_N) + T * 4*BLOCK_M*(W*D + W + 1) + 8*W*N
    barriers           = T * (2 + 2*D/16) + T_m
    other_flops        = T * BLOCK_M*(4*BLOCK_N + (W+1)*D + 4*W*W + 12*W) + N*(D + 16*W + 1)

It is what `fa2_fewer_flops` costs (derived there), without the barrier between query tiles: only
the number of blocks that share the work has grown.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import EXCHANGE_COLS, SLICED_K_LANES, TileConfig
from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.device.mask import make_mask_scores, make_needs_mask
from fa2_numba.device.products import make_compute_scores
from fa2_numba.device.sliced_k import (
    make_across_warps,
    make_exchange_tiles,
    make_store_output,
    make_store_partial,
    make_update_output,
)
from fa2_numba.device.softmax import finite_max, make_exponentiate, make_row_max
from fa2_numba.device.tiles import locate_head, make_count_n_blocks, make_load_tile, shared_tile
from fa2_numba.launch import ForwardTensors, KernelLaunch


@cache
def make_forward(config: TileConfig, dtype: str, causal: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: Q, K, V, O, LSE as in `ForwardTensors`, softmax_scale (float32).
    Grid: (batch x heads, query tiles). Shared memory: the Q, K and V tiles, the warps' partial O
    and row statistics, `sliced_k_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    NUM_WARPS, ROW_STRIDE = config.num_warps, config.row_stride
    WARP_COLS = BLOCK_N // NUM_WARPS
    LANE_ROWS, LANE_COLS = SLICED_K_LANES
    ROWS, COLS, _ = config.sliced_k_elements
    OWN_ROWS, OWN_COLS, _ = config.owned_elements
    K_OFFSET = BLOCK_M * ROW_STRIDE
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE

    exchange_tiles = make_exchange_tiles(config, 1)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    count_n_blocks = make_count_n_blocks(config, causal)
    needs_mask = make_needs_mask(config, causal)
    compute_scores = make_compute_scores(ROWS, COLS, SLICED_K_LANES, HEAD_DIM)
    mask_scores = make_mask_scores(ROWS, COLS, SLICED_K_LANES, causal)
    row_max = make_row_max(COLS, LANE_COLS)
    exponentiate = make_exponentiate(COLS, LANE_COLS)
    max_across, _ = make_across_warps(NUM_WARPS)
    store_partial = make_store_partial(config)
    update_output = make_update_output(config)
    store_output = make_store_output(config, dtype)

    def forward(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, softmax_scale):
        seqlen_q, heads = Q_gmem.shape[1], Q_gmem.shape[2]
        seqlen_k, kv_heads = K_gmem.shape[1], K_gmem.shape[2]
        batch, head, kv_head = locate_head(heads, kv_heads)
        first_row = cuda.blockIdx.y * BLOCK_M  # FA2 Alg. 1 line 3: one block a query tile
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        row, lane_col = lane // LANE_COLS, lane % LANE_COLS
        first_key = warp * WARP_COLS
        col = first_key + lane_col

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, HEAD_DIM))
        partial_smem, max_smem, sum_smem, scale_smem = exchange_tiles(smem)
        # Seen from the lane's first row on: further indices are constants and cost no registers.
        max_lane, sum_lane, scale_lane = max_smem[:, row:], sum_smem[:, row:], scale_smem[row:]
        S_reg = cuda.local.array((ROWS, COLS), float32)
        O_reg = cuda.local.array((OWN_ROWS, OWN_COLS), float32)
        m_reg = cuda.local.array(ROWS, float32)
        l_reg = cuda.local.array(ROWS, float32)

        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA2 Alg. 1 line 4
        for i in range(ROWS):  # FA2 Alg. 1 line 5
            m_reg[i] = NEG_INF
            l_reg[i] = float32(0.0)
        for i in range(OWN_ROWS):
            for c in range(OWN_COLS):
                O_reg[i, c] = float32(0.0)

        # FA2 Alg. 1 line 6: only the key tiles that some row of this query tile can see
        for n_block in range(count_n_blocks(first_row, seqlen_q, seqlen_k)):
            first_col = n_block * BLOCK_N
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA2 Alg. 1 line 7
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
            # Each warp reads what all warps have loaded.
            cuda.syncthreads()

            # FA2 Alg. 1 line 8, each warp for its own keys
            compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale)
            if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(S_reg, first_row + row, first_col + col, seqlen_q, seqlen_k)

            for i in range(ROWS):  # FA2 Alg. 1 line 9: a row's maximum crosses the warps
                m = row_max(S_reg, i)
                if lane_col == 0:
                    max_lane[warp, LANE_ROWS * i] = max(m_reg[i], m)
            # Every warp reads the maxima of all slices.
            cuda.syncthreads()
            for i in range(ROWS):  # FA2 Alg. 1 line 9: each warp sums its own keys
                m = max_across(max_lane, LANE_ROWS * i)
                l = exponentiate(S_reg, i, finite_max(m))
                if lane_col == 0:
                    rescale = math.exp(m_reg[i] - finite_max(m))
                    l_reg[i] = rescale * l_reg[i] + l
                    if warp == 0:
                        scale_lane[LANE_ROWS * i] = rescale
                m_reg[i] = m

            # FA2 Alg. 1 line 10: P~ V crosses the warps, EXCHANGE_COLS columns at a time
            for first_d in range(0, HEAD_DIM, EXCHANGE_COLS):
                store_partial(partial_smem, S_reg, V_smem, first_key, first_d)
                # Every thread sums elements that all warps have written.
                cuda.syncthreads()
                update_output(O_reg, partial_smem, scale_smem)
                # What comes next overwrites what slower threads still sum.
                cuda.syncthreads()

        for i in range(ROWS):
            if lane_col == 0:
                max_lane[warp, LANE_ROWS * i] = m_reg[i]
                sum_lane[warp, LANE_ROWS * i] = l_reg[i]
        # The threads that own O read m and the parts of l of all slices.
        cuda.syncthreads()
        # FA2 Alg. 1 lines 12, 13, 14, 15
        O_head, LSE_head = O_gmem[batch, :, head], LSE_gmem[batch, head]
        store_output(O_head, LSE_head, O_reg, max_smem, sum_smem, first_row)

    forward.__name__ = f"fa2_seq_parallel_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    return [
        KernelLaunch(
            kernel=make_forward(config, tensors.dtype, tensors.causal),
            grid=(batch * heads, -(-seqlen_q // config.block_m)),
            threads=config.num_threads,
            shared_bytes=config.sliced_k_shared_bytes,
            arguments=(*tensors.operands, tensors.softmax_scale),
        )
    ]
