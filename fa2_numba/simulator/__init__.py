"""A CUDA machine in Python: runs `@cuda.jit` kernels thread by thread, refuses their mistakes."""

from fa2_numba.simulator.errors import (
    AsyncCopyError,
    BarrierError,
    FenceError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    RunTooLongError,
    SharedMemoryError,
    SimulationError,
    ThreadError,
    UninitialisedReadError,
    WarpError,
)
from fa2_numba.simulator.report import (
    BlockCounts,
    Comparison,
    Counts,
    LineTraffic,
    Report,
    Traffic,
)
from fa2_numba.simulator.run import Simulator, simulate

__all__ = [
    "AsyncCopyError",
    "BarrierError",
    "BlockCounts",
    "Comparison",
    "Counts",
    "FenceError",
    "LaunchError",
    "LineTraffic",
    "MisalignedError",
    "OutOfBoundsError",
    "RaceError",
    "Report",
    "RunTooLongError",
    "SharedMemoryError",
    "SimulationError",
    "Simulator",
    "ThreadError",
    "Traffic",
    "UninitialisedReadError",
    "WarpError",
    "simulate",
]
