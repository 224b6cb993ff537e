"""Lesson 03: kernels with one bug each, and what they are like without it.

All of them take arrays of float32 and blocks of at most MAX_THREADS threads.
"""

from numba import cuda
from numba.cuda import float32

MAX_THREADS = 64
"""Elements of a shared tile, one for each thread."""


@cuda.jit
def differences_racy(source, target):
    """target[i] = source[i] - source[i - 1], one block; source[0] stays. It lacks a barrier."""
    tile = cuda.shared.array(MAX_THREADS, float32)
    t = cuda.threadIdx.x
    own = source[t]
    tile[t] = own
    if t > 0:
        own -= tile[t - 1]
    target[t] = own


@cuda.jit
def differences(source, target):
    """target[i] = source[i] - source[i - 1], one block; source[0] stays."""
    tile = cuda.shared.array(MAX_THREADS, float32)
    t = cuda.threadIdx.x
    own = source[t]
    tile[t] = own
    # Each thread reads what its neighbour has written.
    cuda.syncthreads()
    if t > 0:
        own -= tile[t - 1]
    target[t] = own


@cuda.jit
def reverse_tiles_racy(source, target):
    """Reverses each tile of as many elements as the one block has threads. It lacks a barrier."""
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, threads = cuda.threadIdx.x, cuda.blockDim.x
    for first in range(0, source.size, threads):
        tile[t] = source[first + t]
        # Each thread reads what another one has written.
        cuda.syncthreads()
        target[first + t] = tile[threads - 1 - t]


@cuda.jit
def differences_divergent(source, target):
    """The differences within each block. Threads past the end miss the barrier."""
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i < source.size:
        own = source[i]
        tile[t] = own
        # Each thread reads what its neighbour has written.
        cuda.syncthreads()
        if t > 0:
            own -= tile[t - 1]
        target[i] = own


@cuda.jit
def maxima_without_tail(source, target):
    """target[b] = the maximum of block b's elements. Elements past the end are never written."""
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    if i < source.size:
        tile[t] = source[i]
    # Each thread reads what another one has written.
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if t < half:
            tile[t] = max(tile[t], tile[t + half])
        # The next step reads the maxima of this one.
        cuda.syncthreads()
        half = half // 2
    if t == 0:
        target[cuda.blockIdx.x] = tile[0]
