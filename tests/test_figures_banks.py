"""Lesson 09's figures and kernels: places in the figure are those that the run used."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from numba import cuda

from fa2_numba import simulate
from fa2_numba.device.layouts import ac_element
from fa2_numba.device.ptx import pack_float16
from fa2_numba.device.swizzle import make_chunk_offset
from fa2_numba.launch import signature
from fa2_numba.lessons.figures.banks import (
    draw_banks,
    draw_mma_fragments,
    new_tile,
    read_tile,
    record_addresses,
)
from fa2_numba.lessons.kernels.fragments import (
    CHUNK_BYTES,
    NARROW,
    TILE_ROWS,
    WIDE,
    in_memory_order,
    make_multiply,
    make_read_tile,
    make_show_registers,
    row_major,
    swizzled,
)
from fa2_numba.simulator.requests import count_replays
from fa2_numba.tensor_core_config import TensorCoreConfig


def narrow(row, chunk):
    return chunk ^ (row // 2 % 4)


LAYOUTS = pytest.mark.parametrize(
    ("place", "row_chunks", "conflicts"),
    [
        # matrices of the tile, times that each read is repeated
        (row_major, WIDE, 16 * 7),
        (swizzled, WIDE, 0),
        (row_major, NARROW, 8 * 3),
        (narrow, NARROW, 0),
    ],
)


@pytest.mark.parametrize(("element", "right"), [(ac_element, True), (in_memory_order, False)])
def test_a_product_is_right_where_lanes_hold_what_mma_wants(element, right):
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    C = np.full((16, 8), np.nan, np.float32)
    simulate(make_multiply(element), progress=False)[1, 32](A, B, C)
    assert (C == A @ B).all() == right


def test_a_wrong_guess_still_loads_every_element_once():
    held = {in_memory_order(lane, i, j) for lane in range(32) for i in range(2) for j in range(4)}
    assert held == {(row, col) for row in range(16) for col in range(16)}


@LAYOUTS
def test_a_tile_is_read_right_and_its_conflicts_are_counted(place, row_chunks, conflicts):
    for seed in (None, 1):
        report, right = read_tile(place, row_chunks, seed)
        assert right and report.bank_conflicts == conflicts
        assert report.matrix_loads == row_chunks // 2 and report.shared_store_replays == 0


@LAYOUTS
def test_recorded_addresses_are_those_of_the_count(place, row_chunks, conflicts):
    addresses = record_addresses(place, row_chunks)
    assert count_replays(addresses.read, CHUNK_BYTES).sum() == conflicts
    for (row, chunk), address in np.ndenumerate(addresses.kept):
        assert address == (row * row_chunks + place(row, chunk)) * CHUNK_BYTES
    assert sorted(addresses.read.ravel()) == sorted(addresses.kept.ravel())


@pytest.mark.parametrize(("place", "row_chunks"), [(swizzled, WIDE), (narrow, NARROW)])
def test_the_swizzle_is_that_of_the_package(place, row_chunks):
    offset = make_chunk_offset(TensorCoreConfig(8 * row_chunks, 64, 64, 4)).py_func
    for row in range(TILE_ROWS):
        for chunk in range(row_chunks):
            assert offset(row, chunk) == (row * row_chunks + place(row, chunk)) * CHUNK_BYTES


def load_fragments(A, B, A_reg, B_reg):
    lane = cuda.threadIdx.x
    A_reg[0, 0] = A_reg[0, 1] = A_reg[1, 0] = A_reg[1, 1] = pack_float16(A[0, lane % 16], A[0, 0])
    B_reg[0, 0] = B_reg[1, 0] = pack_float16(B[0, lane % 8], B[0, 0])


MATRICES = [np.zeros(shape, np.float32) for shape in ((16, 16), (16, 8), (16, 8))]
HELD = [np.zeros(shape, np.uint32) for shape in ((32, 2, 2), (32, 2, 1))]


@pytest.mark.parametrize(
    ("kernel", "arrays", "instruction"),
    [
        pytest.param(make_multiply(ac_element), MATRICES, "mma.sync", id="multiply"),
        pytest.param(make_multiply(in_memory_order), MATRICES, "mma.sync", id="guess"),
        pytest.param(make_show_registers(load_fragments), MATRICES + HELD, "mma.sync", id="show"),
        pytest.param(make_read_tile(row_major), new_tile(), "ldmatrix", id="row_major"),
        pytest.param(make_read_tile(swizzled), new_tile(), "ldmatrix", id="swizzled"),
        pytest.param(make_read_tile(narrow, NARROW), new_tile(NARROW), "ldmatrix", id="narrow"),
    ],
)
def test_kernels_compile_for_a_gpu(kernel, arrays, instruction):
    # The simulator runs calls that Numba cannot compile.
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature(tuple(arrays)), cc=(8, 0))
    assert instruction in ptx


def test_rows_of_nine_chunks_have_no_conflicts_either():
    lane = np.arange(32)
    read = np.array([(lane % 16 * 9 + lane // 16 + 2 * piece) * CHUNK_BYTES for piece in range(4)])
    assert not count_replays(read, CHUNK_BYTES).any()


def test_pictures_say_what_they_show():
    picture = draw_banks({"plain": row_major, "mixed": swizzled}, chunk=5)
    assert "Lanes 16 to 23 read chunk 5" in picture.alt
    assert "plain: they want 4 banks, and there are 112 conflicts" in picture.alt
    assert "mixed: they want 32 banks, and there are 0 conflicts" in picture.alt
    assert picture.numbers["plain"]["first_bank_of_lane"] == dict.fromkeys(range(16, 24), 20)
    banks = picture.numbers["mixed"]["first_bank_of_lane"]
    assert banks == {16 + row: 4 * (5 ^ row) for row in range(8)}
    assert set(draw_mma_fragments().numbers) == {"A", "B", "C"}


def test_refusals_name_what_is_wrong():
    with pytest.raises(ValueError, match="chunk=4: must be 0 to 3"):
        draw_banks({"plain": row_major}, chunk=4, row_chunks=NARROW)
    with pytest.raises(ValueError, match="row_chunks=5: must be 8 or 4"):
        make_read_tile(row_major, 5)
