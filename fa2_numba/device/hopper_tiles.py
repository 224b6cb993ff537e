"""Which tile comes next, and how producer and consumers of a block agree on it.

The grid has no more blocks than multiprocessors, and a block that is done with a tile takes the
next one from a counter that all blocks share (a persistent grid, FA3 section 3.1): none waits while
there is work, however long its tiles were. Tiles are numbered so that some heads run side by side,
and of those with a causal mask the last ones first, which see the most keys.
"""

from functools import cache

from numba import cuda
from numba.cuda import int32, uint32

from fa2_numba.device import device_function
from fa2_numba.device.hopper_pipeline import make_ring
from fa2_numba.device.mbarrier import mbarrier_arrive
from fa2_numba.device.ptx import atom_inc_global, global_address, ld_shared_v2_b32, st_shared_b32
from fa2_numba.hopper_config import HopperConfig

NO_TILE = 2**32 - 1
"""In the place of a tile: there are no more."""
CAUSAL_GROUP = 16
"""Heads side by side with a causal mask: enough for long tiles first, and few enough for their K
and V to stay in the L2 cache."""


@cache
def make_split_tile(causal: bool):
    """`split_tile(tile, m_blocks, all_heads)`: query tile and head (of all batch elements)."""
    GROUP = CAUSAL_GROUP if causal else 1

    @device_function
    def split_tile(tile, m_blocks, all_heads):
        # Unsigned numbers of 32 bits, which a GPU divides several times faster than those of 64.
        group = uint32(tile // uint32(m_blocks * GROUP))
        in_group = uint32(tile - uint32(group * uint32(m_blocks * GROUP)))
        heads = uint32(min(uint32(GROUP), uint32(all_heads - uint32(group * GROUP))))
        m_block = uint32(in_group // heads)
        head = uint32(uint32(group * GROUP) + uint32(in_group - uint32(m_block * heads)))
        if causal:
            m_block = uint32(m_blocks - 1 - m_block)
        return m_block, head

    return split_tile


@cache
def make_count_n_blocks(rows: int, block_n: int, causal: bool):
    """`count_n_blocks(first_row, seqlen_q, seqlen_k)`: tiles of keys that so many rows visit.

    At least one: rows that see no key have an output, too. All in 32 bits.
    """

    @device_function
    def count_n_blocks(first_row, seqlen_q, seqlen_k):
        keys = seqlen_k
        if causal:
            last_row = int32(min(int32(first_row + rows), seqlen_q) - 1)
            keys = min(seqlen_k, int32(last_row + 1 + seqlen_k - seqlen_q))
        keys = uint32(max(keys, int32(1)))
        return int32(uint32(keys + uint32(block_n - 1)) // uint32(block_n))

    return count_n_blocks


@cache
def make_next_tile(persistent: bool):
    """`next_tile(tile_counter, tiles)`: this block's next tile; past the end there is none."""

    @device_function
    def next_tile(tile_counter, tiles):
        if persistent:
            # One block after the other draws a number once; the last one sets it back to 0.
            drawn = atom_inc_global(global_address(tile_counter), uint32(tiles - 1))
            return uint32(uint32(cuda.gridDim.x) + drawn)
        return uint32(tiles)

    return next_tile


@device_function
def split_head(head, heads):
    """Batch element, and head in it, of a head of all batch elements."""
    batch = uint32(uint32(head) // uint32(heads))
    return int32(batch), int32(head - uint32(batch * uint32(heads)))


@cache
def make_messages(config: HopperConfig):
    """`init(smem)`, `tell(smem, at, m_block, head)`, `hear(smem, at)`: of the tile, in a ring.

    The producer decodes a tile once for all. `tell` returns its next cursor, `hear` the query tile,
    its head and the next cursor.
    """
    *_, ring = config.rings
    messages = make_ring(ring)
    place, full, await_full = messages.tile, messages.full, messages.await_full
    await_empty, release, advance = messages.await_empty, messages.release, messages.advance

    @device_function
    def tell(smem, at, m_block, head):
        await_empty(smem, at)
        st_shared_b32(place(smem, at), m_block)
        st_shared_b32(int32(place(smem, at) + 4), head)
        mbarrier_arrive(full(smem, at))
        return advance(at)

    @device_function
    def hear(smem, at):
        message = cuda.local.array((1, 2), uint32)
        await_full(smem, at)
        ld_shared_v2_b32(message, 0, 0, place(smem, at))
        # All lanes have read the message before one says so for the warp.
        cuda.syncwarp()
        release(smem, at)
        return message[0, 0], message[0, 1], advance(at)

    return messages.init, tell, hear
