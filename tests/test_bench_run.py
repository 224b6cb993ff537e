"""`python -m bench run` as far as it goes without a GPU; torch on a CPU stands in for one."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench import contestants, exact, problems, run, summary, timing
from bench.__main__ import main
from bench.contestants import BACKENDS, DETERMINISTIC, OURS, is_ours, missing_peers
from bench.problems import BACKWARD, BOTH, DIRECTIONS, FORWARD, LADDER, PAPER, Problem
from bench.records import Key, part, record_of
from fa2_numba import testing
from fa2_numba.ladder import RUNGS
from fa2_numba.reference import attention_backward, attention_forward

ROOT = Path(__file__).parents[1]
TENSOR_CORE = ["fa1_tensor_core", "fa2_tensor_core", "fa3_hopper"]
SMALL = Problem(PAPER, "float16", 2, 4, 2, 24, 40, 16, True)
RIGHT = [OURS, "torch_flash", "torch_math"]


@pytest.fixture
def torch(monkeypatch):
    """torch, with the few functions that need a GPU replaced."""
    torch = pytest.importorskip("torch")
    ms = (number / 8 for number in itertools.count(8))
    for name, stand_in in {
        "import_torch": lambda: torch,
        "device": lambda: "cpu",
        "compute_capability": lambda: (9, 0),
        "synchronize": lambda: None,
        "free_memory": lambda: None,
        "clocks": lambda: {"clocks.sm": "1980 MHz"},
        "time_once": lambda run: next(ms),
        "host_microseconds": lambda run: 30.0,
        "matmul_tflops": lambda dtypes: dict.fromkeys(dtypes, 2e-5),
        "environment": lambda: {
            "gpu": "NVIDIA Test",
            "driver": "1",
            "driver_cuda": "13.0",
            "versions": {"numpy": "2"},
            "date": "2026-12-01",
        },
    }.items():
        monkeypatch.setattr(timing, name, stand_in)
    return torch


# The grid


def test_the_grid_is_that_of_the_paper():
    paper = [p for p in problems.problems() if p.group == PAPER]
    assert len(paper) == 2 * 3 * 6 * 2
    for p in paper:
        assert p.batch * p.seqlen == 16384 and p.heads * p.head_dim == 2048
        assert p.directions == DIRECTIONS and p.seqlen == p.seqlen_k and p.heads == p.kv_heads


def test_problems_are_all_different():
    found = [tuple(p.fields[name] for name in Key._fields[2:]) for p in problems.problems()]
    assert len(set(found)) == len(found)


def test_a_quick_run_has_every_group():
    quick = problems.problems(quick=True)
    assert {p.group for p in quick} == set(problems.GROUPS)
    assert {p.dtype for p in quick} == {"float16"} and len(quick) < len(problems.problems()) / 2


def test_flops_count_the_products():
    """SEMANTICS A13: 4 B S^2 H D, half if causal; backward 2.5, both 3.5 times that."""
    p = Problem(PAPER, "float16", 2, 3, 3, 8, 8, 16, False)
    assert p.flops(FORWARD) == 4 * 2 * 3 * 8**2 * 16
    assert p.flops(BACKWARD) == 2.5 * p.flops(FORWARD) and p.flops(BOTH) == 3.5 * p.flops(FORWARD)
    causal = Problem(PAPER, "float16", 2, 3, 3, 8, 8, 16, True)
    assert causal.flops(BACKWARD) == p.flops(BACKWARD) / 2
    decode = Problem(problems.DECODE, "float16", 2, 4, 1, 1, 8, 16, False)
    assert decode.flops(FORWARD) == 4 * 2 * 4 * 1 * 8 * 16
    assert (
        Problem(PAPER, "float16", 1, 32, 32, 16384, 16384, 64, False).forward_flops()
        == 134217728 * 16384
    )


def test_a_problem_is_named_in_a_few_words():
    assert str(SMALL) == "B2 H4/2 N24/40 d16 float16 causal"


# Exact attention


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_is_the_oracle_s(torch, monkeypatch, causal):
    monkeypatch.setattr(exact, "CHUNK", 5)
    q, k, v, dout = run.random_arrays(SMALL)
    host = [x.double().numpy() for x in (q, k, v)]
    O, _ = attention_forward(*host, causal=causal)
    dQ, dK, dV = attention_backward(dout.double().numpy(), *host, causal=causal)
    samples = exact.make_samples((q, k, v, dout), causal)
    assert [(s.batch, s.kv_head, s.heads) for s in samples] == [
        (0, 0, slice(0, 2)),
        (1, 1, slice(2, 4)),
    ]
    for s in samples:
        whole = [x[s.batch, :, s.heads].swapaxes(0, 1) for x in (O, dQ)]
        whole += [x[s.batch, :, s.kv_head] for x in (dK, dV)]
        for actual, wanted in zip(s.exact, whole, strict=True):
            np.testing.assert_allclose(actual.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_attention_is_a_rounding_away(torch, dtype):
    inputs = run.random_arrays(Problem(PAPER, dtype, 1, 1, 1, 100, 100, 16, True))
    (sample,) = exact.make_samples(inputs, True)
    for one, other in zip(sample.rounded, sample.exact, strict=True):
        assert one.dtype == inputs[0].dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        eps = torch.finfo(one.dtype).eps
        assert eps / 16 < error < 2 * eps


def test_the_rule_is_the_package_s(torch):
    wanted = torch.randn(7, 4, dtype=torch.float64)
    actual, rounded = wanted.half(), (wanted + 1e-3).half()
    actual[5, 2] += 0.01
    found = exact.compare(actual, wanted, rounded)
    assert found == testing.compare(actual.numpy(), wanted.numpy(), rounded.numpy())
    assert found.worst == (5, 2) and not found.passed
    actual[3, 1] = torch.nan
    found = exact.compare(actual, wanted, rounded)
    assert np.isnan(found.error) and not found.passed and found.worst == (3, 1)


# Contestants


def outputs_of(direction, name=OURS, problem=SMALL):
    inputs = run.random_arrays(problem)
    samples = exact.make_samples(inputs, problem.causal)
    (found,) = contestants.runs(problem, direction, inputs, [name], None).values()
    return found, samples


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["torch_math", OURS])
def test_contestants_compute_what_is_exact(torch, direction, name):
    problem = Problem(PAPER, "float16", 1, 2, 1, 16, 16, 16, True)
    found, samples = outputs_of(direction, name, problem)
    for _ in range(2 if direction == BACKWARD else 1):
        outputs = found()
        assert len(outputs) == (1 if direction == FORWARD else 3)
        assert exact.judge(outputs, samples).passed


def test_a_backward_pass_runs_its_forward_pass_once(torch, monkeypatch):
    forward, backward = [], []

    def forward_pass(*arrays, **options):
        forward.append(options)
        return options["out"], "lse"

    def backward_pass(*arrays, **options):
        backward.append((arrays, options))
        return tuple(options[name] for name in ("dq", "dk", "dv"))

    monkeypatch.setattr(contestants, "flash_attn_func", forward_pass)
    monkeypatch.setattr(contestants, "flash_attn_backward", backward_pass)
    inputs = q, k, v, dout = run.random_arrays(SMALL)
    for direction, name, count in (
        (BACKWARD, OURS, 1),
        (BACKWARD, DETERMINISTIC, 1),
        (BOTH, OURS, 3),
    ):
        forward.clear()
        (found,) = contestants.runs(SMALL, direction, inputs, [name], None).values()
        for _ in range(3):
            assert [x.shape for x in found()] == [q.shape, k.shape, v.shape]
        assert len(forward) == count
        arrays, options = backward[-1]
        assert arrays == (dout, q, k, v, forward[0]["out"], "lse")
        assert options["deterministic"] is (name == DETERMINISTIC)
        assert options["rung"] == forward[0]["rung"] == OURS and options["causal"]


def test_all_rungs_compete_on_the_ladder_and_tensor_cores_elsewhere(torch, monkeypatch):
    inputs = run.random_arrays(SMALL)
    on_ladder = Problem(LADDER, *list(SMALL.fields.values())[1:])

    def rungs(problem, direction):
        names = contestants.NAMES[: -len(contestants.PEERS)]
        return list(contestants.runs(problem, direction, inputs, names, None))

    assert rungs(on_ladder, FORWARD) == list(RUNGS)
    assert rungs(SMALL, FORWARD) == TENSOR_CORE
    monkeypatch.setattr(timing, "compute_capability", lambda: (8, 0))
    assert rungs(SMALL, FORWARD) == TENSOR_CORE[:2]
    assert rungs(SMALL, BACKWARD) == [OURS, DETERMINISTIC] and rungs(SMALL, BOTH) == [OURS]
    with_backward = [name for name, rung in RUNGS.items() if rung.plan_backward]
    assert rungs(on_ladder, BACKWARD) == [*with_backward, DETERMINISTIC]


def test_what_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    assert missing_peers(tmp_path) == dict.fromkeys(
        ("cupy", "flash_attn", "flash_attn_4"), "not installed"
    )
    assert missing_peers(None)["triton"] == "no file given (--triton)"


def test_a_triton_kernel_comes_from_a_file(torch, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "import torch\n"
        "def attention(q, k, v, causal, scale):\n"
        "    sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        "    return sdpa(q, k, v, is_causal=causal, scale=scale)\n"
    )
    problem = Problem(PAPER, "float16", 1, 2, 2, 16, 16, 16, True)
    inputs = run.random_arrays(problem)
    samples = exact.make_samples(inputs, True)
    for direction in DIRECTIONS:
        found = contestants.runs(problem, direction, inputs, ["triton"], kernel)
        assert exact.judge(found["triton"](), samples).passed


# The gate


def spoiled(right, number, value):
    def wrong():
        outputs = [x.clone() for x in right()]
        outputs[number][-1, -1, -1, -1] = value
        return tuple(outputs)

    return wrong


@pytest.fixture
def gate(torch):
    """What measures one backward pass, and right contestants: torch's formula in their place."""
    problem = Problem(PAPER, "float16", 2, 2, 2, 32, 32, 16, True)
    inputs = run.random_arrays(problem)
    samples = exact.make_samples(inputs, True)
    (right,) = contestants.runs(problem, BACKWARD, inputs, ["torch_math"], None).values()
    runs = dict.fromkeys((OURS, DETERMINISTIC, "torch_math"), right)
    return partial(run.measure, problem, BACKWARD, samples), runs


