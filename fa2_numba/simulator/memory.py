"""Arrays as a simulated kernel sees them: every access is checked for bounds, value and races."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import numpy as np
from greenlet import getcurrent

from fa2_numba.simulator.errors import (
    AsyncCopyError,
    OutOfBoundsError,
    SharedMemoryError,
    UninitialisedReadError,
)
from fa2_numba.simulator.regions import SharedRegion
from fa2_numba.simulator.source import (
    Place,
    kernel_frame,
    kernel_place,
    stored_name,
)
from fa2_numba.simulator.values import cast_to

REGION_ALIGNMENT = 1024
"""Bytes; where the regions of shared memory begin. The largest that any instruction asks for."""


class SimulatedArray:
    """A view of memory: `values` are its elements, `elements` their numbers in the flat storage.

    Both are NumPy arrays of one shape, so that slicing and reshaping a view is slicing and
    reshaping both.
    """

    space = "array"

    def __init__(self, values: np.ndarray, elements: np.ndarray, name: object) -> None:
        self.values = values
        self.elements = elements
        self.name = name
        self.ndim = values.ndim
        self._python_ints = becomes_int(values.dtype)
        self._cast = cast_to(values.dtype) if is_integer(values.dtype) else None

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    size = property(lambda self: self.values.size)
    strides = property(lambda self: self.values.strides)
    T = property(lambda self: self._view(self.values.T, self.elements.T))

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, *shape: int | tuple[int, ...]) -> SimulatedArray:
        """The same elements under another shape."""
        if not self.values.flags.c_contiguous:
            raise self.error(TypeError, (), "only contiguous arrays can be reshaped, unlike")
        return self._view(self.values.reshape(*shape), self.elements.reshape(*shape))

    def __getitem__(self, index: object) -> object:
        index = index if type(index) is tuple else (index,)
        element = self._element(index)
        if element is None:
            return self._view(self.values[index], self.elements[index])
        self.note_read(element, index, sys._getframe(1))
        return self.load(index)

    def __setitem__(self, index: object, value: object) -> None:
        index = index if type(index) is tuple else (index,)
        element = self._element(index)
        if element is None:
            raise self.error(TypeError, index, "a kernel stores one element at a time into")
        self.note_write(element, index, sys._getframe(1), atomic=False)
        self.values[index] = self._cast(value) if self._cast else value

    def _element(self, index: tuple) -> int | None:
        """The number of the element at `index`, or None if `index` names a part of the array."""
        try:
            element = self.elements.item(*index)
            if len(index) == self.ndim and min(index) >= 0:
                return element
        except (IndexError, TypeError, ValueError):
            pass
        self._refuse_outside(index)
        return None

    def load(self, index: tuple[int, ...]) -> object:
        """The element as a kernel computes with it: integers are Python ints (64 bits and more)."""
        return self.values.item(*index) if self._python_ints else self.values[index]

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Check and remember a read; global memory needs neither."""

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Check and remember a write; global memory needs neither."""

    def exchange(self, index: object, update: Callable[[object], object]) -> object:
        """Atomically replace the element by `update(old)`; returns the old one."""
        index = index if type(index) is tuple else (index,)
        element = self._element(index)
        if element is None:
            raise self.error(TypeError, index, "an atomic operation needs one element of")
        self.note_write(element, index, kernel_frame(), atomic=True)
        old = self.load(index)
        self.values[index] = update(old)
        return old

    def _view(self, values: np.ndarray, elements: np.ndarray) -> SimulatedArray:
        return type(self)(values, elements, self._view_name())

    def _view_name(self) -> _Name:
        return _Name(kernel_place(), self.name)

    def _refuse_outside(self, index: tuple) -> None:
        if len(index) > self.ndim:
            raise self.error(OutOfBoundsError, index, f"{len(index)} indices for")
        for axis, (i, size) in enumerate(zip(index, self.shape, strict=False)):
            if isinstance(i, slice) or i is Ellipsis:
                continue
            if not hasattr(i, "__index__"):
                raise self.error(TypeError, index, f"index {i!r} is not an integer, in")
            if not 0 <= i < size:
                rule = f"axis {axis} takes 0 to {size - 1}"
                if -size <= i < 0:
                    rule += f" (Numba would wrap {i} around to {size + i}; CUDA C would not)"
                raise self.error(OutOfBoundsError, index, f"index out of bounds ({rule}) of")

    def element_name(self, index: tuple) -> str:
        """`K_smem[3, 5]`."""
        return f"{self.name}[{', '.join(map(str, index))}]"

    def error(self, kind: type, index: tuple, problem: str) -> Exception:
        """An error of class `kind` about this element, naming thread and line."""
        what = f"{problem} {self.space} array {self.element_name(index)} of shape {self.shape}"
        return getcurrent().block.error_here(kind, what)


class GlobalArray(SimulatedArray):
    """A launch argument. Its element numbers are unused, so its values stand in for them."""

    space = "global"

    def __init__(self, values: np.ndarray, elements: object, name: object) -> None:
        super().__init__(values, values, name)


UNWRITTEN, WRITTEN, UNFENCED, BEING_READ, BEING_WRITTEN = range(5)
"""What an element of a local array is: never written; written; written since the last
`wgmma_fence`; the operand, or the result, of a `wgmma` that has not been waited for."""


FENCED = bytes(WRITTEN if state == UNFENCED else state for state in range(256))


class Written(bytearray):
    """What each element of a local array is; views of the array share it."""


class Registers:
    """The local arrays of one thread, as long as they live."""

    FEW = 64

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[Written]] = []
        self._limit = self.FEW

    def add(self, written: Written) -> None:
        """One more."""
        self._arrays.append(weakref.ref(written))
        if len(self._arrays) > self._limit:
            self._limit = 2 * len(self._living()) + self.FEW

    def fence(self) -> None:
        """What has been written is there for products that are issued from now on."""
        for written in self._living():
            written[:] = written.translate(FENCED)

    def _living(self) -> list[Written]:
        arrays = [array for array in (one() for one in self._arrays) if array is not None]
        self._arrays = [one for one in self._arrays if one() is not None]
        return arrays


class LocalArray(SimulatedArray):
    """One thread's own array; an element must be written before it is read."""

    space = "local"

    def __init__(self, values: np.ndarray, elements: np.ndarray, name: object, written: bytearray):
        super().__init__(values, elements, name)
        self.written = written

    @classmethod
    def allocate(cls, shape: object, dtype: np.dtype, site: Place) -> LocalArray:
        """Fresh, unwritten elements; `site` is the instruction that asked for them."""
        values = np.empty(shape, dtype)
        elements = np.arange(values.size).reshape(values.shape)
        written = Written(values.size)
        getcurrent().registers.add(written)
        return cls(values, elements, _Name(site, "local"), written)

    def _view(self, values: np.ndarray, elements: np.ndarray) -> LocalArray:
        return type(self)(values, elements, self._view_name(), self.written)

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Refuse what nothing wrote, or what a `wgmma` has not written yet."""
        state = self.written[element]
        if state == UNWRITTEN:
            raise self.error(UninitialisedReadError, index, "read of an element nothing wrote, in")
        if state == BEING_WRITTEN:
            what = "read of an element that a wgmma not waited for is to write, in"
            raise self.error(AsyncCopyError, index, what)

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """The element is initialised now; an atomic operation reads it first."""
        if atomic:
            self.note_read(element, index, frame)
        if self.written[element] >= BEING_READ:
            what = "write to an element that a wgmma not waited for still uses, in"
            raise self.error(AsyncCopyError, index, what)
        self.written[element] = UNFENCED


class SharedArray(SimulatedArray):
    """A view of a block's shared memory."""

    space = "shared"

    def __init__(
        self, values: np.ndarray, elements: np.ndarray, name: object, region: SharedRegion
    ) -> None:
        super().__init__(values, elements, name)
        self.region = region

    def _view(self, values: np.ndarray, elements: np.ndarray) -> SharedArray:
        return type(self)(values, elements, self._view_name(), self.region)

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Refuse a read that no barrier orders after a write; remember it for later writes."""
        thread = getcurrent()
        stamp = (thread, thread.clock, frame.f_code, frame.f_lasti)
        size = self.values.itemsize
        self.region.read(element * size, size, stamp, lambda: self._named(index))

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Refuse a write that no barrier orders after an access; atomic ones need no order."""
        thread = getcurrent()
        stamp = (thread, thread.clock, frame.f_code, frame.f_lasti)
        size = self.values.itemsize
        note = self.region.update if atomic else self.region.write
        note(element * size, size, stamp, lambda: self._named(index))

    def _named(self, index: tuple) -> str:
        return f"array {self.element_name(index)}"


