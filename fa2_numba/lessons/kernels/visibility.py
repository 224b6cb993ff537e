"""Lesson 08: attention a row at a time; its rules, for keys and for heads, can be exchanged."""

import math
from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.device import device_function
from fa2_numba.device.softmax import share


@device_function
def top_left_keys(i_row, seqlen_q, seqlen_k):
    """How many keys row i sees, the first row sees one: wrong unless lengths are equal."""
    return min(i_row + 1, seqlen_k)


@device_function
def bottom_right_keys(i_row, seqlen_q, seqlen_k):
    """How many keys row i sees, the last row seeing all."""
    return max(0, min(i_row + 1 + seqlen_k - seqlen_q, seqlen_k))


@device_function
def dealt_out(head, heads, kv_heads):
    """Query heads take key-value heads in turn: wrong unless each has its own or all share one."""
    return head % kv_heads


@device_function
def neighbours(head, heads, kv_heads):
    """heads / kv_heads consecutive query heads share a key-value head."""
    return head // (heads // kv_heads)


@cache
def make_row_attention(visible_keys: Callable, kv_head_of: Callable):
    """The kernel O = softmax(scale Q K^T) V under the two rules, a thread a row, a block a head.

    Arguments: Q, O (seqlen_q, heads, head_dim); K, V (seqlen_k, kv_heads, head_dim), float32;
    softmax_scale (float32). It subtracts no maximum: scores must be small.
    """

    def row_attention(Q, K, V, O, softmax_scale):
        i_row, head = cuda.threadIdx.x, cuda.blockIdx.x
        seqlen_q, heads, head_dim = Q.shape
        seqlen_k, kv_heads, _ = K.shape
        kv_head = kv_head_of(head, heads, kv_heads)
        keys = visible_keys(i_row, seqlen_q, seqlen_k)
        l = float32(0.0)
        for d in range(head_dim):
            O[i_row, head, d] = float32(0.0)
        for j_col in range(keys):
            s = float32(0.0)
            for d in range(head_dim):
                s += Q[i_row, head, d] * K[j_col, kv_head, d]
            p = math.exp(softmax_scale * s)
            l += p
            for d in range(head_dim):
                O[i_row, head, d] += p * V[j_col, kv_head, d]
        for d in range(head_dim):
            O[i_row, head, d] = share(O[i_row, head, d], l)

    return cuda.jit(row_attention)
