"""What simulated kernels compute, against NumPy, exact arithmetic and the CUDA documentation."""

import math
import sys
import threading
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda
from numba.cuda import atomic, blockIdx, grid, libdevice, local, shared, syncthreads, threadIdx
from numba.cuda.types import (
    bfloat16,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint16,
    uint32,
    uint64,
)

from fa2_numba.constants import FULL_MASK
from fa2_numba.simulator import simulate
from fa2_numba.simulator.values import fma as simulated_fma

LANES = np.arange(32)


def run(kernel, *arrays, threads=32, blocks=1, shared_bytes=0, **options):
    """Run a kernel under several orders of threads, with and without checks; all must agree.

    The arrays are changed in place, as by one launch.
    """
    results = []
    for seed, checks in ((None, True), (1, True), (2, True), (None, False), (3, False)):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
        launch = simulate(kernel, seed=seed, checks=checks, progress=False, **options)
        launch[blocks, threads, 0, shared_bytes](*copies)
        results.append(copies)
    for index, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            for other in results[1:]:
                assert other[index].tobytes() == results[0][index].tobytes()
            array[...] = results[0][index]
    return arrays[0]


# Indices


@cuda.jit
def write_indices(out):
    x, y, z = cuda.grid(3)
    t, b, d, g = cuda.threadIdx, cuda.blockIdx, cuda.blockDim, cuda.gridDim
    out[x, y, z, 0] = t.x + 10 * t.y + 100 * t.z
    out[x, y, z, 1] = b.x + 10 * b.y + 100 * b.z
    out[x, y, z, 2] = d.x + 10 * d.y + 100 * d.z
    out[x, y, z, 3] = g.x + 10 * g.y + 100 * g.z
    out[x, y, z, 4] = cuda.laneid
    out[x, y, z, 5] = cuda.warpsize


def test_indices_in_three_dimensions():
    block, blocks = (5, 3, 4), (2, 3, 2)
    out = np.full((*np.multiply(block, blocks), 6), -1, np.int64)
    run(write_indices, out, threads=block, blocks=blocks)
    for position in np.ndindex(out.shape[:3]):
        thread, index = np.mod(position, block), np.floor_divide(position, block)
        number = thread[0] + 5 * (thread[1] + 3 * thread[2])
        weights = [1, 10, 100]
        expected = [thread @ weights, index @ weights, 435, 232, number % 32, 32]
        assert out[position].tolist() == expected


@cuda.jit
def write_grid(out, sizes):
    i = cuda.grid(1)
    x, y = cuda.grid(2)
    out[i, 0], out[i, 1] = x, y
    sizes[0] = cuda.gridsize(1)
    sizes[1], sizes[2] = cuda.gridsize(2)
    sizes[3], sizes[4], sizes[5] = cuda.gridsize(3)


def test_grid_and_gridsize():
    out, sizes = np.zeros((12, 2), np.int32), np.zeros(6, np.int64)
    run(write_grid, out, sizes, threads=4, blocks=3)
    np.testing.assert_array_equal(out, [[i, 0] for i in range(12)])
    assert sizes.tolist() == [12, 12, 1, 12, 1, 1]


# Shared and local arrays


@cuda.jit
def two_arrays_on_a_line(out):
    a, b = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        a[0] = 1
        b[0] = 2
    cuda.syncthreads()
    out[cuda.threadIdx.x] = 10 * a[0] + b[0]


def test_arrays_on_one_line_do_not_alias():
    assert set(run(two_arrays_on_a_line, np.zeros(32, np.int32))) == {12}


def make_store(value):
    @cuda.jit(device=True)
    def store():
        own = cuda.shared.array(1, int32)
        own[0] = value
        return own

    return store


store_1, store_2 = make_store(1), make_store(2)


@cuda.jit
def arrays_of_two_functions(out):
    a = store_1()
    b = store_2()
    out[0] = 10 * a[0] + b[0]


def test_arrays_of_two_device_functions_from_one_factory_do_not_alias():
    assert run(arrays_of_two_functions, np.zeros(1, np.int32), threads=1)[0] == 12


@cuda.jit
def dynamic_views(out):
    words = cuda.shared.array(0, int32)
    bytes_ = cuda.shared.array(0, int8)
    i = cuda.threadIdx.x
    words[i] = 0x01020304 + i
    cuda.syncthreads()
    out[i] = bytes_[4 * i] + 100 * bytes_[4 * i + 3]


