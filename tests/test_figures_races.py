"""Lesson 03's figure shows what a run did, and finds the races that the simulator refuses."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.figures.accesses import record
from fa2_numba.lessons.figures.races import draw_race_timelines, racing_pairs, too_early
from fa2_numba.lessons.kernels.bugs import differences, differences_racy, reverse_tiles_racy
from fa2_numba.simulator import simulate

SEEDS = (None, 1, 2)
NEIGHBOURS = {(i, i + 1) for i in range(7)}


def recorded(kernel, seed=None, threads=8, size=8):
    source, target = np.arange(size, dtype=np.float32) ** 2, np.full(size, np.nan, np.float32)
    return record(simulate(kernel, seed=seed)[1, threads], source, target), target


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_pairs_race_in_every_order(seed):
    run, _ = recorded(differences_racy, seed)
    pairs = [(run[i], run[j]) for i, j in racing_pairs(run)]
    assert {tuple(sorted((a.thread, b.thread))) for a, b in pairs} == NEIGHBOURS
    assert all(a.element == b.element and a.stored != b.stored for a, b in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reads_that_are_too_early_are_the_wrong_answers(seed):
    run, target = recorded(differences_racy, seed)
    early = {run[position].thread for position in too_early(run)}
    assert early == set(np.flatnonzero(np.isnan(target)))
    assert bool(early) == (seed is not None)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_barrier_nothing_races(seed):
    run, target = recorded(differences, seed)
    assert not racing_pairs(run) and not too_early(run)
    assert [one.interval for one in run if one.space == "shared"] == [0] * 8 + [1] * 7
    assert np.array_equal(target, np.diff(np.arange(8) ** 2, prepend=0))


def test_a_write_after_a_read_is_a_race_too():
    run, _ = recorded(reverse_tiles_racy, threads=4)
    pairs = [(run[i], run[j]) for i, j in racing_pairs(run)]
    assert pairs and all({one.interval for one in pair} == {1} for pair in pairs)


def test_the_picture_says_what_it_shows():
    runs = {"racy": recorded(differences_racy, 1)[0], "with barrier": recorded(differences, 1)[0]}
    picture = draw_race_timelines(runs)
    numbers = picture.numbers
    assert [len(numbers[name]["races"]) for name in runs] == [7, 0]
    assert [numbers[name]["barriers"] for name in runs] == [0, 1]
    assert "pairs that race 7" in picture.alt and "<title>" in picture.svg


def test_what_cannot_be_drawn_or_recorded_is_refused():
    with pytest.raises(ValueError, match="must be at least one"):
        draw_race_timelines({})
    with pytest.raises(ValueError, match="one block with one shared array"):
        draw_race_timelines({"empty": []})
    launch = simulate(differences, checks=False)[1, 8]
    with pytest.raises(ValueError, match="checks=False: must be True"):
        record(launch, np.zeros(8, np.float32), np.zeros(8, np.float32))
