"""What the `cuda` module means inside a simulated kernel.

Attribute names are Numba's. Each operation finds its thread with `greenlet.getcurrent()`, so one
object serves every launch.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable

import numpy as np
from greenlet import getcurrent

from fa2_numba.constants import FULL_MASK, WARP_SIZE
from fa2_numba.simulator.errors import WarpError
from fa2_numba.simulator.memory import PlainIntegers, SimulatedArray, plain
from fa2_numba.simulator.values import cast_to, fma, fmax, fmin, int32, numpy_dtype


class Coordinates:
    """`threadIdx`, `blockIdx`, `blockDim`, `gridDim`: x, y, z of the thread that asks."""

    def __init__(self, of: Callable[[object], tuple[int, int, int]]) -> None:
        self._of = of

    x = property(lambda self: self._of(getcurrent())[0])
    y = property(lambda self: self._of(getcurrent())[1])
    z = property(lambda self: self._of(getcurrent())[2])


class SharedSpace:
    """`cuda.shared`."""

    @staticmethod
    def array(shape: object, dtype: object, alignment: int | None = None) -> object:
        """The block's array made at this call site; shape 0 is the dynamic shared memory."""
        frame = sys._getframe(1)
        site = (frame.f_code, frame.f_lasti)
        return getcurrent().block.memory.array(shape, numpy_dtype(dtype), site)


class LocalSpace:
    """`cuda.local`."""

    @staticmethod
    def array(shape: object, dtype: object, alignment: int | None = None) -> object:
        """A fresh array of this thread's own."""
        frame = sys._getframe(1)
        site = (frame.f_code, frame.f_lasti)
        return getcurrent().block.memory.kinds.local(shape, numpy_dtype(dtype), site)


class ConstantSpace:
    """`cuda.const`."""

    @staticmethod
    def array_like(array: np.ndarray) -> object:
        """A host array frozen into the kernel."""
        return plain(array)


def _atomic(update: Callable) -> staticmethod:
    """The operation (array, index, *operands) that stores `update(old, *operands)`."""

    def operation(array: object, index: object, *operands: object) -> object:
        cast = cast_to(array.dtype)
        values = tuple(map(cast, operands))
        return _exchange(array, index, lambda old: cast(update(old, *values)))

    return staticmethod(operation)


def _exchange(array: object, index: object, update: Callable[[object], object]) -> object:
    """One atomic read-modify-write, then a turn for the others, so that a spinning thread ends."""
    if isinstance(array, (SimulatedArray, PlainIntegers)):
        old = array.exchange(index, update)
    else:
        old = array[index]
        array[index] = update(old)
    thread = getcurrent()
    thread.block.ready.append(thread)
    thread.parent.switch()
    return old


class Atomics:
    """`cuda.atomic`: each returns the old value; operands are cast to the array's dtype first."""

    add = _atomic(operator.add)
    sub = _atomic(operator.sub)
    and_ = _atomic(operator.and_)
    or_ = _atomic(operator.or_)
    xor = _atomic(operator.xor)
    exch = _atomic(lambda old, value: value)
    inc = _atomic(lambda old, top: 0 if old >= top else old + 1)
    dec = _atomic(lambda old, top: top if old == 0 or old > top else old - 1)
    max = _atomic(lambda old, value: value if value > old else old)
    min = _atomic(lambda old, value: value if value < old else old)
    nanmax = _atomic(fmax)
    nanmin = _atomic(fmin)
    cas = _atomic(lambda old, expected, value: value if old == expected else old)

    @staticmethod
    def compare_and_swap(array: object, expected: object, value: object) -> object:
        """`cas` on element 0."""
        return Atomics.cas(array, 0, expected, value)


