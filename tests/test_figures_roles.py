"""Lesson 13's model: who waits for whom, in time, from what warpgroups did in the simulator."""

import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.figures.roles import draw_roles
from fa2_numba.lessons.roles import LESSON_TILES, PRODUCER, Durations, record_calls, schedule

SEQLEN = 128
TILES = (SEQLEN // LESSON_TILES.block_m) * (SEQLEN // LESSON_TILES.block_n)


@pytest.fixture(scope="module")
def calls():
    return record_calls(SEQLEN)


@pytest.fixture(scope="module")
def run(calls):
    return schedule(calls)


def of(run, lane, group):
    return [step for step in run.steps if (step.lane, step.group) == (lane, group)]


def test_every_tile_is_loaded_and_multiplied_by_both_consumers(run):
    # A tile of Q, and K and V of each tile of keys; all are one piece of 64 columns.
    assert len(of(run, "copies", PRODUCER)) == 1 + 2 * TILES
    for consumer in (1, 2):
        products = [step.what for step in of(run, "tensor cores", consumer)]
        assert products.count("S = Q Kᵀ") == products.count("O += P V") == TILES
        softmaxes = [step for step in of(run, f"consumer {consumer}", consumer)]
        assert [step.what for step in softmaxes].count("softmax") == TILES


def test_one_unit_does_one_thing_at_a_time(run):
    for lane in ("copies", "tensor cores", "consumer 1", "consumer 2"):
        steps = sorted((s.start, s.end) for s in run.steps if s.lane == lane)
        assert all(end <= start for (_, end), (start, _) in zip(steps, steps[1:], strict=False))
    durations = Durations()
    for step in run.steps:
        if step.lane == "tensor cores":
            assert step.end - step.start == durations.product


def test_softmax_comes_after_its_scores_and_values_after_their_softmax(run):
    for consumer in (1, 2):
        products = of(run, "tensor cores", consumer)
        scores = [step for step in products if step.what.startswith("S")]
        values = [step for step in products if step.what.startswith("O")]
        softmaxes = [s for s in of(run, f"consumer {consumer}", consumer) if s.what == "softmax"]
        for score, softmax, value in zip(scores, softmaxes, values, strict=True):
            assert score.end <= softmax.start and softmax.end <= value.start


def test_overlap_issues_the_next_scores_before_the_values(run):
    order = [step.what[0] for step in of(run, "tensor cores", 1)]
    assert order == ["S", *["S", "O"] * (TILES - 1), "O"]
    alone = schedule(record_calls(SEQLEN, overlap=False))
    assert [s.what[0] for s in of(alone, "tensor cores", 1)] == ["S", "O"] * TILES


def test_a_slower_copy_makes_a_longer_run(calls, run):
    slow = schedule(calls, Durations(load=40.0))
    assert slow.span > run.span + 30
    nothing_else = Durations(0.0, 0.0, 2.0, 0.0, 0.0, 0.0)
    assert schedule(calls, nothing_else).busy == pytest.approx(1.0)


def test_what_hides_is_what_the_lesson_says():
    variants = ({"num_consumers": 1, "overlap": False}, {"num_consumers": 1}, {})
    runs = [schedule(record_calls(SEQLEN, **flags)) for flags in variants]
    assert runs[0].hidden() == 0
    assert runs[0].busy < runs[1].busy < runs[2].busy
    assert runs[0].hidden() < runs[1].hidden() < runs[2].hidden()


def test_a_causal_run_waits_for_nobody_who_does_not_come():
    causal = schedule(record_calls(2 * SEQLEN, causal=True))
    assert 0 < causal.busy < 1


def test_the_chart_says_what_it_shows(run):
    picture = draw_roles({"two": run})
    assert f"tensor cores busy {run.busy:.0%}" in picture.alt
    assert len(picture.numbers["two"]["steps"]) == len(run.steps)
    assert picture.numbers["two"]["span"] == run.span
    with pytest.raises(ValueError, match="at least one"):
        draw_roles({})
