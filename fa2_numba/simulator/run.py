"""Launching in the simulator: `simulate(kernel)[grid, block, stream, shared_bytes](*args)`."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numba.cuda.dispatcher import CUDADispatcher
from tqdm.auto import tqdm

from fa2_numba.constants import (
    MAX_GRID_X,
    MAX_GRID_YZ,
    MAX_THREADS_PER_BLOCK,
    SHARED_BYTES_PER_BLOCK,
    STATIC_SHARED_BYTES,
)
from fa2_numba.simulator.engine import Block, Index, describe_traceback
from fa2_numba.simulator.errors import LaunchError, RunTooLongError
from fa2_numba.simulator.memory import BlockMemory, GlobalArray, plain
from fa2_numba.simulator.retarget import retarget
from fa2_numba.simulator.values import scalar_value

PROGRESS_DELAY_SECONDS = 3.0
FIRST_ESTIMATE_SECONDS = 2.0
INTERRUPT_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Simulator:
    """How simulated launches run.

    checks: refuse out-of-bounds, uninitialised and racing accesses (several times slower).
    seed: shuffles the order in which ready threads and blocks run; None runs them in index order.
    compute_capability: the architecture whose shared-memory limit holds.
    max_seconds: a launch that takes, or will take, longer is ended; None never ends one.
    progress: show a bar on launches that take longer than a few seconds.
    """

    checks: bool = True
    seed: int | None = None
    compute_capability: tuple[int, int] = (9, 0)
    max_seconds: float | None = 600.0
    progress: bool = True

    def __post_init__(self) -> None:
        if tuple(self.compute_capability) not in SHARED_BYTES_PER_BLOCK:
            known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_BYTES_PER_BLOCK)
            raise ValueError(
                f"compute_capability={self.compute_capability}: must be one of {known}"
            )

    @property
    def shared_bytes_per_block(self) -> int:
        """The most shared memory a block of this architecture can have."""
        return SHARED_BYTES_PER_BLOCK[tuple(self.compute_capability)]

    def launch(
        self, kernel: object, grid: object, block: object, shared_bytes: int, arguments: tuple
    ) -> None:
        """Run every block of the grid; array arguments are changed in place."""
        function = kernel.py_func if isinstance(kernel, CUDADispatcher) else kernel
        grid, dim = _launch_shape(function.__name__, grid, block)
        if not 0 <= shared_bytes <= self.shared_bytes_per_block:
            raise LaunchError(
                f"{shared_bytes} bytes of dynamic shared memory for kernel {function.__name__}: "
                f"a block of compute capability {self.compute_capability} has 0 to "
                f"{self.shared_bytes_per_block}"
            )
        values = _simulated_arguments(function, arguments, self.checks)
        rng = None if self.seed is None else random.Random(self.seed)
        bar = tqdm(
            total=math.prod(grid),
            desc=f"simulating {function.__name__}",
            unit="block",
            delay=PROGRESS_DELAY_SECONDS,
            leave=False,
            disable=not self.progress,
        )
        name, simulated = function.__name__, retarget(function)
        watch = _Watch(name, math.prod(grid), self.max_seconds)
        try:
            with bar, watch:
                for index in _block_indices(grid, rng):
                    memory = BlockMemory(
                        shared_bytes, STATIC_SHARED_BYTES, self.shared_bytes_per_block, self.checks
                    )
                    Block(name, simulated, values, index, dim, grid, memory, rng).run()
                    watch.finished_block()
                    bar.update()
        except _TimeUp as interruption:
            watch.time_up(interruption)


class _TimeUp(BaseException):
    """Raised in the simulating thread, wherever it is, when the limit has passed."""


class _Watch:
    """Ends a launch whose time, or estimated time, is over the limit.

    A kernel may loop for ever without a point where the simulator is asked anything, so a thread of
    its own watches the clock and interrupts the simulation from outside.
    """

    def __init__(self, kernel: str, blocks: int, max_seconds: float | None) -> None:
        self.kernel = kernel
        self.blocks = blocks
        self.limit = math.inf if max_seconds is None else max_seconds
        self.start = time.perf_counter()
        self.done = 0
        self._ended = threading.Event()
        self._simulating = ctypes.c_ulong(threading.get_ident())
        self._watcher = threading.Thread(target=self._interrupt, daemon=True)

    def __enter__(self) -> None:
        if self.limit < threading.TIMEOUT_MAX:
            self._watcher.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join()
        # Takes back an interruption that has not arrived yet.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._simulating, None)

    def _interrupt(self) -> None:
        pause = self.limit
        # Again, for Python drops an exception that comes while an object is being finalised.
        while not self._ended.wait(pause):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._simulating, ctypes.py_object(_TimeUp))
            pause = INTERRUPT_AGAIN_SECONDS

    def time_up(self, interruption: _TimeUp) -> None:
        """Say where the launch was. It may have been in `__exit__`, so that is done again."""
        self.__exit__()
        place = describe_traceback(interruption)
        self._refuse(
            f"has run {self.limit:g} s with {self.done} of {self.blocks} blocks done"
            + (f" and was at {place}" if place else "")
        )

    def finished_block(self) -> None:
        """After a block: will the rest end in time?"""
        self.done += 1
        elapsed = time.perf_counter() - self.start
        estimate = elapsed / self.done * self.blocks
        if elapsed > min(FIRST_ESTIMATE_SECONDS, self.limit / 2) and estimate > self.limit:
            self._refuse(f"would take about {estimate:.0f} s for its {self.blocks} blocks")

    def _refuse(self, why: str) -> None:
        raise RunTooLongError(
            f"kernel {self.kernel} {why}; the limit is max_seconds={self.limit:g}. Use a smaller "
            "problem, checks=False, or max_seconds=None to run it all the same"
        )


class ConfiguredSimulation:
    """A kernel with its launch configuration; call it with the kernel's arguments."""

    def __init__(self, simulator: Simulator, kernel: object, config: object) -> None:
        if not isinstance(config, tuple) or not 2 <= len(config) <= 4:
            raise LaunchError(
                f"launch configuration {config}: must be [grid, block, stream, shared_bytes]"
            )
        self._simulator = simulator
        self._kernel = kernel
        self._grid, self._block = config[:2]
        self._shared_bytes = config[3] if len(config) == 4 else 0

    def __call__(self, *arguments: object) -> None:
        """Run the kernel; array arguments are changed in place."""
        self._simulator.launch(self._kernel, self._grid, self._block, self._shared_bytes, arguments)


