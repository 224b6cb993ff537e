"""Launching in the simulator: `simulate(kernel)[grid, block, stream, shared_bytes](*args)`."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import FunctionType

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
from fa2_numba.simulator.addresses import global_arguments
from fa2_numba.simulator.counting import LaunchCounter
from fa2_numba.simulator.engine import Block, Index, Observer
from fa2_numba.simulator.errors import LaunchError, SimulationError
from fa2_numba.simulator.memory import CHECKED, UNCHECKED, ArrayKinds, BlockMemory
from fa2_numba.simulator.report import Report
from fa2_numba.simulator.retarget import PLAIN
from fa2_numba.simulator.values import scalar_value
from fa2_numba.simulator.watch import TimeUp, Watch

PROGRESS_DELAY_SECONDS = 3.0


@dataclass(frozen=True)
class Simulator:
    """How simulated launches run.

    checks: refuse out-of-bounds, uninitialised and racing accesses (several times slower).
    seed: shuffles the order in which ready threads and blocks run; None runs them in index order
        (after a barrier, the last to come goes on first).
    compute_capability: the architecture whose shared-memory limit holds.
    max_seconds: a launch that takes, or will take, longer is ended; None never ends one.
    progress: show a bar on launches of several blocks that take longer than a few seconds.
    counts: count what the kernel does; a launch then returns a `Report`. The kernels here take up
        to 3 times as long, a small one that does little but load, store and call may take more.
        Every access between two barriers takes 24 bytes of the host's memory.
    early: copies by TMA and products by `wgmma` are done when they are issued, and not only when
        nobody can go on or somebody waits for them. A right kernel does not care.
    """

    checks: bool = True
    seed: int | None = None
    compute_capability: tuple[int, int] = (9, 0)
    max_seconds: float | None = 600.0
    progress: bool = True
    counts: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_BYTES_PER_BLOCK)
        rules = {
            "checks": (_is_bool, "True or False"),
            "seed": (_is_seed, "an integer or None"),
            "compute_capability": (_is_capability, f"one of {known}, as a pair like (9, 0)"),
            "max_seconds": (_is_limit, "a positive number or None"),
            "progress": (_is_bool, "True or False"),
            "counts": (_is_bool, "True or False"),
            "early": (_is_bool, "True or False"),
        }
        for field, (holds, rule) in rules.items():
            value = getattr(self, field)
            if not holds(value):
                raise ValueError(f"{field}={value!r}: must be {rule}")

    @property
    def shared_bytes_per_block(self) -> int:
        """The most shared memory a block of this architecture can have."""
        return SHARED_BYTES_PER_BLOCK[tuple(self.compute_capability)]

    def launch(
        self, kernel: object, grid: object, block: object, shared_bytes: int, arguments: tuple
    ) -> Report | None:
        """Run every block of the grid; array arguments are changed in place.

        Returns the report if the simulator counts.
        """
        launch = self.prepare(kernel, grid, block, shared_bytes, arguments)
        bar = tqdm(
            total=math.prod(launch.grid),
            desc=f"simulating {launch.kernel}",
            unit="block",
            delay=PROGRESS_DELAY_SECONDS,
            leave=False,
            # Of one block a bar knows nothing before the end.
            disable=not self.progress or math.prod(launch.grid) == 1,
        )
        watch = Watch(launch.kernel, math.prod(launch.grid), self.max_seconds)
        try:
            with bar, watch:
                for one in launch.blocks():
                    one.run()
                    watch.finished_block()
                    bar.update()
        except TimeUp as interruption:
            watch.time_up(interruption)
        return launch.counter.report if launch.counter else None

    def prepare(
        self, kernel: object, grid: object, block: object, shared_bytes: int, arguments: tuple
    ) -> Launch:
        """Check a launch and rebuild its kernel for the simulator, without running it."""
        function = _kernel_function(kernel)
        name = function.__name__
        grid, dim = _launch_shape(name, grid, block)
        self._check_shared_bytes(name, shared_bytes)
        if self.counts:
            counter = LaunchCounter(function, self.checks)
            simulated, kinds = counter.function, counter.kinds
        else:
            counter, simulated = None, PLAIN.function(function)
            kinds = CHECKED if self.checks else UNCHECKED
        values = _simulated_arguments(function, arguments, kinds)
        return Launch(self, name, simulated, values, kinds, grid, dim, shared_bytes, counter)

    def _check_shared_bytes(self, kernel: str, size: object) -> None:
        limit = self.shared_bytes_per_block
        if not hasattr(size, "__index__") or not 0 <= size <= limit:
            raise _error(
                LaunchError,
                kernel,
                f"{size!r} bytes of dynamic shared memory for kernel {kernel}: a block of compute "
                f"capability {self.compute_capability} has a whole number of them, 0 to {limit}",
            )


@dataclass(frozen=True)
class Launch:
    """A launch that has been checked: the kernel as the simulator runs it, and all it needs."""

    simulator: Simulator
    kernel: str
    function: Callable
    arguments: tuple
    kinds: ArrayKinds
    grid: Index
    dim: Index
    shared_bytes: int
    counter: LaunchCounter | None

    def blocks(self, observer: Observer | None = None) -> Iterator[Block]:
        """The blocks one by one, in the order they run; each must have run before the next.

        observer: who is told what they do; the launch's own counter, if none is given.
        """
        observer = observer or self.counter
        seed = self.simulator.seed
        rng = None if seed is None else random.Random(int(seed))
        named = zip(self.function.__code__.co_varnames, self.arguments, strict=False)
        arguments = global_arguments(named)
        for index in _block_indices(self.grid, rng):
            memory = BlockMemory(
                self.shared_bytes,
                STATIC_SHARED_BYTES,
                self.simulator.shared_bytes_per_block,
                self.kinds,
                arguments,
            )
            yield Block(
                self.kernel,
                self.function,
                self.arguments,
                index,
                self.dim,
                self.grid,
                memory,
                rng,
                observer,
                self.simulator.early,
            )


def _is_bool(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_seed(value: object) -> bool:
    return value is None or (isinstance(value, Integral) and not _is_bool(value))


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, Real) and not _is_bool(value) and value > 0)


def _is_capability(value: object) -> bool:
    is_pair = isinstance(value, (tuple, list)) and all(isinstance(x, Integral) for x in value)
    return is_pair and tuple(value) in SHARED_BYTES_PER_BLOCK


class ConfiguredSimulation:
    """A kernel with its launch configuration; call it with the kernel's arguments."""

    def __init__(self, simulator: Simulator, kernel: object, config: object) -> None:
        if not isinstance(config, tuple) or not 2 <= len(config) <= 4:
            name = _kernel_function(kernel).__name__
            raise _error(
                LaunchError,
                name,
                f"launch configuration {config!r} of kernel {name}: must be [grid, block], "
                "[grid, block, stream] or [grid, block, stream, shared_bytes]",
            )
        self.simulator = simulator
        self._kernel = kernel
        self._grid, self._block = config[:2]
        self._shared_bytes = config[3] if len(config) == 4 else 0

    def __call__(self, *arguments: object) -> Report | None:
        """Run the kernel; array arguments are changed in place. Returns what has been counted."""
        return self.simulator.launch(
            self._kernel, self._grid, self._block, self._shared_bytes, arguments
        )

    def prepare(self, *arguments: object, counts: bool = False) -> Launch:
        """The launch, checked but not run, with or without hooks that count."""
        simulator = replace(self.simulator, counts=counts)
        return simulator.prepare(
            self._kernel, self._grid, self._block, self._shared_bytes, arguments
        )


