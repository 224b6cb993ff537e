"""A model of a GPU for whoever learns to measure one: it computes nothing, but takes its time.

What it does as GPUs do: launches return at once and queue up; the first launch of a kernel compiles
it; clocks rise while the GPU works, and wander; some runs are disturbed; zeros cost less power and
so less time. How much of each is made up. Time is counted, not waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

COMPILE_SECONDS = 0.3
LAUNCH_SECONDS = 5e-6
COLD_SLOWNESS, WARM_AFTER_SECONDS = 1.0, 0.03
"""A cold GPU takes so much longer, and a factor of e less of it after so many seconds of work."""
WANDER, WANDER_SECONDS = 0.1, (0.3, 0.9)
"""Clocks go up and down by so much, with a period between these."""
NOISE = 0.01
DISTURBED_SHARE, DISTURBED_SLOWNESS = 0.08, 4.0
ZEROS_SPEED = 0.75


class FakeGpuError(RuntimeError):
    """What CUDA would refuse, too."""


@dataclass(frozen=True)
class FakeKernel:
    """A kernel by its name, and the milliseconds it takes at the mean clock on random data."""

    name: str
    milliseconds: float


@dataclass(frozen=True)
class FakeArray:
    """An array on the fake GPU; all that counts is whether it holds zeros."""

    zeros: bool


@dataclass(frozen=True)
class Launch:
    """One launch as it went: kernel, input, start and end in seconds."""

    kernel: FakeKernel
    array: FakeArray
    start: float
    end: float


class FakeEvent:
    """A place in the queue whose time the GPU notes when it comes there, like `cupy.cuda.Event`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._reached: float | None = None

    def record(self) -> None:
        """Put it into the queue."""
        self._reached = max(self._gpu._host, self._gpu._free)

    def synchronize(self) -> None:
        """Let the host wait until the GPU has come to it; FakeGpuError if it is in no queue."""
        self._gpu._host = max(self._gpu._host, self._time())

    def _time(self) -> float:
        if self._reached is None:
            raise FakeGpuError("the event was not recorded")
        return self._reached


class FakeGpu:
    """One GPU and the host that launches; each seed is another machine on another day.

    launches: all of them, for those who judge or draw.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._period = self._random.uniform(*WANDER_SECONDS)
        self._phase = self._random.uniform()
        self._host = 0.0
        self._free = 0.0
        self._worked = 0.0
        self._compiled: set[FakeKernel] = set()
        self.launches: list[Launch] = []

    def normal(self) -> FakeArray:
        """An array of random numbers."""
        return FakeArray(zeros=False)

    def zeros(self) -> FakeArray:
        """An array of zeros."""
        return FakeArray(zeros=True)

    def seconds(self) -> float:
        """The host's clock, as `time.perf_counter()`."""
        return self._host

    def launch(self, kernel: FakeKernel, array: FakeArray) -> None:
        """Queue a kernel; the host goes on at once, unless it has to compile."""
        if kernel not in self._compiled:
            self._compiled.add(kernel)
            self._host += COMPILE_SECONDS
        self._host += LAUNCH_SECONDS
        start = max(self._host, self._free)
        taken = kernel.milliseconds / 1000 * self._slowness(start, array)
        self._free = start + taken
        self._worked += taken
        self.launches.append(Launch(kernel, array, start, self._free))

    def synchronize(self) -> None:
        """Let the host wait until the GPU has done all that is queued."""
        self._host = max(self._host, self._free)

    def event(self) -> FakeEvent:
        """A new event, in no queue yet."""
        return FakeEvent(self)

    def elapsed_ms(self, start: FakeEvent, stop: FakeEvent) -> float:
        """Milliseconds between two events; FakeGpuError if the GPU has not come to both."""
        times = start._time(), stop._time()
        if max(times) > self._host:
            raise FakeGpuError("the GPU has not come to the event yet: synchronize() first")
        return 1000 * (times[1] - times[0])

    def _slowness(self, now: float, array: FakeArray) -> float:
        cold = 1 + COLD_SLOWNESS * math.exp(-self._worked / WARM_AFTER_SECONDS)
        wander = 1 + WANDER * math.sin(2 * math.pi * (now / self._period + self._phase))
        noise = 1 + NOISE * self._random.uniform(-1, 1)
        disturbed = self._random.uniform() < DISTURBED_SHARE
        data = ZEROS_SPEED if array.zeros else 1.0
        return cold * wander * noise * data * (DISTURBED_SLOWNESS if disturbed else 1.0)
