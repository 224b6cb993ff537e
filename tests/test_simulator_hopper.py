"""Hopper's barriers, copies and products in the simulator: right kernels, and each mistake refused.

A kernel here is made with one fault, or with none; what is right is right whether asynchronous
operations happen as early or as late as they may.
"""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba import simulate
from fa2_numba.device import device_function
from fa2_numba.device.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from fa2_numba.device.ptx import (
    global_address,
    shared_address,
    st_shared_b32,
    stmatrix_x4,
)
from fa2_numba.device.tma import (
    bulk_commit_group,
    bulk_load,
    bulk_wait_group_read_0,
    tma_load_4d,
    tma_store_4d,
)
from fa2_numba.device.warpgroups import bar_arrive, bar_sync, fence_proxy_async, setmaxnreg_dec
from fa2_numba.device.wgmma import (
    accumulator,
    descriptor,
    wgmma_commit_group,
    wgmma_fence,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
)
from fa2_numba.simulator import (
    AsyncCopyError,
    BarrierError,
    FenceError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    UninitialisedReadError,
    WarpError,
)
from fa2_numba.tensor_maps import TensorMap

GROUP = 128
TILE = 64 * 128
ORDERS = [False, True]
describe, place = device_function(descriptor), device_function(accumulator)
keep_registers = setmaxnreg_dec(40)


def run(kernel, *arguments, threads=GROUP, shared_bytes=8 * TILE, **options):
    options = {"counts": False, "progress": False} | options
    return simulate(kernel, **options)[1, threads, 0, shared_bytes](*arguments)


def tensor(rows, cols, seed=0, dtype=np.float16):
    """A batch of one, one head."""
    values = np.random.default_rng(seed).standard_normal((1, rows, 1, cols))
    return values.astype(dtype)


def bits(array):
    return array.view(np.uint16)


# Loads


@cache
def make_load(fault=""):
    """A box of a tensor to shared memory, and from there to `out`, line by line as it lies."""
    EXPECTED = {"few": TILE - 16, "many": TILE + 16}.get(fault, TILE)
    START = 512 if fault == "misaligned" else 0
    PARITY = 1 if fault == "parity" else 0

    def kernel(X_map, out, row, col):
        smem = shared_address(cuda.shared.array(0, uint32))
        words = cuda.shared.array(0, uint32)
        thread = cuda.threadIdx.x
        barrier = int32(smem + 2 * TILE)
        if thread == 0:
            if fault != "not made":
                mbarrier_init(barrier, int32(1))
            if fault != "no init fence":
                fence_mbarrier_init()
        if fault != "no order":
            cuda.syncthreads()
        if thread == (1 if fault == "no order" else 0):
            if fault == "nothing expected":
                mbarrier_arrive(barrier)
            else:
                mbarrier_arrive_expect_tx(barrier, int32(EXPECTED))
            zero = int32(0)
            tma_load_4d(int32(smem + START), X_map, int32(col), int32(row), zero, zero, barrier)
        if fault != "no wait":
            mbarrier_wait(barrier, int32(PARITY))
        for i in range(16):
            out[thread, i] = words[thread * 16 + i]

    return kernel


def loaded(array, row, col, early=False):
    out = np.zeros((GROUP, 16), np.uint32)
    run(make_load(), TensorMap(bits(array), 64), out, row, col, early=early)
    lines = out.reshape(64, 8, 4)
    unswizzled = [lines[r, np.arange(8) ^ (r % 8)] for r in range(64)]
    return np.array(unswizzled).reshape(64, 32).view(np.float16)


@pytest.mark.parametrize("early", ORDERS)
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (100, 72), (10, 24)])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (40, 64)])
def test_a_box_is_loaded_with_zeros_outside(rows, cols, row, col, early):
    array = tensor(rows, cols)
    wanted = np.zeros((64, 64), np.float16)
    inside = array[0, row : row + 64, 0, col : col + 64]
    wanted[: inside.shape[0], : inside.shape[1]] = inside
    np.testing.assert_array_equal(loaded(array, row, col, early), wanted)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("no wait", AsyncCopyError, "while an asynchronous copy to it is under way"),
        ("parity", AsyncCopyError, "while an asynchronous copy to it is under way"),
        ("nothing expected", AsyncCopyError, "while an asynchronous copy to it is under way"),
        ("few", BarrierError, "waits for -16 bytes: nobody is left"),
        ("many", BarrierError, "waits for 16 bytes: nobody is left"),
        ("not made", UninitialisedReadError, "where none was made"),
        ("no order", (RaceError, UninitialisedReadError), "mbarrier"),
        ("no init fence", FenceError, "has not run fence_mbarrier_init"),
        ("misaligned", MisalignedError, "must be a multiple of 1024"),
    ],
)
def test_a_load_without_one_of_its_parts_is_refused(fault, kind, says):
    out = np.zeros((GROUP, 16), np.uint32)
    with pytest.raises(kind, match=says) as caught:
        run(make_load(fault), TensorMap(bits(tensor(64, 64)), 64), out, 0, 0)
    assert caught.value.thread is not None


