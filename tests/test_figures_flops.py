"""Lesson 05's figures show what runs counted, as the closed forms say."""

import pytest

pytest.importorskip("matplotlib")

from fa2_numba.config import TileConfig
from fa2_numba.lessons.figures.flops import (
    PerScore,
    draw_costs,
    draw_other_flops,
    first_fewer,
    predicted,
    simulated,
)

RUNGS = ("fa1_sliced_k", "fa2_fewer_flops")
TILES = TileConfig(head_dim=16, block_m=8, block_n=16, num_warps=2)
LENGTHS = [16 * n for n in range(1, 20)]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("keys", [16, 40])
def test_a_simulated_run_counts_what_the_closed_form_says(rung, keys):
    assert simulated(rung, keys, TILES) == predicted(rung, keys, TILES)


def test_rows_of_a_tile_do_not_matter_for_a_score():
    wide = TileConfig(head_dim=64, block_m=64, block_n=64)
    narrow = TileConfig(head_dim=64, block_m=16, block_n=64)
    for rung in RUNGS:
        assert predicted(rung, 256, wide) == predicted(rung, 256, narrow)


def test_bars_are_the_counts_and_their_weights():
    run = PerScore(matmul=200, other=10, exp=2.5)
    assert run.weighted(16) == {"matmul": 200, "other": 160, "exp": 40}
    picture = draw_costs({"a": run}, 16, "title")
    counted, weighted = picture.figure.axes
    assert [bar.get_width() for bar in counted.patches] == [200, 10, 2.5]
    assert [bar.get_width() for bar in weighted.patches] == [200, 160, 40]
    assert weighted.texts[0].get_text() == "50% not matmul"
    assert picture.numbers == {"a": [200, 10, 2.5]}
    assert "6% not matmul as counted and 50% if each costs 16" in picture.alt
    with pytest.raises(ValueError, match="runs: must be at least one"):
        draw_costs({}, 16, "title")


def test_curves_are_the_closed_forms_and_dots_the_runs():
    runs = {rung: {16: simulated(rung, 16, TILES)} for rung in RUNGS}
    picture = draw_other_flops(RUNGS, LENGTHS, TILES, runs)
    for rung in RUNGS:
        line = [predicted(rung, keys, TILES).other for keys in LENGTHS]
        assert picture.numbers["other FLOPs"][rung] == line
        assert picture.numbers["simulated"][rung] == {16: line[0]}
    change = picture.numbers["change in %"]
    first, ratio = first_fewer(RUNGS, LENGTHS, TILES)
    place = LENGTHS.index(first)
    assert min(change[:place]) >= 0 > change[place] == pytest.approx(100 * (ratio - 1))
    with pytest.raises(ValueError, match="fa2_fewer_flops needs fewer other FLOPs at none of them"):
        first_fewer(RUNGS, LENGTHS[:1], TILES)
