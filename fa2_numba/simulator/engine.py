"""Thread blocks run thread by thread: one greenlet a CUDA thread, barriers as meeting places.

A thread runs until it must wait for others (a barrier, a warp-wide operation), then hands over to
the next ready one, so a run is deterministic and a stuck barrier is seen at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent, greenlet

from fa2_numba.constants import WARP_SIZE
from fa2_numba.simulator.errors import BarrierError, SimulationError, ThreadError, WarpError
from fa2_numba.simulator.memory import BlockMemory, Registers
from fa2_numba.simulator.regions import AsyncCopies, Name, SharedRegion, Stamp
from fa2_numba.simulator.source import (
    MARKER,
    Place,
    call_chain,
    describe_line,
    kernel_place,
    line_number,
    ranges,
)

if TYPE_CHECKING:
    from fa2_numba.device.instruction import Instruction
    from fa2_numba.simulator.addresses import Access, Argument
    from fa2_numba.simulator.hopper import HopperUnits

Index = tuple[int, int, int]


class Waiting:
    """What a parked thread waits for, and where it stands."""

    def __init__(
        self, operation: str, chain: tuple[Place, ...], value: object = None, mask: int = 0
    ) -> None:
        self.operation = operation
        self.chain = chain
        self.value = value
        self.mask = mask


class Thread(greenlet):
    """One CUDA thread of a block."""

    def __init__(self, block: Block, number: int) -> None:
        super().__init__()
        self.block = block
        self.number = number
        width, height, _ = block.dim
        self.index: Index = (number % width, number // width % height, number // (width * height))
        self.lane = number % WARP_SIZE
        self.warp = block.warps[number // WARP_SIZE]
        self.clock = 1
        self.seen = block.nothing_seen
        self.waiting: Waiting | None = None
        self.unwritten: tuple[SharedRegion, int, int, Stamp, Name] | None = None
        self.copies = AsyncCopies()
        self.registers = Registers()
        self.copied: set[int] = set()
        self.fenced = 0
        self.result: object = None

    def run(self) -> None:
        """The whole life of the thread: the kernel, with the hardware's silent overflow."""
        with np.errstate(all="ignore"):
            self.block.function(*self.block.arguments)

    def park(self, waiting: Waiting) -> object:
        """Hand over to the other threads until someone releases this one; returns its result."""
        self.waiting = waiting
        self.parent.switch()
        return self.result

    def release(self, result: object) -> None:
        """Make a parked thread ready to go on with `result`."""
        self.result = result
        self.waiting = None
        self.block.ready.append(self)

    def await_verdict(
        self, region: SharedRegion, first: int, size: int, stamp: Stamp, name: Name
    ) -> None:
        """Park at a read of memory nobody wrote, until the others show whether they write it.

        If one does before the next barrier it is a race, else the memory is uninitialised;
        either way the launch ends with that error.
        """
        self.unwritten = (region, first, size, stamp, name)
        self.park(Waiting("the writer of what it read", call_chain()))

    def stands(self, place: Place, doing: str = "") -> str:
        """`thread (5, 0, 0) (warp 0, lane 5) at file.py:12: text`."""
        return f"{self} {doing}at {describe_line(*place)}"

    def __str__(self) -> str:
        return f"thread {self.index} (warp {self.warp.number}, lane {self.lane})"


