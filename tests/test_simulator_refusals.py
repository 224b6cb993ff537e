"""One deliberately broken kernel a rule: the simulator refuses it and says who, what and where.

The line of a mistake carries a comment (`# bad`, or `# first` and `# second` for a race), and the
tests look for that line's number in the message.
"""

import gc
import inspect
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
from greenlet import greenlet
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.types import float16, float32, int32, uint32

from fa2_numba.constants import FULL_MASK, KIB
from fa2_numba.device.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init
from fa2_numba.device.ptx import cp_async_16, global_address, ld_global_v4_b32, shared_address
from fa2_numba.device.tma import bulk_load
from fa2_numba.simulator import (
    AsyncCopyError,
    BarrierError,
    FenceError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    RunTooLongError,
    SharedMemoryError,
    SimulationError,
    Simulator,
    ThreadError,
    UninitialisedReadError,
    WarpError,
    simulate,
)
from fa2_numba.simulator.engine import Thread

SEEDS = [None, 0, 1, 2]
EVEN_LANES = 0x55555555
SECONDS_TO_REFUSE = 1.0


def marked_line(kernel, mark: str) -> str:
    """`file.py:12`, where `mark` is a comment in the kernel."""
    source, first = inspect.getsourcelines(kernel.py_func)
    (offset,) = [i for i, line in enumerate(source) if line.rstrip().endswith(f"# {mark}")]
    return f"{Path(inspect.getsourcefile(kernel.py_func)).name}:{first + offset}:"


def refused(kernel, kind, *, threads=32, blocks=1, shared_bytes=0, seed=None, out=None):
    """Run a kernel that must be refused at once, with its name and block; return the error."""
    out = np.zeros(64, np.float32) if out is None else out
    start = time.perf_counter()
    with pytest.raises(kind) as caught:
        simulate(kernel, seed=seed, progress=False)[blocks, threads, 0, shared_bytes](out)
    assert time.perf_counter() - start < SECONDS_TO_REFUSE
    assert type(caught.value) is kind
    assert f"in kernel {kernel.py_func.__name__}, block " in str(caught.value)
    return caught.value


def thread_words(number: int) -> str:
    return f"thread ({number}, 0, 0) (warp {number // 32}, lane {number % 32})"


# Out of bounds


@cuda.jit
def global_past_the_end(out):
    i = cuda.threadIdx.x
    if i == 5:
        out[64] = float32(1.0)  # bad


@cuda.jit
def global_read_past_the_end(out):
    if cuda.threadIdx.x == 5:
        out[0] = out[cuda.threadIdx.x + 95]  # bad


@cuda.jit
def global_negative(out):
    if cuda.threadIdx.x == 5:
        out[cuda.threadIdx.x - 6] = float32(1.0)  # bad


@cuda.jit
def shared_past_the_end(out):
    tile = cuda.shared.array(32, float32)
    if cuda.threadIdx.x == 5:
        tile[32] = out[0]  # bad


@cuda.jit
def shared_column_past_the_end(out):
    tile = cuda.shared.array((4, 8), float32)
    if cuda.threadIdx.x == 5:
        tile[1, 8] = out[0]  # bad


@cuda.jit
def dynamic_past_the_end(out):
    tile = cuda.shared.array(0, float32)
    if cuda.threadIdx.x == 5:
        tile[16] = out[0]  # bad


@cuda.jit
def view_past_the_end(out):
    smem = cuda.shared.array(0, float32)
    if cuda.threadIdx.x == 5:
        tile = smem[4:12].reshape((2, 4))
        tile[0, 4] = out[0]  # bad


@cuda.jit
def local_negative(out):
    mine = cuda.local.array(4, float32)
    if cuda.threadIdx.x == 5:
        mine[-1] = out[0]  # bad


@cuda.jit
def local_row_past_the_end(out):
    mine = cuda.local.array((2, 4), float32)
    if cuda.threadIdx.x == 5:
        mine[2, 0] = out[0]  # bad


@cuda.jit
def too_many_indices(out):
    if cuda.threadIdx.x == 5:
        out[0, 0] = float32(1.0)  # bad


@cuda.jit
def atomic_past_the_end(out):
    if cuda.threadIdx.x == 5:
        cuda.atomic.add(out, 64, float32(1.0))  # bad


