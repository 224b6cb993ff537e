"""What a consumer writes: its rows of O, by way of its own rows of Q, and of the log-sum-exp."""

from functools import cache

from numba import cuda
from numba.cuda import int32, uint32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.hopper_turns import meet
from fa2_numba.device.layouts import GROUP_ROWS, a_matrix_row
from fa2_numba.device.ptx import stmatrix_x4
from fa2_numba.device.softmax_base2 import PACK, log_sum_exp2
from fa2_numba.device.tma import bulk_commit_group, tma_store_4d
from fa2_numba.device.warpgroups import WARPGROUP_SIZE, fence_proxy_async
from fa2_numba.device.wgmma import LINE_BYTES, LINE_ELEMENTS, accumulator, swizzled
from fa2_numba.hopper_config import HopperConfig


@cache
def make_store_output(config: HopperConfig, dtype: str):
    """`store_output(O_map, O_reg, O_smem, consumer, first_row, head, batch)`: by stmatrix and TMA.

    O_smem: where this consumer's rows lie. The store is under way when it returns.
    """
    PIECES, PIECE_BYTES = config.pieces, config.q_bytes // config.pieces
    FRAGMENTS = LINE_ELEMENTS // 16
    matrix_row, swizzle = device_function(a_matrix_row), device_function(swizzled)
    pack = PACK[dtype]

    @device_function
    def store_output(O_map, O_reg, O_smem, consumer, first_row, head, batch):
        packed_reg = cuda.local.array((2, 2), uint32)
        thread = uint32(cuda.threadIdx.x) % WARPGROUP_SIZE
        row, chunk = matrix_row(thread % WARP_SIZE)
        place = uint32((thread // WARP_SIZE * 16 + row) * LINE_BYTES + chunk * 16)
        for piece in range(PIECES):
            for j in range(FRAGMENTS):
                col = 4 * (piece * FRAGMENTS + j)
                for i in range(2):
                    for half in range(2):
                        c = col + 2 * half
                        packed_reg[i, half] = pack(O_reg[i, c], O_reg[i, c + 1])
                # Tiles begin where the swizzle does, so it can be done on the offset.
                offset = swizzle(uint32(place + j * 32))
                stmatrix_x4(int32(O_smem + piece * PIECE_BYTES + offset), packed_reg, 0, 0)
        # The store reads by another way than the threads have written.
        fence_proxy_async()
        meet(consumer)
        if thread == 0:
            for piece in range(PIECES):
                column = int32(piece * LINE_ELEMENTS)
                source = int32(O_smem + piece * PIECE_BYTES)
                tma_store_4d(O_map, column, first_row, head, batch, source)
            bulk_commit_group()

    return store_output


locate_element = device_function(accumulator)


@device_function
def store_log_sum_exp(LSE_gmem, m_reg, l_reg, first_row, head, batch, seqlen_q, scale):
    """Of a consumer's rows, by one lane for each; scale: that of the scores in the exponent."""
    row, col = locate_element(uint32(cuda.threadIdx.x) % WARPGROUP_SIZE, 0, 0)
    for i in range(2):
        i_row = int32(first_row + row) + GROUP_ROWS * i
        if col == 0 and i_row < seqlen_q:
            LSE_gmem[batch, head, i_row] = log_sum_exp2(m_reg[i] * scale, l_reg[i])
