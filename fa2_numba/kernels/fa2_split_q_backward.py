"""The backward pass of `fa2_split_q`: dQ, dK and dV without S or P in HBM (FA2 Alg. 2).

    delta:    D = rowsum(dO o O), dQ = 0                 `backward_parts`
    backward: dK, dV, and dQ by atomics                  one block a (key tile, KV head)
    convert:  dQ = softmax_scale * dQ                    `backward_parts`

S is computed once more, and P follows from the LSE that the forward pass has left: a row's maximum
and sum are not needed again. A block keeps its tiles of K and V in shared memory and its dK and dV
in registers, and visits the query tiles that see its keys, of all query heads that share them.

The tile of scores lies on its side, S^T = K Q^T: what warps own are rows of keys. A row of dK and
dV then lies within one warp, as a row of O does in the forward pass, and the same verbs make it:

                 Q tile, dO tile: read by every warp
                 +---------------------------------------+
        warp 0   |  rows   0 .. 15 of S^T, dS^T, dK, dV  |
        warp 1   |  rows  16 .. 31 of S^T, dS^T, dK, dV  |   K, V tiles of 64 keys,
        warp 2   |  rows  32 .. 47 of S^T, dS^T, dK, dV  |   4 warps
        warp 3   |  rows  48 .. 63 of S^T, dS^T, dK, dV  |
                 +---------------------------------------+

Only dS crosses warps, through shared memory: for dQ = dS K, warps own rows of queries. Many blocks
add to one row of dQ, in an order that is theirs alone; since float32 sums depend on their order,
dQ differs in its last bits from run to run. A deterministic pass takes dQ from a kernel of its own,
one block a query tile, which computes S, dP and dS another time:

    delta, then backward without dQ, then queries: dQ

What a head of N queries and keys costs, in float32 and whole tiles, if dQ is summed by atomics (T
visited pairs of tiles, with a causal mask about half; W = NUM_WARPS):

    global_load_bytes  = 4 * (5*N*D + T * BLOCK_M*(2*D + 8*W))
    global_store_bytes = 4 * (4*N*D + N)
    atomics            = T * BLOCK_M*D
    shared_load_bytes  = T * (16*D*(4*W*BLOCK_M + (W + 4)*BLOCK_N) + 4*BLOCK_M*BLOCK_N)
    shared_store_bytes = 8*N*D + T * 4*BLOCK_M*(2*D + BLOCK_N)
    barriers           = 2*T
    other_flops        = T * 5*BLOCK_M*BLOCK_N + N*(3*D + 160)

For S and dP a lane reads BLOCK_N / 4W rows of K and V and BLOCK_M / 8 of Q and dO; for dV, dK and
dQ D / 8 columns of dO, Q and K, all rows. A pair of tiles loads Q, dO and, in each warp, LSE and D.
other_flops: 5 for an element of S: two products are scaled, LSE and D subtracted, P o dS. A row has
one butterfly of 5 steps for D; and dQ, dK and dV are scaled.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.device.backward import (
    make_add_rows,
    make_clear,
    make_load_statistics,
    make_store_rows,
)
from fa2_numba.device.mask import make_mask_keys, make_mask_scores, make_needs_mask
from fa2_numba.device.products import make_accumulate_values, make_compute_scores
from fa2_numba.device.tiles import (
    locate_head,
    make_count_n_blocks,
    make_first_visible_row,
    make_load_tile,
    make_locate_element,
    shared_tile,
)
from fa2_numba.kernels.backward_parts import key_grid, plan_convert, plan_delta, query_grid
from fa2_numba.launch import BackwardTensors, KernelLaunch


@cache
def make_backward(config: TileConfig, dtype: str, causal: bool, with_dq: bool):
    """The kernel of dK and dV, and of dQ / softmax_scale if with_dq.

    Arguments: Q, K, V, dO, LSE as in `BackwardTensors`; D (batch, heads, seqlen_q) float32; dQ_sum
    float32, shaped like dQ (left as it is unless with_dq); dK, dV; softmax_scale (float32).
    Grid: (batch x KV heads, key tiles). Shared memory: `backward_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, ROW_STRIDE = config.block_m, config.block_n, config.row_stride
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    ROWS, COLS, OUT_COLS = config.transposed.split_q_elements
    QUERY_ROWS, KEY_COLS, _ = config.split_q_elements
    DO_OFFSET = BLOCK_M * ROW_STRIDE
    K_OFFSET = 2 * DO_OFFSET
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE
    DS_OFFSET = V_OFFSET + BLOCK_N * ROW_STRIDE
    DS_STRIDE = config.ds_stride

    locate_key = make_locate_element(config.transposed)
    locate_query = make_locate_element(config)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    first_visible_row = make_first_visible_row(config, causal)
    load_statistics = make_load_statistics(COLS, LANE_COLS)
    compute_scores = make_compute_scores(ROWS, COLS, SPLIT_Q_LANES, config.head_dim)
    needs_mask = make_needs_mask(config, causal)
    mask_keys = make_mask_keys(ROWS, COLS, SPLIT_Q_LANES, causal)
    accumulate_keys = make_accumulate_values(ROWS, COLS, OUT_COLS, SPLIT_Q_LANES)
    accumulate_queries = make_accumulate_values(QUERY_ROWS, KEY_COLS, OUT_COLS, SPLIT_Q_LANES)
    clear_keys = make_clear(ROWS, OUT_COLS)
    clear_queries = make_clear(QUERY_ROWS, OUT_COLS)
    store_rows = make_store_rows(ROWS, OUT_COLS, dtype)
    add_rows = make_add_rows(QUERY_ROWS, OUT_COLS)

    def backward(
        Q_gmem, K_gmem, V_gmem, dO_gmem, LSE_gmem, D_gmem, dQ_sum_gmem, dK_gmem, dV_gmem, scale
    ):
        seqlen_q, seqlen_k, kv_heads = Q_gmem.shape[1], K_gmem.shape[1], K_gmem.shape[2]
        group = Q_gmem.shape[2] // kv_heads
        batch, kv_head, _ = locate_head(kv_heads, kv_heads)
        first_col = cuda.blockIdx.y * BLOCK_N  # FA2 Alg. 2 line 5: one block a key tile
        row, col = locate_key()
        query, d = locate_query()

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        dO_smem = shared_tile(smem, DO_OFFSET, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, ROW_STRIDE))
        dS_smem = shared_tile(smem, DS_OFFSET, (BLOCK_N, DS_STRIDE))  # dS^T
        P_reg = cuda.local.array((ROWS, COLS), float32)  # S^T, then P^T, then dS^T
        dP_reg = cuda.local.array((ROWS, COLS), float32)  # dP^T
        dK_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        dV_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        dS_reg = cuda.local.array((QUERY_ROWS, KEY_COLS), float32)
        dQ_reg = cuda.local.array((QUERY_ROWS, OUT_COLS), float32)
        lse_reg = cuda.local.array(COLS, float32)
        D_reg = cuda.local.array(COLS, float32)

        load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA2 Alg. 2 line 6
        load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
        clear_keys(dK_reg)  # FA2 Alg. 2 line 7
        clear_keys(dV_reg)

        begin = first_visible_row(first_col, seqlen_q, seqlen_k)
        for head in range(kv_head * group, (kv_head + 1) * group):
            # FA2 Alg. 2 line 8: only the query tiles in which some row sees this key tile
            for first_row in range(begin, seqlen_q, BLOCK_M):
                load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA2 Alg. 2 line 9
                load_q_tile(dO_smem, dO_gmem, batch, head, first_row)
                load_statistics(lse_reg, D_reg, LSE_gmem, D_gmem, batch, head, first_row + col)
                # Each warp reads what all warps have loaded, K and V too.
                cuda.syncthreads()

                compute_scores(P_reg, K_smem, Q_smem, row, col, scale)  # FA2 Alg. 2 line 10
                if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                    mask_keys(P_reg, first_col + row, first_row + col, seqlen_q, seqlen_k)
                for i in range(ROWS):
                    for j in range(COLS):  # FA2 Alg. 2 line 11
                        P_reg[i, j] = math.exp(P_reg[i, j] - lse_reg[j])
                accumulate_keys(dV_reg, P_reg, dO_smem, 0, col)  # FA2 Alg. 2 line 12
                # FA2 Alg. 2 line 13: dP^T = V dO^T
                compute_scores(dP_reg, V_smem, dO_smem, row, col, float32(1.0))
                for i in range(ROWS):
                    for j in range(COLS):  # FA2 Alg. 2 line 14
                        P_reg[i, j] *= dP_reg[i, j] - D_reg[j]
                accumulate_keys(dK_reg, P_reg, Q_smem, 0, col)  # FA2 Alg. 2 line 16

                if with_dq:
                    for i in range(ROWS):
                        for j in range(COLS):
                            dS_smem[row + LANE_ROWS * i, col + LANE_COLS * j] = P_reg[i, j]
                # A row of dS has a part from every warp. And no warp may load the next Q and dO
                # tiles while a slower one reads these.
                cuda.syncthreads()
                if with_dq:  # FA2 Alg. 2 line 15
                    for i in range(QUERY_ROWS):
                        for j in range(KEY_COLS):
                            dS_reg[i, j] = dS_smem[d + LANE_COLS * j, query + LANE_ROWS * i]
                    clear_queries(dQ_reg)
                    accumulate_queries(dQ_reg, dS_reg, K_smem, 0, d)
                    add_rows(dQ_sum_gmem, batch, head, first_row + query, d, dQ_reg)

        # FA2 Alg. 2 line 18
        store_rows(dK_gmem, batch, kv_head, first_col + row, col, dK_reg, scale)
        store_rows(dV_gmem, batch, kv_head, first_col + row, col, dV_reg, float32(1.0))

    options = ("_causal" if causal else "") + ("" if with_dq else "_without_dq")
    backward.__name__ = f"fa2_split_q_backward_{config}_{dtype}{options}"
    return cuda.jit(backward)


@cache
def make_queries(config: TileConfig, dtype: str, causal: bool):
    """The kernel of dQ alone, which sums each row in one block, in the order of the key tiles.

    Arguments: Q, K, V, dO, LSE, dQ as in `BackwardTensors`, D before dQ; softmax_scale (float32).
    Grid: (batch x heads, query tiles). Shared memory: `query_parallel_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, ROW_STRIDE = config.block_m, config.block_n, config.row_stride
    ROWS, COLS, OUT_COLS = config.split_q_elements
    DO_OFFSET = BLOCK_M * ROW_STRIDE
    K_OFFSET = 2 * DO_OFFSET
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_STRIDE

    locate_element = make_locate_element(config)
    load_q_tile = make_load_tile(config, BLOCK_M, dtype)
    load_kv_tile = make_load_tile(config, BLOCK_N, dtype)
    count_n_blocks = make_count_n_blocks(config, causal)
    load_statistics = make_load_statistics(ROWS, SPLIT_Q_LANES[0])
    compute_scores = make_compute_scores(ROWS, COLS, SPLIT_Q_LANES, config.head_dim)
    needs_mask = make_needs_mask(config, causal)
    mask_scores = make_mask_scores(ROWS, COLS, SPLIT_Q_LANES, causal)
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SPLIT_Q_LANES)
    clear = make_clear(ROWS, OUT_COLS)
    store_rows = make_store_rows(ROWS, OUT_COLS, dtype)

    def queries(Q_gmem, K_gmem, V_gmem, dO_gmem, LSE_gmem, D_gmem, dQ_gmem, softmax_scale):
        seqlen_q, seqlen_k = Q_gmem.shape[1], K_gmem.shape[1]
        batch, head, kv_head = locate_head(Q_gmem.shape[2], K_gmem.shape[2])
        first_row = cuda.blockIdx.y * BLOCK_M
        row, col = locate_element()

        smem = cuda.shared.array(0, float32)
        Q_smem = shared_tile(smem, 0, (BLOCK_M, ROW_STRIDE))
        dO_smem = shared_tile(smem, DO_OFFSET, (BLOCK_M, ROW_STRIDE))
        K_smem = shared_tile(smem, K_OFFSET, (BLOCK_N, ROW_STRIDE))
        V_smem = shared_tile(smem, V_OFFSET, (BLOCK_N, ROW_STRIDE))
        P_reg = cuda.local.array((ROWS, COLS), float32)  # S, then P, then dS
        dP_reg = cuda.local.array((ROWS, COLS), float32)
        dQ_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        lse_reg = cuda.local.array(ROWS, float32)
        D_reg = cuda.local.array(ROWS, float32)

        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)
        load_q_tile(dO_smem, dO_gmem, batch, head, first_row)
        load_statistics(lse_reg, D_reg, LSE_gmem, D_gmem, batch, head, first_row + row)
        clear(dQ_reg)

        for n_block in range(count_n_blocks(first_row, seqlen_q, seqlen_k)):
            first_col = n_block * BLOCK_N
            # A slower warp may still be reading the previous K and V tiles.
            cuda.syncthreads()
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
            # Each warp reads what all warps have loaded.
            cuda.syncthreads()

            compute_scores(P_reg, Q_smem, K_smem, row, col, softmax_scale)
            if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(P_reg, first_row + row, first_col + col, seqlen_q, seqlen_k)
            compute_scores(dP_reg, dO_smem, V_smem, row, col, float32(1.0))
            for i in range(ROWS):
                for j in range(COLS):
                    p = math.exp(P_reg[i, j] - lse_reg[i])
                    P_reg[i, j] = p * (dP_reg[i, j] - D_reg[i])
            accumulate_values(dQ_reg, P_reg, K_smem, 0, col)

        store_rows(dQ_gmem, batch, head, first_row + row, col, dQ_reg, softmax_scale)

    queries.__name__ = f"fa2_split_q_queries_{config}_{dtype}" + ("_causal" if causal else "")
    return cuda.jit(queries)


def plan_backward(tensors: BackwardTensors, config: TileConfig) -> list[KernelLaunch]:
    """The launches that compute dQ, dK and dV, with float32 D and sums of dQ in HBM."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    D = tensors.allocate((batch, heads, seqlen_q))
    dQ_sum = None if tensors.deterministic else tensors.allocate(tensors.dQ.shape)
    operands = tensors.Q, tensors.K, tensors.V, tensors.dO, tensors.LSE, D
    backward = KernelLaunch(
        kernel=make_backward(config, tensors.dtype, tensors.causal, not tensors.deterministic),
        grid=key_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=config.backward_shared_bytes,
        arguments=(
            *operands,
            tensors.dQ if tensors.deterministic else dQ_sum,
            tensors.dK,
            tensors.dV,
            tensors.softmax_scale,
        ),
    )
    queries = KernelLaunch(
        kernel=make_queries(config, tensors.dtype, tensors.causal),
        grid=query_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=config.query_parallel_shared_bytes,
        arguments=(*operands, tensors.dQ, tensors.softmax_scale),
    )
    last = queries if tensors.deterministic else plan_convert(tensors, config, dQ_sum)
    return [plan_delta(tensors, config, D, dQ_sum), backward, last]
