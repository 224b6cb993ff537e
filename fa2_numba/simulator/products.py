"""`wgmma` in a simulated block: products that are issued, run at some time, and awaited.

From its issue to the wait for its group, a product's operands in shared memory and registers may
not be written, and its accumulators neither read nor written. It runs when it is issued, or only
when it is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from greenlet import getcurrent

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.instruction import Descriptor, Instruction
from fa2_numba.device.warpgroups import WARPGROUP_SIZE
from fa2_numba.device.wgmma import WGMMA_K, element_address
from fa2_numba.simulator.errors import AsyncCopyError, FenceError, UninitialisedReadError, WarpError
from fa2_numba.simulator.memory import (
    BEING_READ,
    BEING_WRITTEN,
    UNFENCED,
    UNWRITTEN,
    WRITTEN,
)
from fa2_numba.simulator.proxies import Use, region_of
from fa2_numba.simulator.regions import CHUNK_BYTES, SharedRegion
from fa2_numba.simulator.source import Place

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block, Thread
    from fa2_numba.simulator.instructions import RegisterBlock

ADDRESS_BITS = 0x3FFF


@dataclass
class Product:
    """One `wgmma` that has been issued."""

    run: Callable[[], None]
    uses: list[Use]
    written: list[RegisterBlock]
    read: list[RegisterBlock]


class Products:
    """Those of one warpgroup: the open group, and the closed ones, oldest first."""

    def __init__(self, block: Block, threads: list[Thread]) -> None:
        self._block = block
        self._threads = threads
        self._open: list[Product] = []
        self._groups: deque[list[Product]] = deque()

    def issue(self, what: Instruction, operands: list[tuple], place: Place) -> None:
        """All threads have come with their operands: accumulators, A (registers or not), and B."""
        D, A, B = zip(*operands, strict=True)
        a_kind, b_kind = what.operands["A"], what.operands["B"]
        product = Product(lambda: None, [], list(D), [])
        if not isinstance(a_kind, Descriptor):
            product.read = list(A)
        self._mark(what, product)
        stamp_of = self._threads[0], self._threads[0].clock, *place
        a_matrix = self._operand(a_kind, A, product, stamp_of, f"{what.name}, operand A")
        b_matrix = self._operand(b_kind, B, product, stamp_of, f"{what.name}, operand B")
        reads = what.operands["D"].read

        def run() -> None:
            old = np.array([block.raw() for block in D]) if reads else None
            results = what.meaning(old, a_matrix(), b_matrix())
            for block, values in zip(D, results, strict=True):
                block.set_raw(values)

        if self._block.early:
            run()
        else:
            product.run = run
        self._open.append(product)

    def commit(self) -> None:
        """`wgmma_commit_group`."""
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """All groups but the youngest `pending` are done."""
        while len(self._groups) > pending:
            for product in self._groups.popleft():
                product.run()
                for use in product.uses:
                    use.end()
                for block in (*product.written, *product.read):
                    block.set_state(WRITTEN)
        # What younger ones still use is not free.
        for product in [one for group in (*self._groups, self._open) for one in group]:
            self._set_states(product)

    def finish(self) -> None:
        """At the end of the block nothing may be under way."""
        if self._open or self._groups:
            thread = self._threads[0]
            what = f"warpgroup of {thread} has left the kernel with products not waited for"
            raise self._block.error(AsyncCopyError, what, [], [], thread)

    def _mark(self, what: Instruction, product: Product) -> None:
        """Check the registers of a product and note that it uses them."""
        for block in product.written:
            self._check(block, what, what.operands["D"].read, own={BEING_WRITTEN})
        for block in product.read:
            self._check(block, what, True, own={BEING_READ})
        self._set_states(product)

    @staticmethod
    def _set_states(product: Product) -> None:
        for block in product.written:
            block.set_state(BEING_WRITTEN)
        for block in product.read:
            block.set_state(BEING_READ)

    def _check(self, block: RegisterBlock, what: Instruction, needed: bool, own: set[int]) -> None:
        states = block.states()
        if states is None:
            return
        found = set(states.tolist()) - own
        refusals = [
            (UNFENCED, FenceError, "were written since the last wgmma_fence"),
            (BEING_READ, AsyncCopyError, "a product that is not waited for reads"),
            (BEING_WRITTEN, AsyncCopyError, "a product that is not waited for writes"),
        ]
        if needed:
            refusals.append((UNWRITTEN, UninitialisedReadError, "nothing wrote"))
        for state, kind, why in refusals:
            if state in found:
                self._refuse(kind, f"{what.name} with registers of {block.array.name} that {why}")

    def _operand(
        self, kind: object, given: tuple, product: Product, stamp: tuple, what: str
    ) -> Callable[[], np.ndarray]:
        """What gives an operand when the product runs."""
        if not isinstance(kind, Descriptor):
            return lambda: np.array([block.raw() for block in given])
        if len(set(given)) > 1:
            self._refuse(WarpError, f"{what} has descriptors that differ within the warpgroup")
        addresses = _element_addresses(given[0], kind)
        region = region_of(self._block, addresses.min(), addresses.max() + 2, what)
        offsets = addresses - region.start
        if self._block.memory.kinds.checks:
            product.uses += self._uses(region, offsets, kind, stamp, what)
        if self._block.observer:
            self._block.observer.operand_read(offsets.size * 2, stamp[2:])
        element = np.dtype(kind.dtype if kind.dtype == "float16" else ml_dtypes.bfloat16)

        def load() -> np.ndarray:
            halves = region.bytes[offsets[..., None] + np.arange(2)]
            return halves.view(element)[..., 0].astype(np.float64)

        return load

    def _uses(
        self, region: SharedRegion, offsets: np.ndarray, kind: Descriptor, stamp: tuple, what: str
    ) -> list[Use]:
        """Its reads of shared memory: each warp reads its own 16 rows of A, and all of B."""
        parts = [(self._threads, offsets)]
        if what.endswith("operand A"):
            warps = range(0, WARPGROUP_SIZE, WARP_SIZE)
            rows = np.split(offsets, len(warps))
            parts = [
                (self._threads[w : w + WARP_SIZE], r) for w, r in zip(warps, rows, strict=True)
            ]
        return [
            Use(region, np.unique(part // CHUNK_BYTES * CHUNK_BYTES).tolist(), readers, stamp, what)
            for readers, part in parts
        ]

    def _refuse(self, kind: type, what: str) -> None:
        raise getcurrent().block.error_here(kind, what)


def _element_addresses(word: int, kind: Descriptor) -> np.ndarray:
    """Where the elements (row, k) of an operand lie, by its descriptor."""
    start, leading = (word & ADDRESS_BITS) << 4, (word >> 16 & ADDRESS_BITS) << 4
    row, k = np.meshgrid(range(kind.rows), range(WGMMA_K), indexing="ij")
    return element_address(start, leading, row, k, kind.transposed)
