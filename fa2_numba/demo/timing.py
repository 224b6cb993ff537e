"""How fast the rungs are on a GPU: long random sequences, causal.

- CUDA events around the kernels alone: arrays and workspaces are there before.
- A waiting kernel goes first, so that the host's launch is over when the GPU starts on the rung.
- The median of several runs after warm-up; the L2 cache is not flushed between them.
- FLOPs are those of the two matrix products, 4 B H Nq Nk D, half if causal.
"""

from __future__ import annotations

import math
import statistics
import warnings
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda.core.errors import NumbaPerformanceWarning
from numpy.typing import DTypeLike

from fa2_numba.arrays import DTYPES, KERNEL_DTYPES
from fa2_numba.ladder import RUNGS, Rung, tiles_for
from fa2_numba.launch import ForwardTensors, GpuArray, GpuMachine, KernelLaunch
from fa2_numba.staging import device_workspace, gpu_view
from fa2_numba.testing import random_qkv

WARM_UPS = 2
REPEATS = 10
NAPS = 1000
NAP_NANOSECONDS = 2_000
KEEPS_SCORES = ("standard",)
"""Rungs with S and P of all heads in memory, 4 bytes an element."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal problem with as many keys as queries and no shared heads."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products, half of them hidden by the mask.

        >>> Shape(1, 16, 4096, 64).flops / 1e9
        34.359738368
        """
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim // 2

    @property
    def score_bytes(self) -> int:
        """S and P in float32."""
        return 2 * 4 * self.batch * self.heads * self.seqlen**2

    def __str__(self) -> str:
        return f"B={self.batch} H={self.heads} N={self.seqlen} D={self.head_dim}"


SHAPES = (Shape(1, 16, 1024, 64), Shape(1, 16, 4096, 64), Shape(1, 16, 4096, 128))


@dataclass(frozen=True)
class Timing:
    """One row of the timing table; `milliseconds` is None where the scores do not fit."""

    rung: str
    shape: Shape
    milliseconds: float | None

    @property
    def tflops_per_second(self) -> float | None:
        """Speed in 10^12 floating-point operations a second.

        >>> round(Timing("standard", Shape(1, 16, 4096, 64), 10.0).tflops_per_second, 2)
        3.44
        """
        if self.milliseconds is None:
            return None
        return self.shape.flops / (self.milliseconds * 1e-3) / 1e12


def fits(rung: str, shape: Shape, free_bytes: int) -> bool:
    """Whether a rung's workspace takes at most half of the free memory.

    >>> fits("standard", Shape(1, 16, 4096, 64), 3 * 2**30)
    False
    """
    return rung not in KEEPS_SCORES or 2 * shape.score_bytes <= free_bytes


def time_rungs(rungs: list[str], dtype: str) -> list[Timing]:
    """Time rungs on the current GPU, shape by shape."""
    with warnings.catch_warnings():
        # The waiting kernel is one thread: Numba would warn of the idle rest of the GPU.
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        return [
            Timing(rung, shape, _milliseconds(RUNGS[rung], shape, dtype))
            for shape in SHAPES
            for rung in rungs
        ]


def _milliseconds(rung: Rung, shape: Shape, dtype: str) -> float | None:
    free_bytes, _ = cuda.current_context().get_memory_info()
    if not fits(rung.name, shape, free_bytes):
        return None
    machine = GpuMachine(cuda.get_current_device().id)
    tensors = _random_tensors(shape, dtype)
    config = tiles_for(rung, shape.head_dim, machine.limits)
    launches = rung.plan_forward(tensors, config)
    for _ in range(WARM_UPS):
        machine.run(launches)
    return statistics.median(_timed_run(machine, launches) for _ in range(REPEATS))


def _random_tensors(shape: Shape, dtype: str) -> ForwardTensors:
    sizes = shape.batch, shape.seqlen, shape.seqlen, shape.heads, shape.heads, shape.head_dim
    host = random_qkv(*sizes, DTYPES[dtype])
    q, k, v = (gpu_view(cuda.to_device(array.view(KERNEL_DTYPES[dtype]))) for array in host)
    return ForwardTensors(
        Q=q,
        K=k,
        V=v,
        O=_new_array(q.shape, q.dtype),
        LSE=_new_array((shape.batch, shape.heads, shape.seqlen)),
        softmax_scale=np.float32(1 / math.sqrt(shape.head_dim)),
        causal=True,
        dtype=dtype,
        allocate=_new_array,
    )


def _new_array(sizes: tuple[int, ...], dtype: DTypeLike = np.float32) -> GpuArray:
    return gpu_view(device_workspace(sizes, dtype))


def _timed_run(machine: GpuMachine, launches: list[KernelLaunch]) -> float:
    """Milliseconds of one run; the events and all kernels are on the default stream."""
    start, end = cuda.event(), cuda.event()
    _wait[1, 1](NAPS, np.uint32(NAP_NANOSECONDS))
    start.record()
    machine.run(launches)
    end.record()
    end.synchronize()
    return cuda.event_elapsed_time(start, end)


@cuda.jit
def _wait(naps, nanoseconds):
    # One nanosleep takes anything from 0 to twice its time, 1 ms at most; many average out. A clock
    # would be exact, but Numba has none.
    for _ in range(naps):
        cuda.nanosleep(nanoseconds)
