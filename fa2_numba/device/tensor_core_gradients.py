"""The products of the backward pass on tensor cores, with keys as rows of S^T, P^T and dS^T.

S^T = K Q^T and dP^T = V dO^T are those of `tensor_core_products`, with the roles of queries and
keys exchanged. P^T and dS^T then go through shared memory, rounded to 16 bits: rows of keys, in
which dV += P^T dO and dK += dS^T Q find their A, and dQ += dS K, read on its side, its.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.backward import make_clear
from fa2_numba.device.layouts import GROUP_ROWS, a_matrix_row, b_matrix_row
from fa2_numba.device.ptx import (
    ex2,
    global_address,
    ld_shared_v2_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    red_global_add_f32,
    st_shared_b32,
)
from fa2_numba.device.softmax_base2 import PACK
from fa2_numba.device.swizzle import make_chunk_offset, make_fragment_addresses
from fa2_numba.device.tensor_core_products import choose_mma
from fa2_numba.device.tensor_core_tiles import make_copy_chunk
from fa2_numba.tensor_core_backward_config import FLOAT_BYTES, BackwardConfig
from fa2_numba.tensor_core_config import CHUNK_BYTES, CHUNK_ELEMENTS, FRAGMENT_ROWS

REGISTER_BYTES = FLOAT_BYTES * WARP_SIZE
"""One float32 register of all lanes of a warp."""


@cache
def make_load_statistics(config: BackwardConfig):
    """`load_statistics(statistics, statistics_gmem, tile)`: start to copy those of a query tile.

    To shared address `statistics`: the log-sum-exp of its queries to base 2, then their D. Tiles
    are counted over all heads.
    """
    CHUNKS = 2 * config.block_m * FLOAT_BYTES // CHUNK_BYTES
    copy_chunk = make_copy_chunk(CHUNK_BYTES, config.turing)

    @device_function
    def load_statistics(statistics, statistics_gmem, tile):
        chunk = uint32(cuda.threadIdx.x)
        if chunk < CHUNKS:
            source = global_address(statistics_gmem) + int64(chunk * CHUNK_BYTES)
            source += int64(int32(tile)) * (CHUNKS * CHUNK_BYTES)
            copy_chunk(int32(statistics + chunk * CHUNK_BYTES), source, int32(CHUNK_BYTES))

    return load_statistics


@cache
def make_store_weights(config: BackwardConfig, dtype: str, offset: int):
    """`store_weights(P_lane, i, j, low, high)`: elements (i, j) and (i, j + 1) of P^T or dS^T.

    Rounded, into shared memory. P_lane: where the lane's element (0, 0) of P^T goes; offset: bytes
    by which the matrix lies behind P^T.
    """
    ROW_BYTES = config.score_rows.row_bytes
    pack = PACK[dtype]

    @device_function
    def store_weights(P_lane, i, j, low, high):
        place = (P_lane ^ (j // 2 * CHUNK_BYTES)) + (i * GROUP_ROWS * ROW_BYTES + offset)
        st_shared_b32(int32(place), pack(low, high))

    return store_weights


@cache
def make_weigh(config: BackwardConfig, dtype: str):
    """`weigh(S_reg, P_lane, lse, exponent_scale)`: S^T becomes P^T, here and in shared memory.

    P_lane: as in `store_weights`. lse: shared address of the log-sum-exp, to base 2, of the query
    of the lane's first column.
    """
    ROWS, COLS, _ = config.elements
    store_weights = make_store_weights(config, dtype, 0)

    @device_function
    def weigh(S_reg, P_lane, lse, exponent_scale):
        lse_reg = cuda.local.array((1, 2), float32)
        for j in range(0, COLS, 2):
            ld_shared_v2_f32(lse_reg, 0, 0, int32(lse + j // 2 * GROUP_ROWS * FLOAT_BYTES))
            for i in range(ROWS):
                low = ex2(cuda.fma(S_reg[i, j], exponent_scale, -lse_reg[0, 0]))
                high = ex2(cuda.fma(S_reg[i, j + 1], exponent_scale, -lse_reg[0, 1]))
                S_reg[i, j], S_reg[i, j + 1] = low, high
                store_weights(P_lane, i, j, low, high)

    return weigh


@cache
def make_differentiate(config: BackwardConfig, dtype: str):
    """`differentiate(P_reg, dP_reg, P_lane, lse)`: dS^T = P^T (dP^T - D) into shared memory.

    P_lane, lse: as in `weigh`; dS^T and D lie behind P^T and the log-sum-exp.
    """
    ROWS, COLS, _ = config.elements
    D_OFFSET, DS_OFFSET = config.block_m * FLOAT_BYTES, config.score_bytes
    store_weights = make_store_weights(config, dtype, DS_OFFSET)

    @device_function
    def differentiate(P_reg, dP_reg, P_lane, lse):
        D_reg = cuda.local.array((1, 2), float32)
        for j in range(0, COLS, 2):
            place = lse + j // 2 * GROUP_ROWS * FLOAT_BYTES + D_OFFSET
            ld_shared_v2_f32(D_reg, 0, 0, int32(place))
            for i in range(ROWS):
                low = P_reg[i, j] * (dP_reg[i, j] - D_reg[0, 0])
                high = P_reg[i, j + 1] * (dP_reg[i, j + 1] - D_reg[0, 1])
                store_weights(P_lane, i, j, low, high)

    return differentiate


@cache
def make_accumulate_gradient(config: BackwardConfig, dtype: str, offsets: tuple[int, int]):
    """`accumulate_gradient(G_reg, W_warp, X_warp)`: dV += P^T dO, or dK += dS^T Q.

    G_reg: the lane's part of the warp's keys and columns. W_warp: shared address of the warp's
    first key in P^T or dS^T. X_warp: that of the tile of dO or Q, from the warp's first line on.
    offsets: bytes by which both lie behind these addresses.
    """
    W_OFFSET, X_OFFSET = offsets
    ROWS, _, OUT_COLS = config.elements
    M_TILES, STEPS = ROWS // 2, config.block_m // FRAGMENT_ROWS
    W_FRAGMENTS, LINE_FRAGMENTS = config.score_rows.line_fragments, config.line_fragments
    X_LINES = OUT_COLS // 4 // LINE_FRAGMENTS
    mma = choose_mma(config, dtype)
    w_address, _ = make_fragment_addresses(config.score_rows)
    x_address, _ = make_fragment_addresses(config)

    @device_function
    def accumulate_gradient(G_reg, W_warp, X_warp):
        W_reg = cuda.local.array((ROWS, 2), uint32)
        X_reg = cuda.local.array((2, 2), uint32)
        for k in range(STEPS):
            for m in range(M_TILES):
                line, j = k // W_FRAGMENTS, k % W_FRAGMENTS
                ldmatrix_x4(W_reg, 2 * m, 0, int32(w_address(W_warp, m, line, j) + W_OFFSET))
            for line in range(X_LINES):
                for j in range(LINE_FRAGMENTS):
                    col = 4 * (line * LINE_FRAGMENTS + j)
                    place = x_address(X_warp, k, line, j) + X_OFFSET
                    ldmatrix_x4_trans(X_reg, 0, 0, int32(place))
                    for step in range(2 * M_TILES):
                        m, h = step // 2, step % 2
                        mma(G_reg, 2 * m, col + 2 * h, W_reg, 2 * m, 0, X_reg, 0, h)

    return accumulate_gradient


@cache
def make_locate_query_gradient(config: BackwardConfig):
    """`locate_query_gradient()`: the first row and column of this warp's part of a tile of dQ."""
    WARP_ROWS, WARP_COLS = config.query_gradient
    HALVES = config.block_m // WARP_ROWS

    @device_function
    def locate_query_gradient():
        warp = uint32(cuda.threadIdx.x) // WARP_SIZE
        return warp % HALVES * WARP_ROWS, warp // HALVES * WARP_COLS

    return locate_query_gradient


