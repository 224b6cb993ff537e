"""16-bit tiles in shared memory: rows of 16-byte chunks, permuted so that no bank is asked twice.

Eight lanes that read the same chunk of eight rows would hit the same banks wherever a row is a
multiple of 128 bytes: row r therefore keeps its chunk c at place c ^ (r % 8). Where rows are an
odd multiple of 64 bytes, two of them make a line of the banks, and it is c ^ (r / 2 % 4).
"""

from functools import cache

from numba import cuda
from numba.cuda import int32, uint32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.layouts import a_matrix_row, b_matrix_row
from fa2_numba.tensor_core_config import CHUNK_BYTES, FRAGMENT_ROWS, TensorCoreConfig

TILE_ALIGNMENT = 128
"""Bytes of all banks together: where tiles begin."""


@cache
def make_chunk_offset(config: TensorCoreConfig):
    """`chunk_offset(row, column)`: where chunk `column` of a row's first line lies in a tile.

    In bytes. Eight rows further down, and in the next line, the swizzle is the same. An xor in it
    can be done on the offset itself: of chunk c it makes that of chunk c ^ d, if d is shifted to
    the bits that count chunks, for rows begin at multiples of a line.
    """
    ROW_BYTES, LINE_CHUNKS = config.row_bytes, config.line_chunks
    LINE_ROWS = 8 // LINE_CHUNKS

    @device_function
    def chunk_offset(row, column):
        return int32(row * ROW_BYTES + (column ^ (row // LINE_ROWS % LINE_CHUNKS)) * CHUNK_BYTES)

    return chunk_offset


@cache
def make_fragment_addresses(config: TensorCoreConfig):
    """`a_address(tile, i, line, j)`, `b_address(...)`: what this lane points an `ldmatrix` x4 to.

    For the 16 x 16 elements at row 16 i of a tile and column 16 j of one of its lines, as A lies in
    registers, or as B does where memory holds the rows of its transpose. One offset for each j is
    all that a lane has to compute; the rest are constants.
    """
    ROW_BYTES, LINE_BYTES = config.row_bytes, config.line_bytes
    chunk_offset = make_chunk_offset(config)

    def fragment_address(matrix_row):
        matrix_row = device_function(matrix_row)

        @device_function
        def address(tile, i, line, j):
            row, chunk = matrix_row(uint32(cuda.threadIdx.x) % WARP_SIZE)
            within_line = chunk_offset(row, chunk) ^ (j * 2 * CHUNK_BYTES)
            return int32(tile + within_line + (i * FRAGMENT_ROWS * ROW_BYTES + line * LINE_BYTES))

        return address

    return fragment_address(a_matrix_row), fragment_address(b_matrix_row)
