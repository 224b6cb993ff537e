"""Small kernels that lessons show, run and break; the ladder's are in `fa2_numba.kernels`."""
