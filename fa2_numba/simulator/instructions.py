"""What an instruction of `device/ptx.py` does in the simulator, made from its definition there.

Every thread fetches what its operands name, registers and bytes of memory, and puts the results
where they name. In between `meaning` computes, for one thread or, of a collective instruction, for
a whole warp at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
from greenlet import getcurrent

from fa2_numba.constants import FULL_MASK, WARP_SIZE
from fa2_numba.device.instruction import Address, Instruction, Registers
from fa2_numba.device.layouts import GROUP_ROWS
from fa2_numba.simulator.addresses import Access, values_of
from fa2_numba.simulator.errors import OutOfBoundsError, WarpError
from fa2_numba.simulator.hopper import simulated_hopper
from fa2_numba.simulator.memory import (
    BEING_READ,
    BEING_WRITTEN,
    UNFENCED,
    UNWRITTEN,
    LocalArray,
    PlainIntegers,
)
from fa2_numba.simulator.source import Place
from fa2_numba.simulator.values import NUMBA_TYPES, numpy_dtype


def simulated(what: Instruction) -> Callable:
    """The function that stands for an instruction in a simulated kernel."""
    if (hopper := simulated_hopper(what, _maker)) is not None:
        return hopper
    makers = {name: _maker(kind) for name, kind in what.operands.items()}
    parameters = sum(3 if isinstance(o, Registers) else 1 for o in what.operands.values())
    addresses = [name for name, kind in what.operands.items() if isinstance(kind, Address)]
    target = next((name for name, kind in what.operands.items() if _is_target(kind)), None)
    result_type = NUMBA_TYPES.get(what.result)
    run = _run_by_warp(what) if what.collective else _run_by_thread(what)

    def call(*arguments: object) -> object:
        if len(arguments) != parameters:
            raise TypeError(f"{what.name} takes {parameters} arguments, got {len(arguments)}")
        given, frame = iter(arguments), sys._getframe(1)
        place = frame.f_code, frame.f_lasti
        operands = {name: make(given) for name, make in makers.items()}
        for name in addresses:
            operands[name] = _access(what, name, operands, place)
        result = run([operand.load() for operand in operands.values()])
        result, stored = result if target and what.result else (result, result)
        if target:
            operands[target].store(stored)
        if what.group:
            _close_group(what.group, result)
        return result_type(result) if result_type else None

    call.__name__, call.__doc__ = what.name, what.meaning.__doc__
    return call


def _is_target(kind: object) -> bool:
    """Whether an operand takes what `meaning` returns."""
    return getattr(kind, "written", False) or getattr(kind, "stored", False)


def _maker(kind: object) -> Callable[[Iterator[object]], RegisterBlock | _Scalar]:
    """What makes an operand out of the next arguments of a call."""
    if isinstance(kind, Registers):
        shape = _Shape(kind)
        return lambda given: RegisterBlock(shape, next(given), next(given), next(given))
    cast = NUMBA_TYPES[getattr(kind, "type", kind)]
    return lambda given: _Scalar(cast(next(given)))


def _access(what: Instruction, name: str, operands: dict[str, object], place: Place) -> Access:
    """The access that an address is for."""
    kind = what.operands[name]
    wanted = kind.size
    if kind.at_most:
        wanted = operands[kind.at_most].value
        if not 0 <= wanted <= kind.size:
            raise ValueError(f"{what.name}: {kind.at_most}={wanted} must be 0 to {kind.size}")
    if what.collective and getcurrent().lane >= _row_count(what):
        wanted = 0
    address = operands[name].value
    how = kind.stored, what.asynchronous, kind.updated
    return Access(kind.space, address, kind.size, wanted, *how, place)


def _is_matrix(values: np.ndarray) -> bool:
    return values.ndim == 2 and values.flags.c_contiguous


def _row_count(what: Instruction) -> int:
    """How many lanes point to a row of a matrix: eight for each register of a lane."""
    blocks = (o for o in what.operands.values() if isinstance(o, Registers))
    return sum(GROUP_ROWS * len(block.places) for block in blocks)


def _run_by_thread(what: Instruction) -> Callable:
    def run(values: list) -> object:
        result = what.meaning(*values)
        _tell(what)
        return result

    return run


def _run_by_warp(what: Instruction) -> Callable:
    def combine(lanes: list) -> object:
        _tell(what)
        columns = zip(*lanes, strict=True)
        return what.meaning(*(None if c[0] is None else np.array(c) for c in columns))

    def run(values: list) -> object:
        thread = getcurrent()
        lanes = len(thread.warp.threads)
        if lanes < WARP_SIZE:
            why = f"{what.name} needs all {WARP_SIZE} lanes of a warp, and this one has {lanes}"
            raise thread.block.error_here(WarpError, why)
        return thread.warp.meet(what.name, FULL_MASK, values, combine, aligned=True)[thread.lane]

    return run


def _tell(what: Instruction) -> None:
    observer = getcurrent().block.observer
    if observer:
        observer.instruction_done(what)


def _close_group(group: str, pending: int | None) -> None:
    """The end of a group of asynchronous copies, or the wait for groups."""
    thread = getcurrent()
    if group == "commit":
        thread.copies.commit()
        return
    for copy in thread.copies.wait(pending):
        if thread.block.memory.kinds.checks:
            copy.region.end_copy(copy)
        copy.region.bytes[copy.first : copy.first + copy.data.size] = copy.data


class _Scalar:
    """A number."""

    def __init__(self, value: object) -> None:
        self.value = value

    def load(self) -> object:
        """The number."""
        return self.value


class _Shape:
    """What all blocks of one operand have in common; `places` index the registers in a block."""

    def __init__(self, kind: Registers) -> None:
        self.dtype = numpy_dtype(kind.type)
        self.is_read = kind.read
        self.places = tuple(np.array(kind.places).T)
        self.height, self.width = (int(axis.max()) + 1 for axis in self.places)


class RegisterBlock:
    """A block of a local array, from element (row, col) on."""

    def __init__(self, shape: _Shape, array: object, row: int, col: int) -> None:
        self.shape = shape
        self.array = array
        self.values = self._checked_values()
        self.where = slice(row, row + shape.height), slice(col, col + shape.width)
        rows, cols = self.values.shape
        if not (0 <= row <= rows - shape.height and 0 <= col <= cols - shape.width):
            self._refuse_outside()

    def _checked_values(self) -> np.ndarray:
        """The array's memory, if it can be registers."""
        array = self.array
        is_local = isinstance(array, (LocalArray, PlainIntegers, np.ndarray))
        values = values_of(array) if is_local else None
        if not is_local or not _is_matrix(values) or values.dtype != self.shape.dtype:
            wanted = f"a two-dimensional local array of {self.shape.dtype}"
            raise TypeError(f"registers must be {wanted}, contiguous in memory")
        return values

    def _refuse_outside(self) -> None:
        rows, cols = self.where
        block = f"[{rows.start}:{rows.stop}, {cols.start}:{cols.stop}]"
        name = getattr(self.array, "name", "")
        what = f"registers {name}{block} outside their local array of shape {self.values.shape}"
        raise getcurrent().block.error_here(OutOfBoundsError, what)

    def load(self) -> np.ndarray | None:
        """The values of the registers, in PTX's order; None if they are not read."""
        if not self.shape.is_read:
            return None
        if isinstance(self.array, LocalArray):
            self._check_written()
        return self.values[self.where][self.shape.places]

    def store(self, values: np.ndarray) -> None:
        """New values, in PTX's order."""
        self.values[self.where][self.shape.places] = values
        if isinstance(self.array, LocalArray):
            states = self._states()
            if (states >= BEING_READ).any():
                row, col = np.argwhere(states >= BEING_READ)[0]
                index = self.where[0].start + int(row), self.where[1].start + int(col)
                frame = sys._getframe()
                self.array.note_write(self.array.elements[index], index, frame, atomic=False)
            elements = self.array.elements[self.where]
            np.frombuffer(self.array.written, np.uint8)[elements] = UNFENCED

    def _check_written(self) -> None:
        states = self._states()
        unreadable = (states == UNWRITTEN) | (states == BEING_WRITTEN)
        if unreadable.any():
            row, col = np.argwhere(unreadable)[0]
            index = self.where[0].start + int(row), self.where[1].start + int(col)
            self.array.note_read(self.array.elements[index], index, sys._getframe())

    def _states(self) -> np.ndarray:
        return np.frombuffer(self.array.written, np.uint8)[self.array.elements[self.where]]

    def states(self) -> np.ndarray | None:
        """What the registers are (`memory.WRITTEN` and its like); None where nobody notes it."""
        if not isinstance(self.array, LocalArray):
            return None
        return self._states()[self.shape.places]

    def set_state(self, state: int) -> None:
        """Note what they are now."""
        if isinstance(self.array, LocalArray):
            elements = self.array.elements[self.where][self.shape.places]
            np.frombuffer(self.array.written, np.uint8)[elements] = state

    def raw(self) -> np.ndarray:
        """The values, whatever their state."""
        return self.values[self.where][self.shape.places]

    def set_raw(self, values: np.ndarray) -> None:
        """New values, whatever the state; it stays as it is."""
        self.values[self.where][self.shape.places] = values
