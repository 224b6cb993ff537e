"""What the simulator counts, against counts by hand, on small kernels; reports add and compare."""

import linecache
import math
import time
import types
import warnings

import numpy as np
import pytest
from numba import cuda
from numba.cuda import float32, float64, int32

from fa2_numba import Report, Simulator, flash_attn_func, simulate
from fa2_numba.config import TileConfig
from fa2_numba.device import device_function
from fa2_numba.errors import ArgumentError, ArgumentTypeError
from fa2_numba.kernels import fa2_split_q
from fa2_numba.simulator import OutOfBoundsError
from fa2_numba.testing import random_qkv

from .conftest import run_rung

WARP = 32
both_modes = pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])


def numbers(size, dtype=np.float32):
    return np.arange(size).astype(dtype)


def count(kernel, *arguments, threads=WARP, blocks=1, shared_bytes=0, **options):
    launch = simulate(kernel, progress=False, **options)[blocks, threads, 0, shared_bytes]
    return launch(*arguments)


# Global memory


@cuda.jit
def copy(x, y, stride):
    i = cuda.grid(1)
    y[i] = x[stride * i]


@both_modes
@pytest.mark.parametrize(
    ("dtype", "stride", "sectors"),
    [
        (np.float32, 1, 4),
        (np.float32, 2, 8),
        (np.float32, 8, 32),
        (np.float32, 100, 32),
        (np.float32, 0, 1),
        (np.float16, 1, 2),
        (np.float64, 1, 8),
        (np.uint8, 1, 1),
    ],
)
def test_requests_bytes_and_sectors_of_a_copy(dtype, stride, sectors, checks):
    x, y = numbers(64 * 100 + 1, dtype), np.zeros(64, dtype)
    report = count(copy, x, y, stride, blocks=2, checks=checks)
    size = np.dtype(dtype).itemsize
    assert report.global_load_requests == report.global_store_requests == 2
    assert report.global_load_bytes == report.global_store_bytes == 64 * size
    assert report.blocks[0].counts.global_load_sectors == sectors
    assert report.global_store_sectors == 2 * size
    np.testing.assert_array_equal(y, x[stride * np.arange(64)])


def test_strides_of_an_argument_are_those_of_its_memory():
    matrix = np.zeros((32, 32), np.float32)
    rows, columns = np.zeros(32, np.float32), matrix.T

    @cuda.jit
    def first_row(x, y):
        y[cuda.threadIdx.x] = x[0, cuda.threadIdx.x]

    assert count(first_row, matrix, rows).global_load_sectors == 4
    assert count(first_row, columns, rows).global_load_sectors == 32
    assert count(first_row, matrix[:, ::-1], rows).global_load_sectors == 4


def test_idle_lanes_ask_for_nothing():
    @cuda.jit
    def few(x, y):
        i = cuda.threadIdx.x
        if i % 2 == 0 and i < 20:
            y[i] = x[i]

    report = count(few, numbers(32), numbers(32))
    assert (report.global_load_requests, report.global_load_bytes) == (1, 40)
    assert report.global_load_sectors == 3


# Lanes that take different ways


@cuda.jit
def ragged_rows(x, y, columns):
    """Lanes past the last column skip part of every row, as in loading a tile."""
    lane = cuda.threadIdx.x
    for row in range(3):
        for part in range(2):
            d = lane + 32 * part
            if d < columns:
                y[row, d] = x[row, d]


@both_modes
@pytest.mark.parametrize("columns", [40, 64, 8])
def test_lanes_that_skip_accesses_still_meet_in_the_same_iteration(columns, checks):
    x, y = np.ones((3, 64), np.float32), np.zeros((3, 64), np.float32)
    report = count(ragged_rows, x, y, columns, checks=checks)
    requests = 3 * math.ceil(columns / 32)
    assert report.global_load_requests == report.global_store_requests == requests
    assert report.global_load_bytes == 3 * columns * 4
    assert report.global_load_sectors == 3 * columns * 4 // 32


