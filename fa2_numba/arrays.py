"""Arrays of four libraries behind one description, in and out without hidden copies.

NumPy and torch CPU tensors are host arrays; CuPy arrays, Numba device arrays and torch CUDA tensors
stay on the GPU that holds them. A library is recognised by where its array's class was defined, so
none is imported that the caller does not use.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numba import cuda

from fa2_numba.errors import ArgumentTypeError
from fa2_numba.launch import HERE, GpuArray

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of Q, K, V and O by name. Kernels see bfloat16 as its bits, uint16."""

KERNEL_DTYPES = DTYPES | {"bfloat16": np.dtype(np.uint16)}

ALIGNMENT = 16
"""Bytes of the widest access of a kernel; of no more does an address need to be a multiple."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Array(NamedTuple):
    """An argument: its library's object and how it lies in memory.

    strides are in bytes; device is the GPU's number, None on the host; address is that of the
    first element.
    """

    name: str
    value: object
    library: type[NumpyLibrary]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    address: int

    def host_view(self) -> np.ndarray:
        """A host array's elements as a kernel takes them, without a copy."""
        values = self.library.host_values(self.value)
        return values.view(KERNEL_DTYPES[self.dtype]) if self.dtype == "bfloat16" else values

    def gpu_view(self) -> GpuArray:
        """A GPU array's elements as a kernel takes them, without a copy or a synchronisation."""
        dtype = KERNEL_DTYPES[self.dtype]
        return GpuArray(self.address, self.shape, self.strides, dtype, owner=self.value)

    @property
    def layout(self) -> tuple:
        """Library, shape, strides, dtype, device, and the address modulo `ALIGNMENT`.

        All that decides how a kernel reads an array, whatever it holds and wherever it lies.
        """
        return *self[2:7], self.address % ALIGNMENT

    @property
    def aligned(self) -> bool:
        """Whether every element lies at a multiple of its size, as a GPU needs it."""
        return math.gcd(self.address, *self.strides) % DTYPES[self.dtype].itemsize == 0

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share an address, as those of a broadcast array do."""
        if 0 in self.shape:
            return False
        extent = DTYPES[self.dtype].itemsize
        axes = zip(map(abs, self.strides), self.shape, strict=True)
        for stride, size in sorted(axis for axis in axes if axis[1] > 1):
            if stride < extent:
                return True
            extent += stride * (size - 1)
        return False

    def shares_memory_with(self, other: Array) -> bool:
        """Whether some element of both lies at one address (assumed where that is hard to tell)."""
        if self.device != other.device:
            return False
        try:
            return np.shares_memory(self._addresses(), other._addresses(), max_work=10_000)
        except np.exceptions.TooHardError:
            return True

    def _addresses(self) -> np.ndarray:
        """A NumPy array that stands at the same addresses; its elements must never be touched."""
        return np.asarray(_Addresses(self))


class _Addresses:
    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "shape": array.shape,
            "strides": array.strides,
            "typestr": KERNEL_DTYPES[array.dtype].str,
            "data": (array.address, True),
            "version": 3,
        }


class NumpyLibrary:
    """NumPy arrays, on the host; the other libraries say where they differ."""

    @staticmethod
    def obstacle(value: object) -> str | None:
        """Why kernels cannot take this array's memory as it is, None if they can."""
        if isinstance(value, np.ma.MaskedArray):
            return "a masked array, whose mask would be ignored; pass .filled(...)"
        if not value.dtype.isnative:
            return f"of byte-swapped dtype {value.dtype.str}; must be in native byte order"
        return None

    @staticmethod
    def layout(value: np.ndarray) -> tuple[tuple, tuple, str, int | None, int]:
        """Shape, strides in bytes, dtype name, device and address of an array."""
        address = value.__array_interface__["data"][0]
        return value.shape, value.strides, _dtype_name(value.dtype), None, address

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int | None) -> object:
        """A new array of one of `DTYPES`, its elements not set."""
        return np.empty(shape, DTYPES[dtype])

    @staticmethod
    def empty_like(value: object) -> object:
        """A new array of the same shape, dtype, device and memory order."""
        return np.empty_like(value)

    @staticmethod
    def fill(value: object, number: float) -> None:
        """Set every element."""
        value[...] = number

    @staticmethod
    def host_values(value: object) -> np.ndarray:
        """The elements as a NumPy array: the memory itself on the host, a copy from a GPU."""
        return np.asarray(value)

    @staticmethod
    def copy_from_host(value: object, host: np.ndarray) -> None:
        """Copy NumPy elements into the array."""
        value[...] = host

    @staticmethod
    def stream(device: int | None) -> int:
        """The library's current CUDA stream on a device, as an address; 0 is the default stream."""
        return 0

    @staticmethod
    def tracks_gradient(value: object) -> bool:
        """Whether the library would record operations on this array for a backward pass."""
        return False

    @staticmethod
    def writable(value: object) -> bool:
        """Whether elements may be set."""
        return value.flags.writeable


