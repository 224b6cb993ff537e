"""Lesson 06: what a kernel needs that only says which block owns which rows."""

from numba import cuda

from fa2_numba.device import device_function


@device_function
def block_number():
    """Number of this block in launch order: x runs fastest, then y, then z."""
    return cuda.blockIdx.x + cuda.gridDim.x * (cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z)
