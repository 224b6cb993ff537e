"""The mbarriers of a simulated block: who arrives and waits there, and what they learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent

from fa2_numba.device.mbarrier import MBARRIER_BYTES, Phases
from fa2_numba.simulator.engine import Waiting
from fa2_numba.simulator.errors import (
    BarrierError,
    FenceError,
    MisalignedError,
    RaceError,
    UninitialisedReadError,
)
from fa2_numba.simulator.moments import Moments, Published, join, publish
from fa2_numba.simulator.source import call_chain, kernel_place

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block, Thread


class Mbarrier:
    """One mbarrier: its phases, and what was published in the one under way and the last ones."""

    def __init__(self, address: int, phases: Phases) -> None:
        self.address = address
        self.phases = phases
        self.maker: Thread = getcurrent()
        self.made = self.maker.clock
        self.place = kernel_place()
        self.fenced = False
        self.joined: Moments | None = None
        self.published: dict[int, Published] = {}
        self.waiting: list[tuple[Thread, int]] = []

    def arrive(self, moments: Moments, expected: int = 0) -> None:
        """A thread arrives with what it has done."""
        self._advance(moments, lambda: self.phases.arrive(expected))

    def bring(self, moments: Moments, size: int) -> None:
        """A copy has brought so many bytes."""
        self._advance(moments, lambda: self.phases.bring(size))

    def _advance(self, moments: Moments, step: object) -> None:
        parity = self.phases.parity
        self.joined = join(self.joined, moments)
        try:
            step()
        except ValueError as error:
            what = f"{self}: {error}"
            raise self.maker.block.error_here(BarrierError, what) from None
        if self.phases.parity == parity:
            return
        self.published[parity] = Published(self.joined)
        self.joined = None
        if (observer := self.maker.block.observer) is not None:
            observer.phase_completed()
        going = [thread for thread, wanted in self.waiting if wanted == parity]
        self.waiting = [pair for pair in self.waiting if pair[1] != parity]
        for thread in going:
            thread.release(None)

    def wait(self, parity: int) -> None:
        """The running thread waits for the phase of this parity, and learns what led to it."""
        thread = getcurrent()
        if not self.phases.is_complete(parity):
            self.waiting.append((thread, parity))
            thread.park(Waiting(f"phase {parity} of {self}", call_chain()))
        if parity in self.published:  # none of a fresh barrier
            self.published[parity].teach(thread)

    def __str__(self) -> str:
        return f"the mbarrier at shared address {self.address}"

    def state(self) -> str:
        """What its phase still waits for."""
        count, missing = self.phases.count, self.phases.missing
        size = self.phases.missing_bytes
        return (
            f"phase {self.phases.parity} of {self} has {count - missing} of {count} arrivals and "
            f"waits for {size} bytes"
        )


class Mbarriers:
    """Those of one block, by address."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._made: dict[int, Mbarrier] = {}

    def make(self, address: int, count: int) -> None:
        """`mbarrier_init`."""
        if address % MBARRIER_BYTES:
            what = f"mbarrier at shared address {address}: must be a multiple of {MBARRIER_BYTES}"
            raise self._block.error_here(MisalignedError, what)
        if count < 1:
            what = f"mbarrier for {count} arrivals: must be for at least 1"
            raise self._block.error_here(BarrierError, what)
        self._made[address] = Mbarrier(address, Phases(count))

    def at(self, address: int, by_copy: bool = False) -> Mbarrier:
        """The barrier at an address, which the running thread, or a copy, may use."""
        barrier, thread = self._made.get(address), getcurrent()
        if barrier is None:
            what = f"use of an mbarrier at shared address {address}, where none was made"
            raise self._block.error_here(UninitialisedReadError, what)
        if barrier.maker is not thread and thread.seen[barrier.maker.number] < barrier.made:
            details = [
                barrier.maker.stands(barrier.place, "makes it "),
                thread.stands(kernel_place(), "uses it "),
            ]
            what = f"race on {barrier}: no barrier orders its making and its use"
            raise self._block.error(RaceError, what, details, [barrier.place, kernel_place()])
        if by_copy and not barrier.fenced:
            what = f"copy to {barrier}, whose maker has not run fence_mbarrier_init since"
            raise self._block.error_here(FenceError, what)
        return barrier

    def fence(self) -> None:
        """`fence_mbarrier_init`: what the running thread has made is there for copies."""
        for barrier in self._made.values():
            barrier.fenced = barrier.fenced or barrier.maker is getcurrent()

    def arrive(self, address: int, expected: int = 0) -> None:
        """`mbarrier_arrive`, with or without bytes to expect."""
        barrier = self.at(address)
        barrier.arrive(publish(getcurrent()), expected)

    def finish(self) -> None:
        """At the end of the block no phase may have bytes too few or too many."""
        for barrier in self._made.values():
            if barrier.phases.missing_bytes:
                what = f"{barrier.state()} at the end of the block"
                thread = barrier.maker
                raise self._block.error(BarrierError, what, [], [], thread)

    def stuck(self) -> Exception | None:
        """Why threads wait at mbarriers for ever; None if none does."""
        waited = [barrier for barrier in self._made.values() if barrier.waiting]
        if not waited:
            return None
        what = "; ".join(barrier.state() for barrier in waited) + ": nobody is left to bring more"
        return self._block.waiting_error(BarrierError, what, waited[0].waiting[0][0])
