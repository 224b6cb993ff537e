"""`bench.train_gpt` without a GPU: formulas, summaries, and a tiny model trained on a CPU."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bench import timing, train_gpt
from bench.gpt import summary
from bench.train_gpt import CPU_SETUP, Setup
from fa2_numba.lessons.figures import read_numbers


@pytest.fixture
def model():
    """The module of the model, with ours replaced by torch's plain attention."""
    pytest.importorskip("torch")
    from bench.gpt import model

    return model


@pytest.fixture
def without_ours(monkeypatch, model):
    by_name = model.attention_by_name

    def replaced(name):
        return by_name("torch_math" if name == summary.OURS else name)

    monkeypatch.setattr(model, "attention_by_name", replaced)


# The text


def test_the_text_is_alice():
    text, characters = train_gpt.load_text()
    passage = "".join(characters[number] for number in text)
    assert passage.split(maxsplit=5)[:4] == ["ALICE'S", "ADVENTURES", "IN", "WONDERLAND"]
    assert passage.endswith("THE END\n") and "\r" not in passage
    assert (len(text), len(characters)) == (148_476, 72)


def test_batches_are_passages_that_a_seed_repeats():
    text = np.arange(100)
    setup = replace(CPU_SETUP, seqlen=99 - 1, batch=3)
    found = train_gpt.batches(text, setup, 50, seed=1)
    assert found.shape == (50, 3, 99)
    assert (np.diff(found) == 1).all() and set(found[..., 0].flat) == {0, 1}
    again, other = (train_gpt.batches(text, setup, 50, seed) for seed in (1, 2))
    assert (found == again).all() and (found != other).any()


def test_pairs_of_characters_are_counted():
    # After 0 comes 1 twice and 0 once; after 1 comes 0 once. One is added to each of the pairs.
    learned, held_out = np.array([0, 1, 0, 0, 1]), np.array([0, 1, 1])
    expected = -(math.log(3 / 5) + math.log(1 / 3)) / 2
    assert train_gpt.bigram_loss(learned, held_out, 2) == pytest.approx(expected)


def test_what_pairs_of_characters_tell_of_alice():
    text, characters = train_gpt.load_text()
    learned, held_out = train_gpt.split_text(text)
    assert len(held_out) == pytest.approx(len(text) / 10, abs=1)
    assert train_gpt.bigram_loss(learned, held_out, len(characters)) == pytest.approx(
        2.46, abs=0.02
    )


# Formulas


def test_flops_are_the_papers():
    setup = Setup(layers=24, heads=16, hidden=2048, seqlen=2048, batch=3, steps=9)
    parameters = 1_300_000_000
    one = 6 * 2048 * parameters + 12 * 24 * 2048 * 2048**2
    assert setup.flops_per_step(parameters) == 3 * one
    assert setup.tokens_per_step == 3 * 2048


def test_mfu_is_a_share_of_each_peak():
    setup = Setup(layers=1, heads=1, hidden=10, seqlen=10, batch=1, steps=2)
    run = {"parameters": 200, "ms_per_step": 1e-6}
    found = train_gpt.with_mfu(run, setup, {"matmul": 48.0, "spec": None})
    assert found["tflops"] == pytest.approx(24.0)
    assert found["mfu"] == {"matmul": pytest.approx(0.5), "spec": None}


def test_peaks_are_measured_and_from_the_data_sheet(monkeypatch):
    monkeypatch.setattr(timing, "matmul_tflops", lambda dtypes: dict.fromkeys(dtypes, 700.0))
    assert train_gpt.peaks_of("NVIDIA H200") == {"matmul": 700.0, "spec": 989.0}
    assert train_gpt.peaks_of("NVIDIA Test") == {"matmul": 700.0, "spec": None}


@pytest.mark.parametrize("power", [1, 2])
def test_the_exponent_of_memory_is_fitted(power):
    seqlens = [1024, 4096, 8192, 16384]
    peaks = [10**9, *(7 * seqlen**power for seqlen in seqlens[1:])]
    record = {"seqlens": seqlens, "bytes": peaks}
    assert summary.memory_exponent(record) == pytest.approx(power)
    # What did not fit takes no part.
    assert summary.memory_exponent(record | {"bytes": [*peaks[:-1], None]}) == pytest.approx(power)
    assert math.isnan(summary.memory_exponent(record | {"bytes": [*peaks[:2], None, None]}))


