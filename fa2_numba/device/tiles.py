"""Tiles: whose they are, where they lie in shared memory, how they are loaded and visited."""

import math
from functools import cache

from numba import cuda
from numba.cuda import cgutils, float32, types
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import populate_array

from fa2_numba.config import SPLIT_Q_LANES, TileConfig
from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.dtypes import TO_FLOAT32


@intrinsic
def shared_tile(typingctx, smem, offset, shape):
    """The elements of the flat array `smem` from `offset` on, seen as an array of `shape`.

    Numba's own slice-and-reshape calls a run-time function; with a constant shape this one leaves
    nothing but address arithmetic, done by the compiler.
    """
    result = types.Array(smem.dtype, len(shape), "C")
    signature = result(smem, types.int64, shape)

    def build(context, builder, signature, arguments):
        flat, first, extents = arguments
        source = context.make_array(signature.args[0])(context, builder, flat)
        sizes = cgutils.unpack_tuple(builder, extents)
        itemsize = context.get_abi_sizeof(context.get_data_type(result.dtype))
        stride = context.get_constant(types.intp, itemsize)
        strides = []
        for size in reversed(sizes):
            strides.insert(0, stride)
            stride = builder.mul(stride, size)
        tile = context.make_array(result)(context, builder)
        populate_array(
            tile,
            data=builder.gep(source.data, [first]),
            shape=sizes,
            strides=strides,
            itemsize=context.get_constant(types.intp, itemsize),
            meminfo=None,
        )
        return tile._getvalue()

    return signature, build


shared_tile.simulated = lambda smem, offset, shape: smem[
    offset : offset + math.prod(shape)
].reshape(shape)


@device_function
def locate_head(heads, kv_heads):
    """Batch, head and key-value head of this block; blockIdx.x counts batch x heads.

    heads / kv_heads consecutive query heads share one key-value head (GQA).
    """
    batch, head = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
    return batch, head, head // (heads // kv_heads)


@cache
def make_locate_element(config: TileConfig):
    """`locate_element()`: row and column of this lane's first element in a split-Q tile."""
    WARP_ROWS = config.block_m // config.num_warps
    LANE_COLS = SPLIT_Q_LANES[1]

    @device_function
    def locate_element():
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        return warp * WARP_ROWS + lane // LANE_COLS, lane % LANE_COLS

    return locate_element


@cache
def make_load_tile(config: TileConfig, rows: int, dtype: str):
    """`load_tile(tile_smem, X_gmem, batch, head, first_row)`: a block fills a tile.

    A warp loads a row at a time, neighbouring lanes neighbouring columns (coalesced).
    """
    HEAD_DIM, NUM_WARPS = config.head_dim, config.num_warps
    LOAD_ROWS = rows // NUM_WARPS
    LOAD_COLS = math.ceil(HEAD_DIM / WARP_SIZE)
    to_float32 = TO_FLOAT32[dtype]

    @device_function
    def load_tile(tile_smem, X_gmem, batch, head, first_row):
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        seqlen, head_dim = X_gmem.shape[1], X_gmem.shape[3]
        for i in range(LOAD_ROWS):
            row = warp + NUM_WARPS * i
            for j in range(LOAD_COLS):
                d = lane + WARP_SIZE * j
                # Rows and columns past the end are zeros: what memory holds there never matters.
                x = float32(0.0)
                if first_row + row < seqlen and d < head_dim:
                    x = to_float32(X_gmem[batch, first_row + row, head, d])
                if d < HEAD_DIM:
                    tile_smem[row, d] = x

    return load_tile


@cache
def make_count_n_blocks(config: TileConfig, causal: bool):
    """`count_n_blocks(first_row, seqlen_q, seqlen_k)`: key tiles that a query tile can see."""
    BLOCK_M, BLOCK_N = config.block_m, config.block_n

    @device_function
    def count_n_blocks(first_row, seqlen_q, seqlen_k):
        keys = seqlen_k
        if causal:
            last_row = min(first_row + BLOCK_M, seqlen_q) - 1
            keys = max(0, min(seqlen_k, last_row + 1 + seqlen_k - seqlen_q))
        return (keys + BLOCK_N - 1) // BLOCK_N

    return count_n_blocks


@cache
def make_first_visible_row(config: TileConfig, causal: bool):
    """`first_visible_row(first_col, seqlen_q, seqlen_k)`: where the queries of a key tile begin.

    The first row of the first query tile that sees it. All tiles visit the first key tile, since
    their output must be set even if they see no key at all.
    """
    BLOCK_M = config.block_m

    @device_function
    def first_visible_row(first_col, seqlen_q, seqlen_k):
        row = 0
        if causal and first_col > 0:
            row = max(0, first_col + seqlen_q - seqlen_k)
        return row // BLOCK_M * BLOCK_M

    return first_visible_row
