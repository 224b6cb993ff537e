"""Instructions of `device/ptx.py` in the simulator: results, refusals, asynchronous copies, counts.

The line of a mistake carries a comment, as in `test_simulator_refusals`.
"""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba import simulate
from fa2_numba.device import device_function, ptx
from fa2_numba.device.layouts import a_matrix_row, ac_element, b_matrix_row
from fa2_numba.device.ptx import (
    cp_async_4,
    cp_async_8,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group_0,
    cp_async_wait_group_1,
    ex2,
    global_address,
    ld_global_v4_b32,
    ld_shared_v4_b32,
    ldmatrix_x1,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k8_float16,
    mma_m16n8k16_bfloat16,
    mma_m16n8k16_float16,
    pack_bfloat16,
    pack_float16,
    red_global_add_f32,
    shared_address,
    st_global_v4_b32,
    st_shared_b32,
    st_shared_v4_b32,
)
from fa2_numba.simulator import (
    AsyncCopyError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    ThreadError,
    UninitialisedReadError,
    WarpError,
)
from tests.test_simulator_refusals import marked_line, thread_words

SEEDS = [None, 0, 1, 2]
WARP = 32

a_row, b_row = device_function(a_matrix_row), device_function(b_matrix_row)
c_place = device_function(ac_element)


def run(kernel, *arguments, threads=WARP, shared_bytes=0, **options):
    options = {"counts": False, "progress": False} | options
    return simulate(kernel, **options)[1, threads, 0, shared_bytes](*arguments)


