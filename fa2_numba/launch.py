"""The two machines that run kernels: a GPU by Numba and the driver, and the simulator on a CPU."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from cuda.bindings import driver
from cuda.core import Kernel, ObjectCode
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv import driver as numba_driver
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.np.numpy_support import from_dtype

from fa2_numba import cubin_cache
from fa2_numba.config import DeviceLimits
from fa2_numba.constants import STATIC_SHARED_BYTES
from fa2_numba.simulator import Report, Simulator
from fa2_numba.tensor_maps import TensorMap, TileCounter

HERE = nullcontext()
WORD_BYTES = 8
MADE_FOR_LAUNCH = TensorMap, TileCounter


class GpuArray(NamedTuple):
    """An array on a GPU as kernels take it: where its elements lie, strides in bytes.

    owner: what the memory belongs to; it lives at least as long as this description.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    owner: object

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


def as_bits(array: np.ndarray | GpuArray) -> np.ndarray | GpuArray:
    """The same memory, its two-byte elements seen as uint16."""
    bits = np.dtype(np.uint16)
    return array._replace(dtype=bits) if isinstance(array, GpuArray) else array.view(bits)


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel, its grid in blocks, threads per block, dynamic shared bytes and arguments.

    arguments: scalars (NumPy's, or Python's int, float, bool) and arrays: on a GPU `GpuArray`s or
    any with `__cuda_array_interface__` and strides in bytes, in the simulator NumPy's. `TensorMap`s
    and `TileCounter`s stand for what is made when the kernel is launched.
    """

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

    On a GPU launches are kept for later arrays, planned from stand-ins (`staging.GpuPlan`): look at
    nothing but shapes, strides and addresses modulo 16, and give kernels whole arrays.
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


@dataclass(frozen=True)
class BackwardTensors:
    """What a backward rung reads and writes, as kernels take them.

    Q, K, V, O, LSE: as in `ForwardTensors`, the last two as the forward pass left them; dO, dQ:
    like Q; dK, dV: like K. deterministic: dQ has to be the same, bit by bit, in every run. The
    rest, and what launches may depend on, is as in `ForwardTensors`.
    """

    Q: object
    K: object
    V: object
    O: object
    LSE: object
    dO: object
    dQ: object
    dK: object
    dV: object
    softmax_scale: np.float32
    causal: bool
    deterministic: bool
    dtype: str
    allocate: Callable[[tuple[int, ...]], object]


class SimulatorMachine:
    """Runs kernels in the simulator, on host arrays."""

    name = "simulator"

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    @property
    def limits(self) -> DeviceLimits:
        """What the simulated device lets a kernel use."""
        capability = tuple(self.simulator.compute_capability)
        return DeviceLimits(capability, self.simulator.shared_bytes_per_block)

    def activate(self) -> AbstractContextManager:
        """Nothing to do: the simulator is where Python runs."""
        return HERE

    def run(self, launches: list[KernelLaunch]) -> list[Report]:
        """Run the kernels one after the other; returns when the last has finished.

        Returns their reports if the simulator counts.
        """
        reports = []
        for launch in launches:
            shape = launch.grid, launch.threads, launch.shared_bytes
            arguments = tuple(map(_on_host, launch.arguments))
            reports.append(self.simulator.launch(launch.kernel, *shape, arguments))
        return reports if self.simulator.counts else []


def _on_host(argument: object) -> object:
    """An argument as a simulated kernel takes it."""
    is_counter = isinstance(argument, TileCounter)
    return np.zeros(argument.shape, argument.dtype) if is_counter else argument


class GpuMachine:
    """Runs kernels on one GPU, asynchronously, on a given CUDA stream."""

    name = "gpu"

    def __init__(self, device: int, stream: int = 0) -> None:
        self.device = device
        self._stream = driver.CUstream(stream)

    @cached_property
    def limits(self) -> DeviceLimits:
        """What the GPU lets a kernel use."""
        return _device_limits(self.device)

    def activate(self) -> AbstractContextManager:
        """Makes the GPU current for what is done inside."""
        error, current = driver.cuCtxGetDevice()
        # Without a context, or before the driver has started, there is an error and no device.
        is_current = not error and int(current) == self.device
        return HERE if is_current else cuda.gpus[self.device]

    def load(self, launch: KernelLaunch, elsewhere: bool = False) -> GpuLaunch:
        """The launch with its kernel on the GPU; call it inside `activate()`.

        elsewhere: nothing lies where its arguments say; `moved` will tell.
        """
        kinds = tuple(map(_kind, launch.arguments))
        kernel = _loaded(launch.kernel, kinds, self.device, launch.shared_bytes)
        grid = (*launch.grid, 1, 1)[:3]
        sizes = (*grid, launch.threads, 1, 1, launch.shared_bytes)
        words = kernel.parameters.pack(launch.arguments)
        for word, argument in zip(kernel.parameters.places, launch.arguments, strict=True):
            if isinstance(argument, MADE_FOR_LAUNCH) and not elsewhere:
                words[word] = self.place(argument)
        return GpuLaunch(kernel, sizes, words)

    def place(self, argument: TensorMap | TileCounter, address: int | None = None) -> int:
        """Where an argument lies that is made for a launch, and kept for the next one like it.

        address: of a map's array, if it is not where the map says.
        """
        return argument.on_gpu(self.device, int(self._stream), address)

    def run(self, launches: Iterable[KernelLaunch | GpuLaunch]) -> list[Report]:
        """Queue the kernels on the stream and return at once; call it inside `activate()`.

        There are no reports of what a GPU does.
        """
        for launch in launches:
            loaded = launch if isinstance(launch, GpuLaunch) else self.load(launch)
            loaded.queue(self._stream)
        return []


def gpu_available() -> bool:
    """Whether there is a GPU that Numba can use."""
    return cuda.is_available()


@cache
def _device_limits(device: int) -> DeviceLimits:
    gpu = cuda.gpus[device]
    capability = tuple(gpu.compute_capability)
    shared_bytes = gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return DeviceLimits(capability, shared_bytes, gpu.MULTIPROCESSOR_COUNT)


Kind = tuple[np.dtype, int | None]
"""What a kernel is compiled for: the dtype of an argument and its axes.

