"""Lesson 10's figures show what runs of the backward passes did, as closed forms and masks say."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba import Simulator, flash_attn_backward, flash_attn_func
from fa2_numba.backward_traffic import predict_backward
from fa2_numba.lessons.figures.backward_loops import (
    ADDED,
    FUSED,
    KEYS_ONLY,
    LADDER_TILES,
    QUERIES,
    READ,
    TILES,
    WRITTEN,
    Move,
    backward_bytes,
    backward_workspace,
    draw_backward_growth,
    draw_blocks,
    draw_loops,
    follow_backward,
    writers,
)
from fa2_numba.lessons.kernels.row_gradients import finite_differences
from fa2_numba.problem import Problem
from fa2_numba.reference import visible
from fa2_numba.testing import random_qkv

LENGTHS = [(16, 16, False), (13, 21, True), (21, 13, False)]


def seen_pairs(queries, keys, causal):
    """(query tile, key tile) where some query sees a key, without the package's bounds."""
    rows, cols = np.nonzero(visible(queries, keys, causal))
    tiles = zip(rows // TILES.block_m, cols // TILES.block_n, strict=True)
    return sorted({(int(i), int(j)) for i, j in tiles})


@pytest.mark.parametrize(("queries", "keys", "causal"), LENGTHS)
def test_blocks_visit_what_is_seen_and_gradients_come_from_their_owners(queries, keys, causal):
    runs = follow_backward(queries, keys, causal)
    pairs = seen_pairs(queries, keys, causal)
    for blocks in runs.values():
        assert sorted(pair for block in blocks for pair in block.pairs) == pairs
    once = dict.fromkeys(range(-(-keys // TILES.block_n)), 1)
    for name in (FUSED, KEYS_ONLY):
        assert writers(runs[name], "dK") == writers(runs[name], "dV") == once
    adds = {i: sum(i == row for row, _ in pairs) for i in range(-(-queries // TILES.block_m))}
    assert writers(runs[FUSED], "dQ") == adds and writers(runs[KEYS_ONLY], "dQ") == {}
    assert writers(runs[QUERIES], "dQ") == dict.fromkeys(adds, 1)


def test_a_block_of_keys_reads_two_numbers_a_row_and_no_o_or_p():
    block = follow_backward(16, 16, causal=True)[FUSED][1]
    assert block.owns_keys and block.pairs == [(1, 1)]
    visit = [Move(array, 1, READ) for array in ("K", "V", "Q", "dO", "lse", "D")]
    results = [Move("dQ", 1, ADDED), Move("dK", 1, WRITTEN), Move("dV", 1, WRITTEN)]
    assert set(block.moves) == {*visit, *results}


def test_pictures_say_what_they_show():
    runs = follow_backward(16, 16, causal=True)
    blocks = draw_blocks({"keys": runs[FUSED][0], "queries": runs[QUERIES][1]})
    assert blocks.numbers["keys"]["visits"] == [(0, 0), (1, 0)]
    assert ("dQ", 1, ADDED) in blocks.numbers["keys"]["moves"]
    assert "written: dQ 1." in blocks.alt and "adds" in blocks.svg
    loops = draw_loops(runs)
    assert loops.numbers[FUSED]["writers"]["dQ"] == {0: 1, 1: 2}
    assert "3 pairs in 2 blocks; dQ 1, 2, dK 1, 1, dV 1, 1" in loops.alt and "<title>" in loops.svg


def test_nothing_is_refused():
    for draw in (draw_blocks, draw_loops):
        with pytest.raises(ValueError, match="must be at least one"):
            draw({})
    with pytest.raises(ValueError, match="lengths: must be at least one"):
        draw_backward_growth(())


@pytest.mark.parametrize("deterministic", [False, True])
def test_bytes_over_n_are_what_the_simulator_counts(deterministic):
    q, k, v = random_qkv(1, 64, 64, 1, 1, LADDER_TILES.head_dim, np.float32)
    simulator = Simulator(checks=False, progress=False)
    options = {"rung": "fa2_split_q", "machine": simulator}
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    *_, report = flash_attn_backward(
        q, q, k, v, out, lse, deterministic=deterministic, report=True, **options
    )
    counted = report.global_load_bytes + report.global_store_bytes + 4 * report.atomics
    assert backward_bytes("fa2_split_q", deterministic, 64) == counted
    problem = Problem(1, 1, 1, 64, 64, LADDER_TILES.head_dim)
    counts = predict_backward("fa2_split_q", problem, LADDER_TILES, deterministic)
    assert counts.atomics == report.atomics == 64 * 64 * (not deterministic)


def test_memory_over_n():
    assert backward_workspace("standard", False, 128) == 2 * 4 * 128 * 128 + 4 * 128
    assert backward_workspace("fa2_split_q", False, 128) == 4 * 128 * 64 + 4 * 128
    assert backward_workspace("fa2_split_q", True, 128) == 4 * 128
    picture = draw_backward_growth((64, 256))
    moved = picture.numbers["moved"]["fa2_split_q, deterministic"]
    assert moved == [backward_bytes("fa2_split_q", True, n) for n in (64, 256)]


def test_finite_differences_are_slopes_and_put_back_what_they_change():
    x = np.arange(6.0).reshape(2, 3)
    slopes = finite_differences(lambda: float((x**2).sum()), x)
    np.testing.assert_allclose(slopes, 2 * np.arange(6.0).reshape(2, 3), rtol=0, atol=1e-8)
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))
