"""`Stepper`: one simulated launch under a microscope."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from numbers import Integral

import numpy as np

from fa2_numba.simulator.engine import Index
from fa2_numba.simulator.run import ConfiguredSimulation
from fa2_numba.simulator.stepper import html, state, text
from fa2_numba.simulator.stepper.session import Event, Session
from fa2_numba.simulator.stepper.state import Frame, Group, Row, SourceLine
from fa2_numba.simulator.stepper.statements import Target

ThreadName = int | tuple[int, ...]
"""A thread by its number in the block, or by its index (x,), (x, y) or (x, y, z)."""


class Stepper:
    """Runs a simulated launch piece by piece, and shows what every thread and the memory hold.

        stepper = Stepper(simulate(kernel)[grid, block, stream, shared_bytes], *args)
        stepper.to_barrier()
        print(stepper)

    The kernel runs as it is. Each step returns an `Event` that says what ended it; an error of the
    kernel comes out of the step that meets it, and the threads can still be looked at where they
    were. Blocks run one after the other; a step goes on to the next by itself. After the end `done`
    is True and steps raise RuntimeError.

    Looking shows the block that runs now. `print` and a notebook show all of it; see also `close`.
    """

    def __init__(self, simulation: ConfiguredSimulation, *arguments: object) -> None:
        self._session = Session(_uncounted(simulation).prepare(*arguments))
        self._free = weakref.finalize(self, self._session.close)
        self._free.atexit = False

    # Stepping

    def to_barrier(self) -> Event:
        """Run until all threads of a block have met in a barrier; none has gone on yet."""
        return self._session.to_barrier()

    def to_warp_event(self, warp: int | None = None) -> Event:
        """Run until a shuffle, vote or syncwarp of some warp, or of warp number `warp`, is done."""
        return self._session.to_warp_event(warp)

    def to_line(self, target: Target, thread: ThreadName | None = None) -> Event:
        """Run until some thread, or the given one, is about to execute a statement.

        `target` is a line of the kernel's own file; or a piece of source text, which means every
        statement of the kernel and its device functions that has it; or ("tiles.py", 88), for a
        file by the end of its name. A thread that stands there already goes on to its next time.
        """
        threads = None if thread is None else [self._number(thread)]
        return self._session.to_statement(self._session.statements.meant_by(target), threads)

    def all_to_line(self, target: Target) -> Event:
        """Run until every thread that can get there is about to execute a statement.

        A thread that comes there waits; the step ends when no other can go on without those.
        """
        return self._session.all_to_statement(self._session.statements.meant_by(target))

    def next_statement(self, thread: ThreadName) -> Event:
        """One thread executes its next statement; where it must wait, the others run until it can.

        Calls of device functions are followed into them. Statements on one line count as one.
        """
        return self._session.next_statement(self._number(thread))

    def finish(self) -> Event:
        """Run to the end of the launch."""
        return self._session.finish()

    def close(self) -> None:
        """Give up the launch and free its threads; so do `with` and the garbage collector."""
        self._free()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self._session.launch.kernel

    @property
    def event(self) -> Event:
        """What ended the last step."""
        return self._session.event

    @property
    def done(self) -> bool:
        """Whether the launch has ended: finished, failed or closed."""
        return self._session.done

    @property
    def block(self) -> Index:
        """Index in the grid of the block that runs now, or ran last."""
        return self._session.block.index

    def frames(self, thread: ThreadName) -> list[Frame]:
        """A thread's frames: device functions from the innermost on, last the kernel's own."""
        number = self._number(thread)
        return state.frames(self._session.statements, self._session.block, number)

    def locals(self, thread: ThreadName) -> dict[str, object]:
        """Name -> value in the kernel's own frame; arrays are copies, NaN where nothing wrote."""
        frames = self.frames(thread)
        if not frames:
            raise ValueError(f"thread {thread} of block {self.block} has left the kernel")
        return frames[-1].variables

    def shared(self) -> dict[str, np.ndarray]:
        """Name -> copy of each shared array; elements that nothing wrote are NaN, or masked."""
        return {name: state.unmasked(array) for name, array in self._shared().items()}

    def waiting(self) -> list[Group]:
        """For each warp, which of its threads are ready, wait for what and where, or are gone."""
        return state.waiting(self._session.statements, self._session.block)

    def source(self, context: int = 4) -> list[SourceLine]:
        """The lines where threads stand and `context` lines around them, each with its threads."""
        return state.source(self._session.statements, self._session.block, context)

    def row(self, row: int) -> Row:
        """m, l and O of a row of the block's query tile, gathered from the lanes that hold it.

        Only for kernels that use the names of the ladder's, else ValueError says what is missing.
        """
        return state.row(self._session.block, self.kernel, row)

    def __str__(self) -> str:
        return text.render(self, self._shared())

    def _repr_html_(self) -> str:
        return html.render(self, self._shared())

    def _shared(self) -> dict[str, np.ma.MaskedArray]:
        return state.shared_arrays(self._session.block)

    def _number(self, thread: ThreadName) -> int:
        dim = self._session.launch.dim
        if isinstance(thread, tuple) and 1 <= len(thread) <= 3:
            index = (*thread, 0, 0)[:3]
            inside = all(i in range(size) for i, size in zip(index, dim, strict=True))
            number = index[0] + dim[0] * (index[1] + dim[1] * index[2]) if inside else None
        else:
            number = thread if isinstance(thread, Integral) else None
            inside = number in range(math.prod(dim))
        if not inside:
            raise ValueError(f"thread {thread!r}: a block of this launch has {dim} threads")
        return int(number)


def _uncounted(simulation: ConfiguredSimulation) -> ConfiguredSimulation:
    """The same launch with the kernel's code as it is, without hooks that count."""
    plain = copy.copy(simulation)
    plain._simulator = dataclasses.replace(simulation._simulator, counts=False)
    return plain