@cache
def make_query_gradient_part(config: BackwardConfig):
    """`query_gradient_part(dQ_gmem, warp)`: where a warp's part of the first tile of dQ lies.

    In HBM dQ is summed as it lies in registers: a tile is one register of all lanes after the
    other, of one warp after the other, so that a warp adds to 128 neighbouring bytes at once.
    """
    WARP_ROWS, WARP_COLS = config.query_gradient
    PART_BYTES = WARP_ROWS * WARP_COLS * FLOAT_BYTES

    @device_function
    def query_gradient_part(dQ_gmem, warp):
        return global_address(dQ_gmem) + int64(int32(warp * PART_BYTES))

    return query_gradient_part


@cache
def make_multiply_keys(config: BackwardConfig, dtype: str):
    """`multiply_keys(dQ_reg, dS_smem, K_smem)`: dQ = dS K, this warp's part of a tile."""
    ROWS, COLS = config.query_elements
    M_TILES, FRAGMENTS = ROWS // 2, COLS // 4
    STEPS = config.block_n // FRAGMENT_ROWS
    LINE_FRAGMENTS, LINE_BYTES = config.line_fragments, config.line_bytes
    LINE_COLS = config.line_cols
    S_ROW_BYTES, K_ROW_BYTES = config.score_rows.row_bytes, config.row_bytes
    mma = choose_mma(config, dtype)
    locate_query_gradient = make_locate_query_gradient(config)
    clear = make_clear(ROWS, COLS)
    s_offset, k_offset = make_chunk_offset(config.score_rows), make_chunk_offset(config)
    s_matrix_row, k_matrix_row = device_function(b_matrix_row), device_function(a_matrix_row)

    @device_function
    def multiply_keys(dQ_reg, dS_smem, K_smem):
        dS_reg = cuda.local.array((ROWS, 2), uint32)
        K_reg = cuda.local.array((2, 2), uint32)
        first_row, first_col = locate_query_gradient()
        lane = uint32(cuda.threadIdx.x) % WARP_SIZE
        # Where dS^T is read on its side, its chunks go on in the direction of the queries.
        row, chunk = s_matrix_row(lane)
        dS_lane = dS_smem + s_offset(row, first_row // CHUNK_ELEMENTS ^ chunk)
        row, chunk = k_matrix_row(lane)
        line, col = first_col // LINE_COLS, first_col % LINE_COLS
        K_lane = K_smem + k_offset(row, col // CHUNK_ELEMENTS ^ chunk) + line * LINE_BYTES
        clear(dQ_reg)
        for k in range(STEPS):
            for m in range(M_TILES):
                place = (dS_lane ^ (m * 2 * CHUNK_BYTES)) + k * FRAGMENT_ROWS * S_ROW_BYTES
                ldmatrix_x4_trans(dS_reg, 2 * m, 0, int32(place))
            for c in range(FRAGMENTS):
                line, j = c // LINE_FRAGMENTS, c % LINE_FRAGMENTS
                place = (K_lane ^ (j * 2 * CHUNK_BYTES)) + line * LINE_BYTES
                ldmatrix_x4_trans(K_reg, 0, 0, int32(place + k * FRAGMENT_ROWS * K_ROW_BYTES))
                for step in range(2 * M_TILES):
                    m, h = step // 2, step % 2
                    mma(dQ_reg, 2 * m, 4 * c + 2 * h, dS_reg, 2 * m, 0, K_reg, 0, h)

    return multiply_keys


@cache
def make_add_query_gradient(config: BackwardConfig):
    """`add_query_gradient(dQ_lane, dQ_reg)`: to what other blocks have added of this tile of dQ.

    dQ_lane: where the lane's first register of the tile lies in HBM (`make_query_gradient_part`).
    """
    ROWS, COLS = config.query_elements

    @device_function
    def add_query_gradient(dQ_lane, dQ_reg):
        for i in range(ROWS):
            for c in range(COLS):
                place = dQ_lane + (i * COLS + c) * REGISTER_BYTES
                red_global_add_f32(int64(place), dQ_reg[i, c])

    return add_query_gradient
