"""Lesson 07's figures: owners as the registers of a run have them, costs as formulas say."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.figures import tile_owners
from fa2_numba.lessons.figures.split_q import split_q_contrast
from fa2_numba.lessons.figures.split_q_film import (
    EARLIER,
    NEW,
    Film,
    describe,
    draw_films,
    follow_tile,
)
from fa2_numba.lessons.figures.tile_owners import (
    CONFIG,
    PARTIAL,
    RUNGS,
    SLICED_K,
    SPLIT_Q,
    STATISTICS,
    TILES,
    tile_cost,
    who_holds,
)
from fa2_numba.problem import Problem
from fa2_numba.traffic import predict

NAMES = {SLICED_K: "fa2_seq_parallel", SPLIT_Q: "fa2_split_q"}
partitions = pytest.mark.parametrize("partition", RUNGS)


def test_sliced_k_warps_hold_columns_of_S_and_parts_of_all_of_O():
    owners = who_holds(SLICED_K)
    wanted = np.repeat(np.arange(4), CONFIG.block_n // 4)
    assert (owners.S == wanted).all()
    assert owners.parts.shape == (4, CONFIG.block_m, CONFIG.head_dim) and owners.parts.all()
    assert np.bincount(owners.O.ravel()).tolist() == [owners.O.size // 4] * 4


def test_split_q_warps_hold_rows_of_S_and_the_same_rows_of_O():
    owners = who_holds(SPLIT_Q)
    wanted = np.repeat(np.arange(4), CONFIG.block_m // 4)[:, None]
    assert (owners.S == wanted).all() and (owners.O == wanted).all()
    assert not owners.parts.any()


@partitions
def test_a_tile_costs_what_the_closed_forms_say(partition):
    one, two = (
        predict(NAMES[partition], Problem(1, 1, 1, CONFIG.block_m, keys, CONFIG.head_dim), CONFIG)
        for keys in (CONFIG.block_n, 2 * CONFIG.block_n)
    )
    cost = tile_cost(partition)
    assert sum(cost.written.values()) == two.shared_store_bytes - one.shared_store_bytes
    assert sum(cost.read.values()) == two.shared_load_bytes - one.shared_load_bytes
    assert cost.barriers == two.barriers - one.barriers


def test_only_sliced_k_exchanges_anything():
    sliced, split = tile_cost(SLICED_K), tile_cost(SPLIT_Q)
    assert sliced.written[TILES] == split.written[TILES] > 0
    for purpose in (PARTIAL, STATISTICS):
        assert sliced.written[purpose] > 0 == split.written[purpose]
        assert sliced.read[purpose] > 0 == split.read[purpose]


def test_a_statement_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr(tile_owners, "PURPOSES", {"load_q_tile(": (TILES, None)})
    simulation, arguments = tile_owners.launched(SPLIT_Q, *tile_owners.random_inputs(1))
    with pytest.raises(ValueError, match="must have one statement of PURPOSES"):
        tile_owners.bytes_by_purpose(simulation(*arguments))


@partitions
def test_frames_stop_at_each_barrier_with_two_and_with_all_warps(partition):
    frames = follow_tile(partition)
    barriers = [frame for frame in frames if frame.when.startswith("barrier")]
    assert [frame.waiting for frame in barriers] == [(0, 1), (0, 1, 2, 3)] * (len(barriers) // 2)
    assert len(barriers) == 2 * tile_cost(partition).barriers
    last = barriers[-1].arrays
    assert {"Q", "K", "V"} <= set(last)
    assert all((last[name] >= EARLIER).all() for name in "QKV")


def test_partial_O_is_new_at_the_third_barrier_of_sliced_k_alone():
    new = [(frame.arrays["partial"] == NEW).any() for frame in follow_tile(SLICED_K)]
    assert new == [False] * 4 + [True] * 2 + [False] * 2
    assert all("partial" not in frame.arrays for frame in follow_tile(SPLIT_Q))


def test_films_can_be_read_without_pictures():
    frames = follow_tile(SPLIT_Q)
    film = Film("split-Q", frames)
    assert all(describe(frame) in film._repr_html_() for frame in frames)
    assert "<script" not in film._repr_html_()
    assert describe(frames[1]) == (
        "Barrier 1: all have come; warps waiting: 0, 1, 2, 3; newly written: Q whole."
    )
    assert describe(frames[1]) in draw_films({"split-Q": frames}).alt
    with pytest.raises(ValueError, match="at least one"):
        draw_films({})


def test_the_contrast_says_what_it_shows():
    picture = split_q_contrast()
    assert "sliced-K: a row of S lies in 4 warps, a column in 1;" in picture.alt
    assert "split-Q: a row of S lies in 1 warp, a column in 4;" in picture.alt
    assert picture.numbers[SPLIT_Q]["barriers"] == 2
