"""Tiles of 16-bit elements between HBM and shared memory, 16 bytes a lane where that is allowed."""

from functools import cache

from numba import cuda
from numba.cuda import int32, int64, uint16, uint32

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.layouts import GROUP_ROWS, ac_element
from fa2_numba.device.ptx import (
    cp_async_4,
    cp_async_8,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group_0,
    global_address,
    ld_global_v4_b32,
    ld_shared_v4_b32,
    st_global_v4_b32,
    st_shared_b32,
    st_shared_v4_b32,
)
from fa2_numba.device.softmax_base2 import PACK
from fa2_numba.device.swizzle import make_chunk_offset
from fa2_numba.tensor_core_config import (
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    ELEMENT_BYTES,
    SwizzledRows,
    TensorCoreConfig,
)

CP_ASYNC = {16: cp_async_16, 8: cp_async_8, 4: cp_async_4}


@cache
def make_copy_chunk(copy_bytes: int, turing: bool):
    """`copy_chunk(destination, source, count)`: start to copy `count` bytes of a chunk, then zeros.

    In pieces of copy_bytes, to which both addresses are aligned.
    """
    if turing:
        return _copy_chunk_at_once
    cp_async = CP_ASYNC[copy_bytes]

    @device_function
    def copy_chunk(destination, source, count):
        for begin in range(0, CHUNK_BYTES, copy_bytes):
            size = int32(min(max(count - begin, 0), copy_bytes))
            cp_async(int32(destination + begin), int64(source + begin), size)

    return copy_chunk


@device_function
def _copy_chunk_at_once(destination, source, count):
    chunk_reg = cuda.local.array((1, 4), uint32)
    for j in range(4):
        chunk_reg[0, j] = uint32(0)
    if count > 0:
        ld_global_v4_b32(chunk_reg, 0, 0, source)
    st_shared_v4_b32(destination, chunk_reg, 0, 0)


@device_function
def row_address(X_gmem, batch, head, row):
    """Where a row of a head lies. `copy_bytes` lets no row stride beyond 32 bits come here."""
    address = global_address(X_gmem) + batch * X_gmem.strides[0] + head * X_gmem.strides[2]
    return address + int64(int32(row)) * int64(int32(X_gmem.strides[1]))


@cache
def make_load_tile(config: SwizzledRows, rows: int, copy_bytes: int):
    """`load_tile(tile, X_gmem, batch, head, first_row)`: start to fill a tile with rows of a head.

    See `make_load_rows`.
    """
    load_rows = make_load_rows(config, rows, copy_bytes)

    @device_function
    def load_tile(tile, X_gmem, batch, head, first_row):
        load_rows(tile, X_gmem, batch, head, row_address(X_gmem, batch, head, 0), first_row)

    return load_tile


@cache
def make_load_rows(config: SwizzledRows, rows: int, copy_bytes: int):
    """`load_rows(tile, X_gmem, batch, head, head_address, first_row)`: start to fill a tile.

    tile: its shared address. X_gmem: the bits of 16-bit elements; head_address: where row 0 of the
    head lies. Rows and columns past the end become zeros: what memory holds there never matters. A
    thread copies the same chunk of every PASS_ROWS-th row, where the swizzle is the same.
    copy_bytes: what addresses and strides are multiples of; below 4 bytes, elements go through
    registers one by one.
    """
    if copy_bytes not in CP_ASYNC:
        return _make_load_elements(config, rows)
    HEAD_DIM, ROW_BYTES, LINE_CHUNKS = config.head_dim, config.row_bytes, config.line_chunks
    PASS_ROWS = config.num_threads // LINE_CHUNKS
    LINE_BYTES, NUM_LINES = config.line_bytes, config.num_lines
    HEAD_BYTES = ELEMENT_BYTES * HEAD_DIM
    WHOLE_PASSES = rows % PASS_ROWS == 0
    chunk_offset = make_chunk_offset(config)
    copy_chunk = make_copy_chunk(copy_bytes, config.turing)

    @device_function
    def load_rows(tile, X_gmem, batch, head, head_address, first_row):
        thread = uint32(cuda.threadIdx.x)
        row, chunk = thread // LINE_CHUNKS, thread % LINE_CHUNKS
        destination = int32(tile + chunk_offset(row, chunk))
        stride = int64(int32(X_gmem.strides[1]))
        source = head_address + int64(int32(first_row + row)) * stride + chunk * CHUNK_BYTES
        rows_left = int32(X_gmem.shape[1] - first_row - row)
        for i in range(0, rows, PASS_ROWS):
            for line in range(NUM_LINES):
                count = int32(CHUNK_BYTES) if int32(i) < rows_left else int32(0)
                if HEAD_BYTES % LINE_BYTES:
                    left = HEAD_BYTES - line * LINE_BYTES - chunk * CHUNK_BYTES
                    count = min(count, max(left, 0))
                begin = line * LINE_BYTES
                place = destination + i * ROW_BYTES + begin
                if WHOLE_PASSES or row + i < rows:
                    copy_chunk(place, source + begin, count)
            source += PASS_ROWS * stride

    return load_rows