@pytest.mark.parametrize("fault", ["no wait", "nothing expected"])
def test_an_early_copy_that_nobody_waits_for_is_a_race(fault):
    out = np.zeros((GROUP, 16), np.uint32)
    with pytest.raises(RaceError, match="no barrier orders"):
        run(make_load(fault), TensorMap(bits(tensor(64, 64)), 64), out, 0, 0, early=True)


@pytest.mark.parametrize("early", ORDERS)
def test_bytes_that_nobody_expected_are_seen_at_the_end(early):
    def kernel(X_map):
        smem = shared_address(cuda.shared.array(0, uint32))
        barrier, zero = int32(smem + TILE), int32(0)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barrier, int32(1))
            fence_mbarrier_init()
            tma_load_4d(smem, X_map, zero, zero, zero, zero, barrier)

    with pytest.raises(BarrierError, match=f"waits for -{TILE} bytes at the end of the block"):
        run(kernel, TensorMap(bits(tensor(64, 64)), 64), early=early)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((1, 64, 1, 65), np.float16)[..., :64], "must be positive multiples of 16"),
        (np.zeros((1, 64, 1, 128), np.float16)[..., ::2], "the last must be 2"),
        (np.zeros((1, 64, 1, 72), np.float16)[..., 1:65], "must be a multiple of 16"),
    ],
)
def test_what_tma_cannot_read_is_refused(array, says):
    with pytest.raises(MisalignedError, match=says):
        run(make_load(), TensorMap(bits(array), 64), np.zeros((GROUP, 16), np.uint32), 0, 0)


@pytest.mark.parametrize("early", ORDERS)
def test_bytes_are_loaded_in_one_copy(early):
    def kernel(x, out):
        smem = shared_address(cuda.shared.array(0, uint32))
        words = cuda.shared.array(0, uint32)
        thread, barrier = cuda.threadIdx.x, int32(smem + 1024)
        if thread == 0:
            mbarrier_init(barrier, int32(1))
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barrier, int32(512))
            bulk_load(smem, global_address(x), int32(512), barrier)
        cuda.syncthreads()
        mbarrier_wait(barrier, int32(0))
        out[thread] = words[thread]

    x = np.arange(GROUP, dtype=np.uint32)
    out = np.zeros_like(x)
    run(kernel, x, out, early=early)
    np.testing.assert_array_equal(out, x)


# Stores


@cache
def make_store(fault=""):
    """Zeros and ones to shared memory, and from there to a tensor, twice from one place."""
    WAITS = {"no wait": 0, "exit": 1}.get(fault, 2)

    def kernel(O_map):
        smem = shared_address(cuda.shared.array(0, uint32))
        thread, zero = cuda.threadIdx.x, int32(0)
        for head in range(2):
            for i in range(16):
                st_shared_b32(int32(smem + 4 * (thread + GROUP * i)), uint32(head))
            if fault != "no fence":
                fence_proxy_async()
            if fault != "no barrier":
                cuda.syncthreads()
            if thread == 0:
                tma_store_4d(O_map, zero, zero, int32(head), zero, smem)
                bulk_commit_group()
                if head < WAITS:
                    bulk_wait_group_read_0()
            cuda.syncthreads()

    return kernel


@pytest.mark.parametrize("early", ORDERS)
def test_a_box_is_stored_and_clipped(early):
    out = np.full((1, 50, 2, 40), 9, np.uint16)
    run(make_store(), TensorMap(out, 64), early=early)
    assert (out[0, :, 0] == 0).all()
    np.testing.assert_array_equal(out[0, :, 1], np.tile([1, 0], (50, 20)))