@pytest.mark.parametrize(
    "kernel, element",
    [
        (global_past_the_end, "global array out[64] of shape (64,)"),
        (global_read_past_the_end, "global array out[100] of shape (64,)"),
        (global_negative, "global array out[-1] of shape (64,)"),
        (shared_past_the_end, "shared array tile[32] of shape (32,)"),
        (shared_column_past_the_end, "shared array tile[1, 8] of shape (4, 8)"),
        (dynamic_past_the_end, "shared array tile[16] of shape (16,)"),
        (view_past_the_end, "shared array tile[0, 4] of shape (2, 4)"),
        (local_negative, "local array mine[-1] of shape (4,)"),
        (local_row_past_the_end, "local array mine[2, 0] of shape (2, 4)"),
        (too_many_indices, "global array out[0, 0] of shape (64,)"),
        (atomic_past_the_end, "global array out[64] of shape (64,)"),
    ],
    ids=lambda value: value.py_func.__name__ if hasattr(value, "py_func") else "",
)
@pytest.mark.parametrize("seed", [None, 1])
def test_index_out_of_bounds(kernel, element, seed):
    error = refused(kernel, OutOfBoundsError, shared_bytes=64, seed=seed)
    assert element in str(error)
    assert f"{thread_words(5)} at {marked_line(kernel, 'bad')}" in str(error)
    assert (error.thread, error.warp, error.lane) == ((5, 0, 0), 0, 5)
    assert isinstance(error, IndexError)


def test_error_names_block_warp_and_thread_in_three_dimensions():
    @cuda.jit
    def third_dimension(out):
        thread, block = cuda.threadIdx, cuda.blockIdx
        if thread.x == 1 and thread.y == 2 and thread.z == 3 and block.y == 1 and block.z == 2:
            out[64] = float32(1.0)  # bad

    error = refused(third_dimension, OutOfBoundsError, threads=(2, 4, 8), blocks=(1, 2, 3))
    assert error.kernel == "third_dimension"
    assert error.block == (0, 1, 2)
    assert error.thread == (1, 2, 3)
    assert (error.warp, error.lane) == (0, 29)
    assert "block (0, 1, 2)\n  thread (1, 2, 3) (warp 0, lane 29) at" in str(error)


def test_a_float_index_is_refused():
    @cuda.jit
    def float_index(out):
        out[cuda.threadIdx.x / 2] = float32(1.0)  # bad

    error = refused(float_index, ThreadError)
    assert "index 0.0 is not an integer" in str(error)
    assert marked_line(float_index, "bad") in str(error)


# Reads of what nothing wrote


@cuda.jit
def uninitialised_shared(out):
    tile = cuda.shared.array((2, 64), float32)
    i = cuda.threadIdx.x
    if i != 37:
        tile[1, i] = out[i]
    cuda.syncthreads()
    if i == 3:
        out[i] = tile[1, 37]  # bad


@cuda.jit
def uninitialised_local(out):
    mine = cuda.local.array(4, float32)
    mine[0] = float32(0.0)
    if cuda.threadIdx.x == 3:
        out[0] = mine[2]  # bad


@cuda.jit
def uninitialised_atomic(out):
    count = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 3:
        cuda.atomic.add(count, 0, 1)  # bad


