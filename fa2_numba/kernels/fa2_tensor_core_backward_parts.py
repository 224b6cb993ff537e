"""What surrounds the main kernel of `fa2_tensor_core_backward`: what a query needs, and dQ.

prepare:        D = rowsum(dO o O); the log-sum-exp to base 2; zeros where dQ is summed
convert:        dQ, as it was summed, to 16 bits and into its place
"""

from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, uint32

from fa2_numba.constants import LOG2_E, NEG_INF, WARP_SIZE
from fa2_numba.device.layouts import GROUP_ROWS
from fa2_numba.device.ptx import (
    global_address,
    ld_global_v4_f32,
    st_global_v4_f32,
    unpack_bfloat16,
    unpack_float16,
)
from fa2_numba.device.softmax import make_over_lanes
from fa2_numba.device.softmax_base2 import PACK
from fa2_numba.device.tensor_core_gradients import (
    REGISTER_BYTES,
    make_locate_query_gradient,
    make_query_gradient_part,
)
from fa2_numba.device.tensor_core_tiles import make_load_chunk, make_store_chunk
from fa2_numba.launch import BackwardTensors, KernelLaunch, as_bits
from fa2_numba.tensor_core_backward_config import FLOAT_BYTES, BackwardConfig
from fa2_numba.tensor_core_config import CHUNK_BYTES, CHUNK_ELEMENTS, VECTOR
from fa2_numba.tensor_core_plan import copy_bytes

PREPARE_THREADS = 128
UNPACK = {"float16": unpack_float16, "bfloat16": unpack_bfloat16}
"""dtype name -> instruction that makes two float32 numbers of a register."""


