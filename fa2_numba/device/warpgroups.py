"""What warpgroups of four warps do with each other: barriers, and who has the registers (sm_90).

(PTX ISA 8.x: "bar", "setmaxnreg", "fence.proxy".)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba.cuda.types import int32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.instruction import instruction

WARPGROUP_SIZE = 4 * WARP_SIZE
"""Threads that carry out a `wgmma` together."""


@instruction("bar.sync {number}, {threads};", memory=True, number=int32, threads=int32)
def bar_sync(number, threads):
    """Wait at the block's barrier of this number until so many threads, whole warps, are there."""


@instruction("bar.arrive {number}, {threads};", memory=True, number=int32, threads=int32)
def bar_arrive(number, threads):
    """Be counted at the barrier, and go on without waiting."""


@instruction("fence.proxy.async.shared::cta;", memory=True)
def fence_proxy_async():
    """What this thread has written to shared memory is there for `wgmma` and for TMA, too.

    They see memory by a way of their own, the asynchronous proxy.
    """


@cache
def _setmaxnreg(action: str, count: int) -> Callable:
    def meaning():
        return count

    meaning.__name__ = f"setmaxnreg_{action}_{count}"
    meaning.__doc__ = (
        f"Give registers back: this warpgroup keeps {count} a thread."
        if action == "dec"
        else f"Wait for registers that others give back, until there are {count} a thread."
    )
    text = f"setmaxnreg.{action}.sync.aligned.u32 {count};"
    return instruction(text, memory=True, collective=WARPGROUP_SIZE)(meaning)


def setmaxnreg_dec(count: int) -> Callable:
    """The instruction that leaves a warpgroup `count` registers a thread, a multiple of 8."""
    return _setmaxnreg("dec", count)


def setmaxnreg_inc(count: int) -> Callable:
    """The instruction that gives a warpgroup `count` registers a thread, a multiple of 8."""
    return _setmaxnreg("inc", count)