class Cuda:
    """Stands in for `numba.cuda` in the globals of a simulated kernel."""

    shared, local, const, atomic = SharedSpace(), LocalSpace(), ConstantSpace(), Atomics()
    threadIdx = Coordinates(lambda thread: thread.index)
    blockIdx = Coordinates(lambda thread: thread.block.index)
    blockDim = Coordinates(lambda thread: thread.block.dim)
    gridDim = Coordinates(lambda thread: thread.block.grid)
    warpsize = WARP_SIZE
    laneid = property(lambda self: getcurrent().lane)
    fma = staticmethod(fma)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python and its tools ask whether there is such a method
            raise AttributeError(name)
        raise NotImplementedError(f"the simulator does not know cuda.{name}")

    @staticmethod
    def grid(ndim: int) -> int | tuple[int, ...]:
        """Position of the thread in the whole grid."""
        thread = getcurrent()
        block = thread.block
        where = [b * d + t for b, d, t in zip(block.index, block.dim, thread.index, strict=True)]
        return where[0] if ndim == 1 else tuple(where[:ndim])

    @staticmethod
    def gridsize(ndim: int) -> int | tuple[int, ...]:
        """Threads of the whole grid along each axis."""
        block = getcurrent().block
        size = [g * d for g, d in zip(block.grid, block.dim, strict=True)]
        return size[0] if ndim == 1 else tuple(size[:ndim])

    @staticmethod
    def syncthreads() -> None:
        """All threads of the block wait for each other; orders their memory accesses."""
        getcurrent().block.barrier("syncthreads", None, lambda values: None)

    @staticmethod
    def syncthreads_count(predicate: object) -> int:
        """`syncthreads`; returns how many threads passed a true predicate."""
        return getcurrent().block.barrier(
            "syncthreads_count", bool(predicate), lambda values: sum(values)
        )

    @staticmethod
    def syncthreads_and(predicate: object) -> int:
        """`syncthreads`; returns whether all predicates are true."""
        return getcurrent().block.barrier(
            "syncthreads_and", bool(predicate), lambda values: int(all(values))
        )

    @staticmethod
    def syncthreads_or(predicate: object) -> int:
        """`syncthreads`; returns whether any predicate is true."""
        return getcurrent().block.barrier(
            "syncthreads_or", bool(predicate), lambda values: int(any(values))
        )

    @staticmethod
    def syncwarp(mask: int = FULL_MASK) -> None:
        """The lanes of `mask` wait for each other; orders their memory accesses."""
        getcurrent().warp.meet("syncwarp", mask, None, orders_memory=True)

    @staticmethod
    def threadfence() -> None:
        """Simulated memory is always consistent; a fence alone orders no two threads."""

    threadfence_block = threadfence_system = threadfence

    @staticmethod
    def nanosleep(nanoseconds: int) -> None:
        """Let other threads run."""
        thread = getcurrent()
        thread.block.ready.append(thread)
        thread.parent.switch()

    @staticmethod
    def shfl_sync(mask: int, value: object, lane: int) -> object:
        """The value of lane `lane` (modulo 32)."""
        return _shuffle("shfl_sync", mask, value, lane % WARP_SIZE)

    @staticmethod
    def shfl_up_sync(mask: int, value: object, delta: int) -> object:
        """The value of the lane `delta` (modulo 32) below; the lowest lanes keep their own."""
        lane, delta = getcurrent().lane, delta % WARP_SIZE
        return _shuffle("shfl_up_sync", mask, value, lane - delta if lane >= delta else lane)

    @staticmethod
    def shfl_down_sync(mask: int, value: object, delta: int) -> object:
        """The value of the lane `delta` (modulo 32) above; the highest lanes keep their own."""
        lane = getcurrent().lane
        above = lane + delta % WARP_SIZE
        return _shuffle("shfl_down_sync", mask, value, above if above < WARP_SIZE else lane)

    @staticmethod
    def shfl_xor_sync(mask: int, value: object, lane_mask: int) -> object:
        """The value of the lane whose number differs in the bits of `lane_mask` (modulo 32)."""
        return _shuffle("shfl_xor_sync", mask, value, getcurrent().lane ^ lane_mask % WARP_SIZE)

    @staticmethod
    def all_sync(mask: int, predicate: object) -> bool:
        """Whether the predicate is true in all lanes of `mask`."""
        return _vote("all_sync", mask, bool(predicate), lambda votes: all(votes.values()))

    @staticmethod
    def any_sync(mask: int, predicate: object) -> bool:
        """Whether the predicate is true in any lane of `mask`."""
        return _vote("any_sync", mask, bool(predicate), lambda votes: any(votes.values()))

    @staticmethod
    def eq_sync(mask: int, predicate: object) -> bool:
        """Whether the predicate is the same in all lanes of `mask`."""
        return _vote("eq_sync", mask, bool(predicate), lambda votes: len(set(votes.values())) == 1)

    @staticmethod
    def ballot_sync(mask: int, predicate: object) -> int:
        """Bit i is the predicate of lane i; an int32: negative if lane 31 says yes."""
        return int32(_vote("ballot_sync", mask, bool(predicate), _lanes_where))

    @staticmethod
    def match_any_sync(mask: int, value: object) -> int:
        """The lanes of `mask` that hold the same value, as an int32."""
        votes = _vote("match_any_sync", mask, value, lambda votes: votes)
        return int32(_lanes_where({lane: other == value for lane, other in votes.items()}))

    @staticmethod
    def match_all_sync(mask: int, value: object) -> tuple[int, bool]:
        """(mask, True) if all lanes of `mask` hold the same value, else (0, False)."""
        same = _vote("match_all_sync", mask, value, lambda votes: len(set(votes.values())) == 1)
        return int32(mask if same else 0), same

    @staticmethod
    def activemask() -> int:
        """The lanes of the warp that have not left the kernel."""
        return sum(1 << thread.lane for thread in getcurrent().warp.threads if not thread.dead)

    @staticmethod
    def lanemask_lt() -> int:
        """The lanes below this one."""
        return (1 << getcurrent().lane) - 1

    @staticmethod
    def popc(x: int) -> int:
        """How many bits are set. 32 bits are looked at, or 64 if `x` does not fit into 32.

        Numba goes by the type: give these functions `int32(x)` where `x` has been computed.
        """
        return (int(x) & _bits_of(x)).bit_count()

    @staticmethod
    def clz(x: int) -> int:
        """Leading zeros."""
        bits = _bits_of(x)
        return bits.bit_length() - (int(x) & bits).bit_length()

    @staticmethod
    def ffs(x: int) -> int:
        """One plus the position of the lowest set bit; 0 for 0."""
        return (int(x) & -int(x)).bit_length()

    @staticmethod
    def brev(x: int) -> int:
        """The bits in reverse order."""
        bits = _bits_of(x)
        width = bits.bit_length()
        return int(f"{int(x) & bits:0{width}b}"[::-1], 2)

    @staticmethod
    def selp(condition: object, a: object, b: object) -> object:
        """`a` where the condition holds, else `b`."""
        return a if condition else b

    @staticmethod
    def cbrt(x: np.floating) -> np.floating:
        """Cube root."""
        return np.cbrt(x)


def _bits_of(x: int) -> int:
    narrow = -(2**31) <= int(x) < 2**32 and not isinstance(x, (np.int64, np.uint64))
    return (1 << 32 if narrow else 1 << 64) - 1


def _vote(operation: str, mask: int, value: object, combine: Callable[[dict], object]) -> object:
    warp = getcurrent().warp
    there = [thread.lane for thread in warp.threads if mask >> thread.lane & 1]
    return warp.meet(operation, mask, value, lambda v: combine({lane: v[lane] for lane in there}))


def _lanes_where(votes: dict[int, bool]) -> int:
    return sum(1 << lane for lane, vote in votes.items() if vote)


def _shuffle(operation: str, mask: int, value: object, source: int) -> object:
    thread = getcurrent()
    takes_part = mask >> source & 1 and source < len(thread.warp.threads)
    if not takes_part:
        what = f"{operation} reads lane {source}, which takes no part in it (mask {mask:#x})"
        raise thread.block.error_here(WarpError, what)
    return thread.warp.meet(operation, mask, value)[source]


CUDA = Cuda()
