"""Which keys a query sees; the others get the score -inf and so the weight exactly 0."""

from collections.abc import Callable
from functools import cache

from numba.cuda import int32

from fa2_numba.config import TileConfig
from fa2_numba.constants import NEG_INF
from fa2_numba.device import device_function
from fa2_numba.device.layouts import ac_element


@cache
def make_mask_scores(rows: int, cols: int, lanes: tuple[int, int], causal: bool):
    """`mask_scores(S_reg, row, col, seqlen_q, seqlen_k)` on a thread's rows x cols scores.

    `row`, `col`: the thread's first query and key; the next ones are lanes[0], lanes[1] further.
    """
    LANE_ROWS, LANE_COLS = lanes

    @device_function
    def place(i, j):
        return LANE_ROWS * i, LANE_COLS * j

    return _make_mask(rows, cols, place, causal)


@cache
def make_mask_keys(rows: int, cols: int, lanes: tuple[int, int], causal: bool):
    """`mask_keys(S_reg, key, query, seqlen_q, seqlen_k)`: the same on S^T, whose rows are keys.

    `key`, `query`: the thread's first ones; the next are lanes[0], lanes[1] further.
    """
    LANE_ROWS, LANE_COLS = lanes

    @device_function
    def place(i, j):
        return LANE_ROWS * i, LANE_COLS * j

    return _make_mask_of_keys(rows, cols, place, causal)


@cache
def make_mask_accumulators(rows: int, cols: int, causal: bool):
    """The same where the thread's scores are accumulators of `mma` (`layouts.ac_element`)."""
    element = device_function(ac_element)

    @device_function
    def place(i, j):
        return element(0, i, j)

    return _make_mask(rows, cols, place, causal)


def _make_mask(rows: int, cols: int, place: Callable, causal: bool):
    """place(i, j): how much further down and right element (i, j) lies than element (0, 0)."""

    @device_function
    def mask_scores(S_reg, row, col, seqlen_q, seqlen_k):
        for i in range(rows):
            keys = seqlen_k
            if causal:
                # Bottom-right alignment: the last query sees the last key.
                keys = min(seqlen_k, row + place(i, 0)[0] + 1 + seqlen_k - seqlen_q)
            visible = int32(keys - col)
            for j in range(cols):
                if int32(place(i, j)[1]) >= visible:
                    S_reg[i, j] = NEG_INF

    return mask_scores


@cache
def make_mask_transposed(rows: int, cols: int, causal: bool):
    """`mask_scores(S_reg, key, query, seqlen_q, seqlen_k)` on accumulators of S^T."""
    element = device_function(ac_element)

    @device_function
    def place(i, j):
        return element(0, i, j)

    return _make_mask_of_keys(rows, cols, place, causal)


def _make_mask_of_keys(rows: int, cols: int, place: Callable, causal: bool):
    """`place` as in `_make_mask`; rows are keys, columns queries.

    Queries past the end may keep scores: their weights are 0, for their log-sum-exp is +inf.
    """

    @device_function
    def mask_keys(S_reg, key, query, seqlen_q, seqlen_k):
        for i in range(rows):
            one_key = int32(key + place(i, 0)[0])
            # The first query that sees the key: none sees one past the end.
            first = int32(one_key + seqlen_q - seqlen_k) if causal else int32(0)
            none = seqlen_q + place(0, cols)[1]
            hidden = int32((first if one_key < seqlen_k else none) - query)
            for j in range(cols):
                if int32(place(0, j)[1]) < hidden:
                    S_reg[i, j] = NEG_INF

    return mask_keys


@cache
def make_needs_mask(config: TileConfig, causal: bool):
    """`needs_mask(first_row, first_col, seqlen_q, seqlen_k)`: does the tile hold hidden keys?"""
    BLOCK_N = config.block_n

    @device_function
    def needs_mask(first_row, first_col, seqlen_q, seqlen_k):
        keys = seqlen_k
        if causal:
            keys = min(seqlen_k, first_row + 1 + seqlen_k - seqlen_q)
        return first_col + BLOCK_N > keys

    return needs_mask
