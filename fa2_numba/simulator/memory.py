"""Arrays as a simulated kernel sees them: every access is checked for bounds, value and races.

A race is found by its definition, not by luck of the schedule: every thread keeps a vector clock
(`Thread.seen`), every shared granule remembers who wrote it and who read it at which clock, and an
access that no barrier orders after an earlier one of another thread is refused, whichever thread
happened to run first (the happens-before relation of Lamport 1978, as in FastTrack, PLDI 2009).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from fa2_numba.simulator.errors import (
    OutOfBoundsError,
    RaceError,
    SharedMemoryError,
    UninitialisedReadError,
)
from fa2_numba.simulator.source import (
    Place,
    kernel_frame,
    kernel_place,
    stored_name,
)
from fa2_numba.simulator.values import cast_to

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Thread

Stamp = tuple["Thread", int, CodeType, int]
"""Who touched a granule: thread, its clock then, code and instruction."""


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
        return cls(values, elements, _Name(site, "local"), bytearray(values.size))

    def _view(self, values: np.ndarray, elements: np.ndarray) -> LocalArray:
        return type(self)(values, elements, self._view_name(), self.written)

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Refuse what nothing wrote."""
        if not self.written[element]:
            raise self.error(UninitialisedReadError, index, "read of an element nothing wrote, in")

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """The element is initialised now; an atomic operation reads it first."""
        if atomic:
            self.note_read(element, index, frame)
        self.written[element] = 1


class SharedRegion:
    """Bytes that a block shares, and for every granule of them who touched it.

    That is the last plain write, and since then the last read and the last atomic update by each
    thread. A granule is the smallest element any view of the region has had so far, so that two
    threads that write neighbouring halves of one word are not mistaken for a race.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.granule = max(size, 1)
        self.writer: list[Stamp | None] = [None]
        self.readers: list[dict[Thread, Stamp] | None] = [None]
        self.updaters: list[dict[Thread, Stamp] | None] = [None]

    def view(self, dtype: np.dtype, offset: int, shape: object, name: object) -> SharedArray:
        """The region's bytes from `offset` on as an array of `dtype`."""
        self.refine(dtype.itemsize)
        flat = self.bytes[offset:]
        flat = flat[: flat.size // dtype.itemsize * dtype.itemsize].view(dtype)
        elements = np.arange(flat.size) + offset // dtype.itemsize
        return SharedArray(flat.reshape(shape), elements.reshape(shape), name, self)

    def refine(self, itemsize: int) -> None:
        """Split the granules so that none is larger than `itemsize`."""
        if itemsize < self.granule:
            copies = -(-self.granule // itemsize)
            self.writer = [stamp for stamp in self.writer for _ in range(copies)]
            self.readers, self.updaters = (
                [stamps and dict(stamps) for stamps in per_granule for _ in range(copies)]
                for per_granule in (self.readers, self.updaters)
            )
            self.granule = itemsize


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
        region = self.region
        thread = getcurrent()
        stamp = (thread, thread.clock, frame.f_code, frame.f_lasti)
        for granule in self._granules(element):
            writer = region.writer[granule]
            if writer is None:
                thread.await_verdict(self, index, stamp, granule)
            elif writer[0] is not thread and thread.seen[writer[0].number] < writer[1]:
                raise self.race(index, stamp, "reads", writer, "wrote")
            if region.updaters[granule]:
                self._refuse_unordered(index, stamp, "reads", region.updaters[granule], "updated")
            readers = region.readers[granule]
            if readers is None:
                region.readers[granule] = {thread: stamp}
            else:
                readers[thread] = stamp

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Refuse a write that no barrier orders after an access; atomic ones need no order."""
        region = self.region
        thread = getcurrent()
        stamp = (thread, thread.clock, frame.f_code, frame.f_lasti)
        does = "updates" if atomic else "writes"
        for granule in self._granules(element):
            writer = region.writer[granule]
            if writer is None:
                if atomic:
                    thread.await_verdict(self, index, stamp, granule)
            elif writer[0] is not thread and thread.seen[writer[0].number] < writer[1]:
                raise self.race(index, stamp, does, writer, "wrote")
            if region.readers[granule]:
                self._refuse_unordered(index, stamp, does, region.readers[granule], "read")
            if atomic:
                region.updaters[granule] = {**(region.updaters[granule] or {}), thread: stamp}
                continue
            if region.updaters[granule]:
                self._refuse_unordered(index, stamp, does, region.updaters[granule], "updated")
            region.writer[granule] = stamp
            region.readers[granule] = region.updaters[granule] = None

    def _refuse_unordered(
        self, index: tuple, now: Stamp, does: str, before: dict[Thread, Stamp], did: str
    ) -> None:
        thread = now[0]
        for stamp in before.values():
            if stamp[0] is not thread and thread.seen[stamp[0].number] < stamp[1]:
                raise self.race(index, now, does, stamp, did)

    def _granules(self, element: int) -> range | tuple[int]:
        itemsize = self.values.itemsize
        granule = self.region.granule
        if itemsize == granule:
            return (element,)
        first = element * itemsize // granule
        return range(first, first + -(-itemsize // granule))

    def verdict(self, index: tuple, reader: Stamp, granule: int) -> Exception:
        """Why a read of a granule nobody had written is wrong, once the others have gone on."""
        writer = self.region.writer[granule]
        if writer is not None and writer[0] is not reader[0]:
            return self.race(index, writer, "writes", reader, "read")
        what = f"read of shared array {self.element_name(index)} that nothing wrote"
        thread, _, *place = reader
        return thread.block.error(
            UninitialisedReadError, what, [thread.stands(place)], [place], thread
        )

    def race(self, index: tuple, now: Stamp, does: str, before: Stamp, did: str) -> RaceError:
        """The error about two accesses that no barrier orders."""
        what = f"race on shared array {self.element_name(index)}: no barrier orders two accesses"
        details = [
            before[0].stands(before[2:], f"{did} it "),
            now[0].stands(now[2:], f"{does} it "),
        ]
        return now[0].block.error(RaceError, what, details, [before[2:], now[2:]], now[0])


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
    local(shape, dtype, site): one thread's own.
    """

    argument: Callable[[np.ndarray, str], object]
    shared: Callable[[SharedArray], object]
    local: Callable[[object, np.dtype, Place], object]


CHECKED = ArrayKinds(
    lambda values, name: GlobalArray(values, None, name),
    lambda array: array,
    LocalArray.allocate,
)
UNCHECKED = ArrayKinds(
    lambda values, name: plain(values),
    lambda array: plain(array.values),
    lambda shape, dtype, site: plain(np.empty(shape, dtype)),
)


class BlockMemory:
    """The shared memory of one block: static arrays by the call that makes them; dynamic bytes."""

    def __init__(
        self, dynamic_bytes: int, static_limit: int, total_limit: int, kinds: ArrayKinds
    ) -> None:
        self.dynamic = SharedRegion(dynamic_bytes)
        self.dynamic_bytes = dynamic_bytes
        self.static_limit = static_limit
        self.total_limit = total_limit
        self.kinds = kinds
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
        return self._view(SharedRegion(size), dtype, shape, site)

    def _view(self, region: SharedRegion, dtype: np.dtype, shape: tuple, site: tuple) -> object:
        return self.kinds.shared(region.view(dtype, 0, shape, _Name(site, "shared")))


def _too_much(what: str) -> Exception:
    return getcurrent().block.error_here(SharedMemoryError, what)
