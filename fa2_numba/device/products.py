"""The two matrix products of attention on one warp's tile, in float32 registers.

A warp's 32 lanes form a grid of LANE_ROWS x LANE_COLS. The lane at (lane_row, lane_col) owns the
elements (lane_row + LANE_ROWS i, lane_col + LANE_COLS j): every value it reads from shared memory
serves a whole row or column of its elements. It reads through views that start at its own first
row, so that all further indices are constants and cost nothing.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import FULL_MASK, WARP_SIZE
from fa2_numba.device import device_function


@cache
def make_compute_scores(rows: int, cols: int, lanes: tuple[int, int], head_dim: int):
    """`compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale)`: S = softmax_scale Q K^T.

    `row`, `col`: the lane's first row of Q_smem and first row (a key) of K_smem.
    """
    LANE_ROWS, LANE_COLS = lanes
    # Unsigned, so that Numba adds no code for a negative index to the innermost loop.
    DEPTH = np.uint32(head_dim)

    @device_function
    def compute_scores(S_reg, Q_smem, K_smem, row, col, softmax_scale):
        Q_lane, K_lane = Q_smem[row:], K_smem[col:]
        q_reg = cuda.local.array(rows, float32)
        for i in range(rows):
            for j in range(cols):
                S_reg[i, j] = float32(0.0)
        for d in range(DEPTH):
            for i in range(rows):
                q_reg[i] = Q_lane[LANE_ROWS * i, d]
            for j in range(cols):
                k = K_lane[LANE_COLS * j, d]
                for i in range(rows):
                    S_reg[i, j] += q_reg[i] * k
        for i in range(rows):
            for j in range(cols):
                S_reg[i, j] *= softmax_scale

    return compute_scores


@cache
def make_accumulate_values(rows: int, keys: int, cols: int, lanes: tuple[int, int]):
    """`accumulate_values(O_reg, P_reg, V_smem, key, col)`: O += P V.

    P_reg: rows x keys weights of this lane, laid out like the scores. A row of P is spread over
    LANE_COLS lanes, so each weight is passed to the row's other lanes by a shuffle.
    `key`: the warp's first row of V_smem; `col`: the lane's first column of it.
    """
    LANE_COLS = lanes[1]

    @device_function
    def accumulate_values(O_reg, P_reg, V_smem, key, col):
        p_reg = cuda.local.array(rows, float32)
        first_lane = cuda.threadIdx.x % WARP_SIZE // LANE_COLS * LANE_COLS
        for source in range(LANE_COLS):
            V_rows = V_smem[key + source :]
            for j in range(keys):
                for i in range(rows):
                    p_reg[i] = cuda.shfl_sync(FULL_MASK, P_reg[i, j], first_lane + source)
                for c in range(cols):
                    v = V_rows[LANE_COLS * j, col + LANE_COLS * c]
                    for i in range(rows):
                        O_reg[i, c] += p_reg[i] * v

    return accumulate_values
