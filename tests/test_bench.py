"""The bench scripts as far as they go without a GPU, and the results they have left."""

import doctest
import itertools
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from bench import (
    backward_summary,
    comparison,
    counters,
    forward_summary,
    ladder,
    problems,
    stamps,
    timing,
)
from bench.contestants import DETERMINISTIC, OURS
from bench.records import part
from bench.table import write_table
from fa2_numba.arrays import DTYPES
from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS as ALL_RUNGS
from fa2_numba.ladder import cuda_core_rungs
from fa2_numba.launch import SimulatorMachine
from fa2_numba.lessons.draw import TIMELINE_RUNGS
from fa2_numba.lessons.figures import read_numbers
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts, Simulator
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "h200"
SCRIPTS = ("run", "ladder", "counters", "stamps", "host_time")
RUNGS = cuda_core_rungs()
YOUNGER = {"fa3_hopper"}
"""Rungs that have come since the H200's file was made."""
FIELDS = list(problems.problems()[0].fields)


def host_inputs(batch=1, heads=2, seqlen=16, head_dim=16, dtype="float32"):
    return random_qkv(batch, seqlen, seqlen, heads, heads, head_dim, DTYPES[dtype])


@pytest.fixture
def machine():
    return SimulatorMachine(Simulator(checks=False, progress=False))


@pytest.fixture
def no_gpu_needed(monkeypatch, machine):
    """Let the scripts' own main functions run: arrays on the host, kernels in the simulator."""
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(synchronize=lambda: None, is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "profiling", nullcontext)
    monkeypatch.setattr(timing, "gpu_machine", lambda: machine)
    monkeypatch.setattr(timing, "random_inputs", host_inputs)
    monkeypatch.setattr(timing, "environment", lambda: {"gpu": "NVIDIA Test"})
    monkeypatch.setattr(timing, "clocks", lambda: None)


# timing.py


def test_a_prepared_rung_starts_poisoned_and_fills_its_outputs(machine):
    inputs = host_inputs()
    prepared = timing.prepare("fa2_split_q", machine, inputs, True)
    assert np.isnan(prepared.O).all() and np.isnan(prepared.LSE).all()
    samples = ladder.make_samples(*inputs, causal=True)
    with pytest.raises(SystemExit, match="fa2_split_q is wrong"):
        ladder.check(prepared, samples)
    prepared.run()
    assert ladder.check(prepared, samples).passed


def test_results_are_kept_by_gpu():
    path = timing.results_file("NVIDIA H200", "ladder.json")
    assert path.parts[-4:] == ("bench", "results", "h200", "ladder.json")


# ladder.py


@pytest.mark.parametrize("causal", [False, True])
def test_samples_agree_with_whole_heads(causal):
    inputs = host_inputs(batch=2, heads=3, seqlen=17)
    O, LSE = ladder.attention_forward_same_precision(*inputs, causal=causal)
    samples = ladder.make_samples(*inputs, causal=causal, rows=5)
    assert [(s.batch, s.head, s.rows.start) for s in samples] == [
        (0, 0, 0),
        (0, 0, 12),
        (1, 2, 0),
        (1, 2, 12),
    ]
    assert all(verdict.passed for sample in samples for verdict in sample.judge(O, LSE))
    O[1, 16, 2] += 1e-3
    assert not samples[3].judge(O, LSE)[0].passed


def test_slow_rungs_are_timed_less_often():
    done = {"slow": 0, "fast": 0}

    def runner(name):
        def run():
            done[name] += 1

        return run

    runs = {name: runner(name) for name in done}

    def time_once(run):
        run()
        return 1500.0 if run is runs["slow"] else 2.0

    times = timing.take_times(runs, time_once, ladder.SLOW_MS, ladder.SLOW_ROUNDS)
    assert len(times["slow"]) == ladder.SLOW_ROUNDS == done["slow"]
    assert len(times["fast"]) == timing.ROUNDS
    assert done["fast"] == 1 + timing.WARM_UPS + timing.ROUNDS


