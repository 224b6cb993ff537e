"""Copies by TMA in a simulated block: issued by one thread, landed by nobody in particular.

A load is under way from its issue on. It lands at once, or only when no thread can go on, the
youngest first: in whatever order hardware does it, a right kernel waits. A store reads shared
memory until its thread has waited, and writes at once, or only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from fa2_numba.device.wgmma import EIGHT_ROWS_BYTES, LINE_BYTES, LINE_ELEMENTS, swizzled
from fa2_numba.simulator.addresses import Access
from fa2_numba.simulator.errors import AsyncCopyError, MisalignedError, ThreadError
from fa2_numba.simulator.mbarriers import Mbarriers
from fa2_numba.simulator.moments import publish
from fa2_numba.simulator.proxies import Use, region_of
from fa2_numba.simulator.regions import CHUNK_BYTES, Copy
from fa2_numba.simulator.source import Place
from fa2_numba.tensor_maps import TensorMap, refusal

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block, Thread


@dataclass
class Store:
    """A store that has not been waited for: its read of shared memory, and what writes."""

    use: Use | None
    write: Callable[[], None]


class BulkCopies:
    """Those of one block."""

    def __init__(self, block: Block, barriers: Mbarriers) -> None:
        self._block = block
        self._barriers = barriers
        self._loads: list[Callable[[], None]] = []
        self._open: dict[Thread, list[Store]] = {}
        self._groups: dict[Thread, list[Store]] = {}

    def load_box(
        self,
        destination: int,
        tensor_map: TensorMap,
        coordinates: tuple[int, ...],
        barrier: int,
        place: Place,
    ) -> None:
        """`tma_load_4d`."""
        lines, inside = self._box(tensor_map, coordinates, "tma_load_4d")
        box = np.zeros((lines, LINE_ELEMENTS), np.uint16)  # zeros outside the tensor
        box[: inside.shape[0], : inside.shape[1]] = inside
        size = lines * LINE_BYTES
        self._refuse_unaligned(destination)
        data = np.empty(size, np.uint8)
        data[swizzled(np.arange(size))] = box.reshape(-1).view(np.uint8)
        self._load(destination, data, inside.size * inside.itemsize, barrier, place)

    def load_bytes(
        self, destination: int, source: int, size: int, barrier: int, place: Place
    ) -> None:
        """`bulk_load`."""
        for name, value in (("destination", destination), ("source", source), ("size", size)):
            if value % CHUNK_BYTES:
                what = f"bulk_load: {name} {value} must be a multiple of {CHUNK_BYTES}"
                raise self._block.error_here(MisalignedError, what)
        pieces = [
            Access("global", source + first, CHUNK_BYTES, CHUNK_BYTES, False, False, False, place)
            for first in range(0, size, CHUNK_BYTES)
        ]
        data = np.concatenate([piece.load() for piece in pieces])
        self._load(destination, data, size, barrier, place)

    def _load(
        self, destination: int, data: np.ndarray, read: int, address: int, place: Place
    ) -> None:
        """Start a load of data, of which so many bytes come from global memory."""
        thread, block = getcurrent(), self._block
        barrier = self._barriers.at(address, by_copy=True)
        region = region_of(block, destination, destination + data.size, "copy")
        first = destination - region.start
        stamp = thread, thread.clock, *place
        copy = Copy(region, first, data, stamp, lambda: f"address {destination} of {region}")
        checks = block.memory.kinds.checks
        if checks:
            region.start_copy(copy)
        thread.copied.add(thread.clock)
        moments = publish(thread)
        if block.observer:
            block.observer.bulk_copied(read, data.size, stored=False, place=place)

        def land() -> None:
            region.bytes[first : first + data.size] = data
            if checks:
                region.land(copy, stamp)
            barrier.bring(moments, data.size)

        if block.early:
            land()
        else:
            self._loads.append(land)

    def store_box(
        self, tensor_map: TensorMap, coordinates: tuple[int, ...], source: int, place: Place
    ) -> None:
        """`tma_store_4d`."""
        thread, block = getcurrent(), self._block
        lines, inside = self._box(tensor_map, coordinates, "tma_store_4d")
        if not inside.flags.writeable:
            raise block.error_here(ThreadError, "tma_store_4d to an array that is read-only")
        self._refuse_unaligned(source)
        size = lines * LINE_BYTES
        region = region_of(block, source, source + size, "store")
        first = source - region.start
        use = None
        if block.memory.kinds.checks:
            stamp = thread, thread.clock, *place
            # Lines outside the tensor are not written, and need not have been.
            read = inside.shape[0] * LINE_BYTES
            use = Use(region, range(first, first + read, CHUNK_BYTES), [thread], stamp, "a store")
        if block.observer:
            written = inside.size * inside.itemsize
            block.observer.bulk_copied(written, written, stored=True, place=place)

        def write() -> None:
            data = region.bytes[first : first + size][swizzled(np.arange(size))]
            box = data.view(np.uint16).reshape(lines, LINE_ELEMENTS)
            inside[:] = box[: inside.shape[0], : inside.shape[1]]

        if block.early:
            write()
        late = (lambda: None) if block.early else write
        self._open.setdefault(thread, []).append(Store(use, late))

    def commit(self) -> None:
        """`bulk_commit_group`."""
        thread = getcurrent()
        self._groups.setdefault(thread, []).extend(self._open.pop(thread, []))

    def wait_read(self) -> None:
        """`bulk_wait_group_read_0`."""
        for store in self._groups.pop(getcurrent(), []):
            store.write()
            if store.use:
                store.use.end()

    def land(self) -> bool:
        """The youngest load arrives; False if none is under way."""
        if not self._loads:
            return False
        self._loads.pop()()
        return True

    def finish(self) -> None:
        """At the end of the block no store may still have to read shared memory."""
        unread = [
            thread for group in (self._open, self._groups) for thread in group if group[thread]
        ]
        if unread:
            what = f"{unread[0]} has left the kernel before its store had read shared memory"
            raise self._block.error(AsyncCopyError, what, [], [], unread[0])

    def _box(
        self, tensor_map: TensorMap, coordinates: tuple[int, ...], what: str
    ) -> tuple[int, np.ndarray]:
        """Lines of a box, and the part of it that lies inside the tensor."""
        if not isinstance(tensor_map, TensorMap):
            raise TypeError(f"{what} takes a TensorMap, got {type(tensor_map).__name__}")
        if (why := refusal(tensor_map.array)) is not None:
            raise self._block.error_here(MisalignedError, f"{what} of an array with {why}")
        column, row, head, batch = coordinates
        values = tensor_map.array.view(np.uint16)
        whole = 0 <= batch < values.shape[0] and 0 <= head < values.shape[2]
        if not whole or row < 0 or column < 0:
            return tensor_map.rows, values[:0, :, 0, 0]
        lines = slice(row, row + tensor_map.rows)
        return tensor_map.rows, values[batch, lines, head, column : column + LINE_ELEMENTS]

    def _refuse_unaligned(self, address: int) -> None:
        if address % EIGHT_ROWS_BYTES:
            what = f"box at shared address {address}: must be a multiple of {EIGHT_ROWS_BYTES}"
            raise self._block.error_here(MisalignedError, what)
