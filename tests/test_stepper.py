"""Stepping through simulated launches: where each step stops, what can be seen there, and that
looking changes nothing.
"""

import gc
import inspect
import re
import sys
import time
import weakref
from functools import cache, partial

import greenlet
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from numba import cuda
from numba.cuda.types import float32, int32, uint32

from fa2_numba.config import TileConfig
from fa2_numba.constants import FULL_MASK
from fa2_numba.device.ptx import (
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group_0,
    global_address,
    ldmatrix_x4,
    mma_m16n8k16_float16,
    shared_address,
)
from fa2_numba.ladder import RUNGS
from fa2_numba.launch import ForwardTensors
from fa2_numba.simulator import (
    BarrierError,
    RaceError,
    RunTooLongError,
    ThreadError,
    UninitialisedReadError,
    simulate,
)
from fa2_numba.simulator.source import ranges
from fa2_numba.simulator.stepper import RowError, Stepper
from fa2_numba.simulator.stepper.statements import Statements
from fa2_numba.testing import poisoned, random_qkv

THREADS = 40
SEEDS = [None, 1]
# Lanes of both layouts hold several rows, and threads own several columns of O.
ROWS_CONFIG = TileConfig(32, 16, 16, 2)


@cuda.jit(device=True)
def doubled(x):
    y = x + x
    return y


@cuda.jit
def two_barriers(x, y):
    tile = cuda.shared.array(THREADS, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    other = tile[(i + 1) % THREADS]
    cuda.syncthreads()
    tile[i] = doubled(other)
    y[cuda.blockIdx.x, i] = tile[i] + cuda.blockIdx.x


@cuda.jit
def warp_sum(x, y):
    total = x[cuda.threadIdx.x]
    for step in range(5):
        total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << step)
    y[cuda.threadIdx.x] = total


@cuda.jit
def multiply_ones(x, y):
    tile = cuda.shared.array((32, 4), uint32, alignment=128)
    lane = cuda.threadIdx.x
    cp_async_16(shared_address(tile[lane]), global_address(x) + 16 * lane, 16)
    cp_async_commit_group()
    cuda.syncthreads()
    cp_async_wait_group_0()
    cuda.syncthreads()
    A_reg = cuda.local.array((2, 2), uint32)
    C_reg = cuda.local.array((2, 2), float32)
    ldmatrix_x4(A_reg, 0, 0, shared_address(tile[lane]))
    for i in range(2):
        for j in range(2):
            C_reg[i, j] = float32(0)
    mma_m16n8k16_float16(C_reg, 0, 0, A_reg, 0, 0, A_reg, 0, 0)
    y[lane] = C_reg[1, 1]


@cuda.jit
def race(x, y):
    tile = cuda.shared.array(THREADS, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    y[0, i] = tile[(i + 1) % THREADS]


@cuda.jit
def stuck(x, y):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    y[0, cuda.threadIdx.x] = x[0]


@cuda.jit
def failing(x, y):
    half = x[cuda.threadIdx.x] / 2
    y[0, cuda.threadIdx.x] = 1 // (cuda.threadIdx.x - 5)
    y[0, cuda.threadIdx.x] = half


@cuda.jit
def unwritten(x, y):
    tile = cuda.shared.array(THREADS, float32)
    y[0, cuda.threadIdx.x] = tile[cuda.threadIdx.x]


@cuda.jit
def endless(x, y):
    while x[0] == 0:
        pass
    y[0, cuda.threadIdx.x] = x[0]


@cuda.jit
def specials(x, y):
    tile = cuda.shared.array((2, THREADS), float32)
    i = cuda.threadIdx.x
    if i > 0:
        tile[0, i] = x[i]
        tile[1, i] = -x[i]
    cuda.syncthreads()
    y[0, i] = x[i]


@cuda.jit
def loop(x, y):
    i = cuda.threadIdx.x
    total = float32(0.0)
    for k in range(2):
        total += max(
            x[k],
            x[i],
        )
    y[0, i] = total


@cuda.jit
def places(x, y):
    smem = cuda.shared.array(0, float32)
    counts = cuda.shared.array(4, int32)
    left = smem[:8].reshape((2, 4))
    own = cuda.local.array(2, float32)
    if cuda.threadIdx.x < 3:
        left[0, cuda.threadIdx.x] = 1.5
        counts[cuda.threadIdx.x] = 7
    own[0] = 2.5
    cuda.syncthreads()
    y[0, cuda.threadIdx.x] = own[0]


@cuda.jit
def square(y):
    x, z = cuda.threadIdx.x, cuda.threadIdx.y
    if x < 2 and "<b>" != "":  # & markup
        y[x, z] = 10 * x + z
    cuda.syncthreads()


def arguments(blocks=1):
    return np.arange(THREADS, dtype=np.float32), np.full((blocks, THREADS), np.nan, np.float32)


def stepper_of(kernel, *args, blocks=1, threads=THREADS, shared_bytes=0, **options):
    launch = simulate(kernel, progress=False, **options)[blocks, threads, 0, shared_bytes]
    return Stepper(launch, *(args or arguments(blocks)))


def steppers_of_rung(name, config=ROWS_CONFIG, seqlen=27, head_dim=24, seed=None, **options):
    """One for each launch of a rung, and its O and LSE; each must be finished before the next."""
    q, k, v = random_qkv(1, seqlen, seqlen, 1, 1, head_dim, np.float32)
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, seqlen), np.float32)
    scale = np.float32(head_dim**-0.5)
    allocate = partial(poisoned, dtype=np.float32)
    tensors = ForwardTensors(q, k, v, out, lse, scale, True, "float32", allocate)
    steppers = (
        Stepper(
            simulate(launch.kernel, seed=seed, progress=False, **options)[
                launch.grid, launch.threads, 0, launch.shared_bytes
            ],
            *launch.arguments,
        )
        for launch in RUNGS[name].plan_forward(tensors, config)
    )
    return steppers, (out, lse)


