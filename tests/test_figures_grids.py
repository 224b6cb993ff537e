"""Lesson 06's figures show what the model and the recorded stamps say."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.config import TileConfig
from fa2_numba.lessons.figures.flops import run_rung
from fa2_numba.lessons.figures.grids import (
    GRIDS,
    busy_over_length,
    draw_lengths,
    draw_used,
    measured_timelines,
    picture_of,
    record_timelines,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.timeline import measured_costs, schedule
from fa2_numba.problem import Problem

TILES = TileConfig(64, 64, 64)


def test_recorded_timelines_are_the_stamps():
    for rung, timeline in measured_timelines().items():
        stamps = recorded("stamps")["timelines"][rung]
        assert timeline.blocks == len(stamps["start"]) and timeline.unit == "ms"
        span = (max(stamps["end"]) - min(stamps["start"])) / 1e6
        assert timeline.span == pytest.approx(span)
        assert timeline.multiprocessor.tolist() == stamps["multiprocessor"]


def test_a_picture_says_what_the_timelines_are():
    timeline = schedule([3, 1, 2], 2, 1, unit="s")
    picture = picture_of({"a": timeline, "b": schedule([9], 2, 1)}, "Title.")
    assert picture.numbers["a"]["span"] == 3 and picture.numbers["a"]["blocks"] == 3
    assert "Title. a: 3 blocks in 3 s, 100% of 2 multiprocessors busy" in picture.alt
    assert {axes.get_xlim() for axes in picture.figure.axes} == {(0, 9)}


def test_lengths_are_scheduled_block_by_block():
    picture = draw_lengths((128, 192), 2, TILES, multiprocessors=5)
    assert list(picture.numbers) == list(GRIDS)
    assert {n: one["blocks"] for n, one in picture.numbers["a block a head"].items()} == {
        "128": 2,
        "192": 2,
    }
    tiles = picture.numbers["a block a query tile"]["192"]
    assert (tiles["blocks"], tiles["span"]) == (6, 6)
    assert tiles["multiprocessors busy"] == pytest.approx(6 / 10)
    areas = [
        sum(
            np.ptp(bar[:, 0]) * np.ptp(bar[:, 1])
            for bar in patch.get_path().vertices.reshape(-1, 5, 2)
        )
        for axes in picture.figure.axes[:4]
        for patch in axes.patches
    ]
    # Two heads of 2 x 2 and of 3 x 3 pairs of tiles, in both grids.
    assert sum(areas) == 2 * 2 * (4 + 9)
    with pytest.raises(ValueError, match="lengths: must be at least one"):
        draw_lengths((), 2, TILES, 5)


def test_shares_come_from_the_model_and_dots_from_the_record():
    lengths = [64, 128, 256, 512]
    picture = draw_used(lengths, (16, 1), TILES, most_blocks=20)
    sizes = 132, 2
    for label, shares in picture.numbers["model"].items():
        heads, grid = label.replace("heads", "head").split(" head, ")
        assert shares == busy_over_length(grid, lengths, int(heads), TILES, sizes)
    assert len(picture.numbers["model"]) == 3
    for rung, timeline in measured_timelines().items():
        assert picture.numbers["measured"][rung] == timeline.mean_utilisation.multiprocessors


def test_the_two_grids_do_the_same_work_in_other_blocks():
    config, problem = TileConfig(16, 8, 8, 2), Problem(1, 2, 2, 20, 12, 16)
    head, tile = (
        measured_costs(run_rung(rung, problem, config))
        for rung in ("fa2_fewer_flops", "fa2_seq_parallel")
    )
    assert (len(head), len(tile)) == (2, 6) and head.sum() == tile.sum()


@pytest.mark.gpu
def test_timelines_of_this_machine():
    timelines = record_timelines(heads=2, seqlen=256)
    assert [timeline.blocks for timeline in timelines.values()][0] == 2
    assert all((one.end > one.start).all() for one in timelines.values())
