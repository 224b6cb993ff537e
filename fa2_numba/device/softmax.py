"""Row statistics of a score tile whose rows are spread over the lanes of a warp."""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import FULL_MASK, NEG_INF
from fa2_numba.device import device_function


@device_function
def finite_max(m):
    """The row maximum, or 0 if no key was visible: keeps -inf - -inf out of exponents."""
    return float32(0.0) if m == NEG_INF else m


@device_function
def share(part, whole):
    """part / whole, and 0 of the empty sum of a row that sees no key: its output is 0, not NaN."""
    return float32(0.0) if whole == float32(0.0) else part / whole


@device_function
def log_sum_exp(m, l):
    """m + ln l; -inf, the logarithm of an empty sum, for a row that sees no key."""
    return NEG_INF if l == float32(0.0) else m + math.log(l)


@cache
def make_row_max(cols: int, lane_cols: int):
    """`row_max(S_reg, i)`: the maximum of the warp's row i, known to all lanes of the row."""
    STEPS = int(math.log2(lane_cols))

    @device_function
    def row_max(S_reg, i):
        m = S_reg[i, 0]
        for j in range(1, cols):
            m = max(m, S_reg[i, j])
        for step in range(STEPS):
            m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 1 << step))
        return m

    return row_max


@cache
def make_exponentiate(cols: int, lane_cols: int):
    """`exponentiate(S_reg, i, m)`: row i of S becomes exp(S - m); returns its sum over the warp."""
    STEPS = int(math.log2(lane_cols))

    @device_function
    def exponentiate(S_reg, i, m):
        l = float32(0.0)
        for j in range(cols):
            p = math.exp(S_reg[i, j] - m)
            S_reg[i, j] = p
            l += p
        for step in range(STEPS):
            l += cuda.shfl_xor_sync(FULL_MASK, l, 1 << step)
        return l

    return exponentiate
