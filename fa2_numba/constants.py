"""Numbers that more than one module needs, each defined once with its reason."""

import math

import numpy as np

NEG_INF = np.float32(-math.inf)
"""The score of a key that a query may not see. A true infinity: its exponential is exactly 0."""

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF
"""All 32 lanes of a warp take part in a shuffle or vote."""

SECTOR_BYTES = 32
"""What global memory moves at a time; four sectors are a cache line."""

NUM_BANKS = 32
BANK_BYTES = 4
"""Shared memory has 32 banks; consecutive words of 4 bytes lie in consecutive banks."""

KIB = 1024
STATIC_SHARED_BYTES = 48 * KIB
"""A block may use so much without opting in to more; static arrays can never exceed it."""

MAX_THREADS_PER_BLOCK = 1024
MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535
MAX_HEAD_DIM = 256

SHARED_BYTES_PER_BLOCK = {
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
"""Opt-in shared memory of one thread block by compute capability (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"). A GPU is asked; the simulator looks here."""

LOG2_E = np.float32(math.log2(math.e))
"""exp(x) = 2^(LOG2_E x): a GPU computes powers of 2."""
LN_2 = np.float32(math.log(2))
"""ln x = LN_2 log2 x."""