def test_right_contestants_are_timed(gate):
    measure, runs = gate
    found = measure(runs)
    assert [r["name"] for r in found["records"]] == list(runs) and not found["left_out"]
    for r in found["records"]:
        assert r["max_error"] <= r["allowed_error"] and r["host_us"] == 30 and r["rounds"] == 9
        assert 0 < r["ms_min"] <= r["ms"] <= r["ms_max"]
        assert r["first_call_ms"] > 0 and r["compiled"] == 0
    assert found["measured"][0]["clocks_after"] == {"clocks.sm": "1980 MHz"}


@pytest.mark.parametrize("name", [OURS, DETERMINISTIC])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("value", [np.nan, 40.0])
def test_a_wrong_gradient_of_ours_ends_the_run(gate, name, number, value):
    measure, runs = gate
    with pytest.raises(SystemExit, match=f"{name} is wrong, backward B2 H2 N32 d16 float16 causal"):
        measure(runs | {name: spoiled(runs[name], number, value)})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("No available kernel.\nAborting.", "No available kernel."),
        ("CUDA out of memory. Tried to allocate", "out of memory"),
    ],
)
def test_a_peer_that_refuses_is_kept_with_its_reason(gate, message, reason):
    measure, runs = gate

    def refuse():
        raise RuntimeError(message)

    found = measure(runs | {"torch_math": refuse})
    (left_out,) = found["left_out"]
    assert (left_out["name"], left_out["reason"]) == ("torch_math", reason)
    assert left_out["direction"] == BACKWARD and left_out["seqlen"] == 32
    assert "torch_math" not in {r["name"] for r in found["records"]}
    with pytest.raises(RuntimeError):
        measure(runs | {OURS: refuse})


