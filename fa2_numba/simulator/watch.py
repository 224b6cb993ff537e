"""A clock beside the simulation: a launch that takes too long is ended, wherever it is."""

from __future__ import annotations

import ctypes
import math
import threading
import time

from fa2_numba.simulator.engine import raised_at
from fa2_numba.simulator.errors import RunTooLongError
from fa2_numba.simulator.source import describe_line, line_number

FIRST_ESTIMATE_SECONDS = 2.0
INTERRUPT_AGAIN_SECONDS = 0.5


class TimeUp(BaseException):
    """Raised in the simulating thread, wherever it is, when the limit has passed."""


class Watch:
    """Ends a launch whose time, or estimated time, is over the limit.

    A kernel may loop for ever without a point where the simulator is asked anything, so a thread of
    its own watches the clock and interrupts the simulation from outside.
    """

    def __init__(self, kernel: str, blocks: int, max_seconds: float | None) -> None:
        self.kernel = kernel
        self.blocks = blocks
        self.limit = math.inf if max_seconds is None else float(max_seconds)
        self.start = time.perf_counter()
        self.done = 0
        self._interrupted = False
        self._ended = threading.Event()
        self._simulating = ctypes.c_ulong(threading.get_ident())
        self._watcher = threading.Thread(target=self._interrupt, daemon=True)

    def __enter__(self) -> None:
        if self.limit < threading.TIMEOUT_MAX:
            self._watcher.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._interrupted:
            self._swallow()

    def _interrupt(self) -> None:
        pause = self.limit
        # Again, for Python drops an exception that comes while an object is being finalised.
        while not self._ended.wait(pause):
            self._interrupted = True
            self._send()
            pause = INTERRUPT_AGAIN_SECONDS

    def _send(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._simulating, ctypes.py_object(TimeUp))

    def _swallow(self) -> None:
        """An interruption that has not arrived yet shall not come later.

        One more takes its place and is caught: Python 3.11 would look for ever for one that is only
        taken back, and under a debugger hang at the next call.
        """
        try:
            self._send()
            while True:
                pass
        except TimeUp:
            pass

    def time_up(self, interruption: TimeUp) -> None:
        """Say where the launch was. It may have been in `__exit__`, so that is done again."""
        self.__exit__()
        place = raised_at(interruption)
        self._refuse(
            f"has run {self.limit:g} s with {self.done} of {self.blocks} blocks done"
            + (f" and was at {describe_line(*place)}" if place else ""),
            (line_number(*place),) if place else (),
        )

    def finished_block(self) -> None:
        """After a block: will the rest end in time?"""
        self.done += 1
        elapsed = time.perf_counter() - self.start
        estimate = elapsed / self.done * self.blocks
        if elapsed > min(FIRST_ESTIMATE_SECONDS, self.limit / 2) and estimate > self.limit:
            self._refuse(f"would take about {estimate:.0f} s for its {self.blocks} blocks")

    def _refuse(self, why: str, lines: tuple[int, ...] = ()) -> None:
        error = RunTooLongError(
            f"kernel {self.kernel} {why}; the limit is max_seconds={self.limit:g}. Use a smaller "
            "problem, checks=False, or max_seconds=None to run it all the same"
        )
        error.kernel, error.lines = self.kernel, lines
        raise error