def test_two_branches_are_two_requests():
    @cuda.jit
    def branch(x, y):
        i = cuda.threadIdx.x
        if i < 16:
            y[i] = x[i]
        else:
            y[i] = x[i] + x[i]

    report = count(branch, numbers(32), numbers(32))
    assert (report.global_load_requests, report.global_store_requests) == (3, 2)


def test_loops_of_different_length():
    @cuda.jit
    def triangle(x, y):
        i = cuda.threadIdx.x
        total = float32(0.0)
        for j in range(i + 1):
            total += x[j]
        y[i] = total

    report = count(triangle, numbers(32), numbers(32))
    assert report.global_load_requests == 32  # iteration j: lanes j to 31 read x[j]
    assert report.global_load_sectors == 32
    assert report.global_load_bytes == 4 * 32 * 33 // 2
    assert report.additions == 32 * 33 // 2


def test_a_while_loop():
    @cuda.jit
    def halve(x, y):
        i = cuda.threadIdx.x
        n = i
        while n > 0:
            y[i] = x[n]
            n //= 2

    report = count(halve, numbers(32), numbers(32))
    assert report.global_load_requests == 5  # lane 31 reads x[31], x[15], x[7], x[3], x[1]
    assert report.global_load_bytes == 4 * sum(n.bit_length() for n in range(32))


def in_while(x, y, n):
    i, k = cuda.threadIdx.x, 0
    while k < n:
        if i % 2 == k % 2:
            y[i] = x[i]
        k += 1


def in_for_over_a_tuple(x, y, n):
    i = cuda.threadIdx.x
    for k in (0, 1, 2, 3):
        if i % 2 == k % 2:
            y[i] = x[i]


def in_for_with_break_and_else(x, y, n):
    i = cuda.threadIdx.x
    for k in range(9):
        if k == n:
            break
        if i % 2 != k % 2:
            continue
        y[i] = x[i]
    else:
        y[i] = x[i]


@pytest.mark.parametrize(
    "kernel", [in_while, in_for_over_a_tuple, in_for_with_break_and_else], ids=lambda k: k.__name__
)
def test_every_kind_of_loop_tells_its_iterations_apart(kernel):
    report = count(kernel, numbers(32), numbers(32), 4)
    assert (report.global_load_requests, report.global_store_requests) == (4, 4)


def test_a_thread_is_where_it_was_after_a_loop():
    @cuda.jit
    def after(x, y):
        i = cuda.threadIdx.x
        n = i % 2
        for a, b in zip(range(n), range(n), strict=True):
            y[i] = float32(a + b)
        for _ in range(i):
            n += 1
        else:
            y[i] = float32(n)
        y[i] = x[i]

    report = count(after, numbers(32), numbers(32))
    assert report.global_load_requests == 1
    assert report.global_store_requests == 3


def test_lanes_that_read_different_arrays_share_no_sector():
    @cuda.jit
    def two(x, y, z):
        i = cuda.threadIdx.x
        a = x if i < 16 else y
        z[i] = a[i % 16]

    assert count(two, numbers(16), numbers(16), numbers(32)).global_load_sectors == 4


def test_arguments_of_any_type_and_size():
    record = np.dtype([("a", "f4"), ("b", "f4"), ("c", "f4")])

    @cuda.jit
    def corner(x, huge, y):
        i = cuda.threadIdx.x
        y[i] = huge[i, 10**6 - 1 - i]
        x[i] = x[31 - i]

    huge = np.broadcast_to(np.float32(1), (10**6, 10**6))
    report = count(corner, np.zeros(32, record), huge, numbers(32))
    assert report.global_load_bytes == 32 * (12 + 4)
    assert report.global_load_sectors == 1 + 12


@device_function
def twice_if(x, i, wanted):
    if wanted:
        return x[i] + x[i]
    return float32(0.0)


def test_calls_from_two_lines_are_two_requests():
    @cuda.jit
    def calls(x, y):
        i = cuda.threadIdx.x
        a = twice_if(x, i, i < 16)
        b = twice_if(x, i, i >= 16)
        y[i] = a + b

    report = count(calls, numbers(32), numbers(32))
    assert report.global_load_requests == 4
    assert report.global_load_sectors == 8


