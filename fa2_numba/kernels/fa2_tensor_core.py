"""FlashAttention-2 on tensor cores: `fa2_split_q` with its two products in `mma` instructions.

The partition is that of `fa2_split_q`, and so are the six steps of its loop: load, S = Q K^T, row
maximum, rescale, P, O += P V. What differs is who holds which element. `mma` multiplies tiles that
are spread over the lanes of a warp (`layouts`): a lane's elements of S are S_reg[i, j], those of O
O_reg[i, c], in rows 8 apart and columns two by two, four lanes a row. S lies in registers as the
next product wants P, so P is only rounded and packed in pairs; no shuffle, no shared memory.

Around the products, each with what it gained on an H200 (float16, 4096 tokens, no mask):

- Tiles keep 16 bits an element and are copied asynchronously, 16 bytes a lane, V while S is
  computed and the next K while P V is; shared memory is swizzled (`swizzle`), so that `ldmatrix`
  never meets a bank conflict.
- A warp owns 32 rows, not 16: each fragment of K and V that it loads serves two products. (Head
  dims above 128 leave no registers for that.) At head dims up to 64 it keeps Q in registers: 5 %.
- Exponentials are powers of 2, with the scale and log2 e in one multiply-add.
- m may lag behind the maximum, by a factor of 2^8 in P, before O is rescaled: after the first tiles
  it hardly ever is. 2 % at head dim 64, 7 % at 128.

What a head of N queries and keys costs, in 16 bits and whole tiles (T_m = N / BLOCK_M of queries,
T visited pairs of them and tiles of keys, with a causal mask about half; W = NUM_WARPS; T_q = T_m
where Q stays in registers, up to D = 64, else T):

    global_load_bytes  = 2 * (N*D + 2*T*BLOCK_N*D)
    global_store_bytes = 2*N*D + 4*N
    shared_load_bytes  = 2*D * (N + T_q*BLOCK_M + 2*T*W*BLOCK_N)
    shared_store_bytes = 2*D * (2*N + 2*T*BLOCK_N)
    barriers           = T_m + 2*T
    tensor_core_instructions = T * BLOCK_M*BLOCK_N*D // 1024
    matrix_loads       = D * (T_q*BLOCK_M + 2*T*W*BLOCK_N) // 256
    other_flops        = T * BLOCK_M*(2*BLOCK_N + 12) + N*(2*D + 35)

A matrix load is 512 bytes. Each warp reads all of K and V, each once, in half the bytes of float32,
and O passes through shared memory once, at the end. other_flops: an element of S is compared and
summed (2), and each of the 4 lanes of a row takes 3 to look whether m is outgrown and to sum l. The
N*(2*D + 35) are the end of a row and one rescaling, in the first tile that it sees: m is taken to
be never outgrown again.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba.constants import FULL_MASK, NEG_INF, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.layouts import GROUP_ROWS, LANES_PER_ROW, ac_element
from fa2_numba.device.mask import make_mask_accumulators, make_needs_mask
from fa2_numba.device.ptx import ex2, shared_address
from fa2_numba.device.softmax import finite_max, make_lane_max, make_over_lanes
from fa2_numba.device.softmax_base2 import (
    TOLERATED_GROWTH,
    inverse,
    log_sum_exp2,
    make_exponentiate,
)
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
from fa2_numba.launch import ForwardTensors, KernelLaunch
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.tensor_core_plan import kernel_name, plan_launch


@cache
def make_forward(config: TensorCoreConfig, dtype: str, causal: bool, width: int, scale_first: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: the bits of Q, K, V, O (uint16) and LSE as in `ForwardTensors`; score_scale and
    exponent_scale (float32, `split_scale`), the former used if scale_first. width: bytes that are
    copied at once (`copy_bytes`). Grid: batch x heads x query tiles. Shared memory: the Q, K and V
    tiles, `split_q_shared_bytes`.
    """
    BLOCK_M, BLOCK_N = config.block_m, config.block_n
    WARP_ROWS, ROW_BYTES = BLOCK_M // config.num_warps, config.row_bytes
    ROWS, COLS, OUT_COLS = config.split_q_elements
    PAIRS, Q_PAIRS = COLS // 2, config.padded_dim // 8
    K_OFFSET = BLOCK_M * ROW_BYTES
    V_OFFSET = K_OFFSET + BLOCK_N * ROW_BYTES

    locate_tile = make_locate_tile(config, causal)
    locate_element = device_function(ac_element)
    load_q_tile = make_load_tile(config, BLOCK_M, width)
    load_kv_tile = make_load_tile(config, BLOCK_N, width)
    await_copies = make_await_copies(config)
    count_n_blocks = make_count_n_blocks(config, causal)
    needs_mask = make_needs_mask(config, causal)
    keep_queries = make_keep_queries(config, ROWS)
    compute_scores = make_compute_scores(config, dtype, (ROWS, COLS), scale_first)
    mask_scores = make_mask_accumulators(ROWS, COLS, causal)
    lane_max = make_lane_max(COLS)
    max_over_lanes, sum_over_lanes = make_over_lanes(LANES_PER_ROW)
    exponentiate = make_exponentiate(dtype, COLS)
    accumulate_values = make_accumulate_values(config, dtype, ROWS, COLS)
    store_output = make_store_output(config, dtype, width)

    def forward(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, score_scale, exponent_scale):
        seqlen_q, seqlen_k = Q_gmem.shape[1], K_gmem.shape[1]
        batch, head, kv_head, first_row = locate_tile(Q_gmem, K_gmem)  # FA2 Alg. 1 line 3
        thread = uint32(cuda.threadIdx.x)
        warp_row = thread // WARP_SIZE * WARP_ROWS
        row, col = locate_element(thread % WARP_SIZE, 0, 0)
        row, col = int32(first_row + warp_row + row), int32(col)

        Q_smem = shared_address(cuda.shared.array(0, uint32, alignment=TILE_ALIGNMENT))
        K_smem, V_smem = int32(Q_smem + K_OFFSET), int32(Q_smem + V_OFFSET)
        Q_warp = int32(Q_smem + warp_row * ROW_BYTES)
        Q_reg = cuda.local.array((ROWS, Q_PAIRS), uint32)
        S_reg = cuda.local.array((ROWS, COLS), float32)
        P_reg = cuda.local.array((ROWS, PAIRS), uint32)
        O_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        m_reg = cuda.local.array(ROWS, float32)
        l_reg = cuda.local.array(ROWS, float32)
        m_lane_reg = cuda.local.array(ROWS, float32)

        n_blocks = count_n_blocks(first_row, seqlen_q, seqlen_k)
        load_q_tile(Q_smem, Q_gmem, batch, head, first_row)  # FA2 Alg. 1 line 4
        load_kv_tile(K_smem, K_gmem, batch, kv_head, max(n_blocks - 1, 0) * BLOCK_N)
        for i in range(ROWS):  # FA2 Alg. 1 line 5
            m_reg[i] = NEG_INF
            l_reg[i] = float32(0.0)
            for c in range(OUT_COLS):
                O_reg[i, c] = float32(0.0)
        await_copies()
        # Each warp reads what all warps have loaded.
        cuda.syncthreads()
        keep_queries(Q_reg, Q_warp)

        # FA2 Alg. 1 line 6, from the last key tile that some row can see to the first
        for n_block in range(n_blocks - 1, -1, -1):
            first_col = n_block * BLOCK_N
            load_kv_tile(V_smem, V_gmem, batch, kv_head, first_col)  # FA2 Alg. 1 line 7

            compute_scores(S_reg, Q_reg, Q_warp, K_smem, score_scale)  # FA2 Alg. 1 line 8
            if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(S_reg, row, first_col + col, seqlen_q, seqlen_k)

            await_copies()
            # V is there for all warps, and none reads K any more.
            cuda.syncthreads()
            if n_block > 0:
                load_kv_tile(K_smem, K_gmem, batch, kv_head, first_col - BLOCK_N)

            outgrown = False
            for i in range(ROWS):  # FA2 Alg. 1 line 9: the maximum, and whether it has grown much
                m_lane_reg[i] = lane_max(S_reg, i)
                # NaN, and so not above anything, as long as the row has seen nothing
                growth = (m_lane_reg[i] - m_reg[i]) * exponent_scale
                outgrown = outgrown or growth > TOLERATED_GROWTH
            if cuda.any_sync(FULL_MASK, outgrown):
                for i in range(ROWS):
                    m = max(m_reg[i], max_over_lanes(m_lane_reg[i]))
                    rescale = ex2((m_reg[i] - finite_max(m)) * exponent_scale)
                    m_reg[i] = m
                    l_reg[i] *= rescale
                    for c in range(OUT_COLS):
                        O_reg[i, c] *= rescale
            for i in range(ROWS):  # FA2 Alg. 1 line 9: P and its sum
                m = finite_max(m_reg[i]) * exponent_scale
                l_reg[i] += exponentiate(P_reg, S_reg, i, exponent_scale, m)
            accumulate_values(O_reg, P_reg, V_smem)  # FA2 Alg. 1 line 10

            await_copies()
            # The next K is there for all warps, and none reads V any more.
            cuda.syncthreads()

        for i in range(ROWS):
            l = sum_over_lanes(l_reg[i])
            scale = inverse(m_reg[i], l)  # FA2 Alg. 1 line 12
            for c in range(OUT_COLS):
                O_reg[i, c] *= scale
            i_row = row + GROUP_ROWS * i
            if col == 0 and i_row < seqlen_q:  # FA2 Alg. 1 lines 13, 15
                LSE_gmem[batch, head, i_row] = log_sum_exp2(m_reg[i] * exponent_scale, l)
        # FA2 Alg. 1 line 14, by way of the warp's own rows of Q, which it needs no more
        store_output(O_gmem, batch, head, first_row, O_reg, Q_smem)

    forward.__name__ = kernel_name("fa2_tensor_core", config, dtype, causal, width, scale_first)
    return cuda.jit(forward)


def plan_forward(tensors: ForwardTensors, config: TensorCoreConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    blocks = batch * heads * -(-seqlen_q // config.block_m)
    return [plan_launch(make_forward, tensors, config, blocks)]
