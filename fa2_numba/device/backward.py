"""Verbs of the backward passes: row statistics in, gradients out.

In float32 and split-Q lanes; to clear sums serves the tensor-core kernels too.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import SPLIT_Q_LANES
from fa2_numba.constants import NEG_INF
from fa2_numba.device import device_function
from fa2_numba.device.dtypes import FROM_FLOAT32


@device_function
def weight_exponent(lse):
    """What is subtracted from a row's scores: LSE, +inf for a row that sees no key.

    Its hidden scores, -inf, then have the weight exp(-inf) = 0, where -inf - (-inf) would be NaN.
    """
    return -NEG_INF if lse == NEG_INF else lse


@cache
def make_load_statistics(count: int, step: int):
    """`load_statistics(lse_reg, D_reg, LSE_gmem, D_gmem, batch, head, row)`: of a lane's queries.

    There are `count` of them, the first is `row`, the next ones are `step` further. One past the
    end weighs nothing.
    """

    @device_function
    def load_statistics(lse_reg, D_reg, LSE_gmem, D_gmem, batch, head, row):
        for i in range(count):
            lse_reg[i], D_reg[i] = -NEG_INF, float32(0.0)
            i_row = row + step * i
            if i_row < LSE_gmem.shape[2]:
                lse_reg[i] = weight_exponent(LSE_gmem[batch, head, i_row])
                D_reg[i] = D_gmem[batch, head, i_row]

    return load_statistics


@cache
def make_clear(rows: int, cols: int):
    """`clear(X_reg)`: a lane's rows x cols sums begin at 0."""

    @device_function
    def clear(X_reg):
        for i in range(rows):
            for c in range(cols):
                X_reg[i, c] = float32(0.0)

    return clear


@cache
def make_store_rows(rows: int, cols: int, dtype: str):
    """`store_rows(X_gmem, batch, head, row, col, X_reg, scale)`: scale X to HBM, split-Q lanes.

    `row`, `col`: the lane's first element of a head of X_gmem, an array of `dtype`.
    """
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES
    from_float32 = FROM_FLOAT32[dtype]

    @device_function
    def store_rows(X_gmem, batch, head, row, col, X_reg, scale):
        for i in range(rows):
            for c in range(cols):
                i_row, d = row + LANE_ROWS * i, col + LANE_COLS * c
                if i_row < X_gmem.shape[1] and d < X_gmem.shape[3]:
                    X_gmem[batch, i_row, head, d] = from_float32(scale * X_reg[i, c])

    return store_rows


@cache
def make_add_rows(rows: int, cols: int):
    """`add_rows(X_gmem, batch, head, row, col, X_reg)`: X_gmem (float32) += X, whoever else adds.

    As `store_rows`, but other blocks may add to the same elements at the same time.
    """
    LANE_ROWS, LANE_COLS = SPLIT_Q_LANES

    @device_function
    def add_rows(X_gmem, batch, head, row, col, X_reg):
        for i in range(rows):
            for c in range(cols):
                i_row, d = row + LANE_ROWS * i, col + LANE_COLS * c
                if i_row < X_gmem.shape[1] and d < X_gmem.shape[3]:
                    cuda.atomic.add(X_gmem, (batch, i_row, head, d), X_reg[i, c])

    return add_rows
