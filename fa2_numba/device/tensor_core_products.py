"""The two matrix products of attention on tensor cores: S = Q K^T and O += P V.

A lane's elements of S and O are those of the accumulators of `mma` (`layouts.ac_element`); each
16 x 16 elements of K or V that a warp loads serve all its rows.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba.device import device_function
from fa2_numba.device.ptx import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k8_float16,
    mma_m16n8k16_bfloat16,
    mma_m16n8k16_float16,
)
from fa2_numba.device.swizzle import make_fragment_addresses
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import SwizzledRows, TensorCoreConfig


@device_function
def _mma_of_depth_8(C, c_row, c_col, A, a_row, a_col, B, b_row, b_col):
    mma_m16n8k8_float16(C, c_row, c_col, A, a_row, a_col, B, b_row, b_col)
    mma_m16n8k8_float16(C, c_row, c_col, A, a_row, a_col + 1, B, b_row + 1, b_col)


def choose_mma(config: TensorCoreConfig | BackwardConfig, dtype: str):
    """C += A B for 16 x 16 elements of A, in one instruction or, on sm_75, in two."""
    if config.turing:
        return _mma_of_depth_8
    return {"float16": mma_m16n8k16_float16, "bfloat16": mma_m16n8k16_bfloat16}[dtype]


@cache
def make_load_queries(config: SwizzledRows, rows: int, offset: int = 0):
    """`load_queries(Q_reg, Q_warp, line, j)`: a lane's part of 16 columns of its rows of Q."""
    LINE_FRAGMENTS = config.line_fragments
    a_address, _ = make_fragment_addresses(config)

    @device_function
    def load_queries(Q_reg, Q_warp, line, j):
        col = 2 * (line * LINE_FRAGMENTS + j)
        for m in range(rows // 2):
            ldmatrix_x4(Q_reg, 2 * m, col, int32(a_address(Q_warp, m, line, j) + offset))

    return load_queries


@cache
def make_keep_queries(config: TensorCoreConfig, rows: int):
    """`keep_queries(Q_reg, Q_warp)`: all of the lane's part of Q, if it is to stay in registers."""
    KEEPS_QUERIES = config.keeps_queries
    NUM_LINES, LINE_FRAGMENTS = config.num_lines, config.line_fragments
    load_queries = make_load_queries(config, rows)

    @device_function
    def keep_queries(Q_reg, Q_warp):
        if KEEPS_QUERIES:
            for line in range(NUM_LINES):
                for j in range(LINE_FRAGMENTS):
                    load_queries(Q_reg, Q_warp, line, j)

    return keep_queries


@cache
def make_compute_scores(
    config: TensorCoreConfig | BackwardConfig,
    dtype: str,
    elements: tuple[int, int],
    scale_first: bool,
    offsets: tuple[int, int] = (0, 0),
):
    """`compute_scores(S_reg, Q_reg, Q_warp, K_smem, score_scale)`: S = Q K^T.

    elements: rows and columns of S that a lane owns. Q_reg: rows x padded_dim / 8 registers, which
    hold Q already or into which each part is loaded when it is needed. Q_warp, K_smem: shared
    addresses of the warp's first query and key. score_scale: S is multiplied with it if
    scale_first. offsets: bytes by which the two tiles lie behind Q_warp and K_smem; a product of
    other tiles then needs no addresses of its own.
    """
    ROWS, COLS = elements
    K_OFFSET = offsets[1]
    M_TILES, N_PAIRS = ROWS // 2, COLS // 4
    KEEPS_QUERIES, SCALE_FIRST = config.keeps_queries, scale_first
    NUM_LINES, LINE_FRAGMENTS = config.num_lines, config.line_fragments
    mma = choose_mma(config, dtype)
    _, b_address = make_fragment_addresses(config)
    load_queries = make_load_queries(config, ROWS, offsets[0])

    @device_function
    def compute_scores(S_reg, Q_reg, Q_warp, K_smem, score_scale):
        K_reg = cuda.local.array((2, 2), uint32)
        for i in range(ROWS):
            for j in range(COLS):
                S_reg[i, j] = float32(0.0)
        for line in range(NUM_LINES):
            for j in range(LINE_FRAGMENTS):
                k = line * LINE_FRAGMENTS + j
                if not KEEPS_QUERIES:
                    load_queries(Q_reg, Q_warp, line, j)
                for n in range(N_PAIRS):
                    ldmatrix_x4(K_reg, 0, 0, int32(b_address(K_smem, n, line, j) + K_OFFSET))
                    # One loop over rows and halves: compilers unroll it, as registers demand, but
                    # for some targets leave a loop of two rounds inside another as it is.
                    for step in range(2 * M_TILES):
                        m, h = step // 2, step % 2
                        mma(S_reg, 2 * m, 4 * n + 2 * h, Q_reg, 2 * m, 2 * k, K_reg, 0, h)
        if SCALE_FIRST:
            for i in range(ROWS):
                for j in range(COLS):
                    S_reg[i, j] *= score_scale

    return compute_scores


@cache
def make_accumulate_values(config: TensorCoreConfig, dtype: str, rows: int, keys: int):
    """`accumulate_values(O_reg, P_reg, V_smem)`: O += P V on a lane's rows of O.

    P_reg: rows x keys / 2 registers, two weights in each. V_smem: shared address of the warp's
    first value.
    """
    M_TILES, KEY_PAIRS = rows // 2, keys // 4
    NUM_LINES, LINE_FRAGMENTS = config.num_lines, config.line_fragments
    mma = choose_mma(config, dtype)
    a_address, _ = make_fragment_addresses(config)

    @device_function
    def accumulate_values(O_reg, P_reg, V_smem):
        V_reg = cuda.local.array((2, 2), uint32)
        for k in range(KEY_PAIRS):
            for line in range(NUM_LINES):
                for j in range(LINE_FRAGMENTS):
                    col = 4 * (line * LINE_FRAGMENTS + j)
                    # V lies in memory as B does not: rows of B, which `.trans` turns on their side.
                    ldmatrix_x4_trans(V_reg, 0, 0, a_address(V_smem, k, line, j))
                    for step in range(2 * M_TILES):
                        m, h = step // 2, step % 2
                        mma(O_reg, 2 * m, col + 2 * h, P_reg, 2 * m, 2 * k, V_reg, 0, h)

    return accumulate_values
