"""Kernel arguments that are made when a kernel is launched: tensor maps, and counters of tiles.

A kernel takes a map as an address in global memory (int64), a counter as an array of one element.
On a GPU a map is 128 bytes that the driver encodes for the array where it lies; it is kept there
for the next launch with the same array. In the simulator the map itself goes to the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import Lock

import numpy as np
from cuda.bindings import driver

MAP_BYTES = 128
MAX_MAPS = 8192
"""So many are kept on a GPU; then all work there is awaited, and they are made anew."""
BOX_COLUMNS = 64
STRIDE_UNIT = 16
MAX_STRIDE = 2**40
ELEMENT_BYTES = 2


def refusal(array: object) -> str | None:
    """Why TMA cannot read an array (batch, seqlen, heads, head_dim) of 16-bit elements, or None.

    array: as kernels take it. What is wrong is said of its address, shape or strides in bytes.
    """
    if 0 in array.shape:
        return f"shape {array.shape}: must have elements"
    if array.shape[3] > 1 and array.strides[3] != ELEMENT_BYTES:
        return f"strides {array.strides} in bytes: the last must be {ELEMENT_BYTES}"
    strides = [s for s, size in zip(array.strides[:3], array.shape[:3], strict=True) if size > 1]
    if any(s <= 0 or s % STRIDE_UNIT or s >= MAX_STRIDE for s in strides):
        return f"strides {array.strides} in bytes: must be positive multiples of {STRIDE_UNIT}"
    if address_of(array) % STRIDE_UNIT:
        return f"address {address_of(array):#x}: must be a multiple of {STRIDE_UNIT}"
    return None


def address_of(array: object) -> int:
    """Of the first element, in bytes."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.address


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees an array (batch, seqlen, heads, head_dim) of 16-bit elements.

    A copy moves a box of `rows` x 64 elements of one head, swizzled in lines of 128 bytes; outside
    the array it reads zeros and writes nothing.
    """

    array: object
    rows: int

    dtype = np.dtype(np.int64)
    ndim = None

    @property
    def address(self) -> int:
        """Of the array on a GPU, as it was given."""
        return self.array.address

    def on_gpu(self, device: int, stream: int, address: int | None) -> int:
        """Where the map lies on the current GPU, for its array or one like it at this address."""
        address = self.array.address if address is None else address
        return _maps(device).address(address, self.array.shape, self.array.strides, self.rows)


@dataclass(frozen=True)
class TileCounter:
    """A number, uint32, that is 0 whenever no kernel runs; kernels that count in it leave it so.

    Kernels of one stream share it, for they run one after the other.
    """

    dtype = np.dtype(np.uint32)
    ndim = 1
    shape, strides = (1,), (4,)
    address = 0  # until it has a place

    @staticmethod
    def on_gpu(device: int, stream: int, address: int | None) -> int:
        """Where the counter of a stream lies on the current GPU."""
        return _counter(device, stream)


class _Maps:
    """The tensor maps on one GPU, by what they describe."""

    def __init__(self) -> None:
        self._pool = _checked(driver.cuMemAlloc(MAX_MAPS * MAP_BYTES))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = _checked(driver.cuStreamCreate(flags))
        self._addresses: dict[tuple, int] = {}
        self._making = Lock()

    def address(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
    ) -> int:
        """Where the map lies; it is made if it is not there."""
        key = address, shape, strides, rows
        found = self._addresses.get(key)
        if found is None:
            with self._making:  # by one thread at a time
                found = self._addresses.get(key) or self._make(key)
        return found

    def _make(self, key: tuple) -> int:
        if len(self._addresses) == MAX_MAPS:
            # A kernel that is queued may still read a map that would be overwritten.
            _checked(driver.cuCtxSynchronize())
            self._addresses.clear()
        place = int(self._pool) + MAP_BYTES * len(self._addresses)
        words = np.array([int(word) for word in _encode(*key).opaque], np.uint64)
        _checked(driver.cuMemcpyHtoDAsync(place, words.ctypes.data, MAP_BYTES, self._stream))
        _checked(driver.cuStreamSynchronize(self._stream))
        self._addresses[key] = place
        return place


@cache
def _maps(device: int) -> _Maps:
    return _Maps()


@cache
def _counter(device: int, stream: int) -> int:
    address = _checked(driver.cuMemAlloc(4))
    _checked(driver.cuMemsetD32(address, 0, 1))
    return int(address)


def _encode(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> driver.CUtensorMap:
    """The driver's map; axes from the innermost: head_dim, seqlen, heads, batch."""
    batch, seqlen, heads, head_dim = shape
    sizes = head_dim, seqlen, heads, batch
    # The stride of an axis of one element is never taken, but must be legal.
    steps = [s if size > 1 else STRIDE_UNIT for s, size in zip(strides, shape, strict=True)]
    outer = steps[1], steps[2], steps[0]
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4,
            address,
            [u64(size) for size in sizes],
            [u64(step) for step in outer],
            [u32(size) for size in (BOX_COLUMNS, rows, 1, 1)],
            [u32(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _checked(result: tuple) -> object:
    """What a call of the driver returns; RuntimeError where it failed."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {driver.CUresult(error).name}")
    return values[0] if values else None
