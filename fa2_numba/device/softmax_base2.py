"""Softmax in base 2, as tensor-core rungs need it: P = 2^(scale S - m), packed in pairs.

A GPU computes powers and logarithms of 2, one instruction each; the factor log2 e that makes them
those of e goes into the scale of the scores.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import LN_2, NEG_INF
from fa2_numba.device import device_function
from fa2_numba.device.ptx import ex2, lg2, pack_bfloat16, pack_float16, rcp

PACK = {"float16": pack_float16, "bfloat16": pack_bfloat16}
"""dtype name -> instruction that rounds two float32 numbers into one register."""

TOLERATED_GROWTH = float32(8.0)
"""m may lag so many powers of 2 behind the maximum: P is 2^8 at most, where float16 ends at 2^16,
and O and l, which have the same m in them, keep their ratio."""


@cache
def make_exponentiate(dtype: str, cols: int):
    """`exponentiate(P_reg, S_reg, i, scale, m)`: row i of P = 2^(scale S - m); returns its sum.

    The sum is that of the lane's own elements, before they are rounded to `dtype` in P_reg.
    """
    pack = PACK[dtype]

    @device_function
    def exponentiate(P_reg, S_reg, i, scale, m):
        l = float32(0.0)
        for j in range(0, cols, 2):
            # One multiply-add and one power of 2 an element.
            low = ex2(cuda.fma(S_reg[i, j], scale, -m))
            high = ex2(cuda.fma(S_reg[i, j + 1], scale, -m))
            l += low + high
            P_reg[i, j // 2] = pack(low, high)
        return l

    return exponentiate


@device_function
def inverse(m, l):
    """1 / l, and 0 of the empty sum of a row that sees no key: its output is 0, not NaN."""
    return float32(0.0) if m == NEG_INF and l == float32(0.0) else rcp(l)


@device_function
def log_sum_exp2(m, l):
    """Natural logarithm of 2^m l; -inf, that of an empty sum, for a row that sees no key."""
    return NEG_INF if m == NEG_INF and l == float32(0.0) else LN_2 * (m + lg2(l))


@cache
def make_exponentiate_in_place(cols: int):
    """`exponentiate(S_reg, i, scale, m)`: row i of S becomes 2^(scale S - m); returns its sum.

    For P whose packed form is still being read: `make_pack` rounds it later. Even and odd columns
    are summed side by side, in half as long a chain.
    """

    @device_function
    def exponentiate(S_reg, i, scale, m):
        even, odd = float32(0.0), float32(0.0)
        for j in range(0, cols, 2):
            S_reg[i, j] = ex2(cuda.fma(S_reg[i, j], scale, -m))
            S_reg[i, j + 1] = ex2(cuda.fma(S_reg[i, j + 1], scale, -m))
            even += S_reg[i, j]
            odd += S_reg[i, j + 1]
        return even + odd

    return exponentiate


@cache
def make_pack(dtype: str, cols: int):
    """`pack_row(P_reg, S_reg, i)`: row i of S, rounded and packed in pairs."""
    pack = PACK[dtype]

    @device_function
    def pack_row(P_reg, S_reg, i):
        for j in range(0, cols, 2):
            P_reg[i, j // 2] = pack(S_reg[i, j], S_reg[i, j + 1])

    return pack_row
