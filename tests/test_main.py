"""`python -m fa2_numba`: what it prints, what it refuses, and that a broken rung cannot pass."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadrv.driver import CudaAPIError

from fa2_numba.__main__ import COMMANDS, main
from fa2_numba.data import load_smollm2
from fa2_numba.demo import check, heads, options, plot, report, run, timing
from fa2_numba.demo.problem import load
from fa2_numba.kernels import fa2_split_q
from fa2_numba.ladder import CUDA_CORE_DTYPES, RUNGS, Rung, cuda_core_tiles
from fa2_numba.launch import KernelLaunch, gpu_available
from fa2_numba.reference import attention_forward, attention_forward_same_precision, visible

ROOT = Path(__file__).parents[1]
SIMULATED = ("--machine", "simulator")
ONE_RUNG = ("--rung", "fa2_split_q")
TINY = ("--tokens", "16", "--heads", "1", *SIMULATED)
HEAD_COUNTS = [(1, 1), (2, 1), (3, 1), (6, 2), (9, 3)]


def run_module(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess:
    """Run the command in a fresh process, its standard output and error not a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "fa2_numba", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
    )


def exact_weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """P (heads, seqlen, seqlen) in float64, head by head, straight from the definition."""
    Q, K = q[0].astype(np.float64), k[0].astype(np.float64)
    hidden = ~visible(len(Q), len(K), causal=True)
    P = []
    for head in range(Q.shape[1]):
        S = Q[:, head] @ K[:, head // (Q.shape[1] // K.shape[1])].T / math.sqrt(Q.shape[2])
        S[hidden] = -np.inf
        P.append(np.exp(S) / np.exp(S).sum(axis=1, keepdims=True))
    return np.array(P)


# What it shows.


def test_every_rung_is_listed_and_passes():
    done = run_module(*TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "PASS" in line}
    assert list(rows) == list(RUNGS)
    assert "FAIL" not in done.stdout and done.stderr == ""
    assert "16 tokens, 1 query head on 1 key-value head" in " ".join(done.stdout.split())
    assert "Attention sink" in done.stdout and "·sitting" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_all_there_is_and_the_plot_holds_tokens(tmp_path):
    file = tmp_path / "maps.svg"
    done = run_module(*TINY, *ONE_RUNG, "--json", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["passed"] is True and record["timings"] == []
    assert record["problem"] == {
        "layer": 15,
        "tokens": 16,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 64,
        "dtype": "float16",
        "causal": True,
        "machine": "simulator",
    }
    (rung,) = record["rungs"]
    assert rung["rung"] == "fa2_split_q" and rung["passed"] and rung["machine"] == "simulator"
    assert rung["idea"] and rung["source"] and rung["seconds"] > 0 and rung["complaints"] == []
    for part in ("out", "lse", "row_sum"):
        assert 0 <= rung[f"{part}_error"] <= rung[f"{part}_allowed"] < 0.01
    check_looks(record, load_smollm2(15))
    assert "·beginning" in file.read_text(encoding="utf-8")


def check_looks(record: dict, layer) -> None:
    """The weights shown are those of exact attention, and the largest of their row."""
    exact = exact_weights(layer.q[:, :16, :1], layer.k[:, :16, :1])
    assert len(record["heads"]) == heads.SHOWN_TOKENS
    for look in record["heads"]:
        row = exact[look["head"], look["position"]]
        assert look["token"] == layer.tokens[look["position"]]
        weights = [key["weight"] for key in look["looks_at"]]
        np.testing.assert_allclose(weights, np.sort(row)[::-1][: len(weights)], rtol=1e-5)
        for key in look["looks_at"]:
            assert key["token"] == layer.tokens[key["position"]]
            assert key["weight"] == pytest.approx(row[key["position"]], rel=1e-5)
    assert record["first_token_shares"] == pytest.approx(exact[:, 1:, 0].mean(axis=1), rel=1e-5)


def test_a_terminal_of_few_characters_is_enough():
    done = run_module(*TINY, *ONE_RUNG, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert "?sitting" in done.stdout


def test_doctor_is_a_command():
    done = run_module("doctor", "--json")
    assert "findings" in json.loads(done.stdout), done.stderr


def test_help_names_rungs_and_commands():
    done = run_module("--help")
    assert done.returncode == 0 and "--plot" in done.stdout
    assert all(name in done.stdout for name in RUNGS)
    first_words = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert all(first_words.count(command) == 1 for command in COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_mistyped_command_is_told_which_there_are(capsys):
    assert main(["dif", "fa2_split_q"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "error: no command 'dif': must be one of diff, doctor, grade, release\n"


@pytest.mark.parametrize("arguments", [["--tokens", "4"], ["diff", "fa2_split_q"]], ids=" ".join)
def test_where_numba_does_not_load_the_doctor_is_recommended(arguments):
    program = "import sys; sys.modules['numba.cuda'] = None; from fa2_numba.__main__ import main; "
    command = [sys.executable, "-c", program + f"raise SystemExit(main({arguments}))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "fa2_numba doctor" in done.stderr


def test_without_the_modules_of_notebooks_the_extra_is_named():
    program = "import sys; sys.modules['nbformat'] = None; from fa2_numba.__main__ import main; "
    command = [sys.executable, "-c", program + "raise SystemExit(main(['release', 'x']))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "fa2_numba[notebooks]" in done.stderr


# What it refuses, before any work.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tokens", "0"], "--tokens: '0' must be a number from 1 to 256"),
        (["--tokens", "257"], "from 1 to 256"),
        (["--tokens", "-1"], "from 1 to 256"),
        (["--tokens", "many"], "from 1 to 256"),
        (["--heads", "4"], "--heads: invalid choice: 4"),
        (["--layer", "1"], "--layer: invalid choice: 1"),
        (["--dtype", "float64"], "--dtype: invalid choice: 'float64'"),
        (["--rung", "nonsense"], "'nonsense' must be one of standard"),
        (["--rung", "standard,"], "'' must be one of standard"),
        (["--machine", "tpu"], "--machine: invalid choice: 'tpu'"),
        (["--plot", "missing/maps.png"], "there is no folder missing"),
        (["--plot", "maps.xyz"], "the name must end in one of"),
        (["--plot", "maps"], "the name must end in one of"),
        (["--plot", "."], "is a folder"),
        (["--json", "doctor"], "unrecognized arguments: doctor"),
    ],
    ids=" ".join,
)
def test_a_bad_option_is_refused(arguments, reason, monkeypatch, capsys):
    monkeypatch.setattr(run, "load", lambda _: pytest.fail("work was started"))
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    printed = capsys.readouterr()
    assert refusal.value.code == 2 and printed.out == ""
    assert reason in printed.err.splitlines()[-1]


def test_a_gpu_is_refused_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(options, "gpu_available", lambda: False)
    with pytest.raises(SystemExit) as refusal:
        options.parse(["--machine", "gpu"])
    assert refusal.value.code == 2 and "no GPU here" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        options.parse(["--plot", "maps.png"])
    assert 'pip install -e ".[notebooks]"' in capsys.readouterr().err


def test_a_rung_that_does_not_take_the_dtype_is_refused_or_left_out(monkeypatch, capsys):
    half_only = replace(RUNGS["fa2_split_q"], name="half_only", dtypes={"float16": (5, 0)})
    monkeypatch.setitem(RUNGS, "half_only", half_only)
    assert "half_only" in options.parse([]).rungs
    assert "half_only" not in options.parse(["--dtype", "float32"]).rungs
    with pytest.raises(SystemExit):
        options.parse(["--dtype", "float32", "--rung", "half_only"])
    assert "takes float16, not float32" in capsys.readouterr().err


# What it chooses.


def test_rungs_come_in_the_order_of_the_ladder():
    asked = ["--rung", "fa2_split_q, standard", "--rung", "standard"]
    assert options.parse(asked).rungs == ("standard", "fa2_split_q")
    assert options.parse([]).rungs == tuple(RUNGS)


def test_simulated_defaults_fit_the_budget():
    chosen = options.parse(SIMULATED)
    assert (chosen.layer, chosen.dtype, chosen.machine) == (15, "float16", "simulator")
    assert chosen.heads == 3 and chosen.tokens >= 64
    for rungs in range(1, 10):
        tokens = options.affordable_tokens(rungs, 3)
        assert options.estimate_seconds(rungs, tokens, 3) <= options.BUDGET_SECONDS


def test_on_a_gpu_all_of_the_data_is_used(monkeypatch):
    monkeypatch.setattr(options, "gpu_available", lambda: True)
    chosen = options.parse([])
    assert (chosen.machine, chosen.tokens, chosen.heads) == ("gpu", 256, 9)
    assert options.parse(SIMULATED).machine == "simulator"


@pytest.mark.parametrize(("query_heads", "kv_heads"), HEAD_COUNTS)
def test_a_slice_keeps_the_heads_together(query_heads, kv_heads):
    problem = load(options.parse(["--heads", str(query_heads), "--tokens", "9", "--layer", "0"]))
    layer = load_smollm2(0)
    assert problem.q.shape == (1, 9, query_heads, 64)
    assert problem.k.shape == problem.v.shape == (1, 9, kv_heads, 64)
    group = query_heads // kv_heads
    assert [head // group for head in range(query_heads)] == [h // 3 for h in range(query_heads)]
    np.testing.assert_array_equal(problem.v, layer.v[:, :9, :kv_heads])


# A broken rung cannot pass.


@cuda.jit
def write_nan(O, LSE):
    if cuda.threadIdx.x == 0:
        O[0, 5, 0, 7] = math.nan


@cuda.jit
def shift_lse(O, LSE):
    if cuda.threadIdx.x == 0:
        LSE[0, 0, 3] += 1e-3


@cuda.jit
def lose_lse(O, LSE):
    LSE[0, 0, cuda.threadIdx.x % LSE.shape[2]] = math.inf


@cuda.jit
def leave_the_array(O, LSE):
    LSE[0, 0, LSE.shape[2] + cuda.threadIdx.x] = 0.0


def followed_by(kernel):
    """The launches of a sound rung and one that spoils their result."""

    def plan(tensors, config):
        spoiling = KernelLaunch(kernel, (1,), 32, 0, (tensors.O, tensors.LSE))
        return [*fa2_split_q.plan_forward(tensors, config), spoiling]

    return plan


FAULTS = {
    "writes-nothing": (lambda tensors, config: [], "out: error nan"),
    "one-nan": (followed_by(write_nan), "worst at (0, 5, 0, 7): actual nan"),
    "no-mask": (
        lambda tensors, config: fa2_split_q.plan_forward(replace(tensors, causal=False), config),
        "out: error",
    ),
    "lse-off": (followed_by(shift_lse), "worst at (0, 0, 3)"),
    "lse-infinite": (followed_by(lose_lse), "rows of P miss 1 by 1"),
    "out-of-bounds": (followed_by(leave_the_array), "OutOfBoundsError"),
}


@pytest.mark.parametrize(("plan", "complaint"), FAULTS.values(), ids=FAULTS)
def test_a_broken_rung_fails(plan, complaint, monkeypatch, capsys):
    rung = Rung("broken", "wrong on purpose", "this test", CUDA_CORE_DTYPES, cuda_core_tiles, plan)
    monkeypatch.setitem(RUNGS, "broken", rung)
    assert main(["--rung", "broken", *TINY]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAIL broken" in printed and "PASS" not in printed
    assert complaint in printed


def test_a_broken_rung_fails_in_json_next_to_a_sound_one(monkeypatch, capsys, tmp_path):
    rung = Rung("broken", "", "", CUDA_CORE_DTYPES, cuda_core_tiles, FAULTS["writes-nothing"][0])
    monkeypatch.setitem(RUNGS, "broken", rung)
    assert main(["--rung", "broken,fa2_split_q", "--json", *TINY]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["passed"] is False
    assert [(r["rung"], r["passed"]) for r in record["rungs"]] == [
        ("fa2_split_q", True),
        ("broken", False),
    ]
    assert record["rungs"][1]["out_error"] is None and record["rungs"][1]["complaints"]
    assert record["heads"], "the sound rung still shows where the heads look"


@pytest.mark.parametrize(
    "error", [RuntimeError("no such tile"), CudaAPIError(700, "illegal address"), TypingError("no")]
)
def test_a_rung_that_raises_fails_and_the_others_go_on(error, monkeypatch, capsys):
    def plan(tensors, config):
        raise error

    for name in ("broken", "broken_too"):
        rung = Rung(name, "raises", "this test", CUDA_CORE_DTYPES, cuda_core_tiles, plan)
        monkeypatch.setitem(RUNGS, name, rung)
    assert main(["--rung", "broken,fa2_split_q,broken_too", *TINY]) == 1
    printed = capsys.readouterr().out
    rows = [line.split()[0] for line in printed.splitlines() if "stopped" in line]
    assert rows == ["broken", "broken_too"] and printed.count("PASS") == 1
    for name in rows:
        assert f"FAIL {name}: {type(error).__name__}: {error}" in printed


def test_an_interrupt_ends_the_demo(monkeypatch):
    def plan(tensors, config):
        raise KeyboardInterrupt

    monkeypatch.setitem(
        RUNGS, "broken", Rung("broken", "", "", CUDA_CORE_DTYPES, cuda_core_tiles, plan)
    )
    with pytest.raises(KeyboardInterrupt):
        main(["--rung", "broken", *TINY])


def test_on_a_gpu_nothing_is_timed_after_an_error(monkeypatch, capsys):
    def attend(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(options, "gpu_available", lambda: True)
    monkeypatch.setattr(check, "_attend", attend)
    monkeypatch.setattr(run, "time_rungs", lambda *_: pytest.fail("timed"))
    assert main(["--tokens", "8", *ONE_RUNG]) == 1
    assert "RuntimeError: gone" in capsys.readouterr().out


# Lengths that no other test simulates: their right answers may lie in this process's memory.
@pytest.mark.parametrize("tokens", ["13", "61"])
def test_a_rung_does_not_pass_by_what_a_sound_one_left_in_memory(tokens, monkeypatch, capsys):
    def plan(tensors, config):
        elsewhere = replace(tensors, LSE=np.empty(tensors.LSE.shape, np.float32))
        return fa2_split_q.plan_forward(elsewhere, config)

    rung = Rung("broken", "writes no lse", "this test", CUDA_CORE_DTYPES, cuda_core_tiles, plan)
    monkeypatch.setitem(RUNGS, "broken", rung)
    asked = ["--rung", "broken,fa2_split_q", "--tokens", tokens, "--heads", "1", "--json"]
    assert main([*asked, *SIMULATED]) == 1
    passed = {r["rung"]: r["passed"] for r in json.loads(capsys.readouterr().out)["rungs"]}
    assert passed == {"fa2_split_q": True, "broken": False}


def test_without_a_sound_rung_nothing_is_plotted(monkeypatch, capsys, tmp_path):
    rung = Rung("broken", "", "", CUDA_CORE_DTYPES, cuda_core_tiles, FAULTS["writes-nothing"][0])
    monkeypatch.setitem(RUNGS, "broken", rung)
    file = tmp_path / "maps.png"
    assert main(["--rung", "broken", "--plot", str(file), *TINY]) == 1
    assert not file.exists() and "no rung passed" in capsys.readouterr().err


# Where the heads look.


@pytest.mark.parametrize(("query_heads", "kv_heads"), HEAD_COUNTS)
def test_weights_are_those_of_exact_attention(query_heads, kv_heads):
    layer = load_smollm2(15)
    q, k, v = layer.q[:, :, :query_heads], layer.k[:, :, :kv_heads], layer.v[:, :, :kv_heads]
    _, lse = attention_forward_same_precision(q, k, v, causal=True)
    P = heads.attention_weights(q, k, lse)
    assert P.dtype == np.float32 and P.shape == (query_heads, 256, 256)
    np.testing.assert_allclose(P, exact_weights(q, k), rtol=2e-5, atol=1e-7)
    assert heads.row_sum_error(P) < 1e-5


def test_rows_of_a_wrong_lse_do_not_sum_to_one():
    layer = load_smollm2(0)
    q, k, v = (array[:, :8, :1] for array in (layer.q, layer.k, layer.v))
    _, lse = attention_forward(q, k, v, causal=True)
    for wrong, error in ((lse + 0.1, 0.095), (np.full_like(lse, -1e4), math.inf)):
        assert heads.row_sum_error(heads.attention_weights(q, k, wrong)) >= error
    assert math.isnan(heads.row_sum_error(heads.attention_weights(q, k, lse * math.nan)))


def test_tokens_shown_are_words_where_there_are_some():
    tokens = load_smollm2(15).tokens
    for count in (1, 2, 3, 16, 64, 256):
        positions = heads.telling_positions(tokens[:count])
        assert positions == sorted(set(positions)) and len(positions) == min(3, count)
    assert all(tokens[i].strip().isalpha() for i in heads.telling_positions(tokens))


def test_keys_without_weight_are_not_shown():
    P = np.array([[[1, 0], [0.25, 0.75]]], np.float32)
    first, second = heads.looks(P, ("a", "b"))
    assert first.keys == ((0, 1.0),) and second.keys == ((1, 0.75), (0, 0.25))


def test_tokens_without_a_letter_stand_in_quotes():
    tokens = (",", ' "', "\n", " sister")
    weights = ((3, 0.5), (0, 0.25), (1, 0.15), (2, 0.1))
    console = report.new_console()
    with console.capture() as captured:
        console.print(report.look_table([heads.Look(0, 0, weights)], tokens, "a rung"))
    row = "·sister 50%   ',' 25%   '·\"' 15%   '\\n' 10%"
    assert row in captured.get() and "0: ','" in captured.get()
    assert "first token, ','." in report.sink_line([0.7], ",")


def test_empty_lines_are_not_printed(capsys):
    run._print_paragraph(report.new_console(), "", "")
    assert capsys.readouterr().out == ""
    run._print_paragraph(report.new_console(), "", "a", "b")
    assert capsys.readouterr().out == "\na\nb\n"


def test_heads_without_a_sink_have_no_sink_line():
    assert report.sink_line([0.1, 0.2], "Alice") == "" == report.sink_line([], "Alice")
    assert "head 1 70%" in report.sink_line([0.1, 0.7], "Alice")


# Figures and timings.


@pytest.mark.parametrize("head_count", [1, 3, 4])
def test_a_map_has_a_panel_for_each_head_and_labels_that_fit(head_count, tmp_path):
    P = np.tril(np.full((head_count, 150, 150), 0.1, np.float32))
    tokens = ("a$b$", "\n") * 75
    figure = plot.draw_maps(P, tokens, "title")
    titled = [ax for ax in figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in titled] == [f"head {h}" for h in range(head_count)]
    labels = [label.get_text() for label in titled[0].get_xticklabels()]
    assert labels[:3] == ["a$b$", "\\n", "a$b$"] and len(labels) <= plot.MAX_LABELS
    plot.save_maps(tmp_path / "maps.png", P, tokens, "title")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


def test_the_timing_table_shows_speed_or_why_there_is_none():
    shape = timing.Shape(batch=1, heads=16, seqlen=4096, head_dim=64)
    timings = [timing.Timing("standard", shape, None), timing.Timing("fa2_split_q", shape, 4.0)]
    console = report.new_console()
    with console.capture() as captured:
        console.print(report.timing_table(timings, "float16"))
    rows = [line for line in captured.get().splitlines() if "standard" in line or "split" in line]
    assert "B=1 H=16 N=4096 D=64" in rows[0] and "no room" in rows[0]
    assert rows[1].split() == ["fa2_split_q", "4.000", "8.59"]
    assert report.timing_record(timings[0])["tflops_per_second"] is None


def test_timed_rungs_that_keep_scores_need_room():
    shape = timing.Shape(batch=1, heads=16, seqlen=4096, head_dim=64)
    assert shape.score_bytes == 2 * 16 * 4096 * 4096 * 4
    assert timing.fits("standard", shape, 2 * shape.score_bytes)
    assert not timing.fits("standard", shape, 2 * shape.score_bytes - 1)
    assert timing.fits("fa2_split_q", shape, 0)
    assert set(timing.KEEPS_SCORES) <= set(RUNGS)


def test_a_verdict_without_a_result_does_not_pass():
    verdict = check.Verdict(RUNGS["standard"], "gpu", 1.0, trouble="stopped")
    assert not verdict.passed and verdict.complaints() == ["stopped"]


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_every_rung_passes_and_is_timed():
    done = run_module("--machine", "gpu", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["problem"]["tokens"] == 256 and record["problem"]["machine"] == "gpu"
    assert [rung["rung"] for rung in record["rungs"]] == list(RUNGS)
    assert len(record["timings"]) == len(RUNGS) * len(timing.SHAPES)
    assert all(row["milliseconds"] is None or row["milliseconds"] > 0 for row in record["timings"])
