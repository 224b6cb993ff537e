"""The backward pass of `fa2_tensor_core`: a thread block owns keys and visits the queries.

P is not stored by the forward pass, but computed anew from the log-sum-exp (FA2 section 3.1, Alg.
2). A thread block owns BLOCK_N keys of a key-value head, its dK and dV stay in registers, and it
visits the tiles of queries that see its keys, those of all query heads that share the head. Keys
are rows here: S^T = K Q^T and dP^T = V dO^T. The warps split the keys, and where rows are wide,
those with the same keys split the queries of S^T and the columns of dK and dV:

                     queries of a tile            columns of dK, dV
                   +---------+---------+        +---------+---------+
     keys 0 .. 31  | warp 0  | warp 4  |        | warp 0  | warp 4  |
         32 .. 63  | warp 1  | warp 5  |        | warp 1  | warp 5  |
         64 .. 95  | warp 2  | warp 6  |        | warp 2  | warp 6  |
         96 .. 127 | warp 3  | warp 7  |        | warp 3  | warp 7  |
                   +---------+---------+        +---------+---------+

P^T and dS^T cross the warps through shared memory. A tile of dQ sums over all keys, and so over
blocks: each adds its part in HBM, in float32, in whatever order they come. So dQ may differ from
run to run in its last bits; if it may not, this kernel leaves it out, and another one, with a block
for every query tile, computes it alone (`fa2_tensor_core_backward_dq`). dK and dV always repeat.

What a head of N queries and keys costs, in 16 bits, whole tiles and two stages, if dQ is summed by
atomics (T_n = N / BLOCK_N tiles of keys, T visited pairs of tiles, with a causal mask about half;
D = 32, 64, 128 or 256, like the tiles; W_k = KEY_WARPS of all W, W_q = W / W_k; S = QUERY_STEP):

    global_load_bytes  = 12*N*D + 4*N + T * BLOCK_M*(4*D + 8)
    global_store_bytes = 10*N*D + 8*N
    atomics            = T * BLOCK_M*D
    shared_load_bytes  = 4*N*D + T * (2*D*(2*BLOCK_M*BLOCK_N // S + 4*W_k*BLOCK_M + 2*BLOCK_N)
        + BLOCK_M*BLOCK_N*(4*W_q + W) + 64*W_k*BLOCK_M)
    shared_store_bytes = 8*N*D + T * BLOCK_M*(4*D + 4*BLOCK_N + 8)
    barriers           = T_n + 2*T
    tensor_core_instructions = T * 5*BLOCK_M*BLOCK_N*D // 2048
    matrix_loads       = T * (D*(2*BLOCK_M*BLOCK_N // S + 4*W_k*BLOCK_M + 2*BLOCK_N)
        + BLOCK_M*BLOCK_N*(2*W_q + W // 2)) // 256
    other_flops        = T*2*BLOCK_M*BLOCK_N + 2*N*D + N + N*D//8 * ((D // 8).bit_length() - 1)

A pair of tiles loads Q and dO, each of which enters two products, and adds to dQ by BLOCK_M x D
atomics, as many bytes as Q and dO have. What is done once: O, dO and LSE are read for D, the sums
of dQ cleared, read back and rounded, K and V loaded, dK and dV stored. other_flops: 2 for an
element of dS; the gradients of Q and K are scaled, and D / 8 lanes a row sum D by shuffles.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.backward import make_clear
from fa2_numba.device.layouts import ac_element
from fa2_numba.device.mask import make_mask_transposed
from fa2_numba.device.ptx import shared_address
from fa2_numba.device.swizzle import TILE_ALIGNMENT, make_chunk_offset
from fa2_numba.device.tensor_core_gradients import (
    make_accumulate_gradient,
    make_add_query_gradient,
    make_differentiate,
    make_load_statistics,
    make_multiply_keys,
    make_query_gradient_part,
    make_weigh,
)
from fa2_numba.device.tensor_core_products import make_compute_scores
from fa2_numba.device.tensor_core_tiles import (
    make_await_copies,
    make_load_rows,
    make_load_tile,
    make_locate_key_tile,
    make_store_rows,
    row_address,
)
from fa2_numba.kernels.fa2_tensor_core_backward_dq import plan_query_gradient
from fa2_numba.kernels.fa2_tensor_core_backward_parts import plan_convert, plan_statistics
from fa2_numba.launch import BackwardTensors, KernelLaunch, as_bits
from fa2_numba.tensor_core_backward_config import FLOAT_BYTES, BackwardConfig
from fa2_numba.tensor_core_config import CHUNK_ELEMENTS, ELEMENT_BYTES
from fa2_numba.tensor_core_plan import copy_bytes, kernel_name, split_scale


@cache
def make_backward(
    config: BackwardConfig,
    dtype: str,
    causal: bool,
    width: int,
    scale_first: bool,
    with_query_gradient: bool,
):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: the bits of Q, K, V, dO (uint16); the statistics of all queries and the sums of dQ,
    as `plan_statistics` prepares them; the bits of dK, dV; score_scale and exponent_scale
    (`split_scale`); softmax_scale. with_query_gradient: dQ is summed too. Grid: key tiles x KV
    heads x batch. Shared memory: `BackwardConfig.shared_bytes`.
    """
    BLOCK_M, BLOCK_N, STAGES = config.block_m, config.block_n, config.stages
    ROWS, COLS, OUT_COLS = config.elements
    KEY_WARPS, WARP_ROWS = config.key_warps, config.keys_of_a_warp
    WARP_QUERIES, QUERY_STEP = config.queries_of_a_warp, config.query_step
    QUERY_ROWS, QUERY_COLS = config.query_elements
    PAIRS = config.padded_dim // 8
    ROW_BYTES, LINE_BYTES = config.row_bytes, config.line_bytes
    WARP_LINES = 4 * OUT_COLS // config.line_cols
    S_ROW_BYTES = config.score_rows.row_bytes
    V_OFFSET = BLOCK_N * ROW_BYTES
    STAGE_OFFSET, STAGE_BYTES = 2 * V_OFFSET, config.stage_bytes
    DO_OFFSET = BLOCK_M * ROW_BYTES
    STATISTICS_OFFSET = 2 * DO_OFFSET
    P_OFFSET = STAGE_OFFSET + STAGES * STAGE_BYTES
    DS_OFFSET = P_OFFSET + config.score_bytes
    TILE_BYTES = BLOCK_M * config.padded_dim * FLOAT_BYTES
    WITH_QUERY_GRADIENT = with_query_gradient

    locate_key_tile = make_locate_key_tile(BLOCK_N, causal)
    locate_element = device_function(ac_element)
    load_kv_tile = make_load_tile(config, BLOCK_N, width)
    load_q_rows = make_load_rows(config, BLOCK_M, width)
    load_statistics = make_load_statistics(config)
    await_copies = make_await_copies(config)
    s_offset = make_chunk_offset(config.score_rows)
    compute_scores = make_compute_scores(config, dtype, (ROWS, COLS), scale_first)
    behind = V_OFFSET, DO_OFFSET
    compute_products = make_compute_scores(config, dtype, (ROWS, COLS), False, behind)
    mask_scores = make_mask_transposed(ROWS, COLS, causal)
    weigh = make_weigh(config, dtype)
    differentiate = make_differentiate(config, dtype)
    accumulate_values = make_accumulate_gradient(config, dtype, (0, DO_OFFSET))
    accumulate_keys = make_accumulate_gradient(config, dtype, (config.score_bytes, 0))
    query_gradient_part = make_query_gradient_part(config)
    multiply_keys = make_multiply_keys(config, dtype)
    add_query_gradient = make_add_query_gradient(config)
    clear_rows = make_clear(ROWS, OUT_COLS)
    store_rows = make_store_rows(config, dtype, width, WARP_ROWS, WARP_LINES)

    @device_function
    def scale_rows(G_reg, scale):
        for i in range(ROWS):
            for c in range(OUT_COLS):
                G_reg[i, c] *= scale

    @device_function
    def count_query_tiles(Q_gmem, K_gmem, first_col):
        m_blocks = int32((Q_gmem.shape[1] + BLOCK_M - 1) // BLOCK_M)
        first_block = int32(0)
        if causal:
            first_block = int32(max(first_col + Q_gmem.shape[1] - K_gmem.shape[1], 0) // BLOCK_M)
        return int32(uint32(Q_gmem.shape[2]) // uint32(K_gmem.shape[2])), m_blocks, first_block

    @device_function
    def load_queries(stage, arrays, batch, head, Q_head, dO_head, m_block, tile):
        Q_gmem, dO_gmem, statistics_gmem = arrays
        load_q_rows(stage, Q_gmem, batch, head, Q_head, m_block * BLOCK_M)
        load_q_rows(int32(stage + DO_OFFSET), dO_gmem, batch, head, dO_head, m_block * BLOCK_M)
        load_statistics(int32(stage + STATISTICS_OFFSET), statistics_gmem, tile)

    @device_function
    def weigh_queries(K_smem, Q_smem, first_row, first_col, seqlens, scales):
        (seqlen_q, seqlen_k), (score_scale, exponent_scale) = seqlens, scales
        A_reg = cuda.local.array((ROWS, PAIRS), uint32)
        S_reg = cuda.local.array((ROWS, COLS), float32)
        dP_reg = cuda.local.array((ROWS, COLS), float32)
        warp = uint32(cuda.threadIdx.x) // WARP_SIZE
        warp_key = int32(warp % KEY_WARPS * WARP_ROWS)
        row, col = locate_element(uint32(cuda.threadIdx.x) % WARP_SIZE, 0, 0)
        row, col = int32(warp_key + row), int32(col)
        K_warp = int32(K_smem + warp_key * ROW_BYTES)
        for step in range(0, WARP_QUERIES, QUERY_STEP):
            query = int32(warp // KEY_WARPS * WARP_QUERIES) + step
            Q_step = int32(Q_smem + query * ROW_BYTES)
            compute_scores(S_reg, A_reg, K_warp, Q_step, score_scale)  # FA2 Alg. 2 line 10
            # FA2 Alg. 2 line 13, so early that P need not be awaited for it
            compute_products(dP_reg, A_reg, K_warp, Q_step, score_scale)
            hidden = first_col + BLOCK_N > seqlen_k
            if causal:
                last_seen = first_row + seqlen_k - seqlen_q
                hidden = hidden or first_col + BLOCK_N - 1 > last_seen
            if hidden:
                mask_scores(S_reg, first_col + row, first_row + query + col, seqlen_q, seqlen_k)
            statistics = int32(Q_smem + STATISTICS_OFFSET + (query + col) * FLOAT_BYTES)
            place = s_offset(row, query // CHUNK_ELEMENTS) + col * ELEMENT_BYTES
            P_lane = int32(K_smem + P_OFFSET + place)
            weigh(S_reg, P_lane, statistics, exponent_scale)  # FA2 Alg. 2 line 11
            differentiate(S_reg, dP_reg, P_lane, statistics)  # FA2 Alg. 2 line 14

    def backward(
        Q_gmem,
        K_gmem,
        V_gmem,
        dO_gmem,
        statistics_gmem,
        dQ_gmem,
        dK_gmem,
        dV_gmem,
        score_scale,
        exponent_scale,
        softmax_scale,
    ):
        batch, kv_head, first_col = locate_key_tile(K_gmem)  # FA2 Alg. 2 line 5
        warp = uint32(cuda.threadIdx.x) // WARP_SIZE
        lane = uint32(cuda.threadIdx.x) % WARP_SIZE
        warp_key = int32(warp % KEY_WARPS * WARP_ROWS)
        warp_line = int32(warp // KEY_WARPS * WARP_LINES)
        K_smem = shared_address(cuda.shared.array(0, uint32, alignment=TILE_ALIGNMENT))
        V_smem = int32(K_smem + V_OFFSET)
        P_warp = int32(K_smem + P_OFFSET + warp_key * S_ROW_BYTES)
        dQ_reg = cuda.local.array((QUERY_ROWS, QUERY_COLS), float32)
        dK_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        dV_reg = cuda.local.array((ROWS, OUT_COLS), float32)

        seqlens, scales = (Q_gmem.shape[1], K_gmem.shape[1]), (score_scale, exponent_scale)
        group, m_blocks, first_block = count_query_tiles(Q_gmem, K_gmem, first_col)
        head, m_block = int32(kv_head * group), first_block
        tile = int32((batch * int32(Q_gmem.shape[2]) + head) * m_blocks + m_block)
        Q_head = row_address(Q_gmem, batch, head, 0)
        dO_head = row_address(dO_gmem, batch, head, 0)
        dQ_lane = query_gradient_part(dQ_gmem, warp) + int64(lane * FLOAT_BYTES)
        arrays = Q_gmem, dO_gmem, statistics_gmem
        stage = int32(K_smem + STAGE_OFFSET)
        load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA2 Alg. 2 line 6
        load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
        load_queries(stage, arrays, batch, head, Q_head, dO_head, m_block, tile)
        clear_rows(dK_reg)  # FA2 Alg. 2 line 7
        clear_rows(dV_reg)

        # FA2 Alg. 2 line 8, for every query head that shares the keys
        for visit in range(group * (m_blocks - first_block)):
            await_copies()
            # These tiles are there for all warps, and none reads the last ones, P or dS any more.
            cuda.syncthreads()
            Q_smem, first_row = stage, m_block * BLOCK_M
            dQ_tile = dQ_lane + int64(tile) * TILE_BYTES
            is_last = visit + 1 == group * (m_blocks - first_block)
            m_block, tile = m_block + 1, tile + 1
            if m_block == m_blocks:
                head, m_block, tile = head + 1, first_block, tile + first_block
                Q_head += Q_gmem.strides[2]
                dO_head += dO_gmem.strides[2]
            if STAGES == 2:
                stage = int32(2 * (K_smem + STAGE_OFFSET) + STAGE_BYTES - stage)
                if not is_last:  # FA2 Alg. 2 line 9, for the next visit
                    load_queries(stage, arrays, batch, head, Q_head, dO_head, m_block, tile)
            weigh_queries(K_smem, Q_smem, first_row, first_col, seqlens, scales)
            # P and dS of all warps are there.
            cuda.syncthreads()
            Q_columns = int32(Q_smem + warp_line * LINE_BYTES)
            accumulate_values(dV_reg, P_warp, Q_columns)  # FA2 Alg. 2 line 12
            if WITH_QUERY_GRADIENT:
                multiply_keys(dQ_reg, int32(K_smem + DS_OFFSET), K_smem)  # FA2 Alg. 2 line 15
            accumulate_keys(dK_reg, P_warp, Q_columns)  # FA2 Alg. 2 line 16
            if WITH_QUERY_GRADIENT:
                add_query_gradient(dQ_tile, dQ_reg)
            if STAGES == 1:
                # No warp reads Q and dO any more.
                cuda.syncthreads()
                if not is_last:
                    load_queries(stage, arrays, batch, head, Q_head, dO_head, m_block, tile)

        # No warp reads K, for dQ, any more.
        cuda.syncthreads()
        scale_rows(dK_reg, softmax_scale)
        # FA2 Alg. 2 line 18, by way of the tiles of K and V
        store_rows(dK_gmem, batch, kv_head, first_col, dK_reg, K_smem, warp_key, warp_line)
        store_rows(dV_gmem, batch, kv_head, first_col, dV_reg, V_smem, warp_key, warp_line)

    name = kernel_name("fa2_tensor_core_backward", config, dtype, causal, width, scale_first)
    backward.__name__ = name + "_kv" * (not with_query_gradient)
    return cuda.jit(backward)


def plan_backward(tensors: BackwardTensors, config: BackwardConfig) -> list[KernelLaunch]:
    """The launches that compute dQ, dK and dV: statistics, the keys' gradients, the queries'."""
    score_scale, exponent_scale, scale_first = split_scale(tensors.softmax_scale)
    arrays = (tensors.Q, tensors.K, tensors.V, tensors.dO, tensors.dK, tensors.dV)
    width = copy_bytes(arrays, config)
    batch, seqlen_k, kv_heads, _ = tensors.K.shape
    statistics, dQ_sums, prepare = plan_statistics(tensors, config)
    Q, K, V, dO, dK, dV = map(as_bits, arrays)
    scales = score_scale, exponent_scale, tensors.softmax_scale
    main = KernelLaunch(
        kernel=make_backward(
            config, tensors.dtype, tensors.causal, width, scale_first, not tensors.deterministic
        ),
        grid=(batch * kv_heads * -(-seqlen_k // config.block_n),),
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        arguments=(Q, K, V, dO, statistics, dQ_sums, dK, dV, *scales),
    )
    if tensors.deterministic:
        return [prepare, main, plan_query_gradient(tensors, config, statistics)]
    return [prepare, main, plan_convert(tensors, config, dQ_sums)]