def test_ladder_script(monkeypatch, no_gpu_needed, tmp_path, capsys):
    milliseconds = iter(range(10, 1000))
    monkeypatch.setattr(timing, "time_once", lambda run: float(next(milliseconds)))
    monkeypatch.setattr(timing, "WARM_UPS", 0)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(ladder, "SHAPES", {"tiny": (1, 1, 16, 16)})
    ladder.main(["--out", str(tmp_path / "new" / "ladder.json")])
    result = json.loads((tmp_path / "new" / "ladder.json").read_text())
    assert [r["name"] for r in result["records"]] == 2 * RUNGS
    assert [(r["over"], r["name"]) for r in result["ratios"][:4]] == list(
        zip(RUNGS[:-1], RUNGS[1:], strict=True)
    )
    first, second = result["records"][:2]
    assert result["ratios"][0]["faster"] == first["ms"] / second["ms"]
    assert first["tflops"] == 4 * 16**2 * 16 / first["ms"] / 1e9
    printed = capsys.readouterr().out
    assert "tiny: B1 H1 N16 d16 float32 causal" in printed and "0.94x" in printed


# forward_summary.py


def paper():
    return [p for p in problems.problems() if p.group == problems.PAPER]


def made_up_result():
    """fa2 takes 1 ms; flash 0.9 to 1.2 ms by head dim, cuDNN half of fa2, fa1 more with length."""
    flash = {64: 1.2, 128: 0.9, 256: 1.1}
    records = []
    for p in paper():
        times = {"fa2_tensor_core": 1.0, "fa1_tensor_core": p.seqlen / 512, "torch_cudnn": 0.5}
        times["torch_flash"] = flash[p.head_dim] - 0.1 * (p.causal and p.seqlen == 2048)
        for name, ms in times.items():
            sizes = {"head_dim": p.head_dim, "seqlen": p.seqlen, "causal": p.causal}
            tflops = 400 / ms if p.seqlen == 16384 else 100 / ms
            records.append({"name": name, "dtype": p.dtype, **sizes, "ms": ms, "tflops": tflops})
    return {"matmul_tflops": {"float16": 800.0, "bfloat16": 500.0}, "records": records}


def test_a_summary_of_made_up_records():
    found = forward_summary.summarize(made_up_result())
    assert found.keys() == {"float16", "bfloat16"}
    s = found["float16"]
    flash = 11 * [1.2] + [1.1] + 11 * [0.9] + [0.8]
    assert s.over_flash == pytest.approx(np.exp(np.log(flash).mean()))
    assert {d: r.value for d, r in s.lowest_over_flash.items()} == pytest.approx(
        {64: 1.1, 128: 0.8, 256: 1.0}
    )
    assert str(s.lowest_over_flash[128]) == "0.800 (head dim 128, 2048 tokens, causal)"
    assert s.over_fa1 == pytest.approx(16) and s.lowest_over_fa1.value == 8
    assert s.over_cudnn == pytest.approx(0.5)
    assert s.of_matmul == {64: 0.5, 128: 0.5, 256: 0.5}
    assert found["bfloat16"].of_matmul[64] == 0.8


def test_a_summary_does_without_cudnn():
    result = made_up_result()
    result["records"] = [r for r in result["records"] if r["name"] != "torch_cudnn"]
    assert forward_summary.summarize(result)["float16"].over_cudnn is None
    assert "cuDNN" not in forward_summary.markdown_table(result)


def test_a_table_is_written_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    begin, end = (f"<!-- tensor-core times: {word} -->" for word in ("begin", "end"))
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    part = {"direction": "forward", "group": "paper"}
    result = made_up_result()
    result["records"] = [r | part for r in result["records"]]
    for _ in range(2):
        write_table("tensor-core times", result, page)
        lines = page.read_text().splitlines()
        assert lines[:2] == ["above", begin] and lines[-2:] == [end, "below"]
    assert lines[4] == "| 64 | none | 1,024 | 100 | 83 | 1.20 | 2.0 | 12% |"
    assert len([row for row in lines if row.startswith("|")]) == 2 + 3 * 2 * 3
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="must hold a line <!-- tensor-core times: begin -->"):
        write_table("tensor-core times", result, page)
    assert page.read_text() == "no markers\n"


# backward_summary.py


def made_up_backward():
    """fa2 takes 1 ms; flash 0.9 to 1.2 ms by head dim; deterministic more where causal."""
    flash = {64: 1.2, 128: 0.9, 256: 1.1}
    records = []
    for p in paper():
        times = {OURS: 1.0, DETERMINISTIC: 1.5 if p.causal else 1.2, "torch_cudnn": 0.5}
        times["torch_flash"] = flash[p.head_dim] - 0.1 * (p.causal and p.seqlen == 2048)
        for name, ms in times.items():
            sizes = {"head_dim": p.head_dim, "seqlen": p.seqlen, "causal": p.causal}
            records.append({"name": name, "dtype": p.dtype, **sizes, "ms": ms, "tflops": 100 / ms})
    return {"matmul_tflops": {"float16": 800.0, "bfloat16": 500.0}, "records": records}