def test_a_peer_that_finds_no_memory_beside_the_others_leaves_and_they_start_anew(
    gate, monkeypatch
):
    measure, runs = gate
    calls = itertools.count()

    def out_of_memory_later():
        if next(calls) > 4:
            raise RuntimeError("CUDA out of memory")
        return runs["torch_math"]()

    monkeypatch.setattr(timing, "time_once", lambda run: (run(), 1.0)[1])
    found = measure(runs | {"torch_math": out_of_memory_later})
    assert [(one["name"], one["reason"]) for one in found["left_out"]] == [
        ("torch_math", "out of memory")
    ]
    assert [(r["name"], r["rounds"]) for r in found["records"]] == [(OURS, 9), (DETERMINISTIC, 9)]


def test_a_wrong_peer_is_not_timed(gate):
    measure, runs = gate
    found = measure(runs | {"torch_math": spoiled(runs["torch_math"], 1, np.nan)})
    assert found["left_out"][0]["reason"].startswith("wrong: error nan")
    assert "torch_math" not in {r["name"] for r in found["records"]}


def test_deterministic_means_the_same_bits(gate):
    measure, runs = gate
    number = itertools.count()

    def other_bits():
        outputs = [x.clone() for x in runs[OURS]()]
        outputs[0][0, -1, 0, 0] += 1e-4 * next(number)
        return outputs

    measure(runs | {OURS: other_bits})
    with pytest.raises(SystemExit, match="other bits the second time"):
        measure(runs | {DETERMINISTIC: other_bits})


