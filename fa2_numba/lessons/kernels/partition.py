"""Lesson 07: attention of 4 queries at a time by two warps that slice K, and its verbs.

Small on purpose. A *slice* is 32 keys, a key for each lane, which holds one score of a row. In O a
lane is a column. A tile of K and V has a slice for each warp.
"""

import math

from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import FULL_MASK, NEG_INF, WARP_SIZE
from fa2_numba.device import device_function
from fa2_numba.device.softmax import make_over_lanes

WARPS = 2
ROWS, WARP_ROWS = 4, 2
"""Query rows of a tile, and of them those for each warp, where warps split rows."""
SLICE, KEYS = WARP_SIZE, WARPS * WARP_SIZE
"""Keys of a slice and of a tile."""
HEAD_DIM = 32
"""Columns of a tile: arrays may have fewer."""
STRIDE = HEAD_DIM + 1
"""One more than a row holds: lanes that read one column of 32 rows hit different banks."""

warp_max, warp_sum = make_over_lanes(WARP_SIZE)


@device_function
def load_rows(tile_smem, X, first_row, rows):
    """All warps fill a tile with rows of X (length, head_dim); past the ends are zeros."""
    warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
    for row in range(warp, rows, WARPS):
        x = float32(0.0)
        if first_row + row < X.shape[0] and lane < X.shape[1]:
            x = X[first_row + row, lane]
        tile_smem[row, lane] = x


@device_function
def score(Q_smem, K_smem, row, key, keys_left):
    """S[row, key] of the tiles, not scaled; -inf for a key of which nothing is left."""
    s = float32(0.0)
    for d in range(HEAD_DIM):
        s += Q_smem[row, d] * K_smem[key, d]
    return s if key < keys_left else NEG_INF


@device_function
def weighted_values(p, V_smem, first_key):
    """Column `lane` of P V over one slice: lane j's weight p times row first_key + j of V_smem."""
    lane = cuda.threadIdx.x % WARP_SIZE
    o = float32(0.0)
    for j in range(SLICE):
        o += cuda.shfl_sync(FULL_MASK, p, j) * V_smem[first_key + j, lane]
    return o


@cuda.jit
def sliced_k_attention(Q, K, V, O, softmax_scale):
    """O = softmax(softmax_scale Q K^T) V, warps slicing K; grid (heads, query tiles), 64 threads.

    Q, O: (seqlen_q, heads, head_dim); K, V: (seqlen_k, kv_heads, head_dim); float32. head_dim is
    HEAD_DIM at most.
    """
    warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
    head, first_row = cuda.blockIdx.x, cuda.blockIdx.y * ROWS
    kv_head = head // (Q.shape[1] // K.shape[1])
    seqlen_k = K.shape[0]
    Q_smem = cuda.shared.array((ROWS, STRIDE), float32)
    K_smem = cuda.shared.array((KEYS, STRIDE), float32)
    V_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    max_smem = cuda.shared.array((WARPS, ROWS), float32)
    sum_smem = cuda.shared.array((WARPS, ROWS), float32)
    partial_smem = cuda.shared.array((WARPS, ROWS, HEAD_DIM), float32)
    S_reg = cuda.local.array(ROWS, float32)
    m_reg = cuda.local.array(ROWS, float32)
    l_reg = cuda.local.array(ROWS, float32)
    rescale_reg = cuda.local.array(ROWS, float32)
    O_reg = cuda.local.array(WARP_ROWS, float32)

    load_rows(Q_smem, Q[:, head], first_row, ROWS)
    for row in range(ROWS):
        m_reg[row] = NEG_INF
        l_reg[row] = float32(0.0)
    for i in range(WARP_ROWS):
        O_reg[i] = float32(0.0)

    for first_key in range(0, seqlen_k, KEYS):
        load_rows(K_smem, K[:, kv_head], first_key, KEYS)
        load_rows(V_smem, V[:, kv_head], first_key, KEYS)
        # Each warp reads what both warps have loaded.
        cuda.syncthreads()
        own_keys = SLICE * warp
        for row in range(ROWS):
            s = score(Q_smem, K_smem, row, own_keys + lane, seqlen_k - first_key)
            S_reg[row] = softmax_scale * s
            m = warp_max(S_reg[row])
            if lane == 0:
                max_smem[warp, row] = m
        # A row's maximum is known when all warps have stored theirs.
        cuda.syncthreads()
        for row in range(ROWS):
            m = m_reg[row]
            for w in range(WARPS):
                m = max(m, max_smem[w, row])
            rescale_reg[row] = math.exp(m_reg[row] - m)
            p = math.exp(S_reg[row] - m)
            l_reg[row] = rescale_reg[row] * l_reg[row] + warp_sum(p)
            m_reg[row] = m
            partial_smem[warp, row, lane] = weighted_values(p, V_smem, own_keys)
        # A row of O is known when all warps have stored their parts.
        cuda.syncthreads()
        for i in range(WARP_ROWS):
            row = WARP_ROWS * warp + i
            O_reg[i] = rescale_reg[row] * O_reg[i]
            for w in range(WARPS):
                O_reg[i] += partial_smem[w, row, lane]
        # The next tile overwrites what a slower warp still reads.
        cuda.syncthreads()

    for row in range(ROWS):
        if lane == 0:
            sum_smem[warp, row] = l_reg[row]
    # A row's sum is known when all warps have stored their parts.
    cuda.syncthreads()
    for i in range(WARP_ROWS):
        row = WARP_ROWS * warp + i
        if first_row + row < O.shape[0] and lane < O.shape[2]:
            l = float32(0.0)
            for w in range(WARPS):
                l += sum_smem[w, row]
            O[first_row + row, head, lane] = O_reg[i] / l
