"""The two machines that run kernels: a GPU through Numba, and the simulator on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
from cuda.core import Stream
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv import driver as numba_driver
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.typing.typeof import typeof

from fa2_numba.constants import STATIC_SHARED_BYTES
from fa2_numba.simulator import Report, Simulator


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel, its grid in blocks, threads per block, dynamic shared bytes and arguments."""

    kernel: object
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    arguments: tuple


@dataclass(frozen=True)
class ForwardTensors:
    """What a forward rung reads and writes, as kernels take them.

    Q: (batch, seqlen_q, heads, head_dim); K, V: (batch, seqlen_k, kv_heads, head_dim); O like Q;
    LSE: (batch, heads, seqlen_q) float32, natural logarithm. bfloat16 arrays are uint16 bits.
    allocate(shape) gives a float32 workspace on the same machine.
    """

    Q: object
    K: object
    V: object
    O: object
    LSE: object
    softmax_scale: np.float32
    causal: bool
    dtype: str
    allocate: Callable[[tuple[int, ...]], object]

    @property
    def operands(self) -> tuple[object, ...]:
        """Q, K, V, O and LSE, the first arguments of every kernel that computes all of it."""
        return self.Q, self.K, self.V, self.O, self.LSE


class SimulatorMachine:
    """Runs kernels in the simulator, on host arrays."""

    name = "simulator"

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.shared_bytes_per_block = simulator.shared_bytes_per_block

    def activate(self) -> AbstractContextManager:
        """Nothing to do: the simulator is where Python runs."""
        return nullcontext()

    def run(self, launches: list[KernelLaunch]) -> list[Report]:
        """Run the kernels one after the other; returns when the last has finished.

        Returns their reports if the simulator counts.
        """
        reports = [
            self.simulator.launch(
                launch.kernel, launch.grid, launch.threads, launch.shared_bytes, launch.arguments
            )
            for launch in launches
        ]
        return reports if self.simulator.counts else []


class GpuMachine:
    """Runs kernels on one GPU, asynchronously, on a given CUDA stream."""

    name = "gpu"

    def __init__(self, device: int, stream: int = 0) -> None:
        self.device = device
        self._stream = Stream.from_handle(stream)
        self.shared_bytes_per_block = _shared_bytes_per_block(device)

    def activate(self) -> AbstractContextManager:
        """Makes the GPU current for what is done inside."""
        return _on_device(self.device)

    def run(self, launches: list[KernelLaunch]) -> list[Report]:
        """Queue the kernels on the stream and return at once; call it inside `activate()`.

        There are no reports of what a GPU does.
        """
        for launch in launches:
            arguments, shared_bytes = launch.arguments, launch.shared_bytes
            kernel = _compiled(launch.kernel, signature(arguments), self.device, shared_bytes)
            grid, block = (*launch.grid, 1, 1)[:3], (launch.threads, 1, 1)
            kernel.launch(arguments, grid, block, self._stream, shared_bytes)
        return []


def gpu_available() -> bool:
    """Whether there is a GPU that Numba can use."""
    return cuda.is_available()


def _on_device(device: int) -> AbstractContextManager:
    return cuda.gpus[device] if device != _current_device() else nullcontext()


def _current_device() -> int:
    return cuda.get_current_device().id


@cache
def _shared_bytes_per_block(device: int) -> int:
    with cuda.gpus[device]:
        return cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


def signature(arguments: tuple) -> tuple[types.Type, ...]:
    """The Numba types a kernel is compiled for: arrays of any strides, scalars as they are."""
    return tuple(
        types.Array(from_dtype(argument.dtype), argument.ndim, "A")
        if getattr(argument, "ndim", 0)
        else typeof(argument)
        for argument in arguments
    )


@cache
def _compiled(
    kernel: CUDADispatcher, types: tuple[types.Type, ...], device: int, shared_bytes: int
) -> object:
    """The kernel compiled for the current device and allowed the dynamic shared memory it needs.

    Numba's own launch syntax would compile once more for contiguous arrays and warn of every small
    grid; `launch` of the compiled kernel takes arrays of any strides. CUDA refuses more than 48 KiB
    of shared memory until a kernel has opted in, which Numba does not do for it; exactly 48 KiB
    also fails where a kernel has static shared memory, hence `>=`.
    """
    compiled = kernel.compile(types)
    if shared_bytes >= STATIC_SHARED_BYTES:
        function = compiled.library.get_cufunc()
        attributes = numba_driver.binding.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        numba_driver.driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, device)
    return compiled