class CupyLibrary(NumpyLibrary):
    """CuPy arrays, on a GPU."""

    @staticmethod
    def layout(value: object) -> tuple[tuple, tuple, str, int | None, int]:
        """Shape, strides in bytes, dtype name, device and address of an array."""
        memory = value.data
        return value.shape, value.strides, _dtype_name(value.dtype), memory.device_id, memory.ptr

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int | None) -> object:
        """A new array on the device, from CuPy's memory pool."""
        with _cupy_on(device):
            return sys.modules["cupy"].empty(shape, DTYPES[dtype])

    @staticmethod
    def empty_like(value: object) -> object:
        """A new array of the same shape, dtype, device and memory order."""
        cupy = sys.modules["cupy"]
        with _cupy_on(value.data.device_id):
            # To find an order takes CuPy longer than to allocate.
            if value.flags.c_contiguous:
                return cupy.empty(value.shape, value.dtype)
            return cupy.empty_like(value)

    @staticmethod
    def fill(value: object, number: float) -> None:
        """Set every element."""
        with value.device:
            value.fill(number)

    @staticmethod
    def host_values(value: object) -> np.ndarray:
        """A copy of the elements on the host."""
        return value.get()

    @staticmethod
    def copy_from_host(value: object, host: np.ndarray) -> None:
        """Copy NumPy elements into the array."""
        cupy = sys.modules["cupy"]
        with value.device:
            value[...] = cupy.asarray(host)

    @staticmethod
    def stream(device: int | None) -> int:
        """CuPy's current stream on the device."""
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr

    @staticmethod
    def writable(value: object) -> bool:
        """CuPy has no read-only arrays."""
        return True


def _cupy_on(device: int) -> AbstractContextManager:
    """Makes a device CuPy's current one, which it mostly is."""
    cuda = sys.modules["cupy"].cuda
    return HERE if cuda.runtime.getDevice() == device else cuda.Device(device)


class NumbaLibrary(NumpyLibrary):
    """Numba device arrays, on a GPU."""

    @staticmethod
    def layout(value: object) -> tuple[tuple, tuple, str, int | None, int]:
        """Shape, strides in bytes, dtype name, device and address of an array."""
        address = value.__cuda_array_interface__["data"][0]
        # An empty array owns no memory that would say where it is.
        context = value.gpu_data.context if value.size else cuda.current_context()
        return value.shape, value.strides, _dtype_name(value.dtype), context.device.id, address

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int | None) -> object:
        """A new array on the device."""
        with cuda.gpus[device]:
            return cuda.device_array(shape, DTYPES[dtype])

    @staticmethod
    def empty_like(value: object) -> object:
        """A new contiguous array of the same shape, dtype and device."""
        shape, _, dtype, device, _ = NumbaLibrary.layout(value)
        return NumbaLibrary.empty(shape, dtype, device)

    @staticmethod
    def fill(value: object, number: float) -> None:
        """Set every element."""
        NumbaLibrary.copy_from_host(value, np.full(value.shape, number, value.dtype))

    @staticmethod
    def host_values(value: object) -> np.ndarray:
        """A copy of the elements on the host."""
        return value.copy_to_host()

    @staticmethod
    def copy_from_host(value: object, host: np.ndarray) -> None:
        """Copy NumPy elements into the array."""
        if value.size:
            value[:] = np.ascontiguousarray(host)

    @staticmethod
    def writable(value: object) -> bool:
        """Numba has no read-only device arrays."""
        return True


