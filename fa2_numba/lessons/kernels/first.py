"""Lesson 00: copy an array, an element a thread."""

from numba import cuda


@cuda.jit
def copy_without_tail(source, target):
    """Right only if the launch has as many threads as the arrays have elements."""
    i = cuda.grid(1)
    target[i] = source[i]


@cuda.jit
def double(source, target):
    """The threads past the end of the arrays do nothing."""
    i = cuda.grid(1)
    if i < source.size:
        target[i] = 2 * source[i]