def test_a_summary_of_made_up_gradients():
    s = backward_summary.summarize(made_up_backward())["float16"]
    assert s.by_head_dim[256] == pytest.approx(np.exp(np.log(11 * [1.1] + [1.0]).mean()))
    assert s.lowest_over_flash[128].value == pytest.approx(0.8)
    assert s.over_cudnn == pytest.approx(0.5) and s.of_matmul == 0.125
    assert s.deterministic_cost == pytest.approx((1.2 * 1.5) ** 0.5)
    assert s.most_deterministic_cost.value == 1.5
    table = backward_summary.markdown_table(made_up_backward()).splitlines()
    assert table[2] == "| 64 | none | 1,024 | 100 | 83 | 83 | 1.20 | 12% |"


def test_gradients_without_cudnn():
    result = made_up_backward()
    result["records"] = [r for r in result["records"] if r["name"] != "torch_cudnn"]
    assert backward_summary.summarize(result)["float16"].over_cudnn is None
    assert "cuDNN" not in backward_summary.markdown_table(result)


# counters.py reads ncu

RAW_PAGE = f"""==PROF== Connected to process 71 (python3)
"ID","Process ID","Kernel Name","Block Size","CC","dram__bytes_read.sum","gpu__time_duration.sum",\
"launch__registers_per_thread","smsp__inst_executed_op_shared_ld.sum","{comparison.OPCODES}"
"","","","","","byte","ns","register/thread","inst",""
"0","71","scores[abi:v1](Array<float, 4, A, mutable>)","(128, 1, 1)","9.0","1,024","2,000",\
"96","12","1,012 (BAR: 5; LDS: 7; SHFL: 1,000)"
"1","71","softmax","(128, 1, 1)","9.0","2,048","500.5","32","n/a","4 (BAR: 4)"
==PROF== Disconnected
"""


def test_raw_page_is_read():
    first, second = counters.parse_csv(RAW_PAGE)
    assert first["kernel"].startswith("scores[abi:v1](Array<float, 4")
    assert first["metrics"]["dram__bytes_read.sum"] == 1024
    assert first["warp_instructions"] == {"BAR": 5, "LDS": 7, "SHFL": 1000}
    assert first["thread_instructions"] == {}
    assert second["metrics"]["gpu__time_duration.sum"] == 500.5
    assert "smsp__inst_executed_op_shared_ld.sum" not in second["metrics"]


def test_launches_are_summed():
    assert comparison.total(counters.parse_csv(RAW_PAGE)) == {
        "gpu__time_duration.sum": 2500.5,
        "dram__bytes_read.sum": 3072,
        "warp BAR": 9,
        "warp LDS": 7,
        "warp SHFL": 1000,
    }


def test_examples_hold():
    assert doctest.testmod(counters) == (0, 2)


def test_output_without_a_table_is_refused():
    with pytest.raises(ValueError, match="no table.*\n.*No kernels were profiled"):
        counters.parse_csv("==WARNING== No kernels were profiled.\n")


# counters.py compares


def by_counter(rows):
    return {row["counter"]: row for row in rows}


def test_an_instruction_never_executed_counts_zero():
    assert comparison.evaluate({"warp SHFL": 1}, {"warp BAR": 3.0}) == 0
    assert comparison.evaluate({"warp SHFL": 1}, {"thread FADD": 3.0}) is None
    assert comparison.evaluate({"a.sum": 2, "b.sum": 1}, {"a.sum": 3.0, "b.sum": 1.0}) == 7
    assert comparison.evaluate({"a.sum": 2, "b.sum": 1}, {"a.sum": 3.0}) is None


def test_flops_count_a_contracted_product_twice():
    counts = Counts(multiply_adds=100, additions=30, multiplications=20, divisions=9)
    measured = dict(zip(comparison.FLOPS, (20.0, 10.0, 110.0), strict=True))
    rows = by_counter(comparison.compare("x", counts, 4, measured))
    assert rows["fp32_flops_with_special"]["predicted"] == 250 + 10 * 9
    row = rows["fp32_flops"]
    assert (row["predicted"], row["measured"], row["ratio"]) == (250, 250, 1)