@pytest.mark.parametrize("early", ORDERS)
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("no fence", FenceError, "has not run fence_proxy_async"),
        ("no barrier", (RaceError, UninitialisedReadError), "shared address"),
        ("no wait", AsyncCopyError, "while a store reads them"),
        ("exit", AsyncCopyError, "has left the kernel before its store had read"),
    ],
)
def test_a_store_without_one_of_its_parts_is_refused(fault, kind, says, early):
    with pytest.raises(kind, match=says):
        run(make_store(fault), TensorMap(np.zeros((1, 64, 2, 64), np.uint16), 64), early=early)


# Products


@cache
def make_product(fault="", dtype="float16", transposed=False, from_registers=False):
    """D = A B^T of 64 x 64 tiles, twice, B loaded anew in between; D is 64 x 64.

    transposed: B lies with its columns as rows, D = A B.
    """
    LEADING = {"leading": 2 * TILE}.get(fault, TILE)
    first = wgmma_ss(64, dtype, False, transposed_b=transposed)
    more = wgmma_ss(64, dtype, True, transposed_b=transposed)
    registers = wgmma_rs(64, dtype, transposed_b=transposed)
    await_all, await_older = wgmma_wait_group(0, 64), wgmma_wait_group(1, 64)
    B_STEP = 128 if transposed else 2

    @device_function
    def load(smem, X_map, row, barrier):
        mbarrier_arrive_expect_tx(barrier, int32(TILE))
        zero = int32(0)
        tma_load_4d(smem, X_map, zero, row, zero, zero, barrier)

    @device_function
    def multiply(D, A_reg, a, b, step):
        if from_registers:
            registers(D, 0, 0, A_reg, 0, 2 * step, int32(b + B_STEP * step))
        elif step == 0:
            first(D, 0, 0, int32(a), int32(b))
        else:
            more(D, 0, 0, int32(a + 2 * step), int32(b + B_STEP * step))

    def kernel(A_map, B_map, A, out):
        smem = shared_address(cuda.shared.array(0, uint32))
        thread = cuda.threadIdx.x
        full, empty = int32(smem + 4 * TILE), int32(smem + 4 * TILE + 8)
        B_smem = int32(smem + TILE)
        if thread == 0:
            mbarrier_init(full, int32(1))
            mbarrier_init(empty, int32(4))
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(full, int32(2 * TILE))
            zero = int32(0)
            tma_load_4d(smem, A_map, zero, zero, zero, zero, full)
            tma_load_4d(B_smem, B_map, zero, zero, zero, zero, full)
        cuda.syncthreads()
        D = cuda.local.array((2, 16), float32)
        A_reg = cuda.local.array((2, 8), uint32)
        row, col = place(thread, 0, 0)
        for i in range(2):
            for j in range(8):
                A_reg[i, j] = A[row + 8 * i, col // 2 + 4 * j]
            for j in range(16):
                D[i, j] = float32(0.0)
        for number in range(2):
            mbarrier_wait(full, int32(number))
            if fault != "no wgmma fence":
                wgmma_fence()
            a, b = describe(smem, 0), describe(B_smem, LEADING)
            for step in range(4):
                multiply(D, A_reg, a, b, step)
            if fault != "no commit":
                wgmma_commit_group()
            if fault == "early release" and thread % 32 == 0:
                mbarrier_arrive(empty)
            if fault == "A written":
                A_reg[0, 0] = uint32(0)
            if fault == "wait for older":
                await_older(D, 0, 0)
            elif fault != "no wait":
                await_all(D, 0, 0)
            if fault != "early release" and thread % 32 == 0:
                mbarrier_arrive(empty)
            if thread == 0 and number == 0:
                if fault != "no wait for empty":
                    mbarrier_wait(empty, int32(0))
                load(B_smem, B_map, int32(64), full)
            for i in range(2):
                for j in range(16):
                    r, c = place(thread, i, j)
                    out[number, r, c] = D[i, j]
                    if from_registers:
                        D[i, j] = float32(0.0)

    return kernel


def products(A, B, fault="", early=False, **kind):
    out = np.full((2, 64, 64), np.nan, np.float32)
    a = bits(A)[0, :, 0].copy().view(np.uint32)
    run(
        make_product(fault, **kind),
        TensorMap(bits(A), 64),
        TensorMap(bits(B), 64),
        a,
        out,
        early=early,
    )
    return out


@pytest.mark.parametrize("early", ORDERS)
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_are_right(dtype, transposed, from_registers, early):
    element = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    A, B = tensor(64, 64, 1, element), tensor(128, 64, 2, element)
    kind = {"dtype": dtype, "transposed": transposed, "from_registers": from_registers}
    out = products(A, B, early=early, **kind)
    a, b = (x[0, :, 0].astype(np.float64) for x in (A, B))
    for number, part in enumerate((b[:64], b[64:])):
        wanted = a @ (part if transposed else part.T)
        np.testing.assert_allclose(out[number], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early", ORDERS)
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("no wgmma fence", FenceError, "written since the last wgmma_fence"),
        ("no commit", AsyncCopyError, "a wgmma not waited for is to write"),
        ("no wait", AsyncCopyError, "."),
        ("wait for older", AsyncCopyError, "."),
        ("early release", (AsyncCopyError, RaceError), "shared"),
        ("no wait for empty", (RaceError, AsyncCopyError), "shared"),
        ("A written", AsyncCopyError, "a wgmma not waited for still uses"),
    ],
)
def test_a_product_without_one_of_its_parts_is_refused(fault, kind, says, early):
    registers = fault in ("no wgmma fence", "A written")
    with pytest.raises(kind, match=says):
        products(tensor(64, 64), tensor(128, 64), fault, early, from_registers=registers)


