"""What paused threads hold and where they stand, as plain values: nothing here changes a thread."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Number
from pathlib import Path

import numpy as np

from fa2_numba.constants import WARP_SIZE
from fa2_numba.simulator.engine import Block, Thread
from fa2_numba.simulator.memory import LocalArray, PlainIntegers, SharedArray, SimulatedArray
from fa2_numba.simulator.source import describe_source_line
from fa2_numba.simulator.stepper.statements import Statements
from fa2_numba.simulator.stepper.tracing import kernel_frames

ARRAYS = (np.ndarray, SimulatedArray, PlainIntegers)
DATA = (Number, np.generic, str, tuple, type(None), *ARRAYS)


@dataclass(frozen=True)
class Frame:
    """A kernel's or device function's frame of one thread: where it stands, what it holds.

    variables: name -> value, closure variables too. Arrays are copies.
    """

    function: str
    file: str
    line: int
    text: str
    variables: dict[str, object]


@dataclass(frozen=True)
class Group:
    """Threads of one warp that are in one state at one line.

    threads: their numbers in the block. state: "ready", "waiting for syncthreads" (or another
    operation), "gone" (has left the kernel). line: `file.py:12: source text`; empty for those gone.
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
class Row:
    """A row of a query tile: its maximum m, its sum l, its output O (not divided by l yet).

    threads: the numbers of those that hold a part of it, one or more columns each. They all hold m
    and l; agree: whether they hold the same, as they do unless some are in the middle of an update.
    """

    row: int
    m: np.floating
    l: np.floating
    O: np.ndarray
    threads: tuple[int, ...]
    agree: bool


def frames(statements: Statements, block: Block, number: int) -> list[Frame]:
    """A thread's frames, innermost first; none if it has left the kernel."""
    thread = block.threads[number]
    if thread.dead:
        return []
    if not thread:  # not started: it stands before the first statement and holds its arguments
        filename, line = statements.first()
        code = block.function.__code__
        names = zip(code.co_varnames, block.arguments, strict=False)
        return [_frame(block.function.__name__, filename, line, names)]
    return [
        _frame(
            frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno, frame.f_locals.items()
        )
        for frame in kernel_frames(thread)
    ]


def _frame(function: str, filename: str, line: int, names: Iterable[tuple[str, object]]) -> Frame:
    variables = {name: shown(value) for name, value in names if isinstance(value, DATA)}
    return Frame(function, filename, line, linecache.getline(filename, line).strip(), variables)


def shown(value: object) -> object:
    """A variable's value; arrays as NumPy copies, what nothing wrote as NaN, or masked."""
    if not isinstance(value, ARRAYS):
        return value
    return unmasked(masked_copy(value))


def unmasked(copy: np.ma.MaskedArray) -> np.ndarray:
    """Masked elements become NaN if the dtype has one; an array without any is a plain one."""
    if not copy.mask.any():
        return copy.data
    return copy.filled(np.nan) if np.issubdtype(copy.dtype, np.floating) else copy


def masked_copy(array: object) -> np.ma.MaskedArray:
    """A copy of a simulated array; elements that nothing wrote are masked.

    With the checks off nobody knows: then NaN of shared memory may be one that nothing wrote.
    """
    values = np.array(values_of(array))
    written = np.ones(values.shape, bool)
    if isinstance(array, LocalArray):
        written = np.frombuffer(array.written, np.uint8)[array.elements] != 0
    elif isinstance(array, SharedArray):
        written = _written(array)
    return np.ma.MaskedArray(values, ~written)


def _written(array: SharedArray) -> np.ndarray:
    granules = np.array([writer is not None for writer in array.region.writer])
    size = array.region.granule
    first = array.elements * array.values.itemsize // size
    parts = range(max(1, array.values.itemsize // size))
    return np.all([granules[first + part] for part in parts], axis=0)


def values_of(array: object) -> np.ndarray:
    """The memory of a simulated array."""
    return array if isinstance(array, np.ndarray) else array.values


def shared_arrays(block: Block) -> dict[str, np.ma.MaskedArray]:
    """Name -> copy of the shared arrays: those of the kernel's variables, and all static ones.

    Left out are views that every thread has its own of, and the whole of the dynamic memory where
    the kernel has named parts of it.
    """
    made = list(block.memory._arrays.values())
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


def place(statements: Statements, block: Block, thread: Thread) -> tuple[str, int] | None:
    """File and line where a thread stands; None if it has left the kernel."""
    if thread.dead:
        return None
    frame = next(kernel_frames(thread), None)
    return (frame.f_code.co_filename, frame.f_lineno) if frame else statements.first()


def waiting(statements: Statements, block: Block) -> list[Group]:
    """The threads of each warp by what they are doing."""
    groups: dict[tuple[int, str, str], list[int]] = {}
    for number, thread in enumerate(block.threads):
        where = place(statements, block, thread)
        if where is None:
            state = "gone"
        else:
            state = f"waiting for {thread.waiting.operation}" if thread.waiting else "ready"
        line = describe_source_line(*where) if where else ""
        groups.setdefault((number // WARP_SIZE, state, line), []).append(number)
    return [
        Group(warp, tuple(numbers), state, line)
        for (warp, state, line), numbers in sorted(groups.items(), key=lambda g: (g[0][0], g[1]))
    ]


def source(statements: Statements, block: Block, context: int) -> list[SourceLine]:
    """The lines around those where threads stand, file by file."""
    standing: dict[tuple[str, int], list[int]] = {}
    for number, thread in enumerate(block.threads):
        where = place(statements, block, thread)
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


ROW_NAMES = ("row", "LANE_ROWS", "LANE_COLS", "m_reg", "l_reg", "O_reg")
COLUMN_NAMES = ("col", "lane_col")


def row(block: Block, kernel: str, number: int) -> Row:
    """Row `number` of the block's query tile, put together from the lanes that hold it.

    For kernels whose own frame has the project's names: `row` and `col` (or `lane_col`) of the
    lane's first element, LANE_ROWS and LANE_COLS, `m_reg`, `l_reg`, `O_reg`.
    """
    holders = []
    missing: set[str] = set()
    for index, thread in enumerate(block.threads):
        names = list(kernel_frames(thread))[-1].f_locals if thread else {}
        col = next((names[name] for name in COLUMN_NAMES if name in names), None)
        lacks = [name for name in ROW_NAMES if name not in names]
        missing.update(lacks + (["col"] if col is None else []))
        if not lacks and col is not None:
            step, apart = divmod(number - names["row"], names["LANE_ROWS"])
            if apart == 0 and 0 <= step < len(names["m_reg"]):
                holders.append((index, step, col, names))
    if not holders:
        what = f"lacks {', '.join(sorted(missing))}" if missing else "has no such row"
        raise ValueError(
            f"row {number}: no thread of kernel {kernel}, where they are now, holds it: their "
            f"frame {what}. row() needs {', '.join(ROW_NAMES)} and col or lane_col there"
        )
    return _gathered(number, holders)


def _gathered(number: int, holders: list[tuple]) -> Row:
    names = holders[0][3]
    size = names["LANE_COLS"] * names["O_reg"].shape[1]
    O = np.full(size, np.nan, names["O_reg"].dtype)
    m, l = (
        np.array([shown(names[name])[step] for _, step, _, names in holders])
        for name in ("m_reg", "l_reg")
    )
    for _, step, col, names in holders:
        O[col :: names["LANE_COLS"]] = shown(names["O_reg"])[step]
    threads = tuple(index for index, *_ in holders)
    agree = bool(np.all(m == m[0]) and np.all(l == l[0]))
    return Row(number, m[0], l[0], O, threads, agree)
