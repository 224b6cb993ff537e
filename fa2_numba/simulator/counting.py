"""Counting what a launch does: every access, meeting of threads and float32 operation.

A counted kernel has hooks (`hooks`) where it computes (`arithmetic`) and where it loops, so that
each thread knows its position: the calls and the loop iterations it is in. Its arrays log every
access with that position. After every barrier, what the lanes of a warp did at one place in one
position becomes one request (`requests`).
"""

from __future__ import annotations

import dis
import sys
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter, mul
from types import CodeType, FrameType, FunctionType

import numpy as np
from greenlet import getcurrent
from numba import cuda
from numba.cuda.types import float32

from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.device.instruction import Instruction
from fa2_numba.simulator import hooks
from fa2_numba.simulator.addresses import Access, Argument, byte_bounds
from fa2_numba.simulator.arithmetic import (
    MULTIPLY_ADDS,
    OPERATIONS,
    SPECIAL_CALLS,
    counted_builtins,
    counted_fma,
    counted_meanings,
    operator_hooks,
)
from fa2_numba.simulator.engine import Block, Observer, Thread, Warp
from fa2_numba.simulator.errors import SimulationError
from fa2_numba.simulator.machine import Cuda
from fa2_numba.simulator.memory import (
    CHECKED,
    UNCHECKED,
    ArrayKinds,
    SharedArray,
    SimulatedArray,
)
from fa2_numba.simulator.regions import SharedRegion
from fa2_numba.simulator.report import BlockCounts, Counts, LineTraffic, Report, Traffic
from fa2_numba.simulator.requests import (
    LOG_COLUMNS,
    SITE,
    count_replays,
    count_sectors,
    warp_requests,
)
from fa2_numba.simulator.retarget import Retargeting
from fa2_numba.simulator.source import Place, line_number

CALL_SHIFT = 48
"""An access's site is the address of its instruction, below this bit, and the number of the call
path to its function, above."""
MAX_CALL_PATHS = 1 << 15

ARRAY_ALIGNMENT = 256
"""Bytes; where arrays begin, as the allocators of GPUs place them."""

SYNCHRONOUS = False
"""Last in the key of a log; True in that of asynchronous copies."""

VOTES = ("all_sync", "any_sync", "eq_sync", "ballot_sync", "match_any_sync", "match_all_sync")