class Simulation:
    """What `simulate` returns: index it with a launch configuration."""

    def __init__(self, simulator: Simulator, kernel: object) -> None:
        _kernel_function(kernel)  # refuses what is no kernel
        self._simulator = simulator
        self._kernel = kernel

    def __getitem__(self, config: object) -> ConfiguredSimulation:
        return ConfiguredSimulation(self._simulator, self._kernel, config)


def simulate(kernel: Callable, **options: object) -> Simulation:
    """Run a `@cuda.jit` kernel on the CPU, thread by thread, exactly as it is written.

        report = simulate(my_kernel)[blocks, threads, stream, shared_bytes](a, b)

    The launch configuration is Numba's; the stream is ignored. NumPy array arguments are changed in
    place. Returns a `Report` of what the kernel did; with counts=False, which is faster, None.
    `options` are the fields of `Simulator`. Raises a `SimulationError` that names the thread
    and the source line where the kernel does what a GPU leaves undefined.

    Two limits: races are looked for in shared memory only, not in global memory. And a thread that
    waits in a loop for another one gives it a turn if the loop has an atomic operation or a
    `nanosleep`; one that reads plain memory again and again runs until `max_seconds` ends it.
    """
    return Simulation(Simulator(**{"counts": True} | options), kernel)


def _kernel_function(kernel: object) -> FunctionType:
    function = kernel.py_func if isinstance(kernel, CUDADispatcher) else kernel
    if not isinstance(function, FunctionType):
        raise LaunchError(f"kernel {kernel!r}: must be a function, with or without @cuda.jit")
    return function


