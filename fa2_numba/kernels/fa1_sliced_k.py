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

What a head of N queries and keys costs, in float32 and whole tiles (T_m = N / BLOCK_M of queries,
T_n = N / BLOCK_N of keys, W = NUM_WARPS):

    global_load_bytes  = 4 * (2*N*D + T_n*N*D + (T_n-1)*(N*D + 2*N))
    global_store_bytes = 4 * (T_n*(N*D + 2*N) + N*D + N)
    shared_load_bytes  = T_m*T_n * 16*D*(W*BLOCK_M + 4*BLOCK_N) + 4*(T_n-1)*N*D
                         + T_m*T_n * 4*BLOCK_M*((W+1)*D + 4*W*W + 2*W)
    shared_store_bytes = 8*N*D + T_m*T_n * 4*BLOCK_M*((W+1)*D + 2*W + 2)
    barriers           = T_m*T_n * (3 + 2*D/16)
    other_flops        = T_m*T_n * BLOCK_M*(4*BLOCK_N + W*D + 4*W*W + 10*W + 6)
                         + 2*(T_n-1)*N*D + N

K and V are loaded once. Each of the T_n passes loads Q, writes O, m and l, and reads them, but for
the first; the last writes the output. With M numbers on chip a tile has about M / D rows, so T_n is
about N D / M and what crosses HBM is of the order of N^2 D^2 / M (FA1 theorem 2). Each exchange of
16 columns takes two barriers.

other_flops: an element of S is scaled, compared, subtracted from and summed (4). W parts of an
element of O are summed and scaled (W), the old element is scaled and added (2, but for the first
pass). A row lies in 4 lanes of each warp; each takes 2 steps over lanes twice and the maximum of W
parts (4 W (W + 2)), and one thread updates m and l (2 W + 6).
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import EXCHANGE_COLS, SLICED_K_LANES, TileConfig
from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.fa1_passes import make_update_output, make_update_statistics
from fa2_numba.device.mask import make_mask_scores
from fa2_numba.device.products import make_compute_scores
from fa2_numba.device.sliced_k import (
    make_across_warps,
    make_exchange_tiles,
    make_store_partial,
)
from fa2_numba.device.softmax import finite_max, make_exponentiate, make_row_max
from fa2_numba.device.tiles import locate_head, make_load_tile, shared_tile
from fa2_numba.launch import ForwardTensors, KernelLaunch


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
    ROWS, COLS, _ = config.sliced_k_elements
    K_OFFSET = BLOCK_M * ROW_STRIDE
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE

    exchange_tiles = make_exchange_tiles(config, 2)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    compute_scores = make_compute_scores(ROWS, COLS, SLICED_K_LANES, HEAD_DIM)
    mask_scores = make_mask_scores(ROWS, COLS, SLICED_K_LANES, causal)
    row_max = make_row_max(COLS, LANE_COLS)
    exponentiate = make_exponentiate(COLS, LANE_COLS)
    max_across, _ = make_across_warps(NUM_WARPS)
    update_statistics = make_update_statistics(config)
    store_partial = make_store_partial(config)
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
        col = first_key + lane_col

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, HEAD_DIM))
        partial_smem, max_smem, sum_smem, scale_smem = exchange_tiles(smem)
        # Seen from the lane's first row on: further indices are constants and cost no registers.
        max_lane, sum_lane = max_smem[:, row:], sum_smem[:, row:]
        S_reg = cuda.local.array((ROWS, COLS), float32)

        for first_col in range(0, seqlen_k, BLOCK_N):  # FA1 Alg. 1 line 5
            first, last = first_col == 0, first_col + BLOCK_N >= seqlen_k
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA1 Alg. 1 line 6
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)

            for first_row in range(0, seqlen_q, BLOCK_M):  # FA1 Alg. 1 line 7
                load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA1 Alg. 1 line 8
                # Each warp reads what all warps have loaded.
                cuda.syncthreads()

                # FA1 Alg. 1 line 9, each warp for its own keys
                compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale)
                mask_scores(S_reg, first_row + row, first_col + col, seqlen_q, seqlen_k)

                for i in range(ROWS):  # FA1 Alg. 1 line 10: a row's maximum crosses the warps
                    m = row_max(S_reg, i)
                    if lane_col == 0:
                        max_lane[warp, LANE_ROWS * i] = m
                # Every warp reads the maxima of all slices.
                cuda.syncthreads()
                for i in range(ROWS):  # FA1 Alg. 1 line 10: and so does its sum
                    m = max_across(max_lane, LANE_ROWS * i)
                    l = exponentiate(S_reg, i, finite_max(m))
                    if lane_col == 0:
                        sum_lane[warp, LANE_ROWS * i] = l
                # One thread a row reads the sums of all slices.
                cuda.syncthreads()
                # FA1 Alg. 1 lines 2, 8, 11, 13
                statistics = m_gmem[batch, head], l_gmem[batch, head], LSE_gmem[batch, head]
                update_statistics(
                    scale_smem, max_smem, sum_smem, statistics, first_row, first, last
                )
                outputs = O_gmem[batch, :, head], O_acc_gmem[batch, :, head]
                # FA1 Alg. 1 line 12: P~ V crosses the warps, EXCHANGE_COLS columns at a time
                for first_d in range(0, HEAD_DIM, EXCHANGE_COLS):
                    store_partial(partial_smem, S_reg, V_smem, first_key, first_d)
                    # Every thread sums elements that all warps have written.
                    cuda.syncthreads()
                    update_output(
                        outputs, partial_smem, scale_smem, first_row, first_d, first, last
                    )
                    # What comes next overwrites what slower threads still sum.
                    cuda.syncthreads()

    forward.__name__ = f"fa1_sliced_k_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE, with float32 O, m and l in HBM between passes."""
    batch, _, heads, _ = tensors.Q.shape
    workspaces = [tensors.allocate(x.shape) for x in (tensors.Q, tensors.LSE, tensors.LSE)]
    return [
        KernelLaunch(
            kernel=make_forward(config, tensors.dtype, tensors.causal),
            grid=(batch * heads,),
            threads=config.num_threads,
            shared_bytes=config.sliced_k_shared_bytes,
            arguments=(*tensors.operands, *workspaces, tensors.softmax_scale),
        )
    ]
