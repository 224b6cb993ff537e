"""`bench.backward` as far as it goes without a GPU; torch on a CPU stands in for one."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench import backward, backward_summary, forward, forward_summary, timing
from bench.backward_summary import CUDNN, DETERMINISTIC, FLASH, MARKERS, OURS
from fa2_numba import testing
from fa2_numba.reference import attention_backward

ROOT = Path(__file__).parents[1]


@pytest.fixture
def torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(timing, "import_torch", lambda: torch)
    return torch


def cpu_inputs(torch, batch, heads, seqlen, head_dim, dtype):
    """Q, K and V."""
    torch.manual_seed(0)
    sizes = batch, seqlen, heads, head_dim
    return tuple(torch.randn(sizes, dtype=getattr(torch, dtype)) for _ in range(3))


def head_inputs(torch, seqlen, dtype):
    """Q, K, V, dO of one head, the first tile of whose rows is not a whole one."""
    q, k, v = cpu_inputs(torch, 1, 1, seqlen, 16, dtype)
    return [x[0, :, 0] for x in (q, k, v, torch.randn_like(q))]


def as_arrays(tensors):
    return [x.double().numpy()[None, :, None] for x in tensors]


# The gate


@pytest.mark.parametrize("causal", [False, True])
def test_exact_gradients_are_the_oracles(torch, monkeypatch, causal):
    monkeypatch.setattr(backward, "CHUNK", 5)
    inputs = head_inputs(torch, 13, "float16")
    *qkv, dout = as_arrays(inputs)
    found = as_arrays(backward.exact_gradients(*inputs, causal))
    for actual, exact in zip(found, attention_backward(dout, *qkv, causal=causal), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_gradients_are_a_rounding_away(torch, monkeypatch, dtype):
    monkeypatch.setattr(backward, "CHUNK", 64)
    inputs = head_inputs(torch, 100, dtype)
    exact = backward.exact_gradients(*inputs, True)
    rounded = backward.rounded_gradients(*inputs, True)
    for one, other in zip(rounded, exact, strict=True):
        assert one.dtype == inputs[0].dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        eps = torch.finfo(one.dtype).eps
        assert eps / 16 < error < 2 * eps


def test_the_rule_is_the_packages(torch):
    exact = torch.randn(7, 4, dtype=torch.float64)
    actual, rounded = exact.half(), (exact + 1e-3).half()
    actual[5, 2] += 0.01
    found = backward.compare(actual, exact, rounded)
    assert found == testing.compare(actual.numpy(), exact.numpy(), rounded.numpy())
    assert found.worst == (5, 2) and not found.passed
    actual[3, 1] = torch.nan
    found = backward.compare(actual, exact, rounded)
    assert np.isnan(found.error) and not found.passed and found.worst == (3, 1)


@pytest.fixture
def problem(torch, monkeypatch):
    monkeypatch.setattr(forward, "TOKENS", 64)
    monkeypatch.setattr(forward, "COLUMNS", 32)
    monkeypatch.setattr(timing, "random_inputs", partial(cpu_inputs, torch))
    return forward.Problem("float16", 16, 32, True)


def exact_contestants(inputs, causal):
    """Every contestant rounds the exact gradients, but for cuDNN, which takes no bfloat16."""
    torch = timing.import_torch()

    def run():
        found = [torch.full_like(inputs[0], torch.nan) for _ in range(3)]
        for batch, head in itertools.product(*map(range, inputs[0].shape[::2])):
            one = [x[batch, :, head] for x in inputs]
            for whole, part in zip(found, backward.exact_gradients(*one, causal), strict=True):
                whole[batch, :, head] = part.to(whole.dtype)
        return tuple(found)

    def refuse():
        if inputs[0].dtype == torch.bfloat16:
            raise RuntimeError("No valid execution plans built.\nAborting.")
        return run()

    return dict.fromkeys((OURS, DETERMINISTIC, FLASH), run) | {CUDNN: refuse}


@pytest.fixture
def gate(torch, problem):
    """The check of one problem, and right contestants."""
    q, k, v = problem.random_inputs()
    inputs = q, k, v, torch.randn_like(q)
    samples = backward.make_samples(inputs, problem.causal)
    return partial(backward.check, problem, samples=samples), exact_contestants(inputs, True)


def spoiled(run, number, value):
    """The run with the last element of one gradient replaced."""

    def wrong():
        gradients = run()
        gradients[number][-1, -1, -1, -1] = value
        return gradients

    return wrong


def test_right_gradients_pass(gate):
    check, runs = gate
    verdicts = check(runs)
    assert list(verdicts) == [OURS, DETERMINISTIC, FLASH, CUDNN]
    assert all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("name", [OURS, DETERMINISTIC])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("value", [np.nan, 40.0])
def test_a_wrong_gradient_of_ours_ends_the_run(gate, name, number, value):
    check, runs = gate
    with pytest.raises(SystemExit, match=f"{name} is wrong on B2 H2 N32 d16 float16 causal"):
        check(runs | {name: spoiled(runs[name], number, value)})


def test_a_wrong_gradient_of_torch_is_told(gate, capsys):
    check, runs = gate
    assert not check(runs | {FLASH: spoiled(runs[FLASH], 1, np.nan)})[FLASH].passed
    assert "torch_flash is wrong on B2 H2 N32 d16 float16 causal" in capsys.readouterr().out


def test_who_refuses_is_left_out_but_not_ours(gate, capsys):
    check, runs = gate

    def refuse():
        raise RuntimeError("too small\nfor me")

    assert CUDNN not in check(runs | {CUDNN: refuse})
    assert "torch_cudnn does not take B2 H2 N32 d16 float16 causal: too small\n" in (
        capsys.readouterr().out
    )
    with pytest.raises(RuntimeError, match="too small"):
        check(runs | {OURS: refuse})


def test_deterministic_means_the_same_bits(gate):
    check, runs = gate
    number = itertools.count()

    def other_bits():
        gradients = runs[OURS]()
        gradients[0][0, -1, 0, 0] += 1e-3 * next(number)
        return gradients

    check(runs | {OURS: other_bits})
    with pytest.raises(SystemExit, match="other bits the second time"):
        check(runs | {DETERMINISTIC: other_bits})


@pytest.mark.parametrize("causal", [False, True])
def test_contestants_call_what_torch_has(torch, monkeypatch, causal):
    calls = []

    def flash_attn_backward(*arrays, **options):
        calls.append((arrays, options))
        return tuple(options[f"d{name}"] for name in "qkv")

    monkeypatch.setattr(backward, "flash_attn_backward", flash_attn_backward)
    sizes = 2, 128, 3, 64
    inputs = [torch.empty(sizes, dtype=torch.float16, device="meta") for _ in range(4)]
    runs = backward.contestants(inputs, causal)
    for run in runs.values():
        assert [tuple(x.shape) for x in run()] == 3 * [sizes]
    assert list(runs) == [OURS, DETERMINISTIC, FLASH, CUDNN]
    (arrays, options), (_, repeatable) = calls
    dout, q, k, v, out, lse = arrays
    assert (q, k, v, dout) == tuple(inputs)
    assert (out.shape, lse.shape, lse.dtype) == (sizes, (2, 3, 128), torch.float32)
    assert options["causal"] is causal and options["rung"] == OURS
    assert [options["deterministic"], repeatable["deterministic"]] == [False, True]
    assert options["dq"] is not repeatable["dq"]


# The script


@pytest.fixture
def small_grid(problem, monkeypatch):
    """The whole script on 64 tokens and 32 columns, in made-up times."""
    milliseconds = iter(range(10, 10**6))
    monkeypatch.setattr(timing, "time_once", lambda run: float(next(milliseconds)))
    monkeypatch.setattr(timing, "environment", lambda: {"gpu": "NVIDIA Test"})
    monkeypatch.setattr(backward, "matmul_tflops", lambda dtypes: dict.fromkeys(dtypes, 2e-5))
    monkeypatch.setattr(backward, "contestants", exact_contestants)
    for module, name, value in (
        (forward, "HEAD_DIMS", (16, 32)),
        (forward, "SEQLENS", (16, 64)),
        (forward, "QUICK_SEQLENS", (64,)),
        (forward_summary, "MEAN_HEAD_DIMS", (16,)),
        (forward_summary, "LEAST_SEQLEN", 64),
    ):
        monkeypatch.setattr(module, name, value)


def test_backward_script(small_grid, tmp_path, capsys):
    path = tmp_path / "new" / "backward.json"
    backward.main(["--out", str(path)])
    result = json.loads(path.read_text())
    records = result["records"]
    assert result["gpu"] == "NVIDIA Test" and len(records) == 8 * 4 + 8 * 3
    assert {r["direction"] for r in records} == {"backward"}
    for r in records:
        flops = 10 * r["batch"] * r["heads"] * r["seqlen"] ** 2 * r["head_dim"]
        assert r["tflops"] == pytest.approx(flops / (1 + r["causal"]) / r["ms"] / 1e9)
        assert r["ms_min"] <= r["ms"] <= r["ms_max"] and r["max_error"] <= r["allowed_error"]
    printed = capsys.readouterr().out
    assert "torch_cudnn does not take B4 H2 N16 d16 bfloat16: No valid execution plans" in printed
    assert "bfloat16, backward: fa2_tensor_core is so many times as fast as" in printed


def test_a_quick_run_writes_no_result(small_grid, monkeypatch, capsys):
    monkeypatch.setattr(timing, "results_file", lambda *_: pytest.fail("would be written"))
    backward.main(["--quick"])
    assert "-> None" in capsys.readouterr().out


def test_a_record_has_the_words_of_a_forward_record():
    verdict = testing.compare(*3 * [np.ones(2, np.float16)])
    arguments = "x", (2, 3, 8, 16), "float16", True, [3.0, 1.0, 2.0], verdict
    record, other = timing.backward_record(*arguments), timing.forward_record(*arguments)
    assert list(record) == list(other)
    different = {name for name in record if record[name] != other[name]}
    assert different == {"direction", "tflops"}
    assert record["tflops"] == pytest.approx(2.5 * other["tflops"])


# The summary


def made_up_result():
    """fa2 takes 1 ms; flash 0.9 to 1.2 ms by head dim; deterministic more where causal."""
    flash = {64: 1.2, 128: 0.9, 256: 1.1}
    records = []
    for p in forward.problems(quick=False):
        times = {OURS: 1.0, DETERMINISTIC: 1.2 if p.causal else 1.1, CUDNN: 0.5}
        times[FLASH] = flash[p.head_dim] - 0.2 * (p.causal and p.seqlen in (512, 2048))
        sizes = {"head_dim": p.head_dim, "seqlen": p.seqlen, "causal": p.causal}
        records += [
            {"name": name, "dtype": p.dtype, **sizes, "ms": ms, "tflops": 400 / ms}
            for name, ms in times.items()
        ]
    return {"matmul_tflops": {"float16": 800.0, "bfloat16": 500.0}, "records": records}


def test_a_summary_of_made_up_records():
    found = backward_summary.summarize(made_up_result())
    assert found.keys() == {"float16", "bfloat16"}
    s = found["float16"]
    by_head_dim = {d: 10 * [t] + 2 * [t - 0.2] for d, t in {64: 1.2, 128: 0.9, 256: 1.1}.items()}
    means = {d: np.exp(np.log(values).mean()) for d, values in by_head_dim.items()}
    assert s.by_head_dim == pytest.approx(means)
    assert s.over_flash == pytest.approx(np.sqrt(means[64] * means[128]))
    assert {d: r.value for d, r in s.lowest_over_flash.items()} == pytest.approx(
        {64: 1.0, 128: 0.7, 256: 0.9}
    )
    assert str(s.lowest_over_flash[128]) == "0.700 (head dim 128, 2048 tokens, causal)"
    assert s.over_cudnn == pytest.approx(0.5)
    assert s.deterministic_cost == pytest.approx(np.sqrt(1.1 * 1.2))
    assert s.most_deterministic_cost.value == 1.2 and s.most_deterministic_cost.causal
    assert (s.of_matmul, found["bfloat16"].of_matmul) == (0.5, 0.8)


def test_a_summary_as_lines():
    text = backward_summary.describe(made_up_result())
    assert "    head dim 128: 0.863; from 1024 tokens on at least 0.700 (head dim 128, 2048" in text
    assert "  deterministic: 1.149 times as long; at most 1.200 (head dim 64, 512 tokens" in text


def test_a_summary_does_without_cudnn():
    result = made_up_result()
    result["records"] = [r for r in result["records"] if r["name"] != CUDNN]
    assert backward_summary.summarize(result)["float16"].over_cudnn is None
    assert "cudnn" not in backward_summary.describe(result)
    assert "cuDNN" not in backward_summary.markdown_table(result)


def test_the_table_is_written_between_its_markers(tmp_path, capsys):
    record, page = tmp_path / "backward.json", tmp_path / "page.md"
    record.write_text(json.dumps(made_up_result()))
    page.write_text(f"above\n{MARKERS[0]}\nold\n{MARKERS[1]}\nbelow\n")
    arguments = ["--table", str(page), "--out", str(record)]
    for _ in range(2):
        backward.main(arguments)
        above, begin, *table, end, below = page.read_text().splitlines()
        assert (above, begin, end, below) == ("above", *MARKERS, "below")
    assert table[2] == "| 64 | none | 1,024 | 400 | 364 | 333 | 1.20 | 50% |"
    rows = [row for row in table if row.startswith("|")]
    assert len(rows) == 2 + 3 * 2 * 3 and len({row.count("|") for row in rows}) == 1
    assert max(map(len, table[-8:])) <= 100
    page.write_text("no markers\n")
    with pytest.raises(SystemExit):
        backward.main(arguments)
    assert page.read_text() == "no markers\n"
    assert f"must hold a line {MARKERS[0]}" in capsys.readouterr().err


def test_a_missing_record_is_an_argument_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        backward.main(["--table", str(tmp_path / "x.md"), "--out", str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err


# Without a GPU and torch


@pytest.mark.parametrize("script", ["backward", "train_gpt"])
@pytest.mark.parametrize(("argument", "found"), [("--help", "--out"), ("--quick", "needs PyTorch")])
def test_help_needs_no_torch_and_a_run_says_that_it_does(script, argument, found):
    program = f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['{argument}']; "
    program += f"runpy.run_module('bench.{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (argument != "--help")
    assert found in done.stdout + done.stderr and "Traceback" not in done.stderr