class TorchLibrary(NumpyLibrary):
    """torch tensors, on the host or on a GPU."""

    @staticmethod
    def obstacle(value: object) -> str | None:
        """Why kernels cannot take this tensor's memory as it is, None if they can."""
        torch = sys.modules["torch"]
        if not (value.is_cuda or value.is_cpu):
            return f"on {value.device}; must be a CPU or CUDA tensor"
        if value.layout is not torch.strided or value.is_nested:
            return f"nested, or of layout {value.layout}; must be strided, not nested"
        if value.is_neg():
            return "lazily negated, its memory holds -x; call resolve_neg() on it"
        return None

    @staticmethod
    def layout(value: object) -> tuple[tuple, tuple, str, int | None, int]:
        """Shape, strides in bytes, dtype name, device and address of a tensor."""
        size = value.element_size()
        strides = tuple([stride * size for stride in value.stride()])
        device = value.get_device() if value.is_cuda else None
        dtype = _torch_dtype_name(value.dtype)
        return tuple(value.shape), strides, dtype, device, value.data_ptr()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int | None) -> object:
        """A new tensor on the device."""
        torch = sys.modules["torch"]
        where = "cpu" if device is None else device
        return torch.empty(shape, dtype=getattr(torch, dtype), device=where)

    @staticmethod
    def empty_like(value: object) -> object:
        """A new tensor of the same shape, dtype, device and memory order."""
        return sys.modules["torch"].empty_like(value, requires_grad=False)

    @staticmethod
    def fill(value: object, number: float) -> None:
        """Set every element."""
        value.fill_(number)

    @staticmethod
    def host_values(value: object) -> np.ndarray:
        """The elements as a NumPy array: the memory itself on the host, a copy from a GPU."""
        host = value.detach().cpu()
        if host.dtype == sys.modules["torch"].bfloat16:
            return host.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    @staticmethod
    def copy_from_host(value: object, host: np.ndarray) -> None:
        """Copy NumPy elements (bfloat16 as its bits) into the tensor."""
        torch = sys.modules["torch"]
        bits = np.ascontiguousarray(host).view(f"i{host.itemsize}")
        value.copy_(torch.from_numpy(bits).view(value.dtype))

    @staticmethod
    def stream(device: int | None) -> int:
        """torch's current stream on the device."""
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream

    @staticmethod
    def tracks_gradient(value: object) -> bool:
        """Whether autograd is on and the tensor takes part in it."""
        return value.requires_grad and sys.modules["torch"].is_grad_enabled()

    @staticmethod
    def writable(value: object) -> bool:
        """torch has no read-only tensors."""
        return True


def describe(name: str, value: object) -> Array:
    """The description of argument `name`, or an error that names what is accepted."""
    library = _library(type(value))
    if library is None:
        raise ArgumentTypeError(
            f"{name}: a {type(value).__module__}.{type(value).__qualname__}; must be a NumPy array,"
            " a CuPy array, a Numba device array, or a torch tensor on CPU or CUDA"
        )
    if (obstacle := library.obstacle(value)) is not None:
        raise ArgumentTypeError(f"{name}: {obstacle}")
    return of_library(name, value, library)


def of_library(name: str, value: object, library: type[NumpyLibrary]) -> Array:
    """The description of an array that is known to be one that kernels can take."""
    return Array(name, value, library, *library.layout(value))


def _dtype_name(dtype: np.dtype) -> str:
    # NumPy composes the name of a dtype anew each time.
    return DTYPE_NAMES.get(dtype) or dtype.name


@cache
def _torch_dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _library(kind: type) -> type[NumpyLibrary] | None:
    if issubclass(kind, np.ndarray):
        return NumpyLibrary
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "cupy" and base.__name__ == "ndarray":
            return CupyLibrary
        if root == "torch" and base.__name__ == "Tensor":
            return TorchLibrary
        if root == "numba" and base.__name__ == "DeviceNDArray":
            return NumbaLibrary
    return None
