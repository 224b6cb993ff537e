"""The shared memory of a block, byte by byte: where it lies, who touched it, what is on its way.

A race is found by its definition, not by luck of the schedule: every thread keeps a vector clock
(`Thread.seen`), every shared granule remembers who wrote it and who read it at which clock, and an
access that no barrier orders after an earlier one of another thread is refused, whichever thread
happened to run first (the happens-before relation of Lamport 1978, as in FastTrack, PLDI 2009).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.simulator.errors import AsyncCopyError, RaceError, UninitialisedReadError

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Thread
    from fa2_numba.simulator.proxies import Use

Stamp = tuple["Thread", int, CodeType, int]
"""Who touched a granule: thread, its clock then, code and instruction."""


class WarpStamp(tuple):
    """A read by a whole warp, which each lane knows to be over: as a Stamp, that of lane 0.

    lanes: the number and the clock of each of its threads, when it had waited for the read.
    """

    lanes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, threads: list[Thread], code: CodeType, lasti: int) -> WarpStamp:
        """The warp has waited: what its threads do next comes after the read."""
        stamp = cls((threads[0], threads[0].clock, code, lasti))
        stamp.lanes = tuple((thread.number, thread.clock) for thread in threads)
        for thread in threads:
            thread.clock += 1
        return stamp

    def is_known_to(self, thread: Thread) -> bool:
        """Whether a thread is one of the warp, or has heard of any that it has waited."""
        if self[0].warp is thread.warp:
            return True
        return any(thread.seen[number] >= clock for number, clock in self.lanes)


Name = Callable[[], str]
"""What is accessed, in words; asked only when an error needs it."""

CHUNK_BYTES = 16
"""Asynchronous reads of shared memory, known by their pieces of so many bytes."""

COPY_BYTES = 4
"""The smallest asynchronous copy; copies in flight are known by their pieces of so many bytes."""


class SharedRegion:
    """Bytes that a block shares, and for every granule of them who touched it.

    That is the last plain write, and since then the last read and the last atomic update by each
    thread. A granule is the smallest piece that any access to the region has had so far, so that
    two threads that write neighbouring halves of one word are not mistaken for a race.

    start: its first byte's address in the block's shared memory.
    """

    def __init__(self, size: int, start: int, name: object) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.start = start
        self.name = name
        self.granule = max(size, 1)
        self.writer: list[Stamp | None] = [None]
        self.readers: list[dict[Thread, Stamp] | None] = [None]
        self.updaters: list[dict[Thread, Stamp] | None] = [None]
        self.in_flight: dict[int, Copy] = {}
        self.in_use: dict[int, list[Use]] = {}

    @property
    def end(self) -> int:
        """The address of the first byte behind it."""
        return self.start + self.bytes.size

    def __str__(self) -> str:
        return str(self.name)

    def read(self, first: int, size: int, stamp: Stamp, name: Name) -> None:
        """Refuse a read that no barrier orders after a write; remember it for later writes."""
        if self.in_flight:
            self._refuse_in_flight(first, size, stamp, name, "reads")
        thread = stamp[0]
        for granule in self._granules(first, size):
            writer = self.writer[granule]
            if writer is None:
                self._await_verdict(granule, size, stamp, name)
            elif writer[0] is not thread and thread.seen[writer[0].number] < writer[1]:
                raise race(name, stamp, "reads", writer, "wrote")
            if self.updaters[granule]:
                _refuse_unordered(name, stamp, "reads", self.updaters[granule], "updated")
            readers = self.readers[granule]
            if readers is None:
                self.readers[granule] = {thread: stamp}
            else:
                readers[thread] = stamp

    def write(self, first: int, size: int, stamp: Stamp, name: Name) -> None:
        """Refuse a write that no barrier orders after an access; remember it."""
        self.check_write(first, size, stamp, name)
        self._remember_write(first, size, stamp)

    def check_write(self, first: int, size: int, stamp: Stamp, name: Name) -> None:
        """Refuse a write that no barrier orders after an access."""
        granules = self._checked_granules(first, size, stamp, name, "writes")
        for granule in granules:
            if self.updaters[granule]:
                _refuse_unordered(name, stamp, "writes", self.updaters[granule], "updated")

    def update(self, first: int, size: int, stamp: Stamp, name: Name) -> None:
        """The same for an atomic update: it reads, and needs no order among its like."""
        for granule in self._checked_granules(first, size, stamp, name, "updates"):
            if self.writer[granule] is None:
                self._await_verdict(granule, size, stamp, name)
            self.updaters[granule] = {**(self.updaters[granule] or {}), stamp[0]: stamp}

    def _checked_granules(
        self, first: int, size: int, stamp: Stamp, name: Name, does: str
    ) -> range | tuple[int]:
        """The granules of an access that changes them, ordered after all reads and plain writes."""
        if self.in_flight:
            self._refuse_in_flight(first, size, stamp, name, does)
        if self.in_use:
            self._refuse_in_use(first, size, stamp, does)
        thread = stamp[0]
        granules = self._granules(first, size)
        for granule in granules:
            writer = self.writer[granule]
            unordered = writer and writer[0] is not thread
            if unordered and thread.seen[writer[0].number] < writer[1]:
                raise race(name, stamp, does, writer, "wrote")
            if self.readers[granule]:
                _refuse_unordered(name, stamp, does, self.readers[granule], "read")
        return granules

    def _remember_write(self, first: int, size: int, stamp: Stamp) -> None:
        for granule in self._granules(first, size):
            self.writer[granule] = stamp
            self.readers[granule] = self.updaters[granule] = None

    def remember_reads(self, first: int, size: int, stamps: list[Stamp]) -> None:
        """Reads that have been checked already, by several threads."""
        for granule in self._granules(first, size):
            readers = self.readers[granule]
            if readers is None:
                readers = self.readers[granule] = {}
            readers.update((stamp[0], stamp) for stamp in stamps)

    def writers_of(self, first: int, size: int) -> list[Stamp | None]:
        """Who wrote the granules of these bytes last."""
        return [self.writer[granule] for granule in self._granules(first, size)]

    def copy_at(self, first: int) -> Copy | None:
        """The copy that is under way to a byte."""
        return self.in_flight.get(first // COPY_BYTES)

    def _granules(self, first: int, size: int) -> range | tuple[int]:
        if size < self.granule:
            self._refine(size)
        if size == self.granule:
            return (first // size,)
        granule = first // self.granule
        return range(granule, granule + -(-size // self.granule))

    def _refine(self, size: int) -> None:
        """Split the granules so that none is larger than `size`."""
        copies = -(-self.granule // size)
        self.writer = [stamp for stamp in self.writer for _ in range(copies)]
        self.readers, self.updaters = (
            [stamps and dict(stamps) for stamps in per_granule for _ in range(copies)]
            for per_granule in (self.readers, self.updaters)
        )
        self.granule = size

    def _await_verdict(self, granule: int, size: int, stamp: Stamp, name: Name) -> None:
        first = granule * self.granule
        stamp[0].await_verdict(self, first, min(size, self.granule), stamp, name)

    def verdict(self, first: int, size: int, reader: Stamp, name: Name) -> Exception:
        """Why a read of bytes nobody had written is wrong, once the others have gone on."""
        for granule in self._granules(first, size):
            writer = self.writer[granule]
            if writer is not None and writer[0] is not reader[0]:
                return race(name, writer, "writes", reader, "read")
        thread, _, *place = reader
        what = f"read of shared {name()} that nothing wrote"
        return thread.block.error(
            UninitialisedReadError, what, [thread.stands(place)], [place], thread
        )

    def start_copy(self, copy: Copy) -> None:
        """From now on its bytes are in flight: nobody may touch them."""
        self.check_write(copy.first, len(copy.data), copy.stamp, copy.name)
        for piece in _pieces(copy.first, len(copy.data)):
            self.in_flight[piece] = copy

    def end_copy(self, copy: Copy) -> None:
        """It has arrived: a write by its thread, now."""
        thread, _, *place = copy.stamp
        self.land(copy, (thread, thread.clock, *place))

    def land(self, copy: Copy, stamp: Stamp) -> None:
        """A copy has arrived, and counts as a write with this stamp."""
        for piece in _pieces(copy.first, len(copy.data)):
            del self.in_flight[piece]
        self._remember_write(copy.first, len(copy.data), stamp)

    def _refuse_in_use(self, first: int, size: int, stamp: Stamp, does: str) -> None:
        for chunk in range(first // CHUNK_BYTES * CHUNK_BYTES, first + size, CHUNK_BYTES):
            if chunk in self.in_use:
                raise self.in_use[chunk][0].unfinished(first, size, stamp, does)

    def _refuse_in_flight(self, first: int, size: int, stamp: Stamp, name: Name, does: str) -> None:
        for piece in _pieces(first, size):
            if piece in self.in_flight:
                raise unfinished(name, stamp, does, self.in_flight[piece].stamp)


@dataclass(frozen=True)
class Copy:
    """An asynchronous copy: `data` for a region from its byte `first` on, read when it started."""

    region: SharedRegion
    first: int
    data: np.ndarray
    stamp: Stamp
    name: Name


class AsyncCopies:
    """The asynchronous copies of one thread, oldest first: closed groups, and the open one."""

    def __init__(self) -> None:
        self._groups: deque[list[Copy]] = deque()
        self._open: list[Copy] = []

    def start(self, copy: Copy) -> None:
        """One more in the open group."""
        self._open.append(copy)

    def commit(self) -> None:
        """Close the open group, which may be empty."""
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> list[Copy]:
        """The copies of all groups but the `pending` youngest, which have arrived now."""
        arrived: list[Copy] = []
        while len(self._groups) > pending:
            arrived += self._groups.popleft()
        return arrived


def race(name: Name, now: Stamp, does: str, before: Stamp, did: str) -> RaceError:
    """The error about two accesses that no barrier orders."""
    what = f"race on shared {name()}: no barrier orders two accesses"
    details = [
        before[0].stands(before[2:], f"{did} it "),
        now[0].stands(now[2:], f"{does} it "),
    ]
    return now[0].block.error(RaceError, what, details, [before[2:], now[2:]], now[0])


def _refuse_unordered(
    name: Name, now: Stamp, does: str, before: dict[Thread, Stamp], did: str
) -> None:
    thread = now[0]
    for stamp in before.values():
        if stamp[0] is not thread and thread.seen[stamp[0].number] < stamp[1]:
            if not (isinstance(stamp, WarpStamp) and stamp.is_known_to(thread)):
                raise race(name, now, does, stamp, did)


def unfinished(name: Name, now: Stamp, does: str, copy: Stamp) -> AsyncCopyError:
    """The error about an access to what a copy is still to fill."""
    what = (
        f"access to shared {name()} while an asynchronous copy to it is under way: "
        "the thread that copies has not waited for the copy's group"
    )
    details = [
        copy[0].stands(copy[2:], "started the copy "),
        now[0].stands(now[2:], f"{does} it "),
    ]
    return now[0].block.error(AsyncCopyError, what, details, [copy[2:], now[2:]], now[0])


def _pieces(first: int, size: int) -> range:
    return range(first // COPY_BYTES, -(-(first + size) // COPY_BYTES))