0 axes are a scalar; None is what a kernel sees as an address and nothing more.
"""


def _kind(argument: object) -> Kind:
    if hasattr(argument, "dtype"):
        return argument.dtype, argument.ndim
    return np.dtype(type(argument)), 0


def _numba_type(kind: Kind) -> types.Type:
    dtype, ndim = kind
    return types.Array(from_dtype(dtype), ndim, "A") if ndim else from_dtype(dtype)


def signature(arguments: tuple) -> tuple[types.Type, ...]:
    """The Numba types a kernel is compiled for: arrays of any strides, scalars as they are."""
    return tuple(_numba_type(_kind(argument)) for argument in arguments)


HEADER = "@6Q"
"""Six words: five that cuLaunchKernel takes as `extra`, the size of the parameters that follow.

The five are {POINTER, address of the parameters, SIZE, address of their size, END}.
"""
PARAMETERS_WORD, SIZE_WORD, SIZE_ADDRESS_WORD = 1, 5, 3

HEADER_BYTES = struct.calcsize(HEADER)


class Parameters:
    """How a kernel's parameters lie in memory, for arguments of given kinds.

    Numba takes an array apart into parameters of their own: two pointers for counting references
    (none here), the number of elements, the bytes of one, the address, the shape, the strides.
    Each lies at a multiple of its size, as in a C struct.

    places: for each argument the word in which its address lies, None for a scalar.
    """

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        code, places = HEADER, []
        for dtype, ndim in kinds:
            before = "4q" if ndim else "0q"
            word = struct.calcsize(f"{code}{before}") // WORD_BYTES
            places.append(None if ndim == 0 else word)
            code += f"4qQ{2 * ndim}q" if ndim else dtype.char
        self.places = tuple(places)
        self.size = struct.calcsize(code) - HEADER_BYTES
        self._layout = struct.Struct(f"{code}0q")  # to the end of its last word

    def pack(self, arguments: tuple) -> array:
        """Header and parameters as 8-byte words; `GpuLaunch` sets the header's own addresses."""
        values = []
        for argument in arguments:
            values += _numbers(argument)
        return array(
            "Q",
            self._layout.pack(
                driver.CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT,
                0,
                driver.CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT,
                0,
                driver.CU_LAUNCH_PARAM_END_AS_INT,
                self.size,
                *values,
            ),
        )