def test_what_is_far_off_needs_a_reason(monkeypatch):
    counts = Counts(barriers=10, shuffles=100, global_load_bytes=1000, shared_load_requests=50)
    measured = {
        "warp BAR": 43.0,
        "warp SHFL": 89.0,
        "warp LD": 10.0,
        "warp LDS": 40.0,
        "dram__bytes_read.sum": 500.0,
        "smsp__inst_executed_op_shared_ld.sum": 50.0,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 3.0,
    }
    monkeypatch.setattr(
        comparison, "REASONS", {"x.global_load_hbm_bytes": "caches", "shuffles": "unused results"}
    )
    rows = by_counter(comparison.compare("x", counts, 4, measured))
    assert rows["barriers_of_warps"]["ratio"] == 43 / 40
    assert rows["shuffles"]["reason"] == "unused results"
    assert rows["global_load_hbm_bytes"]["reason"] == "caches"
    assert rows["shared_load_replays"]["ratio"] is None
    assert [name for name, row in rows.items() if row["unexplained"]] == ["shared_load_replays"]
    assert rows["all_load_requests"]["ratio"] == 1
    measured["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] = 2.0
    few = by_counter(comparison.compare("x", counts, 4, measured))["shared_load_replays"]
    assert not few["unexplained"]
    assert rows["shared_load_requests"]["from"] == {"smsp__inst_executed_op_shared_ld.sum": 1}
    assert rows["maxima"]["measured"] is None
    other = by_counter(comparison.compare("y", counts, 4, measured))
    assert other["global_load_hbm_bytes"]["unexplained"]


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_is_predicted(rung):
    problem = Problem(4, 32, 32, 1024, 1024, 64, causal=True)
    counts = predict(rung, problem, TileConfig(64, 64, 64))
    rows = comparison.compare(rung, counts, 4, {})
    assert len({row["counter"] for row in rows}) == len(rows)
    assert all(row["measured"] is None and not row["unexplained"] for row in rows)


# counters.py as a script, with an ncu that only pretends

FAKE_NCU = """
import json, pathlib, sys
arguments = sys.argv[1:]
after = lambda name: arguments[arguments.index(name) + 1]
if "--version" in arguments:
    print("NVIDIA (R) Nsight Compute\\nVersion 1.2.3")
elif "--import" in arguments:
    assert after("--print-units") == "base" and after("--print-metric-instances") == "details"
    metrics = pathlib.Path(after("--import")).read_text().split(",")
    print('"ID","Kernel Name",' + ",".join(f'"{m}"' for m in metrics))
    print('"",""' + ',""' * len(metrics))
    for i in range(2):
        cells = ["8 (BAR: 3; SHFL: 5)" if m.startswith("sass") else "1,000" for m in metrics]
        print(f'"{i}","kernel"' + "".join(f',"{cell}"' for cell in cells))
else:
    if after("--launch") == "BROKEN":
        sys.exit("Traceback: the child is broken")
    assert after("--clock-control") == "none" and after("--profile-from-start") == "off"
    assert arguments[arguments.index("-m") + 1] == "bench.counters"
    pathlib.Path(after("--export") + ".ncu-rep").write_text(after("--metrics"))
    about = {"environment": {"gpu": "NVIDIA Test"}, "launches": 2}
    about["config"] = {"head_dim": 64, "block_m": 64, "block_n": 64, "num_warps": 4}
    pathlib.Path(after("--about")).write_text(json.dumps(about))
"""


@pytest.fixture
def make_ncu(tmp_path):
    def make(broken=""):
        path = tmp_path / "ncu"
        path.write_text(f"#!{sys.executable}\n{FAKE_NCU.replace('BROKEN', broken)}")
        path.chmod(0o755)
        return str(path)

    return make


def test_counters_script(make_ncu, tmp_path, capsys):
    out = tmp_path / "counters.json"
    rungs = ["standard", "fa1_sliced_k", "fa2_split_q"]
    counters.main(["--ncu", make_ncu("fa1_sliced_k"), "--out", str(out), "--rungs", *rungs])
    result = json.loads(out.read_text())
    assert [rung["rung"] for rung in result["rungs"]] == ["standard", "fa2_split_q"]
    assert (result["gpu"], result["ncu"], result["shape"]) == (
        "NVIDIA Test",
        "Version 1.2.3",
        [4, 32, 1024, 64],
    )
    rows = by_counter(result["rungs"][1]["comparison"])
    assert rows["shuffles"]["measured"] == 10
    assert rows["global_load_l1_bytes"]["measured"] == 2000 * 32
    assert len(result["rungs"][0]["launches"]) == 2
    printed = capsys.readouterr().out
    assert "fa1_sliced_k is left out: ncu failed" in printed and "UNEXPLAINED" in printed


def test_a_measured_file_is_compared_anew_and_stays(make_ncu, tmp_path, monkeypatch, capsys):
    out, again = tmp_path / "counters.json", tmp_path / "again.json"
    counters.main(["--ncu", make_ncu(), "--out", str(out), "--rungs", "fa2_split_q"])
    before = out.read_bytes()
    known = {row.counter: "known" for row in comparison.ROWS}
    monkeypatch.setattr(comparison, "REASONS", known)
    counters.main(["--measured", str(out)])
    assert out.read_bytes() == before and "\n0 ratios more" in capsys.readouterr().out
    counters.main(["--measured", str(out), "--out", str(again)])
    result = json.loads(again.read_text())
    assert result["reasons"] == known
    assert not any(row["unexplained"] for row in result["rungs"][0]["comparison"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("{", "Expecting"), ("{}", "is no file of this script")],
)
def test_a_measured_file_that_cannot_be_read_is_an_error(text, reason, tmp_path):
    path = tmp_path / "counters.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"error: --measured .*{reason}"):
        counters.main(["--measured", str(path)])


def test_no_rung_profiled_ends_the_run(make_ncu):
    with pytest.raises(SystemExit, match="no rung was profiled"):
        counters.main(["--ncu", make_ncu("standard"), "--rungs", "standard"])


def test_without_ncu_the_run_ends_at_once(tmp_path):
    with pytest.raises(SystemExit, match="nothing does not run .*install NVIDIA Nsight Compute"):
        counters.main(["--ncu", str(tmp_path / "nothing")])


def test_the_child_runs_every_kernel(no_gpu_needed, tmp_path):
    about = tmp_path / "about.json"
    shape = ["--shape", "1", "1", "16", "16"]
    counters.main(["--launch", "standard", "--about", str(about), *shape])
    told = json.loads(about.read_text())
    assert told["launches"] == 3 and TileConfig(**told["config"]).head_dim == 16


def test_unknown_rungs_are_refused(capsys):
    with pytest.raises(SystemExit):
        counters.main(["--rungs", "fa4"])
    assert "fa4" in capsys.readouterr().err


# Without a GPU and torch


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_torch(script):
    program = "import runpy, sys; sys.modules['torch'] = None; "
    program += f"sys.argv[1:] = ['--help']; runpy.run_module('bench.{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.parametrize("script", ["run", "ladder", "stamps", "host_time"])
def test_without_torch_a_run_says_so(script):
    program = "import runpy, sys; sys.modules['torch'] = None; "
    program += f"runpy.run_module('bench.{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "needs PyTorch" in done.stderr


def test_without_a_gpu_torch_is_not_enough(monkeypatch):
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(SystemExit, match="needs a GPU"):
        timing.environment()


# stamps.py


def test_stamps_are_recorded_and_drawn(monkeypatch, no_gpu_needed, tmp_path, capsys):
    monkeypatch.setattr(stamps, "SHAPE", (1, 2, 70, 16))
    record, figure = tmp_path / "new" / "stamps.json", tmp_path / "figure.svg"
    stamps.main(["--out", str(record)])
    assert "fa2_seq_parallel: 4 blocks" in capsys.readouterr().out
    recorded = json.loads(record.read_text())
    assert [len(recorded["timelines"][rung]["start"]) for rung in TIMELINE_RUNGS] == [2, 4]
    stamps.main(["--draw", str(record), "--figure", str(figure)])
    text = figure.read_text(encoding="utf-8")
    assert "2 causal heads of 70 tokens on an NVIDIA Test" in text and " ms" in text


# The results


def results(name):
    return json.loads((RESULTS / name).read_text())


def test_recorded_counters_stand_beside_predictions_of_today():
    recorded = results("counters.json")
    batch, heads, seqlen, head_dim = recorded["shape"]
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal=recorded["causal"])
    assert [rung["rung"] for rung in recorded["rungs"]] == RUNGS
    for rung in recorded["rungs"]:
        today = asdict(predict(rung["rung"], problem, TileConfig(**rung["config"])))
        # What was not counted yet is what these rungs do not do.
        not_counted_yet = dict.fromkeys(today, 0)
        assert not_counted_yet | rung["predicted"] == today, rung["rung"]
        assert not any(row["unexplained"] for row in rung["comparison"])


