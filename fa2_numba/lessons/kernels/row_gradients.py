"""Lesson 10: gradients of one head without a matrix, a thread a query, and how to check them."""

import math
from collections.abc import Callable

import numpy as np
from numba import cuda, float32

STEP = 1e-5


@cuda.jit
def row_gradients(Q, K, V, dO, LSE, D, dQ, dK, dV, scale):
    """Q, dO, dQ (queries, d); K, V, dK, dV (keys, d); LSE, D (queries,); all float32.

    dQ, dK and dV must be 0. Right if D = rowsum(dO o O); slow, for it reads all of K and V again
    for every query.
    """
    i = cuda.grid(1)
    if i < Q.shape[0]:
        for j in range(K.shape[0]):
            s = float32(0.0)
            dP = float32(0.0)
            for d in range(Q.shape[1]):
                s += Q[i, d] * K[j, d]
                dP += dO[i, d] * V[j, d]
            p = math.exp(scale * s - LSE[i])
            dS = p * (dP - D[i])
            for d in range(Q.shape[1]):
                dQ[i, d] += scale * dS * K[j, d]
                # Other threads add to the same rows.
                cuda.atomic.add(dK, (j, d), scale * dS * Q[i, d])
                cuda.atomic.add(dV, (j, d), p * dO[i, d])


def finite_differences(loss: Callable[[], float], x: np.ndarray, step: float = STEP) -> np.ndarray:
    """How steeply `loss` grows with each element of x (float64), from two values of it for each.

    `loss` reads x, whose elements are changed one by one, and put back.
    """
    slopes = np.empty_like(x)
    for index in np.ndindex(x.shape):
        old = x[index]
        x[index] = old + step
        above = loss()
        x[index] = old - step
        slopes[index] = (above - loss()) / (2 * step)
        x[index] = old
    return slopes