@pytest.mark.parametrize(
    ("leading", "kind", "says"),
    [
        (7 * TILE, OutOfBoundsError, "operand B of shared addresses"),
        (TILE, UninitialisedReadError, "operand B reads shared .* nothing wrote"),
    ],
)
def test_a_product_reads_what_its_descriptor_says(leading, kind, says):
    multiply = wgmma_ss(128, "float16", False, transposed_b=True)

    def kernel():
        smem = shared_address(cuda.shared.array(0, uint32))
        for i in range(16):
            st_shared_b32(int32(smem + 4 * (cuda.threadIdx.x + GROUP * i)), uint32(0))
        fence_proxy_async()
        cuda.syncthreads()
        D = cuda.local.array((2, 32), float32)
        wgmma_fence()
        multiply(D, 0, 0, describe(smem, 0), describe(int32(smem + TILE), leading))

    with pytest.raises(kind, match=says):
        run(kernel)


def test_threads_of_a_warpgroup_describe_the_same_matrix():
    multiply = wgmma_ss(8, "float16", False)

    def kernel():
        smem = shared_address(cuda.shared.array(0, uint32))
        D = cuda.local.array((2, 2), float32)
        wgmma_fence()
        multiply(D, 0, 0, describe(int32(smem + 1024 * (cuda.threadIdx.x // 64)), 0), 0)

    with pytest.raises(WarpError, match="operand A has descriptors that differ"):
        run(kernel)


def test_a_product_sees_stores_only_after_a_fence():
    def make(fenced):
        multiply = wgmma_ss(8, "float16", False)
        await_all = wgmma_wait_group(0, 8)

        def kernel(out):
            smem = shared_address(cuda.shared.array(0, uint32))
            thread = cuda.threadIdx.x
            for i in range(16):
                st_shared_b32(int32(smem + 4 * (thread + GROUP * i)), uint32(0x3C003C00))
            if fenced:
                fence_proxy_async()
            cuda.syncthreads()
            D = cuda.local.array((2, 2), float32)
            wgmma_fence()
            multiply(D, 0, 0, describe(smem, 0), describe(smem, 0))
            wgmma_commit_group()
            await_all(D, 0, 0)
            out[thread] = D[1, 1]

        return kernel

    out = np.zeros(GROUP, np.float32)
    run(make(True), out)
    assert (out == 16).all()
    with pytest.raises(FenceError, match="whose writer has not run fence_proxy_async"):
        run(make(False), out)


def test_all_threads_of_a_warpgroup_must_come():
    def kernel():
        if cuda.threadIdx.x < 96:
            wgmma_fence()

    with pytest.raises(WarpError, match="wgmma_fence waits for threads 96-127 of warpgroup 0"):
        run(kernel)
    with pytest.raises(WarpError, match="needs 128 threads of a warpgroup, and this has 64"):
        run(kernel, threads=64)


def test_a_warpgroup_must_agree():
    def kernel():
        if cuda.threadIdx.x < 64:
            wgmma_fence()
        else:
            wgmma_commit_group()

    with pytest.raises(WarpError, match="meet in different operations"):
        run(kernel)


def test_registers_are_given_back_by_a_whole_warpgroup():
    def kernel(out):
        keep_registers()
        out[cuda.threadIdx.x] = 1

    out = np.zeros(GROUP, np.int32)
    run(kernel, out)
    assert out.all()


def test_matrices_are_stored_as_they_are_loaded():
    def kernel(out):
        smem = shared_address(cuda.shared.array(0, uint32))
        words = cuda.shared.array(0, uint32)
        lane = cuda.threadIdx.x
        R = cuda.local.array((2, 2), uint32)
        for i in range(2):
            for j in range(2):
                R[i, j] = uint32(lane + 32 * (i + 2 * j))
        stmatrix_x4(int32(smem + 16 * lane), R, 0, 0)
        cuda.syncwarp()
        for i in range(4):
            out[i, lane] = words[32 * i + lane]

    out = np.zeros((4, 32), np.uint32)
    run(kernel, out, threads=32)
    # Register q of lane l is its pair of matrix q: lane after lane along the rows.
    np.testing.assert_array_equal(out, np.arange(128).reshape(4, 32))


# Numbered barriers


@cache
def make_relay(fault=""):
    """Warp 0 writes, warp 1 reads, and back, by turns at two barriers."""
    COUNT = 96 if fault == "count" else 64

    def kernel(out):
        cell = cuda.shared.array(1, uint32)
        thread = cuda.threadIdx.x
        for turn in range(3):
            if thread < 32:
                if thread == 0:
                    cell[0] = uint32(turn)
                if fault == "no arrival":
                    cuda.syncwarp()
                else:
                    bar_arrive(int32(1), int32(64))
                bar_sync(int32(2), int32(64))
            else:
                if fault != "no wait":
                    bar_sync(int32(1), int32(COUNT))
                out[turn, thread - 32] = cell[0]
                bar_arrive(int32(2), int32(64))

    return kernel


def test_turns_are_taken_at_numbered_barriers():
    out = np.zeros((3, 32), np.uint32)
    run(make_relay(), out, threads=64)
    np.testing.assert_array_equal(out, np.repeat([[0], [1], [2]], 32, axis=1))


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("no wait", (RaceError, UninitialisedReadError), "cell"),
        ("no arrival", BarrierError, "barrier 1 has 32 of 64 threads: nobody is left to come"),
        ("count", BarrierError, "where others come for"),
    ],
)
def test_turns_that_are_lost_are_refused(fault, kind, says):
    threads = 96 if fault == "count" else 64
    with pytest.raises(kind, match=says) as caught:
        run(make_relay(fault), np.zeros((3, 64), np.uint32), threads=threads)
    if kind is BarrierError and fault == "no arrival":
        assert "wait for barrier 1 of 64 threads at" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "threads", "says"),
    [(16, 64, "must be 0 to 15"), (1, 40, "must be whole warps"), (1, 96, "whole warps of the")],
)
def test_numbered_barriers_have_their_limits(number, threads, says):
    def kernel():
        bar_sync(int32(number), int32(threads))

    with pytest.raises(BarrierError, match=says):
        run(kernel, threads=64)


