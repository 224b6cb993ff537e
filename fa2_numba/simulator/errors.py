"""What the simulator refuses.

A message says what is wrong, then who did it and where, each with its source line. The same facts
are attributes of the error, so far as it is about them: a launch that cannot be has no block, and a
run that takes too long is no one thread's mistake.
"""


class SimulationError(Exception):
    """A kernel did something that CUDA leaves undefined, or that hardware punishes.

    kernel: the name of the kernel.
    block: the block's index in the grid, (x, y, z).
    thread, warp, lane: the thread's index in its block, (x, y, z), the number of its warp, and its
        lane there. Of two threads that collide it is the later one; where threads wait in vain, the
        first that never comes.
    lines: the numbers of the source lines that the message names, each once.

    None, or no lines, stands for what the error is not about.
    """

    kernel: str | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    lines: tuple[int, ...] = ()


class OutOfBoundsError(SimulationError, IndexError):
    """An index outside its array, or an address outside all memory of its kind."""


class UninitialisedReadError(SimulationError):
    """A read of shared or local memory that nothing wrote."""


class RaceError(SimulationError):
    """Two threads touched one shared address, one of them writing, with no barrier between."""


class MisalignedError(SimulationError):
    """An address that is no multiple of the number of bytes accessed there."""


class AsyncCopyError(SimulationError):
    """An access to what an asynchronous operation, not waited for, is still to fill or to read."""


class FenceError(SimulationError):
    """An asynchronous operation meets what was written without the fence that lets it see that."""


class BarrierError(SimulationError):
    """A barrier that some threads of the block never reach, or reach from another place."""


class WarpError(SimulationError):
    """A warp-wide operation whose lanes do not all take part."""


class SharedMemoryError(SimulationError):
    """More shared memory than a block of this architecture can have."""


class LaunchError(SimulationError, ValueError):
    """A kernel, grid, block or argument that no launch can have; names the kernel if it is one."""


class ThreadError(SimulationError):
    """An exception raised by the kernel's own code in one thread (the cause is chained)."""


class RunTooLongError(SimulationError):
    """The run takes, or would take, longer than the limit; names the kernel, and where it was."""