def refused(kernel, kind, *arguments, marks=("bad",), thread=None, **options):
    """Run a kernel that must be refused at the marked lines; return the message."""
    with pytest.raises(kind) as caught:
        run(kernel, *arguments, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    for mark in marks:
        assert marked_line(kernel, mark) in message
    if thread is not None:
        assert thread_words(thread) in message
    return message


def words(count=128):
    return np.arange(1, count + 1, dtype=np.uint32)


# Products


def product_kernel(multiply, load_b, transposed):
    """C = A B of 16 x 16 matrices with `ldmatrix` x4; B's rows, or those of its transpose, come."""

    @cuda.jit
    def product(A, B, C):
        smem = cuda.shared.array(0, uint32, alignment=128)
        lane = cuda.threadIdx.x
        A_smem = shared_address(smem)
        B_smem = int32(A_smem + 512)
        cp_async_16(int32(A_smem + 16 * lane), global_address(A) + 16 * lane, 16)
        cp_async_16(int32(B_smem + 16 * lane), global_address(B) + 16 * lane, 16)
        cp_async_commit_group()
        cp_async_wait_group_0()
        cuda.syncwarp()
        A_reg = cuda.local.array((2, 2), uint32)
        B_reg = cuda.local.array((2, 2), uint32)
        C_reg = cuda.local.array((2, 4), float32)
        for i in range(2):
            for j in range(4):
                C_reg[i, j] = C[i, j]
        row, chunk = a_row(lane)
        ldmatrix_x4(A_reg, 0, 0, int32(A_smem + 32 * row + 16 * chunk))
        # Rows of B itself are what A's are: transposed on the way, they become those of B.
        row, chunk = a_row(lane) if transposed else b_row(lane)
        load_b(B_reg, 0, 0, int32(B_smem + 32 * row + 16 * chunk))
        multiply(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
        multiply(C_reg, 0, 2, A_reg, 0, 0, B_reg, 0, 1)
        for i in range(2):
            for j in range(4):
                row, col = c_place(lane, i, j)
                C[row, col] = C_reg[i, j]

    return product


def random_matrices(dtype):
    rng = np.random.default_rng(4)
    A, B = rng.standard_normal((2, 16, 16)).astype(dtype)
    return A, B


def product_of(kernel, A, B, **options):
    C = np.zeros((16, 16), np.float32)
    run(kernel, A.view(np.uint16), B.view(np.uint16), C, shared_bytes=1024, **options)
    return C


PRODUCTS = [
    pytest.param(np.dtype(np.float16), mma_m16n8k16_float16, id="float16"),
    pytest.param(np.dtype(ml_dtypes.bfloat16), mma_m16n8k16_bfloat16, id="bfloat16"),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["K-like", "V-like"])
@pytest.mark.parametrize(("dtype", "multiply"), PRODUCTS)
def test_one_warp_multiplies_matrices(dtype, multiply, transposed):
    A, B = random_matrices(dtype)
    load_b = ldmatrix_x4_trans if transposed else ldmatrix_x4
    kernel = product_kernel(multiply, load_b, transposed)
    memory = B if transposed else np.ascontiguousarray(B.T)
    exact = A.astype(np.float64) @ B.astype(np.float64)
    for options in ({}, {"seed": 1}, {"checks": False}, {"counts": True}):
        np.testing.assert_array_equal(
            product_of(kernel, A, memory, **options), exact.astype(np.float32)
        )


@device_function
def multiply_in_halves(C_reg, row, col, A_reg, A_row, A_col, B_reg, B_row, B_col):
    for k in range(2):
        mma_m16n8k8_float16(C_reg, row, col, A_reg, A_row, A_col + k, B_reg, B_row + k, B_col)


def test_two_products_of_depth_8_make_one_of_16():
    A, B = random_matrices(np.dtype(np.float16))
    memory = np.ascontiguousarray(B.T)
    halves = product_of(product_kernel(multiply_in_halves, ldmatrix_x4, False), A, memory)
    exact = A.astype(np.float64) @ B.astype(np.float64)
    np.testing.assert_allclose(halves, exact, rtol=0, atol=2e-6)


def test_a_product_adds_to_what_is_there():
    @cuda.jit
    def twice(C):
        A_reg = cuda.local.array((2, 2), uint32)
        B_reg = cuda.local.array((2, 1), uint32)
        C_reg = cuda.local.array((2, 2), float32)
        for i in range(2):
            B_reg[i, 0] = uint32(0x3C003C00)  # two ones
            for j in range(2):
                A_reg[i, j] = uint32(0x3C003C00)
                C_reg[i, j] = float32(0.5)
        for _ in range(2):
            mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
        C[cuda.threadIdx.x] = C_reg[1, 1]

    C = np.zeros(WARP, np.float32)
    run(twice, C)
    assert (C == 32.5).all()


# ldmatrix


def load_kernel(load, matrices):
    @cuda.jit
    def load_rows(rows, out):
        smem = cuda.shared.array((32, 4), uint32, alignment=128)
        lane = cuda.threadIdx.x
        for j in range(4):
            smem[lane, j] = rows[lane, j]
        cuda.syncwarp()
        R = cuda.local.array((2, 2), uint32)
        # Lanes that point to no row may point anywhere.
        address = int32(shared_address(smem) + 16 * lane) if lane < 8 * matrices else int32(1)
        load(R, 0, 0, address)
        for q in range(matrices):
            out[lane, q] = R[q % 2, q // 2]

    return load_rows


@pytest.mark.parametrize("trans", ["", "_trans"])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_matrices_are_loaded(matrices, trans):
    rows = np.random.default_rng(0).integers(0, 2**32, (32, 4), np.uint32)
    out = np.zeros((32, matrices), np.uint32)
    run(load_kernel(getattr(ptx, f"ldmatrix_x{matrices}{trans}"), matrices), rows, out)
    elements = rows.view(np.uint16).reshape(4, 8, 8)
    for lane in range(WARP):
        for q in range(matrices):
            whole = elements[q].T if trans else elements[q]
            pair = whole[lane // 4, 2 * (lane % 4) :][:2]
            assert out[lane, q] == int(pair[0]) | int(pair[1]) << 16


@cuda.jit
def row_nobody_wrote(out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    if lane != 9:
        for j in range(4):
            smem[lane, j] = uint32(lane)
    cuda.syncwarp()
    R = cuda.local.array((2, 2), uint32)
    ldmatrix_x4(R, 0, 0, int32(shared_address(smem) + 16 * lane))  # bad
    out[lane] = R[0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_matrix_row_must_have_been_written(seed):
    message = refused(row_nobody_wrote, UninitialisedReadError, words(), thread=9, seed=seed)
    assert "(bytes 144 to 159 of smem)" in message


@cuda.jit
def rows_without_barrier(out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    for j in range(4):
        smem[lane, j] = uint32(lane)  # first
    R = cuda.local.array((2, 2), uint32)
    ldmatrix_x4(R, 0, 0, int32(shared_address(smem) + 16 * (31 - lane)))  # second
    out[lane] = R[0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_matrix_row_of_another_lane_needs_a_barrier(seed):
    refused(rows_without_barrier, RaceError, words(), marks=("first", "second"), seed=seed)


# All lanes of a warp together


def filled(rows, cols):
    """`fill(R)` writes all registers of a rows x cols matrix."""

    @device_function
    def fill(R):
        for i in range(rows):
            for j in range(cols):
                R[i, j] = 0

    return fill


fill_a, fill_b, fill_c = filled(2, 2), filled(2, 1), filled(2, 2)


@device_function
def operands():
    """C, A and B of a product, all 0."""
    A_reg = cuda.local.array((2, 2), uint32)
    B_reg = cuda.local.array((2, 1), uint32)
    C_reg = cuda.local.array((2, 2), float32)
    fill_a(A_reg)
    fill_b(B_reg)
    fill_c(C_reg)
    return C_reg, A_reg, B_reg


@cuda.jit
def product_without_5(out):
    C_reg, A_reg, B_reg = operands()
    if cuda.threadIdx.x != 5:
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)  # bad
    out[cuda.threadIdx.x] = 1


@cuda.jit
def product_meets_shuffle(out):
    C_reg, A_reg, B_reg = operands()
    if cuda.threadIdx.x != 5:
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)  # first
    else:
        out[5] = cuda.shfl_sync(0xFFFFFFFF, 1, 0)  # second


@cuda.jit
def products_at_two_places(out):
    C_reg, A_reg, B_reg = operands()
    if cuda.threadIdx.x < 16:
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)  # first
    else:
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)  # second
    out[cuda.threadIdx.x] = 1


@pytest.mark.parametrize("checks", [True, False])
def test_a_product_needs_all_lanes(checks):
    message = refused(product_without_5, WarpError, words(), checks=checks)
    assert "mma_m16n8k16_float16 with mask 0xffffffff waits for lanes 5 of warp 0" in message


@pytest.mark.parametrize("kernel", [product_meets_shuffle, products_at_two_places])
@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_must_meet_in_one_instruction(kernel, seed):
    refused(kernel, WarpError, words(), marks=("first", "second"), seed=seed)


def test_a_warp_with_fewer_lanes_has_no_products():
    @cuda.jit
    def product(out):
        C_reg, A_reg, B_reg = operands()
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)  # bad

    message = refused(product, WarpError, words(), threads=48)
    assert "needs all 32 lanes of a warp, and this one has 16" in message


# Registers


@cuda.jit
def floats_for_words(out):
    R = cuda.local.array((1, 4), float32)
    ld_global_v4_b32(R, 0, 0, global_address(out))  # bad


@cuda.jit
def one_axis(out):
    R = cuda.local.array(4, uint32)
    ld_global_v4_b32(R, 0, 0, global_address(out))  # bad


@cuda.jit
def columns_of_a_matrix(out):
    R = cuda.local.array((2, 8), uint32)
    ld_global_v4_b32(R[:, 0:4], 0, 0, global_address(out))  # bad


@cuda.jit
def registers_in_shared_memory(out):
    R = cuda.shared.array((1, 4), uint32)
    ld_global_v4_b32(R, 0, 0, global_address(out))  # bad


@pytest.mark.parametrize(
    ("kernel", "checks"),
    [
        *((k, c) for k in (floats_for_words, one_axis, columns_of_a_matrix) for c in (True, False)),
        (registers_in_shared_memory, True),
    ],
)
def test_registers_are_a_matrix_of_their_type(kernel, checks):
    message = refused(kernel, ThreadError, words(), thread=0, checks=checks)
    assert "registers must be a two-dimensional local array of uint32" in message


@cuda.jit
def registers_past_the_end(out):
    R = cuda.local.array((2, 6), uint32)
    ld_global_v4_b32(R, 1, 2, global_address(out))
    if cuda.threadIdx.x == 5:
        ld_global_v4_b32(R, 1, 3, global_address(out))  # bad


@cuda.jit
def registers_before_the_start(out):
    R = cuda.local.array((2, 6), uint32)
    if cuda.threadIdx.x == 5:
        ld_global_v4_b32(R, -1, 0, global_address(out))  # bad


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("kernel", [registers_past_the_end, registers_before_the_start])
def test_registers_lie_in_their_array(kernel, checks):
    message = refused(kernel, OutOfBoundsError, words(), thread=5, checks=checks)
    assert "outside their local array of shape (2, 6)" in message
    if checks:
        assert "registers R[" in message


@cuda.jit
def unwritten_register(out):
    R = cuda.local.array((1, 4), uint32)
    for j in range(3):
        R[0, j] = j
    st_global_v4_b32(global_address(out), R, 0, 0)  # bad


def test_registers_are_written_before_they_are_read():
    message = refused(unwritten_register, UninitialisedReadError, words(), thread=0)
    assert "R[0, 3]" in message


def test_loaded_registers_are_written_and_a_part_of_a_larger_matrix():
    @cuda.jit
    def middle(x, out):
        R = cuda.local.array((3, 8), uint32)
        ld_global_v4_b32(R, 1, 3, global_address(x))
        st_global_v4_b32(global_address(out), R, 1, 3)
        out[4] = R[1, 3]

    for checks in (True, False):
        out = np.zeros(8, np.uint32)
        run(middle, words(), out, threads=1, checks=checks)
        assert out.tolist() == [1, 2, 3, 4, 1, 0, 0, 0]


def test_a_call_has_all_operands():
    @cuda.jit
    def short(out):
        R = cuda.local.array((1, 4), uint32)
        ld_global_v4_b32(R, 0, global_address(out))  # bad

    assert "ld_global_v4_b32 takes 4 arguments, got 3" in refused(short, ThreadError, words())


# Addresses


def shared_access_kernel(offset):
    @cuda.jit
    def access(out):
        smem = cuda.shared.array(32, uint32, alignment=128)
        smem[cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncwarp()
        R = cuda.local.array((1, 4), uint32)
        if cuda.threadIdx.x == 5:
            ld_shared_v4_b32(R, 0, 0, int32(shared_address(smem) + offset))  # bad

    return access


def global_access_kernel(offset):
    @cuda.jit
    def access(out):
        R = cuda.local.array((1, 4), uint32)
        if cuda.threadIdx.x == 5:
            ld_global_v4_b32(R, 0, 0, global_address(out) + offset)  # bad

    return access


accesses = pytest.mark.parametrize(
    ("make", "space"), [(shared_access_kernel, "shared"), (global_access_kernel, "global")]
)
with_and_without_checks = pytest.mark.parametrize("checks", [True, False])


@with_and_without_checks
@accesses
def test_accesses_up_to_the_last_byte(make, space, checks):
    run(make(112), words(32), checks=checks)


@with_and_without_checks
@accesses
@pytest.mark.parametrize("offset", [4, 8, 120])
def test_addresses_are_aligned(make, space, offset, checks):
    message = refused(make(offset), MisalignedError, words(32), thread=5, checks=checks)
    assert f"16 bytes at {space} address" in message
    name = "smem" if space == "shared" else "argument out"
    assert f"it is {offset % 16} over one, byte {offset} of {name}" in message


@with_and_without_checks
@accesses
@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (128, "reaches 16 bytes past the last byte of"),
        (-16, "reaches 16 bytes before the first byte of"),
        (1024, "reaches 912 bytes past the last byte of"),
    ],
)
def test_addresses_lie_in_an_array(make, space, offset, where, checks):
    message = refused(make(offset), OutOfBoundsError, words(32), thread=5, checks=checks)
    name = "smem" if space == "shared" else "argument out"
    assert f"{where} {name} (128 bytes, addresses " in message


@with_and_without_checks
def test_no_shared_array_is_at_address_0(checks):
    @cuda.jit
    def at_0(out):
        smem = cuda.shared.array(0, uint32, alignment=128)
        st_shared_b32(shared_address(smem), 7)
        st_shared_b32(0, 7)  # bad

    refused(at_0, OutOfBoundsError, words(), thread=0, shared_bytes=128, threads=1, checks=checks)


def test_shared_arrays_are_apart_and_aligned():
    @cuda.jit
    def where(out):
        dynamic = cuda.shared.array(0, uint32, alignment=128)
        one = cuda.shared.array(3, uint32)
        other = cuda.shared.array((2, 5), uint32)
        out[0] = shared_address(dynamic)
        out[1] = shared_address(one)
        out[2] = shared_address(other)
        out[3] = shared_address(other[1]) - shared_address(other)

    out = np.zeros(4, np.int64)
    run(where, out, threads=1, shared_bytes=1000)
    assert (out[:3] % 1024 == 0).all() and len(set(out[:3])) == 3 and (out[:3] > 0).all()
    assert out[3] == 20


def test_a_shared_address_is_of_shared_memory():
    @cuda.jit
    def address(out):
        out[0] = shared_address(out)  # bad

    assert "takes an array in shared memory" in refused(address, ThreadError, words(), thread=0)


@with_and_without_checks
def test_a_read_only_argument_is_not_written(checks):
    @cuda.jit
    def write(x, out):
        R = cuda.local.array((1, 4), uint32)
        ld_global_v4_b32(R, 0, 0, global_address(x))
        st_global_v4_b32(global_address(out), R, 0, 0)
        st_global_v4_b32(global_address(x), R, 0, 0)  # bad

    x, out = words(), words()
    x.flags.writeable = False
    message = refused(write, OutOfBoundsError, x, out, thread=0, threads=1, checks=checks)
    assert "argument x is read-only" in message and x[4] == 5


@cuda.jit
def add_to_eight(x, out):
    i = cuda.grid(1)
    red_global_add_f32(global_address(out) + 4 * (i % 8), x[i])


@pytest.mark.parametrize("options", [{}, {"checks": False}, {"seed": 3}, {"counts": True}])
def test_threads_of_all_blocks_add_to_the_same_numbers(options):
    x = np.arange(128, dtype=np.float32)
    out = np.full(9, 0.5, np.float32)
    options = {"counts": False, "progress": False} | options
    simulate(add_to_eight, **options)[2, 64](x, out)
    np.testing.assert_array_equal(out, [*(x.reshape(-1, 8).sum(axis=0) + 0.5), 0.5])


@with_and_without_checks
def test_an_addition_is_counted_as_atomic_and_not_as_traffic(checks):
    x, out = np.ones(64, np.float32), np.zeros(8, np.float32)
    report = run(add_to_eight, x, out, threads=64, counts=True, checks=checks)
    assert report.atomics == 64
    # What is loaded is x.
    assert report.global_load_bytes == 64 * 4 and report.global_load_requests == 2
    assert report.global_store_bytes == report.global_store_requests == 0


def test_an_addition_rounds_as_float32():
    @cuda.jit
    def add_one(out):
        red_global_add_f32(global_address(out), 1.0)

    out = np.array([2.0**24, np.nan], np.float32)
    run(add_one, out, threads=1)
    np.testing.assert_array_equal(out, np.array([2.0**24, np.nan], np.float32))
    run(add_one, out[1:], threads=1)
    assert np.isnan(out[1])


def addition_kernel(offset):
    @cuda.jit
    def add(out):
        if cuda.threadIdx.x == 5:
            red_global_add_f32(global_address(out) + offset, 1.0)  # bad

    return add


@with_and_without_checks
@pytest.mark.parametrize(
    ("offset", "kind", "where"),
    [
        (32, OutOfBoundsError, "reaches 4 bytes past the last byte of argument out"),
        (-4, OutOfBoundsError, "reaches 4 bytes before the first byte of argument out"),
        (2, MisalignedError, "4 bytes lie at a multiple of 4; it is 2 over one"),
    ],
)
def test_an_addition_lies_in_an_array(offset, kind, where, checks):
    out = np.zeros(8, np.float32)
    assert where in refused(addition_kernel(offset), kind, out, thread=5, checks=checks)
    assert not out.any()


@with_and_without_checks
def test_nothing_is_added_to_a_read_only_argument(checks):
    out = np.zeros(8, np.float32)
    out.flags.writeable = False
    message = refused(addition_kernel(0), OutOfBoundsError, out, thread=5, checks=checks)
    assert "argument out is read-only" in message and not out.any()


@with_and_without_checks
def test_views_have_the_address_of_their_first_element(checks):
    @cuda.jit
    def copy_row(x, out):
        R = cuda.local.array((1, 4), uint32)
        ld_global_v4_b32(R, 0, 0, global_address(x[2, 1]))
        st_global_v4_b32(global_address(out), R, 0, 0)

    x = np.arange(96, dtype=np.uint32).reshape(4, 3, 8)
    for array, row in ((x, x[2, 1]), (x.transpose(1, 0, 2), x[1, 2]), (x[::-1], x[1, 1])):
        out = np.zeros(4, np.uint32)
        run(copy_row, array, out, threads=1, checks=checks)
        np.testing.assert_array_equal(out, row[:4])


# Shared memory through addresses and through arrays


@cuda.jit
def words_then_vectors(out):
    smem = cuda.shared.array(128, uint32, alignment=128)
    lane = cuda.threadIdx.x
    for i in range(4):
        st_shared_b32(int32(shared_address(smem) + 4 * (lane + 32 * i)), lane + 32 * i)
    cuda.syncwarp()
    R = cuda.local.array((1, 4), uint32)
    ld_shared_v4_b32(R, 0, 0, int32(shared_address(smem) + 16 * lane))
    cuda.syncwarp()
    R[0, 0] += 1000
    st_shared_v4_b32(int32(shared_address(smem) + 16 * (31 - lane)), R, 0, 0)
    cuda.syncwarp()
    for i in range(4):
        out[lane + 32 * i] = smem[lane + 32 * i]


@pytest.mark.parametrize("options", [{}, {"checks": False}, {"seed": 3}, {"counts": True}])
def test_words_and_vectors_are_the_same_memory(options):
    out = np.zeros(128, np.uint32)
    run(words_then_vectors, out, **options)
    expected = np.arange(128).reshape(32, 4)[::-1] + [1000, 0, 0, 0]
    np.testing.assert_array_equal(out, expected.ravel())


@cuda.jit
def halves_of_a_vector(out):
    smem = cuda.shared.array(4, uint32, alignment=128)
    lane = cuda.threadIdx.x
    if lane < 4:
        smem[lane] = lane  # first
    R = cuda.local.array((1, 4), uint32)
    if lane == 0:
        ld_shared_v4_b32(R, 0, 0, shared_address(smem))  # second


@pytest.mark.parametrize("seed", SEEDS)
def test_a_vector_races_with_each_of_its_words(seed):
    refused(halves_of_a_vector, RaceError, words(), marks=("first", "second"), seed=seed)


@cuda.jit
def last_word_unwritten(out):
    smem = cuda.shared.array(4, uint32, alignment=128)
    R = cuda.local.array((1, 4), uint32)
    for i in range(3):
        smem[i] = i
    ld_shared_v4_b32(R, 0, 0, shared_address(smem))  # bad


def test_all_words_of_a_vector_must_have_been_written():
    message = refused(last_word_unwritten, UninitialisedReadError, words(), threads=1, thread=0)
    assert "bytes 0 to 15 of smem" in message


# Asynchronous copies


def copy_kernel(copy, size):
    WORDS = size * WARP // 4

    @cuda.jit
    def start_and_wait(x, counts, out):
        smem = cuda.shared.array(WORDS, uint32, alignment=128)
        lane = cuda.threadIdx.x
        source = global_address(x) + size * lane if counts[lane] > 0 else 1
        copy(int32(shared_address(smem) + size * lane), source, counts[lane])
        cp_async_commit_group()
        cp_async_wait_group_0()
        cuda.syncwarp()
        for i in range(size // 4):
            out[lane + 32 * i] = smem[lane + 32 * i]

    return start_and_wait


@pytest.mark.parametrize("options", [{}, {"checks": False}, {"seed": 1}, {"counts": True}])
@pytest.mark.parametrize(("copy", "size"), [(cp_async_4, 4), (cp_async_8, 8), (cp_async_16, 16)])
def test_copies_of_every_size_and_count(copy, size, options):
    x = np.random.default_rng(0).integers(0, 2**32, size * WARP // 4, np.uint32)
    counts = (np.arange(WARP) % (size + 1)).astype(np.int32)
    out = np.zeros_like(x)
    run(copy_kernel(copy, size), x, counts, out, **options)
    expected = x.view(np.uint8).reshape(WARP, size).copy()
    expected[np.arange(size) >= counts[:, None]] = 0
    np.testing.assert_array_equal(out.view(np.uint8).reshape(WARP, size), expected)


@pytest.mark.parametrize("count", [-1, 17])
def test_a_copy_has_at_most_its_size(count):
    @cuda.jit
    def copy(x):
        smem = cuda.shared.array(32, uint32, alignment=128)
        cp_async_16(shared_address(smem), global_address(x), count)  # bad

    message = refused(copy, ThreadError, words(), thread=0, threads=1)
    assert f"cp_async_16: count={count} must be 0 to 16" in message


@with_and_without_checks
def test_only_the_bytes_that_count_must_exist(checks):
    @cuda.jit
    def last(x, count, out):
        smem = cuda.shared.array(4, uint32, alignment=128)
        cp_async_16(shared_address(smem), global_address(x), count)  # bad
        cp_async_commit_group()
        cp_async_wait_group_0()
        for i in range(4):
            out[i] = smem[i]

    x, out = words(3), words(4)
    run(last, x, 12, out, threads=1, checks=checks)
    assert out.tolist() == [1, 2, 3, 0]
    message = refused(last, OutOfBoundsError, x, 13, out, threads=1, checks=checks)
    assert (
        "load of 13 bytes" in message and "reaches 1 bytes past the last byte of argum" in message
    )


def groups_kernel(wait, read):
    """Two groups of copies, the second to the second vector; `read` is the vector then read."""

    @cuda.jit
    def groups(x, out):
        smem = cuda.shared.array(8, uint32, alignment=128)
        address = shared_address(smem)
        cp_async_16(address, global_address(x), 16)
        cp_async_commit_group()
        cp_async_16(int32(address + 16), global_address(x) + 16, 16)  # copy
        cp_async_commit_group()
        wait()
        out[0] = smem[4 * read]  # bad

    return groups


def test_a_wait_leaves_the_youngest_group_under_way():
    out = np.zeros(1, np.uint32)
    run(groups_kernel(cp_async_wait_group_1, 0), words(), out, threads=1)
    assert out[0] == 1
    run(groups_kernel(cp_async_wait_group_0, 1), words(), out, threads=1)
    assert out[0] == 5
    kernel = groups_kernel(cp_async_wait_group_1, 1)
    marks = ("copy", "bad")
    message = refused(kernel, AsyncCopyError, words(), out, threads=1, thread=0, marks=marks)
    assert "has not waited for the copy's group" in message


def test_bytes_come_no_sooner_than_the_wait_without_checks_too():
    out = np.zeros(1, np.uint32)
    for wait, read, expected in (
        (cp_async_wait_group_1, 0, 1),
        (cp_async_wait_group_1, 1, 0xFFFFFFFF),
        (cp_async_wait_group_0, 1, 5),
    ):
        run(groups_kernel(wait, read), words(), out, threads=1, checks=False)
        assert out[0] == expected


@cuda.jit
def read_before_the_wait(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # copy
    cp_async_commit_group()
    cuda.syncwarp()
    out[lane] = smem[31 - lane, 0]  # bad


@cuda.jit
def load_before_the_wait(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # copy
    cp_async_commit_group()
    cuda.syncwarp()
    R = cuda.local.array((2, 2), uint32)
    ldmatrix_x4(R, 0, 0, shared_address(smem[lane]))  # bad


@cuda.jit
def write_before_the_wait(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # copy
    cp_async_commit_group()
    smem[lane, 3] = 0  # bad


@cuda.jit
def copy_before_the_wait(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # copy
    cp_async_4(shared_address(smem[lane]), global_address(x), 4)  # bad


@cuda.jit
def wait_without_commit(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # copy
    cp_async_wait_group_0()
    out[lane] = smem[lane, 0]  # bad


@cuda.jit
def copied_by_a_thread_that_has_left(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    if lane == 3:
        cp_async_16(shared_address(smem), global_address(x), 16)  # copy
    cuda.syncwarp()
    if lane == 5:
        for _ in range(3):
            cuda.nanosleep(100)
        out[0] = smem[0, 0]  # bad


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel",
    [
        read_before_the_wait,
        load_before_the_wait,
        write_before_the_wait,
        copy_before_the_wait,
        wait_without_commit,
        copied_by_a_thread_that_has_left,
    ],
)
def test_bytes_in_flight_are_not_touched(kernel, seed):
    message = refused(kernel, AsyncCopyError, words(), words(), marks=("copy", "bad"), seed=seed)
    assert "started the copy at" in message


def test_copies_under_way_at_the_end_are_harmless():
    @cuda.jit
    def leave(x):
        smem = cuda.shared.array((32, 4), uint32, alignment=128)
        lane = cuda.threadIdx.x
        cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)
        cp_async_commit_group()

    run(leave, words())


@cuda.jit
def wait_without_barrier(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)
    cp_async_commit_group()
    if lane == 5:
        cp_async_wait_group_0()
    cuda.syncwarp()
    if lane != 5:
        cp_async_wait_group_0()
    out[lane] = smem[5, 0] + smem[lane, 0]
    if lane == 0:
        out[1] = smem[7, 0]


@pytest.mark.parametrize("seed", [None, 1])
def test_what_has_arrived_needs_a_barrier_for_others(seed):
    """Lane 5 has waited before the barrier, so that all may read its row; not so lane 7."""
    with pytest.raises((RaceError, AsyncCopyError)) as caught:
        run(wait_without_barrier, words(), words(), seed=seed)
    assert thread_words(7) in str(caught.value) and thread_words(0) in str(caught.value)


@cuda.jit
def arrived_without_barrier(x, out):
    smem = cuda.shared.array(4, uint32, alignment=128)
    if cuda.threadIdx.x == 4:
        cp_async_16(shared_address(smem), global_address(x), 16)  # first
        cp_async_commit_group()
        cp_async_wait_group_0()
    if cuda.threadIdx.x == 5:
        out[0] = smem[0]  # second


@pytest.mark.parametrize("seed", SEEDS)
def test_what_has_arrived_for_one_thread_has_not_for_another(seed):
    marks = ("first", "second")
    refused(arrived_without_barrier, RaceError, words(), words(), marks=marks, seed=seed)


@cuda.jit
def copy_over_what_is_read(x, out):
    smem = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    for j in range(4):
        smem[lane, j] = 0
    cuda.syncwarp()
    out[lane] = smem[31 - lane, 0]  # first
    cp_async_16(shared_address(smem[lane]), global_address(x) + 16 * lane, 16)  # second


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_may_not_start_where_others_read(seed):
    """The copy or the read may come first; neither is ordered after the other."""
    with pytest.raises((RaceError, AsyncCopyError)) as caught:
        run(copy_over_what_is_read, words(), words(), seed=seed)
    for mark in ("first", "second"):
        assert marked_line(copy_over_what_is_read, mark) in str(caught.value)


def test_a_copy_reads_its_source_when_it_starts():
    @cuda.jit
    def overwrite(x, out):
        smem = cuda.shared.array(4, uint32, alignment=128)
        cp_async_16(shared_address(smem), global_address(x), 16)
        cp_async_commit_group()
        x[0] = 99
        cp_async_wait_group_0()
        out[0] = smem[0]

    out = np.zeros(1, np.uint32)
    run(overwrite, words(), out, threads=1)
    assert out[0] == 1


# Numbers


def special_float32():
    return np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -126.0, -126.5, -150.0, 127.5, 128.0, 1e-40],
        np.float32,
    )


def test_powers_of_two_of_special_numbers():
    @cuda.jit
    def powers(x, out):
        i = cuda.threadIdx.x
        out[i] = ex2(x[i])

    x = special_float32()
    out = np.zeros_like(x)
    run(powers, x, out, threads=len(x))
    top = np.exp2(np.float32(127.5))
    np.testing.assert_array_equal(
        out, [np.nan, np.inf, 0, 1, 1, 2, 2.0**-126, 0, 0, top, np.inf, 1]
    )


@pytest.mark.parametrize(
    ("pack", "dtype"),
    [(pack_float16, np.float16), (pack_bfloat16, ml_dtypes.bfloat16)],
    ids=["float16", "bfloat16"],
)
def test_special_numbers_are_packed(pack, dtype):
    @cuda.jit
    def pairs(x, y, out):
        i = cuda.threadIdx.x
        out[i] = pack(x[i], y[i])

    values = [np.nan, np.inf, -np.inf, -0.0, 65504, 65520, 1e-7, 1e-40, 3.4e38, 1 + 2**-11, -1.5]
    x = np.array(values, np.float32)
    y = x[::-1].copy()
    out = np.zeros(len(x), np.uint32)
    run(pairs, x, y, out, threads=len(x))
    low, high = out.view(np.uint16).reshape(-1, 2).T
    for half, number in ((low, x), (high, y)):
        is_nan = np.isnan(number)
        with np.errstate(over="ignore"):
            rounded = number.astype(dtype)
        np.testing.assert_array_equal(half[~is_nan], rounded.view(np.uint16)[~is_nan])
        assert (half[is_nan] == 0x7FFF).all()


def test_results_have_the_types_that_kernels_compute_with():
    seen = []

    @device_function
    def note(*values):
        seen.extend(map(type, values))

    @cuda.jit
    def types(x, out):
        smem = cuda.shared.array(4, uint32)
        note(ex2(x[0]), pack_float16(x[0], x[0]), ptx.smid(), ptx.globaltimer())
        note(shared_address(smem), global_address(x), ex2(1))

    run(types, np.ones(1, np.float32), words(), threads=1)
    assert seen == [np.float32, int, int, np.uint64, int, int, np.float32]


# Counts


@cuda.jit
def counted(x, out):
    smem = cuda.shared.array(256, uint32, alignment=128)
    lane = cuda.threadIdx.x % 32
    warp = cuda.threadIdx.x // 32
    tile = int32(shared_address(smem) + 512 * warp)
    cp_async_16(int32(tile + 16 * lane), global_address(x) + 16 * lane, 16 if lane < 24 else 0)
    cp_async_commit_group()
    cp_async_wait_group_0()
    cuda.syncwarp()
    A_reg = cuda.local.array((2, 2), uint32)
    B_reg = cuda.local.array((2, 1), uint32)
    C_reg = cuda.local.array((2, 2), float32)
    fill_c(C_reg)
    ldmatrix_x4(A_reg, 0, 0, int32(tile + 16 * lane))
    ldmatrix_x2_trans(B_reg, 0, 0, int32(tile + 32 * (lane % 16)))
    for _ in range(3):
        mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
    C_reg[0, 0] = ex2(C_reg[0, 0])
    cuda.syncwarp()
    st_shared_b32(int32(tile + 4 * lane), pack_float16(C_reg[0, 0], C_reg[0, 1]))
    cuda.syncwarp()
    out[cuda.threadIdx.x] = smem[128 * warp + lane]


@with_and_without_checks
@pytest.mark.parametrize("seed", [None, 4])
def test_what_a_kernel_with_instructions_does_is_counted(checks, seed):
    x, out = np.zeros(128, np.uint32), np.zeros(64, np.uint32)
    report = run(counted, x, out, threads=64, counts=True, checks=checks, seed=seed)
    expected = {
        "tensor_core_instructions": 2 * 3,
        "matrix_loads": 2 * 2,
        "async_copies": 2,
        "multiply_adds": 6 * 16 * 8 * 16,
        "special_calls": 64,
        "shuffles": 0,
        "warp_syncs": 2 * 3,
        "global_load_requests": 2,
        "global_load_bytes": 2 * 24 * 16,
        "global_load_sectors": 2 * 12,
        "global_store_bytes": 64 * 4,
        "shared_store_requests": 2 * 2,
        "shared_store_bytes": 2 * (32 * 16 + 32 * 4),
        "shared_store_replays": 0,
        "shared_load_requests": 2 * 3,
        "shared_load_bytes": 2 * (32 * 16 + 16 * 16 + 32 * 4),
        # Rows 32 bytes apart: of eight, the first and the fifth are in the same banks.
        "shared_load_replays": 2 * 2,
    }
    assert {name: getattr(report, name) for name in expected} == expected


def test_a_single_matrix_is_a_request_of_eight_lanes():
    rows, out = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    for load, matrices in ((ldmatrix_x1, 1), (ldmatrix_x2, 2), (ldmatrix_x4, 4)):
        report = run(load_kernel(load, matrices), rows, out, counts=True)
        assert report.shared_load_bytes == 8 * 16 * matrices
        assert report.shared_load_requests == report.matrix_loads == 1


def test_traffic_by_address_stands_at_the_line_of_the_kernel():
    @device_function
    def load(R, x):
        ld_global_v4_b32(R, 0, 0, global_address(x) + 16 * cuda.threadIdx.x)

    @cuda.jit
    def copy(x, out):
        R = cuda.local.array((1, 4), uint32)
        load(R, x)  # load
        st_global_v4_b32(global_address(out) + 16 * cuda.threadIdx.x, R, 0, 0)  # store

    report = run(copy, words(), words(), counts=True)
    lines = {f"{marked_line(copy, mark)}".split(":")[1]: mark for mark in ("load", "store")}
    found = {
        lines[str(one.line)]: (one.traffic.global_load_bytes, one.traffic.global_store_bytes)
        for one in report.lines
    }
    assert found == {"load": (512, 0), "store": (0, 512)}
    assert report.global_load_sectors == report.global_store_sectors == 16


def test_reports_show_tensor_cores_where_there_are_some():
    @cuda.jit
    def plain(x, out):
        out[cuda.threadIdx.x] = x[cuda.threadIdx.x]

    arrays = np.zeros(128, np.uint32), np.zeros(64, np.uint32)
    with_some = run(counted, *arrays, threads=64, counts=True)
    without = run(plain, *arrays, counts=True)
    for name, value in (("tensor_core_instructions", 6), ("matrix_loads", 4), ("async_copies", 2)):
        assert f"{name} " in str(with_some) and name not in str(without)
        assert name in str(without.compare(with_some)) and name not in str(without.compare(without))
        assert getattr(with_some, name) == value and getattr(without + with_some, name) == value
