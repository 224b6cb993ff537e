"""Lesson 09: one warp multiplies two matrices on a tensor core, or reads a tile as `ldmatrix` does.

The kernels are made for a function that says where things lie, so that a wrong place can be tried.
"""

from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint32
from numba.cuda.dispatcher import CUDADispatcher

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.layouts import a_matrix_row, ac_element
from fa2_numba.device.ptx import (
    global_address,
    ld_global_v4_b32,
    ldmatrix_x4,
    mma_m16n8k16_float16,
    pack_float16,
    shared_address,
    st_shared_v4_b32,
)
from fa2_numba.device.swizzle import TILE_ALIGNMENT

TILE_ROWS, CHUNK_BYTES, CHUNK_ELEMENTS = 16, 16, 8
WIDE, NARROW = 8, 4
"""Chunks of a row of 64 float16 elements, 128 bytes, all 32 banks; and of one of 32 elements."""


def in_memory_order(lane, i, j):
    """Row and column of A if each lane took its 8 elements as memory has them: a wrong guess."""
    element = 8 * lane + 4 * i + j
    return element // 16, element % 16


def row_major(row, chunk):
    """Chunks of a row where one expects them."""
    return chunk


def swizzled(row, chunk):
    """Chunks of a wide row permuted by the row's number, as the package's tiles are."""
    return chunk ^ (row % 8)


@cache
def make_multiply(a_element: Callable):
    """A kernel for one warp: C = A B. `a_element(lane, i, j)`: which element of A a lane loads.

    Arguments: A (16, 16), B (16, 8), C (16, 8), float32; A and B are rounded to float16.
    """
    a_element, ac_place = device_function(a_element), device_function(ac_element)

    @cuda.jit
    def multiply(A, B, C):
        lane = cuda.threadIdx.x
        A_reg = cuda.local.array((2, 2), uint32)
        B_reg = cuda.local.array((2, 1), uint32)
        C_reg = cuda.local.array((2, 2), float32)
        for i in range(2):
            for j in range(2):
                row, col = a_element(lane, i, 2 * j)
                next_row, next_col = a_element(lane, i, 2 * j + 1)
                A_reg[i, j] = pack_float16(A[row, col], A[next_row, next_col])
                C_reg[i, j] = float32(0.0)
            # B lies as A does, transposed.
            col, row = ac_place(lane, 0, 2 * i)
            B_reg[i, 0] = pack_float16(B[row, col], B[row + 1, col])
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
        for i in range(2):
            for j in range(2):
                row, col = ac_place(lane, i, j)
                C[row, col] = C_reg[i, j]

    return multiply


def make_show_registers(load_fragments: Callable):
    """A kernel for one warp: C = A B, and what its lanes held.

    load_fragments(A, B, A_reg, B_reg): fills a lane's registers, (2, 2) and (2, 1) uint32.
    Arguments: A (16, 16), B (16, 8), C (16, 8), float32; A_held (32, 2, 2) and B_held (32, 2, 1)
    uint32: the registers of every lane.
    """
    if not isinstance(load_fragments, CUDADispatcher):
        load_fragments = device_function(load_fragments)
    ac_place = device_function(ac_element)

    @cuda.jit
    def show_registers(A, B, C, A_held, B_held):
        lane = cuda.threadIdx.x
        A_reg = cuda.local.array((2, 2), uint32)
        B_reg = cuda.local.array((2, 1), uint32)
        C_reg = cuda.local.array((2, 2), float32)
        load_fragments(A, B, A_reg, B_reg)
        for i in range(2):
            B_held[lane, i, 0] = B_reg[i, 0]
            for j in range(2):
                A_held[lane, i, j] = A_reg[i, j]
                C_reg[i, j] = float32(0.0)
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
        for i in range(2):
            for j in range(2):
                row, col = ac_place(lane, i, j)
                C[row, col] = C_reg[i, j]

    return show_registers


@cache
def make_read_tile(place: Callable, row_chunks: int = WIDE):
    """A kernel for one warp: a tile goes to shared memory, and from there into registers as A's.

    place(row, chunk): where in its row a chunk of 16 bytes is kept. Arguments: words (16,
    4 row_chunks) uint32, two float16 elements each, and out (row_chunks / 2, 32, 4) uint32: for
    each piece of 16 x 16 elements what every lane holds.
    """
    if row_chunks not in (WIDE, NARROW):
        raise ValueError(f"row_chunks={row_chunks!r}: must be {WIDE} or {NARROW}")
    place = device_function(place)
    matrix_row = device_function(a_matrix_row)
    ROW_CHUNKS, PIECES = row_chunks, row_chunks // 2
    TILE_WORDS = TILE_ROWS * row_chunks * CHUNK_BYTES // 4

    @cuda.jit
    def read_tile(words, out):
        lane = cuda.threadIdx.x
        smem = cuda.shared.array(TILE_WORDS, uint32, alignment=TILE_ALIGNMENT)
        tile = shared_address(smem)
        chunk_reg = cuda.local.array((1, 4), uint32)
        for first in range(0, TILE_ROWS * ROW_CHUNKS, WARP_SIZE):
            row, chunk = (first + lane) // ROW_CHUNKS, (first + lane) % ROW_CHUNKS
            source = global_address(words) + int64((first + lane) * CHUNK_BYTES)
            ld_global_v4_b32(chunk_reg, 0, 0, source)
            kept = row * ROW_CHUNKS + place(row, chunk)
            st_shared_v4_b32(int32(tile + kept * CHUNK_BYTES), chunk_reg, 0, 0)
        # Each lane reads what others have written.
        cuda.syncwarp()
        for piece in range(PIECES):
            R = cuda.local.array((2, 2), uint32)
            row, chunk = matrix_row(lane)
            kept = row * ROW_CHUNKS + place(row, 2 * piece + chunk)
            ldmatrix_x4(R, 0, 0, int32(tile + kept * CHUNK_BYTES))
            for q in range(4):
                out[piece, lane, q] = R[q % 2, q // 2]

    return read_tile