@cache
def _make_load_elements(config: SwizzledRows, rows: int):
    LINE_CHUNKS = config.line_chunks
    PASS_ROWS = config.num_threads // LINE_CHUNKS
    LINE_BYTES, NUM_LINES = config.line_bytes, config.num_lines
    chunk_offset = make_chunk_offset(config)
    load_chunk = make_load_chunk(config.head_dim, ELEMENT_BYTES)

    @device_function
    def load_rows(tile, X_gmem, batch, head, head_address, first_row):
        thread = uint32(cuda.threadIdx.x)
        row, chunk = thread // LINE_CHUNKS, thread % LINE_CHUNKS
        chunk_reg = cuda.local.array((1, 4), uint32)
        for i in range(row, rows, PASS_ROWS):
            for line in range(NUM_LINES):
                for e in range(4):
                    chunk_reg[0, e] = uint32(0)
                if first_row + i < X_gmem.shape[1]:
                    where = line * LINE_CHUNKS + chunk
                    load_chunk(chunk_reg, X_gmem, batch, head, first_row + i, where)
                place = tile + chunk_offset(i, chunk) + line * LINE_BYTES
                st_shared_v4_b32(int32(place), chunk_reg, 0, 0)

    return load_rows


def make_await_copies(config: TensorCoreConfig):
    """`await_copies()`: what this thread has started to copy has arrived."""
    return _nothing_to_await if config.turing else _await_copies


@device_function
def _nothing_to_await():
    pass


@device_function
def _await_copies():
    cp_async_commit_group()
    cp_async_wait_group_0()


@cache
def make_store_output(config: TensorCoreConfig, dtype: str, copy_bytes: int):
    """`store_output(O_gmem, batch, head, first_row, O_reg, tile)`: a warp's rows of O to HBM.

    By way of the warp's own rows of `tile`. first_row: of the tile.
    """
    WARP_ROWS = config.block_m // config.num_warps
    store_rows = make_store_rows(config, dtype, copy_bytes, WARP_ROWS, config.num_lines)

    @device_function
    def store_output(O_gmem, batch, head, first_row, O_reg, tile):
        warp_row = uint32(cuda.threadIdx.x) // WARP_SIZE * WARP_ROWS
        store_rows(O_gmem, batch, head, first_row, O_reg, tile, warp_row, 0)

    return store_output


@cache
def make_store_rows(config: SwizzledRows, dtype: str, copy_bytes: int, warp_rows: int, lines: int):
    """`store_rows(X_gmem, batch, head, first_row, X_reg, tile, warp_row, first_line)`.

    A warp's warp_rows rows of X, accumulators of so many lines, go through its own part of `tile`,
    from row warp_row and line first_line on, so that each lane can store 16 bytes of a row of
    X_gmem (bits) at once. first_row: of the tile.
    """
    HEAD_DIM, LINE_CHUNKS = config.head_dim, config.line_chunks
    ROWS = warp_rows // GROUP_ROWS
    PASS_ROWS = WARP_SIZE // LINE_CHUNKS
    ROW_BYTES, LINE_BYTES = config.row_bytes, config.line_bytes
    element = device_function(ac_element)
    chunk_offset = make_chunk_offset(config)
    store_chunk = make_store_chunk(HEAD_DIM, copy_bytes)
    pack = PACK[dtype]

    @device_function
    def store_rows(X_gmem, batch, head, first_row, X_reg, tile, warp_row, first_line):
        lane = uint32(cuda.threadIdx.x) % WARP_SIZE
        row, col = element(lane, 0, 0)
        first = chunk_offset(warp_row + row, 0) + col * ELEMENT_BYTES
        own = int32(tile + first_line * LINE_BYTES)
        # A lane writes where others of its warp may have read just now.
        cuda.syncwarp()
        for line in range(lines):
            for j in range(LINE_CHUNKS):
                place = own + (first ^ (j * CHUNK_BYTES)) + line * LINE_BYTES
                c = 2 * (line * LINE_CHUNKS + j)
                for i in range(ROWS):
                    pair = pack(X_reg[i, c], X_reg[i, c + 1])
                    st_shared_b32(int32(place + i * GROUP_ROWS * ROW_BYTES), pair)
        # Each lane reads what other lanes of its warp have written.
        cuda.syncwarp()
        chunk_reg = cuda.local.array((1, 4), uint32)
        row, chunk = warp_row + lane // LINE_CHUNKS, lane % LINE_CHUNKS
        for i in range(0, warp_rows, PASS_ROWS):
            if int32(first_row + row + i) < int32(X_gmem.shape[1]):
                place = own + chunk_offset(row + i, chunk)
                for line in range(lines):
                    ld_shared_v4_b32(chunk_reg, 0, 0, int32(place + line * LINE_BYTES))
                    where = chunk + (first_line + line) * LINE_CHUNKS
                    store_chunk(X_gmem, batch, head, int32(first_row + row + i), where, chunk_reg)

    return store_rows