class Warp:
    """32 consecutive threads; `meetings` are the operations that some lanes wait in, by mask."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.threads: list[Thread] = []
        self.meetings: dict[int, list[Thread]] = {}

    def meet(
        self,
        operation: str,
        mask: int,
        value: object,
        combine: Callable[[list], object] = lambda values: values,
        orders_memory: bool = False,
        aligned: bool = False,
    ) -> object:
        """Wait until all lanes of `mask` are here; each gets `combine(values by lane)`.

        aligned: they must come from one place.
        """
        thread, chain = getcurrent(), call_chain()
        mask &= (1 << WARP_SIZE) - 1
        if not mask >> thread.lane & 1:
            what = f"{operation} by a lane that its own mask {mask:#010x} leaves out"
            raise thread.block.error_here(WarpError, what)
        here = self.meetings.setdefault(mask, [])
        if here and here[0].waiting.operation != operation:
            raise self._misfit(mask, here[0], operation, "different operations")
        if here and aligned and here[0].waiting.chain != chain:
            raise self._misfit(mask, here[0], operation, "one operation at different places")
        here.append(thread)
        expected = [t for t in self.threads if mask >> t.lane & 1]
        if len(here) < len(expected):
            return thread.park(Waiting(operation, chain, value, mask))
        del self.meetings[mask]
        values: list[object] = [None] * WARP_SIZE
        for other in here:
            values[other.lane] = value if other is thread else other.waiting.value
        if orders_memory:
            order(here)
        result = combine(values)
        thread.block.release(here, thread, result)
        if thread.block.observer:
            thread.block.observer.warp_met(self, operation, here)
        return result

    @staticmethod
    def _misfit(mask: int, first: Thread, operation: str, meeting: str) -> Exception:
        thread = getcurrent()
        places = [first.waiting.chain[0], kernel_place()]
        details = [
            first.stands(places[0], f"is in {first.waiting.operation} "),
            thread.stands(places[1], f"is in {operation} "),
        ]
        what = f"lanes of one mask {mask:#010x} meet in {meeting}"
        return thread.block.error(WarpError, what, details, places)


class Observer:
    """Is told what the threads of a block do together; this one does not care."""

    def block_started(self, block: Block) -> None:
        """No thread has run yet."""

    def block_finished(self, block: Block) -> None:
        """All threads have left the kernel."""

    def barrier_passed(self, block: Block, operation: str) -> None:
        """All threads of the block have met; the running one came last and is about to go on."""

    def warp_met(self, warp: Warp, operation: str, threads: list[Thread]) -> None:
        """So have the lanes of one mask."""

    def atomic_done(self) -> None:
        """The running thread has updated an element atomically."""

    def address_used(self, access: Access, owner: SharedRegion | Argument) -> None:
        """The running thread loads from an address, or stores to it."""

    def instruction_done(self, what: Instruction) -> None:
        """The running thread has carried out an instruction, or its warp has a collective one."""

    def hopper_called(self, what: Instruction, operands: tuple) -> None:
        """The running thread begins one of Hopper's own instructions."""

    def bulk_copied(self, outside: int, inside: int, stored: bool, place: Place) -> None:
        """The running thread has started a copy by TMA.

        outside, inside: bytes of global and of shared memory that it touches. stored: to the
        former. place: of the instruction.
        """

    def operand_read(self, size: int, place: Place) -> None:
        """The running thread was the last to issue a product that reads shared memory."""

    def phase_completed(self) -> None:
        """All arrivals and bytes of a phase of an mbarrier are there."""

    def named_barrier_opened(self) -> None:
        """All threads that a numbered barrier waited for have come."""