# Shared memory


@cuda.jit
def transpose(x, y, stride):
    tile = cuda.shared.array(2048, float32)
    i = cuda.threadIdx.x
    tile[stride * i] = x[i]
    cuda.syncwarp()
    y[i] = tile[stride * i]


@both_modes
@pytest.mark.parametrize(
    ("stride", "replays"), [(1, 0), (2, 1), (4, 3), (16, 15), (32, 31), (33, 0), (17, 0)]
)
def test_bank_conflicts(stride, replays, checks):
    report = count(transpose, numbers(32), numbers(32), stride, checks=checks)
    assert (report.shared_load_replays, report.shared_store_replays) == (replays, replays)
    assert report.bank_conflicts == 2 * replays
    assert report.shared_load_bytes == report.shared_store_bytes == 128
    assert report.shared_load_requests == report.shared_store_requests == 1
    assert report.warp_syncs == 1


def test_broadcasts_and_other_element_sizes_in_shared_memory():
    @cuda.jit
    def sizes(y):
        half = cuda.shared.array(64, np.float16)
        double = cuda.shared.array(64, float64)
        i = cuda.threadIdx.x
        half[i] = np.float16(i)
        double[i] = float64(i)
        cuda.syncwarp()
        y[i] = half[0] + double[i // 2]

    report = count(sizes, np.zeros(32, np.float64))
    assert report.bank_conflicts == 0
    assert report.shared_store_bytes == 32 * (2 + 8)

    @cuda.jit
    def far_doubles(y):
        double = cuda.shared.array(512, float64)
        i = cuda.threadIdx.x
        double[16 * i] = float64(i)
        y[i] = double[16 * i]

    # Each half warp of 16 lanes hits two banks with 16 different words.
    assert count(far_doubles, np.zeros(32)).shared_store_replays == 2 * 15


def test_views_of_dynamic_shared_memory_keep_their_addresses():
    @cuda.jit
    def views(y):
        flat = cuda.shared.array(0, float32)
        i = cuda.threadIdx.x
        matrix = flat[64:1088].reshape((32, 32))
        matrix[i, 0] = float32(i)
        y[i] = matrix.T[0, i]

    report = count(views, numbers(32), shared_bytes=4 * 1088)
    assert (report.shared_load_replays, report.shared_store_replays) == (31, 31)


# Meetings


def test_barriers_shuffles_votes_and_atomics():
    @cuda.jit
    def meet(y):
        tile = cuda.shared.array(1, int32)
        i = cuda.threadIdx.x
        if i == 0:
            tile[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(tile, 0, 1)
        cuda.atomic.add(y, 0, 1)
        if cuda.syncthreads_count(i > 3) > 0:
            cuda.syncwarp()
        if i < 32:
            i = cuda.shfl_sync(0xFFFFFFFF, i, 0)
        cuda.any_sync(0xFFFFFFFF, i > 3)

    report = count(meet, np.zeros(1, np.int32), threads=64, blocks=3)
    assert report.barriers == 2 * 3
    assert (report.warp_syncs, report.shuffles, report.votes) == (2 * 3, 3, 2 * 3)
    assert report.atomics == 2 * 64 * 3
    assert [block.counts.barriers for block in report.blocks] == [2, 2, 2]
    assert [block.index for block in report.blocks] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


# Arithmetic


@both_modes
def test_products_and_other_arithmetic(checks):
    @cuda.jit
    def compute(x, y, scale):
        i = cuda.threadIdx.x
        a = cuda.local.array((2, 2), float32)
        for r in range(2):
            for c in range(2):
                a[r, c] = float32(0.0)
                for k in range(5):
                    a[r, c] += x[k] * scale  # 20 steps of a product
        total = float32(0.0)
        for r in range(2):
            total = total + a[r, 0] * scale  # 2 additions, 2 multiplications
            total -= a[r, 1]  # 2 additions
            total *= scale  # 2 multiplications
        total = cuda.fma(total, scale, total)  # 1 step of a product
        total = max(total, -total)  # 1 maximum
        total = min(total, a[0, 0], a[1, 1])  # 2 maxima
        total = abs(total) / scale  # 1 division
        y[i] = math.exp(total) + math.sqrt(total)  # 2 special, 1 addition

    report = count(compute, numbers(32), numbers(32), np.float32(0.5), checks=checks)
    assert report.multiply_adds == 21 * WARP
    assert report.matmul_flops == 2 * report.multiply_adds
    assert report.additions == 5 * WARP
    assert report.multiplications == 4 * WARP
    assert report.divisions == 1 * WARP
    assert report.maxima == 3 * WARP
    assert report.other_flops == 13 * WARP
    assert report.special_calls == 2 * WARP


def test_integers_indices_and_float64_are_no_float32_operations():
    @cuda.jit
    def others(x, y):
        i = cuda.threadIdx.x
        n = 3 * i + 2
        n += i * 5
        n = max(n, 7) // 2
        z = x[(i + 1) % 32] * 0.5
        z += float64(n) * 2.0
        y[i] = z

    report = count(others, numbers(32), np.zeros(32))
    assert (report.matmul_flops, report.other_flops) == (0, 0)


def test_counting_changes_no_result():
    """What Python folds into a literal is a float64, with hooks as without."""

    @cuda.jit
    def folded(x, y):
        i = cuda.threadIdx.x
        y[i] = x[i] * (1 / 3) + 10**-1

    x, results = numbers(32), []
    for counts in (True, False):
        y = np.zeros(32)
        count(folded, x, y, counts=counts)
        results.append(y)
    np.testing.assert_array_equal(*results)
    assert results[0][1] == 1 / 3 + 0.1
    assert count(folded, x, y).other_flops == 0


def test_powers_and_arithmetic_in_an_index():
    @cuda.jit
    def powers(x, y, p):
        i = cuda.threadIdx.x
        z = x[int(float32(i) * float32(0.5))] ** 2  # 2 multiplications
        z **= 5  # 3 multiplications
        y[i] = z**p  # 1 special call

    report = count(powers, numbers(32), numbers(32), np.float32(1.5))
    assert (report.multiplications, report.special_calls) == (5 * 32, 32)


def test_fma_by_any_name():
    multiply_add = cuda.fma

    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        x[i] = multiply_add(x[i], x[i], cuda.fma(x[i], x[i], x[i]))

    assert count(kernel, numbers(32)).multiply_adds == 64


def test_an_index_is_evaluated_once():
    @device_function
    def next_index(counter):
        counter[0] += 1
        return counter[0] - 1

    @cuda.jit
    def bump(x, counter):
        x[next_index(counter)] += float32(1.0)

    x, counter = np.zeros(4, np.float32), np.zeros(1, np.int64)
    assert count(bump, x, counter, threads=1).additions == 1
    assert counter[0] == 1 and x.tolist() == [1, 0, 0, 0]


def test_names_of_math_and_closures():
    from math import exp as exponential

    half = np.float32(0.5)

    @device_function
    def scaled(x):
        return exponential(x) * half

    @cuda.jit
    def kernel(x):
        x[cuda.threadIdx.x] = scaled(x[cuda.threadIdx.x]) + np.float32(1.0)

    x = np.zeros(32, np.float32)
    report = count(kernel, x)
    assert (report.special_calls, report.multiplications, report.additions) == (32, 32, 32)
    np.testing.assert_array_equal(x, np.full(32, 1.5, np.float32))


# By line


def test_lines_are_those_of_the_kernel():
    @cuda.jit
    def lines(x, y):
        i = cuda.threadIdx.x
        a = twice_if(x, i, True)
        y[i] = a

    report = count(lines, numbers(32), numbers(32))
    first = lines.py_func.__code__.co_firstlineno
    found = {line.line - first: line.traffic for line in report.lines}
    assert {offset: (c.global_load_bytes, c.global_store_bytes) for offset, c in found.items()} == {
        3: (256, 0),
        4: (0, 128),
    }
    assert [line.text for line in report.lines] == ["a = twice_if(x, i, True)", "y[i] = a"]


def test_lines_add_up_to_the_total():
    _, report = attend(random_qkv(1, 40, 33, 2, 1, 16, np.float32), causal=True)
    for name in ("global_load_bytes", "shared_load_bytes", "shared_store_requests"):
        assert sum(getattr(line.traffic, name) for line in report.lines) == getattr(report, name)


# Whole kernels


def attend(qkv, **options):
    return flash_attn_func(*qkv, machine="simulator", report=True, **options)


def test_flash_attn_func_returns_the_report_last():
    qkv = random_qkv(1, 20, 20, 1, 1, 16, np.float32)
    out, lse, report = attend(qkv, return_lse=True, rung="standard")
    assert report.name == "standard"
    assert {block.kernel.split("_")[1] for block in report.blocks} == {
        "scores",
        "softmax",
        "values",
    }
    plain = flash_attn_func(*qkv, machine="simulator", return_lse=True, rung="standard")
    np.testing.assert_array_equal(out, plain[0])
    np.testing.assert_array_equal(lse, plain[1])
    assert len(attend(qkv, return_attn_probs=True)) == 4


def test_a_report_of_nothing():
    q = np.zeros((1, 0, 1, 16), np.float32)
    out, report = attend((q, q, q))
    assert out.shape == q.shape and report.global_load_bytes == 0 and report.blocks == ()
    assert "0 blocks" in str(report)


def test_report_must_be_a_bool_and_needs_the_simulator(monkeypatch):
    qkv = random_qkv(1, 4, 4, 1, 1, 16, np.float32)
    with pytest.raises(ArgumentTypeError, match="report=1"):
        flash_attn_func(*qkv, report=1)
    monkeypatch.setattr("fa2_numba.machines.gpu_available", lambda: True)
    with pytest.raises(ArgumentError, match="report=True"):
        flash_attn_func(*qkv, report=True)


def run_split_q(simulator, length=40, head_dim=32, tiles=None):
    qkv = random_qkv(1, length, length, 1, 1, head_dim, np.float32)
    tiles = tiles or TileConfig(head_dim, 16, 16)
    out, _, reports = run_rung(fa2_split_q.plan_forward, qkv, tiles, simulator, causal=True)
    return reports, out


def test_counts_depend_on_nothing_but_the_kernel():
    reports, outs = zip(
        *(
            run_split_q(Simulator(counts=True, progress=False, checks=checks, seed=seed))
            for checks, seed in ((True, None), (True, 3), (False, None))
        ),
        strict=True,
    )
    plain, out = run_split_q(Simulator(progress=False))
    assert plain == []
    assert reports[0][0].total == reports[1][0].total == reports[2][0].total
    for other in outs:
        np.testing.assert_array_equal(out, other)


@both_modes
def test_counting_takes_at_most_three_times_as_long(checks):
    def seconds(counts):
        start = time.process_time()
        run_split_q(
            Simulator(checks=checks, counts=counts, progress=False), 64, 64, TileConfig(64, 64, 64)
        )
        return time.process_time() - start

    assert min(seconds(True) for _ in range(2)) < 3 * min(seconds(False) for _ in range(2))


def test_without_counts_there_is_no_report():
    x = numbers(32)
    assert simulate(copy, counts=False, progress=False)[1, 32](x, x.copy(), 1) is None


# Sources


def test_without_the_source_all_but_the_arithmetic_is_counted():
    module = types.ModuleType("gone")
    exec("def kernel(x):\n    x[0] = x[0] + x[0]\n", vars(module))
    report = count(module.kernel, np.ones(1, np.float32), threads=1)
    assert report.global_load_requests == 2
    with pytest.raises(ValueError, match="other_flops: not counted; the source of kernel"):
        _ = report.other_flops
    assert "other_flops" not in str(report) and "Arithmetic is not counted" in str(report)
    both = report + count(copy, numbers(32), numbers(32), 1)
    with pytest.raises(ValueError, match="not counted"):
        _ = both.matmul_flops
    assert "matmul_flops" not in report.compare(both).ratios


def test_a_source_that_has_changed_is_not_counted(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text("def kernel(x):\n    x[0] = x[0] + x[0]\n")
    module = types.ModuleType("changed")
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    assert count(module.kernel, np.ones(1, np.float32), threads=1).additions == 1
    path.write_text("def kernel(x):\n    x[0] = x[0] * x[0] * x[0]\n")
    linecache.checkcache()
    with pytest.raises(ValueError, match="has changed since it was compiled"):
        _ = count(module.kernel, np.ones(1, np.float32), threads=1).additions


def test_other_code_in_the_file_does_not_matter(tmp_path):
    path = tmp_path / "beside.py"
    path.write_text(
        "if 1 - 1:\n    def never(): pass\n"
        "def host(a):\n    match a:\n        case 1 + 2j:\n            return '\\d' is a\n"
        f"total = {' + '.join('1' * 900)}\n"
        "def kernel(x):\n    x[0] = x[0] + x[0]\n"
        "first, second = (lambda x: x[0] + x[0]), (lambda x: x[0] * x[0])\n"
    )
    module = types.ModuleType("beside")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count(module.kernel, np.ones(1, np.float32), threads=1).additions == 1
        assert count(module.first, np.ones(1, np.float32), threads=1).additions == 1
        assert count(module.second, np.ones(1, np.float32), threads=1).multiplications == 1


def test_messages_name_the_kernel_s_own_variables():
    @cuda.jit
    def outside(x):
        x[4:][cuda.threadIdx.x] += float32(1.0)

    texts = []
    for counts in (True, False):
        with pytest.raises(OutOfBoundsError) as caught:
            count(outside, numbers(4), threads=1, counts=counts)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "global array x[0]" in texts[0]


def test_blocks_may_be_run_one_by_one():
    launch = simulate(copy, progress=False)[2, 32].prepare(numbers(64), numbers(64), 1, counts=True)
    for block in launch.blocks():
        block.run()
    assert launch.counter.report.global_load_requests == 2


# Reports


def test_blocks_are_in_the_order_of_the_grid():
    x, y = numbers(128), numbers(128)
    reports = [count(copy, x, y, 1, blocks=(2, 2), seed=seed) for seed in (None, 1)]
    assert [block.index for block in reports[1].blocks] == [
        (x, y, 0) for y in range(2) for x in range(2)
    ]
    assert reports[0] == reports[1]


def test_reports_add_and_compare():
    x, y = numbers(64), numbers(64)
    one, two = count(copy, x, y, 1), count(copy, x, y, 1, blocks=2)
    both = sum([one, two])
    assert both.global_load_bytes == one.global_load_bytes + two.global_load_bytes
    assert len(both.blocks) == 3 and len(both.lines) == len(one.lines)
    assert both.lines[0].traffic.global_load_bytes == 3 * 128
    comparison = one.compare(two)
    assert comparison.ratios["global_load_bytes"] == 2
    assert math.isnan(comparison.ratios["barriers"])
    assert "2" in str(comparison) and "copy" in str(comparison)
    with pytest.raises(TypeError):
        one + 3
    with pytest.raises(AttributeError, match="no attribute 'bytes'"):
        _ = one.bytes


def test_a_report_prints_and_renders():
    report = count(transpose, numbers(32), numbers(32), 2)
    text = str(report)
    assert repr(report) == text and "bank_conflicts" in dir(report)
    assert "transpose: 1 block\n" in text and "tile[stride * i] = x[i]" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "bank_conflicts" in report._repr_mimebundle_([], [])["text/html"]


def test_a_report_is_plain_numbers():
    report = count(copy, numbers(32), numbers(32), 1)
    assert all(type(value) is int for value in vars(report.total).values())
    assert isinstance(report, Report)