def test_more_arrivals_than_a_phase_has_are_refused():
    def kernel():
        barrier = shared_address(cuda.shared.array(2, uint32))
        if cuda.threadIdx.x == 0:
            mbarrier_init(barrier, int32(1))
            mbarrier_arrive_expect_tx(barrier, int32(16))
            mbarrier_arrive(barrier)

    with pytest.raises(BarrierError, match="more than 1 arrivals in one phase"):
        run(kernel)


# Counts


def test_copies_and_products_are_counted():
    out = np.zeros((2, 64, 64), np.float32)
    A, B = (TensorMap(bits(tensor(rows, 64)), 64) for rows in (64, 128))
    a = np.zeros((64, 32), np.uint32)
    report = run(make_product(), A, B, a, out, counts=True)
    assert report.async_copies == 3 and report.tensor_core_instructions == 8
    assert report.multiply_adds == 8 * 64 * 64 * 16
    # Three boxes, and what each thread reads of A and writes of D.
    assert report.global_load_bytes == 3 * TILE + GROUP * 16 * 4
    assert report.shared_store_bytes == 3 * TILE
    assert report.shared_load_bytes == 8 * 2 * 64 * 16 * 2
    assert report.mbarrier_phases == 4 and report.barriers == 1


def test_numbered_barriers_are_counted():
    report = run(make_relay(), np.zeros((3, 32), np.uint32), threads=64, counts=True)
    assert report.named_barriers == 6 and report.barriers == 0
