"""Lesson 12's figures: weights from a kernel's LSE are those of exact attention."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.exercises.lesson_12 import Case, cases
from fa2_numba.lessons.exercises.lesson_12 import shares as first_shares
from fa2_numba.lessons.figures.real_heads import (
    NEAR,
    draw_maps,
    draw_overlap,
    draw_shares,
    overlap,
    run_layer,
    shares,
)


@pytest.fixture(scope="module")
def heads():
    return run_layer(15, tokens=12)


def exact_weights(heads):
    K = np.repeat(heads.k, heads.group, axis=1)
    S = np.einsum("qhd,khd->hqk", heads.q, K) / 8
    S[:, ~np.tri(len(heads.q), dtype=bool)] = -np.inf
    P = np.exp(S - S.max(axis=2, keepdims=True))
    return P / P.sum(axis=2, keepdims=True)


def test_weights_are_those_of_the_definition(heads):
    assert heads.group == 3 and heads.lse.shape == (9, 12)
    np.testing.assert_allclose(heads.weights, exact_weights(heads), rtol=1e-5, atol=1e-9)


def test_shares_are_of_the_first_key_of_near_ones_and_of_the_rest(heads):
    P = exact_weights(heads)
    given = shares(heads)
    np.testing.assert_allclose(given.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(given[:, 0], P[:, :, 0].mean(axis=1), rtol=1e-5)
    near = [[P[h, i, max(1, i - NEAR + 1) : i + 1].sum() for i in range(12)] for h in range(9)]
    np.testing.assert_allclose(given[:, 1], np.mean(near, axis=1), rtol=1e-5)


def test_a_head_agrees_with_itself(heads):
    same = overlap(heads)
    np.testing.assert_allclose(np.diagonal(same), 1, rtol=1e-5)
    np.testing.assert_array_equal(same, same.T)
    assert (same[~np.eye(9, dtype=bool)] < 1).all()


def test_pictures_say_what_they_show(heads):
    assert "layer 15: " in draw_shares([heads]).alt
    first = shares(heads)[6, 0]
    assert f"a sink: {first:.0%} to the first token" in draw_maps({"a sink": (heads, 6)}, 8).alt
    assert "share a key-value head" in draw_overlap(heads).alt


def test_cases_of_the_exercise_have_one_head_that_scores_alone_do_not_find():
    for case in cases():
        found = first_shares(case)
        assert len(found) == 1 or np.sort(found)[-1] - np.sort(found)[-2] > 0.01, case.name
    fooled = [case for case in cases() if first_shares(case).argmax() != raw_scores(case).argmax()]
    assert len(fooled) >= 4


def raw_scores(case: Case):
    K = np.repeat(case.k[0], case.q.shape[1] // case.k.shape[1], axis=0)
    return np.einsum("nhd,hd->hn", case.q, K).mean(axis=1)
