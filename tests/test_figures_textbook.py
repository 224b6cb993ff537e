"""Lesson 01's figures show what the simulator counted and what was measured."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa2_numba import flash_attn_func
from fa2_numba.lessons.exercises.lesson_01 import SIMULATED, simulated_standard
from fa2_numba.lessons.figures.textbook import bytes_by_array, draw_levels
from fa2_numba.lessons.figures.textbook_roofline import (
    Dot,
    draw_roofline,
    intensity,
    measured_dots,
    recorded,
)
from fa2_numba.simulator import Simulator
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict


def report_of(rung, seqlen):
    q, k, v = random_qkv(1, seqlen, seqlen, 1, 1, 16, np.float32)
    machine = Simulator(checks=False, progress=False)
    return flash_attn_func(q, k, v, rung=rung, machine=machine, report=True)[1]


@pytest.fixture(scope="module")
def runs():
    return {rung: {16: report_of(rung, 16)} for rung in ("standard", "fa2_split_q")}


def test_the_arrays_share_all_bytes_of_hbm(runs):
    for rung, reports in runs.items():
        moved = bytes_by_array(reports[16])
        assert sum(read for read, _ in moved.values()) == reports[16].global_load_bytes
        assert sum(written for _, written in moved.values()) == reports[16].global_store_bytes
        assert ("S" in moved) == ("P" in moved) == (rung == "standard")


def test_a_line_that_names_no_array_is_refused(runs):
    report = runs["standard"][16]
    line = next(line for line in report.lines if line.traffic.global_load_bytes)
    with pytest.raises(ValueError, match="must name one array"):
        bytes_by_array(replace(report, lines=(replace(line, line=1),)))


def test_bars_are_as_high_as_the_counts(runs):
    picture = draw_levels(runs)
    for rung, reports in runs.items():
        report = reports[16]
        hbm = report.global_load_bytes + report.global_store_bytes
        assert sum(picture.numbers["hbm"][rung]["16"].values()) == hbm
        shared = report.shared_load_bytes + report.shared_store_bytes
        assert picture.numbers["shared"][rung]["16"] == shared
        assert f"{rung} at N = 16: {hbm / 1024:,.0f} KiB of HBM" in picture.alt
    with pytest.raises(ValueError, match="two rungs with the same lengths"):
        draw_levels({"standard": runs["standard"]})


def test_dots_are_closed_forms_and_records():
    dots = measured_dots("ladder", "standard", "float32")
    assert [dot.seqlen for dot in dots] == [512, 2048, 16384]
    # S and P four times read and twice written, tiles of Q, K and V of 64 rows: 36 bytes a score.
    assert dots[-1].intensity == pytest.approx(4 * 64 / 36, rel=1e-3)
    speeds = [r["tflops"] for r in recorded("ladder")["records"] if r["name"] == "standard"]
    assert all(dot.measured in speeds for dot in dots)
    picture = draw_roofline({"standard": dots}, 4.8, {"float32": 67.0}, "", ("", 16.0))
    assert picture.numbers["standard"] == [[d.seqlen, d.intensity, d.measured] for d in dots]
    assert "standard: 7.0 FLOPs a byte at N = 512" in picture.alt
    with pytest.raises(ValueError, match="must be at least one"):
        draw_roofline({}, 4.8, {"float32": 67.0}, "", ("", 16.0))


def test_a_dot_need_not_be_measured():
    dots = [Dot(64, intensity("standard", 64, 64))]
    assert "measured." not in draw_roofline({"s": dots}, 4.8, {"x": 67.0}, "", ("", 16.0)).alt


def test_the_judge_simulates_what_the_closed_form_says():
    for problem, config in SIMULATED:
        report = simulated_standard(problem, config)
        assert report.global_load_bytes == predict("standard", problem, config).global_load_bytes