@cache
def make_store_chunk(head_dim: int, copy_bytes: int):
    """`store_chunk(X_gmem, batch, head, row, chunk, chunk_reg)`: 8 elements of a row to HBM.

    At once, if all of them exist and copy_bytes, to which their address is aligned, are 16.
    """

    @device_function
    def store_chunk(X_gmem, batch, head, row, chunk, chunk_reg):
        first = chunk * CHUNK_ELEMENTS
        if copy_bytes == CHUNK_BYTES and first + CHUNK_ELEMENTS <= head_dim:
            address = row_address(X_gmem, batch, head, row) + chunk * CHUNK_BYTES
            st_global_v4_b32(address, chunk_reg, 0, 0)
        elif copy_bytes < CHUNK_BYTES or head_dim % CHUNK_ELEMENTS:
            for e in range(CHUNK_ELEMENTS):
                if first + e < head_dim:
                    pair = chunk_reg[0, e // 2]
                    X_gmem[batch, row, head, first + e] = uint16(pair >> (16 * (e % 2)))

    return store_chunk


@cache
def make_load_chunk(head_dim: int, copy_bytes: int):
    """`load_chunk(chunk_reg, X_gmem, batch, head, row, chunk)`: 8 elements of a row from HBM.

    In row 0 of chunk_reg, two in each register; columns past the end are zeros. At once, if all of
    them exist and copy_bytes, to which their address is aligned, are 16.
    """

    @device_function
    def load_chunk(chunk_reg, X_gmem, batch, head, row, chunk):
        first = chunk * CHUNK_ELEMENTS
        if copy_bytes == CHUNK_BYTES and first + CHUNK_ELEMENTS <= head_dim:
            address = row_address(X_gmem, batch, head, row) + chunk * CHUNK_BYTES
            ld_global_v4_b32(chunk_reg, 0, 0, address)
        else:
            for e in range(4):
                chunk_reg[0, e] = uint32(0)
                for half in range(2):
                    if first + 2 * e + half < head_dim:
                        bits = uint32(X_gmem[batch, row, head, first + 2 * e + half])
                        chunk_reg[0, e] |= bits << (16 * half)

    return load_chunk


@cache
def make_split_block(causal: bool):
    """`split_block(tiles, batches, heads)`: this block's tile, batch and head.

    Blocks start in the order of blockIdx.x. Without a mask the tiles of one head come together, so
    that what they share is read from HBM once and then found in the L2 cache. With a causal mask
    the first tiles of all heads come before all others.
    """

    @device_function
    def split_block(tiles, batches, heads):
        # Unsigned numbers of 32 bits, which a GPU divides several times faster than those of 64.
        block, heads = uint32(cuda.blockIdx.x), uint32(heads)
        fastest = uint32(batches) * heads if causal else uint32(tiles)
        slow = block // uint32(fastest)
        fast = block - slow * uint32(fastest)
        tile, one_head = (slow, fast) if causal else (fast, slow)
        batch = uint32(one_head) // heads
        return uint32(tile), batch, uint32(one_head - batch * heads)

    return split_block


@cache
def make_locate_tile(config: TensorCoreConfig, causal: bool):
    """`locate_tile(Q_gmem, K_gmem)`: batch, head, KV head, first row of this block's query tile.

    With a causal mask the last tiles, which see the most keys, are started first: none is left to
    run alone at the end.
    """
    BLOCK_M = config.block_m
    split_block = make_split_block(causal)

    @device_function
    def locate_tile(Q_gmem, K_gmem):
        heads = uint32(Q_gmem.shape[2])
        m_blocks = uint32((Q_gmem.shape[1] + BLOCK_M - 1) // BLOCK_M)
        m_block, batch, head = split_block(m_blocks, Q_gmem.shape[0], heads)
        if causal:
            m_block = m_blocks - 1 - m_block
        kv_head = uint32(head) // uint32(heads // uint32(K_gmem.shape[2]))
        return int32(batch), int32(head), int32(kv_head), int32(m_block * BLOCK_M)

    return locate_tile


@cache
def make_locate_key_tile(block_n: int, causal: bool):
    """`locate_key_tile(K_gmem)`: batch, KV head and first key of this block's key tile.

    With a causal mask it is the first tiles that most queries see.
    """
    split_block = make_split_block(causal)

    @device_function
    def locate_key_tile(K_gmem):
        n_blocks = uint32((K_gmem.shape[1] + block_n - 1) // block_n)
        n_block, batch, kv_head = split_block(n_blocks, K_gmem.shape[0], K_gmem.shape[2])
        return int32(batch), int32(kv_head), int32(n_block * block_n)

    return locate_key_tile
