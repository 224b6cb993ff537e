"""What paused threads hold and where they stand, as plain values: nothing here changes a thread."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Number
from pathlib import Path

import numpy as np

from fa2_numba.constants import WARP_SIZE
from fa2_numba.simulator.addresses import values_of
from fa2_numba.simulator.engine import Block
from fa2_numba.simulator.memory import LocalArray, PlainIntegers, SharedArray, SimulatedArray
from fa2_numba.simulator.source import MARKER, describe_source_line
from fa2_numba.simulator.stepper.statements import Statements
from fa2_numba.simulator.stepper.tracing import is_before_statement, kernel_frames

# What a thread does; one that waits is "waiting for" an operation.
BEFORE, RELEASED, FAILED, GONE = "about to execute", "done waiting", "failed", "gone"

ARRAYS = (np.ndarray, SimulatedArray, PlainIntegers)
DATA = (Number, np.generic, str, tuple, type(None), *ARRAYS)


@dataclass(frozen=True)
class Frame:
    """A kernel's or device function's frame of one thread: where it stands, what it holds.

    variables: name -> value, closure variables too. Arrays are masked copies, see `masked_copy`.
    """

    function: str
    file: str
    line: int
    text: str
    variables: dict[str, object]


@dataclass(frozen=True)
class Group:
    """Threads of one warp that are in one state at one line.

    threads: their numbers in the block. state: what they are doing at the line:
        "about to execute": they have not executed it yet;
        "waiting for syncthreads", or for another operation that is called there;
        "done waiting" there: they go on from the middle of it, for what they waited for has come;
        "failed" there; or "gone": they have left the kernel, or the stepper was closed.
    line: `file.py:12: source text`; empty for those gone.
    """

    warp: int
    threads: tuple[int, ...]
    state: str
    line: str = ""


@dataclass(frozen=True)
class SourceLine:
    """A line of source text, and the numbers of the threads that stand on it."""

    file: str
    line: int
    text: str
    threads: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """What can be seen of a block; failed: the frames of a thread that an error has ended."""

    statements: Statements
    block: Block
    failed: dict[int, list[Frame]]

    def frames(self, number: int) -> list[Frame]:
        """A thread's frames, innermost first; none if it has left the kernel."""
        thread = self.block.threads[number]
        if number in self.failed or thread.dead:
            return self.failed.get(number, [])
        if not thread:  # not started: it stands before the first statement and holds its arguments
            filename, line = self.statements.first()
            code = self.block.function.__code__
            names = zip(code.co_varnames, self.block.arguments, strict=False)
            return [_frame(self.block.function.__name__, filename, line, names)]
        return [
            _frame(
                frame.f_code.co_name,
                frame.f_code.co_filename,
                frame.f_lineno,
                frame.f_locals.items(),
            )
            for frame in kernel_frames(thread)
        ]

    def place(self, number: int) -> tuple[str, int] | None:
        """File and line where a thread stands; None if it has left the kernel."""
        thread = self.block.threads[number]
        if number in self.failed:
            return self.failed[number][0].file, self.failed[number][0].line
        if thread.dead:
            return None
        frame = next(kernel_frames(thread), None)
        return (frame.f_code.co_filename, frame.f_lineno) if frame else self.statements.first()

    def waiting(self) -> list[Group]:
        """The threads of each warp by what they are doing."""
        groups: dict[tuple[int, str, str], list[int]] = {}
        for number in range(len(self.block.threads)):
            where = self.place(number)
            line = describe_source_line(*where) if where else ""
            key = number // WARP_SIZE, self._state(number), line
            groups.setdefault(key, []).append(number)
        return [
            Group(warp, tuple(numbers), state, line)
            for (warp, state, line), numbers in sorted(
                groups.items(), key=lambda group: (group[0][0], group[1])
            )
        ]

    def _state(self, number: int) -> str:
        thread = self.block.threads[number]
        if number in self.failed:
            return FAILED
        if thread.dead:
            return GONE
        if thread.waiting:
            return f"waiting for {thread.waiting.operation}"
        return BEFORE if is_before_statement(thread) else RELEASED

    def source(self, context: int) -> list[SourceLine]:
        """The lines around those where threads stand, file by file."""
        standing: dict[tuple[str, int], list[int]] = {}
        for number in range(len(self.block.threads)):
            where = self.place(number)
            if where:
                standing.setdefault(where, []).append(number)
        wanted = {
            (file, number)
            for file, line in standing
            for number in range(max(1, line - context), line + context + 1)
            if number == line or linecache.getline(file, number)
        }
        return [
            SourceLine(
                file,
                line,
                linecache.getline(file, line).rstrip("\n"),
                tuple(standing.get((file, line), ())),
            )
            for file, line in sorted(wanted, key=lambda at: (Path(at[0]).name, at))
        ]