# Summaries


BIGRAM_LOSS = 2.0


def curve(name, nudged=0, shift=0.0, steps=60):
    losses = 4 * np.exp(-np.arange(steps) / 30) + shift
    return {
        "name": name,
        "nudged": nudged,
        "losses": losses.tolist(),
        "validation_loss": 1.5,
        "tokens_per_second": 123456.0,
        "ms_per_step": 10.0,
        "mfu": {"matmul": 0.456, "spec": None},
    }


def made_up_runs(shift):
    runs = [curve("fa2_numba", shift=shift), curve("torch_flash"), curve("torch_math", shift=0.01)]
    return runs + [curve("torch_flash", nudged, 0.1 * nudged) for nudged in (1, 2)]


def made_up_result(shift=0.02):
    runs = made_up_runs(shift)
    memory = [
        {"name": "fa2_numba", "seqlens": [4096, 8192], "bytes": [2**20, 2**21]},
        {"name": "standard", "seqlens": [4096, 8192], "bytes": [2**30, None]},
    ]
    return {"runs": runs, "summary": summary.summarize(runs, BIGRAM_LOSS), "memory": memory}


def test_losses_are_smoothed():
    assert summary.smoothed([1.0, 2.0, 3.0]).tolist() == [2.0]
    assert summary.smoothed(np.arange(30.0)) == pytest.approx(np.arange(11) + 9.5)


def test_curves_agree_when_nearer_than_nudged_ones():
    found = summary.summarize(made_up_runs(-0.15), BIGRAM_LOSS)
    assert found["from_flash"] == {
        "fa2_numba": pytest.approx(0.15),
        "torch_math": pytest.approx(0.01),
    }
    assert found["noise"] == pytest.approx(0.2) and found["agrees"]
    # 0.25 is 0.05 from the second nudged run.
    assert summary.summarize(made_up_runs(0.25), BIGRAM_LOSS)["agrees"]
    for shift in (0.41, -0.21, math.nan):
        assert not summary.summarize(made_up_runs(shift), BIGRAM_LOSS)["agrees"]


def test_a_curve_of_flash_that_is_not_a_number_agrees_with_none():
    runs = made_up_runs(0.0)
    runs[-2]["losses"][5] = math.nan
    assert not summary.summarize(runs, BIGRAM_LOSS)["agrees"]


@pytest.mark.parametrize(("loss", "learned"), [(1.69, True), (1.71, False), (math.nan, False)])
def test_learning_more_than_pairs(loss, learned):
    runs = made_up_runs(0.0)
    runs[0]["validation_loss"] = loss
    found = summary.summarize(runs, BIGRAM_LOSS)
    assert found["learned"] == learned and found["bigram_loss"] == BIGRAM_LOSS


def test_a_result_as_lines():
    text = summary.describe(made_up_result())
    assert "123,456 tokens/s, 45.6% of matmul, n/a of spec" in text
    assert "pairs of characters, counted: held out 2.000" in text
    assert "torch_flash, nudged: at most 0.2000; fa2_numba agrees" in text
    assert "fa2_numba    memory ~ seqlen^1.00; at the longest 2,097,152 bytes" in text
    assert "standard     memory ~ seqlen^nan; at the longest out of memory" in text
    assert "fa2_numba DISAGREES" in summary.describe(made_up_result(0.5))


