"""Four warps at a time: what they carry out together, and the numbered barriers between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from greenlet import getcurrent

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.warpgroups import WARPGROUP_SIZE
from fa2_numba.simulator.engine import Waiting
from fa2_numba.simulator.errors import BarrierError, WarpError
from fa2_numba.simulator.moments import Moments, Published, join, publish
from fa2_numba.simulator.source import call_chain, kernel_place, ranges

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block, Thread

NAMED_BARRIERS = 16


class Warpgroup:
    """128 consecutive threads; `here` are those that wait in an operation of all."""

    def __init__(self, block: Block, number: int) -> None:
        self.number = number
        first = number * WARPGROUP_SIZE
        self.threads = block.threads[first : first + WARPGROUP_SIZE]
        self._block = block
        self._here: list[Thread] = []

    def meet(self, operation: str, value: object, combine: Callable[[list], object]) -> object:
        """Wait until all threads are here; each gets `combine(values by thread)`."""
        thread, chain = getcurrent(), call_chain()
        if len(self.threads) < WARPGROUP_SIZE:
            what = f"{operation} needs {WARPGROUP_SIZE} threads of a warpgroup"
            raise self._block.error_here(WarpError, f"{what}, and this has {len(self.threads)}")
        if self._here and self._here[0].waiting.chain != chain:
            raise self._misfit(operation)
        self._here.append(thread)
        if len(self._here) < WARPGROUP_SIZE:
            return thread.park(Waiting(operation, chain, value))
        here, self._here = self._here, []
        values: list[object] = [None] * WARPGROUP_SIZE
        for other in here:
            mine = value if other is thread else other.waiting.value
            values[other.number % WARPGROUP_SIZE] = mine
        result = combine(values)
        self._block.release(here, thread, result)
        return result

    def _misfit(self, operation: str) -> Exception:
        first, thread = self._here[0], getcurrent()
        places = [first.waiting.chain[0], kernel_place()]
        details = [
            first.stands(places[0], f"is in {first.waiting.operation} "),
            thread.stands(places[1], f"is in {operation} "),
        ]
        what = f"threads of warpgroup {self.number} meet in different operations"
        return self._block.error(WarpError, what, details, places)

    def stuck(self) -> Exception | None:
        """Why its threads wait for each other for ever; None if they do not."""
        if not self._here:
            return None
        missing = [thread for thread in self.threads if thread not in self._here]
        what = (
            f"{self._here[0].waiting.operation} waits for threads "
            f"{ranges([thread.number for thread in missing])} of warpgroup {self.number}, which "
            "never come"
        )
        return self._block.waiting_error(WarpError, what, missing[0])


class NamedBarrier:
    """One of the barriers `bar` has: how many have arrived, who waits, what was published."""

    def __init__(self) -> None:
        self.threads = self.arrived = 0
        self.joined: Moments | None = None
        self.waiting: list[Thread] = []


class NamedBarriers:
    """Those of one block, by number."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._barriers = [NamedBarrier() for _ in range(NAMED_BARRIERS)]

    def arrive(self, number: int, threads: int, waits: bool) -> None:
        """`bar_sync` if it waits, else `bar_arrive`."""
        barrier = self._checked(number, threads)
        thread = getcurrent()
        barrier.joined = join(barrier.joined, publish(thread))
        barrier.arrived += 1
        if waits:
            barrier.waiting.append(thread)
        if barrier.arrived == barrier.threads:
            self._open(number, thread)
        elif waits:
            thread.park(Waiting(f"barrier {number} of {threads} threads", call_chain()))

    def _open(self, number: int, running: Thread) -> None:
        barrier, self._barriers[number] = self._barriers[number], NamedBarrier()
        if self._block.observer:
            self._block.observer.named_barrier_opened()
        published = Published(barrier.joined)
        for thread in barrier.waiting:
            published.teach(thread)
            if thread is not running:
                thread.release(None)

    def _checked(self, number: int, threads: int) -> NamedBarrier:
        if not 0 <= number < NAMED_BARRIERS:
            what = f"barrier {number}: must be 0 to {NAMED_BARRIERS - 1}"
            raise self._block.error_here(BarrierError, what)
        if threads % WARP_SIZE or not 0 < threads <= len(self._block.threads):
            what = f"barrier {number} of {threads} threads: must be whole warps of the block"
            raise self._block.error_here(BarrierError, what)
        barrier = self._barriers[number]
        if barrier.arrived and barrier.threads != threads:
            what = f"barrier {number} of {threads} threads, where others come for {barrier.threads}"
            raise self._block.error_here(BarrierError, what)
        barrier.threads = threads
        return barrier

    def stuck(self) -> Exception | None:
        """Why threads wait here for ever; None if none does."""
        for number, barrier in enumerate(self._barriers):
            if barrier.waiting:
                what = (
                    f"barrier {number} has {barrier.arrived} of {barrier.threads} threads: nobody "
                    "is left to come"
                )
                return self._block.waiting_error(BarrierError, what, barrier.waiting[0])
        return None