class _Name:
    """The variable an array was stored in, found in the bytecode only when an error needs it."""

    def __init__(self, site: Place, fallback: object) -> None:
        self.site = site
        self.fallback = fallback

    def __str__(self) -> str:
        return stored_name(*self.site) or str(self.fallback)


class PlainIntegers:
    """An integer array with the checks off: NumPy storage, but elements are Python ints."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self._python_ints = becomes_int(values.dtype)
        self._cast = cast_to(values.dtype)

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    ndim = property(lambda self: self.values.ndim)
    size = property(lambda self: self.values.size)
    strides = property(lambda self: self.values.strides)
    T = property(lambda self: PlainIntegers(self.values.T))

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, *shape: int | tuple[int, ...]) -> PlainIntegers:
        """The same elements under another shape."""
        return PlainIntegers(self.values.reshape(*shape))

    def __getitem__(self, index: object) -> object:
        value = self.values[index]
        if isinstance(value, np.ndarray):
            return PlainIntegers(value)
        return value.item() if self._python_ints else value

    def __setitem__(self, index: object, value: object) -> None:
        self.values[index] = self._cast(value)

    def exchange(self, index: object, update: Callable[[object], object]) -> object:
        """Atomically replace the element by `update(old)`; returns the old one."""
        old = self[index]
        self.values[index] = update(old)
        return old


def plain(values: np.ndarray | PlainIntegers) -> np.ndarray | PlainIntegers:
    """An array with the checks off: as fast as NumPy elements are."""
    is_plain = isinstance(values, PlainIntegers) or not is_integer(values.dtype)
    return values if is_plain else PlainIntegers(values)


def is_integer(dtype: np.dtype) -> bool:
    """Whether what is stored must be wrapped into the range of `dtype`."""
    return dtype.kind in "iub"


def becomes_int(dtype: np.dtype) -> bool:
    """Whether elements become Python ints; uint64 stays NumPy's, since Numba keeps it unsigned."""
    return is_integer(dtype) and dtype != np.uint64