class Block:
    """One thread block of a launch, run to its end by `run`, or step by step by its parts.

    early: asynchronous operations are done as early as they may be, not as late. hopper: what only
    Hopper has, from the first use of it on.
    """

    def __init__(
        self,
        kernel: str,
        function: Callable,
        arguments: tuple,
        index: Index,
        dim: Index,
        grid: Index,
        memory: BlockMemory,
        rng: random.Random | None,
        observer: Observer | None = None,
        early: bool = False,
    ) -> None:
        self.kernel = kernel
        self.function = function
        self.arguments = arguments
        self.index = index
        self.dim = dim
        self.grid = grid
        self.memory = memory
        self.rng = rng
        self.observer = observer
        size = dim[0] * dim[1] * dim[2]
        self.nothing_seen = [0] * size
        self.warps = [Warp(number) for number in range(-(-size // WARP_SIZE))]
        self.threads = [Thread(self, number) for number in range(size)]
        for thread in self.threads:
            thread.warp.threads.append(thread)
        self.at_barrier: list[Thread] = []
        self.ready: deque[Thread] = deque()
        self.early = early
        self.hopper: HopperUnits | None = None

    def run(self) -> None:
        """Run every thread to its end, or raise the first thing that is wrong."""
        self.start()
        try:
            while self.ready or self.land():
                if self.ready:
                    self.resume(self.ready.popleft())
            self.finish()
        finally:
            self.discard()

    def start(self) -> None:
        """Make every thread ready to run."""
        self.ready.extend(self._shuffled(self.threads))
        if self.observer:
            self.observer.block_started(self)

    def land(self) -> bool:
        """No thread is ready: a copy may arrive, if one is under way."""
        return self.hopper is not None and self.hopper.land()

    def finish(self) -> None:
        """No thread is ready any more: all must have left the kernel."""
        if not all(thread.dead for thread in self.threads):
            raise self._stuck()
        if self.hopper is not None:
            self.hopper.finish()
        if self.observer:
            self.observer.block_finished(self)

    def discard(self) -> None:
        """Free the threads, those that have not left the kernel too."""
        for thread in self.threads:
            if not thread.dead:
                # Back to here, wherever that is: the collector may call this at any moment.
                thread.parent = getcurrent()
                thread.throw()
            # Python's collector frees no cycle of greenlets (thread -> block -> thread).
            vars(thread).clear()

    def resume(self, thread: Thread) -> None:
        """Run a ready thread until it waits for others."""
        try:
            thread.switch()
        except SimulationError:
            raise
        except Exception as exception:
            raise self._thread_error(thread, exception) from exception

    def barrier(self, operation: str, value: object, combine: Callable[[list], object]) -> object:
        """`syncthreads` and its counting forms: all threads of the block meet at one place."""
        thread = getcurrent()
        waiting = Waiting(operation, call_chain(), value)
        self.at_barrier.append(thread)
        first = self.at_barrier[0]
        if first is not thread and first.waiting.chain != waiting.chain:
            what = "divergent barrier: threads of one block wait at different barriers"
            thread.waiting = waiting
            raise self.waiting_error(BarrierError, what, thread)
        if len(self.at_barrier) < len(self.threads):
            return thread.park(waiting)
        here, self.at_barrier = self.at_barrier, []
        result = combine([value if t is thread else t.waiting.value for t in here])
        order(here)
        self.release(here, thread, result)
        if self.observer:
            self.observer.barrier_passed(self, operation)
        return result

    def release(self, threads: list[Thread], running: Thread, result: object) -> None:
        """Make all of `threads` ready but the one that is running already."""
        for thread in self._shuffled(threads):
            if thread is not running:
                thread.release(result)

    def error(
        self,
        kind: type,
        what: str,
        details: list[str],
        places: Iterable[Place],
        thread: Thread | None = None,
    ) -> Exception:
        """An error that says what is wrong in which kernel and block, then who and where.

        `places` are the ones that `details` name. It is about `thread`, or else the running one.
        """
        head = f"{what}, in kernel {self.kernel}, block {self.index}"
        error = kind("\n  ".join([head, *details]))
        thread = getcurrent() if thread is None else thread
        error.kernel, error.block, error.thread = self.kernel, self.index, thread.index
        error.warp, error.lane = thread.warp.number, thread.lane
        error.lines = tuple(dict.fromkeys(line_number(*place) for place in places))
        return error

    def error_here(self, kind: type, what: str) -> Exception:
        """An error about the running thread, where it stands."""
        place = kernel_place()
        return self.error(kind, what, [getcurrent().stands(place)], [place])

    def _shuffled(self, threads: list[Thread]) -> list[Thread]:
        return self.rng.sample(threads, len(threads)) if self.rng else threads

    def _thread_error(self, thread: Thread, exception: Exception) -> ThreadError:
        place = raised_at(exception)
        what = f"{type(exception).__name__}: {exception}"
        if place is None:
            return self.error(ThreadError, what, [str(thread)], [], thread)
        return self.error(ThreadError, what, [thread.stands(place)], [place], thread)

    def _stuck(self) -> SimulationError:
        for thread in self.threads:
            if thread.unwritten:
                region, *read = thread.unwritten
                return region.verdict(*read)
        for warp in self.warps:
            for mask, here in warp.meetings.items():
                missing = [t for t in warp.threads if mask >> t.lane & 1 and t not in here]
                what = (
                    f"{here[0].waiting.operation} with mask {mask:#010x} waits for lanes "
                    f"{ranges([t.lane for t in missing])} of warp {warp.number}, which never come"
                )
                return self.waiting_error(WarpError, what, missing[0])
        if self.hopper is not None and (error := self.hopper.stuck()) is not None:
            return error
        what = "barrier that some threads of the block never reach"
        missing = [thread for thread in self.threads if thread not in self.at_barrier]
        return self.waiting_error(BarrierError, what, missing[0])

    def waiting_error(self, kind: type, what: str, thread: Thread) -> Exception:
        """An error about threads that wait in vain, with who waits where."""
        places = [other.waiting.chain[0] for other in self.threads if other.waiting]
        return self.error(kind, what, self._who_waits_where(), dict.fromkeys(places), thread)

    def _who_waits_where(self) -> list[str]:
        places: dict[str, list[int]] = {}
        for thread in self.threads:
            if thread.waiting:
                where = describe_line(*thread.waiting.chain[0])
                place = f"wait for {thread.waiting.operation} at {where}"
            else:
                place = "have left the kernel" if thread.dead else "are ready to run"
            places.setdefault(place, []).append(thread.number)
        return [f"{with_warps(numbers)} {place}" for place, numbers in places.items()]


def with_warps(threads: list[int]) -> str:
    """`threads 0-39 (warps 0-1)`."""
    warps = sorted({number // WARP_SIZE for number in threads})
    return f"threads {ranges(threads)} (warp{'s' * (len(warps) > 1)} {ranges(warps)})"


def order(threads: list[Thread]) -> None:
    """All that any of `threads` did so far now happens before all that any of them does next."""
    clocks = list({id(thread.seen): thread.seen for thread in threads}.values())
    seen = (
        list(clocks[0])
        if len(clocks) == 1
        else [max(column) for column in zip(*clocks, strict=True)]
    )
    for thread in threads:
        seen[thread.number] = thread.clock
        thread.clock += 1
        thread.seen = seen


def raised_at(exception: BaseException) -> Place | None:
    """The innermost kernel instruction that an exception passed through."""
    place = None
    traceback = exception.__traceback__
    while traceback:
        frame = traceback.tb_frame
        if MARKER in frame.f_globals:
            place = frame.f_code, traceback.tb_lasti
        traceback = traceback.tb_next
    return place
