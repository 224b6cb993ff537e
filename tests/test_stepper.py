"""Stepping through simulated launches: where each step stops, what can be seen there, and that
looking changes nothing.
"""

import gc
import inspect
import sys
import weakref
from functools import cache

import greenlet
import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32, int32

from fa2_numba.config import TileConfig
from fa2_numba.constants import FULL_MASK
from fa2_numba.kernels import fa2_split_q
from fa2_numba.launch import ForwardTensors
from fa2_numba.reference import attention_forward
from fa2_numba.simulator import BarrierError, RaceError, simulate
from fa2_numba.simulator.engine import Thread
from fa2_numba.simulator.stepper import Stepper
from fa2_numba.testing import poisoned, random_qkv

THREADS = 40
SEEDS = [None, 1]


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
    with pytest.raises(RuntimeError, match="two_barriers: the launch has finished"):
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


@pytest.mark.parametrize("target", [1, "no such text", ("other.py", 3), ("test_stepper.py", 1)])
def test_a_target_that_is_no_statement_is_refused(target):
    with pytest.raises(ValueError, match="no statement of kernel two_barriers"):
        stepper_of(two_barriers).to_line(target)


# Results


def fa2(seed=None):
    q, k, v = random_qkv(1, 27, 27, 1, 1, 32, np.float32)
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, 27), np.float32)
    scale = np.float32(32**-0.5)
    tensors = ForwardTensors(q, k, v, out, lse, scale, True, "float32", None)
    (launch,) = fa2_split_q.plan_forward(tensors, TileConfig(32, 16, 16, 4))
    config = launch.grid, launch.threads, 0, launch.shared_bytes
    return Stepper(simulate(launch.kernel, seed=seed, progress=False)[config], *launch.arguments), (
        out,
        lse,
    )


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


def test_rows_of_split_q_are_exact_attention_after_the_loop():
    q, k, v = random_qkv(1, 27, 27, 1, 1, 32, np.float32)
    stepper, _ = fa2()
    out = attention_forward(q, k, v, causal=True, softmax_scale=32**-0.5)[0]
    for block in range(2):
        stepper.all_to_line("i_row = first_row")
        assert stepper.block == (0, block, 0)
        for r in (0, 5, 10):
            row = stepper.row(r)
            assert row.agree and len(row.threads) == 8
            np.testing.assert_allclose(
                row.O / row.l, out[0, 16 * block + r, 0], atol=1e-5, rtol=1e-5
            )


def test_a_row_needs_the_names_of_the_ladder():
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    with pytest.raises(ValueError, match="lacks LANE_COLS, LANE_ROWS, O_reg, col, l_reg, m_reg"):
        stepper.row(0)
    with pytest.raises(ValueError, match="no such row"):
        stepper, _ = fa2()
        stepper.to_barrier()
        stepper.row(16)


# Looking


def test_what_nothing_wrote_is_nan_or_masked():
    stepper = stepper_of(places, threads=32, shared_bytes=64)
    stepper.to_barrier()
    shared = stepper.shared()
    assert set(shared) == {"counts", "left"}
    np.testing.assert_array_equal(shared["left"], [[1.5, 1.5, 1.5, np.nan], [np.nan] * 4])
    assert shared["counts"].tolist() == [7, 7, 7, None]
    np.testing.assert_array_equal(stepper.locals(4)["own"], [2.5, np.nan])
    shared["left"][:] = 0  # a copy
    assert stepper.shared()["left"][0, 0] == 1.5


def test_without_checks_shared_arrays_are_found_too():
    stepper = stepper_of(places, threads=32, shared_bytes=64, checks=False)
    stepper.to_barrier()
    shared = stepper.shared()
    assert set(shared) == {"counts", "left"}
    np.testing.assert_array_equal(shared["left"][0], [1.5, 1.5, 1.5, np.nan])


def test_shared_arrays_of_a_rung_by_their_names():
    stepper, _ = fa2()
    assert stepper.shared() == {}
    stepper.to_barrier()
    stepper.to_barrier()
    shared = stepper.shared()
    q, k, v = random_qkv(1, 27, 27, 1, 1, 32, np.float32)
    assert set(shared) == {"Q_smem", "K_smem", "V_smem"}
    np.testing.assert_array_equal(shared["Q_smem"][:, :32], q[0, :16, 0])
    np.testing.assert_array_equal(shared["V_smem"], v[0, :16, 0])
    assert np.isnan(shared["Q_smem"][:, 32]).all()


def test_waiting_tells_each_warp():
    stepper = stepper_of(two_barriers)
    stepper.to_line("tile[i] = x[i]", thread=35)
    groups = {(group.warp, group.threads, group.state) for group in stepper.waiting()}
    assert groups == {
        (0, tuple(range(32)), "waiting for syncthreads"),
        (1, (32, 33, 34), "waiting for syncthreads"),
        (1, (35,), "ready"),  # before the line
        (1, (36, 37, 38, 39), "ready"),  # not started
    }
    stepper.finish()
    assert {group.state for group in stepper.waiting()} == {"gone"}


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
    for wrong in (32, -1, (4, 0), (0, 0, 1), "0", 1.5, ()):
        with pytest.raises(ValueError, match="thread"):
            stepper.locals(wrong)


def test_text_shows_event_source_threads_and_shared_memory():
    stepper = stepper_of(two_barriers)
    stepper.to_barrier()
    text = str(stepper)
    assert "two_barriers: all threads of block (0, 0, 0) have met in syncthreads at" in text
    assert "cuda.syncthreads()  <- threads 0-39 (warps 0-1)" in text
    assert "warp 1, threads 32-39: ready at test_stepper.py:" in text
    assert "tile (40,) float32, 100% written, 0 to 39" in text


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


def living_threads():
    gc.collect()
    return sum(isinstance(thing, Thread) for thing in gc.get_objects())


@pytest.mark.parametrize("step", [to_barrier, to_line, statements])
def test_an_abandoned_stepper_is_freed(step):
    before = living_threads()
    stepper, _ = small()
    step(stepper, 5)
    assert living_threads() == before + THREADS
    gone = weakref.ref(stepper)
    del stepper
    assert gone() is None
    assert living_threads() == before
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


def test_close_ends_a_stepper():
    with small()[0] as stepper:
        stepper.to_barrier()
    assert stepper.done
    with pytest.raises(RuntimeError, match="closed"):
        stepper.finish()
    assert "closed" in str(stepper)
    stepper.close()
