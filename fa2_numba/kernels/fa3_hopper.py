"""FlashAttention-3's partition: `fa2_tensor_core` with roles for warpgroups, on Hopper (sm_90a).

FlashAttention-1 split K among warps and FlashAttention-2 Q; here warpgroups of four warps split the
*work*. One, the producer, loads tiles and computes nothing: a single thread of it starts copies by
TMA. The others, the consumers, own 64 query rows each and compute, by `wgmma`, whose operands come
from shared memory. Between them lie rings of tiles (`hopper_pipeline`): the producer runs ahead as
far as there are empty stages, and no barrier stops all threads together. The steps of the loop are
those of `fa2_tensor_core`, and so are masks, softmax and who holds which element.

Around that (FA3 sections 3.1 and 3.2), each with a flag of `HopperConfig` that takes it away, and
what it gained in an exploratory version of the kernel (H200, float16, 4096 tokens, no mask, head
dim 128 / 64, in TFLOP/s):

- overlap: products are asynchronous, so S of the next tile of keys is issued before O += P V, and
  its softmax is computed beside this product. With ping_pong, 580 -> 667 / 493 -> 521.
- ping_pong: consumers issue in turns, so that the softmax of one runs beside the products of
  another (`hopper_turns`). With overlap, 653 -> 667 / 480 -> 521.
- lazy_rescale: as in `fa2_tensor_core`. 667 -> 689 / 521 -> 542.
- persistent: a block goes on to the next tile (`hopper_tiles`), whose Q is loaded meanwhile.
  Causal, 574 -> 588 / 413 -> 427; a second buffer for Q, 689 -> 694 / 542 -> 556.

The producer gives registers away that it does not need, to consumers that hold S, P and O.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, uint32

from fa2_numba.constants import FULL_MASK, NEG_INF
from fa2_numba.device import device_function
from fa2_numba.device.hopper_output import make_store_output, store_log_sum_exp
from fa2_numba.device.hopper_pipeline import FIRST_EMPTY, FIRST_FULL, make_load, make_ring
from fa2_numba.device.hopper_products import make_accumulate_values, make_issue_scores
from fa2_numba.device.hopper_softmax import (
    make_normalise,
    make_rescale,
    make_round_weights,
    make_scale_scores,
    make_update_softmax,
)
from fa2_numba.device.hopper_tiles import (
    NO_TILE,
    make_count_n_blocks,
    make_messages,
    make_next_tile,
    make_split_tile,
    split_head,
)
from fa2_numba.device.hopper_turns import make_find_first_keys, make_turns
from fa2_numba.device.mask import make_mask_accumulators, make_needs_mask
from fa2_numba.device.mbarrier import fence_mbarrier_init
from fa2_numba.device.ptx import shared_address
from fa2_numba.device.tma import bulk_wait_group_read_0, fence_tensor_map
from fa2_numba.device.warpgroups import WARPGROUP_SIZE, setmaxnreg_dec, setmaxnreg_inc
from fa2_numba.device.wgmma import EIGHT_ROWS_BYTES, WGMMA_M, accumulator, wgmma_wait_group
from fa2_numba.hopper_config import HopperConfig
from fa2_numba.hopper_plan import plan_forward_with
from fa2_numba.launch import ForwardTensors, KernelLaunch


@cache
def make_produce(config: HopperConfig, causal: bool):
    """`produce(smem, maps, tile_counter, sizes)`: the producer's whole life, of one thread."""
    BLOCK_M, BLOCK_N = config.block_m, config.block_n
    q_ring, k_ring, v_ring, _ = config.rings
    load_q, load_k, load_v = (make_load(r, config.pieces) for r in (q_ring, k_ring, v_ring))
    advance_q, advance = make_ring(q_ring).advance, make_ring(k_ring).advance
    split_tile, next_tile = make_split_tile(causal), make_next_tile(config.persistent)
    count_n_blocks = make_count_n_blocks(BLOCK_M, BLOCK_N, causal)
    _, tell, _ = make_messages(config)

    @device_function
    def produce(smem, maps, tile_counter, sizes):
        Q_map, K_map, V_map = maps
        seqlen_q, seqlen_k, heads, kv_group, all_heads = sizes
        # Maps may have been written just before this launch.
        fence_tensor_map(Q_map)
        fence_tensor_map(K_map)
        fence_tensor_map(V_map)
        m_blocks = uint32((seqlen_q + BLOCK_M - 1) // BLOCK_M)
        tiles = uint32(m_blocks * uint32(all_heads))
        q_at, kv_at, message_at = FIRST_EMPTY, FIRST_EMPTY, FIRST_EMPTY
        tile = uint32(cuda.blockIdx.x)
        while tile < tiles:
            m_block, head = split_tile(tile, m_blocks, uint32(all_heads))
            message_at = tell(smem, message_at, m_block, head)
            tile = next_tile(tile_counter, tiles)
            b, h = split_head(head, heads)
            kv_head = int32(uint32(h) // uint32(kv_group))
            first_row = int32(m_block * BLOCK_M)
            load_q(smem, q_at, Q_map, first_row, h, b)  # FA3 Alg. 1 lines 4, 5
            q_at = advance_q(q_at)
            n_blocks = count_n_blocks(first_row, seqlen_q, seqlen_k)
            for n_block in range(n_blocks - 1, -1, -1):  # FA3 Alg. 1 line 6
                row = int32(n_block * BLOCK_N)
                load_k(smem, kv_at, K_map, row, kv_head, b)  # FA3 Alg. 1 lines 7, 8, 9
                load_v(smem, kv_at, V_map, row, kv_head, b)
                kv_at = advance(kv_at)
        tell(smem, message_at, uint32(NO_TILE), uint32(0))

    return produce


@cache
def make_attend(config: HopperConfig, dtype: str, causal: bool, scale_first: bool):
    """`attend(smem, consumer, O_reg, m_reg, l_reg, Q_smem, block_row, sizes, scales, k_at, v_at)`.

    A consumer's rows of a tile of queries, with all keys that they see: O before it is divided by
    l, m, and l summed over this thread's keys. Returns the next cursors of K and V.
    """
    BLOCK_N, OVERLAP = config.block_n, config.overlap
    COLS, OUT_COLS = config.elements
    PAIRS = COLS // 2
    k = make_ring(config.rings[1])
    k_tile, await_k, release_k, advance = k.tile, k.await_full, k.release, k.advance
    find_first_keys = make_find_first_keys(config, causal)
    _, await_turn, pass_turn = make_turns(config)
    issue_scores = make_issue_scores(config, dtype)
    await_first_scores = wgmma_wait_group(0, BLOCK_N)
    await_scores = wgmma_wait_group(1 if OVERLAP else 0, BLOCK_N)
    begin_values, end_values = make_accumulate_values(config, dtype)
    scale_scores = make_scale_scores(config, scale_first)
    needs_mask = make_needs_mask(config, causal)
    mask_scores = make_mask_accumulators(2, COLS, causal)
    update_softmax = make_update_softmax(config)
    round_weights, rescale = make_round_weights(config, dtype), make_rescale(config)
    locate_element = device_function(accumulator)

    @device_function
    def attend(smem, consumer, O_reg, m_reg, l_reg, Q_smem, block_row, sizes, scales, k_at, v_at):
        S_reg = cuda.local.array((2, COLS), float32)
        P_reg = cuda.local.array((2, PAIRS), uint32)
        factor_reg = cuda.local.array(2, float32)
        seqlen_q, seqlen_k, _ = sizes
        score_scale, exponent_scale = scales
        first_row = int32(block_row + consumer * WGMMA_M)
        row, col = locate_element(uint32(cuda.threadIdx.x) % WARPGROUP_SIZE, 0, 0)
        row, col = int32(first_row + row), int32(col)
        for i in range(2):  # FA3 Alg. 2 line 2
            m_reg[i] = NEG_INF
            l_reg[i] = float32(0.0)
            for c in range(OUT_COLS):
                O_reg[i, c] = float32(0.0)
        n_block, k_at, v_at = find_first_keys(smem, consumer, block_row, sizes, k_at, v_at)
        await_k(smem, k_at)  # FA3 Alg. 2 line 3
        issue_scores(S_reg, Q_smem, k_tile(smem, k_at))  # FA3 Alg. 2 line 4
        await_first_scores(S_reg, 0, 0)
        release_k(smem, k_at)  # FA3 Alg. 2 line 5
        k_at = advance(k_at)
        scale_scores(S_reg, score_scale)
        first_col = int32(n_block * BLOCK_N)
        if needs_mask(first_row, first_col, seqlen_q, seqlen_k):
            mask_scores(S_reg, row, int32(first_col + col), seqlen_q, seqlen_k)
        update_softmax(S_reg, m_reg, l_reg, factor_reg, exponent_scale)  # FA3 Alg. 2 line 6
        round_weights(P_reg, S_reg)

        while n_block > 0:  # FA3 Alg. 2 line 7, from the last tile that some row sees to the first
            n_block = int32(n_block - 1)
            if not OVERLAP:
                begin_values(O_reg, P_reg, smem, v_at)
                v_at = end_values(O_reg, smem, v_at)
            await_k(smem, k_at)  # FA3 Alg. 2 line 8
            await_turn(consumer)
            issue_scores(S_reg, Q_smem, k_tile(smem, k_at))  # FA3 Alg. 2 line 9
            if OVERLAP:
                begin_values(O_reg, P_reg, smem, v_at)  # FA3 Alg. 2 lines 10, 11
            pass_turn(consumer)
            await_scores(S_reg, 0, 0)  # FA3 Alg. 2 line 12
            release_k(smem, k_at)  # FA3 Alg. 2 line 15
            k_at = advance(k_at)
            scale_scores(S_reg, score_scale)
            first_col = int32(n_block * BLOCK_N)
            # Without a causal mask only the first tile has keys past the end.
            if causal and needs_mask(first_row, first_col, seqlen_q, seqlen_k):
                mask_scores(S_reg, row, int32(first_col + col), seqlen_q, seqlen_k)
            # FA3 Alg. 2 line 13
            rescales = update_softmax(S_reg, m_reg, l_reg, factor_reg, exponent_scale)
            if OVERLAP:
                v_at = end_values(O_reg, smem, v_at)  # FA3 Alg. 2 lines 14, 15
            if rescales:
                rescale(O_reg, factor_reg)
            round_weights(P_reg, S_reg)  # FA3 Alg. 2 line 16

        begin_values(O_reg, P_reg, smem, v_at)  # FA3 Alg. 2 lines 18, 19
        return k_at, end_values(O_reg, smem, v_at)

    return attend


@cache
def make_consume(config: HopperConfig, dtype: str, causal: bool, scale_first: bool):
    """`consume(smem, consumer, O_map, LSE_gmem, sizes, scales)`: a consumer's whole life."""
    BLOCK_M, (_, OUT_COLS) = config.block_m, config.elements
    ROWS_BYTES = config.q_bytes // config.pieces // config.num_consumers
    q = make_ring(config.rings[0])
    q_tile, await_q, release_q, advance_q = q.tile, q.await_full, q.release, q.advance
    _, _, hear = make_messages(config)
    give_first_turn, _, _ = make_turns(config)
    attend = make_attend(config, dtype, causal, scale_first)
    normalise = make_normalise(config)
    store_output = make_store_output(config, dtype)

    @device_function
    def consume(smem, consumer, O_map, LSE_gmem, sizes, scales):
        seqlen_q, _, heads = sizes
        _, exponent_scale = scales
        O_reg = cuda.local.array((2, OUT_COLS), float32)
        m_reg = cuda.local.array(2, float32)
        l_reg = cuda.local.array(2, float32)
        leads = uint32(cuda.threadIdx.x) % WARPGROUP_SIZE == 0
        if leads:
            # The map may have been written just before this launch.
            fence_tensor_map(O_map)
        give_first_turn(consumer)

        q_at, k_at, v_at = FIRST_FULL, FIRST_FULL, FIRST_FULL
        m_block, head, message_at = hear(smem, FIRST_FULL)
        while m_block != uint32(NO_TILE):
            block_row = int32(m_block * BLOCK_M)
            await_q(smem, q_at)  # FA3 Alg. 2 line 3
            Q_smem = int32(q_tile(smem, q_at) + consumer * ROWS_BYTES)
            k_at, v_at = attend(
                smem, consumer, O_reg, m_reg, l_reg, Q_smem, block_row, sizes, scales, k_at, v_at
            )
            normalise(O_reg, m_reg, l_reg)  # FA3 Alg. 2 line 20
            b, h = split_head(head, heads)
            first_row = int32(block_row + consumer * WGMMA_M)
            store_log_sum_exp(LSE_gmem, m_reg, l_reg, first_row, h, b, seqlen_q, exponent_scale)
            store_output(O_map, O_reg, Q_smem, consumer, first_row, h, b)

            m_block, head, message_at = hear(smem, message_at)
            if leads:
                # Q may be loaded again when O has been read from its place.
                bulk_wait_group_read_0()
                release_q(smem, q_at)
            q_at = advance_q(q_at)

    return consume


@cache
def make_forward(config: HopperConfig, dtype: str, causal: bool, scale_first: bool):
    """The kernel for tiles of `config`, arrays of `dtype` and the given mask.

    Arguments: see `hopper_plan`. Grid: at most the number of tiles of queries.
    """
    give_registers = setmaxnreg_dec(config.producer_registers)
    take_registers = setmaxnreg_inc(config.consumer_registers)
    init_q, init_k, init_v, init_messages = (make_ring(ring).init for ring in config.rings)
    produce = make_produce(config, causal)
    consume = make_consume(config, dtype, causal, scale_first)

    def forward(
        Q_map,
        K_map,
        V_map,
        O_map,
        LSE_gmem,
        tile_counter,
        seqlen_q,
        seqlen_k,
        heads,
        kv_group,
        all_heads,
        score_scale,
        exponent_scale,
    ):
        thread = uint32(cuda.threadIdx.x)
        start = shared_address(cuda.shared.array(0, uint32, alignment=16))
        # The swizzle counts from multiples of 1024, and where dynamic shared memory begins is open.
        smem = int32((start + EIGHT_ROWS_BYTES - 1) & -EIGHT_ROWS_BYTES)
        if thread == 0:  # FA3 Alg. 1 line 1
            init_q(smem)
            init_k(smem)
            init_v(smem)
            init_messages(smem)
            # Copies meet the barriers by another way.
            fence_mbarrier_init()
        # The barriers are there for all.
        cuda.syncthreads()
        if thread < WARPGROUP_SIZE:
            give_registers()  # FA3 Alg. 1 line 3
            if thread == 0:
                sizes = seqlen_q, seqlen_k, heads, kv_group, all_heads
                produce(smem, (Q_map, K_map, V_map), tile_counter, sizes)
        else:
            take_registers()  # FA3 Alg. 2 line 1
            # Told by one lane to all: so the compiler knows that a warp has one consumer's number.
            consumer = cuda.shfl_sync(FULL_MASK, int32(thread // WARPGROUP_SIZE - 1), 0)
            scales = score_scale, exponent_scale
            consume(smem, consumer, O_map, LSE_gmem, (seqlen_q, seqlen_k, heads), scales)

    forward.__name__ = f"fa3_hopper_{config}_{dtype}" + "_scaled" * scale_first + "_causal" * causal
    return cuda.jit(forward, launch_bounds=(config.num_threads, 1))


def plan_forward(tensors: ForwardTensors, config: HopperConfig) -> list[KernelLaunch]:
    """The launch that computes O and LSE."""
    return plan_forward_with(make_forward, tensors, config)
