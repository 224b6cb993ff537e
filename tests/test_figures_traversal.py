"""Lesson 04's figures show what runs moved, as the closed forms say."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.config import DeviceLimits
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.ladder import RUNGS, tiles_for
from fa2_numba.lessons.figures.traversal import (
    LADDER_TILES,
    PARTS,
    TILES,
    draw_growth,
    draw_traversals,
    follow_visits,
    moved_bytes,
    workspace_bytes,
)
from fa2_numba.problem import Problem
from fa2_numba.traffic import predict

ORDERS = {
    "fa1_sliced_k": lambda m, n: [(i, j) for j in range(n) for i in range(m)],
    "fa2_fewer_flops": lambda m, n: [(i, j) for i in range(m) for j in range(n)],
}


@pytest.mark.parametrize("rung", ORDERS)
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (13, 21)])
def test_visits_are_in_order_and_move_what_the_closed_form_says(rung, queries, keys):
    visits = follow_visits(rung, queries, keys)
    order = [(visit.query_tile, visit.key_tile) for visit in visits]
    assert order == ORDERS[rung](-(-queries // 8), -(-keys // 8))
    counts = predict(rung, Problem(1, 1, 1, queries, keys, TILES.head_dim), TILES)
    assert sum(sum(visit.read.values()) for visit in visits) == counts.global_load_bytes
    assert sum(sum(visit.written.values()) for visit in visits) == counts.global_store_bytes
    assert not any(visit.written[part] for visit in visits for part in PARTS[:2])


def test_the_picture_of_visits_says_what_it_shows():
    visits = follow_visits("fa1_sliced_k", 16, 16)
    picture = draw_traversals({"fa1_sliced_k": visits})
    numbers = picture.numbers["fa1_sliced_k"]
    assert numbers["order"] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert np.count_nonzero(numbers["read"]["O, m, l"]) == 2
    assert np.count_nonzero(numbers["written"]) == 4
    assert "read in 2 visits and written in 4" in picture.alt and "<title>" in picture.svg


def test_growth_shows_the_ladder_s_tiles():
    limits = DeviceLimits((9, 0), SHARED_BYTES_PER_BLOCK[9, 0])
    assert tiles_for(RUNGS["fa1_sliced_k"], LADDER_TILES.head_dim, limits) == LADDER_TILES
    assert workspace_bytes("standard", 128) == 2 * 4 * 128 * 128
    assert workspace_bytes("fa1_sliced_k", 128) == 4 * (128 * 64 + 2 * 128)
    picture = draw_growth(("standard", "fa1_sliced_k", "fa2_fewer_flops"), (64, 256))
    assert picture.numbers["moved"]["standard"] == [moved_bytes("standard", n) for n in (64, 256)]
    assert picture.numbers["asked"]["fa2_fewer_flops"] == [0, 0]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="must be at least one"):
        draw_traversals({})
    with pytest.raises(ValueError, match="must be at least one each"):
        draw_growth((), (64,))
    with pytest.raises(ValueError, match="must be at most 3"):
        draw_growth(("standard",) * 4, (64,))
    with pytest.raises(ValueError, match="rung='standard': must compute a head in one block"):
        follow_visits("standard", 8, 8)
    with pytest.raises(ValueError, match="rung='fa2_split_q': must compute a head in one block"):
        follow_visits("fa2_split_q", 16, 8)
