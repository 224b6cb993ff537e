"""Verbs that the rungs share: device functions, each about one concept.

They are inlined into the kernel that calls them (`inline="always"`), so that local arrays passed to
them stay in registers.
"""

from numba import cuda

device_function = cuda.jit(device=True, inline="always")
"""Decorator of every verb."""
