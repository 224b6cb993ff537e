"""What FlashAttention-1 does with the products of a tile on tensor cores.

Every warp has its own keys, so a row's maximum and sum and each element of P~ V are made of one
part from each warp; the parts meet in shared memory. Then each thread updates what it owns of the
query tile, 16 bytes of every line of a few rows, and of these rows m and l. All of it is in HBM.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint16, uint32

from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.fa1_passes import merge_statistics
from fa2_numba.device.layouts import GROUP_ROWS, ac_element
from fa2_numba.device.ptx import (
    global_address,
    ld_global_v4_f32,
    ld_shared_v4_f32,
    shared_address,
    st_global_v4_f32,
)
from fa2_numba.device.sliced_k import make_across_warps
from fa2_numba.device.softmax import log_sum_exp
from fa2_numba.device.softmax_base2 import PACK
from fa2_numba.device.tiles import shared_tile
from fa2_numba.tensor_core_config import VECTOR, TensorCoreConfig


@cache
def make_exchange_tiles(config: TensorCoreConfig):
    """`exchange_tiles(smem)`: partial_smem, max_smem and sum_smem, behind the tiles."""
    BLOCK_M, NUM_WARPS = config.block_m, config.num_warps
    PARTIAL_STRIDE, PARTIAL_OFFSET = config.partial_stride, config.partial_offset // 4
    MAX_OFFSET = PARTIAL_OFFSET + NUM_WARPS * BLOCK_M * PARTIAL_STRIDE
    SUM_OFFSET = MAX_OFFSET + NUM_WARPS * BLOCK_M

    @device_function
    def exchange_tiles(smem):
        partial_smem = shared_tile(smem, PARTIAL_OFFSET, (NUM_WARPS, BLOCK_M, PARTIAL_STRIDE))
        max_smem = shared_tile(smem, MAX_OFFSET, (NUM_WARPS, BLOCK_M))
        sum_smem = shared_tile(smem, SUM_OFFSET, (NUM_WARPS, BLOCK_M))
        return partial_smem, max_smem, sum_smem

    return exchange_tiles


@cache
def make_store_partial(config: TensorCoreConfig):
    """`store_partial(partial_smem, O_reg)`: the warp's part of P~ V, where other warps see it."""
    ROWS, _, OUT_COLS = config.sliced_k_elements
    element = device_function(ac_element)

    @device_function
    def store_partial(partial_smem, O_reg):
        thread = uint32(cuda.threadIdx.x)
        row, col = element(thread % WARP_SIZE, 0, 0)
        # A view from the lane's own row on: constant indices cost no registers.
        partial_lane = partial_smem[thread // WARP_SIZE, row:]
        for i in range(ROWS):
            for c in range(OUT_COLS):
                partial_lane[GROUP_ROWS * i, col + element(0, 0, c)[1]] = O_reg[i, c]

    return store_partial


@cache
def make_locate_owned(config: TensorCoreConfig):
    """`locate_owned()`: this thread's first row of the query tile, first column of a line."""
    LINE_VECTORS = config.line_cols // VECTOR

    @device_function
    def locate_owned():
        thread = uint32(cuda.threadIdx.x)
        return thread // LINE_VECTORS, thread % LINE_VECTORS * VECTOR

    return locate_owned


@cache
def make_load_owned(config: TensorCoreConfig):
    """`load_owned(O_reg, statistics_reg, passes, place, first)`: O, m and l of the passes before.

    passes: O_acc, m and l in HBM, O_acc padded to whole lines. place: batch, head, first row.
    """
    BLOCK_M, (OWN_ROWS, OWN_STEP) = config.block_m, config.owned_rows
    NUM_LINES, LINE_COLS = config.num_lines, config.line_cols
    locate_owned = make_locate_owned(config)

    @device_function
    def load_owned(O_reg, statistics_reg, passes, place, first):
        O_acc_gmem, m_gmem, l_gmem = passes
        batch, head, first_row = place
        row, col = locate_owned()
        for i in range(OWN_ROWS):
            r = row + OWN_STEP * i
            i_row = first_row + r
            statistics_reg[i, 0] = NEG_INF  # FA1 Alg. 1 line 2
            statistics_reg[i, 1] = float32(0.0)
            for line in range(NUM_LINES):
                for e in range(VECTOR):
                    O_reg[NUM_LINES * i + line, e] = float32(0.0)
            if not first and r < BLOCK_M and i_row < m_gmem.shape[2]:  # FA1 Alg. 1 line 8
                statistics_reg[i, 0] = m_gmem[batch, head, i_row]
                statistics_reg[i, 1] = l_gmem[batch, head, i_row]
                place_row = global_address(O_acc_gmem[batch, i_row, head]) + 4 * col
                for line in range(NUM_LINES):
                    place_line = int64(place_row + 4 * LINE_COLS * line)
                    ld_global_v4_f32(O_reg, NUM_LINES * i + line, 0, place_line)

    return load_owned


@cache
def make_sum_partial(config: TensorCoreConfig):
    """`sum_partial(o_reg, partial_smem, r, d)`: VECTOR elements of row r, over all warps."""
    BLOCK_M, NUM_WARPS, PARTIAL_STRIDE = config.block_m, config.num_warps, config.partial_stride

    @device_function
    def sum_partial(o_reg, partial_smem, r, d):
        part_reg = cuda.local.array((1, VECTOR), float32)
        place = shared_address(partial_smem) + 4 * (r * PARTIAL_STRIDE + d)
        ld_shared_v4_f32(o_reg, 0, 0, int32(place))
        for w in range(1, NUM_WARPS):
            ld_shared_v4_f32(part_reg, 0, 0, int32(place + 4 * w * BLOCK_M * PARTIAL_STRIDE))
            for e in range(VECTOR):
                o_reg[0, e] = o_reg[0, e] + part_reg[0, e]

    return sum_partial


@cache
def make_update_owned(config: TensorCoreConfig, dtype: str):
    """`update_owned(O_reg, statistics_reg, exchanged, passes, outputs, place, last)`.

    Adds the tile to O, m and l. exchanged: partial_smem, max_smem, sum_smem. outputs: O (bits) and
    LSE, for the last pass.
    """
    BLOCK_M, (OWN_ROWS, OWN_STEP) = config.block_m, config.owned_rows
    NUM_LINES, LINE_COLS = config.num_lines, config.line_cols
    max_across, sum_across = make_across_warps(config.num_warps)
    locate_owned = make_locate_owned(config)
    sum_partial = make_sum_partial(config)
    store_elements = make_store_elements(config, dtype)

    @device_function
    def update_owned(O_reg, statistics_reg, exchanged, passes, outputs, place, last):
        partial_smem, max_smem, sum_smem = exchanged
        O_acc_gmem, m_gmem, l_gmem = passes
        O_gmem, LSE_gmem = outputs
        batch, head, first_row = place
        row, col = locate_owned()
        o_reg = cuda.local.array((1, VECTOR), float32)
        for i in range(OWN_ROWS):
            r = row + OWN_STEP * i
            i_row = first_row + r
            if r < BLOCK_M and i_row < O_gmem.shape[1]:
                m_tile, l_tile = max_across(max_smem, r), sum_across(sum_smem, r)
                m_old, l_old = statistics_reg[i, 0], statistics_reg[i, 1]
                m, l, old, new = merge_statistics(m_old, l_old, m_tile, l_tile)
                for line in range(NUM_LINES):
                    d = LINE_COLS * line + col
                    sum_partial(o_reg, partial_smem, r, d)
                    for e in range(VECTOR):  # FA1 Alg. 1 line 12
                        o_reg[0, e] = old * O_reg[NUM_LINES * i + line, e] + new * o_reg[0, e]
                    if last:
                        store_elements(O_gmem, place, r, d, o_reg)
                    else:
                        place_row = global_address(O_acc_gmem[batch, i_row, head])
                        st_global_v4_f32(int64(place_row + 4 * d), o_reg, 0, 0)
                if col == 0:  # FA1 Alg. 1 line 13
                    m_gmem[batch, head, i_row], l_gmem[batch, head, i_row] = m, l
                    if last:
                        # The interface wants the logarithm; FlashAttention-1 itself keeps m, l.
                        LSE_gmem[batch, head, i_row] = log_sum_exp(m, l)

    return update_owned


@cache
def make_store_elements(config: TensorCoreConfig, dtype: str):
    """`store_elements(O_gmem, place, r, d, o_reg)`: VECTOR elements of O, rounded to `dtype`."""
    HEAD_DIM = config.head_dim
    pack = PACK[dtype]

    @device_function
    def store_elements(O_gmem, place, r, d, o_reg):
        batch, head, first_row = place
        for e in range(0, VECTOR, 2):
            pair = pack(o_reg[0, e], o_reg[0, e + 1])
            for half in range(2):
                if d + e + half < HEAD_DIM:
                    O_gmem[batch, first_row + r, head, d + e + half] = uint16(pair >> (16 * half))

    return store_elements
