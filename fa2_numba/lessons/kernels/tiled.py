"""Lesson 04: what a small FlashAttention-1 kernel needs besides its inner loop."""

from numba import cuda

from fa2_numba.device import device_function

KEYS = 8
"""Rows of a tile of K or V (the paper's B_c)."""
HEAD_DIM = 8
"""Columns of Q, K, V and O."""


@device_function
def load_rows(tile, X_gmem, first_row):
    """Copy rows first_row, ... of X (rows, HEAD_DIM) to a tile (KEYS, HEAD_DIM), all threads.

    Rows past the end of X are left as they are.
    """
    rows = min(KEYS, X_gmem.shape[0] - first_row)
    for element in range(cuda.threadIdx.x, rows * HEAD_DIM, cuda.blockDim.x):
        row, d = element // HEAD_DIM, element % HEAD_DIM
        tile[row, d] = X_gmem[first_row + row, d]