def _numbers(argument: object) -> tuple:
    """The values of an argument's parameters."""
    if isinstance(argument, TensorMap):
        return (0,)  # until it has a place
    if isinstance(argument, (GpuArray, TileCounter)):
        address = argument.address
    elif getattr(argument, "ndim", 0):
        address = argument.__cuda_array_interface__["data"][0]
    else:
        return (argument,)
    shape = argument.shape
    return 0, 0, math.prod(shape), argument.dtype.itemsize, address, *shape, *argument.strides


class GpuKernel:
    """A kernel on the current GPU, for arguments of given kinds."""

    def __init__(self, kernel: CUDADispatcher, kinds: tuple[Kind, ...]) -> None:
        self.name = kernel.py_func.__name__
        # Keeps the code on the GPU.
        self._kernel = _load(kernel, tuple(map(_numba_type, kinds)))
        self.function = driver.CUfunction(int(self._kernel.handle))
        self.parameters = Parameters(kinds)

    def allow_shared_bytes(self, shared_bytes: int, device: int) -> None:
        """Opt in to so much dynamic shared memory; above 48 KiB CUDA refuses the launch else."""
        attributes = numba_driver.binding.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = self._kernel.handle
        numba_driver.driver.cuKernelSetAttribute(attribute, shared_bytes, handle, device)


class GpuLaunch:
    """One launch as the driver takes it.

    sizes: grid, block, dynamic shared bytes. words: what `Parameters.pack` gives; they are this
    launch's own, and the driver has read them when `queue` returns.
    """

    __slots__ = ("_kernel", "_sizes", "_start", "_words")

    def __init__(self, kernel: GpuKernel, sizes: tuple[int, ...], words: array) -> None:
        self._kernel, self._sizes, self._words = kernel, sizes, words
        self._start, _ = words.buffer_info()
        words[PARAMETERS_WORD] = self._start + HEADER_BYTES
        words[SIZE_ADDRESS_WORD] = self._start + SIZE_WORD * WORD_BYTES

    @property
    def places(self) -> tuple[int | None, ...]:
        """For each argument what `moved` calls its word, None for a scalar."""
        return self._kernel.parameters.places

    def moved(self, places: Iterable[tuple[int, int]], addresses: Sequence[int]) -> GpuLaunch:
        """The same with arrays that lie elsewhere: (word, index of its new address), ..."""
        words = self._words[:]
        for word, index in places:
            words[word] = addresses[index]
        return GpuLaunch(self._kernel, self._sizes, words)

    def queue(self, stream: driver.CUstream) -> None:
        """Queue the kernel."""
        function = self._kernel.function
        (error,) = driver.cuLaunchKernel(function, *self._sizes, stream, 0, self._start)
        if error:
            *grid, threads, _, _, shared_bytes = self._sizes
            raise numba_driver.CudaAPIError(
                int(error),
                f"kernel {self._kernel.name}, {tuple(grid)} blocks of {threads} threads, "
                f"{shared_bytes} bytes of shared memory: {error.name}",
            )


@cache
def _loaded(
    kernel: CUDADispatcher, kinds: tuple[Kind, ...], device: int, shared_bytes: int
) -> GpuKernel:
    """The kernel on the current GPU, allowed the dynamic shared memory it needs.

    Exactly 48 KiB also fails where a kernel has static shared memory, hence `>=`.
    """
    loaded = GpuKernel(kernel, kinds)
    if shared_bytes >= STATIC_SHARED_BYTES:
        loaded.allow_shared_bytes(shared_bytes, device)
    return loaded


def _load(kernel: CUDADispatcher, types: tuple[types.Type, ...]) -> Kernel:
    """The kernel's machine code on the current GPU, from the disk or compiled.

    Numba's own launch syntax would compile once more for contiguous arrays.
    """
    key = cubin_cache.key_of(kernel, types, cuda.get_current_device().compute_capability)
    if (kept := cubin_cache.load(key)) is not None:
        entry, cubin = kept
        return ObjectCode.from_cubin(cubin).get_kernel(entry)
    compiled = kernel.compile(types)
    cubin_cache.store(key, compiled.entry_name, compiled.library.get_cubin().code)
    return compiled.library.get_cufunc().kernel