# The command


@pytest.fixture
def small_grid(torch, monkeypatch):
    """Four problems, and contestants that a CPU has; torch's formula is our stand-in."""

    def runs(problem, direction, inputs, names, triton):
        peers = real(problem, direction, inputs, ["torch_flash", "torch_math"], triton)
        return {name: peers.get(name, peers["torch_math"]) for name in names}

    real = contestants.runs
    monkeypatch.setattr(contestants, "runs", runs)
    found = [
        Problem(PAPER, dtype, 1, 2, 2, 16, 16, 16, causal)
        for dtype in ("float16", "bfloat16")
        for causal in (False, True)
    ]
    monkeypatch.setattr(problems, "problems", lambda quick: found[:1] if quick else found)
    monkeypatch.setattr(run, "NAMES", RIGHT)


def test_run_writes_every_problem_in_every_direction(small_grid, tmp_path, capsys):
    path = tmp_path / "new" / "run.json"
    assert main(["run", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["measured"]) == 4 * 3
    found = {(r["name"], r["direction"], r["dtype"], r["causal"]) for r in result["records"]}
    everything = itertools.product(RIGHT, DIRECTIONS, ("float16", "bfloat16"), (False, True))
    refused = {
        (r["name"], r["direction"], r["dtype"], r["causal"]): r["reason"]
        for r in result["left_out"]
    }
    assert found | set(refused) == set(everything) and not found & set(refused)
    assert not any(is_ours(name) for name, *_ in refused)
    assert set(result["missing_peers"]) >= {"triton"}
    assert "paper, forward, float16: fa2_tensor_core is so many times as fast as" in (
        capsys.readouterr().out
    )
    assert len(part(result, FORWARD)["records"]) + len(part(result, BOTH)["records"]) < len(found)


def test_a_run_is_resumed_where_it_stopped(small_grid, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    assert main(["run", "--out", str(path), "--direction", "forward"]) == 0
    before = json.loads(path.read_text())["records"]
    monkeypatch.setattr(timing, "time_once", lambda run: 77.0)
    assert main(["run", "--out", str(path), "--resume"]) == 0
    result = json.loads(path.read_text())
    assert result["records"][: len(before)] == before and len(result["measured"]) == 4 * 3
    assert {r["ms"] for r in result["records"][len(before) :]} == {77.0}
    again = path.read_text()
    assert main(["run", "--out", str(path), "--resume"]) == 0
    assert path.read_text() == again


def test_another_machine_cannot_resume(small_grid, tmp_path, capsys):
    path = tmp_path / "run.json"
    main(["run", "--out", str(path), "--quick"])
    text = path.read_text().replace("NVIDIA Test", "NVIDIA Other")
    path.write_text(text)
    assert main(["run", "--out", str(path), "--resume"]) == 2
    assert "gpu was NVIDIA Other, now it is NVIDIA Test" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize("arguments", [["--quick"], ["--dtype", "float16"], ["--name", OURS]])
def test_a_part_of_the_grid_is_written_only_where_told(small_grid, monkeypatch, capsys, arguments):
    monkeypatch.setattr(timing, "results_file", lambda *_: pytest.fail("would be written"))
    assert main(["run", *arguments, "--direction", "forward"]) == 0
    assert "-> None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seqlen-k", "7"], "no problem is left"),
        (["--triton", "nowhere.py"], "must be a Python file"),
        (["--name", "me"], "invalid choice: 'me'"),
    ],
)
def test_what_cannot_be_measured_is_refused(small_grid, capsys, arguments, says):
    with pytest.raises(SystemExit):
        main(["run", *arguments])
    assert says in capsys.readouterr().err


