"""Byte addresses in a simulated kernel: whose memory they lead to, and that they lead somewhere.

An address in shared memory counts from the beginning of the block's own; one in global memory is
the host's, within one of the NumPy arrays that the kernel was launched with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from greenlet import getcurrent

from fa2_numba.simulator.errors import MisalignedError, OutOfBoundsError
from fa2_numba.simulator.memory import PlainIntegers, SimulatedArray
from fa2_numba.simulator.regions import Copy, SharedRegion, Stamp
from fa2_numba.simulator.source import Place


@dataclass(frozen=True)
class Argument:
    """The bytes that an array argument spans, from address `start` up to `end`."""

    name: str
    array: object
    start: int
    end: int
    bytes: np.ndarray

    def __str__(self) -> str:
        return f"argument {self.name}"


def global_arguments(named: Iterable[tuple[str, object]]) -> tuple[Argument, ...]:
    """What addresses in global memory may lead to: the arrays among a kernel's arguments."""
    return tuple(
        _argument(name, array)
        for name, array in named
        if isinstance(array, (np.ndarray, SimulatedArray, PlainIntegers)) and array.size
    )


def _argument(name: str, array: object) -> Argument:
    values = values_of(array)
    start, end = byte_bounds(values)
    memory = (ctypes.c_uint8 * (end - start)).from_address(start)
    span = np.ctypeslib.as_array(memory)
    span.flags.writeable = values.flags.writeable
    return Argument(name, array, start, end, span)


def byte_bounds(values: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte, and of the first one behind it."""
    first = values.__array_interface__["data"][0]
    reach = [(size - 1) * stride for size, stride in zip(values.shape, values.strides, strict=True)]
    lowest = first + sum(step for step in reach if step < 0)
    return lowest, first + sum(step for step in reach if step > 0) + values.itemsize


def values_of(array: object) -> np.ndarray:
    """The memory of a simulated array."""
    return array if isinstance(array, np.ndarray) else array.values


def global_address(array: object) -> int:
    """What `ptx.global_address` means: where the array's first element lies."""
    return values_of(array).__array_interface__["data"][0]


def shared_address(array: object) -> int:
    """What `ptx.shared_address` means: the same from the beginning of the block's shared memory."""
    first = global_address(array)
    for region in getcurrent().block.memory.regions:
        offset = first - global_address(region.bytes)
        if 0 <= offset <= region.bytes.size:
            return region.start + offset
    raise TypeError("shared_address takes an array in shared memory")


ADDRESS_FUNCTIONS = {"shared": shared_address, "global": global_address}


@dataclass(frozen=True)
class Access:
    """One thread's access to `size` bytes at an address, by the instruction at `place`.

    wanted: how many of the bytes it touches. asynchronous: it is part of an asynchronous copy.
    updated: it is both a load and a store, done together.
    """

    space: str
    address: int
    size: int
    wanted: int
    stored: bool
    asynchronous: bool
    updated: bool
    place: Place

    def load(self) -> np.ndarray | None:
        """The bytes, those that are not wanted being 0; None if they are only to be stored."""
        if self.stored and not self.updated:
            return None
        loaded = np.zeros(self.size, np.uint8)
        if self.wanted:
            owner, first = self._located()
            if self._is_checked:
                owner.read(first, self.wanted, self._stamp, lambda: self._named(owner))
            loaded[: self.wanted] = owner.bytes[first : first + self.wanted]
        return loaded

    def store(self, data: np.ndarray) -> None:
        """Write the bytes, now or when the copy that they are part of has arrived."""
        owner, first = self._located()
        if not owner.bytes.flags.writeable:
            raise self._error(OutOfBoundsError, f"{owner} is read-only")
        if self.updated and getcurrent().block.observer:
            getcurrent().block.observer.atomic_done()
        if self.asynchronous:
            copy = Copy(owner, first, data, self._stamp, lambda: self._named(owner))
            if self._is_checked:
                owner.start_copy(copy)
            getcurrent().copies.start(copy)
            return
        if self._is_checked:
            owner.write(first, self.size, self._stamp, lambda: self._named(owner))
        owner.bytes[first : first + self.size] = data

    @property
    def _is_checked(self) -> bool:
        return self.space == "shared" and getcurrent().block.memory.kinds.checks

    @property
    def _stamp(self) -> Stamp:
        thread = getcurrent()
        return thread, thread.clock, *self.place

    def _located(self) -> tuple[SharedRegion | Argument, int]:
        """Whose bytes they are, and which is the first."""
        block = getcurrent().block
        owners = block.memory.regions if self.space == "shared" else block.memory.arguments
        if self.address % self.size:
            rule = f"{self.size} bytes lie at a multiple of {self.size}; it is"
            raise self._error(MisalignedError, f"{rule} {self._relative(owners)}")
        end = self.address + self.wanted
        for owner in owners:
            if owner.start <= self.address and end <= owner.end:
                if block.observer and not self.updated:
                    block.observer.address_used(self, owner)
                return owner, self.address - owner.start
        raise self._error(OutOfBoundsError, self._where(owners))

    def _where(self, owners: Iterable[SharedRegion | Argument]) -> str:
        """How far from the nearest memory the access lies."""
        end = self.address + self.wanted
        owners = [owner for owner in owners if owner.start < owner.end]
        if not owners:
            return f"there is no {self.space} memory to access by address"
        outside, owner = min(
            ((max(one.start - self.address, end - one.end), one) for one in owners),
            key=lambda pair: pair[0],
        )
        side = "before the first byte" if self.address < owner.start else "past the last byte"
        span = f"{owner.end - owner.start} bytes, addresses {owner.start} to {owner.end - 1}"
        return f"it reaches {outside} bytes {side} of {owner} ({span})"

    def _relative(self, owners: Iterable[SharedRegion | Argument]) -> str:
        """What it is a multiple of plus what, and whose byte."""
        over = f"{self.address % self.size} over one"
        owner = next((one for one in owners if one.start <= self.address < one.end), None)
        return f"{over}, byte {self.address - owner.start} of {owner}" if owner else over

    def _named(self, owner: SharedRegion) -> str:
        first = self.address - owner.start
        return f"address {self.address} (bytes {first} to {first + self.size - 1} of {owner})"

    def _error(self, kind: type, why: str) -> Exception:
        does = "store of" if self.stored else "load of"
        what = f"{does} {self.wanted} bytes at {self.space} address {self.address}: {why}"
        return getcurrent().block.error_here(kind, what)
