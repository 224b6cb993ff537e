"""`Stepper`: one simulated launch under a microscope."""

from __future__ import annotations

import math
import weakref
from numbers import Integral

import numpy as np

from fa2_numba.simulator.engine import Index
from fa2_numba.simulator.run import ConfiguredSimulation
from fa2_numba.simulator.stepper import html, text
from fa2_numba.simulator.stepper.rows import Row, gathered_row, row_gatherer
from fa2_numba.simulator.stepper.session import Event, Session
from fa2_numba.simulator.stepper.state import Frame, Group, SourceLine, shared_arrays
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
    were. Each step may take `max_seconds`. Blocks run one after the other; a step goes on to the
    next by itself. After the end `done` is True and steps raise RuntimeError.

    Looking shows the block that runs now. `print` and a notebook show all of it; see also `close`.
    Arrays are shown as masked copies: what nothing wrote is masked, `--` in print.

    shown_row: the row of the query tile that a notebook shows, if the kernel `has_rows`.
    """

    def __init__(self, simulation: ConfiguredSimulation, *arguments: object) -> None:
        if not isinstance(simulation, ConfiguredSimulation):
            raise TypeError(
                "a Stepper takes a simulated launch and the kernel's arguments, "
                "Stepper(simulate(kernel)[grid, block], *arguments); its first argument was "
                f"a {type(simulation).__name__}"
            )
        self.shown_row = 0
        self._session = Session(simulation.prepare(*arguments))
        self._free = weakref.finalize(self, self._session.close)
        self._free.atexit = False

    # Stepping

    def to_barrier(self) -> Event:
        """Run until all threads of a block have met in a barrier; none has gone on yet."""
        return self._session.to_barrier()

    def to_warp_event(self, warp: int | None = None) -> Event:
        """Run until some warp, or warp number `warp`, has met: in a shuffle, vote or syncwarp.

        Or in an instruction of all its lanes together, like `mma` and `ldmatrix`.
        """
        warps = len(self._session.block.warps)
        if warp is not None and not (_is_integer(warp) and 0 <= warp < warps):
            raise ValueError(f"warp={warp!r}: must be 0 to {warps - 1}, or None for any warp")
        return self._session.to_warp_event(warp)

    def to_line(self, target: Target, thread: ThreadName | None = None) -> Event:
        """Run until some thread, or the given one, is about to execute a statement.

        `target` is a line of the kernel's own file; or a piece of source text, which means every
        statement of the kernel and its device functions that has it; or ("tiles.py", 88), for a
        file by the end of its path. A thread that stands there already goes on to its next time.
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

    @property
    def has_rows(self) -> bool:
        """Whether `row` knows how this kernel's threads share the rows of a query tile."""
        return row_gatherer(self._session.block.function) is not None

    def frames(self, thread: ThreadName) -> list[Frame]:
        """A thread's frames: device functions from the innermost on, last the kernel's own."""
        return self._session.view.frames(self._number(thread))

    def locals(self, thread: ThreadName) -> dict[str, object]:
        """Name -> value in the kernel's own frame; arrays are masked copies."""
        frames = self.frames(thread)
        if not frames:
            closed = self.event.kind == "closed"
            why = "is no more: the stepper was closed" if closed else "has left the kernel"
            raise ValueError(f"thread {thread} of block {self.block} {why}")
        return frames[-1].variables

    def shared(self) -> dict[str, np.ma.MaskedArray]:
        """Name -> copy of each shared array; elements that nothing wrote are masked.

        A NaN that is not masked was written. With checks=False nobody knows: nothing is masked.
        """
        return shared_arrays(self._session.block)

    def waiting(self) -> list[Group]:
        """For each warp, which of its threads do what, or wait for what, and where."""
        return self._session.view.waiting()

    def source(self, context: int = 4) -> list[SourceLine]:
        """The lines where threads stand and `context` lines around them, each with its threads."""
        return self._session.view.source(context)

    def row(self, row: int) -> Row:
        """m, l and O of a row of the block's query tile, gathered from the threads that hold it.

        Only for kernels that use the names of the ladder's (`has_rows`), and where threads hold all
        of it; else ValueError (a `RowError`) says what is missing.
        """
        return gathered_row(self._session.view, row)

    def __repr__(self) -> str:
        return f"<Stepper of {self.kernel}, block {self.block}: {self.event}>"

    def __str__(self) -> str:
        return text.render(self)

    def _repr_html_(self) -> str:
        return html.render(self)

    def _number(self, thread: ThreadName) -> int:
        dim = self._session.launch.dim
        if isinstance(thread, tuple) and 1 <= len(thread) <= 3:
            index = (*thread, 0, 0)[:3]
            pairs = zip(index, dim, strict=True)
            inside = all(_is_integer(i) and 0 <= i < size for i, size in pairs)
            number = index[0] + dim[0] * (index[1] + dim[1] * index[2]) if inside else None
        else:
            number = thread if _is_integer(thread) else None
            inside = number in range(math.prod(dim))
        if not inside:
            raise ValueError(f"thread {thread!r}: a block of this launch has {dim} threads")
        return int(number)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
