"""Counting what a launch does: every access, meeting of threads and float32 operation.

A counted kernel is rebuilt so that its float32 numbers count (`arithmetic`), its arrays log every
access, and each thread knows its position: the calls and the loop iterations it is in. After every
barrier, the accesses of a warp's lanes that belong together become requests (`requests`).
"""

from __future__ import annotations

import dis
import sys
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import CodeType, FrameType, FunctionType

import numpy as np
from greenlet import getcurrent
from numba import cuda

from fa2_numba.constants import WARP_SIZE
from fa2_numba.simulator.arithmetic import (
    OPERATIONS,
    NoSourceError,
    counted_code,
    counted_functions,
    counted_meanings,
    make_hooks,
)
from fa2_numba.simulator.engine import Block, Observer, Thread, Warp
from fa2_numba.simulator.machine import Cuda
from fa2_numba.simulator.memory import (
    CHECKED,
    UNCHECKED,
    ArrayKinds,
    SharedArray,
    SimulatedArray,
)
from fa2_numba.simulator.report import BlockCounts, Counts, LineCounts, Report
from fa2_numba.simulator.requests import (
    LOG_COLUMNS,
    SITE,
    count_replays,
    count_sectors,
    warp_requests,
)
from fa2_numba.simulator.retarget import Retargeting
from fa2_numba.simulator.source import line_number

SPACES = ("global", "shared")
ACCESSES = ("load", "store")
ITEM_SIZES = (1, 2, 4, 8, 16)
LOGS = [(space, access, size) for space in SPACES for access in ACCESSES for size in ITEM_SIZES]
"""A thread keeps one log for each of these."""
LOG_NUMBER = {log: number for number, log in enumerate(LOGS)}

CALL_SHIFT = 48
"""An access's site is the address of its instruction, below this bit, and the number of the call
path to its function, above."""

VOTES = ("all_sync", "any_sync", "eq_sync", "ballot_sync", "match_any_sync", "match_all_sync")


class Counter(Observer):
    """Counts one launch. `function` is the kernel to run, `kinds` its arrays; `report` the result.

    checks: whether accesses are also checked for races and for memory nobody wrote.
    """

    def __init__(self, kernel: FunctionType, checks: bool) -> None:
        self._tallies = [0] * len(OPERATIONS)
        self._codes = _Codes()
        self._uncounted = ""
        functions, multiply_add, builtins = counted_functions(self._tallies)
        self._retargeting = Retargeting(
            meanings=counted_meanings(functions) | {id(cuda): CountedCuda(multiply_add)},
            builtins=builtins | {"range": CountedRange},
            hooks=make_hooks(self._tallies),
            code_of=self._code_of,
            called=self._called,
        )
        self.kernel = kernel.__name__
        self.function = self._retargeting.function(kernel)
        self._codes.add(self.function.__code__)
        self.kinds = _counted_kinds(checks)
        self._calls: dict[tuple[int, int], int] = {}
        self._roots = [0]
        self._events: dict[str, int] = defaultdict(int)
        self._blocks: list[BlockCounts] = []
        self._traffic = Counts()
        self._lines: dict[tuple[str, int], Counts] = defaultdict(Counts)

    @property
    def report(self) -> Report:
        """What has been counted in the blocks that have ended."""
        lines = [LineCounts(self.kernel, *at, counts) for at, counts in self._lines.items()]
        lines.sort(key=attrgetter("file", "line"))
        return Report(self.kernel, tuple(self._blocks), tuple(lines), self._uncounted)

    def block_started(self, block: Block) -> None:
        """Its threads get their logs."""
        self._events.clear()
        self._tallies[:] = [0] * len(OPERATIONS)
        self._traffic = Counts()
        for thread in block.threads:
            thread.logs = [array("q") for _ in LOGS]
            thread.position = thread.call = 0

    def block_finished(self, block: Block) -> None:
        """Its counts are complete."""
        self._collect(block)
        done = Counts(**self._events, **dict(zip(OPERATIONS, self._tallies, strict=True)))
        self._blocks.append(BlockCounts(self.kernel, block.index, self._traffic + done))

    def barrier_passed(self, block: Block, operation: str) -> None:
        """All threads have met: what they logged is complete up to here."""
        self._events["barriers"] += 1
        self._collect(block)

    def warp_met(self, warp: Warp, operation: str, threads: list[Thread]) -> None:
        """One instruction of a warp."""
        if operation == "syncwarp":
            self._events["warp_syncs"] += 1
        else:
            self._events["votes" if operation in VOTES else "shuffles"] += 1

    def atomic_done(self) -> None:
        """One atomic update by one thread."""
        self._events["atomics"] += 1

    def _collect(self, block: Block) -> None:
        for warp in block.warps:
            for number, (space, access, itemsize) in enumerate(LOGS):
                logs = [thread.logs[number] for thread in warp.threads]
                if any(logs):
                    self._count_requests(_taken(logs), space, access, itemsize)

    def _count_requests(
        self, logs: list[np.ndarray], space: str, access: str, itemsize: int
    ) -> None:
        sites, addresses = warp_requests([self._at_starts(log) for log in logs])
        lanes = (addresses >= 0).sum(axis=1)
        if space == "global":
            third = {"sectors": count_sectors(addresses)}
        else:
            third = {"replays": count_replays(addresses, itemsize)}
        per_request = {"requests": np.ones_like(lanes), "bytes": itemsize * lanes} | third
        unique, inverse = np.unique(sites, return_inverse=True)
        sums = {
            f"{space}_{access}_{name}": np.bincount(inverse, weights=values)
            for name, values in per_request.items()
        }
        for k, site in enumerate(unique):
            counts = Counts(**{name: int(values[k]) for name, values in sums.items()})
            self._traffic += counts
            self._lines[self._codes.line(self._root(int(site)))] += counts

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
            return counted_code(function)
        except NoSourceError as error:
            self._uncounted = str(error)
            return function.__code__

    def _called(self, function: FunctionType) -> Callable:
        """A device function that tells its thread where it was called."""
        self._codes.add(function.__code__)

        def call(*arguments: object, **named: object) -> object:
            thread = getcurrent()
            position, path = thread.position, thread.call
            frame = sys._getframe(1)
            site = self._codes.start(id(frame.f_code) + frame.f_lasti)
            thread.call = self._path(path, site)
            thread.position = hash((position, site))
            try:
                return function(*arguments, **named)
            finally:
                thread.position, thread.call = position, path

        return call

    def _path(self, outer: int, site: int) -> int:
        key = outer, site
        if key not in self._calls:
            self._roots.append(self._roots[outer >> CALL_SHIFT] or site)
            self._calls[key] = (len(self._roots) - 1) << CALL_SHIFT
        return self._calls[key]


