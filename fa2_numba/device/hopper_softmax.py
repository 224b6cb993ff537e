"""A consumer's softmax between its two products: that of `fa2_tensor_core`, cut into verbs.

With overlap it runs beside the product P V of the tile before, which still reads P and adds to O:
so the new P takes the place of S at first, and rescaling O is left for later. A thread has two
rows, i = 0 and 1.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import FULL_MASK
from fa2_numba.device import device_function
from fa2_numba.device.layouts import LANES_PER_ROW
from fa2_numba.device.ptx import ex2
from fa2_numba.device.softmax import finite_max, make_lane_max_of_pairs, make_over_lanes
from fa2_numba.device.softmax_base2 import (
    TOLERATED_GROWTH,
    inverse,
    make_exponentiate_in_place,
    make_pack,
)
from fa2_numba.hopper_config import HopperConfig


@cache
def make_scale_scores(config: HopperConfig, scale_first: bool):
    """`scale_scores(S_reg, score_scale)`: if the exponent's scale is not that of the scores."""
    COLS, _ = config.elements

    @device_function
    def scale_scores(S_reg, score_scale):
        if scale_first:
            for i in range(2):
                for j in range(COLS):
                    S_reg[i, j] *= score_scale

    return scale_scores


@cache
def make_update_softmax(config: HopperConfig):
    """`update_softmax(S_reg, m_reg, l_reg, factor_reg, scale)`: P = 2^(scale (S - m)) replaces S.

    Returns whether O has to be rescaled; then it leaves by what in factor_reg.
    """
    COLS, _ = config.elements
    LAZY = config.lazy_rescale
    lane_max, exponentiate = make_lane_max_of_pairs(COLS), make_exponentiate_in_place(COLS)
    max_over_lanes, _ = make_over_lanes(LANES_PER_ROW)

    @device_function
    def update_softmax(S_reg, m_reg, l_reg, factor_reg, scale):
        m_lane_reg = cuda.local.array(2, float32)
        outgrown = False
        for i in range(2):
            m_lane_reg[i] = lane_max(S_reg, i)
            # NaN, and so not above anything, as long as the row has seen nothing
            growth = (m_lane_reg[i] - m_reg[i]) * scale
            outgrown = outgrown or growth > TOLERATED_GROWTH
        rescales = not LAZY or cuda.any_sync(FULL_MASK, outgrown)
        if rescales:
            for i in range(2):
                m = max(m_reg[i], max_over_lanes(m_lane_reg[i]))
                factor_reg[i] = ex2((m_reg[i] - finite_max(m)) * scale)
                m_reg[i] = m
                l_reg[i] *= factor_reg[i]
        for i in range(2):
            l_reg[i] += exponentiate(S_reg, i, scale, finite_max(m_reg[i]) * scale)
        return rescales

    return update_softmax


@cache
def make_round_weights(config: HopperConfig, dtype: str):
    """`round_weights(P_reg, S_reg)`: P from the place of S to its own, packed for the product."""
    COLS, _ = config.elements
    pack_row = make_pack(dtype, COLS)

    @device_function
    def round_weights(P_reg, S_reg):
        for i in range(2):
            pack_row(P_reg, S_reg, i)

    return round_weights


@cache
def make_rescale(config: HopperConfig):
    """`rescale(O_reg, factor_reg)`: each row by its factor."""
    _, OUT_COLS = config.elements

    @device_function
    def rescale(O_reg, factor_reg):
        for i in range(2):
            for c in range(OUT_COLS):
                O_reg[i, c] *= factor_reg[i]

    return rescale


@cache
def make_normalise(config: HopperConfig):
    """`normalise(O_reg, m_reg, l_reg)`: l is summed over the lanes of a row, and divides O."""
    _, OUT_COLS = config.elements
    _, sum_over_lanes = make_over_lanes(LANES_PER_ROW)

    @device_function
    def normalise(O_reg, m_reg, l_reg):
        for i in range(2):
            l_reg[i] = sum_over_lanes(l_reg[i])
            scale = inverse(m_reg[i], l_reg[i])
            for c in range(OUT_COLS):
                O_reg[i, c] *= scale

    return normalise