def line_of(kernel, text):
    source, first = inspect.getsourcelines(kernel.py_func)
    (offset,) = [i for i, line in enumerate(source) if text in line]
    return first + offset


def line_in(event):
    return int(event.line.split(":")[1])


# Barriers


def test_barriers_stop_between_writes_and_reads():
    x, y = arguments()
    stepper = stepper_of(two_barriers, x, y)
    assert stepper.event.kind == "start" and stepper.shared() == {}

    event = stepper.to_barrier()
    assert (event.kind, event.operation, event.block) == ("barrier", "syncthreads", (0, 0, 0))
    assert line_in(event) == line_of(two_barriers, "tile[i] = x[i]") + 1
    np.testing.assert_array_equal(stepper.shared()["tile"], x)
    assert "other" not in stepper.locals(3)

    stepper.to_barrier()
    assert [stepper.locals(i)["other"] for i in range(THREADS)] == [*x[1:], x[0]]
    np.testing.assert_array_equal(stepper.shared()["tile"], x)
    assert np.isnan(y).all()

    assert stepper.to_barrier().kind == "finished" and stepper.done
    np.testing.assert_array_equal(y[0], 2 * np.roll(x, -1))


def test_blocks_follow_each_other():
    stepper = stepper_of(two_barriers, blocks=2)
    seen = []
    while not stepper.done:
        seen.append(stepper.to_barrier().block)
    assert seen == [(0, 0, 0)] * 2 + [(1, 0, 0)] * 2 + [None]
    with pytest.raises(RuntimeError, match="two_barriers has no next step: the launch has fin"):
        stepper.to_barrier()


def test_warp_events_stop_at_each_shuffle_of_a_warp():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    stepper = stepper_of(warp_sum, x, y, threads=64)
    for step in range(5):
        event = stepper.to_warp_event(warp=1)
        assert (event.kind, event.warp, event.operation) == ("warp", 1, "shfl_xor_sync")
        assert {float(stepper.locals(i)["total"]) for i in range(32, 64)} == {2.0**step}
    assert stepper.to_warp_event(warp=1).kind == "finished"
    assert (y == 32).all()


def test_warp_events_of_all_warps():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    stepper = stepper_of(warp_sum, x, y, threads=64)
    warps = []
    while not stepper.done:
        warps.append(stepper.to_warp_event().warp)
    assert sorted(warps[:-1]) == [0] * 5 + [1] * 5


# Lines and statements


def test_next_statement_walks_one_thread_through_every_statement():
    stepper = stepper_of(two_barriers)
    first = line_of(two_barriers, "tile = ")
    inside = line_of(doubled, "y = x + x")
    assert stepper.frames(5)[0].line == first
    events = [stepper.next_statement(5) for _ in range(10)]
    lines = [first + offset for offset in range(1, 7)] + [inside, inside + 1, first + 7]
    assert [line_in(event) for event in events[:-1]] == lines
    assert {event.thread for event in events} == {(5, 0, 0)}
    assert events[-1].kind == "left"
    with pytest.raises(ValueError, match="has left"):
        stepper.next_statement(5)


def test_a_statement_of_several_lines_is_one():
    stepper = stepper_of(loop)
    first = line_of(loop, "i = ")
    events = [stepper.next_statement(1) for _ in range(8)]
    assert [line_in(event) - first for event in events[:-1]] == [1, 2, 3, 2, 3, 2, 7]
    assert events[-1].kind == "left"


def test_a_thread_waits_for_the_others_in_its_step():
    stepper = stepper_of(two_barriers)
    for _ in range(3):
        stepper.next_statement(0)
    assert "i" not in stepper.locals(1)
    stepper.next_statement(0)
    assert stepper.locals(0)["i"] == 0 and "other" not in stepper.locals(1)
    np.testing.assert_array_equal(stepper.shared()["tile"], np.arange(THREADS))


