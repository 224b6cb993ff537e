"""Stops simulated threads before statements, with the tracing that Python's debuggers use.

`sys.settrace` acts on what runs at that moment, and a greenlet that is not running keeps the
setting it was left with. So greenlet's own trace function, which is called in the greenlet that has
just been switched to, turns tracing on in the threads of interest and off in the others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import greenlet

from fa2_numba.simulator.engine import Thread
from fa2_numba.simulator.source import MARKER
from fa2_numba.simulator.stepper.statements import Statement, Statements

Reached = Callable[[Thread, Statement], None]


class Tracing:
    """While entered: `reached(thread, statement)` is called before `threads` execute a statement.

    files: the files whose statements matter.
    """

    def __init__(
        self, statements: Statements, threads: list[Thread], files: set[str], reached: Reached
    ) -> None:
        self.statements = statements
        self.threads = set(threads)
        self.files = files
        self.reached = reached
        self.active = False
        self._visited: set[Thread] = set()

    def __enter__(self) -> None:
        # Threads of another stepper that are freed inside a trace function would end all tracing.
        self._collector_runs = gc.isenabled()
        gc.disable()
        self._host = sys.gettrace()
        self._host_switched = greenlet.settrace(self._switched)
        self.active = True
        for thread in self.threads:
            for frame in kernel_frames(thread):
                frame.f_trace = self._frame_trace(frame)

    def __exit__(self, *_: object) -> None:
        self.active = False
        greenlet.settrace(self._host_switched)
        sys.settrace(self._host)
        if self._collector_runs:
            gc.enable()

    def _switched(self, _: str, greenlets: tuple[greenlet.greenlet, greenlet.greenlet]) -> None:
        target = greenlets[1]
        if target in self.threads:
            if target not in self._visited:
                # Python 3.12 prepares running code for tracing only when tracing was off before.
                self._visited.add(target)
                sys.settrace(None)
            sys.settrace(self._called)
        elif isinstance(target, Thread):
            sys.settrace(self._host)

    def _called(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        if self.active and is_kernel_function(frame) and frame.f_code.co_filename in self.files:
            return _FrameTrace(self, None)
        return None

    def _frame_trace(self, frame: FrameType) -> _FrameTrace | None:
        code = frame.f_code
        if code.co_filename not in self.files or not is_kernel_function(frame):
            return None
        return _FrameTrace(self, self.statements.at(code.co_filename, frame.f_lineno))


class _FrameTrace:
    """Traces one frame: tells when its thread comes to another statement than it is in."""

    def __init__(self, tracing: Tracing, statement: Statement | None) -> None:
        self.tracing = tracing
        self.statement = statement

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        if event == "line" and self.tracing.active:
            statement = self.tracing.statements.at(frame.f_code.co_filename, frame.f_lineno)
            if statement != self.statement:
                self.statement = statement
                self.tracing.reached(greenlet.getcurrent(), statement)
        # `reached` may have paused the thread, and a later step have put its own trace here.
        return frame.f_trace


def hand_over(thread: Thread) -> None:
    """Pause the running thread inside a trace function, where Python has tracing switched off."""
    sys.call_tracing(thread.parent.switch, ())


def is_before_statement(thread: Thread) -> bool:
    """Whether a paused thread has not begun a statement: it was handed over, or never started."""
    return not thread or thread.gr_frame.f_code is hand_over.__code__


def kernel_frames(thread: Thread) -> Iterator[FrameType]:
    """The frames of a paused thread that belong to its kernel and device functions, from inside."""
    frame = thread.gr_frame
    while frame is not None:
        if MARKER in frame.f_globals:
            yield frame
        frame = frame.f_back


def is_kernel_function(frame: FrameType) -> bool:
    """Whether a frame is a kernel's or a device function's, and not a comprehension in one."""
    return MARKER in frame.f_globals and not frame.f_code.co_name.startswith("<")
