"""Shared memory seen the asynchronous way, by TMA and `wgmma`: what may be read, and until when.

Bytes that an asynchronous operation reads are in use from its issue to its wait, and nobody may
write there; what ordinary stores have written is there for it only after a fence by the writer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from greenlet import getcurrent

from fa2_numba.simulator.errors import (
    AsyncCopyError,
    FenceError,
    OutOfBoundsError,
    UninitialisedReadError,
)
from fa2_numba.simulator.regions import (
    CHUNK_BYTES,
    SharedRegion,
    Stamp,
    WarpStamp,
    race,
    unfinished,
)

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block, Thread


def region_of(block: Block, first: int, end: int, what: str) -> SharedRegion:
    """The shared memory that has all bytes from address `first` to `end`."""
    for region in block.memory.regions:
        if region.start <= first and end <= region.end:
            return region
    problem = f"{what} of shared addresses {first} to {end - 1}, outside shared memory"
    raise block.error_here(OutOfBoundsError, problem)


class Use:
    """An asynchronous read of chunks of a region, from its issue on.

    readers: the threads on whose behalf it reads; each must come after the writes. chunks: where
    they begin in the region. what: who reads, in words.
    """

    def __init__(
        self,
        region: SharedRegion,
        chunks: Iterable[int],
        readers: list[Thread],
        stamp: Stamp,
        what: str,
    ) -> None:
        self.region, self.chunks, self.what = region, list(chunks), what
        self.stamp, self.readers = stamp, readers
        views = {id(thread.seen): thread for thread in readers}.values()
        for chunk in self.chunks:
            self._check(chunk, views)
            region.in_use.setdefault(chunk, []).append(self)

    def end(self) -> None:
        """It has read, and its readers have waited: what they do next may be a write there."""
        warps = {id(thread.warp): thread.warp for thread in self.readers}.values()
        if len(self.readers) == 1:
            stamps = [(self.readers[0], self.readers[0].clock, *self.stamp[2:])]
        else:
            stamps = [WarpStamp.of(warp.threads, *self.stamp[2:]) for warp in warps]
        for chunk in self.chunks:
            uses = self.region.in_use[chunk]
            uses.remove(self)
            if not uses:
                del self.region.in_use[chunk]
            self.region.remember_reads(chunk, CHUNK_BYTES, stamps)

    def _check(self, chunk: int, views: Iterable[Thread]) -> None:
        region, block = self.region, getcurrent().block
        copy = region.copy_at(chunk)
        if copy is not None:
            raise unfinished(lambda: self._named(chunk), self.stamp, "reads", copy.stamp)
        for writer in region.writers_of(chunk, CHUNK_BYTES):
            if writer is None:
                what = f"{self.what} reads shared {self._named(chunk)}, which nothing wrote"
                raise block.error_here(UninitialisedReadError, what)
            thread, clock = writer[:2]
            for reader in views:
                if thread is not reader and reader.seen[thread.number] < clock:
                    raise race(lambda: self._named(chunk), self.stamp, "reads", writer, "wrote")
            if clock not in thread.copied and thread.fenced < clock:
                self._refuse_unfenced(chunk, writer)

    def _refuse_unfenced(self, chunk: int, writer: Stamp) -> None:
        what = (
            f"{self.what} reads shared {self._named(chunk)}, whose writer has not run "
            "fence_proxy_async since"
        )
        details = [
            writer[0].stands(writer[2:], "wrote it "),
            self.stamp[0].stands(self.stamp[2:], "reads it "),
        ]
        places = [writer[2:], self.stamp[2:]]
        raise getcurrent().block.error(FenceError, what, details, places)

    def unfinished(self, first: int, size: int, stamp: Stamp, does: str) -> AsyncCopyError:
        """The error about a write of bytes that it has not done with."""
        what = (
            f"access to shared bytes {first} to {first + size - 1} of {self.region} while "
            f"{self.what} reads them: it has not been waited for"
        )
        details = [
            self.stamp[0].stands(self.stamp[2:], "started to read "),
            stamp[0].stands(stamp[2:], f"{does} it "),
        ]
        places = [self.stamp[2:], stamp[2:]]
        return stamp[0].block.error(AsyncCopyError, what, details, places, stamp[0])

    def _named(self, chunk: int) -> str:
        address = self.region.start + chunk
        return f"address {address} (bytes {chunk} to {chunk + CHUNK_BYTES - 1} of {self.region})"