@pytest.mark.parametrize("form", ["line", "file", "text", "in the middle"])
def test_to_line_in_a_device_function(form):
    line = line_of(doubled, "y = x + x")
    target = {"line": line, "file": ("test_stepper.py", line), "text": "y = x + x"}.get(form)
    if form == "in the middle":
        stepper = stepper_of(loop)
        event = stepper.to_line(line_of(loop, "x[k],"), thread=7)
        assert (line_in(event), event.thread) == (line_of(loop, "total += max("), (7, 0, 0))
        return
    stepper = stepper_of(two_barriers)
    event = stepper.to_line(target, thread=7)
    assert (event.kind, line_in(event), event.thread) == ("line", line, (7, 0, 0))
    inner, outer = stepper.frames(7)
    assert (inner.function, inner.line, inner.text) == ("doubled", line, "y = x + x")
    assert inner.variables == {"x": 8.0}
    assert outer.function == "two_barriers" and outer.variables["other"] == 8.0


def test_to_line_of_any_thread_stops_once_for_each():
    stepper = stepper_of(two_barriers, seed=3)
    threads = [stepper.to_line("y = x + x").thread for _ in range(THREADS)]
    assert sorted(threads) == [(i, 0, 0) for i in range(THREADS)]
    assert stepper.to_line("y = x + x").kind == "finished"


def test_a_thread_that_was_paused_untraced_in_a_device_function_is_stopped():
    # Frames that exist already must be traced too, in code that no traced thread has entered.
    stepper = fa2()[0]
    stepper.to_warp_event(warp=0)
    stepper.next_statement(100)
    event = stepper.to_line("return m", thread=0)
    assert stepper.frames(0)[0].function == "max_over_lanes" and event.thread == (0, 0, 0)


def test_all_to_line_gathers_the_threads():
    stepper = stepper_of(two_barriers)
    event = stepper.all_to_line("return y")
    assert event.kind == "line" and event.thread is None
    frames = [stepper.frames(i)[0] for i in range(THREADS)]
    assert [frame.variables["y"] for frame in frames] == [2 * ((i + 1) % 40) for i in range(40)]
    assert stepper.finish().kind == "finished"


INSIDE = line_of(doubled, "y = x + x")


@pytest.mark.parametrize(
    "target",
    [1, "no such text", "", " ", ("other.py", 3), ("test_stepper.py", 1)]
    + [("y", INSIDE), ("stepper.py", INSIDE), ("", INSIDE), ("x/test_stepper.py", INSIDE)],
)
def test_a_target_that_is_no_statement_is_refused(target):
    with pytest.raises(ValueError, match="no statement of kernel two_barriers"):
        stepper_of(two_barriers).to_line(target)


def test_a_file_is_named_by_the_end_of_its_path():
    for file in ("test_stepper.py", "tests/test_stepper.py", __file__):
        assert line_in(stepper_of(two_barriers).to_line((file, INSIDE))) == INSIDE


@pytest.mark.parametrize("warp", [-1, 2, "0", 0.0, True])
def test_a_warp_that_is_none_of_the_block_is_refused(warp):
    with pytest.raises(ValueError, match=re.escape(f"warp={warp!r}: must be 0 to 1, or None")):
        stepper_of(two_barriers).to_warp_event(warp)


@pytest.mark.parametrize(
    "first, kind",
    [
        (two_barriers, "CUDADispatcher"),
        (two_barriers.py_func, "function"),
        (two_barriers[1000, THREADS], "_LaunchConfiguration"),
        (simulate(two_barriers), "Simulation"),
    ],
    ids=["kernel", "function", "launch", "simulation"],
)
def test_what_is_no_simulated_launch_is_refused(first, kind):
    call = re.escape("Stepper(simulate(kernel)[grid, block], *arguments)")
    with pytest.raises(TypeError, match=f"{call}; its first argument was a {kind}"):
        Stepper(first, *arguments())


# Time


@pytest.mark.parametrize("step", ["finish", "to_barrier", "to_line", "all_to_line"])
def test_an_endless_loop_ends_in_time(step):
    stepper = stepper_of(endless, max_seconds=0.5)
    line = line_of(endless, "while x")
    tracing = sys.gettrace(), greenlet.gettrace()
    target = ["y[0, cuda"] if "line" in step else []
    with pytest.raises(RunTooLongError, match=r"has run 0.5 s with 0 of 1 blocks done and was at"):
        getattr(stepper, step)(*target)
    assert stepper.event.thread == (0, 0, 0) and line_in(stepper.event) in (line, line + 1)
    assert (sys.gettrace(), greenlet.gettrace()) == tracing
    assert "failed at test_stepper.py:" in str(stepper)


def test_looking_takes_no_time():
    stepper = stepper_of(two_barriers, blocks=2, max_seconds=0.3)
    for _ in range(3):
        stepper.to_barrier()
        time.sleep(0.2)
    assert stepper.finish().kind == "finished"


# Results


def fa2(seed=None):
    config = TileConfig(32, 16, 16, 4)
    steppers, results = steppers_of_rung("fa2_split_q", config, head_dim=32, seed=seed)
    return next(steppers), results


def small(seed=None):
    x, y = arguments(blocks=2)
    return stepper_of(two_barriers, x, y, blocks=2, seed=seed), (y,)


def in_turn(*steps):
    def step(stepper, number):
        steps[number % len(steps)](stepper, number)

    return step


def to_barrier(stepper, number):
    stepper.to_barrier()


