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
def make_over_lanes(lanes: int):
    """`max_over_lanes(m)`, `sum_over_lanes(l)`: over so many neighbouring lanes, known to each.

    In step k every lane exchanges with the one whose number differs in bit k (a butterfly).
    """
    STEPS = int(math.log2(lanes))

    @device_function
    def max_over_lanes(m):
        for step in range(STEPS):
            m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 1 << step))
        return m

    @device_function
    def sum_over_lanes(l):
        for step in range(STEPS):
            l += cuda.shfl_xor_sync(FULL_MASK, l, 1 << step)
        return l

    return max_over_lanes, sum_over_lanes


@cache
def make_lane_max(cols: int):
    """`lane_max(S_reg, i)`: the maximum of what the lane holds of row i."""

    @device_function
    def lane_max(S_reg, i):
        m = S_reg[i, 0]
        for j in range(1, cols):
            m = max(m, S_reg[i, j])
        return m

    return lane_max


@cache
def make_lane_max_of_pairs(cols: int):
    """The same with two maxima side by side, of even and of odd columns.

    Half as long a chain of comparisons, for kernels with few warps to hide it.
    """

    @device_function
    def lane_max(S_reg, i):
        even, odd = S_reg[i, 0], S_reg[i, 1]
        for j in range(2, cols, 2):
            even = max(even, S_reg[i, j])
            odd = max(odd, S_reg[i, j + 1])
        return max(even, odd)

    return lane_max


@cache
def make_row_max(cols: int, lane_cols: int):
    """`row_max(S_reg, i)`: the maximum of the warp's row i, known to all lanes of the row."""
    lane_max = make_lane_max(cols)
    max_over_lanes, _ = make_over_lanes(lane_cols)

    @device_function
    def row_max(S_reg, i):
        return max_over_lanes(lane_max(S_reg, i))

    return row_max


@cache
def make_exponentiate(cols: int, lane_cols: int):
    """`exponentiate(S_reg, i, m)`: row i of S becomes exp(S - m); returns its sum over the warp."""
    _, sum_over_lanes = make_over_lanes(lane_cols)

    @device_function
    def exponentiate(S_reg, i, m):
        l = float32(0.0)
        for j in range(cols):
            p = math.exp(S_reg[i, j] - m)
            S_reg[i, j] = p
            l += p
        return sum_over_lanes(l)

    return exponentiate