class Simulation:
    """What `simulate` returns: index it with a launch configuration."""

    def __init__(self, simulator: Simulator, kernel: object) -> None:
        self._simulator = simulator
        self._kernel = kernel

    def __getitem__(self, config: object) -> ConfiguredSimulation:
        return ConfiguredSimulation(self._simulator, self._kernel, config)


def simulate(kernel: Callable, **options: object) -> Simulation:
    """Run a `@cuda.jit` kernel on the CPU, thread by thread, exactly as it is written.

        simulate(my_kernel)[blocks, threads, stream, shared_bytes](a, b)

    The launch configuration is Numba's; the stream is ignored. NumPy array arguments are changed in
    place. `options` are the fields of `Simulator`. Raises a `SimulationError` that names the thread
    and the source line where the kernel does what a GPU leaves undefined.
    """
    return Simulation(Simulator(**options), kernel)


def _launch_shape(kernel: str, grid: object, block: object) -> tuple[Index, Index]:
    grid, block = _three("grid", grid), _three("block", block)
    if math.prod(block) > MAX_THREADS_PER_BLOCK or block[2] > 64:
        raise LaunchError(
            f"block {block} of kernel {kernel}: at most {MAX_THREADS_PER_BLOCK} threads, "
            "at most 64 in z"
        )
    if grid[0] > MAX_GRID_X or max(grid[1:]) > MAX_GRID_YZ:
        raise LaunchError(
            f"grid {grid} of kernel {kernel}: at most {MAX_GRID_X} in x, {MAX_GRID_YZ} in y and z"
        )
    return grid, block


def _three(what: str, shape: object) -> Index:
    axes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    whole = all(hasattr(axis, "__index__") and axis > 0 for axis in axes)
    if not 1 <= len(axes) <= 3 or not whole:
        raise LaunchError(f"{what} {shape!r}: must be one to three positive integers")
    return (*map(int, axes), 1, 1)[:3]


def _block_indices(grid: Index, rng: random.Random | None) -> Iterator[Index]:
    indices = ((x, y, z) for z, y, x in itertools.product(*map(range, reversed(grid))))
    if rng is None:
        return indices
    shuffled = list(indices)
    rng.shuffle(shuffled)
    return iter(shuffled)


def _simulated_arguments(function: Callable, arguments: tuple, checks: bool) -> tuple:
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*arguments)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters.values()))
        raise LaunchError(
            f"kernel {function.__name__} takes {len(signature.parameters)} arguments ({names}), "
            f"got {len(arguments)}"
        ) from error
    bound.apply_defaults()
    return tuple(
        _simulated_argument(name, value, checks) for name, value in bound.arguments.items()
    )


def _simulated_argument(name: str, value: object, checks: bool) -> object:
    if isinstance(value, np.ndarray):
        return GlobalArray(value, None, name) if checks else plain(value)
    if hasattr(value, "__cuda_array_interface__"):
        raise LaunchError(f"argument {name} is on a GPU: the simulator takes NumPy arrays")
    return scalar_value(value)
