"""Order between threads that meet by way of a third: one publishes what it has done, others learn.

`engine.order` is for threads that meet face to face. At an mbarrier one arrives and goes on, and
who waits there later still comes after all that the first one did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Thread

Moments = list[int]
"""A vector clock: how far each thread of the block had come."""


def publish(thread: Thread) -> Moments:
    """All that the thread has done or learned so far; what it does next is not in it."""
    moments = list(thread.seen)
    moments[thread.number] = thread.clock
    thread.clock += 1
    return moments


def join(one: Moments | None, other: Moments) -> Moments:
    """What either has in it."""
    return other if one is None else list(map(max, one, other))


class Published:
    """Moments that many threads learn: those that knew the same know the same afterwards."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._joined: dict[int, tuple[Moments, Moments]] = {}

    def teach(self, thread: Thread) -> None:
        """From now on the thread comes after all that was published."""
        known = thread.seen
        if id(known) not in self._joined:
            # The old list is kept, so that no other takes its id.
            self._joined[id(known)] = known, join(known, self._moments)
        thread.seen = self._joined[id(known)][1]
