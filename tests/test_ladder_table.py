"""The README's table of what each rung does is a fresh measurement; the command writes no more."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from fa2_numba import ladder
from fa2_numba.config import TileConfig, choose_tiles
from fa2_numba.launch import ForwardTensors
from fa2_numba.lessons import ladder_table
from fa2_numba.lessons.ladder_table import BEGIN, END, HEAD_DIM, PROBLEM, SEQLEN
from fa2_numba.problem import Problem
from fa2_numba.simulator import BlockCounts, Counts, Report, Simulator
from fa2_numba.traffic import predict

RUNGS = ladder.cuda_core_rungs()
README = Path(__file__).parents[1] / "README.md"
BLOCK = README.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def fake_ladder():
    counts = Counts(global_load_bytes=2048, barriers=1234, multiply_adds=5)
    return {rung: Report(rung, (BlockCounts(rung, (0, 0, 0), counts),)) for rung in RUNGS}


@pytest.fixture
def measured(monkeypatch):
    """No half a minute for tests of what is done with the numbers."""
    monkeypatch.setattr(ladder_table, "measure_ladder", fake_ladder)


@pytest.mark.parametrize(
    "rung", [*(pytest.param(name, marks=pytest.mark.sweep) for name in RUNGS[:-1]), RUNGS[-1]]
)
def test_the_readme_shows_a_fresh_measurement(rung):
    report = ladder_table.measure_rung(rung)
    assert ladder_table.table_row(report) in BLOCK.splitlines()
    assert report.bank_conflicts == 0, "the README says that there are none"


@pytest.mark.parametrize("rung", RUNGS)
def test_the_readme_shows_what_the_formulas_say(rung):
    """Those that `test_traffic` finds equal to what is counted, number by number."""
    tiles = choose_tiles(HEAD_DIM, Simulator().shared_bytes_per_block)
    counts = predict(rung, Problem(1, 1, 1, SEQLEN, SEQLEN, HEAD_DIM, causal=True), tiles)
    x, lse = np.zeros((1, SEQLEN, 1, HEAD_DIM), np.float32), np.zeros((1, 1, SEQLEN), np.float32)
    scale, dtype = np.float32(1), "float32"
    tensors = ForwardTensors(x, x, x, x, lse, scale, True, dtype, lambda s: np.zeros(s, np.float32))
    launches = ladder.RUNGS[rung].plan_forward(tensors, tiles)
    others = sum(math.prod(launch.grid) for launch in launches) - 1
    blocks = [BlockCounts(rung, (0, 0, 0), one) for one in (counts, *[Counts()] * others)]
    report = Report(rung, tuple(blocks))
    assert ladder_table.table_row(report) in BLOCK.splitlines()
    assert report.bank_conflicts == 0, "the README says that there are none"


def test_the_readme_has_a_row_for_each_rung_and_nothing_else():
    above, rows = BLOCK.rsplit("|\n", len(RUNGS))[0], BLOCK.splitlines()[-len(RUNGS) :]
    assert above + "|" == ladder_table.markdown_table({})
    assert [re.match(r"\| `(\w+)` \|", row)[1] for row in rows] == RUNGS


def test_the_problem_is_as_stated():
    assert choose_tiles(HEAD_DIM, Simulator().shared_bytes_per_block) == TileConfig(32, 64, 64)
    assert "192 tokens, head dim 32, float32, tiles of 64 x 64" in PROBLEM


def test_what_the_readme_says_below_the_table():
    def counts(rung, seqlen, head_dim, causal):
        problem = Problem(1, 1, 1, seqlen, seqlen, head_dim, causal)
        return predict(rung, problem, TileConfig(head_dim, 64, 64))

    matmul = [counts(rung, SEQLEN, HEAD_DIM, True).matmul_flops for rung in RUNGS]
    assert matmul == [matmul[0]] * 2 + [matmul[0] * 6 / 9] * 3, "3 of 9 tiles are skipped"
    text = " ".join(README.read_text(encoding="utf-8").split())
    for seqlen, said in ((4096, "8 % fewer"), (192, "3 % more")):
        fa1, fa2 = (
            counts(rung, seqlen, 64, False).other_flops
            for rung in ("fa1_sliced_k", "fa2_fewer_flops")
        )
        percent = round(100 * (fa2 / fa1 - 1))
        assert said == f"{abs(percent)} % {'more' if percent > 0 else 'fewer'}"
        assert said in text


def test_a_table_has_aligned_numbers():
    problem, _, table = ladder_table.markdown_table(fake_ladder()).partition("\n\n")
    head, rule, first, *_ = table.splitlines()
    assert problem == PROBLEM
    assert head.count("|") == rule.count("|") == first.count("|")
    assert rule == "|---|---" + "|--:" * (head.count("|") - 3) + "|"
    assert first == "| `standard` | three kernels |  | 1 | 2.0 | 0.0 | 1,234 | 0 | 10 | 0 | 0 |"


def test_the_table_is_printed(measured, capsys):
    ladder_table.main([])
    assert capsys.readouterr().out == ladder_table.markdown_table(fake_ladder()) + "\n"


@pytest.mark.parametrize("old", ["", "| old |\n\\1 \n"])
def test_only_what_stands_between_the_markers_is_written(old, measured, tmp_path):
    path = tmp_path / "page.md"
    above, below = f"# Title\n\n{BEGIN}\n", f"{END}\n\nmore, é\n"
    path.write_text(above + old + below, encoding="utf-8")
    for _ in range(2):
        ladder_table.main(["--write", str(path)])
        table = ladder_table.markdown_table(fake_ladder())
        assert path.read_text(encoding="utf-8") == f"{above}{table}\n{below}"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "# Title\n",
        f"{BEGIN}\n| old |\n",
        f"{END}\n{BEGIN}\n",
        f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n",
    ],
)
def test_without_the_markers_a_file_stays_as_it_is(text, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ladder_table, "measure_ladder", lambda: pytest.fail("measured in vain"))
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(SystemExit):
        ladder_table.main(["--write", str(path)])
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]
    assert f"must hold a line {BEGIN} and after it a line {END}" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        ladder_table.main(["--write", str(tmp_path / "nothing.md")])
    assert "No such file" in capsys.readouterr().err