def test_a_result_file_is_drawn_without_a_gpu(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "train_gpt.json"
    path.write_text(json.dumps(made_up_result()))
    train_gpt.main(["--draw", str(path)])
    numbers = read_numbers(tmp_path / "train_gpt.svg")
    assert len(numbers["losses"]) == 5
    assert numbers["memory"] == {"fa2_numba": [[4096, 1], [8192, 2]], "standard": [[4096, 1024]]}


# The model


def test_attention_of_torch_is_causal(model):
    import torch

    q, k, v = (torch.randn(2, 5, 3, 8, generator=torch.manual_seed(i)) for i in range(3))
    flash, plain = (model.attention_by_name(f"torch_{name}")(q, k, v) for name in ("flash", "math"))
    assert flash.shape == q.shape
    torch.testing.assert_close(flash, plain)
    torch.testing.assert_close(plain[:, 0], v[:, 0])


def test_a_model_starts_without_a_guess_and_sees_no_future(model):
    import torch

    torch.manual_seed(0)
    gpt = model.GPT(72, 16, 2, 2, 32, model.attention_by_name("torch_math"))
    x, y = torch.randint(72, (2, 4, 16))
    assert gpt(x, y).item() == pytest.approx(math.log(72), abs=0.1)
    guesses = []
    gpt.logits.register_forward_hook(lambda *call: guesses.append(call[-1]))
    gpt(x, y)
    x[:, 9:] = 0
    gpt(x, y)
    torch.testing.assert_close(guesses[0][:, :9], guesses[1][:, :9])
    assert not guesses[0][:, 9:].equal(guesses[1][:, 9:])


def test_the_same_model_trains_again_and_a_nudged_one_nearly_so(model):
    train = partial(train_gpt.train, "torch_math", CPU_SETUP, "cpu")
    one, again, *nudged = (train(nudged) for nudged in (0, 0, 1, 2))
    assert one["losses"] == again["losses"]
    assert one["parameters"] == 12 * 32**2 + 2 * 72 * 32 + 16 * 32 + 3 * 2 * 32
    for other in nudged:
        assert other["losses"] == pytest.approx(one["losses"], abs=0.01)
        assert other["losses"] != one["losses"]
    assert nudged[0]["losses"] != nudged[1]["losses"]


def test_training_learns(model):
    setup = replace(CPU_SETUP, steps=80, batch=8)
    losses = train_gpt.train("torch_math", setup, "cpu")["losses"]
    assert np.mean(losses[-20:]) < 3.8 < 4.2 < losses[0]


def test_our_attention_trains_in_the_simulator(model, monkeypatch):
    monkeypatch.setattr(train_gpt, "VALIDATION_BATCHES", 1)
    train = partial(train_gpt.train, setup=replace(CPU_SETUP, steps=2), device="cpu")
    ours, plain = train("fa2_numba"), train("torch_math")
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert ours["validation_loss"] == pytest.approx(plain["validation_loss"], abs=1e-4)


# The script


def test_training_script(without_ours, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "train_gpt.json"
    train_gpt.main(["--device", "cpu", "--steps", "4", "--out", str(path)])
    result = json.loads(path.read_text())
    assert [(run["name"], run["nudged"]) for run in result["runs"]] == [
        ("fa2_numba", 0),
        ("torch_flash", 0),
        ("torch_math", 0),
        ("torch_flash", 1),
        ("torch_flash", 2),
    ]
    assert all(len(run["losses"]) == 4 for run in result["runs"])
    assert result["setup"]["steps"] == 4 and result["memory"] == []
    assert len(read_numbers(path.with_suffix(".svg"))["losses"]) == 5
    assert "fa2_numba agrees" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shift", "steps", "message"),
    [
        (0.5, [], "differs by more than a rounding explains"),
        (0.0, ["--steps", "300"], "learned no more than pairs of characters tell"),
    ],
)
def test_failure_comes_after_the_file_is_written(monkeypatch, tmp_path, shift, steps, message):
    result = made_up_result(shift)
    result["summary"]["learned"] = False
    monkeypatch.setattr(train_gpt, "run_all", lambda *_: result)
    monkeypatch.setattr(train_gpt, "draw_file", lambda path: None)
    path = tmp_path / "train_gpt.json"
    with pytest.raises(SystemExit, match=message):
        train_gpt.main(["--device", "cpu", "--out", str(path), *steps])
    assert json.loads(path.read_text()) == result


@pytest.mark.parametrize("options", [["--quick"], ["--device", "cpu"]])
def test_small_runs_write_nothing_unasked(monkeypatch, capsys, options):
    setups = []
    monkeypatch.setattr(timing, "import_torch", lambda: None)
    monkeypatch.setattr(timing, "results_file", lambda *_: pytest.fail("would be written"))
    monkeypatch.setattr(train_gpt, "run_all", lambda *a: setups.append(a) or made_up_result())
    train_gpt.main(options)
    assert "-> None" in capsys.readouterr().out
    ((setup, device, seqlens),) = setups
    assert (setup.steps, device) == ((40, "cuda") if "--quick" in options else (3, "cpu"))
    assert len(seqlens) == (4 if "--quick" in options else 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps 1: must be at least 2"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--draw", "missing.json"], "--draw missing.json"),
    ],
)
def test_argument_errors(capsys, arguments, message):
    with pytest.raises(SystemExit):
        train_gpt.main(arguments)
    assert message in capsys.readouterr().err
