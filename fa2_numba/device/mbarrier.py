"""Barriers in shared memory that count arrivals of threads, and bytes that copies bring (sm_90).

An mbarrier goes through phases, numbered 0, 1, 0, 1, ... by their parity. A phase is complete once
as many threads have arrived as the barrier was made for, and all bytes have come that somebody said
to expect; then the next one begins. Who waits for a phase names its parity, and goes on when that
phase is complete. (PTX ISA 8.x, "Parallel Synchronization and Communication Instructions:
mbarrier".)
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda.types import int32

from fa2_numba.device.instruction import Barrier, instruction

MBARRIER_BYTES = 8
"""Of one barrier, and what its address is a multiple of."""


@dataclass
class Phases:
    """The state of an mbarrier: what the phase that is under way waits for, and its parity.

    A fresh barrier has phase 0 under way, and phase 1 before that counts as complete:

    >>> barrier = Phases(2)
    >>> barrier.is_complete(0), barrier.is_complete(1)
    (False, True)
    >>> barrier.arrive(expected=16); barrier.arrive(); barrier.is_complete(0)
    False
    >>> barrier.bring(16); barrier.is_complete(0)
    True
    """

    count: int
    parity: int = 0

    def __post_init__(self) -> None:
        self.missing = self.count
        self.missing_bytes = 0

    def arrive(self, expected: int = 0) -> None:
        """A thread arrives, and says how many more bytes are to come in this phase."""
        if not self.missing:
            raise ValueError(f"more than {self.count} arrivals in one phase")
        self.missing -= 1
        self.bring(-expected)

    def bring(self, size: int) -> None:
        """So many bytes have come; the last of them, or the last arrival, completes the phase."""
        self.missing_bytes -= size
        if not self.missing and not self.missing_bytes:
            self.missing = self.count
            self.parity ^= 1

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of this parity, of the last two, is complete."""
        return parity != self.parity


@instruction(
    "mbarrier.init.shared::cta.b64 [{barrier}], {count};",
    memory=True,
    barrier=Barrier(),
    count=int32,
)
def mbarrier_init(barrier, count):
    """Make a barrier, for so many arrivals in each phase."""
    return Phases(count)


@instruction("fence.mbarrier_init.release.cluster;", memory=True)
def fence_mbarrier_init():
    """Barriers made before it are there for copies that are started after it."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", memory=True, barrier=Barrier())
def mbarrier_arrive(barrier):
    """Arrive: what this thread has read and written before is done for all who then go on."""
    barrier.arrive()


@instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size};",
    memory=True,
    barrier=Barrier(),
    size=int32,
)
def mbarrier_arrive_expect_tx(barrier, size):
    """Arrive, and let the phase wait for so many more bytes of copies."""
    barrier.arrive(size)


@instruction(
    "{{ .reg .pred done;\nagain: "
    "mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};\n@!done bra again; }}",
    memory=True,
    barrier=Barrier(),
    parity=int32,
)
def mbarrier_wait(barrier, parity):
    """Wait until the phase of this parity is complete."""
    return barrier.is_complete(parity)