class CountedCuda(Cuda):
    """The `cuda` module inside a counted kernel."""

    def __init__(self, multiply_add: Callable) -> None:
        self.fma = multiply_add


class CountedRange:
    """`range` whose loops give their thread a new position in every iteration."""

    def __init__(self, *bounds: int) -> None:
        self._range = range(*bounds)

    def __iter__(self) -> Iterator[int]:
        thread = getcurrent()
        outer = thread.position
        try:
            for iteration, i in enumerate(self._range):
                thread.position = hash((outer, iteration))
                yield i
        finally:
            thread.position = outer

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> int:
        return self._range[index]


class _Codes:
    """The code objects of a launch, to find instructions by number.

    A code object holds its instructions, so its address plus an offset into it is a number for an
    instruction. A frame may stand at an instruction or, since Python specialises code as it runs,
    at the end of the cache behind it; `start` is the same for both.
    """

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._starts: dict[int, int] = {}

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
        code = self._code(site)
        return code.co_filename, line_number(code, site - id(code))

    def _code(self, site: int) -> CodeType:
        return self._codes[max(address for address in self._codes if address <= site)]


class _Logged:
    """Mixed into an array class: logs every access."""

    def __init__(self, values: np.ndarray, *others: object) -> None:
        super().__init__(values, *others)
        itemsize = values.dtype.itemsize
        self._load_log = LOG_NUMBER[self.space, "load", itemsize]
        self._store_log = LOG_NUMBER[self.space, "store", itemsize]
        # Elements of global arrays are numbered by byte offsets, those of shared memory by items.
        self._unit = itemsize if self.space == "shared" else 1

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Log a read."""
        thread = getcurrent()
        site = thread.call + id(frame.f_code) + frame.f_lasti
        thread.logs[self._load_log].extend((thread.position, site, element * self._unit))

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Log a write; an atomic update is counted as such instead."""
        thread = getcurrent()
        if atomic:
            thread.block.observer.atomic_done()
            return
        site = thread.call + id(frame.f_code) + frame.f_lasti
        thread.logs[self._store_log].extend((thread.position, site, element * self._unit))


class _LoggedGlobal(_Logged, SimulatedArray):
    space = "global"


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
    return ArrayKinds(
        lambda values, name: _LoggedGlobal(values, byte_offsets(values), name),
        (lambda a: _LoggedShared(a.values, a.elements, a.name, a.region))
        if checks
        else (lambda a: _LoggedUncheckedShared(a.values, a.elements, a.name)),
        (CHECKED if checks else UNCHECKED).local,
    )


def byte_offsets(values: np.ndarray) -> np.ndarray:
    """Where each element lies, in bytes from the lowest one (taken to be well aligned).

    >>> byte_offsets(np.zeros((2, 3), np.float32).T).tolist()
    [[0, 12], [4, 16], [8, 20]]
    """
    offsets = np.zeros(values.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(values.shape, values.strides, strict=True)):
        steps = np.arange(size) * stride
        offsets += (steps - steps.min(initial=0)).reshape(-1, *(1,) * (values.ndim - axis - 1))
    return offsets


def _taken(logs: list[array]) -> list[np.ndarray]:
    """What lanes have logged, out of their logs."""
    taken = [np.array(log, np.int64).reshape(-1, LOG_COLUMNS) for log in logs]
    for log in logs:
        del log[:]
    return taken + [np.empty((0, LOG_COLUMNS), np.int64)] * (WARP_SIZE - len(taken))