@pytest.mark.parametrize(
    "kernel, element",
    [
        (uninitialised_shared, "shared array tile[1, 37]"),
        (uninitialised_local, "local array mine[2]"),
        (uninitialised_atomic, "shared array count[0]"),
    ],
    ids=["shared", "local", "atomic"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_uninitialised_read(kernel, element, seed):
    error = refused(kernel, UninitialisedReadError, threads=64, seed=seed)
    assert element in str(error)
    assert f"{thread_words(3)} at {marked_line(kernel, 'bad')}" in str(error)
    assert (error.thread, error.warp, error.lane) == ((3, 0, 0), 0, 3)


# Races


@cuda.jit
def race_write_write(out):
    tile = cuda.shared.array(4, float32)
    if cuda.threadIdx.x == 1:
        tile[2] = out[0]  # first
    if cuda.threadIdx.x == 40:
        tile[2] = out[1]  # second


@cuda.jit
def race_writer_runs_first(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    if i == 1:
        tile[2] = out[0]  # first
    if i == 40:
        out[i] = tile[2]  # second


@cuda.jit
def race_reader_runs_first(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    if i == 40:
        tile[2] = out[0]  # first
    if i == 1:
        out[i] = tile[2]  # second


@cuda.jit
def race_write_after_read(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = out[i]
    cuda.syncthreads()
    out[i] = tile[63 - i]  # first
    tile[i] = float32(0.0)  # second


@cuda.jit
def race_within_a_warp(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    if i == 7:
        tile[2] = out[0]  # first
    if i == 8:
        out[i] = tile[2]  # second


@cuda.jit
def race_syncwarp_across_warps(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = out[i]  # first
    cuda.syncwarp()
    out[i] = tile[(i + 32) % 64]  # second


@cuda.jit
def race_outside_the_mask(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = out[i]  # first
    if i % 2 == 0:
        cuda.syncwarp(EVEN_LANES)
        out[i] = tile[i + 1]  # second


@cuda.jit
def race_shuffle_orders_nothing(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = out[i]  # first
    cuda.shfl_xor_sync(FULL_MASK, i, 1)
    out[i] = tile[i ^ 1]  # second


@cuda.jit
def race_plain_write_against_atomic(out):
    count = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = float32(0.0)  # first
    cuda.atomic.add(count, 0, float32(1.0))  # second


@cuda.jit
def race_read_of_another_warps_atomic(out):
    count = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = float32(0.0)
    cuda.syncthreads()
    cuda.atomic.add(count, 0, float32(1.0))  # first
    cuda.syncwarp()
    out[i] = count[0]  # second


@cuda.jit
def race_atomic_against_hidden_write(out):
    # Warp 0's own update is ordered after the plain write, warp 1's is not.
    count = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = float32(0.0)  # first
    if i < 32:
        cuda.syncwarp()
        cuda.atomic.add(count, 0, float32(1.0))
    for _ in range(8):
        cuda.nanosleep(1)
    if i >= 32:
        cuda.atomic.add(count, 0, float32(1.0))  # second


@cuda.jit
def race_between_views(out):
    words = cuda.shared.array(0, float32)
    halves = cuda.shared.array(0, float16)
    i = cuda.threadIdx.x
    if i == 1:
        words[3] = out[0]  # first
    if i == 40:
        halves[7] = float16(1.0)  # second


RACES = [
    race_write_write,
    race_writer_runs_first,
    race_reader_runs_first,
    race_write_after_read,
    race_within_a_warp,
    race_syncwarp_across_warps,
    race_outside_the_mask,
    race_shuffle_orders_nothing,
    race_plain_write_against_atomic,
    race_read_of_another_warps_atomic,
    race_atomic_against_hidden_write,
    race_between_views,
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", RACES, ids=lambda kernel: kernel.py_func.__name__)
def test_race(kernel, seed):
    error = refused(kernel, RaceError, threads=64, shared_bytes=64, seed=seed)
    lines = [marked_line(kernel, mark) for mark in ("first", "second")]
    assert sorted(set(re.findall(r"test_simulator_refusals\.py:\d+:", str(error)))) == lines
    assert {f"test_simulator_refusals.py:{number}:" for number in error.lines} == set(lines)
    assert re.search(r"race on shared array \w+\[\d+\]", str(error))
    assert len(set(re.findall(r"thread \(\d+, 0, 0\) \(warp \d, lane \d+\)", str(error)))) == 2
    assert error.thread in {(int(i), 0, 0) for i in re.findall(r"thread \((\d+), 0", str(error))}


@cuda.jit
def clean_neighbours(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = out[i]
    tile[i] = tile[i] + float32(i)
    out[i] = tile[i]


@cuda.jit
def clean_after_barriers(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    for _ in range(3):
        tile[i] = float32(i)
        cuda.syncthreads()
        out[i] = tile[63 - i] + float32(2 * i - 63)
        cuda.syncthreads()


@cuda.jit
def clean_counting_barrier(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[63 - i] = float32(i)
    cuda.syncthreads_count(1)
    out[i] = tile[63 - i]


@cuda.jit
def clean_syncwarp(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i ^ 1] = float32(i)
    cuda.syncwarp()
    out[i] = tile[i ^ 1]


@cuda.jit
def clean_partial_syncwarp(out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i ^ 2] = float32(i)
    if i % 2 == 0:
        cuda.syncwarp(EVEN_LANES)
    else:
        cuda.syncwarp(EVEN_LANES << 1)
    out[i] = tile[i ^ 2]


@cuda.jit
def clean_transitive_order(out):
    # Lane 31 of warp 1 learns of lane 0's write through two syncwarps with lane 1 between them.
    tile = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    lane = i % 32
    out[i] = float32(i)
    if i == 0:
        tile[0] = float32(63.0)
    if i < 32:
        if lane < 2:
            cuda.syncwarp(0b11)
        if lane > 0:
            cuda.syncwarp(FULL_MASK - 1)
        if lane == 31:
            out[63] = tile[0]


@cuda.jit
def clean_atomics(out):
    count = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = float32(0.0)
    cuda.syncthreads()
    cuda.atomic.add(count, 0, float32(1.0))
    cuda.atomic.max(count, 0, float32(1.0))
    cuda.syncthreads()
    out[i] = count[0] + float32(i) - float32(64.0)


@cuda.jit
def clean_half_words(out):
    halves = cuda.shared.array(0, float16)
    words = cuda.shared.array(0, int32)
    i = cuda.threadIdx.x
    halves[i] = float16(i)
    cuda.syncthreads()
    low = words[i // 2] & 0xFFFF
    out[i] = float32(halves[i]) if low >= 0 else float32(-1.0)


@cuda.jit
def clean_broadcast_read(out):
    tile = cuda.shared.array(1, float32)
    i = cuda.threadIdx.x
    if i == 9:
        tile[0] = float32(0.0)
    cuda.syncthreads()
    out[i] = tile[0] + float32(i)


CLEAN = [
    clean_neighbours,
    clean_after_barriers,
    clean_counting_barrier,
    clean_syncwarp,
    clean_partial_syncwarp,
    clean_transitive_order,
    clean_atomics,
    clean_half_words,
    clean_broadcast_read,
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", CLEAN, ids=lambda kernel: kernel.py_func.__name__)
def test_no_false_race(kernel, seed):
    out = np.zeros(64, np.float32)
    simulate(kernel, seed=seed)[1, 64, 0, 128](out)
    np.testing.assert_array_equal(out, np.arange(64))


# Barriers


@cuda.jit
def divergent_barrier(out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()  # first
    else:
        cuda.syncthreads()  # second


@cuda.jit
def barrier_in_a_divergent_loop(out):
    for _ in range(1 + cuda.threadIdx.x // 32):
        cuda.syncthreads()  # bad


@cuda.jit
def barrier_skipped_by_one_lane(out):
    if cuda.threadIdx.x != 37:
        cuda.syncthreads()  # bad


@cuda.jit
def exit_before_a_barrier(out):
    if cuda.threadIdx.x >= 60:
        return
    cuda.syncthreads()  # bad


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_barrier(seed):
    error = refused(divergent_barrier, BarrierError, threads=64, seed=seed)
    assert "divergent barrier" in str(error)
    assert marked_line(divergent_barrier, "first") in str(error)
    assert marked_line(divergent_barrier, "second") in str(error)
    for warp, mark in enumerate(("first", "second")):
        place = re.escape(marked_line(divergent_barrier, mark))
        who = rf"threads [\d, -]+ \(warp {warp}\) wait for syncthreads at {place}"
        assert re.search(who, str(error))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel, missing, waiting, first",
    [
        (barrier_in_a_divergent_loop, "0-31 (warp 0)", "32-63 (warp 1)", 0),
        (barrier_skipped_by_one_lane, "37 (warp 1)", "0-36, 38-63 (warps 0-1)", 37),
        (exit_before_a_barrier, "60-63 (warp 1)", "0-59 (warps 0-1)", 60),
    ],
    ids=["divergent-loop", "one-lane-skips", "exit"],
)
def test_missing_barrier(kernel, missing, waiting, first, seed):
    error = refused(kernel, BarrierError, threads=64, seed=seed)
    line = marked_line(kernel, "bad")
    assert f"threads {missing} have left the kernel" in str(error)
    assert f"threads {waiting} wait for syncthreads at {line}" in str(error)
    assert (error.thread, error.warp, error.lane) == ((first, 0, 0), first // 32, first % 32)


# Warp-wide operations


@cuda.jit
def exit_before_a_shuffle(out):
    if cuda.threadIdx.x == 40:
        return
    out[0] = cuda.shfl_xor_sync(FULL_MASK, cuda.threadIdx.x, 1)  # bad


@cuda.jit
def shuffle_in_a_branch(out):
    if cuda.threadIdx.x % 2 == 0:
        out[0] = cuda.shfl_sync(FULL_MASK, cuda.threadIdx.x, 0)  # bad


@cuda.jit
def shuffle_reads_outside_the_mask(out):
    if cuda.threadIdx.x % 2 == 0:
        out[0] = cuda.shfl_sync(EVEN_LANES, cuda.threadIdx.x, 3)  # bad


@cuda.jit
def lane_outside_its_own_mask(out):
    cuda.syncwarp(EVEN_LANES)  # bad


@cuda.jit
def vote_outside_its_own_mask(out):
    out[0] = cuda.ballot_sync(EVEN_LANES, True)  # bad


@cuda.jit
def different_operations(out):
    if cuda.threadIdx.x % 32 < 16:
        out[0] = cuda.any_sync(FULL_MASK, True)  # bad
    else:
        out[0] = cuda.all_sync(FULL_MASK, True)  # bad too


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel, problem",
    [
        (exit_before_a_shuffle, "shfl_xor_sync with mask 0xffffffff waits for lanes 8 of warp 1"),
        (shuffle_in_a_branch, "shfl_sync with mask 0xffffffff waits for lanes 1, 3, 5"),
        (shuffle_reads_outside_the_mask, "shfl_sync reads lane 3, which takes no part"),
        (lane_outside_its_own_mask, "syncwarp by a lane that its own mask 0x55555555 leaves out"),
        (vote_outside_its_own_mask, "ballot_sync by a lane that its own mask 0x55555555 leaves"),
        (different_operations, "lanes of one mask 0xffffffff meet in different operations"),
    ],
    ids=lambda value: value.py_func.__name__ if hasattr(value, "py_func") else "",
)
def test_warp_operation(kernel, problem, seed):
    error = refused(kernel, WarpError, threads=64, seed=seed)
    assert problem in str(error)
    lines = [marked_line(kernel, "bad")]
    if kernel is different_operations:
        lines.append(marked_line(kernel, "bad too"))
    assert all(line in str(error) for line in lines)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shuffle_in_vain_is_about_the_first_lane_that_never_comes(seed):
    error = refused(exit_before_a_shuffle, WarpError, threads=64, seed=seed)
    assert (error.thread, error.warp, error.lane) == ((40, 0, 0), 1, 8)
    assert "threads 0-31, 40 (warps 0-1) have left the kernel" in str(error)


# Exceptions in one thread


@cuda.jit
def index_error_before_a_barrier(out):
    i = cuda.threadIdx.x
    if i == 5:
        out[i + 64] = float32(1.0)  # bad
    cuda.syncthreads()
    out[i] = float32(i)


@cuda.jit
def tuple_index_error(out):
    if cuda.threadIdx.x == 5:
        out[0] = (1, 2)[cuda.threadIdx.x]  # bad
    cuda.syncthreads()


@cuda.jit
def division_by_zero(out):
    if cuda.threadIdx.x == 5:
        out[0] = cuda.threadIdx.x // (cuda.threadIdx.x - 5)  # bad
    cuda.syncthreads()


@cuda.jit
def failed_assertion(out):
    assert cuda.threadIdx.x != 5, "five"  # bad
    cuda.syncthreads()


@cuda.jit
def unknown_operation(out):
    if cuda.threadIdx.x == 5:
        cuda.no_such_operation(out)  # bad
    cuda.syncthreads()


@cuda.jit
def unknown_libdevice_function(out):
    if cuda.threadIdx.x == 5:
        out[0] = libdevice.rsqrtf(out[0])  # bad
    cuda.syncthreads()


rsqrtf = libdevice.rsqrtf


@cuda.jit
def unknown_libdevice_function_by_name(out):
    if cuda.threadIdx.x == 5:
        out[0] = rsqrtf(out[0])  # bad
    cuda.syncthreads()


UNKNOWN_LIBDEVICE = "NotImplementedError: the simulator does not know libdevice.rsqrtf"


@cuda.jit(device=True)
def broken_device_function(out):
    out[0] = (1, 2)[5]  # bad


@cuda.jit
def error_in_a_device_function(out):
    if cuda.threadIdx.x == 5:
        broken_device_function(out)
    cuda.syncthreads()


@pytest.mark.parametrize("seed", SEEDS)
def test_index_error_in_thread_5_of_64_before_a_barrier(seed):
    kernel = index_error_before_a_barrier
    error = refused(kernel, OutOfBoundsError, threads=64, seed=seed)
    assert f"{thread_words(5)} at {marked_line(kernel, 'bad')}" in str(error)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    "kernel, cause",
    [
        (tuple_index_error, "IndexError: tuple index out of range"),
        (division_by_zero, "ZeroDivisionError"),
        (failed_assertion, "AssertionError: five"),
        (unknown_operation, "NotImplementedError: the simulator does not know cuda.no_such_operat"),
        (unknown_libdevice_function, UNKNOWN_LIBDEVICE),
        (unknown_libdevice_function_by_name, UNKNOWN_LIBDEVICE),
    ],
    ids=lambda value: value.py_func.__name__ if hasattr(value, "py_func") else "",
)
def test_exception_in_thread_5_of_64(kernel, cause, seed):
    error = refused(kernel, ThreadError, threads=64, seed=seed)
    assert cause in str(error)
    assert f"{thread_words(5)} at {marked_line(kernel, 'bad')}" in str(error)
    assert type(error.__cause__).__name__ == cause.split(":")[0]
    assert error.thread == (5, 0, 0)


def test_exception_in_a_device_function_names_its_line():
    error = refused(error_in_a_device_function, ThreadError, threads=64)
    assert f"{thread_words(5)} at {marked_line(broken_device_function, 'bad')}" in str(error)


def test_a_refused_launch_leaves_no_thread_behind():
    def living_threads() -> int:
        gc.collect()
        return sum(isinstance(o, Thread) and not o.dead for o in gc.get_objects())

    before = living_threads()
    errors = [refused(exit_before_a_barrier, BarrierError, threads=64) for _ in range(3)]
    errors.append(refused(tuple_index_error, ThreadError, threads=64))
    assert living_threads() == before
    assert len(errors) == 4
    assert issubclass(Thread, greenlet)


# Shared memory


def static_kernel(size: int):
    @cuda.jit
    def static_shared(out):
        tile = cuda.shared.array(size, float32)
        tile[0] = out[0]

    return static_shared


def two_static_kernel(size: int):
    @cuda.jit
    def two_static(out):
        a = cuda.shared.array(size, float32)
        b = cuda.shared.array(size, float32)
        a[0] = b[0] = out[0]

    return two_static


@pytest.mark.parametrize("make, size", [(static_kernel, 12 * KIB), (two_static_kernel, 6 * KIB)])
def test_static_shared_memory_limit(make, size):
    out = np.zeros(1, np.float32)
    simulate(make(size))[1, 1](out)
    error = refused(make(size + 1), SharedMemoryError, threads=1)
    assert "bytes of static shared memory: a block may declare 49152" in str(error)
    assert f"{thread_words(0)} at test_simulator_refusals.py" in str(error)


@cuda.jit
def dynamic_shared(out):
    tile = cuda.shared.array(0, float32)
    tile[tile.shape[0] - 1] = out[0]


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
OPT_IN_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (12, 0): 99}


@pytest.mark.parametrize("capability, kib", OPT_IN_KIB.items(), ids=str)
def test_dynamic_shared_memory_limit(capability, kib):
    run = simulate(dynamic_shared, compute_capability=capability)
    run[1, 1, 0, kib * KIB](np.zeros(1, np.float32))
    with pytest.raises(LaunchError, match=f"kernel dynamic_shared.* {kib * KIB}$"):
        run[1, 1, 0, kib * KIB + 1](np.zeros(1, np.float32))


@pytest.mark.parametrize("capability, kib", OPT_IN_KIB.items(), ids=str)
def test_static_and_dynamic_shared_memory_limit(capability, kib):
    run = simulate(static_kernel(256), compute_capability=capability)
    run[1, 1, 0, (kib - 1) * KIB](np.zeros(1, np.float32))
    with pytest.raises(SharedMemoryError, match=f"1024 static and .* has {kib * KIB}"):
        run[1, 1, 0, (kib - 1) * KIB + 1](np.zeros(1, np.float32))


@pytest.mark.parametrize(
    "capability", [(6, 1), 9, 9.0, "9.0", (9,), (9, 0, 0), (9.0, 0), ([9], 0), None], ids=repr
)
def test_unknown_architecture_is_refused(capability):
    with pytest.raises(ValueError) as caught:
        simulate(dynamic_shared, compute_capability=capability)
    start = f"compute_capability={capability!r}: must be one of 7.5, 8.0, "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(", as a pair like (9, 0)")


# Options


@pytest.mark.parametrize(
    "field, value, rule",
    [
        *(
            ("max_seconds", value, "a positive number or None")
            for value in (0, -1.0, np.nan, "60", True, (1,))
        ),
        *(("seed", value, "an integer or None") for value in (1.5, "1", True, (1,))),
        *(("checks", value, "True or False") for value in (None, 1, "no")),
        *(("progress", value, "True or False") for value in (None, 0, "no")),
    ],
    ids=repr,
)
def test_misfit_option_is_refused(field, value, rule):
    with pytest.raises(ValueError) as caught:
        Simulator(**{field: value})
    assert str(caught.value) == f"{field}={value!r}: must be {rule}"


@pytest.mark.parametrize(
    "options",
    [
        {"max_seconds": None},
        {"max_seconds": 60},
        {"max_seconds": np.float32(60)},
        {"max_seconds": float("inf")},
        {"seed": -1},
        {"seed": np.int64(3)},
        {"compute_capability": [8, 6]},
        {"compute_capability": (np.int32(8), np.int32(6))},
        {"checks": np.bool_(True)},
    ],
    ids=str,
)
def test_options_that_fit_run(options):
    out = np.zeros(1)
    simulate(two_arguments, **options)[2, 32](out, 3.0)
    assert out[0] == 3.0


# Launches


@cuda.jit
def two_arguments(out, scale=2.0):
    out[0] = scale


@pytest.mark.parametrize(
    "config",
    [
        (1, 1025),
        (1, (32, 33)),
        (1, (1, 1, 65)),
        (1, 0),
        (0, 1),
        (-1, 1),
        (1, 1.5),
        (1, (1, 1, 1, 1)),
        ((1, 65536), 1),
        ((1, 1, 65536), 1),
        (2**31, 1),
        (1,),
        (1, 1, 0, 0, 0),
        (1, 1, 0, -4),
        (1, 1, 0, "a"),
        (1, 1, 0, 4.0),
        (1, 1, 0, None),
        ("a", 1),
        (1, None),
        4,
    ],
    ids=repr,
)
def test_misfit_launch_shape(config):
    with pytest.raises(LaunchError, match="kernel two_arguments") as caught:
        simulate(two_arguments)[config](np.zeros(1), 1.0)
    assert caught.value.kernel == "two_arguments"


@pytest.mark.parametrize("kernel", [5, None, "kernel", print, float32], ids=str)
def test_what_is_no_kernel_is_refused(kernel):
    with pytest.raises(LaunchError, match=r"^kernel .*: must be a function, with or without @cuda"):
        simulate(kernel)
    with pytest.raises(LaunchError, match="must be a function"):
        Simulator().launch(kernel, 1, 1, 0, ())


@pytest.mark.parametrize("block", [1024, (32, 32), (1, 1024), (4, 4, 64)], ids=str)
def test_largest_blocks_run(block):
    out = np.zeros(1)
    simulate(two_arguments)[(2, 1, 1), block](out, 3.0)
    assert out[0] == 3.0


@pytest.mark.parametrize("arguments", [(), (np.zeros(1), 1.0, 2.0)], ids=["none", "three"])
def test_wrong_argument_count(arguments):
    with pytest.raises(
        LaunchError, match=rf"two_arguments takes 2 .*, got {len(arguments)}"
    ) as caught:
        simulate(two_arguments)[1, 1](*arguments)
    assert caught.value.kernel == "two_arguments"


def test_device_array_is_refused():
    array = types.SimpleNamespace(__cuda_array_interface__={"shape": (1,), "typestr": "<f4"})
    with pytest.raises(LaunchError, match="argument out is on a GPU"):
        simulate(two_arguments)[1, 1](array, 1.0)


# Time


@cuda.jit
def slow_block(out):
    for i in range(200):
        out[i % 64] += float32(1.0)


@cuda.jit
def endless_loop(out):
    if cuda.threadIdx.x == 5:
        while True:  # bad
            pass


@cuda.jit
def endless_spin(out):
    while cuda.atomic.add(out, 0, float32(0.0)) == 0.0:  # bad
        pass


def test_a_launch_that_would_take_too_long_is_refused_with_the_estimate():
    start = time.perf_counter()
    with pytest.raises(RunTooLongError, match=r"slow_block would take about \d+ s .* 100000 block"):
        simulate(slow_block, max_seconds=0.2)[100_000, 32](np.zeros(64, np.float32))
    assert time.perf_counter() - start < SECONDS_TO_REFUSE


@pytest.mark.parametrize("kernel", [endless_loop, endless_spin], ids=["loop", "spin"])
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_an_endless_loop_is_ended(kernel, checks):
    start = time.perf_counter()
    with pytest.raises(
        RunTooLongError, match=f"kernel {kernel.py_func.__name__} has run"
    ) as caught:
        simulate(kernel, checks=checks, max_seconds=1)[1, 32](np.zeros(64, np.float32))
    assert 1.0 <= time.perf_counter() - start < 2.0
    assert caught.value.kernel == kernel.py_func.__name__
    if kernel is endless_loop:
        assert f"and was at {marked_line(endless_loop, 'bad')}" in str(caught.value)


def test_no_interruption_outlives_its_launch():
    ended = 0
    for step in range(1, 201):
        try:
            simulate(slow_block, max_seconds=0.00002 * step)[1, 1](np.zeros(64, np.float32))
        except RunTooLongError:
            ended += 1
    assert 0 < ended < 200
    time.sleep(0.6)


# What every error carries

ABOUT_5 = ((5, 0, 0), 0, 5)
ABOUT_NO_THREAD = (None, None, None)


@cuda.jit
def too_much_shared(out):
    if cuda.threadIdx.x == 5:
        tile = cuda.shared.array(12 * KIB + 1, float32)  # bad
        tile[0] = out[0]


@cuda.jit
def race_of_5(out):
    tile = cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 4:
        tile[0] = out[0]  # first
    if cuda.threadIdx.x == 5:
        tile[0] = out[1]  # second


@cuda.jit
def reads_unwritten(out):
    tile = cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 5:
        out[0] = tile[0]  # bad


@cuda.jit
def shuffle_without_5(out):
    if cuda.threadIdx.x != 5:
        cuda.syncwarp()  # bad


@cuda.jit
def barrier_without_5(out):
    if cuda.threadIdx.x != 5:
        cuda.syncthreads()  # bad


@cuda.jit
def barriers_of_two_kinds(out):
    if cuda.threadIdx.x < 5:
        cuda.syncthreads()  # first
    else:
        cuda.syncthreads()  # second


@cuda.jit
def votes_of_two_kinds(out):
    if cuda.threadIdx.x < 5:
        cuda.any_sync(FULL_MASK, True)  # first
    else:
        cuda.all_sync(FULL_MASK, True)  # second


@cuda.jit
def misaligned_vector(out):
    vector = cuda.local.array((1, 4), uint32)
    if cuda.threadIdx.x == 5:
        ld_global_v4_b32(vector, 0, 0, global_address(out) + 4)  # bad


@cuda.jit
def read_before_the_copy_came(out):
    tile = cuda.shared.array(4, float32, alignment=128)
    if cuda.threadIdx.x == 4:
        cp_async_16(shared_address(tile), global_address(out), 16)  # first
    cuda.syncwarp()
    if cuda.threadIdx.x == 5:
        out[0] = tile[0]  # second


@cuda.jit
def copy_to_a_barrier_not_fenced(x):
    smem = shared_address(cuda.shared.array(16, np.uint32))
    if cuda.threadIdx.x == 5:
        mbarrier_init(smem, 1)
        mbarrier_arrive_expect_tx(smem, 16)
        bulk_load(smem + 16, global_address(x), 16, smem)  # bad


ERRORS = [
    (OutOfBoundsError, global_past_the_end, (0, 0, 0), ABOUT_5, ["bad"]),
    (UninitialisedReadError, reads_unwritten, (0, 0, 0), ABOUT_5, ["bad"]),
    (RaceError, race_of_5, (0, 0, 0), ABOUT_5, ["first", "second"]),
    (MisalignedError, misaligned_vector, (0, 0, 0), ABOUT_5, ["bad"]),
    (AsyncCopyError, read_before_the_copy_came, (0, 0, 0), ABOUT_5, ["first", "second"]),
    (FenceError, copy_to_a_barrier_not_fenced, (0, 0, 0), ABOUT_5, ["bad"]),
    (BarrierError, barrier_without_5, (0, 0, 0), ABOUT_5, ["bad"]),
    (BarrierError, barriers_of_two_kinds, (0, 0, 0), ABOUT_5, ["first", "second"]),
    (WarpError, shuffle_without_5, (0, 0, 0), ABOUT_5, ["bad"]),
    (WarpError, votes_of_two_kinds, (0, 0, 0), ABOUT_5, ["first", "second"]),
    (SharedMemoryError, too_much_shared, (0, 0, 0), ABOUT_5, ["bad"]),
    (ThreadError, tuple_index_error, (0, 0, 0), ABOUT_5, ["bad"]),
    (LaunchError, two_arguments, None, ABOUT_NO_THREAD, []),
    (RunTooLongError, endless_loop, None, ABOUT_NO_THREAD, ["bad"]),
]


@pytest.mark.parametrize(
    "kind, kernel, block, about, marks",
    ERRORS,
    ids=[f"{kind.__name__}-{kernel.py_func.__name__}" for kind, kernel, *_ in ERRORS],
)
def test_every_error_carries_what_it_is_about(kind, kernel, block, about, marks):
    arguments = () if kernel is two_arguments else (np.zeros(64, np.float32),)
    with pytest.raises(SimulationError) as caught:
        simulate(kernel, max_seconds=1, progress=False)[1, 32](*arguments)
    error = caught.value
    assert type(error) is kind
    assert (error.kernel, error.block) == (kernel.py_func.__name__, block)
    assert (error.thread, error.warp, error.lane) == about
    lines = [f"test_simulator_refusals.py:{number}:" for number in error.lines]
    assert lines == [marked_line(kernel, mark) for mark in marks]
    assert list(dict.fromkeys(re.findall(r"test_simulator_refusals\.py:\d+:", str(error)))) == lines


def test_the_table_of_errors_has_every_class():
    assert {kind for kind, *_ in ERRORS} == set(SimulationError.__subclasses__())


def test_an_error_about_nothing_carries_none():
    error = SimulationError("?")
    assert (error.kernel, error.block, error.thread, error.warp, error.lane) == (None,) * 5
    assert error.lines == ()
