"""What the warps of a sliced-K rung exchange: row statistics and partial O, in shared memory.

Every warp has its own keys, so a row's maximum and sum and every element of O = P V are made of one
part from each warp. O goes EXCHANGE_COLS columns at a time: each warp stores its part, and after a
barrier each thread sums over the warps the elements it owns, one column of a few rows.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import EXCHANGE_COLS, SLICED_K_LANES, TileConfig
from fa2_numba.constants import NUM_BANKS, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.dtypes import FROM_FLOAT32
from fa2_numba.device.products import make_accumulate_values
from fa2_numba.device.softmax import log_sum_exp, share
from fa2_numba.device.tiles import shared_tile

LANE_ROWS, LANE_COLS = SLICED_K_LANES
BANK_ROWS = NUM_BANKS // EXCHANGE_COLS
"""Rows of partial_smem that lie side by side in the banks of shared memory."""


@cache
def make_across_warps(num_warps: int):
    """`max_across(max_smem, r)`, `sum_across(sum_smem, r)`: row r over the slices of all warps."""

    @device_function
    def max_across(max_smem, r):
        m = max_smem[0, r]
        for w in range(1, num_warps):
            m = max(m, max_smem[w, r])
        return m

    @device_function
    def sum_across(sum_smem, r):
        l = sum_smem[0, r]
        for w in range(1, num_warps):
            l += sum_smem[w, r]
        return l

    return max_across, sum_across


@cache
def make_exchange_tiles(config: TileConfig, num_scales: int):
    """`exchange_tiles(smem)`: partial_smem, max_smem, sum_smem, scale_smem.

    They lie behind the Q, K and V tiles. scale_smem has a row for each of the factors that a row of
    O is multiplied with; a single one has no row index.
    """
    BLOCK_M, NUM_WARPS = config.block_m, config.num_warps
    PARTIAL_OFFSET = config.split_q_shared_bytes // 4
    MAX_OFFSET = PARTIAL_OFFSET + NUM_WARPS * BLOCK_M * EXCHANGE_COLS
    SUM_OFFSET = MAX_OFFSET + NUM_WARPS * BLOCK_M
    SCALE_OFFSET = SUM_OFFSET + NUM_WARPS * BLOCK_M
    scale_shape = (BLOCK_M,) if num_scales == 1 else (num_scales, BLOCK_M)

    @device_function
    def exchange_tiles(smem):
        partial_smem = shared_tile(smem, PARTIAL_OFFSET, (NUM_WARPS, BLOCK_M, EXCHANGE_COLS))
        max_smem = shared_tile(smem, MAX_OFFSET, (NUM_WARPS, BLOCK_M))
        sum_smem = shared_tile(smem, SUM_OFFSET, (NUM_WARPS, BLOCK_M))
        scale_smem = shared_tile(smem, SCALE_OFFSET, scale_shape)
        return partial_smem, max_smem, sum_smem, scale_smem

    return exchange_tiles


@device_function
def swizzle(r, c):
    """Where column c of row r lies within row r of partial_smem.

    A warp stores 8 rows x 4 columns at once, but 2 rows already fill the 32 banks: the same columns
    of every second row share a bank. The xor gives each pair of rows 4 other columns.
    """
    return c ^ (LANE_COLS * (r // BANK_ROWS % (EXCHANGE_COLS // LANE_COLS)))


@cache
def make_store_partial(config: TileConfig):
    """`store_partial(partial_smem, P_reg, V_smem, first_key, first_d)`: the warp's part of P V.

    Of columns first_d to first_d + EXCHANGE_COLS; first_key: the warp's first row of V_smem.
    """
    ROWS, COLS, OUT_COLS = config.sliced_k_elements
    accumulate_values = make_accumulate_values(ROWS, COLS, OUT_COLS, SLICED_K_LANES)

    @device_function
    def store_partial(partial_smem, P_reg, V_smem, first_key, first_d):
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        row, lane_col = lane // LANE_COLS, lane % LANE_COLS
        partial_reg = cuda.local.array((ROWS, OUT_COLS), float32)
        for i in range(ROWS):
            for c in range(OUT_COLS):
                partial_reg[i, c] = float32(0.0)
        accumulate_values(partial_reg, P_reg, V_smem, first_key, first_d + lane_col)
        # A view from the lane's own row on: constant indices cost no registers.
        partial_lane = partial_smem[warp, row:]
        for c in range(OUT_COLS):
            # The same for all rows of the lane, which are LANE_ROWS apart.
            d = swizzle(row, lane_col + LANE_COLS * c)
            for i in range(ROWS):
                partial_lane[LANE_ROWS * i, d] = partial_reg[i, c]

    return store_partial


@cache
def make_sum_partial(num_warps: int):
    """`sum_partial(partial_smem, row, step, c)`: element (row + step, c) over all warps."""

    @device_function
    def sum_partial(partial_smem, row, step, c):
        partial_rows = partial_smem[:, row:]
        d = swizzle(row + step, c)
        o = partial_rows[0, step, d]
        for w in range(1, num_warps):
            o += partial_rows[w, step, d]
        return o

    return sum_partial


@device_function
def locate_owned():
    """Row and column of the first element that this thread sums in an exchange."""
    return cuda.threadIdx.x // EXCHANGE_COLS, cuda.threadIdx.x % EXCHANGE_COLS


@cache
def make_update_output(config: TileConfig):
    """`update_output(O_reg, partial_smem, scale_smem)`: O = scale O + P V for one exchange.

    O_reg: the thread's elements of O, one column an exchange. The exchange at hand is column 0, and
    the columns then move up by one, the first behind the last: after all exchanges each is back in
    its place. A column numbered by the exchange would drive O_reg out of the registers, which have
    no addresses.
    """
    OWN_ROWS, OWN_COLS, OWN_STEP = config.owned_elements
    sum_partial = make_sum_partial(config.num_warps)

    @device_function
    def update_output(O_reg, partial_smem, scale_smem):
        own_row, own_col = locate_owned()
        scale_own = scale_smem[own_row:]
        for i in range(OWN_ROWS):
            o = sum_partial(partial_smem, own_row, OWN_STEP * i, own_col)
            o = scale_own[OWN_STEP * i] * O_reg[i, 0] + o
            for c in range(OWN_COLS - 1):
                O_reg[i, c] = O_reg[i, c + 1]
            O_reg[i, OWN_COLS - 1] = o

    return update_output


@cache
def make_store_output(config: TileConfig, dtype: str):
    """`store_output(O_head, LSE_head, O_reg, max_smem, sum_smem, first_row)`: O / l and LSE to HBM.

    O_head, LSE_head: the head's part of the arrays; max_smem: m, the same of every warp;
    sum_smem: each warp's part of l.
    """
    OWN_ROWS, OWN_COLS, OWN_STEP = config.owned_elements
    _, sum_across = make_across_warps(config.num_warps)
    from_float32 = FROM_FLOAT32[dtype]

    @device_function
    def store_output(O_head, LSE_head, O_reg, max_smem, sum_smem, first_row):
        seqlen_q, head_dim = O_head.shape[0], O_head.shape[1]
        own_row, own_col = locate_owned()
        max_own, sum_own = max_smem[0, own_row:], sum_smem[:, own_row:]
        for i in range(OWN_ROWS):
            i_row = first_row + own_row + OWN_STEP * i
            if i_row < seqlen_q:
                l = sum_across(sum_own, OWN_STEP * i)
                scale = share(float32(1.0), l)
                for c in range(OWN_COLS):
                    d = own_col + EXCHANGE_COLS * c
                    if d < head_dim:
                        O_head[i_row, d] = from_float32(O_reg[i, c] * scale)
                if own_col == 0:
                    LSE_head[i_row] = log_sum_exp(max_own[OWN_STEP * i], l)

    return store_output
