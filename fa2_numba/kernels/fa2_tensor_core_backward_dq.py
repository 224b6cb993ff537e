"""dQ for `fa2_tensor_core_backward` where it must repeat: a block computes a query tile's, alone.

It visits the keys in a fixed order, and sums in registers instead of HBM. S and dP are computed a
second time for it.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint32

from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.backward import make_clear
from fa2_numba.device.layouts import GROUP_ROWS, ac_element
from fa2_numba.device.mask import make_mask_accumulators, make_needs_mask
from fa2_numba.device.ptx import ex2, shared_address
from fa2_numba.device.softmax_base2 import PACK
from fa2_numba.device.swizzle import TILE_ALIGNMENT
from fa2_numba.device.tensor_core_products import (
    make_accumulate_values,
    make_compute_scores,
    make_keep_queries,
)
from fa2_numba.device.tensor_core_tiles import (
    make_await_copies,
    make_load_tile,
    make_locate_tile,
    make_store_output,
)
from fa2_numba.device.tiles import make_count_n_blocks
from fa2_numba.launch import BackwardTensors, KernelLaunch, as_bits
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.tensor_core_plan import copy_bytes, kernel_name, split_scale


@cache
def make_query_gradient(
    config: TensorCoreConfig, block_m: int, dtype: str, causal: bool, width: int, scale_first: bool
):
    """The kernel for dQ alone: as the forward pass, with dO and V beside Q and K.

    Arguments: the bits of Q, K, V, dO; statistics for tiles of block_m queries; the bits of dQ;
    score_scale, exponent_scale, softmax_scale. Grid: query tiles x heads x batch. Shared memory:
    the tiles of Q, dO, K and V.
    """
    BLOCK_M, BLOCK_N, ROW_BYTES = config.block_m, config.block_n, config.row_bytes
    WARP_ROWS = BLOCK_M // config.num_warps
    ROWS, COLS, OUT_COLS = config.split_q_elements
    PAIRS, Q_PAIRS = COLS // 2, config.padded_dim // 8
    DO_OFFSET, K_OFFSET = BLOCK_M * ROW_BYTES, 2 * BLOCK_M * ROW_BYTES
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_BYTES
    TILE_ROWS = block_m

    locate_tile = make_locate_tile(config, causal)
    locate_element = device_function(ac_element)
    load_q_tile = make_load_tile(config, BLOCK_M, width)
    load_kv_tile = make_load_tile(config, BLOCK_N, width)
    await_copies = make_await_copies(config)
    count_n_blocks = make_count_n_blocks(config, causal)
    needs_mask = make_needs_mask(config, causal)
    keep_queries = make_keep_queries(config, ROWS)
    compute_scores = make_compute_scores(config, dtype, (ROWS, COLS), scale_first)
    compute_products = make_compute_scores(config, dtype, (ROWS, COLS), False)
    mask_scores = make_mask_accumulators(ROWS, COLS, causal)
    accumulate_values = make_accumulate_values(config, dtype, ROWS, COLS)
    clear = make_clear(ROWS, OUT_COLS)
    store_output = make_store_output(config, dtype, width)
    pack = PACK[dtype]

    def query_gradient(
        Q_gmem,
        K_gmem,
        V_gmem,
        dO_gmem,
        statistics_gmem,
        dQ_gmem,
        score_scale,
        exponent_scale,
        softmax_scale,
    ):
        seqlen_q, seqlen_k = Q_gmem.shape[1], K_gmem.shape[1]
        batch, head, kv_head, first_row = locate_tile(Q_gmem, K_gmem)
        thread = uint32(cuda.threadIdx.x)
        warp_row = thread // WARP_SIZE * WARP_ROWS
        row, col = locate_element(thread % WARP_SIZE, 0, 0)
        row, col = int32(first_row + warp_row + row), int32(col)

        Q_smem = shared_address(cuda.shared.array(0, uint32, alignment=TILE_ALIGNMENT))
        K_smem, V_smem = int32(Q_smem + K_OFFSET), int32(Q_smem + V_OFFSET)
        Q_warp = int32(Q_smem + warp_row * ROW_BYTES)
        dO_warp = int32(Q_warp + DO_OFFSET)
        Q_reg = cuda.local.array((ROWS, Q_PAIRS), uint32)
        dO_reg = cuda.local.array((ROWS, Q_PAIRS), uint32)
        S_reg = cuda.local.array((ROWS, COLS), float32)
        dP_reg = cuda.local.array((ROWS, COLS), float32)
        dS_reg = cuda.local.array((ROWS, PAIRS), uint32)
        dQ_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        lse_reg = cuda.local.array(ROWS, float32)
        D_reg = cuda.local.array(ROWS, float32)

        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)
        load_q_tile(int32(Q_smem + DO_OFFSET), dO_gmem, batch, head, first_row)
        tiles = int32((seqlen_q + TILE_ROWS - 1) // TILE_ROWS)
        for i in range(ROWS):
            lse_reg[i] = -NEG_INF
            D_reg[i] = float32(0.0)
            i_row = int32(row + GROUP_ROWS * i)
            if i_row < seqlen_q:
                tile = (batch * int32(Q_gmem.shape[2]) + head) * tiles + i_row // TILE_ROWS
                place = int64(tile) * (2 * TILE_ROWS) + i_row % TILE_ROWS
                lse_reg[i] = statistics_gmem[place]
                D_reg[i] = statistics_gmem[place + TILE_ROWS]
        clear(dQ_reg)
        await_copies()
        # Each warp reads what all warps have loaded.
        cuda.syncthreads()
        keep_queries(Q_reg, Q_warp)
        keep_queries(dO_reg, dO_warp)

        for n_block in range(count_n_blocks(first_row, seqlen_q, seqlen_k)):
            first_col = n_block * BLOCK_N
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
            await_copies()
            # Each warp reads what all warps have loaded.
            cuda.syncthreads()
            compute_scores(S_reg, Q_reg, Q_warp, K_smem, score_scale)  # FA2 Alg. 2 line 10
            if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(S_reg, row, first_col + col, seqlen_q, seqlen_k)
            compute_products(dP_reg, dO_reg, dO_warp, V_smem, score_scale)  # FA2 Alg. 2 line 13
            for i in range(ROWS):
                for j in range(0, COLS, 2):  # FA2 Alg. 2 lines 11, 14
                    low = ex2(cuda.fma(S_reg[i, j], exponent_scale, -lse_reg[i]))
                    high = ex2(cuda.fma(S_reg[i, j + 1], exponent_scale, -lse_reg[i]))
                    low *= dP_reg[i, j] - D_reg[i]
                    high *= dP_reg[i, j + 1] - D_reg[i]
                    dS_reg[i, j // 2] = pack(low, high)
            accumulate_values(dQ_reg, dS_reg, K_smem)  # FA2 Alg. 2 line 15
            # No warp reads these tiles any more.
            cuda.syncthreads()

        for i in range(ROWS):
            for c in range(OUT_COLS):
                dQ_reg[i, c] *= softmax_scale
        store_output(dQ_gmem, batch, head, first_row, dQ_reg, Q_smem)

    name = kernel_name("fa2_tensor_core_dq", config, dtype, causal, width, scale_first)
    query_gradient.__name__ = name
    return cuda.jit(query_gradient)


def plan_query_gradient(
    tensors: BackwardTensors, config: BackwardConfig, statistics: object
) -> KernelLaunch:
    """The launch that computes dQ, from statistics for tiles of `config`."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    dtype = tensors.dtype
    tiles = config.query_parallel
    score_scale, exponent_scale, scale_first = split_scale(tensors.softmax_scale)
    arrays = (tensors.Q, tensors.K, tensors.V, tensors.dO, tensors.dQ)
    width = copy_bytes(arrays, tiles)
    *read, dQ = map(as_bits, arrays)
    kernel = make_query_gradient(tiles, config.block_m, dtype, tensors.causal, width, scale_first)
    return KernelLaunch(
        kernel=kernel,
        grid=(batch * heads * -(-seqlen_q // tiles.block_m),),
        threads=tiles.num_threads,
        shared_bytes=config.query_parallel_shared_bytes,
        arguments=(*read, statistics, dQ, score_scale, exponent_scale, tensors.softmax_scale),
    )