def test_views_of_dynamic_shared_memory_alias():
    out = run(dynamic_views, np.zeros(8, np.int32), threads=8, shared_bytes=32)
    np.testing.assert_array_equal(out, 100 + 4 + np.arange(8))


@cuda.jit
def array_in_a_loop(out):
    i = cuda.threadIdx.x
    for step in range(3):
        total = cuda.shared.array(32, int32)
        if step == 0:
            total[i] = i
        else:
            total[i] += 100
    out[i] = total[i]


def test_a_shared_array_in_a_loop_is_one_array():
    np.testing.assert_array_equal(run(array_in_a_loop, np.zeros(32, np.int32)), LANES + 200)


@cuda.jit
def blocks_have_their_own(out):
    count = cuda.shared.array(1, int32)
    mine = cuda.local.array((2, 2), int32)
    if cuda.threadIdx.x == 0:
        count[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(count, 0, 1)
    mine[1, 0] = cuda.threadIdx.x
    cuda.syncthreads()
    out[cuda.grid(1)] = 100 * count[0] + mine[1, 0]


def test_shared_memory_is_a_blocks_own_and_local_memory_a_threads():
    out = run(blocks_have_their_own, np.zeros(96, np.int32), blocks=3)
    np.testing.assert_array_equal(out, 3200 + np.tile(LANES, 3))


# Shuffles and votes


@cuda.jit
def shuffles(out, shift):
    i = cuda.threadIdx.x
    value = 100 + i
    out[0, i] = cuda.shfl_sync(FULL_MASK, value, (i + shift) % 32)
    out[1, i] = cuda.shfl_up_sync(FULL_MASK, value, shift)
    out[2, i] = cuda.shfl_down_sync(FULL_MASK, value, shift)
    out[3, i] = cuda.shfl_xor_sync(FULL_MASK, value, shift)


@pytest.mark.parametrize("shift", [0, 1, 5, 16, 31])
def test_shuffles(shift):
    out = run(shuffles, np.zeros((4, 32), np.int32), shift)
    up = np.where(LANES >= shift, LANES - shift, LANES)
    down = np.where(LANES + shift < 32, LANES + shift, LANES)
    expected = [(LANES + shift) % 32, up, down, LANES ^ shift]
    np.testing.assert_array_equal(out, 100 + np.array(expected))


@cuda.jit
def partial_shuffle(out, kept):
    i = cuda.threadIdx.x
    if i % 4 == 1:
        out[i] = cuda.shfl_sync(0x22222222, float32(i) / float32(4.0), 29)
        kept[i] = cuda.shfl_xor_sync(0x22222222, uint32(i), 4)


def test_shuffle_under_a_partial_mask():
    out, kept = np.zeros(64, np.float32), np.zeros(64, np.uint32)
    run(partial_shuffle, out, kept, threads=64)
    lanes = np.arange(64)
    np.testing.assert_array_equal(out, np.where(lanes % 4 == 1, lanes // 32 * 8 + 7.25, 0))
    np.testing.assert_array_equal(kept, np.where(lanes % 4 == 1, lanes ^ 4, 0))


@cuda.jit
def votes(out, predicates):
    i = cuda.threadIdx.x
    p = predicates[i]
    out[0, i] = cuda.all_sync(FULL_MASK, p)
    out[1, i] = cuda.any_sync(FULL_MASK, p)
    out[2, i] = cuda.eq_sync(FULL_MASK, p)
    out[3, i] = cuda.ballot_sync(FULL_MASK, p)
    half = 0xFFFF if i < 16 else 0xFFFF0000
    out[4, i] = cuda.all_sync(half, p)
    out[5, i] = cuda.any_sync(half, p)
    out[6, i] = cuda.eq_sync(half, p)
    out[7, i] = cuda.ballot_sync(half, p)


@pytest.mark.parametrize(
    "bits", [0, 0xFFFFFFFF, 1, 0xFFFF, 0xFFFF0000, 0x80000001, 0x0001FFFF], ids=hex
)
def test_votes(bits):
    predicates = np.array([bits >> lane & 1 for lane in LANES], np.int32)
    out = run(votes, np.full((8, 32), -7, np.int64), predicates)
    for row, mask_of in ((0, lambda i: 0xFFFFFFFF), (4, lambda i: 0xFFFF << 16 * (i // 16))):
        for i in LANES:
            mask = mask_of(int(i))
            voted = bits & mask
            ballot = np.uint32(voted).view(np.int32)  # ballot_sync is an int32 in Numba
            expected = [voted == mask, voted != 0, voted in (0, mask), ballot]
            assert out[row : row + 4, i].tolist() == expected


@cuda.jit
def matches(out, values):
    i = cuda.threadIdx.x
    out[0, i] = cuda.match_any_sync(FULL_MASK, values[i])
    mask, same = cuda.match_all_sync(FULL_MASK, values[i])
    out[1, i] = mask
    out[2, i] = same
    if i < 4:
        out[3, i] = cuda.match_any_sync(0xF, values[i])
        mask, same = cuda.match_all_sync(0xF, values[i])
        out[4, i] = mask + 100 * same


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_matches(dtype, period):
    values = (LANES % period).astype(dtype)
    out = run(matches, np.zeros((5, 32), np.int64), values)
    alike = [sum(1 << int(j) for j in LANES if values[j] == values[i]) for i in LANES]
    np.testing.assert_array_equal(out[0], np.array(alike, np.uint32).view(np.int32))
    assert set(out[1]) == {-1 if period == 1 else 0}
    assert set(out[2]) == {int(period == 1)}
    assert out[3, :4].tolist() == [bits & 0xF for bits in alike[:4]]
    assert set(out[4, :4]) == {115 if period == 1 else 0}


@cuda.jit
def active_lanes(out):
    i = cuda.threadIdx.x
    if i % 3 == 0:
        return
    cuda.nanosleep(10)
    out[i] = cuda.activemask()
    out[i + 64] = cuda.lanemask_lt()
    cuda.nanosleep(10)


def test_activemask_leaves_out_lanes_that_have_exited():
    out = run(active_lanes, np.zeros(128, np.uint32), threads=40)
    alive = [i for i in range(40) if i % 3]
    masks = [sum(1 << i % 32 for i in alive if i // 32 == warp) for warp in (0, 1)]
    assert [out[i] for i in alive] == [masks[i // 32] for i in alive]
    assert [out[i + 64] for i in alive] == [(1 << i % 32) - 1 for i in alive]


@cuda.jit
def barriers_that_count(out, predicates):
    i = cuda.threadIdx.x
    p = predicates[i]
    out[0, i] = cuda.syncthreads_count(p)
    out[1, i] = cuda.syncthreads_and(p)
    out[2, i] = cuda.syncthreads_or(p)


@pytest.mark.parametrize("ones", [0, 1, 17, 64])
def test_barriers_that_count(ones):
    predicates = (np.arange(64) < ones).astype(np.int32) * 5
    out = run(barriers_that_count, np.zeros((3, 64), np.int32), predicates, threads=64)
    assert np.unique(out, axis=1).ravel().tolist() == [ones, ones == 64, ones > 0]


# Bits


@cuda.jit
def bit_counts(out, words, longs):
    i = cuda.threadIdx.x
    out[0, i] = cuda.popc(words[i])
    out[1, i] = cuda.clz(words[i])
    out[2, i] = cuda.ffs(words[i])
    out[3, i] = cuda.brev(words[i])
    out[4, i] = cuda.popc(longs[i])
    out[5, i] = cuda.clz(longs[i])
    out[6, i] = cuda.ffs(longs[i])
    out[7, i] = cuda.brev(longs[i])


def test_bit_operations():
    words = np.array([0, 1, 2, 0x80000000, 0xFFFFFFFF, 0b10110110, 0x00F0000], np.uint32)
    longs = words.astype(np.uint64) << np.uint64(3)
    out = run(bit_counts, np.zeros((8, 7), np.uint64), words, longs, threads=7)
    for row, width, values in ((0, 32, words), (4, 64, longs)):
        for i, value in enumerate(values):
            text = f"{int(value):0{width}b}"
            leading = len(text) - len(text.lstrip("0"))
            lowest = len(text) - len(text.rstrip("0")) + 1 if value else 0
            expected = [text.count("1"), leading, lowest, int(text[::-1], 2)]
            assert out[row : row + 4, i].tolist() == expected


@cuda.jit
def bits_of_negative(out):
    out[0] = cuda.popc(int32(-1))
    out[1] = cuda.clz(int32(-1))
    out[2] = cuda.ffs(int32(-8))
    out[3] = cuda.selp(out[0] > 31, 5, 6)


def test_bits_of_negative_numbers():
    assert run(bits_of_negative, np.zeros(4, np.int32), threads=1).tolist() == [32, 0, 4, 5]


# Atomics


@cuda.jit
def ticket(out, count):
    out[cuda.atomic.add(count, 0, 1)] = cuda.grid(1) + 1


def test_atomic_add_returns_every_old_value_once():
    for seed in (None, 1, 2):
        out, count = np.zeros(128, np.int32), np.zeros(1, np.int32)
        simulate(ticket, seed=seed)[2, 64](out, count)
        assert count[0] == 128
        assert sorted(out) == list(range(1, 129))


@cuda.jit
def atomics_of_one_thread(a, old):
    old[0] = cuda.atomic.add(a, 0, 5)
    old[1] = cuda.atomic.sub(a, 1, 5)
    old[2] = cuda.atomic.and_(a, 2, 0b0110)
    old[3] = cuda.atomic.or_(a, 3, 0b0110)
    old[4] = cuda.atomic.xor(a, 4, 0b0110)
    old[5] = cuda.atomic.exch(a, 5, 77)
    old[6] = cuda.atomic.max(a, 6, 4)
    old[7] = cuda.atomic.min(a, 7, 4)
    old[8] = cuda.atomic.cas(a, 8, 3, 9)
    old[9] = cuda.atomic.cas(a, 9, 4, 9)
    old[10] = cuda.atomic.inc(a, 10, 3)
    old[11] = cuda.atomic.dec(a, 11, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_atomics_change_the_element_and_return_the_old_one(dtype):
    a, old = np.full(12, 3, dtype), np.zeros(12, dtype)
    run(atomics_of_one_thread, a, old, threads=1)
    assert set(old) == {3}
    wrapped = (3 - 5) % (1 << 8 * a.itemsize) if np.issubdtype(dtype, np.unsignedinteger) else -2
    assert a.tolist() == [8, wrapped, 2, 7, 5, 77, 4, 3, 9, 3, 0, 2]


@cuda.jit
def swaps_element_0(a, b, old):
    old[0] = cuda.atomic.compare_and_swap(a, 3, 9)
    old[1] = cuda.atomic.compare_and_swap(b, 4, 9)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_compare_and_swap_changes_element_0_if_it_is_as_expected(dtype):
    a, b, old = np.full(2, 3, dtype), np.full(2, 3, dtype), np.zeros(2, dtype)
    run(swaps_element_0, a, b, old, threads=1)
    assert (a.tolist(), b.tolist(), old.tolist()) == ([9, 3], [3, 3], [3, 3])


@cuda.jit
def takes_a_ticket(out, lock):
    if cuda.atomic.compare_and_swap(lock, 0, 1) == 0:
        cuda.atomic.add(out, 0, 1)


def test_compare_and_swap_lets_one_thread_in():
    out, lock = np.zeros(1, np.int32), np.zeros(1, np.int32)
    assert run(takes_a_ticket, out, lock, threads=64)[0] == 1
    assert lock[0] == 1


@cuda.jit
def atomics_that_wrap(a, b):
    cuda.atomic.add(a, 0, 1)
    cuda.atomic.sub(a, 1, 1)
    cuda.atomic.max(a, 2, -1)
    cuda.atomic.inc(a, 3, 10)
    cuda.atomic.inc(a, 4, 10)
    cuda.atomic.dec(a, 5, 10)
    cuda.atomic.dec(a, 6, 10)
    cuda.atomic.add(b, (0, 1), 1)


def test_atomics_wrap():
    a = np.array([2**32 - 1, 0, 7, 10, 9, 0, 12], np.uint32)
    b = np.array([[0, 2**31 - 1]], np.int32)
    run(atomics_that_wrap, a, b, threads=1)
    assert a.tolist() == [0, 2**32 - 1, 2**32 - 1, 0, 10, 10, 10]
    assert b.tolist() == [[0, -(2**31)]]


@cuda.jit
def float_atomics(a, value):
    cuda.atomic.max(a, 0, value)
    cuda.atomic.min(a, 1, value)
    cuda.atomic.nanmax(a, 2, value)
    cuda.atomic.nanmin(a, 3, value)
    cuda.atomic.add(a, 4, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "start, value, expected",
    [
        (1.0, 2.0, [2.0, 1.0, 2.0, 1.0, 3.0]),
        (2.0, 1.0, [2.0, 1.0, 2.0, 1.0, 3.0]),
        # Numba leaves the element alone when either is NaN; the nan forms pick the number.
        (1.0, math.nan, [1.0, 1.0, 1.0, 1.0, math.nan]),
        (math.nan, 1.0, [math.nan, math.nan, 1.0, 1.0, math.nan]),
        (-math.inf, 0.0, [0.0, -math.inf, 0.0, -math.inf, -math.inf]),
    ],
    ids=["larger", "smaller", "nan-value", "nan-element", "infinite"],
)
def test_float_atomics(dtype, start, value, expected):
    out = run(float_atomics, np.full(5, start, dtype), dtype(value), threads=1)
    np.testing.assert_array_equal(out, np.array(expected, dtype))


@cuda.jit
def atomic_float_sum(out):
    cuda.atomic.add(out, 0, 0.1)
    cuda.atomic.add(out, 1, float32(16777216.0))
    cuda.atomic.add(out, 1, float32(1.0))


def test_atomic_float32_add_rounds_each_time():
    out = run(atomic_float_sum, np.zeros(2, np.float32), threads=8)
    expected = np.float32(0)
    for _ in range(8):
        expected = expected + np.float32(0.1)
    assert out[0] == expected


@cuda.jit
def spin_lock(count, lock):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()
    value = count[0]
    cuda.nanosleep(10)
    count[0] = value + 1
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)


def test_a_spin_lock_makes_progress():
    assert run(spin_lock, np.zeros(1, np.int32), np.zeros(1, np.int32), threads=40)[0] == 40


# Numbers

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
floats64 = st.floats(allow_nan=False, allow_infinity=False)


def nearest(exact: Fraction, dtype: type) -> float:
    """`exact` rounded once, half to even; infinity past the largest finite number."""
    info = np.finfo(dtype)
    if exact == 0:
        return 0.0
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, int(info.minexp)) - info.nmant)
    rounded = round(exact / unit) * unit
    if abs(rounded) > Fraction(float(info.max)):
        return math.inf if rounded > 0 else -math.inf
    return float(rounded)


@given(floats32, floats32, floats32)
def test_fma_of_float32_is_rounded_once(a, b, c):
    with np.errstate(all="ignore"):
        result = simulated_fma(np.float32(a), np.float32(b), np.float32(c))
    assert type(result) is np.float32
    assert float(result) == nearest(Fraction(a) * Fraction(b) + Fraction(c), np.float32)


@given(
    st.integers(1, 2**24), st.integers(1, 2**24), st.integers(-(2**25), 2**25), st.integers(0, 60)
)
def test_fma_of_float32_is_rounded_once_near_ties(a, b, c, shift):
    a, b, c = np.float32(a), np.float32(b), np.float32(c * 2.0**shift)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    assert float(simulated_fma(a, b, c)) == nearest(exact, np.float32)


@given(floats64, floats64, floats64)
def test_fma_of_float64_is_rounded_once(a, b, c):
    result = simulated_fma(np.float64(a), np.float64(b), np.float64(c))
    assert type(result) is np.float64
    assert float(result) == nearest(Fraction(a) * Fraction(b) + Fraction(c), np.float64)


@cuda.jit
def fma_of_edges(out):
    inf = float32(math.inf)
    out[0] = cuda.fma(inf, float32(1.0), -inf)
    out[1] = cuda.fma(inf, float32(0.0), float32(1.0))
    out[2] = cuda.fma(inf, float32(-2.0), float32(1.0))
    out[3] = cuda.fma(float32(3e38), float32(10.0), float32(0.0))
    out[4] = cuda.fma(float32(1.0) + float32(2**-12), float32(1.0) - float32(2**-12), float32(-1.0))


def test_fma_of_infinities():
    out = run(fma_of_edges, np.zeros(5, np.float32), threads=1)
    np.testing.assert_array_equal(out, np.array([np.nan, np.nan, -np.inf, np.inf, -(2.0**-24)]))


@cuda.jit
def math_edges(out):
    out[0] = math.exp(float32(1000.0))
    out[1] = math.log(float32(0.0))
    out[2] = math.sqrt(float32(-1.0))
    out[3] = math.exp(float32(-math.inf))
    out[4] = float32(1.0) / float32(0.0)
    out[5] = float32(0.0) / float32(0.0)
    out[6] = 1.0 / float(0.0)
    out[7] = math.log(float32(-1.0))
    out[8] = math.pow(float32(0.0), float32(-1.0))
    out[9] = math.cosh(float32(1000.0))


def test_math_at_its_edges_gives_infinities_and_nan():
    out = run(math_edges, np.zeros(10, np.float32), threads=1)
    inf, nan = np.inf, np.nan
    np.testing.assert_array_equal(out, [inf, -inf, nan, 0, inf, nan, inf, nan, inf, inf])


FUNCTIONS = ["exp", "exp2", "log", "log2", "log1p", "sqrt", "sin", "cos", "tanh", "atan", "fabs"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_math_functions_keep_the_type(name, dtype):
    function = getattr(math, name)

    @cuda.jit
    def apply(out, values, kept):
        i = cuda.threadIdx.x
        y = function(values[i])
        out[i] = y
        # In float32 1 + 2**-30 is 1: shows the type in which the sum was computed.
        kept[i] = (y - y + values[0] + values[1]) == values[0]

    values = np.array([1.0, 2.0**-30, 0.3, 7.7], dtype)
    out, kept = np.zeros(4), np.zeros(4, np.bool_)
    run(apply, out, values, kept, threads=4)
    exact = getattr(np, {"atan": "arctan"}.get(name, name))(values.astype(np.float64))
    np.testing.assert_allclose(out, exact.astype(dtype), rtol=np.finfo(dtype).eps)
    assert kept.tolist() == [dtype is np.float32] * 4


@cuda.jit
def literal_types(out, x, scale):
    tiny = x[1]
    out[0] = (x[0] * 1.0 + tiny) != x[0]
    out[1] = (x[0] * scale + tiny) != x[0]
    out[2] = (x[0] + float32(0.0) + tiny) != x[0]
    out[3] = (x[0] * math.pi / math.pi + tiny) != x[0]
    out[4] = (x[0] * TWO + tiny) != float32(2.0)
    out[5] = (x[0] * float(1) + tiny) != x[0]


TWO = 2.0


def test_float_literals_arguments_and_globals_are_float64():
    x = np.array([1.0, 2.0**-30], np.float32)
    out = run(literal_types, np.zeros(6, np.bool_), x, 1.0, threads=1)
    assert out.tolist() == [True, True, False, True, True, True]


def test_a_float32_argument_stays_float32():
    x = np.array([1.0, 2.0**-30], np.float32)
    assert not run(literal_types, np.zeros(6, np.bool_), x, np.float32(1.0), threads=1)[1]


@cuda.jit
def floats_that_meet_integers(out, x, three):
    # 1 + 2**-30 is 1 in float32 and not in float64, where compiled Numba computes the first three.
    i = cuda.blockDim.x
    out[0] = (x[0] * i + x[1]) != x[0]
    out[1] = (x[0] * (i / i) + x[1]) != x[0]
    out[2] = (x[0] + x[1] + three - three) != x[0]
    out[3] = (x[0] * float32(i) + x[1]) != x[0]


def test_known_limit_a_float32_that_meets_an_integer_stays_float32():
    x = np.array([1.0, 2.0**-30], np.float32)
    out = run(floats_that_meet_integers, np.ones(4, np.bool_), x, 3, threads=1)
    assert out.tolist() == [False] * 4


@cuda.jit
def integer_quotient(out, x):
    i = cuda.blockDim.x
    out[0] = x[0] * (i / 3)
    out[1] = x[0] * (float32(i) / float32(3.0))


def test_known_limit_an_integer_quotient_yields_to_float32():
    x = np.array([0.1], np.float32)
    out = run(integer_quotient, np.zeros(2), x, threads=1)
    assert out.tolist() == [float(x[0] * np.float32(1 / 3))] * 2
    assert out[0] != float(x[0]) * (1 / 3)  # what compiled Numba stores


@cuda.jit
def bits_as_numbers(out, x):
    out[0] = libdevice.int_as_float(0x3FC00000) == float32(1.5)
    out[1] = libdevice.int_as_float(-(2**31) + 0x3FC00000) == float32(-1.5)
    out[2] = libdevice.float_as_int(x[0]) == 0x3FC00000
    out[3] = libdevice.float_as_int(-x[0]) == -(2**31) + 0x3FC00000


def test_libdevice_bit_casts():
    out = run(bits_as_numbers, np.zeros(4, np.bool_), np.array([1.5], np.float32), threads=1)
    assert out.all()


@cuda.jit
def integer_casts(out, floats):
    out[0] = int32(2**31)
    out[1] = uint32(-1)
    out[2] = int8(200)
    out[3] = uint16(70000)
    out[4] = int64(2**63)
    out[5] = int32(floats[0])
    out[6] = int32(floats[1])
    out[7] = int(floats[1])
    out[8] = int32(uint32(3000000000))
    out[9] = int32(2**30) + int32(2**30)


def test_integer_casts_wrap_and_truncate_and_sums_are_64_bits_wide():
    out = run(integer_casts, np.zeros(10, np.int64), np.array([2.9, -2.9], np.float32), threads=1)
    expected = [-(2**31), 2**32 - 1, -56, 4464, -(2**63), 2, -2, -2, -1294967296, 2**31]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_integer_stores_wrap(dtype):
    @cuda.jit
    def store(out, values):
        i = cuda.threadIdx.x
        tile = cuda.shared.array(4, dtype)
        tile[i] = values[i] * 3
        out[i] = tile[i]

    values = np.array([-1, 100, 2**31, -(2**40)], np.int64)
    out = run(store, np.zeros(4, dtype), values, threads=4)
    np.testing.assert_array_equal(out, (values * 3).astype(dtype))


@cuda.jit
def unsigned_64(out):
    out[0] = uint64(2**63) + uint64(2**63) + uint64(5)
    out[1] = uint64(0) - uint64(1)
    out[2] = -1


def test_uint64_wraps():
    assert run(unsigned_64, np.zeros(3, np.uint64), threads=1).tolist() == [5, 2**64 - 1, 2**64 - 1]


HALF_TYPES = [(np.float16, float16), (ml_dtypes.bfloat16, bfloat16)]


@pytest.mark.parametrize("dtype, numba_type", HALF_TYPES, ids=["float16", "bfloat16"])
def test_half_precision_rounds_after_every_operation(dtype, numba_type):
    @cuda.jit
    def arithmetic(out, a, b):
        i = cuda.threadIdx.x
        out[0, i] = a[i] * b[i] + a[i]
        out[1, i] = float32(a[i]) * float32(b[i]) + float32(a[i])
        out[2, i] = numba_type(float32(a[i]) * float32(b[i]))

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(32).astype(dtype) for _ in range(2))
    out = run(arithmetic, np.zeros((3, 32), np.float32), a, b)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    product = (a32 * b32).astype(dtype)
    np.testing.assert_array_equal(out[0], (product.astype(np.float32) + a32).astype(dtype))
    np.testing.assert_array_equal(out[1], a32 * b32 + a32)
    np.testing.assert_array_equal(out[2], product)
    assert (out[0] != out[1]).any()


def test_half_precision_stores_round_to_nearest_even_and_overflow_to_infinity():
    @cuda.jit
    def store(halves, brains, values):
        i = cuda.threadIdx.x
        halves[i] = values[i]
        brains[i] = values[i]

    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 1 + 2**-8], np.float32)
    halves, brains = np.zeros(5, np.float16), np.zeros(5, ml_dtypes.bfloat16)
    run(store, halves, brains, values, threads=5)
    assert halves.tolist() == [1, 1 + 2**-9, 65504, math.inf, 1 + 2**-8]
    assert brains.tolist() == [1, 1, 65536, 65536, 1]


@cuda.jit
def extremes(out, x):
    out[0] = max(x[0], x[1])
    out[1] = max(x[1], x[0])
    out[2] = min(x[0], x[1])
    out[3] = min(x[1], x[0])
    out[4] = max(x[1], x[1])
    out[5] = max(x[1], x[0], x[2])
    out[6] = min(x[1], x[0], x[2])
    out[7] = max(3, 5)


def test_max_and_min_prefer_numbers_to_nan():
    x = np.array([1.0, np.nan, 2.0], np.float32)
    out = run(extremes, np.zeros(8, np.float32), x, threads=1)
    np.testing.assert_array_equal(out, [1, 1, 1, 1, np.nan, 2, 1, 5])


# What a kernel may name


@cuda.jit(device=True)
def double(x):
    return x + x


class Namespace:
    twice = double


def make_kernel_with_closure(function, amount):
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = function(i) + amount

    return kernel


@cuda.jit
def calls_global(out):
    out[cuda.threadIdx.x] = double(cuda.threadIdx.x) + 1


this_module = sys.modules[__name__]


@cuda.jit
def calls_module_attribute(out):
    out[cuda.threadIdx.x] = this_module.double(cuda.threadIdx.x) + 1


@pytest.mark.parametrize(
    "kernel",
    [make_kernel_with_closure(double, np.int32(1)), calls_global, calls_module_attribute],
    ids=["closure", "global", "module"],
)
def test_device_functions_are_found(kernel):
    np.testing.assert_array_equal(run(kernel, np.zeros(32, np.int32)), 2 * LANES + 1)


@cuda.jit
def direct_names(out):
    tile = shared.array(32, float32)
    mine = local.array(1, int32)
    i = threadIdx.x
    mine[0] = grid(1)
    tile[31 - i] = mine[0]
    syncthreads()
    atomic.add(out, i, tile[i] + float32(blockIdx.x))


add = cuda.atomic.add
shared_array = cuda.shared.array


@cuda.jit
def names_of_operations(out):
    tile = shared_array(32, float32)
    tile[31 - cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncthreads()
    add(out, cuda.threadIdx.x, tile[cuda.threadIdx.x])


@pytest.mark.parametrize("kernel", [direct_names, names_of_operations], ids=["from", "assigned"])
def test_names_imported_from_numba_cuda(kernel):
    np.testing.assert_array_equal(run(kernel, np.zeros(32, np.float32)), 31 - LANES)


TABLE = np.array([3, 5, 7], np.uint8)


@cuda.jit
def reads_a_global_array(out):
    table = cuda.const.array_like(TABLE)
    out[0] = TABLE[1] * 100 + table[2]


def test_global_arrays_are_constants():
    assert run(reads_a_global_array, np.zeros(1, np.int32), threads=1)[0] == 507


@cuda.jit
def slices(out, a):
    i = cuda.threadIdx.x
    row = a[i]
    part = row[2:6]
    square = part.reshape((2, 2))
    out[i, 0] = square[1, 0]
    out[i, 1] = a[:, 1][i]
    out[i, 2] = a.T[3, i]
    out[i, 3] = len(part) + 10 * a.ndim + 100 * a.shape[0] + 10000 * a.size
    flat = a[1:3].reshape(16)
    square[0, 1] = flat[8 + i] - flat[8 + i] + 50 + i


def test_slices_and_reshapes_are_views():
    a = np.arange(32, dtype=np.float32).reshape(4, 8)
    before = a.copy()
    out = run(slices, np.zeros((4, 4), np.float32), a, threads=4)
    expected = [[row[4], row[1], row[3], 320424] for row in before]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(a[:, 3], 50 + np.arange(4))


@cuda.jit
def strided(out, a):
    out[cuda.threadIdx.x] = a[cuda.threadIdx.x, 1]


def test_strided_arguments_are_read_and_written_in_place():
    a = np.arange(64, dtype=np.int32).reshape(8, 8)
    out = np.zeros(8, np.int32)
    simulate(strided)[1, 4](out[::-2], a[::2, ::-3])
    np.testing.assert_array_equal(out, [0, 52, 0, 36, 0, 20, 0, 4])


@cuda.jit
def defaults(out, a=2, b=0.5):
    out[0] = a + b


@pytest.mark.parametrize("arguments, sum_", [((), 2.5), ((3,), 3.5), ((3, 0.25), 3.25)], ids=str)
def test_default_arguments(arguments, sum_):
    assert run(defaults, np.zeros(1), *arguments, threads=1)[0] == sum_


# Control flow


@cuda.jit
def early_return(out, n):
    i = cuda.grid(1)
    if i >= n:
        return
    out[i] = i


def test_threads_past_the_end_may_leave_early():
    out = run(early_return, np.full(64, -1, np.int32), 50, blocks=2)
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 50, np.arange(64), -1))


@cuda.jit
def block_sum(out, x):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    total = float32(0.0)
    for j in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[j]
    tile[i] = total
    cuda.syncthreads()
    step = 32
    while step > 0:
        if i < step:
            tile[i] += tile[i + step]
        cuda.syncthreads()
        step //= 2
    if i == 0:
        cuda.atomic.add(out, 0, tile[0])


def test_tree_reduction_with_loops_and_barriers():
    x = np.arange(1000, dtype=np.float32)
    assert run(block_sum, np.zeros(1, np.float32), x, threads=64, blocks=3)[0] == x.sum()


def test_one_process_may_simulate_again_and_in_another_thread():
    results = []

    def work():
        x = np.arange(300, dtype=np.float32)
        out = np.zeros(1, np.float32)
        simulate(block_sum, max_seconds=60)[2, 64](out, x)
        results.append(float(out[0]))

    work()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert results == [44850.0] * 4


def test_numpy_warns_of_nothing_in_a_kernel_and_of_everything_after_it():
    @cuda.jit
    def overflow(out):
        out[0] = float32(3e38) * float32(10.0) - float32(math.inf)

    with np.errstate(all="raise"):
        run(overflow, np.zeros(1, np.float32), threads=1)
        with pytest.raises(FloatingPointError):
            np.float32(3e38) * np.float32(10)


def test_float64_is_float64():
    @cuda.jit
    def sums(out):
        out[0] = float64(1.0) + float64(2**-40)

    assert run(sums, np.zeros(1), threads=1)[0] == 1 + 2**-40
