"""What the simulator refuses. Every error names the kernel, block, warp, thread and source line."""


class SimulationError(Exception):
    """A kernel did something that CUDA leaves undefined, or that hardware punishes."""


class OutOfBoundsError(SimulationError, IndexError):
    """An index outside its array."""


class UninitialisedReadError(SimulationError):
    """A read of shared or local memory that nothing wrote."""


class RaceError(SimulationError):
    """Two threads touched one shared address, one of them writing, with no barrier between."""


class BarrierError(SimulationError):
    """A barrier that some threads of the block never reach, or reach from another place."""


class WarpError(SimulationError):
    """A warp-wide operation whose lanes do not all take part."""


class SharedMemoryError(SimulationError):
    """More shared memory than a block of this architecture can have, or a misfit view of it."""


class LaunchError(SimulationError, ValueError):
    """A grid, block or argument that no launch can have."""


class ThreadError(SimulationError):
    """An exception raised by the kernel's own code in one thread (the cause is chained)."""


class RunTooLongError(SimulationError):
    """The run would take longer than the limit; the message gives the estimate."""
