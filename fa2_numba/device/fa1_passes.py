"""What FlashAttention-1 does after each tile: m, l and O of its query tile, in HBM.

Between two passes over the query tiles O is kept divided by l, in a float32 workspace.
"""

import math
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import TileConfig
from fa2_numba.constants import NEG_INF
from fa2_numba.device import device_function
from fa2_numba.device.dtypes import FROM_FLOAT32
from fa2_numba.device.sliced_k import locate_owned, make_across_warps, make_sum_partial
from fa2_numba.device.softmax import finite_max, log_sum_exp, share

# Rows of scale_smem: the factors of the old O and of the new tile's P~ V.
OLD, NEW = 0, 1


@device_function
def merge_statistics(m_old, l_old, m_tile, l_tile):
    """m and l of a row with one more tile, and what its old O and the tile's P~ V count in them.

    The new O is the sum of both, each multiplied with its factor.
    """
    m_new = max(m_old, m_tile)  # FA1 Alg. 1 line 11
    old = math.exp(m_old - finite_max(m_new)) * l_old
    new = math.exp(m_tile - finite_max(m_new))
    l_new = old + new * l_tile
    # Divided, not multiplied by 1 / l_new: a tile that adds nothing leaves O as it is.
    return m_new, l_new, share(old, l_new), share(new, l_new)


@cache
def make_update_statistics(config: TileConfig):
    """`update_statistics(...)`: m and l of the query tile, one thread a row.

    `statistics`: m, l and LSE of the head in HBM. Leaves in scale_smem what row r of the old O
    (scale_smem[OLD, r]) and of the tile's P~ V (scale_smem[NEW, r]) must be multiplied with to be
    parts of the new O.
    """
    BLOCK_M, NUM_THREADS = config.block_m, config.num_threads
    max_across, sum_across = make_across_warps(config.num_warps)

    @device_function
    def update_statistics(scale_smem, max_smem, sum_smem, statistics, first_row, first, last):
        m_head, l_head, LSE_head = statistics
        for r in range(cuda.threadIdx.x, BLOCK_M, NUM_THREADS):
            i_row = first_row + r
            if i_row < m_head.shape[0]:
                m_old, l_old = NEG_INF, float32(0.0)  # FA1 Alg. 1 line 2
                if not first:
                    m_old, l_old = m_head[i_row], l_head[i_row]  # FA1 Alg. 1 line 8
                m_tile, l_tile = max_across(max_smem, r), sum_across(sum_smem, r)
                m_new, l_new, old, new = merge_statistics(m_old, l_old, m_tile, l_tile)
                scale_smem[OLD, r], scale_smem[NEW, r] = old, new
                m_head[i_row], l_head[i_row] = m_new, l_new  # FA1 Alg. 1 line 13
                if last:
                    # FlashAttention-1 itself keeps m and l; the interface wants their logarithm.
                    LSE_head[i_row] = log_sum_exp(m_new, l_new)

    return update_statistics


@cache
def make_update_output(config: TileConfig, dtype: str):
    """`update_output(...)`: add the warps' partial P~ V to EXCHANGE_COLS columns of O in HBM.

    `outputs`: O and the float32 workspace O_acc of the head.
    """
    OWN_ROWS, _, OWN_STEP = config.owned_elements
    sum_partial = make_sum_partial(config.num_warps)
    from_float32 = FROM_FLOAT32[dtype]

    @device_function
    def update_output(outputs, partial_smem, scale_smem, first_row, first_d, first, last):
        O_head, O_acc_head = outputs
        seqlen_q, head_dim = O_head.shape[0], O_head.shape[1]
        own_row, own_col = locate_owned()
        for i in range(OWN_ROWS):
            r, d = own_row + OWN_STEP * i, first_d + own_col
            i_row = first_row + r
            if i_row < seqlen_q and d < head_dim:
                o = scale_smem[NEW, r] * sum_partial(partial_smem, own_row, OWN_STEP * i, own_col)
                if not first:  # FA1 Alg. 1 line 8
                    o = scale_smem[OLD, r] * O_acc_head[i_row, d] + o
                O_acc_head[i_row, d] = o
                if last:
                    O_head[i_row, d] = from_float32(o)

    return update_output