def to_warp(stepper, number):
    stepper.to_warp_event()


def to_line(stepper, number):
    stepper.to_line("cuda.syncthreads()", thread=number % THREADS)


def all_to_line(stepper, number):
    stepper.all_to_line("cuda.syncthreads()")


def statements(stepper, number):
    for thread in range(3, THREADS, 7):
        if not stepper.done and stepper.waiting() and stepper.frames(thread):
            stepper.next_statement(thread)


def finish(stepper, number):
    stepper.finish()


MODES = {
    "barrier": to_barrier,
    "warp": to_warp,
    "line": to_line,
    "all": all_to_line,
    "finish": finish,
    "mixed": in_turn(to_barrier, statements, to_line, to_warp, all_to_line),
}


def run_by(make, step, seed):
    stepper, results = make(seed)
    number = 0
    while not stepper.done:
        step(stepper, number)
        number += 1
    return results


@cache
def whole_run(make):
    stepper, results = make()
    for block in stepper._session.launch.blocks():
        block.run()
    assert all(np.isfinite(array).all() for array in results)
    return results


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [small, fa2])
def test_steps_give_the_result_of_a_whole_run(make, mode, seed):
    for actual, expected in zip(run_by(make, MODES[mode], seed), whole_run(make), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_statement_by_statement_gives_the_result_of_a_whole_run(seed):
    stepper, (y,) = small(seed)
    while not stepper.done:
        statements(stepper, 0)
        if not stepper.done and not any(stepper.frames(i) for i in range(3, THREADS, 7)):
            stepper.to_barrier()
    expected = np.add.outer([0, 1], 2 * np.roll(np.arange(THREADS), -1))
    np.testing.assert_array_equal(y, expected)


# Rows

AFTER_THE_LOOP = {"fa2_split_q": "i_row = first_row", "fa2_seq_parallel": "O_head, LSE_head ="}
AFTER_THE_LOOP["fa2_fewer_flops"] = AFTER_THE_LOOP["fa2_seq_parallel"]


def expected_row(q, k, v, i_row, keys):
    """m, l and O, not divided by l, of a query that has seen the first `keys` keys."""
    q, k, v = (x[0, :, 0].astype(np.float64) for x in (q, k, v))
    s = k[: min(keys, i_row + 1)] @ q[i_row] * q.shape[1] ** -0.5
    p = np.exp(s - s.max())
    return s.max(), p.sum(), p @ v[: len(p)]


def assert_rows(stepper, first_row, keys, seqlen=27, head_dim=24):
    q, k, v = random_qkv(1, seqlen, seqlen, 1, 1, head_dim, np.float32)
    rows = range(min(stepper.locals(0)["BLOCK_M"], seqlen - first_row))
    for r in rows:
        row = stepper.row(r)
        m, l, O = expected_row(q, k, v, first_row + r, keys)
        assert row.row == r and row.agree
        np.testing.assert_allclose(row.m, m, rtol=1e-5)
        np.testing.assert_allclose(row.l, l, rtol=1e-5)
        np.testing.assert_allclose(row.O[:head_dim], O, rtol=1e-4, atol=1e-5)
        assert (row.O[head_dim:] == 0).all() and row.O.dtype == np.float32


@pytest.mark.parametrize(
    "config, checks", [(ROWS_CONFIG, True), (TileConfig(48, 32, 16, 4), False)], ids=str
)
@pytest.mark.parametrize("rung", AFTER_THE_LOOP)
def test_rows_are_those_of_the_formula_after_the_loop(rung, config, checks):
    stepper = next(steppers_of_rung(rung, config, checks=checks)[0])
    for first_row in range(0, 27, config.block_m):
        stepper.all_to_line(AFTER_THE_LOOP[rung])
        while stepper.locals(0)["first_row"] != first_row:
            stepper.all_to_line(AFTER_THE_LOOP[rung])
        assert_rows(stepper, first_row, keys=27)


@pytest.mark.parametrize("rung", AFTER_THE_LOOP)
def test_rows_are_those_of_the_formula_after_one_tile(rung):
    stepper = next(steppers_of_rung(rung, TileConfig(32, 16, 8, 2))[0])
    for _ in range(2):
        stepper.all_to_line("load_kv_tile(K_smem")
    assert_rows(stepper, 0, keys=8)


def test_a_row_is_held_by_its_lanes_and_owners():
    split = next(steppers_of_rung("fa2_split_q")[0])
    split.all_to_line("i_row = first_row")
    assert split.row(0).threads == split.row(4).threads == tuple(range(8))
    assert split.row(15).threads == tuple(range(56, 64))
    sliced = next(steppers_of_rung("fa2_seq_parallel")[0])
    sliced.all_to_line("O_head, LSE_head =")
    assert sliced.row(1).threads == (*range(4, 8), *range(16, 32), *range(36, 40))


@pytest.mark.parametrize("rung", AFTER_THE_LOOP)
def test_a_row_in_the_middle_of_an_update_does_not_agree(rung):
    stepper = next(steppers_of_rung(rung)[0])
    stepper.to_line("m_reg[i] = m", thread=0)
    before = stepper.row(0)
    stepper.next_statement(0)
    assert before.m == -np.inf != stepper.row(0).m
    assert stepper.row(0).agree is False
    assert cells(stepper)["they agree"] == "no: in the middle of an update"


@pytest.mark.parametrize("rung", ["fa2_fewer_flops", "fa2_seq_parallel"])
def test_a_row_whose_columns_move_is_refused(rung):
    stepper = next(steppers_of_rung(rung)[0])
    stepper.all_to_line("update_output(O_reg")
    with pytest.raises(RowError, match="row 3: threads 48-63 of its owners are in the loop over"):
        stepper.row(3)
    assert "change places. Step out of the loop" in stepper._repr_html_()


@pytest.mark.parametrize("rung", AFTER_THE_LOOP)
def test_a_row_that_is_not_there_is_refused(rung):
    stepper = next(steppers_of_rung(rung)[0])
    with pytest.raises(RowError, match="row 0: not all of it is there: threads 0-63 have no"):
        stepper.row(0)
    stepper.to_line("load_q_tile(", thread=0)
    with pytest.raises(RowError, match="row 0: not all of it is there: threads .*-63 have no"):
        stepper.row(0)
    stepper.to_barrier()
    for wrong in (-1, 16, 10**6):
        with pytest.raises(RowError, match="has no such row"):
            stepper.row(wrong)
    for wrong in (True, 1.0, "0", None):
        with pytest.raises(ValueError, match=f"row {wrong!r}: must be an integer"):
            stepper.row(wrong)


@pytest.mark.parametrize("rung", ["standard", "fa1_sliced_k"])
def test_rows_of_other_rungs_are_refused(rung):
    for stepper in steppers_of_rung(rung)[0]:
        stepper.to_barrier()
        assert not stepper.has_rows
        with pytest.raises(RowError, match="does not keep m, l and O in its threads under"):
            stepper.row(0)
        assert "not yet divided" not in stepper._repr_html_()
        stepper.done or stepper.finish()


# Looking


def values_and_mask(array):
    assert isinstance(array, np.ma.MaskedArray)
    return array.tolist()


def test_what_nothing_wrote_is_masked():
    stepper = stepper_of(places, threads=32, shared_bytes=64)
    stepper.to_barrier()
    shared = stepper.shared()
    assert set(shared) == {"counts", "left"}
    assert values_and_mask(shared["left"]) == [[1.5, 1.5, 1.5, None], [None] * 4]
    assert values_and_mask(shared["counts"]) == [7, 7, 7, None]
    assert np.isnan(np.asarray(shared["left"])[1]).all()
    assert np.isnan(np.asarray(stepper.locals(4)["own"])[1])
    assert values_and_mask(stepper.locals(4)["own"]) == [2.5, None]
    shared["left"][:] = 0  # a copy
    assert stepper.shared()["left"][0, 0] == 1.5


def special_values():
    x = np.array([9, np.nan, np.inf, 3], np.float32)
    stepper = stepper_of(specials, x, np.zeros((1, 4), np.float32), threads=4)
    stepper.to_barrier()
    return stepper


def test_nan_that_was_written_is_not_masked():
    stepper = special_values()
    tile = stepper.shared()["tile"][:, :4]
    assert tile.mask.tolist() == [[True, False, False, False]] * 2
    assert np.isnan(tile[0, 1]) and tile[1, 2] == -np.inf


def test_without_checks_shared_arrays_are_found_too():
    stepper = stepper_of(places, threads=32, shared_bytes=64, checks=False)
    stepper.to_barrier()
    shared = stepper.shared()
    assert set(shared) == {"counts", "left"}
    np.testing.assert_array_equal(shared["left"].data[0], [1.5, 1.5, 1.5, np.nan])
    assert not shared["left"].mask.any()


def test_shared_arrays_of_a_rung_by_their_names():
    stepper, _ = fa2()
    assert stepper.shared() == {}
    stepper.to_barrier()
    stepper.to_barrier()
    shared = stepper.shared()
    q, k, v = random_qkv(1, 27, 27, 1, 1, 32, np.float32)
    assert set(shared) == {"Q_smem", "K_smem", "V_smem"}
    np.testing.assert_array_equal(shared["Q_smem"].data[:, :32], q[0, :16, 0])
    np.testing.assert_array_equal(shared["V_smem"].data, v[0, :16, 0])
    assert shared["Q_smem"].mask.tolist() == [[False] * 32 + [True]] * 16


def test_waiting_tells_each_warp():
    stepper = stepper_of(two_barriers)
    stepper.to_line("tile[i] = x[i]", thread=35)
    groups = {(group.warp, group.threads, group.state) for group in stepper.waiting()}
    assert groups == {
        (0, tuple(range(32)), "waiting for syncthreads"),
        (1, (32, 33, 34), "waiting for syncthreads"),
        (1, (35,), "about to execute"),  # the line
        (1, (36, 37, 38, 39), "about to execute"),  # their first one
    }
    stepper.finish()
    assert {group.state for group in stepper.waiting()} == {"gone"}


def test_passed_and_not_yet_executed_are_two_states():
    stepper = stepper_of(two_barriers)
    stepper.all_to_line("cuda.syncthreads()")
    line = re.escape(stepper.event.line)
    assert re.search(f"threads 0-39 [(]warps 0-1[)]: about to execute {line}", str(stepper))
    stepper.to_barrier()
    assert re.search(f"threads 0-39 [(]warps 0-1[)]: done waiting at {line}", str(stepper))


def test_source_shows_who_stands_where():
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    lines = stepper.source(context=1)
    assert [line.text.strip() for line in lines] == [
        "tile[i] = x[i]",
        "cuda.syncthreads()",
        "other = tile[(i + 1) % THREADS]",
    ]
    assert [line.threads for line in lines] == [(), tuple(range(THREADS)), ()]


def test_threads_by_index():
    stepper = stepper_of(square, np.zeros((4, 8), np.int32), threads=(4, 8))
    stepper.to_barrier()
    for thread in (13, (1, 3), (1, 3, 0)):
        assert (stepper.locals(thread)["x"], stepper.locals(thread)["z"]) == (1, 3)
    for wrong in (32, -1, (4, 0), (0, 0, 1), "0", 1.5, (), True, (True, 1), (1.0, 1)):
        with pytest.raises(ValueError, match="thread"):
            stepper.locals(wrong)


@pytest.mark.parametrize("checks", [True, False])
def test_instructions_are_stepped_over(checks):
    ones, y = np.full(128, 0x3C003C00, np.uint32), np.zeros(32, np.float32)
    stepper = stepper_of(multiply_ones, ones, y, threads=32, checks=checks)
    stepper.to_barrier()
    tile = stepper.shared()["tile"]
    assert tile.mask.all() if checks else (tile == 0xFFFFFFFF).all()
    stepper.to_barrier()
    np.testing.assert_array_equal(stepper.shared()["tile"], ones.reshape(32, 4))
    stepper.all_to_line("ldmatrix_x4(")
    stepper.next_statement((5, 0, 0))
    assert stepper.to_warp_event().operation == "mma_m16n8k16_float16"
    assert "waiting for" not in str(stepper)
    assert stepper.locals((5, 0, 0))["A_reg"][1, 1] == 0x3C003C00
    stepper.finish()
    assert (y == 16).all()


def test_text_shows_event_source_threads_and_shared_memory():
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    text = str(stepper)
    assert "two_barriers: all threads of block (0, 0, 0) have met in syncthreads at" in text
    assert "cuda.syncthreads()  <- threads 0-39 (warps 0-1)" in text
    assert "threads 0-39 (warps 0-1): done waiting at test_stepper.py:" in text
    assert "tile (40,) float32, 100% written, 0 to 39" in text


def test_text_is_short_for_many_threads():
    stepper = stepper_of(square, np.zeros((32, 32), np.int32), threads=1024)
    stepper.to_line("if x < 2", thread=3)
    text = str(stepper)
    assert "  <- thread 3 (warp 0)\n" in text and "\nthread 3 (warp 0): about to execute" in text
    stepper.to_barrier()
    assert str(stepper).count("threads 0-1023 (warps 0-31)") == 2  # the source, the state
    assert len(str(stepper).splitlines()) < 20


def test_repr_names_kernel_block_and_event():
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    assert repr(stepper) == f"<Stepper of two_barriers, block (0, 0, 0): {stepper.event}>"


def cells(stepper):
    """The row that HTML shows, by the head of its table."""
    table = re.search("<table><tr><th[^>]*>row<.*?</table>", stepper._repr_html_())[0]
    head, values = (re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", table) for tag in ("th", "td"))
    return dict(zip(head, values, strict=True))


@pytest.mark.parametrize("rung", AFTER_THE_LOOP)
@pytest.mark.parametrize("number", [0, 5])
def test_html_shows_the_chosen_row(number, rung):
    stepper = next(steppers_of_rung(rung)[0])
    stepper.all_to_line(AFTER_THE_LOOP[rung])
    if number:
        stepper.shown_row = number
    row = stepper.row(number)
    O = " ".join(f"{x:.3f}" for x in row.O[:3])
    shown = cells(stepper)
    values = re.sub(r"\s+", " ", shown.pop("O (not yet divided by l)").strip("[] "))
    assert values.startswith(O)
    assert shown == {
        "row": f"{number}",
        "m": f"{row.m:.4g}",
        "l": f"{row.l:.4g}",
        "in threads": ranges(list(row.threads)),
        "they agree": "yes",
    }


def test_html_says_why_the_chosen_row_is_not_shown():
    stepper, _ = fa2()
    stepper.to_barrier()
    stepper.shown_row = 16
    assert "row 16: the query tile of fa2_split_q_d32" in stepper._repr_html_()


def images_of(stepper, monkeypatch):
    """What is given to the heat maps: the arrays, and the colours of those that have one."""
    images, imshow = [], Axes.imshow

    def note(axes, image, **options):
        colours = options.get("cmap")
        images.append((image, colours and to_hex(colours.colors[0])))
        return imshow(axes, image, **options)

    monkeypatch.setattr(Axes, "imshow", note)
    html = stepper._repr_html_()
    return images, html


def test_heat_maps_show_the_arrays(monkeypatch):
    stepper, _ = fa2()
    for _ in range(2):
        stepper.to_barrier()
    images, html = images_of(stepper, monkeypatch)
    arrays = stepper.shared()
    assert len(images) == len(arrays) == html.count("<svg") == 3
    for (image, colour), array in zip(images, arrays.values(), strict=True):
        assert colour is None
        np.testing.assert_array_equal(image.data[~image.mask], array.compressed())
        np.testing.assert_array_equal(image.mask, np.ma.getmaskarray(array))


def test_heat_maps_and_text_tell_what_is_no_number(monkeypatch):
    stepper = special_values()
    assert "tile (2, 40) float32, 8% written, -3 to 3, 2 NaN, 2 infinite" in str(stepper)
    images, html = images_of(stepper, monkeypatch)
    marked = {
        colour: [tuple(at) for at in np.argwhere(~np.ma.getmaskarray(image))]
        for image, colour in images
    }
    assert marked == {
        None: [(0, 3), (1, 3)],
        to_hex("crimson"): [(0, 1), (1, 1)],
        to_hex("orange"): [(0, 2), (1, 2)],
    }
    assert "lightgrey: never written, crimson: NaN, orange: infinite" in html


def test_html_is_escaped_and_has_maps():
    stepper = stepper_of(square, np.zeros((4, 8), np.int32), threads=(4, 8))
    stepper.to_line("y[x, z] =")
    html = stepper._repr_html_()
    assert "&lt;b&gt;" in html and "&amp; markup" in html and "<b>&quot;" not in html
    stepper, _ = fa2()
    stepper.all_to_line("i_row = first_row")
    html = stepper._repr_html_()
    assert html.count("<svg") == 3 and "Q_smem (16, 33) float32, 97% written" in html
    assert "<script" not in html and "in threads" in html
    assert "http" not in html.replace("http://www.w3.org/", "")


def test_html_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    html = stepper._repr_html_()
    assert "<svg" not in html and "tile (40,) float32, 100% written, 0 to 39" in html


@pytest.mark.parametrize("kernel", [two_barriers, places, warp_sum, loop, square])
def test_every_stop_can_be_shown(kernel):
    args = [np.zeros((32, 32), np.int32)] if kernel is square else arguments()
    args = [np.ones(32, np.float32)] * 2 if kernel is warp_sum else args
    stepper = stepper_of(kernel, *args, threads=32, shared_bytes=64)
    if kernel is two_barriers:
        stepper = stepper_of(kernel)
    while not stepper.done:
        stepper.next_statement(0) if stepper.frames(0) else stepper.finish()
        assert stepper.kernel in str(stepper)
    assert stepper._repr_html_()


# Errors


@pytest.mark.parametrize("step", [to_barrier, finish, to_warp], ids=lambda step: step.__name__)
@pytest.mark.parametrize("kernel, error", [(race, RaceError), (stuck, BarrierError)])
def test_errors_come_out_of_the_step(kernel, error, step):
    stepper = stepper_of(kernel)
    with pytest.raises(error, match=f"in kernel {kernel.py_func.__name__}"):
        step(stepper, 0)
    assert stepper.done and stepper.event.kind == "error"
    assert error.__name__ in str(stepper) and stepper._repr_html_()
    with pytest.raises(RuntimeError, match="has failed"):
        stepper.finish()


@pytest.mark.parametrize("step", [to_barrier, finish, to_line], ids=lambda step: step.__name__)
def test_a_failed_thread_keeps_its_frames(step):
    stepper = stepper_of(failing)
    if step is to_line:
        stepper.to_line("y[0, cuda.threadIdx.x] = 1", thread=2)
    with pytest.raises(ThreadError):
        stepper.to_line("= half", thread=6) if step is to_line else step(stepper, 0)
    line = line_of(failing, "= 1 //")
    assert stepper.event.thread == (5, 0, 0) and line_in(stepper.event) == line
    (frame,) = stepper.frames(5)
    assert (frame.function, frame.line) == ("failing", line)
    assert stepper.locals(5)["half"] == 2.5
    (group,) = [group for group in stepper.waiting() if group.state == "failed"]
    assert (group.threads, group.line) == ((5,), stepper.event.line)
    assert "ThreadError: ZeroDivisionError" in str(stepper)
    assert f"thread 5 (warp 0): failed at {stepper.event.line}" in str(stepper)
    with pytest.raises(ValueError, match="thread 0 .* has left the kernel"):
        stepper.locals(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_race_names_both_places(seed):
    stepper = stepper_of(race, seed=seed)
    with pytest.raises(RaceError) as refusal:
        stepper.finish()
    assert str(refusal.value) in str(stepper)
    for text in ("tile[i] = x[i]", "y[0, i] ="):
        assert f"it at test_stepper.py:{line_of(race, text)}:" in str(stepper)
    assert stepper.event.thread == refusal.value.thread
    assert line_in(stepper.event) in refusal.value.lines
    assert "white-space:pre-wrap" in stepper._repr_html_()


def test_an_uninitialised_read_names_its_line():
    stepper = stepper_of(unwritten)
    with pytest.raises(UninitialisedReadError):
        stepper.finish()
    assert stepper.event.thread == (0, 0, 0)
    assert line_in(stepper.event) == line_of(unwritten, "= tile[cuda")


@pytest.mark.parametrize("kernel, kind", [(race, RaceError), (failing, ThreadError)])
def test_an_error_is_freed_without_the_collector(kernel, kind):
    gc.disable()
    try:
        try:
            stepper_of(kernel).finish()
        except kind as error:
            gone = weakref.ref(error)
        assert gone() is None
    finally:
        gc.enable()


def test_errors_come_out_of_traced_steps():
    stepper = stepper_of(race)
    stepper.to_line("y[0, i] =", thread=0)
    with pytest.raises(RaceError):
        stepper.all_to_line("y[0, i] =")
        stepper.finish()
    stepper = stepper_of(stuck)
    stepper.next_statement(3)
    with pytest.raises(BarrierError):
        stepper.next_statement(3)
    assert sys.gettrace() is None


# Neighbours


def test_a_paused_stepper_leaves_other_simulations_alone():
    one, (y_one,) = small()
    one.to_barrier()
    other, (y_other,) = small(seed=4)
    other.to_line("y = x + x", thread=9)
    one.next_statement(3)
    x, y = arguments(blocks=2)
    simulate(two_barriers, progress=False)[2, THREADS](x, y)
    with np.errstate(divide="raise"):
        one.to_line("y = x + x")
        other.next_statement(9)
        assert np.geterr()["divide"] == "raise"
    other.finish()
    one.finish()
    np.testing.assert_array_equal(y_one, y)
    np.testing.assert_array_equal(y_other, y)


def host_trace(frame, event, argument):
    return None


@pytest.mark.parametrize("host", [None, host_trace])
def test_trace_functions_are_restored(host):
    before, switches = sys.gettrace(), greenlet.gettrace()
    stepper, _ = small()
    sys.settrace(host)
    try:
        seen = []
        for step in (to_line, statements, to_barrier, to_line):
            step(stepper, 5)
            seen.append(sys.gettrace() is host and greenlet.gettrace() is switches)
        stepper.close()
        seen.append(sys.gettrace() is host)
    finally:
        sys.settrace(before)
    assert seen == [True] * 5


@pytest.mark.parametrize("step", [to_barrier, to_line, statements])
def test_an_abandoned_stepper_is_freed(step):
    stepper, _ = small()
    step(stepper, 5)
    refs = [weakref.ref(thread) for thread in stepper._session.block.threads]
    assert len(refs) == THREADS and all(ref() is not None for ref in refs)
    gone = weakref.ref(stepper)
    del stepper
    gc.collect()
    assert gone() is None
    assert [ref for ref in refs if ref() is not None] == []
    assert sys.gettrace() is None


class Collect:
    """An instruction that has the collector free whatever is unreachable, in a simulated thread."""

    @staticmethod
    def simulated():
        gc.collect()


collect = Collect()


@cuda.jit
def collecting(x, y):
    if cuda.threadIdx.x == 3:
        collect()
    y[0, cuda.threadIdx.x] = x[cuda.threadIdx.x]


@pytest.mark.parametrize("step", [to_barrier, to_line])
def test_a_stepper_freed_while_another_thread_runs(step):
    abandoned, _ = small()
    step(abandoned, 5)
    abandoned.itself = abandoned
    gone = weakref.ref(abandoned)
    x, y = arguments()
    stepper = stepper_of(collecting, x, y)
    del abandoned
    stepper.all_to_line("y[0, cuda")
    assert gone() is None
    stepper.finish()
    np.testing.assert_array_equal(y[0], x)
    assert sys.gettrace() is None


def test_the_collector_does_not_end_tracing(monkeypatch):
    def leave_a_cycle():
        stepper = stepper_of(race)
        stepper.to_line("y[0, i] =", thread=0)
        try:
            stepper.all_to_line("y[0, i] =")
            stepper.finish()
        except RaceError as refusal:
            error = refusal
            assert error.__traceback__.tb_frame.f_locals["stepper"] is stepper

    def at(self, *place):
        if gc.isenabled():  # then it may come at any moment
            gc.collect()
        return original(self, *place)

    original, thresholds = Statements.at, gc.get_threshold()
    gc.set_threshold(10**6)
    try:
        leave_a_cycle()
        stepper = stepper_of(stuck)
        monkeypatch.setattr(Statements, "at", at)
        assert stepper.next_statement(3).kind == "line" and gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


def test_close_ends_a_stepper():
    with small()[0] as stepper:
        stepper.to_barrier()
    assert stepper.done
    with pytest.raises(RuntimeError, match="closed"):
        stepper.finish()
    assert "closed" in str(stepper)
    with pytest.raises(ValueError, match="thread 3 .* is no more: the stepper was closed"):
        stepper.locals(3)
    stepper.close()
