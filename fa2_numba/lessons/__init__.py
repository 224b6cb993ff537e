"""What the lessons show: models of the hardware, measurements on it, and figures of both."""

from numba.cuda.core import config

# Small grids are the lessons' purpose; Numba would warn of each on a GPU.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
