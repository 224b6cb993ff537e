"""A microscope for simulated launches: run them piece by piece and look at every thread."""

from fa2_numba.simulator.stepper.rows import Row, RowError
from fa2_numba.simulator.stepper.session import Event
from fa2_numba.simulator.stepper.state import Frame, Group, SourceLine
from fa2_numba.simulator.stepper.stepper import Stepper

__all__ = ["Event", "Frame", "Group", "Row", "RowError", "SourceLine", "Stepper"]
