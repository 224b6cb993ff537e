"""Lesson 11: a benchmark that measures what it says."""

from collections.abc import Callable

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.fake_gpu import WANDER, FakeGpu, FakeKernel

SEEDS = range(8)
TOLERANCE = 0.03
"""Of a time and of a ratio of two: noise that a median of some ten runs leaves."""


def judge_compare(compare: Callable) -> None:
    """Both times are what the GPU takes, and their ratio is that of the kernels, on any day."""
    if not callable(compare):
        raise NotSolved(f"compare is a {type(compare).__name__}: must be a function.")
    for seed in SEEDS:
        gpu = FakeGpu(seed)
        times = 1 + np.random.default_rng(seed).random(2)
        kernels = FakeKernel("mine", float(times[0])), FakeKernel("peer", float(times[1]))
        found = compare(gpu, *kernels)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise NotSolved(f"compare returns {found!r}: must be (ms of mine, ms of peer).")
        for kernel, ms in zip(kernels, found, strict=True):
            _expect_time(gpu, seed, kernel, ms)
        _expect_ratio(seed, found[0] / found[1], times[0] / times[1])


def _expect_time(gpu: FakeGpu, seed: int, kernel: FakeKernel, ms: object) -> None:
    spread = WANDER + TOLERANCE
    low, high = (kernel.milliseconds * (1 + side * spread) for side in (-1, 1))
    try:
        if low <= ms <= high:
            return
    except TypeError:
        raise NotSolved(f"The time of {kernel.name} is {ms!r}: must be a number.") from None
    raise NotSolved(
        f"The time of {kernel.name} is {ms:.4g} ms (GPU {seed}): it takes {low:.2f} to {high:.2f}. "
        + _reason(gpu, kernel, ms, low, high)
    )


def _reason(gpu: FakeGpu, kernel: FakeKernel, ms: float, low: float, high: float) -> str:
    launches = [launch for launch in gpu.launches if launch.kernel == kernel]
    if not launches:
        return "It was never launched."
    if ms < low / 2:
        return (
            "A launch returns at once: look at the clock, or at the second event, only after the "
            "GPU has done its work. (Or are these seconds?)"
        )
    if any(launch.array.zeros for launch in launches):
        return (
            "Its input was zeros, which cost less power, so the GPU runs faster: use random data."
        )
    if ms > high:
        return (
            "Among the runs are cold ones (the first one compiles, and then clocks still rise), or "
            "some were disturbed, which a mean does not forgive."
        )
    return "Are there enough runs?"


def _expect_ratio(seed: int, found: float, expected: float) -> None:
    off = found / expected - 1
    if not abs(off) <= TOLERANCE:
        raise NotSolved(
            f"Each time is possible, but their ratio is off by {off:+.0%} (GPU {seed}): the two "
            "were not measured under the same conditions. Clocks wander: let them take turns."
        )


EXERCISES = (
    Exercise(
        id="11.compare",
        answer="compare",
        points=3,
        hints=(
            "Go through the list of what can be wrong: what runs before the first measured run? "
            "What stands between launch and clock? What data? Mean or median? In which order?",
            "Launch both kernels some fifty times first. Then, in a loop of some thirty rounds, "
            "measure one run of mine and one of the peer, and keep both times.",
            "start, stop = gpu.event(), gpu.event(); start.record(); gpu.launch(kernel, x); "
            "stop.record(); stop.synchronize(); gpu.elapsed_ms(start, stop). x = gpu.normal(). At "
            "the end np.median of each list.",
        ),
        judge=judge_compare,
    ),
)
