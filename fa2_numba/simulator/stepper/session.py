"""Runs a launch from one pause to the next. Knows nothing of who looks at it.

Paused threads refer to the session, so whoever uses it must not be referred to by it: only then is
the user freed when nobody needs it any more, and can free the threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import greenlet
import numpy as np
from greenlet import getcurrent

from fa2_numba.simulator.engine import Block, Index, Observer, Thread, Warp
from fa2_numba.simulator.errors import SimulationError, ThreadError
from fa2_numba.simulator.run import Launch
from fa2_numba.simulator.source import describe_line, describe_source_line, kernel_place
from fa2_numba.simulator.stepper.state import Frame, View, frames_of_error
from fa2_numba.simulator.stepper.statements import Statement, Statements
from fa2_numba.simulator.stepper.tracing import Tracing, hand_over
from fa2_numba.simulator.watch import TimeUp, Watch


@dataclass(frozen=True)
class Event:
    """What ended a step.

    kind: "start", "barrier", "warp", "line" (a thread, or every thread, stands before a statement),
        "left" (a thread has left the kernel), "finished" (the launch has), "error" or "closed".
    block: its index in the grid. warp: the number of the warp that met. thread: the index in its
        block of the thread that stopped, that came last to where all have met, or that failed.
    operation: what they met in; the message of an error. line: `file.py:12: source text`.
    """

    kind: str
    block: Index | None = None
    warp: int | None = None
    thread: Index | None = None
    operation: str = ""
    line: str = ""

    def __repr__(self) -> str:
        who = f"thread {self.thread}" if self.thread else "every thread that could get there"
        what = {
            "start": f"block {self.block} is about to start",
            "barrier": f"all threads of block {self.block} have met in {self.operation}",
            "warp": f"warp {self.warp} of block {self.block} has met in {self.operation}",
            "line": f"{who}, of block {self.block}, stands before a statement",
            "left": f"thread {self.thread} of block {self.block} has left the kernel",
            "finished": "the launch has finished",
            "closed": "the stepper was closed before the end",
            "error": f"the launch has failed: {self.operation}",
        }
        text = what[self.kind]
        return text + (f" at {self.line}" if self.line and self.line not in text else "")


class Session(Observer):
    """The state of a launch that is run step by step."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.statements = Statements(launch.function)
        self.done = False
        self._owner = threading.get_ident()
        self._blocks = launch.blocks(self)
        self._held: list[Thread] = []
        self._failed: dict[int, list[Frame]] = {}
        self._finished_blocks = 0
        self.event: Event | None = None
        self._forget_goal()
        self._next_block()
        self.event = Event("start", self.block.index)

    @property
    def view(self) -> View:
        """What can be seen of the block that runs now, or ran last."""
        return View(self.statements, self.block, self._failed)

    def to_barrier(self) -> Event:
        """Run until all threads of a block have passed a barrier."""
        return self._run(barrier=True)

    def to_warp_event(self, warp: int | None) -> Event:
        """Run until some warp, or the given one, has met."""
        return self._run(warp=lambda number: warp in (None, number))

    def to_statement(self, wanted: set[Statement], threads: list[int] | None) -> Event:
        """Run until one of the threads (None: any) stands before one of the statements."""

        def reached(thread: Thread, statement: Statement) -> None:
            if statement in wanted:
                self._pause_before(thread, statement)

        return self._run(trace=(threads, {file for file, _ in wanted}, reached))

    def all_to_statement(self, wanted: set[Statement]) -> Event:
        """Run until no thread can go on that does not stand before one of the statements."""

        def reached(thread: Thread, statement: Statement) -> None:
            if statement in wanted:
                self._held.append(thread)
                self._line_event = self._standing(None, statement)
                hand_over(thread)

        return self._run(trace=(None, {file for file, _ in wanted}, reached))

    def next_statement(self, number: int) -> Event:
        """Run one thread up to its next statement, and others where it must wait for them."""
        thread = self.block.threads[number]
        if thread.dead:
            raise ValueError(f"thread {thread.index} of block {self.block.index} has left")
        # One that has not started stands before its first statement already.
        to_skip = [] if thread else [None]

        def reached(thread: Thread, statement: Statement) -> None:
            if to_skip:
                to_skip.pop()
            else:
                self._pause_before(thread, statement)

        return self._run(thread, trace=([number], self.statements.files, reached))

    def finish(self) -> Event:
        """Run to the end of the launch."""
        return self._run()

    def barrier_passed(self, block: Block, operation: str) -> None:
        """The last thread to arrive pauses, before any of them goes on."""
        if self._barrier:
            self._pause_after("barrier", operation, None)

    def warp_met(self, warp: Warp, operation: str, threads: list[Thread]) -> None:
        """So does the last lane."""
        if self._warp(warp.number):
            self._pause_after("warp", operation, warp.number)

    def close(self) -> None:
        """Free the threads; a launch that has not ended is given up."""
        if not self.done:
            self.event = Event("closed", self.block.index)
        self.done = True
        if self.block is not None and threading.get_ident() == self._owner:
            host = sys.gettrace()
            self.block.discard()
            if sys.gettrace() is not host:  # a thread that was paused while tracing ended that
                sys.settrace(host)

    def _forget_goal(self) -> None:
        self._barrier = False
        self._warp: Callable[[int], bool] = lambda number: False
        self._line_event: Event | None = None

    def _run(
        self,
        first: Thread | None = None,
        barrier: bool = False,
        warp: Callable[[int], bool] | None = None,
        trace: tuple | None = None,
    ) -> Event:
        """Let threads run, `first` before all others, until there is an event."""
        self._check_usable()
        self._forget_goal()
        self._barrier, self._warp = barrier, warp or self._warp
        self.event = None
        try:
            self._run_in_time(first, trace)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._forget_goal()
        return self.event

    def _run_in_time(self, first: Thread | None, trace: tuple | None) -> None:
        """Every step has the whole of the launch's time; looking takes none of it."""
        blocks = math.prod(self.launch.grid)
        watch = Watch(self.launch.kernel, blocks, self.launch.simulator.max_seconds)
        host = sys.gettrace(), greenlet.gettrace()
        try:
            with watch:
                self._run_traced(first, trace)
        except TimeUp as interruption:
            # It may have come while tracing was being ended.
            sys.settrace(host[0])
            greenlet.settrace(host[1])
            watch.done = self._finished_blocks
            watch.time_up(interruption)

    def _run_traced(self, first: Thread | None, trace: tuple | None) -> None:
        while self.event is None:
            with np.errstate(all="ignore"), self._tracing(trace):
                block = self.block
                while self.event is None and self.block is block:
                    self._advance(first)

    def _tracing(self, trace: tuple | None) -> AbstractContextManager:
        if trace is None:
            return nullcontext()
        numbers, files, reached = trace
        threads = self.block.threads
        chosen = threads if numbers is None else [threads[number] for number in numbers]
        return Tracing(self.statements, chosen, files, reached)

    def _advance(self, first: Thread | None) -> None:
        """One turn of one thread; then, if none can go on, the held ones or the next block."""
        block, ready = self.block, self.block.ready
        if ready:
            thread = first if first is not None and first in ready else ready[0]
            ready.remove(thread)
            thread.parent = getcurrent()
            self._resume(thread)
            if thread is first and thread.dead:
                self.event = Event("left", block.index, thread=thread.index)
        if not ready and self._held:
            ready.extend(self._held)
            self._held.clear()
            self.event = self._line_event
        elif not ready and not block.land():
            block.finish()
            block.discard()
            self._finished_blocks += 1
            self._next_block()

    def _resume(self, thread: Thread) -> None:
        """Run a thread until it waits; if it fails, keep what it held."""
        try:
            self.block.resume(thread)
        except BaseException as error:
            # No variable here may hold the error, which holds this frame.
            self._keep_frames(thread, error)
            raise

    def _keep_frames(self, thread: Thread, error: BaseException) -> None:
        frames = frames_of_error(error.__cause__ if isinstance(error, ThreadError) else error)
        if frames:
            self._failed[thread.number] = frames

    def _next_block(self) -> None:
        block = next(self._blocks, None)
        if block is None:
            self.done = True
            self.event = self.event or Event("finished")
        else:
            self.block = block
            block.start()

    def _check_usable(self) -> None:
        if self.done:
            raise RuntimeError(f"kernel {self.launch.kernel} has no next step: {self.event}")
        if threading.get_ident() != self._owner:
            raise RuntimeError("a stepper belongs to the operating system's thread that made it")

    def _fail(self, error: BaseException) -> None:
        """The launch is over, but what its threads have left behind can still be looked at."""
        self.done = True
        thread = error.thread if isinstance(error, SimulationError) else None
        # What no thread has raised is about threads that wait: its last line says where.
        line = str(error).rpartition("\n")[2].partition(" at ")[2]
        for number, frames in self._failed.items():
            thread = thread or self.block.threads[number].index
            line = describe_source_line(frames[0].file, frames[0].line)
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        self.event = Event("error", self.block.index, thread=thread, operation=what, line=line)

    def _pause_after(self, kind: str, operation: str, warp: int | None) -> None:
        thread = getcurrent()
        line = describe_line(*kernel_place())
        self.event = Event(kind, self.block.index, warp, thread.index, operation, line)
        self.block.ready.appendleft(thread)
        thread.parent.switch()

    def _pause_before(self, thread: Thread, statement: Statement) -> None:
        self.event = self._standing(thread, statement)
        self.block.ready.appendleft(thread)
        hand_over(thread)

    def _standing(self, thread: Thread | None, statement: Statement) -> Event:
        line = describe_source_line(*statement)
        return Event("line", self.block.index, thread=thread and thread.index, line=line)
