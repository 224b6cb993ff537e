"""Every access that a simulated launch makes to its arrays: who, what, between which barriers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FrameType

import numpy as np
from greenlet import getcurrent

from fa2_numba.simulator.engine import Block, Index, Observer
from fa2_numba.simulator.memory import ArrayKinds, GlobalArray, SimulatedArray
from fa2_numba.simulator.run import ConfiguredSimulation


@dataclass(frozen=True)
class Access:
    """One thread's load or store of one element.

    interval: how many barriers its block had passed. thread: its number in the block. space:
    "shared" or "global". array: its name where it was made, or as an argument. element: its number
    in that array, row after row. size: in bytes.
    """

    block: Index
    interval: int
    thread: int
    space: str
    array: str
    element: int
    stored: bool
    size: int


def record(simulation: ConfiguredSimulation, *arguments: object) -> list[Access]:
    """Run a launch; its accesses to shared and global arrays, in the order in which they ran.

    Accesses by address (`ptx`) are not among them. Races and reads of what nothing wrote are let
    pass. Array arguments are changed in place. simulation: must have checks=True, the default,
    with which arrays know their names.
    """
    launch = simulation.prepare(*arguments)
    if not launch.kinds.checks:
        raise ValueError("checks=False: must be True")
    log = _Log()
    kinds = ArrayKinds(
        launch.kinds.argument,
        lambda array: _Recorded(array, array.elements, str(array.name), log),
        launch.kinds.local,
        checks=False,
    )
    recorded = tuple(
        _Recorded(one, np.arange(one.size).reshape(one.shape), one.name, log)
        if isinstance(one, GlobalArray)
        else one
        for one in launch.arguments
    )
    for block in replace(launch, kinds=kinds, arguments=recorded).blocks(log):
        block.run()
    return log.accesses


class _Log(Observer):
    """Counts the barriers of the block that runs."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.interval = 0

    def block_started(self, block: Block) -> None:
        """It has passed no barrier."""
        self.interval = 0

    def barrier_passed(self, block: Block, operation: str) -> None:
        """All its threads have met."""
        self.interval += 1


class _Recorded(SimulatedArray):
    """An array, or a view of one, that logs its accesses under the name of the whole."""

    def __init__(self, array: SimulatedArray, elements: np.ndarray, root: str, log: _Log) -> None:
        super().__init__(array.values, elements, array.name)
        self.space, self.root, self.log = array.space, root, log

    def note_read(self, element: int, index: tuple, frame: FrameType) -> None:
        """Log a load."""
        self._note(element, stored=False)

    def note_write(self, element: int, index: tuple, frame: FrameType, atomic: bool) -> None:
        """Log a store."""
        self._note(element, stored=True)

    def _note(self, element: int, stored: bool) -> None:
        thread, size = getcurrent(), self.values.itemsize
        place = thread.block.index, self.log.interval, thread.number
        self.log.accesses.append(Access(*place, self.space, self.root, element, stored, size))

    def _view(self, values: np.ndarray, elements: np.ndarray) -> _Recorded:
        view = SimulatedArray(values, elements, self.name)
        view.space = self.space
        return _Recorded(view, elements, self.root, self.log)
