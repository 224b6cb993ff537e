"""Lesson 08's figures show what blocks did; its rules and judges agree with the oracle."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.exercises.lesson_08 import ALL, HIDDEN, PART, tile_kinds
from fa2_numba.lessons.figures.tile_maps import (
    FULL,
    MASK,
    SKIP,
    TILE,
    draw_head_maps,
    draw_tile_maps,
    follow_heads,
    follow_tiles,
)
from fa2_numba.lessons.kernels.visibility import (
    bottom_right_keys,
    dealt_out,
    neighbours,
    top_left_keys,
)
from fa2_numba.reference import visible

KINDS = {HIDDEN: SKIP, PART: MASK, ALL: FULL}


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [(12, 12, False), (16, 16, True), (9, 21, True), (21, 9, True), (1, 20, True)],
)
def test_a_run_loads_and_masks_what_the_oracle_s_mask_asks_for(seqlen_q, seqlen_k, causal):
    followed = follow_tiles(seqlen_q, seqlen_k, causal)
    wanted = [
        [KINDS[kind] for kind in tile_kinds(row, TILE, TILE, seqlen_q, seqlen_k, causal)]
        for row in range(0, seqlen_q, TILE)
    ]
    assert followed.kinds.tolist() == wanted
    picture = draw_tile_maps([followed])
    assert list(picture.numbers.values()) == [wanted]
    assert f"{followed.counts['loaded and masked']} loaded and masked" in picture.alt


def test_a_run_reads_the_heads_of_its_group():
    loaded = follow_heads(4, 2)
    assert loaded.tolist() == [[True, True, False, False], [False, False, True, True]]
    picture = draw_head_maps({"GQA": loaded})
    assert picture.numbers == {"GQA": [0, 0, 1, 1]} and "GQA: 0, 0, 1, 1." in picture.alt


def test_no_maps_are_refused():
    for draw, nothing in ((draw_tile_maps, []), (draw_head_maps, {})):
        with pytest.raises(ValueError, match="must be at least one"):
            draw(nothing)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 4), (3, 7), (7, 3)])
def test_the_rules_for_keys(seqlen_q, seqlen_k):
    seen = visible(seqlen_q, seqlen_k, causal=True).sum(axis=1).tolist()
    rules = [
        [rule.py_func(row, seqlen_q, seqlen_k) for row in range(seqlen_q)]
        for rule in (bottom_right_keys, top_left_keys)
    ]
    assert rules[0] == seen and (rules[1] == seen) == (seqlen_q == seqlen_k)


def test_the_rules_for_heads():
    assert [neighbours.py_func(head, 6, 2) for head in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [dealt_out.py_func(head, 6, 2) for head in range(6)] == [0, 1, 0, 1, 0, 1]
    assert np.array_equal([neighbours.py_func(head, 3, 3) for head in range(3)], [0, 1, 2])
