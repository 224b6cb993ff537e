"""FlashAttention-1: tiles and online softmax against `standard`, so S and P never leave the chip.

One thread block computes a whole head (FA1 Alg. 1). The outer loop runs over tiles of keys and
values, the inner loop over tiles of queries, so O, m and l of every query tile are read from HBM
and written back on every pass of the outer loop. Within a tile the warps slice K and V ("sliced-K",
FA2 section 3.3 and Fig. 3 left):

                   K and V tile of 64 rows, 4 warps
                   warp 0   warp 1   warp 2   warp 3
                  +--------+--------+--------+--------+
        Q tile    |  keys  |  keys  |  keys  |  keys  |   each warp: all rows of S,
        (shared)  | 0 - 15 |16 - 31 |32 - 47 |48 - 63 |   its own columns
                  +--------+--------+--------+--------+

A row of S therefore crosses all warps: its maximum, its sum and its product with V are partial
results that meet in shared memory, with barriers between writing and reading them.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import EXCHANGE_COLS, SLICED_K_LANES, TileConfig
from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.dtypes import FROM_FLOAT32
from fa2_numba.device.mask import make_mask_scores
from fa2_numba.device.products import make_accumulate_values, make_compute_scores
from fa2_numba.device.softmax import (
    finite_max,
    log_sum_exp,
    make_exponentiate,
    make_row_max,
    share,
)
from fa2_numba.device.tiles import locate_head, make_load_tile, shared_tile
from fa2_numba.launch import ForwardTensors, KernelLaunch

# Rows of scale_smem: the factors of the old O and of the new tile's P~ V.
OLD, NEW = 0, 1


@cache
def make_across_warps(num_warps: int):
    """`max_across(max_smem, r)`, `sum_across(sum_smem, r)`: row r over the slices of all warps."""

    @device_function
    def max_across(max_smem, r):
        m = max_smem[0, r]
        for w in range(1, num_warps):
            m = max(m, max_smem[w, r])
        return m

    @device_function
    def sum_across(sum_smem, r):
        l = sum_smem[0, r]
        for w in range(1, num_warps):
            l += sum_smem[w, r]
        return l

    return max_across, sum_across


@cache
def make_update_statistics(config: TileConfig):
    """`update_statistics(...)`: m and l of the query tile, one thread a row.

    m_rows, l_rows and LSE_rows are the query tile's part of the arrays in HBM. Leaves in scale_smem
    what row r of the old O (scale_smem[OLD, r]) and of the tile's P~ V (scale_smem[NEW, r]) must be
    multiplied with to be parts of the new O.
    """
    BLOCK_M, NUM_THREADS = config.block_m, config.num_threads
    max_across, sum_across = make_across_warps(config.num_warps)

    @device_function
    def update_statistics(scale_smem, max_smem, sum_smem, m_rows, l_rows, LSE_rows, first, last):
        for r in range(cuda.threadIdx.x, BLOCK_M, NUM_THREADS):
            if r < m_rows.shape[0]:
                m_old, l_old = NEG_INF, float32(0.0)  # FA1 Alg. 1 line 2
                if not first:
                    m_old, l_old = m_rows[r], l_rows[r]  # FA1 Alg. 1 line 8
                m_tile, l_tile = max_across(max_smem, r), sum_across(sum_smem, r)
                m_new = max(m_old, m_tile)  # FA1 Alg. 1 line 11
                old = math.exp(m_old - finite_max(m_new)) * l_old
                new = math.exp(m_tile - finite_max(m_new))
                l_new = old + new * l_tile
                # Divided, not multiplied by 1 / l_new: a tile that adds nothing leaves O as it is.
                scale_smem[OLD, r] = share(old, l_new)
                scale_smem[NEW, r] = share(new, l_new)
                m_rows[r], l_rows[r] = m_new, l_new  # FA1 Alg. 1 line 13
                if last:
                    # FlashAttention-1 itself keeps m and l; the interface wants their logarithm.
                    LSE_rows[r] = log_sum_exp(m_new, l_new)

    return update_statistics


@cache
def make_update_output(config: TileConfig, dtype: str):
    """`update_output(...)`: add the warps' partial P~ V to EXCHANGE_COLS columns of O in HBM."""
    NUM_WARPS, NUM_THREADS = config.num_warps, config.num_threads
    EXCHANGE_SIZE = config.block_m * EXCHANGE_COLS
    from_float32 = FROM_FLOAT32[dtype]

    @device_function
    def update_output(O_rows, O_acc_rows, partial_smem, scale_smem, first_d, first, last):
        rows, head_dim = O_rows.shape[0], O_rows.shape[1]
        for e in range(cuda.threadIdx.x, EXCHANGE_SIZE, NUM_THREADS):
            r, c = e // EXCHANGE_COLS, e % EXCHANGE_COLS
            if r < rows and first_d + c < head_dim:
                o = float32(0.0)
                for w in range(NUM_WARPS):
                    o += partial_smem[w, r, c]
                o *= scale_smem[NEW, r]
                if not first:  # FA1 Alg. 1 line 8
                    o += scale_smem[OLD, r] * O_acc_rows[r, first_d + c]
                O_acc_rows[r, first_d + c] = o
                if last:
                    O_rows[r, first_d + c] = from_float32(o)

    return update_output