def _error(kind: type, kernel: str, what: str) -> SimulationError:
    error = kind(what)
    error.kernel = kernel
    return error


def _launch_shape(kernel: str, grid: object, block: object) -> tuple[Index, Index]:
    grid, block = _three(kernel, "grid", grid), _three(kernel, "block", block)
    if math.prod(block) > MAX_THREADS_PER_BLOCK or block[2] > 64:
        rule = f"at most {MAX_THREADS_PER_BLOCK} threads, at most 64 in z"
        raise _error(LaunchError, kernel, f"block {block} of kernel {kernel}: {rule}")
    if grid[0] > MAX_GRID_X or max(grid[1:]) > MAX_GRID_YZ:
        rule = f"at most {MAX_GRID_X} in x, {MAX_GRID_YZ} in y and z"
        raise _error(LaunchError, kernel, f"grid {grid} of kernel {kernel}: {rule}")
    return grid, block


def _three(kernel: str, what: str, shape: object) -> Index:
    axes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    whole = all(hasattr(axis, "__index__") and axis > 0 for axis in axes)
    if not 1 <= len(axes) <= 3 or not whole:
        rule = "must be one to three positive integers"
        raise _error(LaunchError, kernel, f"{what} {shape!r} of kernel {kernel}: {rule}")
    return (*map(int, axes), 1, 1)[:3]


def _block_indices(grid: Index, rng: random.Random | None) -> Iterator[Index]:
    indices = ((x, y, z) for z, y, x in itertools.product(*map(range, reversed(grid))))
    if rng is None:
        return indices
    shuffled = list(indices)
    rng.shuffle(shuffled)
    return iter(shuffled)


def _simulated_arguments(function: Callable, arguments: tuple, kinds: ArrayKinds) -> tuple:
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*arguments)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters.values()))
        raise _error(
            LaunchError,
            function.__name__,
            f"kernel {function.__name__} takes {len(signature.parameters)} arguments ({names}), "
            f"got {len(arguments)}",
        ) from error
    bound.apply_defaults()
    return tuple(
        _simulated_argument(function.__name__, name, value, kinds)
        for name, value in bound.arguments.items()
    )


def _simulated_argument(kernel: str, name: str, value: object, kinds: ArrayKinds) -> object:
    if isinstance(value, np.ndarray):
        return kinds.argument(value, name)
    if hasattr(value, "__cuda_array_interface__"):
        what = f"argument {name} is on a GPU, in kernel {kernel}: the simulator takes NumPy arrays"
        raise _error(LaunchError, kernel, what)
    return scalar_value(value)
