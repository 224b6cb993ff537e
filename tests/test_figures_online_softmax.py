"""Lesson 02's figure shows what the kernel's registers held; parts merge as the oracle says."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.exercises.lesson_02 import part_of, worked_example
from fa2_numba.lessons.figures.online_softmax import BLOCK_N, draw_row, follow_row


@pytest.fixture(scope="module")
def run():
    return follow_row(layer=0, head=3, token=20)


def test_scores_are_those_of_the_definition(run):
    assert run.S.shape == (21,) and len(run.tokens) == 21
    whole = part_of(run.S[None].astype(np.float64), run.V.astype(np.float64))
    assert run.lse == pytest.approx((whole.m + np.log(whole.l)).item(), rel=1e-6)
    np.testing.assert_allclose(run.out, (whole.o / whole.l[:, None])[0], rtol=1e-4, atol=1e-6)


def test_m_l_and_O_after_each_tile_are_those_of_the_keys_seen_so_far(run):
    assert (run.m[0], run.l[0]) == (-np.inf, 0) and not run.O[0].any()
    for tile in range(1, len(run.m)):
        seen = slice(0, tile * BLOCK_N)
        part = part_of(run.S[None, seen].astype(np.float64), run.V[seen].astype(np.float64))
        assert run.m[tile] == part.m[0]
        assert run.l[tile] == pytest.approx(part.l[0], rel=1e-5)
        np.testing.assert_allclose(run.O[tile], part.o[0], rtol=1e-4, atol=1e-5)


def test_factors_are_those_of_the_maxima(run):
    assert run.factors[0] == 0 and (run.factors[1:] < 1).any()
    np.testing.assert_allclose(run.factors, np.exp(run.m[:-1] - run.m[1:]), rtol=1e-6)
    np.testing.assert_array_equal(run.factors[1:] < 1, np.diff(run.m[1:]) > 0)


def test_l_is_what_is_kept_and_what_is_added(run):
    for tile, added in enumerate(run.added):
        S = run.S[tile * BLOCK_N : (tile + 1) * BLOCK_N]
        assert added == pytest.approx(np.exp(S - run.m[tile + 1]).sum(), rel=1e-5)


def test_the_picture_says_when_it_rescales(run):
    picture = draw_row(run)
    for tile, factor in enumerate(run.factors[1:], start=2):
        assert (f"tile {tile} rescales by {factor:.2f}" in picture.alt) == (factor < 1)
    assert picture.numbers["m"] == run.m[1:].tolist()
    assert picture.numbers["factors"] == run.factors.tolist()


def test_the_worked_example_is_the_lesson_s():
    case = worked_example()
    parts = [part_of(case.S[:, keys], case.V[keys]) for keys in (slice(2), slice(2, 4), slice(4))]
    found = [[m / np.log(2), l, o] for m, l, o in ([x.item() for x in part] for part in parts)]
    assert found == [pytest.approx(row) for row in ([2, 1.5, 25], [3, 1.125, 35], [3, 1.875, 47.5])]
