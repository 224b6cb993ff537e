"""The fake GPU has the habits that lesson 11 teaches, and those only."""

import numpy as np
import pytest

from fa2_numba.lessons.fake_gpu import (
    COMPILE_SECONDS,
    DISTURBED_SHARE,
    LAUNCH_SECONDS,
    NOISE,
    WANDER,
    WARM_AFTER_SECONDS,
    ZEROS_SPEED,
    FakeGpu,
    FakeGpuError,
    FakeKernel,
)

KERNEL = FakeKernel("mine", 2.0)


def warm(seed=0):
    gpu = FakeGpu(seed)
    while gpu.seconds() < COMPILE_SECONDS + 20 * WARM_AFTER_SECONDS:
        gpu.launch(KERNEL, gpu.normal())
        gpu.synchronize()
    return gpu


def taken(gpu, array, runs=400):
    for _ in range(runs):
        gpu.launch(KERNEL, array)
    gpu.synchronize()
    return np.array([1000 * (run.end - run.start) for run in gpu.launches[-runs:]])


def test_a_launch_returns_at_once_but_the_first_compiles():
    gpu = FakeGpu()
    gpu.launch(KERNEL, gpu.normal())
    assert gpu.seconds() == pytest.approx(COMPILE_SECONDS + LAUNCH_SECONDS)
    gpu.launch(KERNEL, gpu.normal())
    assert gpu.seconds() == pytest.approx(COMPILE_SECONDS + 2 * LAUNCH_SECONDS)
    gpu.synchronize()
    assert gpu.seconds() == gpu.launches[-1].end > COMPILE_SECONDS + 0.004


def test_launches_queue_up_one_after_the_other():
    gpu = FakeGpu()
    for _ in range(5):
        gpu.launch(KERNEL, gpu.normal())
    starts, ends = ([getattr(run, name) for run in gpu.launches] for name in ("start", "end"))
    assert starts[1:] == ends[:-1]


def test_a_cold_gpu_is_slow():
    first = [taken(FakeGpu(seed), FakeGpu(seed).normal(), 1)[0] for seed in range(20)]
    assert min(first) > 2.0 * (1 - WANDER) * 1.5


def test_warm_runs_are_as_long_as_the_clock_wanders_but_for_disturbed_ones():
    times = taken(warm(), warm().normal())
    disturbed = times > 3 * 2.0
    assert 0.02 < disturbed.mean() < 2 * DISTURBED_SHARE
    assert (np.abs(times[~disturbed] / 2.0 - 1) <= (1 + WANDER) * (1 + NOISE) - 1 + 1e-3).all()
    assert np.ptp(times[~disturbed]) > WANDER * 2.0


def test_zeros_are_faster():
    ratio = np.median(taken(warm(), FakeGpu().zeros())) / np.median(
        taken(warm(), FakeGpu().normal())
    )
    assert ratio == pytest.approx(ZEROS_SPEED, rel=0.06)


def test_events_give_the_time_between_them_once_they_are_over():
    gpu = warm()
    start, stop = gpu.event(), gpu.event()
    start.record()
    gpu.launch(KERNEL, gpu.normal())
    stop.record()
    with pytest.raises(FakeGpuError, match="synchronize"):
        gpu.elapsed_ms(start, stop)
    stop.synchronize()
    run = gpu.launches[-1]
    assert gpu.elapsed_ms(start, stop) == pytest.approx(1000 * (run.end - run.start), abs=0.01)
    assert gpu.elapsed_ms(stop, stop) == 0


def test_an_event_that_is_in_no_queue_is_refused():
    gpu = FakeGpu()
    with pytest.raises(FakeGpuError, match="not recorded"):
        gpu.event().synchronize()


def test_a_seed_is_one_machine():
    one, same, other = (taken(FakeGpu(seed), FakeGpu().normal(), 9).tolist() for seed in (1, 1, 2))
    assert one == same != other