@cache
def make_forward(config: TileConfig, dtype: str, causal: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: Q, K, V, O, LSE as in `ForwardTensors`, the float32 workspaces O_acc (like O) and
    m, l (like LSE), softmax_scale (float32). Grid: batch x heads. Shared memory: the Q, K and V
    tiles, the warps' partial O and row statistics, `sliced_k_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, HEAD_DIM = config.block_m, config.block_n, config.head_dim
    NUM_WARPS, ROW_STRIDE = config.num_warps, config.row_stride
    WARP_COLS = BLOCK_N // NUM_WARPS
    LANE_ROWS, LANE_COLS = SLICED_K_LANES
    ROWS, COLS, OUT_COLS = config.sliced_k_elements
    K_OFFSET = BLOCK_M * ROW_STRIDE
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE
    PARTIAL_OFFSET = V_OFFSET + BLOCK_N * HEAD_DIM
    MAX_OFFSET = PARTIAL_OFFSET + NUM_WARPS * BLOCK_M * EXCHANGE_COLS
    SUM_OFFSET = MAX_OFFSET + NUM_WARPS * BLOCK_M
    SCALE_OFFSET = SUM_OFFSET + NUM_WARPS * BLOCK_M

    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    compute_scores = make_compute_scores(ROWS, COLS, SLICED_K_LANES, HEAD_DIM)
    mask_scores = make_mask_scores(ROWS, COLS, SLICED_K_LANES, causal)
    row_max = make_row_max(COLS, LANE_COLS)
    exponentiate = make_exponentiate(COLS, LANE_COLS)
    max_across, _ = make_across_warps(NUM_WARPS)
    update_statistics = make_update_statistics(config)
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SLICED_K_LANES)
    update_output = make_update_output(config, dtype)

    def forward(
        Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, O_acc_gmem, m_gmem, l_gmem, softmax_scale
    ):
        seqlen_q, heads = Q_gmem.shape[1], Q_gmem.shape[2]
        seqlen_k, kv_heads = K_gmem.shape[1], K_gmem.shape[2]
        batch, head, kv_head = locate_head(heads, kv_heads)
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        row, lane_col = lane // LANE_COLS, lane % LANE_COLS
        first_key = warp * WARP_COLS

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, HEAD_DIM))
        partial_smem = shared_tile(smem, PARTIAL_OFFSET, (NUM_WARPS, BLOCK_M, EXCHANGE_COLS))
        max_smem = shared_tile(smem, MAX_OFFSET, (NUM_WARPS, BLOCK_M))
        sum_smem = shared_tile(smem, SUM_OFFSET, (NUM_WARPS, BLOCK_M))
        scale_smem = shared_tile(smem, SCALE_OFFSET, (2, BLOCK_M))
        S_reg = cuda.local.array((ROWS, COLS), float32)
        O_reg = cuda.local.array((ROWS, OUT_COLS), float32)

        for first_col in range(0, seqlen_k, BLOCK_N):  # FA1 Alg. 1 line 5
            first, last = first_col == 0, first_col + BLOCK_N >= seqlen_k
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA1 Alg. 1 line 6
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)

            for first_row in range(0, seqlen_q, BLOCK_M):  # FA1 Alg. 1 line 7
                last_row = min(first_row + BLOCK_M, seqlen_q)
                load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA1 Alg. 1 line 8
                # Each warp reads what all warps have loaded.
                cuda.syncthreads()

                # FA1 Alg. 1 line 9, each warp for its own keys
                compute_scores(S_reg, Q_smem, K_smem, row, first_key + lane_col, softmax_scale)
                col = first_col + first_key + lane_col
                mask_scores(S_reg, first_row + row, col, seqlen_q, seqlen_k)

                for i in range(ROWS):  # FA1 Alg. 1 line 10: a row's maximum crosses the warps
                    m = row_max(S_reg, i)
                    if lane_col == 0:
                        max_smem[warp, row + LANE_ROWS * i] = m
                # Every warp reads the maxima of all slices.
                cuda.syncthreads()
                for i in range(ROWS):  # FA1 Alg. 1 line 10: and so does its sum
                    m = max_across(max_smem, row + LANE_ROWS * i)
                    l = exponentiate(S_reg, i, finite_max(m))
                    if lane_col == 0:
                        sum_smem[warp, row + LANE_ROWS * i] = l
                # One thread a row reads the sums of all slices.
                cuda.syncthreads()
                # The query tile's rows in HBM
                m_rows = m_gmem[batch, head, first_row:last_row]
                l_rows = l_gmem[batch, head, first_row:last_row]
                LSE_rows = LSE_gmem[batch, head, first_row:last_row]
                update_statistics(
                    scale_smem, max_smem, sum_smem, m_rows, l_rows, LSE_rows, first, last
                )

                O_rows = O_gmem[batch, first_row:last_row, head]
                O_acc_rows = O_acc_gmem[batch, first_row:last_row, head]
                # FA1 Alg. 1 line 12: P~ V crosses the warps, EXCHANGE_COLS columns at a time
                for first_d in range(0, HEAD_DIM, EXCHANGE_COLS):
                    for i in range(ROWS):
                        for c in range(OUT_COLS):
                            O_reg[i, c] = float32(0.0)
                    accumulate_values(O_reg, S_reg, V_smem, first_key, first_d + lane_col)
                    for i in range(ROWS):
                        for c in range(OUT_COLS):
                            d = lane_col + LANE_COLS * c
                            partial_smem[warp, row + LANE_ROWS * i, d] = O_reg[i, c]
                    # Every thread sums elements that all warps have written.
                    cuda.syncthreads()
                    update_output(
                        O_rows, O_acc_rows, partial_smem, scale_smem, first_d, first, last
                    )
                    # What comes next overwrites what slower threads still sum.
                    cuda.syncthreads()

    forward.__name__ = f"fa1_sliced_k_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE, with float32 O, m and l in HBM between passes."""
    batch, seqlen_q, heads, head_dim = tensors.Q.shape
    workspaces = (
        tensors.allocate((batch, seqlen_q, heads, head_dim)),
        tensors.allocate((batch, heads, seqlen_q)),
        tensors.allocate((batch, heads, seqlen_q)),
    )
    return [
        KernelLaunch(
            kernel=make_forward(config, tensors.dtype, tensors.causal),
            grid=(batch * heads,),
            threads=config.num_threads,
            shared_bytes=config.sliced_k_shared_bytes,
            arguments=(*tensors.operands, *workspaces, tensors.softmax_scale),
        )
    ]