def test_the_file_has_a_record_a_line():
    content = {"gpu": "G", "records": [{"a": 1}, {"a": 2}], "left_out": []}
    text = run.as_lines(content)
    assert json.loads(text) == content and len(text.splitlines()) == 8


def test_a_record_has_the_fixed_fields():
    verdict = testing.compare(*3 * [np.ones(2, np.float16)])
    record = record_of("x", BACKWARD, SMALL, [3.0, 1.0, 2.0], verdict)
    assert set(Key._fields) <= set(record)
    assert (record["ms"], record["ms_min"], record["ms_max"]) == (2.0, 1.0, 3.0)
    assert record["tflops"] == pytest.approx(SMALL.flops(BACKWARD) / 2e9)


def test_a_summary_has_the_ratios_of_one_problem():
    verdict = testing.compare(*3 * [np.ones(2, np.float16)])
    records = [
        record_of(name, FORWARD, Problem(PAPER, "float16", 1, 1, 1, n, n, 64, False), [ms], verdict)
        for n in (64, 128)
        for name, ms in ((OURS, 1.0), ("torch_flash", 1.5 if n == 64 else 0.6))
    ]
    said = summary.describe({"records": records, "missing_peers": {"cupy": "not installed"}})
    assert said.splitlines() == [
        "paper, forward, float16: fa2_tensor_core is so many times as fast as",
        "  torch_flash: 0.949; at least 0.600, forward B1 H1 N128 d64 float16",
        "cupy: not installed",
    ]


@pytest.mark.gpu
def test_a_small_run_on_the_gpu(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    found = [Problem(LADDER, "float16", 1, 2, 2, 256, 256, 64, True)]
    monkeypatch.setattr(problems, "problems", lambda quick: found)
    assert main(["run", "--out", str(tmp_path / "run.json")]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    names = {r["name"] for r in result["records"] if r["direction"] == FORWARD}
    capability = timing.compute_capability()
    there = {name for name, rung in RUNGS.items() if rung.runs("float16", capability)}
    assert names >= {*there, "torch_flash", "torch_math"}
    assert all(r["host_us"] > 0 for r in result["records"])


@pytest.mark.parametrize("script", ["run", "train_gpt"])
@pytest.mark.parametrize(("argument", "found"), [("--help", "--out"), ("--quick", "needs PyTorch")])
def test_help_needs_no_torch_and_a_run_says_that_it_does(script, argument, found):
    program = f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['{argument}']; "
    program += f"runpy.run_module('bench.{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (argument != "--help")
    assert found in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_all_of_torch_s_backends_are_peers():
    assert set(BACKENDS.values()) == {
        "FLASH_ATTENTION",
        "CUDNN_ATTENTION",
        "EFFICIENT_ATTENTION",
        "MATH",
    }