def frames_of_error(error: BaseException) -> list[Frame]:
    """The kernel frames that an exception passed through, innermost first."""
    found = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if MARKER in frame.f_globals
    ]
    return [
        _frame(frame.f_code.co_name, frame.f_code.co_filename, line, frame.f_locals.items())
        for frame, line in reversed(found)
    ]


def _frame(function: str, filename: str, line: int, names: Iterable[tuple[str, object]]) -> Frame:
    variables = {name: shown(value) for name, value in names if isinstance(value, DATA)}
    return Frame(function, filename, line, linecache.getline(filename, line).strip(), variables)


def shown(value: object) -> object:
    """A variable's value; an array as a masked copy."""
    return masked_copy(value) if isinstance(value, ARRAYS) else value


def masked_copy(array: object) -> np.ma.MaskedArray:
    """A copy of a simulated array; elements that nothing wrote are masked.

    Under the mask floating-point numbers are NaN. With the checks off nobody knows what was
    written, and nothing is masked: then shared memory that nothing wrote is NaN all the same.
    """
    values = np.array(values_of(array))
    written = np.ones(values.shape, bool)
    if isinstance(array, LocalArray):
        written = np.frombuffer(array.written, np.uint8)[array.elements] != 0
    elif isinstance(array, SharedArray):
        written = _written(array)
    if np.issubdtype(values.dtype, np.inexact):
        values[~written] = np.nan
    return np.ma.MaskedArray(values, ~written)


def _written(array: SharedArray) -> np.ndarray:
    granules = np.array([writer is not None for writer in array.region.writer])
    size = array.region.granule
    first = array.elements * array.values.itemsize // size
    parts = range(max(1, array.values.itemsize // size))
    return np.all([granules[first + part] for part in parts], axis=0)


def shared_arrays(block: Block) -> dict[str, np.ma.MaskedArray]:
    """Name -> copy of the shared arrays: those of the kernel's variables, and all static ones.

    Left out are views that every thread has its own of, and the whole of the dynamic memory where
    the kernel has named parts of it.
    """
    made = list(block.memory.arrays.values())
    named: dict[str, object] = {}
    for name, array in _kernel_variables(block):
        if any(np.may_share_memory(values_of(array), values_of(whole)) for whole in made):
            named[name] = array if _same(named.setdefault(name, array), array) else None
    named = {name: array for name, array in named.items() if array is not None}
    for array in made:
        if not any(_same(array, other) for other in named.values()):
            named[str(getattr(array, "name", "shared"))] = array
    dynamic = block.memory.dynamic.bytes
    parts = [name for name, array in named.items() if _is_part(array, dynamic)]
    whole = [name for name in parts if values_of(named[name]).nbytes == dynamic.nbytes]
    if len(parts) > len(whole):
        named = {name: array for name, array in named.items() if name not in whole}
    return {name: masked_copy(array) for name, array in named.items()}


def _kernel_variables(block: Block) -> Iterator[tuple[str, object]]:
    """The arrays that the kernel's own frame holds, of all threads."""
    for thread in block.threads:
        for frame in list(kernel_frames(thread))[-1:]:
            variables = frame.f_locals.items()
            yield from ((name, value) for name, value in variables if isinstance(value, ARRAYS))


def _same(a: object, b: object) -> bool:
    """Whether two arrays are one view of one memory."""

    def view(array: object) -> tuple:
        values = values_of(array)
        return values.ctypes.data, values.shape, values.strides, values.dtype

    return a is not None and view(a) == view(b)


def _is_part(array: object, memory: np.ndarray) -> bool:
    return np.may_share_memory(values_of(array), memory)