RECORD = set(
    "name direction dtype batch heads kv_heads seqlen seqlen_k head_dim causal ms ms_min ms_max "
    "tflops max_error allowed_error".split()
)


@pytest.mark.parametrize("name", ["run.json", "ladder.json"])
def test_recorded_times_are_whole(name):
    recorded = results(name)
    assert "H200" in recorded["gpu"] and recorded["date"]
    for record in recorded["records"]:
        assert RECORD <= record.keys()
        assert 0 < record["ms_min"] <= record["ms"] <= record["ms_max"]
        assert record["max_error"] <= record["allowed_error"]


RUN = results("run.json")


def test_the_readme_shows_the_recorded_times():
    """Every number of its table of the tensor-core rungs; the last lines are the summary's."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = (f"<!-- tensor-core times: {word} -->" for word in ("begin", "end"))
    block = readme.partition(begin)[2].partition(end)[0].strip()
    found = {
        (r["name"], r["head_dim"], r["seqlen"], r["causal"]): r
        for r in part(RUN, "forward")["records"]
        if r["dtype"] == "float16"
    }
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([\d,]+) \| (.*) \|$", block, re.MULTILINE)
    assert len(rows) == 3 * 2 * 3
    for head_dim, mask, seqlen, numbers in rows:
        problem = int(head_dim), int(seqlen.replace(",", "")), mask == "causal"
        ours, flash, fa1 = (
            found[name, *problem] for name in (OURS, "torch_flash", "fa1_tensor_core")
        )
        share = ours["tflops"] / RUN["matmul_tflops"]["float16"]
        shown = f"{ours['tflops']:.0f} | {flash['tflops']:.0f} | {flash['ms'] / ours['ms']:.2f}"
        assert numbers == f"{shown} | {fa1['ms'] / ours['ms']:.1f} | {share:.0%}"


def test_the_recorded_run_is_whole_and_right():
    """Every problem in every direction, every rung on the ladder, errors within the rule."""
    found = {(r["direction"], tuple(r[f] for f in FIELDS)) for r in RUN["measured"]}
    wanted = {
        (direction, tuple(p.fields[f] for f in FIELDS))
        for p in problems.problems()
        for direction in p.directions
    }
    assert found == wanted
    rungs = {r["name"] for r in part(RUN, "forward", problems.LADDER)["records"]}
    assert rungs >= set(ALL_RUNGS) - YOUNGER
    for p in problems.problems():
        names = {
            (r["name"], r["direction"])
            for r in RUN["records"]
            if all(r[f] == p.fields[f] for f in FIELDS)
        }
        assert names >= set(itertools.product([OURS, "torch_cudnn", "torch_flash"], p.directions))


def test_no_record_is_of_the_simulator_or_wrong():
    assert "H200" in RUN["gpu"] and RUN["driver"] and RUN["versions"]["torch"]
    for r in RUN["records"]:
        assert r["max_error"] <= r["allowed_error"] and r["host_us"] > 0
        assert r["tflops"] < RUN["matmul_tflops"][r["dtype"]]


def test_who_was_not_measured_has_a_reason():
    assert RUN["missing_peers"]["flash_attn"] == "not installed"
    assert all(one["reason"] for one in RUN["left_out"])


def test_the_readme_states_the_recorded_host_times():
    calls = {name: call["us"] for name, call in results("host_time.json")["calls"].items()}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"a call takes {calls['cupy']:.0f} microseconds with CuPy arrays and {calls['torch']:.0f} "
        f"with torch tensors, where torch's own FlashAttention-2 takes {calls['torch_flash']:.0f}"
    ) in readme


def test_recorded_ratios_are_those_of_the_records():
    recorded = results("ladder.json")
    assert {record["name"] for record in recorded["records"]} == set(RUNGS)
    assert recorded["ratios"] == ladder.compare_neighbours(recorded["records"])


@pytest.mark.skipif(not (RESULTS / "stamps.json").exists(), reason="no stamps are recorded yet")
def test_recorded_stamps_are_timelines_of_the_whole_grid():
    recorded = results("stamps.json")
    assert recorded["shape"] == list(stamps.SHAPE)
    timelines = [stamps.in_milliseconds(recorded["timelines"][rung]) for rung in TIMELINE_RUNGS]
    _, heads, seqlen, _ = stamps.SHAPE
    assert [timeline.blocks for timeline in timelines] == [heads, heads * seqlen // 64]
    assert all(timeline.span > 0 for timeline in timelines)
    assert read_numbers(ROOT / stamps.FIGURE) == recorded["timelines"]
