"""What judges of exercises share: inputs whose values name their places, comparisons in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
from numba.cuda.dispatcher import CUDADispatcher

from fa2_numba.lessons.exercises.exercise import NotSolved
from fa2_numba.simulator import Report, simulate

SEEDS = (None, 1, 2)
"""Orders in which ready threads run: by index until a barrier, and two shuffled ones."""
MAX_SECONDS = 60.0
SHOWN_PLACES = 3
NO_NUMBERS = "cOSU"
"""Kinds of dtype: complex numbers, objects and texts."""


def run(
    kernel: Callable,
    grid: object,
    threads: object,
    *arguments: object,
    shared_bytes: int = 0,
    seed: int | None = None,
) -> Report:
    """Simulate a student's kernel, counting; array arguments are changed in place.

    A plain function is refused, though the simulator could run it: a GPU could not.
    """
    if not isinstance(kernel, CUDADispatcher):
        raise NotSolved("It is a plain function: must be a kernel, with @cuda.jit above it.")
    simulation = simulate(kernel, seed=seed, max_seconds=MAX_SECONDS, progress=False)
    return simulation[grid, threads, 0, shared_bytes](*arguments)


def numbered(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """An array whose every element tells where it belongs: 1, 2, 3, ..."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


def poisoned(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """An array of NaN: what an answer does not write stays visible."""
    return np.full(shape, np.nan, dtype)


def expect_close(what: str, found: object, expected: np.ndarray, tolerance: float = 0.0) -> None:
    """NotSolved, with the first wrong places, unless |found - expected| <= tolerance everywhere."""
    expected = np.asarray(expected)
    found = _as_array(what, found)
    if found.shape != expected.shape:
        raise NotSolved(f"{what} has shape {found.shape}: must be {expected.shape}.")
    with np.errstate(invalid="ignore"):
        # Equal infinities differ by NaN, and a NaN is never right.
        right = (found == expected) | (np.abs(found - expected) <= tolerance)
    if right.all():
        return
    places = np.argwhere(~right)
    shown = "; ".join(
        (f"at {tuple(int(i) for i in place)} " if place.size else "")
        + _pair(found[tuple(place)], expected[tuple(place)])
        for place in places[:SHOWN_PLACES]
    )
    raise NotSolved(
        f"{what} is wrong in {len(places)} of {right.size} places: {shown}.{_nan(found)}"
    )


def _pair(found: float, expected: float) -> str:
    """Both numbers, with as many digits as tell them apart."""
    digits = 6 if f"{found:.6g}" != f"{expected:.6g}" else 17
    return f"{found:.{digits}g}, must be {expected:.{digits}g}"


def expect_equal(what: str, found: object, expected: object) -> None:
    """NotSolved with both values unless they are equal."""
    if not np.array_equal(found, expected):
        raise NotSolved(f"{what} is {found}: must be {expected}.")


def expect_counts(report: Report, names: Iterable[str], expected: Report, why: str) -> None:
    """NotSolved unless a kernel did as much as another one did, by these names of its report."""
    for name in names:
        count, wanted = getattr(report, name), getattr(expected, name)
        if count != wanted:
            raise NotSolved(
                f"The values are right, but {name} is {count:,}: must be {wanted:,}. {why}"
            )


def _as_array(what: str, found: object) -> np.ndarray:
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(found)
        if array.dtype.kind not in NO_NUMBERS:
            return array.astype(np.float64)
    raise NotSolved(f"{what} is a {type(found).__name__}: must be numbers.")


def _nan(found: np.ndarray) -> str:
    missing = int(np.isnan(found).sum())
    return (
        f" {missing} of them are NaN: never written, or computed from what was not."
        if missing
        else ""
    )