@cache
def make_prepare(config: BackwardConfig, dtype: str, width: int, with_sums: bool):
    """The kernel for D and log-sum-exp, tile by tile of queries, and zeros for the sums of dQ.

    Arguments: the bits of O and dO, LSE; statistics (tiles x 2 x BLOCK_M), sums (tiles x BLOCK_M x
    padded_dim) float32. with_sums: there are sums to be cleared. Grid: so many rows as a block's
    threads take at once, of all padded heads. A chunk of a row is one thread's.
    """
    BLOCK_M = config.block_m
    LANES = config.padded_dim // CHUNK_ELEMENTS
    NUM_ROWS = PREPARE_THREADS // LANES
    THREAD_BYTES = VECTOR * FLOAT_BYTES
    WITH_SUMS = with_sums
    load_chunk = make_load_chunk(config.head_dim, width)
    unpack = UNPACK[dtype]
    _, sum_over_lanes = make_over_lanes(LANES)

    def prepare(O_gmem, dO_gmem, LSE_gmem, statistics_gmem, sums_gmem):
        thread, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        seqlen_q, heads = int32(O_gmem.shape[1]), uint32(O_gmem.shape[2])
        row_blocks = uint32((seqlen_q + BLOCK_M - 1) // BLOCK_M * (BLOCK_M // NUM_ROWS))
        batch_head = block // row_blocks
        batch, head = int32(batch_head // heads), int32(batch_head % heads)
        row = int32((block - batch_head * row_blocks) * NUM_ROWS + thread // LANES)
        chunk = thread % LANES
        O_reg = cuda.local.array((1, 4), uint32)
        dO_reg = cuda.local.array((1, 4), uint32)
        o_reg = cuda.local.array((1, 2), float32)
        do_reg = cuda.local.array((1, 2), float32)
        total = float32(0.0)
        lse = -NEG_INF
        if row < seqlen_q:
            load_chunk(O_reg, O_gmem, batch, head, row, chunk)
            load_chunk(dO_reg, dO_gmem, batch, head, row, chunk)
            for e in range(4):
                unpack(o_reg, 0, 0, O_reg[0, e])
                unpack(do_reg, 0, 0, dO_reg[0, e])
                total += o_reg[0, 0] * do_reg[0, 0]
                total += o_reg[0, 1] * do_reg[0, 1]
            if chunk == 0:
                lse = LSE_gmem[batch, head, row]
        total = sum_over_lanes(total)  # FA2 Alg. 2 line 4
        if chunk == 0:
            # Tiles follow each other without a gap, over all heads.
            place = int64(block) * NUM_ROWS + int64(thread // LANES)
            place = place // BLOCK_M * (2 * BLOCK_M) + place % BLOCK_M
            # Queries past the end, and those that see no key, get P = 2^(S - inf) = 0.
            statistics_gmem[place] = -NEG_INF if lse == NEG_INF else lse * LOG2_E
            statistics_gmem[place + BLOCK_M] = total
        if WITH_SUMS:  # FA2 Alg. 2 line 3
            zero_reg = cuda.local.array((1, 4), float32)
            for e in range(4):
                zero_reg[0, e] = float32(0.0)
            first = global_address(sums_gmem) + int64(thread * THREAD_BYTES)
            for half in range(2):
                place = int64(block) * 2 + half
                st_global_v4_f32(first + place * (PREPARE_THREADS * THREAD_BYTES), zero_reg, 0, 0)

    narrow = f"_x{width}" * (width < CHUNK_BYTES)
    prepare.__name__ = f"fa2_tensor_core_prepare_{config}_{dtype}{narrow}" + "_sums" * with_sums
    return cuda.jit(prepare)


@cache
def make_convert(config: BackwardConfig, dtype: str, width: int):
    """The kernel dQ = softmax_scale times its sums, a block a query tile.

    Arguments: the sums, the bits of dQ, softmax_scale. Grid: tiles of all heads.
    """
    BLOCK_M, TILE_BYTES = config.block_m, config.block_m * config.padded_dim * FLOAT_BYTES
    WARP_ROWS, WARP_COLS = config.query_gradient
    WARP_CHUNKS = WARP_COLS // CHUNK_ELEMENTS
    PASS_CHUNKS = WARP_SIZE // GROUP_ROWS
    NUM_CHUNKS = WARP_ROWS // GROUP_ROWS * WARP_CHUNKS
    locate_query_gradient = make_locate_query_gradient(config)
    query_gradient_part = make_query_gradient_part(config)
    store_chunk = make_store_chunk(config.head_dim, width)
    pack = PACK[dtype]

    def convert(sums_gmem, dQ_gmem, softmax_scale):
        block, heads = uint32(cuda.blockIdx.x), uint32(dQ_gmem.shape[2])
        m_blocks = uint32((dQ_gmem.shape[1] + BLOCK_M - 1) // BLOCK_M)
        batch_head = block // m_blocks
        first_row = int32((block - batch_head * m_blocks) * BLOCK_M)
        batch, head = int32(batch_head // heads), int32(batch_head % heads)
        thread = uint32(cuda.threadIdx.x)
        warp_row, warp_col = locate_query_gradient()
        part = query_gradient_part(sums_gmem, thread // WARP_SIZE) + int64(block) * TILE_BYTES
        # A lane takes a row of 8 columns: one register of four lanes holds every second of them.
        row, first = thread % GROUP_ROWS, thread % WARP_SIZE // GROUP_ROWS
        even_reg = cuda.local.array((1, 4), float32)
        odd_reg = cuda.local.array((1, 4), float32)
        chunk_reg = cuda.local.array((1, 4), uint32)
        for number in range(first, NUM_CHUNKS, PASS_CHUNKS):
            place = part + int64(2 * number * REGISTER_BYTES + row * CHUNK_BYTES)
            ld_global_v4_f32(even_reg, 0, 0, place)
            ld_global_v4_f32(odd_reg, 0, 0, place + REGISTER_BYTES)
            for e in range(4):
                even, odd = even_reg[0, e] * softmax_scale, odd_reg[0, e] * softmax_scale
                chunk_reg[0, e] = pack(even, odd)
            i_row = int32(first_row + warp_row + number // WARP_CHUNKS * GROUP_ROWS + row)
            if i_row < int32(dQ_gmem.shape[1]):
                chunk = int32(warp_col // CHUNK_ELEMENTS + number % WARP_CHUNKS)
                store_chunk(dQ_gmem, batch, head, i_row, chunk, chunk_reg)

    narrow = f"_x{width}" * (width < CHUNK_BYTES)
    convert.__name__ = f"fa2_tensor_core_convert_{config}_{dtype}{narrow}"
    return cuda.jit(convert)


def plan_statistics(tensors: BackwardTensors, config: BackwardConfig) -> tuple:
    """Statistics, the sums of dQ (the statistics once more if there are none), their launch."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    rows = batch * heads * -(-seqlen_q // config.block_m) * config.block_m
    statistics = tensors.allocate((2 * rows,))
    with_sums = not tensors.deterministic
    sums = tensors.allocate((rows * config.padded_dim,)) if with_sums else statistics
    width = copy_bytes((tensors.O, tensors.dO), config)
    O, dO = as_bits(tensors.O), as_bits(tensors.dO)
    launch = KernelLaunch(
        kernel=make_prepare(config, tensors.dtype, width, with_sums),
        grid=(rows * config.padded_dim // (CHUNK_ELEMENTS * PREPARE_THREADS),),
        threads=PREPARE_THREADS,
        shared_bytes=0,
        arguments=(O, dO, tensors.LSE, statistics, sums),
    )
    return statistics, sums, launch


def plan_convert(tensors: BackwardTensors, config: BackwardConfig, sums: object) -> KernelLaunch:
    """The launch that makes dQ of its sums."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    return KernelLaunch(
        kernel=make_convert(config, tensors.dtype, copy_bytes((tensors.dQ,), config)),
        grid=(batch * heads * -(-seqlen_q // config.block_m),),
        threads=config.num_threads,
        shared_bytes=0,
        arguments=(sums, as_bits(tensors.dQ), tensors.softmax_scale),
    )
