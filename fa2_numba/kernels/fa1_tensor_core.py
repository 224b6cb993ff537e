"""FlashAttention-1 on tensor cores: `fa1_sliced_k` with its two products in `mma` instructions.

The honest baseline of `fa2_tensor_core`: the same instructions, copies and softmax, in the
partition of FlashAttention-1. One thread block computes a head; each pass over the queries takes
one tile of keys and values, reads O, m and l of every query tile from HBM and writes them back.
Within a tile the warps slice the keys, so a row's maximum, its sum and P~ V are made of one part
from each warp, which meet in shared memory.

What makes it as fast as that partition allows: O, m and l are fetched while S is computed, the next
Q tile too; each thread updates its elements of O 16 bytes at a time; three barriers a tile; query
tiles that see nothing of a key tile are skipped. Two limits remain. A head keeps one multiprocessor
busy, so that a long sequence with few heads leaves most of the GPU idle. And what crosses warps, or
HBM, grows with every tile.

What a head of N queries and keys costs, in 16 bits and whole tiles (T_m = N / BLOCK_M of queries,
T visited pairs of them and tiles of keys, with a causal mask about half; W = NUM_WARPS; C columns
of a row at a time, 64, or 32 where D is an odd multiple of 32, make C / 4 owners a row):

    global_load_bytes  = 2*D*(2*N + T*BLOCK_M) + (T - T_m) * BLOCK_M*(4*D + 2*C)
    global_store_bytes = (T - T_m) * 4*BLOCK_M*D + T * 8*BLOCK_M + 2*N*D + 4*N
    shared_load_bytes  = T * (2*D*(W*BLOCK_M + 2*BLOCK_N) + W*BLOCK_M*(4*D + 16*W + 2*C))
    shared_store_bytes = 2*D*(2*N + T*BLOCK_M) + T * 4*W*BLOCK_M*(D + 2)
    barriers           = 3*T
    tensor_core_instructions = T * BLOCK_M*BLOCK_N*D // 1024
    matrix_loads       = T * D*(W*BLOCK_M + 2*BLOCK_N) // 256
    other_flops        = T * BLOCK_M*(2*BLOCK_N + (W + 2)*D + W*(4*W + 17) + (W + 3)*C // 2) + N

K and V are loaded once, Q for every pair of tiles; O, m and l go to HBM in float32 after every pass
but the last (m and l after that one too), and come back. Of K and V a warp reads its own rows
alone, but every warp reads all of Q, and W parts of O are stored and summed for each pair.
other_flops: an element of S is compared and summed (2), one of O takes W + 2 in each pass; each of
the 4 lanes that hold a row in a warp takes 4 to combine lanes, the maximum of W parts and 2 for the
scale; each of the C / 4 owners of a row updates m and l.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba.constants import LN_2, LOG2_E, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.layouts import GROUP_ROWS, LANES_PER_ROW, ac_element
from fa2_numba.device.mask import make_mask_accumulators, make_needs_mask
from fa2_numba.device.ptx import shared_address
from fa2_numba.device.sliced_k import make_across_warps
from fa2_numba.device.softmax import finite_max, make_over_lanes, make_row_max
from fa2_numba.device.softmax_base2 import make_exponentiate
from fa2_numba.device.swizzle import TILE_ALIGNMENT
from fa2_numba.device.tensor_core_exchange import (
    make_exchange_tiles,
    make_load_owned,
    make_store_partial,
    make_update_owned,
)
from fa2_numba.device.tensor_core_products import make_accumulate_values, make_compute_scores
from fa2_numba.device.tensor_core_tiles import make_await_copies, make_load_tile
from fa2_numba.device.tiles import locate_head, make_count_n_blocks, make_first_visible_row
from fa2_numba.launch import ForwardTensors, KernelLaunch
from fa2_numba.tensor_core_config import VECTOR, TensorCoreConfig
from fa2_numba.tensor_core_plan import kernel_name, plan_launch


@cache
def make_forward(config: TensorCoreConfig, dtype: str, causal: bool, width: int, scale_first: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: the bits of Q, K, V, O (uint16), LSE as in `ForwardTensors`; the float32 workspaces
    O_acc (like O, padded to `padded_dim`) and m, l (like LSE); score_scale and exponent_scale
    (float32, `split_scale`), the former used if scale_first. width: bytes that are copied at once
    (`copy_bytes`). Grid: batch x heads. Shared memory: the K and V tile, two Q tiles, the warps'
    partial O and row statistics, `sliced_k_shared_bytes`.
    """
    BLOCK_M, BLOCK_N, NUM_WARPS = config.block_m, config.block_n, config.num_warps
    WARP_COLS, ROW_BYTES = BLOCK_N // NUM_WARPS, config.row_bytes
    ROWS, COLS, OUT_COLS = config.sliced_k_elements
    PAIRS, Q_PAIRS = COLS // 2, config.padded_dim // 8
    OWN_ROWS, _ = config.owned_rows
    OWN_VECTORS = OWN_ROWS * config.num_lines
    V_OFFSET = BLOCK_N * ROW_BYTES
    Q_OFFSET = 2 * V_OFFSET
    Q_BYTES = BLOCK_M * ROW_BYTES

    locate_element = device_function(ac_element)
    exchange_tiles = make_exchange_tiles(config)
    load_q_tile = make_load_tile(config, BLOCK_M, width)
    load_kv_tile = make_load_tile(config, BLOCK_N, width)
    await_copies = make_await_copies(config)
    first_visible_row = make_first_visible_row(config, causal)
    count_n_blocks = make_count_n_blocks(config, causal)
    needs_mask = make_needs_mask(config, causal)
    compute_scores = make_compute_scores(config, dtype, (ROWS, COLS), scale_first)
    mask_scores = make_mask_accumulators(ROWS, COLS, causal)
    row_max = make_row_max(COLS, LANES_PER_ROW)
    max_across, _ = make_across_warps(NUM_WARPS)
    _, sum_over_lanes = make_over_lanes(LANES_PER_ROW)
    exponentiate = make_exponentiate(dtype, COLS)
    accumulate_values = make_accumulate_values(config, dtype, ROWS, COLS)
    store_partial = make_store_partial(config)
    load_owned = make_load_owned(config)
    update_owned = make_update_owned(config, dtype)

    # fmt: off
    def forward(
        Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, O_acc_gmem, m_gmem, l_gmem,
        score_scale, exponent_scale,
    ):
        # fmt: on
        seqlen_q, seqlen_k = Q_gmem.shape[1], K_gmem.shape[1]
        batch, head, kv_head = locate_head(Q_gmem.shape[2], K_gmem.shape[2])
        thread = uint32(cuda.threadIdx.x)
        warp = thread // WARP_SIZE
        row, col = locate_element(thread % WARP_SIZE, 0, 0)
        first_key = warp * WARP_COLS

        smem = cuda.shared.array(0, float32, alignment=TILE_ALIGNMENT)
        K_smem = shared_address(smem)
        V_smem, Q_smem = int32(K_smem + V_OFFSET), int32(K_smem + Q_OFFSET)
        K_warp = int32(K_smem + first_key * ROW_BYTES)
        V_warp = int32(V_smem + first_key * ROW_BYTES)
        exchanged = partial_smem, max_smem, sum_smem = exchange_tiles(smem)
        # Seen from the lane's first row on: further indices are constants and cost no registers.
        max_lane, sum_lane = max_smem[:, row:], sum_smem[:, row:]
        Q_reg = cuda.local.array((ROWS, Q_PAIRS), uint32)
        S_reg = cuda.local.array((ROWS, COLS), float32)
        P_reg = cuda.local.array((ROWS, PAIRS), uint32)
        O_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        O_own_reg = cuda.local.array((OWN_VECTORS, VECTOR), float32)
        statistics_reg = cuda.local.array((OWN_ROWS, 2), float32)
        passes, outputs = (O_acc_gmem, m_gmem, l_gmem), (O_gmem, LSE_gmem)

        for first_col in range(0, seqlen_k, BLOCK_N):  # FA1 Alg. 1 line 5
            first = first_col == 0
            top_row = first_visible_row(first_col, seqlen_q, seqlen_k)
            load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col)  # FA1 Alg. 1 line 6
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)
            load_q_tile(Q_smem, Q_gmem, batch, head, top_row)

            for first_row in range(top_row, seqlen_q, BLOCK_M):  # FA1 Alg. 1 line 7
                place = batch, head, first_row
                last = first_col >= (count_n_blocks(first_row, seqlen_q, seqlen_k) - 1) * BLOCK_N
                Q_tile = int32(Q_smem + (first_row - top_row) // BLOCK_M % 2 * Q_BYTES)
                await_copies()
                # Each warp reads what all warps have loaded.
                cuda.syncthreads()
                # FA1 Alg. 1 line 8; the other Q tile is for the next round
                load_owned(O_own_reg, statistics_reg, passes, place, first)
                if first_row + BLOCK_M < seqlen_q:
                    Q_next = int32(2 * Q_smem + Q_BYTES - Q_tile)
                    load_q_tile(Q_next, Q_gmem, batch, head, first_row + BLOCK_M)

                # FA1 Alg. 1 line 9, each warp for its own keys
                compute_scores(S_reg, Q_reg, Q_tile, K_warp, score_scale)
                if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                    key = first_col + first_key + col
                    mask_scores(S_reg, first_row + row, key, seqlen_q, seqlen_k)

                for i in range(ROWS):  # FA1 Alg. 1 line 10: a row's maximum crosses the warps
                    m = row_max(S_reg, i) * exponent_scale
                    if col == 0:
                        max_lane[warp, GROUP_ROWS * i] = LN_2 * m
                # Every warp reads the maxima of all slices.
                cuda.syncthreads()
                for i in range(ROWS):  # FA1 Alg. 1 line 10: and so does its sum
                    m = LOG2_E * finite_max(max_across(max_lane, GROUP_ROWS * i))
                    l = sum_over_lanes(exponentiate(P_reg, S_reg, i, exponent_scale, m))
                    if col == 0:
                        sum_lane[warp, GROUP_ROWS * i] = l
                    for c in range(OUT_COLS):
                        O_reg[i, c] = float32(0.0)
                accumulate_values(O_reg, P_reg, V_warp)
                store_partial(partial_smem, O_reg)
                # Every thread reads what all warps have found for the rows it owns.
                cuda.syncthreads()
                # FA1 Alg. 1 lines 2, 11, 12, 13: m, l and O of the query tile
                update_owned(O_own_reg, statistics_reg, exchanged, passes, outputs, place, last)

    forward.__name__ = kernel_name("fa1_tensor_core", config, dtype, causal, width, scale_first)
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TensorCoreConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE, with float32 O, m and l in HBM between passes."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    O_acc = tensors.allocate((batch, seqlen_q, heads, config.padded_dim))
    m, l = (tensors.allocate(tensors.LSE.shape) for _ in range(2))
    return [plan_launch(make_forward, tensors, config, batch * heads, (O_acc, m, l))]
