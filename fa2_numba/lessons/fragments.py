"""What each lane of a warp holds of the matrices of an `mma`, from the functions of `layouts`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.layouts import ac_element, b_element


class Holding(NamedTuple):
    """Neighbouring elements that one lane holds: two 16-bit ones in a register, or two registers.

    register: its place, or their places, in the lane's array, as kernels write it.
    """

    lane: int
    register: str
    cells: tuple[tuple[int, int], ...]


def mma_fragments() -> dict[str, list[Holding]]:
    """C, A and B of `mma` m16n8k16 by name.

    >>> mma_fragments()["A"][3]
    Holding(lane=0, register='A[1, 1]', cells=((8, 8), (8, 9)))
    """
    return {
        "C": _holdings(ac_element, (2, 1), (1, 2), lambda i, j: f"C[{i}, 0] C[{i}, 1]"),
        "A": _holdings(ac_element, (2, 2), (1, 2), lambda i, j: f"A[{i}, {j}]"),
        "B": _holdings(b_element, (2, 1), (2, 1), lambda i, j: f"B[{i}, {j}]"),
    }


def _holdings(
    element: Callable,
    places: tuple[int, int],
    pair: tuple[int, int],
    name: Callable[[int, int], str],
) -> list[Holding]:
    """All that the lanes hold: rows and columns of places, each with a pair of elements."""
    lanes = product(range(WARP_SIZE), *map(range, places))
    offsets = list(product(*map(range, pair)))
    return [
        Holding(
            lane,
            name(i, j),
            tuple(element(lane, pair[0] * i + di, pair[1] * j + dj) for di, dj in offsets),
        )
        for lane, i, j in lanes
    ]
