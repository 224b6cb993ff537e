"""Layouts of tensor-core tiles: every element of a tile is somewhere, once; examples run."""

import doctest
import itertools

import pytest

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import layouts
from fa2_numba.device.layouts import (
    a_matrix_row,
    ac_element,
    b_element,
    b_matrix_row,
    matrix_element,
)


def all_lanes(element, rows, cols):
    """Where the elements of what all lanes hold lie: rows x cols of each lane."""
    places = itertools.product(range(WARP_SIZE), range(rows), range(cols))
    return sorted(element(*place) for place in places)


def matrix(rows, cols):
    return list(itertools.product(range(rows), range(cols)))


@pytest.mark.parametrize(
    ("element", "held", "tile"),
    [
        pytest.param(ac_element, (2, 4), (16, 16), id="A"),
        pytest.param(ac_element, (2, 2), (16, 8), id="C-or-A-of-k8"),
        pytest.param(ac_element, (4, 8), (32, 32), id="four-tiles-of-A"),
        pytest.param(b_element, (4, 1), (16, 8), id="B"),
        pytest.param(b_element, (2, 1), (8, 8), id="B-of-k8"),
        pytest.param(b_element, (4, 2), (16, 16), id="two-tiles-of-B"),
    ],
)
def test_lanes_hold_each_element_once(element, held, tile):
    assert all_lanes(element, *held) == matrix(*tile)


def test_lanes_hold_each_element_of_a_matrix_once():
    held = itertools.product(range(WARP_SIZE), range(2))
    assert sorted(matrix_element(*place) for place in held) == matrix(8, 8)


@pytest.mark.parametrize("matrix_row", [a_matrix_row, b_matrix_row])
def test_lanes_point_to_each_row_of_each_matrix_once(matrix_row):
    assert sorted(map(matrix_row, range(WARP_SIZE))) == matrix(16, 2)


@pytest.mark.parametrize(
    ("matrix_row", "element", "transposed"),
    [
        pytest.param(a_matrix_row, ac_element, False, id="A"),
        pytest.param(b_matrix_row, b_element, True, id="B"),
    ],
)
def test_matrices_come_in_the_order_of_the_registers(matrix_row, element, transposed):
    """`ldmatrix` x4 from these rows leaves each lane with the elements that the layout says.

    The four registers of A go down before they go right; those of two tiles of B go down, tile by
    tile, each a pair of rows.
    """
    for lane, q, e in itertools.product(range(WARP_SIZE), range(4), range(2)):
        row_in_matrix, col_in_matrix = matrix_element(lane, e)
        row, chunk = matrix_row(8 * q + row_in_matrix)
        loaded = row, 8 * chunk + col_in_matrix
        i, j = (2 * (q % 2) + e, q // 2) if transposed else (q % 2, 2 * (q // 2) + e)
        expected = element(lane, i, j)
        assert loaded == (expected[::-1] if transposed else expected)


def test_the_examples_run():
    result = doctest.testmod(layouts)
    assert result.failed == 0 and result.attempted >= 5