class LaunchCounter(Observer):
    """Counts one launch. `function` is the kernel to run, `kinds` its arrays; `report` the result.

    checks: whether accesses are also checked for races and for memory nobody wrote.
    """

    def __init__(self, kernel: FunctionType, checks: bool) -> None:
        self._tallies = [0] * len(OPERATIONS)
        self._codes = _Codes()
        self._uncounted = ""
        fma = counted_fma(self._tallies)
        self._retargeting = Retargeting(
            meanings=counted_meanings(self._tallies)
            | {id(cuda): CountedCuda(fma), id(cuda.fma): fma},
            builtins=counted_builtins(self._tallies),
            hooks=operator_hooks(self._tallies) | LOOP_HOOKS,
            code_of=self._code_of,
            called=self._called,
        )
        self.kernel = kernel.__name__
        self.function = self._retargeting.function(kernel)
        self._codes.add(self.function.__code__)
        self.kinds = _counted_kinds(checks)
        self._paths: dict[tuple[int, int], int] = {}
        self._roots = [0]
        self._events: dict[str, int] = defaultdict(int)
        self._blocks: list[BlockCounts] = []
        self._traffic = Traffic()
        self._lines: dict[tuple[str, int], Traffic] = defaultdict(Traffic)

    @property
    def report(self) -> Report:
        """What has been counted in the blocks that have ended."""
        lines = [LineTraffic(self.kernel, *at, traffic) for at, traffic in self._lines.items()]
        lines.sort(key=attrgetter("file", "line"))
        blocks = sorted(self._blocks, key=lambda block: block.index[::-1])
        return Report(self.kernel, tuple(blocks), tuple(lines), self._uncounted)

    def block_started(self, block: Block) -> None:
        """Its threads get their logs."""
        self._events.clear()
        self._tallies[:] = [0] * len(OPERATIONS)
        self._traffic = Traffic()
        for thread in block.threads:
            thread.logs = defaultdict(_new_log)
            thread.position = thread.call = 0

    def block_finished(self, block: Block) -> None:
        """Its counts are complete."""
        self._collect(block)
        counts = Counts(
            **vars(self._traffic),
            **self._events,
            **dict(zip(OPERATIONS, self._tallies, strict=True)),
        )
        self._blocks.append(BlockCounts(self.kernel, block.index, counts))

    def barrier_passed(self, block: Block, operation: str) -> None:
        """All threads have met: what they logged is complete up to here."""
        self._events["barriers"] += 1
        self._collect(block)

    def warp_met(self, warp: Warp, operation: str, threads: list[Thread]) -> None:
        """One instruction of a warp."""
        if operation == "syncwarp":
            self._events["warp_syncs"] += 1
        elif operation in VOTES:
            self._events["votes"] += 1
        elif operation.startswith("shfl_"):
            self._events["shuffles"] += 1

    def atomic_done(self) -> None:
        """One atomic update by one thread."""
        self._events["atomics"] += 1

    def instruction_done(self, what: Instruction) -> None:
        """A product or a load of matrices by a warp; what gives a float32 is a function of it."""
        if what.multiply_adds:
            self._events["tensor_core_instructions"] += 1
            self._tallies[MULTIPLY_ADDS] += what.multiply_adds
        elif what.collective == WARP_SIZE:
            loads = any(getattr(kind, "written", False) for kind in what.operands.values())
            self._events["matrix_loads" if loads else "matrix_stores"] += 1
        elif what.result == float32:
            self._tallies[SPECIAL_CALLS] += 1

    def bulk_copied(self, outside: int, inside: int, stored: bool, place: Place) -> None:
        """One request for all of a box: lines of whole sectors, and no bank conflict."""
        self._events["async_copies"] += 1
        to, of = ("store", "load") if stored else ("load", "store")
        self._add_at(
            place,
            **{
                f"global_{to}_requests": 1,
                f"global_{to}_bytes": outside,
                f"global_{to}_sectors": -(-outside // SECTOR_BYTES),
                f"shared_{of}_requests": 1,
                f"shared_{of}_bytes": inside,
            },
        )

    def operand_read(self, size: int, place: Place) -> None:
        """One request for all of a product's operand."""
        self._add_at(place, shared_load_requests=1, shared_load_bytes=size)

    def phase_completed(self) -> None:
        """One phase of an mbarrier."""
        self._events["mbarrier_phases"] += 1

    def named_barrier_opened(self) -> None:
        """Once for all threads of it."""
        self._events["named_barriers"] += 1

    def _add_at(self, place: Place, **counted: int) -> None:
        """Add what one instruction of the running thread has moved."""
        code, lasti = place
        traffic = Traffic(**counted)
        self._traffic += traffic
        site = getcurrent().call + self._codes.start(id(code) + lasti)
        self._lines[self._codes.line(self._root(site))] += traffic

    def address_used(self, access: Access, owner: SharedRegion | Argument) -> None:
        """Log it, global memory as its array does."""
        thread, (code, lasti) = getcurrent(), access.place
        key = access.space, "store" if access.stored else "load", access.size, access.asynchronous
        site = thread.call + id(code) + lasti
        shift = owner.array.shift if access.space == "global" else 0
        thread.logs[key].extend((thread.position, site, access.address + shift))

    def _collect(self, block: Block) -> None:
        for warp in block.warps:
            kinds = {kind for thread in warp.threads for kind in thread.logs}
            for kind in sorted(kinds):
                self._count_requests(_taken([t.logs[kind] for t in warp.threads]), *kind)

    def _count_requests(
        self, logs: list[np.ndarray], space: str, access: str, itemsize: int, asynchronous: bool
    ) -> None:
        if not any(map(len, logs)):
            return
        sites, addresses = warp_requests([self._at_starts(log) for log in logs])
        lanes = (addresses >= 0).sum(axis=1)
        if asynchronous and access == "store":
            self._events["async_copies"] += len(sites)
        if space == "global":
            third = {"sectors": count_sectors(addresses, itemsize)}
        else:
            third = {"replays": count_replays(addresses, itemsize)}
        per_request = {"requests": np.ones_like(lanes), "bytes": itemsize * lanes} | third
        unique, inverse = np.unique(sites, return_inverse=True)
        sums = {
            f"{space}_{access}_{name}": np.bincount(inverse, weights=values)
            for name, values in per_request.items()
        }
        for k, site in enumerate(unique):
            traffic = Traffic(**{name: int(values[k]) for name, values in sums.items()})
            self._traffic += traffic
            self._lines[self._codes.line(self._root(int(site)))] += traffic

    def _at_starts(self, log: np.ndarray) -> np.ndarray:
        """The log with the numbers of instructions for sites."""
        unique, inverse = np.unique(log[:, SITE], return_inverse=True)
        paths, sites = unique >> CALL_SHIFT << CALL_SHIFT, unique & (1 << CALL_SHIFT) - 1
        starts = np.array([self._codes.start(int(site)) for site in sites], np.int64)
        log[:, SITE] = (paths + starts)[inverse]
        return log

    def _root(self, site: int) -> int:
        """The instruction of the kernel itself that an access belongs to."""
        return self._roots[site >> CALL_SHIFT] or site & (1 << CALL_SHIFT) - 1

    def _code_of(self, function: FunctionType) -> CodeType:
        try:
            return hooks.hooked_code(function)
        except hooks.NoSourceError as error:
            self._uncounted = str(error)
            return function.__code__

    def _called(self, function: FunctionType) -> Callable:
        """A device function that tells its thread where it was called."""
        self._codes.add(function.__code__)
        start = self._codes.start

        def call(*arguments: object, **named: object) -> object:
            thread = getcurrent()
            position, path = thread.position, thread.call
            frame = sys._getframe(1)
            site = start(id(frame.f_code) + frame.f_lasti)
            thread.call = self._path(path, site)
            thread.position = hash((position, site))
            try:
                return function(*arguments, **named)
            finally:
                thread.position, thread.call = position, path

        return call

    def _path(self, outer: int, site: int) -> int:
        """The number of the path `outer` with one more call, where it stands in a site."""
        key = outer, site
        if key not in self._paths:
            number = len(self._roots)
            if number == MAX_CALL_PATHS:
                rule = f"a counted kernel may have {MAX_CALL_PATHS:,} different paths of calls"
                raise SimulationError(f"kernel {self.kernel}: {rule}; use counts=False")
            self._roots.append(self._roots[outer >> CALL_SHIFT] or site)
            self._paths[key] = number << CALL_SHIFT
        return self._paths[key]


class CountedCuda(Cuda):
    """The `cuda` module inside a counted kernel."""

    def __init__(self, fma: Callable) -> None:
        self.fma = fma


def _enter_loop() -> int:
    return getcurrent().position


def _iterate(outer: int, count: int) -> int:
    getcurrent().position = hash((outer, count))
    return count + 1


def _leave_loop(outer: int) -> None:
    getcurrent().position = outer


LOOP_HOOKS = {hooks.ENTER: _enter_loop, hooks.ITERATE: _iterate, hooks.LEAVE: _leave_loop}
"""Before a loop, in each of its iterations, and after it."""


class _Codes:
    """The code objects of a launch, to find instructions by number.

    A code object holds its instructions, so its address plus an offset into it is a number for an
    instruction. A frame may stand at an instruction or, since Python specialises code as it runs,
    at the end of the cache behind it; `start` is the same for both.
    """

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._starts: dict[int, int] = {}
        self._lines: dict[int, tuple[str, int]] = {}

    def add(self, code: CodeType) -> None:
        """Make the instructions of `code`, and of functions inside it, known."""
        self._codes[id(code)] = code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add(constant)

    def start(self, site: int) -> int:
        """The number of the instruction that `site` lies in."""
        if site not in self._starts:
            code = self._code(site)
            offsets = [instruction.offset for instruction in dis.get_instructions(code)]
            within = offsets[bisect_right(offsets, site - id(code)) - 1]
            self._starts[site] = id(code) + within
        return self._starts[site]

    def line(self, site: int) -> tuple[str, int]:
        """(file, line) of an instruction."""
        if site not in self._lines:
            code = self._code(site)
            self._lines[site] = code.co_filename, line_number(code, site - id(code))
        return self._lines[site]

    def _code(self, site: int) -> CodeType:
        return self._codes[max(address for address in self._codes if address <= site)]


class _Logged:
    """Mixed into an array class: logs every access, in bytes from the start of its space."""

    def __init__(self, values: np.ndarray, *others: object) -> None:
        super().__init__(values, *others)
        self._load_log = self.space, "load", values.dtype.itemsize, SYNCHRONOUS
        self._store_log = self.space, "store", values.dtype.itemsize, SYNCHRONOUS

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Log a read."""
        thread = getcurrent()
        site = thread.call + id(frame.f_code) + frame.f_lasti
        address = self.address(element, index)
        thread.logs[self._load_log].extend((thread.position, site, address))

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Log a write; an atomic update is counted as such instead."""
        thread = getcurrent()
        if atomic:
            thread.block.observer.atomic_done()
            return
        site = thread.call + id(frame.f_code) + frame.f_lasti
        address = self.address(element, index)
        thread.logs[self._store_log].extend((thread.position, site, address))

    def address(self, element: int, index: tuple) -> int:
        """Where an element of shared memory lies; elements are numbered from its start."""
        return element * self.values.itemsize


class _LoggedGlobal(_Logged, SimulatedArray):
    """shift: what to add to a real address to get the one that is logged."""

    space = "global"

    def __init__(self, values: np.ndarray, name: object, shift: int) -> None:
        super().__init__(values, values, name)
        self.shift = shift
        self._first = values.__array_interface__["data"][0] + shift
        self._strides = values.strides

    def _view(self, values: np.ndarray, elements: np.ndarray) -> _LoggedGlobal:
        return _LoggedGlobal(values, self._view_name(), self.shift)

    def address(self, element: int, index: tuple) -> int:
        """Where an element of global memory lies."""
        return self._first + sum(map(mul, index, self._strides))


class _LoggedUncheckedShared(_Logged, SimulatedArray):
    space = "shared"


class _LoggedShared(_Logged, SharedArray):
    """With all checks."""

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Log a read that is right."""
        SharedArray.note_read(self, element, index, frame)
        _Logged.note_read(self, element, index, frame)

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Log a write that is right."""
        SharedArray.note_write(self, element, index, frame, atomic)
        _Logged.note_write(self, element, index, frame, atomic)


def _counted_kinds(checks: bool) -> ArrayKinds:
    """The arrays of a counted launch; local ones are registers and not logged."""
    end = 0

    def argument(values: np.ndarray, name: str) -> _LoggedGlobal:
        nonlocal end
        lowest, highest = byte_bounds(values)
        shift = end - lowest
        end += -(-(highest - lowest) // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        return _LoggedGlobal(values, name, shift)

    if checks:
        return ArrayKinds(
            argument,
            lambda a: _LoggedShared(a.values, a.elements, a.name, a.region),
            CHECKED.local,
            checks=True,
        )
    return ArrayKinds(
        argument,
        lambda a: _LoggedUncheckedShared(a.values, a.elements, a.name),
        UNCHECKED.local,
        checks=False,
    )


def _new_log() -> array:
    return array("q")


def _taken(logs: list[array]) -> list[np.ndarray]:
    """What lanes have logged, out of their logs."""
    taken = [np.array(log, np.int64).reshape(-1, LOG_COLUMNS) for log in logs]
    for log in logs:
        del log[:]
    return taken + [np.empty((0, LOG_COLUMNS), np.int64)] * (WARP_SIZE - len(taken))