@dataclass(frozen=True)
class ArrayKinds:
    """How the arrays of a launch are made.

    argument(values, name): of a launch argument; shared(array): of a checked view of shared memory;
    local(shape, dtype, site): one thread's own. checks: whether they, and accesses by address, are
    checked for races and for memory that nobody wrote.
    """

    argument: Callable[[np.ndarray, str], object]
    shared: Callable[[SharedArray], object]
    local: Callable[[object, np.dtype, Place], object]
    checks: bool


CHECKED = ArrayKinds(
    lambda values, name: GlobalArray(values, None, name),
    lambda array: array,
    LocalArray.allocate,
    checks=True,
)
UNCHECKED = ArrayKinds(
    lambda values, name: plain(values),
    lambda array: plain(array.values),
    lambda shape, dtype, site: plain(np.empty(shape, dtype)),
    checks=False,
)


class BlockMemory:
    """The shared memory of one block: static arrays by the call that makes them; dynamic bytes.

    regions: all of it, by address; none begins at 0. arguments: what addresses in global memory
    may lead to.
    """

    def __init__(
        self,
        dynamic_bytes: int,
        static_limit: int,
        total_limit: int,
        kinds: ArrayKinds,
        arguments: tuple = (),
    ) -> None:
        self.regions: list[SharedRegion] = []
        self.dynamic = self._region(dynamic_bytes, "dynamic shared memory")
        self.dynamic_bytes = dynamic_bytes
        self.static_limit = static_limit
        self.total_limit = total_limit
        self.kinds = kinds
        self.arguments = arguments
        self.static_bytes = 0
        self.arrays: dict[tuple, object] = {}

    def array(self, shape: object, dtype: np.dtype, site: Place) -> object:
        """`cuda.shared.array`: every thread that passes `site` gets the same array."""
        shape = shape if isinstance(shape, tuple) else (shape,)
        key = (id(site[0]), site[1])
        if key not in self.arrays:
            make = self._dynamic_array if shape == (0,) else self._static_array
            self.arrays[key] = make(shape, dtype, site)
        return self.arrays[key]

    def _dynamic_array(self, shape: object, dtype: np.dtype, site: Place) -> object:
        return self._view(self.dynamic, dtype, (self.dynamic_bytes // dtype.itemsize,), site)

    def _static_array(self, shape: tuple, dtype: np.dtype, site: Place) -> object:
        size = int(np.prod(shape)) * dtype.itemsize
        self.static_bytes += size
        if self.static_bytes > self.static_limit:
            raise _too_much(
                f"{self.static_bytes} bytes of static shared memory: a block may declare "
                f"{self.static_limit}; more must be dynamic shared memory"
            )
        if self.static_bytes + self.dynamic_bytes > self.total_limit:
            raise _too_much(
                f"{self.static_bytes} static and {self.dynamic_bytes} dynamic bytes of shared "
                f"memory: a block of this architecture has {self.total_limit}"
            )
        return self._view(self._region(size, _Name(site, "shared")), dtype, shape, site)

    def _region(self, size: int, name: object) -> SharedRegion:
        """More shared memory, with a gap before it: what runs over the end meets nothing."""
        end = self.regions[-1].end if self.regions else 0
        start = (end // REGION_ALIGNMENT + 1) * REGION_ALIGNMENT
        self.regions.append(SharedRegion(size, start, name))
        return self.regions[-1]

    def _view(self, region: SharedRegion, dtype: np.dtype, shape: tuple, site: tuple) -> object:
        flat = region.bytes[: region.bytes.size // dtype.itemsize * dtype.itemsize].view(dtype)
        elements = np.arange(flat.size)
        array = SharedArray(
            flat.reshape(shape), elements.reshape(shape), _Name(site, "shared"), region
        )
        return self.kinds.shared(array)


def _too_much(what: str) -> Exception:
    return getcurrent().block.error_here(SharedMemoryError, what)
