"""`python -m bench`: files of results compared, and drawn."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import ceilings, plot, roofline, table, timing
from bench.__main__ import COMMANDS, main
from bench.records import Key, changes, part, read_results
from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.figures import read_numbers

RESULTS = Path(__file__).parents[1] / "bench/results/h200"
KEY = Key("ours", "forward", "float16", 1, 2, 2, 64, 64, 32, False)


def record(ms, key=KEY, spread=0.01, **changed):
    times = {"ms": ms, "ms_min": ms * (1 - spread), "ms_max": ms * (1 + spread)}
    return {**key._asdict(), **times, **changed}


def file_with(path, *records, **about):
    path.write_text(
        json.dumps(
            {"gpu": "G", "driver": "1", "versions": {"numpy": "2"}} | about | {"records": records}
        )
    )
    return path


def compared(capsys, *files):
    status = main(["compare", *map(str, files), "--json"])
    return status, json.loads(capsys.readouterr().out)


# Comparing


@pytest.mark.parametrize(
    ("now", "slower", "faster"), [(1.03, 1, 0), (0.97, 0, 1), (1.015, 0, 0), (1.0, 0, 0)]
)
def test_a_change_counts_beyond_the_spread(tmp_path, capsys, now, slower, faster):
    old = file_with(tmp_path / "a.json", record(1.0))
    new = file_with(tmp_path / "b.json", record(now))
    status, said = compared(capsys, old, new)
    assert (len(said["slower"]), len(said["faster"]), said["compared"]) == (slower, faster, 1)
    assert status == slower and said["conditions"] == []
    assert said["speedup_by_name"]["ours"] == pytest.approx(1 / now)


def test_only_what_both_have_is_compared_and_the_rest_is_counted(tmp_path, capsys):
    longer, gone = KEY._replace(seqlen=128), KEY._replace(name="gone")
    old = file_with(tmp_path / "a.json", record(1.0), record(2.0, gone), record(2.0, longer))
    new = file_with(tmp_path / "b.json", record(1.0), record(9.0, KEY._replace(causal=True)))
    status, said = compared(capsys, old, new)
    assert status == 0 and said["compared"] == 1
    assert said["only_before"] == {"gone": 1, "ours": 1} and said["only_after"] == {"ours": 1}


def test_other_conditions_are_named(tmp_path, capsys):
    old = file_with(tmp_path / "a.json", record(1.0))
    new = file_with(tmp_path / "b.json", record(1.0), driver="2", versions={"torch": "3"})
    assert compared(capsys, old, new)[1]["conditions"] == [
        "driver: 1 -> 2",
        "numpy: 2 -> None",
        "torch: None -> 3",
    ]


def test_people_get_a_table_of_what_changed(tmp_path, capsys):
    old = file_with(tmp_path / "a.json", record(1.0))
    new = file_with(tmp_path / "b.json", record(2.0), gpu="H")
    assert main(["compare", str(old), str(new)]) == 1
    printed = capsys.readouterr().out
    assert "not the same: gpu: G -> H" in printed and "slower" in printed
    assert "1 compared: 1 slower, 0 faster, 0 within their spread" in printed
    assert "ours: 0.500 times as fast" in printed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must be JSON with records"),
        ("nothing", "must be JSON with records"),
        ('{"records": [{}]}', "record 0 lacks or misuses 'name'"),
        (json.dumps({"records": [record(1.0), record(2.0)]}), "stands there twice"),
        (json.dumps({"records": [record(float("nan"))]}), "must be 0 < min <= ms"),
        (json.dumps({"records": [record(1.0, ms_max=0.5)]}), "must be 0 < min <= ms"),
    ],
)
def test_a_file_that_holds_no_results_is_refused_in_one_line(tmp_path, capsys, text, says):
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert main(["compare", str(bad), str(RESULTS / "run.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert "bad.json" in printed.err and says in printed.err


def test_files_without_anything_in_common_are_refused(capsys):
    files = [str(RESULTS / f"{name}.json") for name in ("run", "ladder")]
    assert main(["compare", *files]) == 2
    assert "in common" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "ladder"])
def test_committed_files_can_be_compared(capsys, name):
    file = RESULTS / f"{name}.json"
    status, said = compared(capsys, file, file)
    assert status == 0 and said["compared"] == len(read_results(file).times) > 20
    assert all(change.speedup == 1 for change in changes(*[read_results(file)] * 2))


def test_a_problem_is_named_in_a_few_words():
    assert KEY.problem == "forward B1 H2 N64 d32 float16"
    other = KEY._replace(heads=6, seqlen=1, causal=True)
    assert other.problem == "forward B1 H6/2 N1/64 d32 float16 causal"


# Drawing


@pytest.mark.parametrize("name", plot.PICTURES)
def test_committed_pictures_show_the_committed_numbers(name):
    source, draw = plot.PICTURES[name]
    _, fresh = draw(json.loads((RESULTS / f"{source}.json").read_text()))
    assert read_numbers(RESULTS / f"{name}.svg") == json.loads(json.dumps(fresh))


def test_lines_go_through_the_records():
    result = json.loads((RESULTS / "run.json").read_text())
    records = [r for r in part(result, "forward")["records"] if r["name"] in plot.LOOKS]
    lines = read_numbers(RESULTS / "speed_forward.svg")["causal, D = 128"]
    for one in records:
        if (one["dtype"], one["head_dim"], one["causal"]) == ("float16", 128, True):
            assert [one["seqlen"], one["tflops"]] in lines[one["name"]]
    assert len(lines) == 5 and all(len(points) == 6 for points in lines.values())


def test_a_folder_is_drawn_as_far_as_it_goes(tmp_path, capsys):
    shutil.copy(RESULTS / "ladder.json", tmp_path)
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "ladder.svg")]
    assert [path.name for path in tmp_path.glob("*.svg")] == ["ladder.svg"]


def test_a_folder_without_results_and_a_broken_file_are_refused(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no results to draw" in capsys.readouterr().err
    (tmp_path / "ladder.json").write_text("{}")
    assert main(["plot", str(tmp_path)]) == 2
    assert "ladder.json: KeyError" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg"))


def test_the_committed_roofline_shows_the_committed_numbers():
    names = ("ceilings", "ladder", "run")
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}
    _, fresh = roofline.draw(results)
    assert read_numbers(RESULTS / "roofline.svg") == json.loads(json.dumps(fresh))
    measured = {r["name"] for r in (*results["ladder"]["records"], *results["run"]["records"])}
    assert set(fresh["rungs"]) == measured & set(RUNGS)
    for dtype, _, tflops in fresh["rungs"].values():
        assert 0 < tflops < fresh["matmul_tflops"][dtype]


def test_the_ladder_s_table_has_the_ratios_of_one_run():
    result = json.loads((RESULTS / "run.json").read_text())
    shape = {"group": "ladder", "direction": "forward", "seqlen": 2048, "causal": False}
    tflops = {r["name"]: r["tflops"] for r in result["records"] if shape.items() <= r.items()}
    rows = table.ladder_table(result).splitlines()
    peak = result["matmul_tflops"]["float16"]
    assert f"of a matrix product ({peak:.0f} TFLOP/s)" in rows[0] and len(rows) == 2 + len(
        tflops.keys() & RUNGS
    )
    ours, flash, cudnn = (
        tflops[name] for name in ("fa2_tensor_core", "torch_flash", "torch_cudnn")
    )
    ratios = f"{ours / tflops['standard']:.3g} | {ours / flash:.3g} | {ours / cudnn:.3g}"
    share = ours / result["matmul_tflops"]["float16"]
    assert rows[-1] == f"| `fa2_tensor_core` | {ours:.3g} | {ratios} | {share:.1%} |"


def test_other_shapes_have_the_ratios_of_one_problem():
    result = json.loads((RESULTS / "run.json").read_text())
    rows = table.other_table(result).splitlines()
    decode = {"group": "decode", "seqlen_k": 4096, "head_dim": 64, "kv_heads": 8}
    ms = {r["name"]: r["ms"] for r in result["records"] if decode.items() <= r.items()}
    ours = ms["fa2_tensor_core"]
    peers = [f"{ms[name] / ours:.2f}" for name in ("torch_flash", "torch_cudnn", "torch_math")]
    problem = "forward B16 H32/8 N1/4096 d64 float16"
    assert f"| {problem} | {ours:.3g} | {' | '.join(peers)} |" in rows


def test_a_roofline_without_ceilings_is_refused(tmp_path, capsys):
    shutil.copy(RESULTS / "ladder.json", tmp_path)
    assert main(["roofline", str(tmp_path)]) == 2
    assert "ceilings.json" in capsys.readouterr().err


def test_a_rate_has_its_spread():
    assert ceilings._spread([8.0, 2.0, 4.0]) == {"median": 4.0, "min": 2.0, "max": 8.0}


@pytest.mark.gpu
def test_ceilings_are_measured(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(ceilings, "COPY_BYTES", 2**28)
    monkeypatch.setattr(timing, "MATMUL_SIZE", 2048)
    assert main(["ceilings", "--out", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["gpu"] == timing.environment()["gpu"]
    assert 0 < found["copy_terabytes"]["min"] <= found["copy_terabytes"]["median"]
    assert set(found["matmul_tflops"]) == set(ceilings.DTYPES)


# The command


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert "usage: " in capsys.readouterr().out


def test_the_readme_has_today_s_tables(tmp_path):
    page = tmp_path / "README.md"
    shutil.copy(table.PAGE, page)
    assert main(["table", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == table.PAGE.read_text(encoding="utf-8")


def test_a_page_without_a_place_for_tables_is_refused(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    assert main(["table", str(page)]) == 2
    assert "page.md" in capsys.readouterr().err and page.read_text() == "# Nothing\n"


@pytest.mark.parametrize("arguments", [[], ["run fast"], ["--quick"]])
def test_an_unknown_command_is_refused(capsys, arguments):
    assert main(arguments) == 2
    assert f"must be one of {', '.join(COMMANDS)}" in capsys.readouterr().err
