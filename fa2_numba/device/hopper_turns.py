"""Consumers take turns (ping-pong): one issues its products while the others compute softmax.

Each consumer has a named barrier, at which it waits for its turn, and where the one before it
arrives when it has issued. So products of one consumer run beside the exponentials of another
instead of beside its products. (FA3 section 3.1.)
"""

from functools import cache

from numba.cuda import int32

from fa2_numba.device import device_function
from fa2_numba.device.hopper_pipeline import make_ring
from fa2_numba.device.hopper_tiles import make_count_n_blocks
from fa2_numba.device.warpgroups import WARPGROUP_SIZE, bar_arrive, bar_sync
from fa2_numba.device.wgmma import WGMMA_M
from fa2_numba.hopper_config import HopperConfig

FIRST_TURN_BARRIER = 1
"""Barrier 0 is `syncthreads`."""
FIRST_OWN_BARRIER = 8
"""From here on consumers meet among themselves."""
TURN_THREADS = 2 * WARPGROUP_SIZE
"""Those who wait for a turn and those who pass it on."""


@cache
def make_turns(config: HopperConfig):
    """`give_first_turn(consumer)`, `await_turn(consumer)`, `pass_turn(consumer)`."""
    NUM_CONSUMERS = config.num_consumers
    PING_PONG = config.ping_pong and NUM_CONSUMERS > 1

    @device_function
    def pass_turn(consumer):
        if PING_PONG:
            following = int32(consumer + 1) if consumer < NUM_CONSUMERS - 1 else int32(0)
            # The next consumer may issue its products.
            bar_arrive(int32(FIRST_TURN_BARRIER + following), int32(TURN_THREADS))

    @device_function
    def await_turn(consumer):
        if PING_PONG:
            # The products of the consumer before this one are issued first.
            bar_sync(int32(FIRST_TURN_BARRIER + consumer), int32(TURN_THREADS))

    @device_function
    def give_first_turn(consumer):
        if consumer == NUM_CONSUMERS - 1:
            pass_turn(consumer)

    return give_first_turn, await_turn, pass_turn


@cache
def make_find_first_keys(config: HopperConfig, causal: bool):
    """`find_first_keys(smem, consumer, block_row, sizes, k_at, v_at)`: the tile a consumer begins
    with, the last one that some of its rows see, and the cursors of K and V there.
    """
    _, k, v, _ = map(make_ring, config.rings)
    await_k, release_k, advance = k.await_full, k.release, k.advance
    await_v, release_v = v.await_full, v.release
    count_n_blocks = make_count_n_blocks(config.block_m, config.block_n, causal)
    count_own_n_blocks = make_count_n_blocks(WGMMA_M, config.block_n, causal)
    _, await_turn, pass_turn = make_turns(config)

    @device_function
    def find_first_keys(smem, consumer, block_row, sizes, k_at, v_at):
        seqlen_q, seqlen_k, _ = sizes
        n_block = int32(count_n_blocks(block_row, seqlen_q, seqlen_k) - 1)
        if causal:
            first_row = int32(block_row + consumer * WGMMA_M)
            last = int32(count_own_n_blocks(first_row, seqlen_q, seqlen_k) - 1)
            # Tiles that only later consumers see pass by, and a turn with each.
            while n_block > last:
                await_k(smem, k_at)
                release_k(smem, k_at)
                await_v(smem, v_at)
                release_v(smem, v_at)
                k_at, v_at = advance(k_at), advance(v_at)
                await_turn(consumer)
                pass_turn(consumer)
                n_block = int32(n_block - 1)
        return n_block, k_at, v_at

    return find_first_keys


@device_function
def meet(consumer):
    """The threads of one consumer wait for each other."""
    # Each thread's writes are there for the one that acts for all.
    bar_sync(int32(FIRST_OWN_BARRIER + consumer), int32(WARPGROUP_SIZE))
