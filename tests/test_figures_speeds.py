"""Lesson 11's figures show records of one run, and the fake GPU's launches."""

import json

import pytest

pytest.importorskip("matplotlib")

from fa2_numba.lessons.figures.speeds import ORDERS, draw_orders, draw_speeds, run_orders, speeds
from fa2_numba.lessons.figures.textbook_roofline import RESULTS

PROBLEM = {"seqlen": 2048, "head_dim": 64, "dtype": "float16", "causal": False}


def test_speeds_are_those_of_the_records():
    found = speeds("forward", **PROBLEM)
    part = {"direction": "forward", "group": "paper"}.items()
    records = json.loads((RESULTS / "run.json").read_text())["records"]
    records = [record for record in records if part <= record.items()]
    wanted = {
        record["name"]: record["tflops"]
        for record in records
        if all(record[field] == value for field, value in PROBLEM.items())
    }
    assert {speed.name: speed.tflops for speed in found} == wanted
    assert [speed.tflops for speed in found] == sorted(wanted.values())
    assert all(speed.lowest <= speed.tflops <= speed.highest for speed in found)
    assert {speed.name for speed in found if speed.ours} == {"fa1_tensor_core", "fa2_tensor_core"}


@pytest.mark.parametrize("wanted", [{"seqlen": 7}, {"seqlen": 2048}])
def test_speeds_of_no_problem_or_of_several_are_refused(wanted):
    with pytest.raises(ValueError, match="must be one problem"):
        speeds("forward", **wanted)


def test_bars_say_what_they_show():
    picture = draw_speeds({"tensor cores": speeds("forward", **PROBLEM)})
    for name, tflops in picture.numbers["tensor cores"].items():
        assert f"{name} {tflops:.3g}" in picture.alt
    with pytest.raises(ValueError, match="at least one"):
        draw_speeds({})


def test_taking_turns_gives_the_ratio_and_one_after_the_other_does_not():
    gpus = run_orders(seed=6, rounds=60)
    assert list(gpus) == list(ORDERS)
    assert all(len(gpu.launches) == 120 for gpu in gpus.values())
    numbers = draw_orders(gpus).numbers
    apart, turns = (numbers[order]["mine"] / numbers[order]["peer"] for order in ORDERS)
    assert abs(turns / 1.2 - 1) < 0.03 < 0.1 < abs(apart / 1.2 - 1)
