"""When and where the blocks of a real launch ran: any kernel, stamped, as it is.

`stamped(kernel)` wraps a kernel's own function between two looks at the clock; nothing is copied
or edited. Kernel arguments cannot be passed on as `*arguments`: Numba compiles such a function for
a tuple, which neither a launch nor the simulator hands over. So the wrapper is written out for the
number of parameters that the kernel has.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import uint64
from numba.cuda.dispatcher import CUDADispatcher

from fa2_numba.device import device_function
from fa2_numba.device.ptx import globaltimer, smid
from fa2_numba.launch import (
    GpuMachine,
    KernelLaunch,
    SimulatorMachine,
    gpu_available,
    signature,
)
from fa2_numba.lessons.timeline import Timeline
from fa2_numba.simulator import Simulator

SMID, START, END = range(3)
"""Columns of `stamps`."""


@device_function
def _is_first_thread():
    return cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0 and cuda.threadIdx.z == 0


@device_function
def _block_number():
    """Number of this block in launch order: x runs fastest."""
    row = cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z
    return cuda.blockIdx.x + cuda.gridDim.x * row


@device_function
def _stamp_start(stamps):
    if _is_first_thread():
        stamps[_block_number(), SMID] = uint64(smid())
        stamps[_block_number(), START] = globaltimer()


@device_function
def _stamp_end(stamps):
    # The block ends when its last thread does, so the first one must not look at the clock before.
    cuda.syncthreads()
    if _is_first_thread():
        stamps[_block_number(), END] = globaltimer()


WRAPPER = """
def stamped_kernel(stamps, {parameters}):
    stamp_start(stamps)
    body({parameters})
    stamp_end(stamps)
"""


@cache
def stamped(kernel: CUDADispatcher) -> CUDADispatcher:
    """A kernel that does what `kernel` does, and notes when and where each block did it.

    Its first argument is new: `stamps`, (blocks, 3) uint64, a row a block in launch order: the
    number of its multiprocessor, and the global timer in nanoseconds before and after. Threads
    that leave the kernel early are met at its end. The rest are the kernel's own arguments.
    """
    function = kernel.py_func
    parameters = inspect.signature(function).parameters
    scope = {
        "stamp_start": _stamp_start,
        "stamp_end": _stamp_end,
        "body": device_function(function),
    }
    taken = sorted(parameters.keys() & {"stamps", *scope})
    if taken:
        raise ValueError(f"kernel {function.__name__}: must not name a parameter {taken[0]!r}")
    exec(WRAPPER.format(parameters=", ".join(parameters)), scope)
    wrapper = scope["stamped_kernel"]
    wrapper.__name__ = f"{function.__name__}_stamped"
    return cuda.jit(wrapper)


def record_timeline(
    kernel: CUDADispatcher,
    grid: int | tuple[int, ...],
    threads: int,
    *arguments: object,
    shared_bytes: int = 0,
) -> Timeline:
    """When and where the blocks of any kernel run: on the GPU if there is one, else simulated.

    shared_bytes: dynamic shared memory of a block. The kernel works on copies of NumPy arrays.

    >>> @cuda.jit
    ... def double(x):
    ...     x[cuda.grid(1)] *= 2
    >>> timeline = record_timeline(double, 3, 32, np.ones(96, np.float32))
    >>> timeline.blocks, bool((timeline.end > timeline.start).all())
    (3, True)
    """
    if gpu_available():
        machine, copy = GpuMachine(cuda.get_current_device().id), cuda.to_device
    else:
        machine, copy = SimulatorMachine(Simulator(progress=False)), np.copy
    copies = tuple(copy(a) if isinstance(a, np.ndarray) else a for a in arguments)
    grid = grid if isinstance(grid, tuple) else (grid,)
    return record_launch(KernelLaunch(kernel, grid, threads, shared_bytes, copies), machine)


def record_launch(launch: KernelLaunch, machine: GpuMachine | SimulatorMachine) -> Timeline:
    """Run a launch with stamps on a machine; times are in nanoseconds from the first block on.

    A GPU runs it twice, so that it neither compiles nor loads while it is timed, and the results
    must not depend on what the outputs hold before. The simulator runs blocks one after the other
    on one multiprocessor, and its clock counts looks at it (`ptx.globaltimer`).
    """
    stamps = np.zeros((math.prod(launch.grid), 3), np.uint64)
    with machine.activate():
        if isinstance(machine, SimulatorMachine):
            machine.run([_with_stamps(launch, stamps)])
            multiprocessors = slots = 1
        else:
            on_gpu = cuda.to_device(stamps)
            stamped_launch = _with_stamps(launch, on_gpu)
            machine.run([stamped_launch, stamped_launch])
            cuda.synchronize()
            stamps = on_gpu.copy_to_host()
            multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT
            slots = _resident_blocks(stamped_launch)
    first = stamps[:, START].min()
    return Timeline(
        start=(stamps[:, START] - first).astype(np.int64),
        end=(stamps[:, END] - first).astype(np.int64),
        multiprocessor=stamps[:, SMID].astype(np.int64),
        multiprocessors=multiprocessors,
        slots=slots,
        unit="ns",
    )


def _with_stamps(launch: KernelLaunch, stamps: object) -> KernelLaunch:
    arguments = (stamps, *launch.arguments)
    return replace(launch, kernel=stamped(launch.kernel), arguments=arguments)


def _resident_blocks(launch: KernelLaunch) -> int:
    """Blocks of a launch that the driver says one multiprocessor of the current GPU holds."""
    function = launch.kernel.compile(signature(launch.arguments)).library.get_cufunc()
    context = cuda.current_context()
    return context.get_active_blocks_per_multiprocessor(
        function, launch.threads, launch.shared_bytes
    )
