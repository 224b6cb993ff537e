"""The course's machinery: grading, releasing, hints, judging, pictures."""

import json
import re
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest

pytest.importorskip("jupytext")
pytest.importorskip("matplotlib")

from fa2_numba.__main__ import main
from fa2_numba.lessons import build, notebooks
from fa2_numba.lessons.exercises import (
    Exercise,
    ExerciseError,
    NotSolved,
    all_exercises,
    check,
    hint,
)
from fa2_numba.lessons.exercises.judging import expect_close, expect_counts, expect_equal
from fa2_numba.lessons.figures import Picture, read_numbers
from fa2_numba.lessons.figures.style import new_figure
from fa2_numba.lessons.kernels.first import copy_without_tail, double
from fa2_numba.lessons.show import expected, show_source
from fa2_numba.simulator import simulate

ROOT = Path(__file__).parents[1]
COPY = """
from numba import cuda

@cuda.jit
def copy_with_tail(source, target):
    i = cuda.grid(1)
    if i < source.size:
        target[i] = source[i]
"""
BYTES = """
def predict_bytes(seqlen_q, seqlen_k, head_dim, block_m, block_n):
    return 1, 1
"""
CELL = '{"cells": [{"cell_type": "code", "source": "x", "metadata": {"nbgrader": %s}}]}'
FOREVER = """
def sink_head(q, k, lse):
    while True:
        pass
"""


def graded(capsys, path, *options):
    """Exit status, and what `grade --json` printed."""
    status = main(["grade", str(path), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def file_with(tmp_path, text):
    path = tmp_path / "homework.py"
    path.write_text(text)
    return path


def points(result):
    return {one["id"]: one["points"] for one in result["exercises"]}


# Grading


def test_a_file_gets_the_points_of_each_exercise_that_it_answers(tmp_path, capsys):
    status, result = graded(capsys, file_with(tmp_path, COPY + BYTES))
    assert status == 1
    assert points(result) == {"00.copy": 1, "01.predict_bytes": 0}
    assert (result["points"], result["of"]) == (1, 3)
    assert "must be" in result["exercises"][1]["message"]


def test_all_points_end_with_status_0(tmp_path, capsys):
    status, result = graded(capsys, file_with(tmp_path, COPY))
    assert status == 0 and result["points"] == result["of"] == 1


@pytest.mark.parametrize("folder", ["", "solutions/"])
def test_a_lesson_s_notebook_is_graded_by_its_cells(folder, capsys):
    status, result = graded(capsys, ROOT / f"notebooks/{folder}00_kernel.ipynb")
    assert (status, points(result)) == ((0, {"00.copy": 1}) if folder else (1, {"00.copy": 0}))
    assert folder or "not written yet" in result["exercises"][0]["message"]


def test_people_get_a_table_and_what_is_wrong(tmp_path, capsys):
    assert main(["grade", str(file_with(tmp_path, COPY + BYTES))]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"00\.copy +1 +1", printed) and re.search(r"all +1 +3", printed)
    assert "01.predict_bytes: not yet. bytes read" in printed


def test_an_answer_that_never_ends_costs_its_own_points_alone(tmp_path, capsys):
    start = time.monotonic()
    status, result = graded(capsys, file_with(tmp_path, COPY + FOREVER), "--seconds", "8")
    assert time.monotonic() - start < 40
    assert status == 1 and points(result) == {"00.copy": 1, "12.sink_head": 0}
    assert "not judged within 8 s" in result["exercises"][1]["message"]


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("raise SystemExit(0)", "ended with status 0 before it was judged"),
        ("import os; os._exit(3)", "ended with status 3 before it was judged"),
        ("1 / 0", "ZeroDivisionError"),
        ("def copy_with_tail(source, target): pass", "It is a plain function: must be a kernel"),
        ("copy_with_tail = None", "copy_with_tail is a NoneType: must be a kernel"),
    ],
    ids=["exits", "dies", "fails", "does nothing", "is nothing"],
)
def test_an_answer_that_breaks_off_gets_no_points(tmp_path, capsys, before, says):
    _, result = graded(capsys, file_with(tmp_path, f"{COPY}\n{before}\n"))
    assert points(result) == {"00.copy": 0} and says in result["exercises"][0]["message"]


def test_output_of_an_answer_does_not_disturb(tmp_path, capsys):
    flood = "import sys\nprint('x' * 10_000_000)\nsys.stderr.write('y' * 10_000_000)\n"
    status, result = graded(capsys, file_with(tmp_path, COPY + flood))
    assert status == 0 and result["points"] == 1


def test_a_process_that_lives_on_does_not_hold_the_grader(tmp_path, capsys):
    child = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    )
    start = time.monotonic()
    assert graded(capsys, file_with(tmp_path, COPY + child))[0] == 0
    assert time.monotonic() - start < 30


def test_notebook_magic_and_other_cells_are_not_run(tmp_path, capsys):
    notebook = notebooks.read_lesson(ROOT / "notebooks/source/00_kernel.py")
    notebook.cells[1].source = "%matplotlib inline\n" + notebook.cells[1].source
    notebook.cells.append(nbformat.v4.new_code_cell("raise SystemExit"))
    path = tmp_path / "homework.ipynb"
    notebooks.save(notebook, path)
    assert graded(capsys, path)[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "must end with .ipynb or .py"),
        ("a.ipynb", "{}", "is no notebook"),
        ("a.ipynb", "nothing", "is no notebook"),
        ("a.py", "def (", "is no Python file"),
        ("a.py", "x = 1", "holds no answer"),
        ("a.ipynb", '{"cells": []}', "holds no answer"),
        ("a.ipynb", CELL % '{"solution": true}', "is no notebook of a lesson .KeyError"),
        ("a.ipynb", CELL % "null", "holds no answer"),
        (
            "a.ipynb",
            CELL % '{"solution": true, "grade_id": "00-copy"}',
            "has no cell with the tag 'setup'",
        ),
    ],
)
def test_a_file_that_cannot_be_graded_is_refused_in_one_line(tmp_path, capsys, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    assert main(["grade", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert str(path) in printed.err and re.search(says, printed.err)


def test_a_missing_file_and_a_bad_limit_are_refused(tmp_path, capsys):
    assert main(["grade", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["grade", str(file_with(tmp_path, COPY)), "--seconds", "0"])
    assert "--seconds 0.0: must be positive" in capsys.readouterr().err


def test_a_file_and_a_notebook_get_the_same(tmp_path, capsys):
    notebook = nbformat.read(ROOT / "notebooks/solutions/03_gpu_bugs.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kept = [code[0], *(c for c in code if c.metadata.get("nbgrader", {}).get("solution"))]
    file = file_with(tmp_path, "\n".join(cell.source for cell in kept))
    assert graded(capsys, file) == graded(capsys, ROOT / "notebooks/solutions/03_gpu_bugs.ipynb")


def changed(tmp_path, change):
    """The solution of lesson 03, its cells changed in place."""
    notebook = nbformat.read(ROOT / "notebooks/solutions/03_gpu_bugs.ipynb", as_version=4)
    change(notebook.cells)
    path = tmp_path / "homework.ipynb"
    notebooks.save(notebook, path)
    return path


def of_exercise(cells, id):
    return next(c for c in cells if c.metadata.get("nbgrader", {}).get("grade_id") == id)


def test_a_deleted_answer_has_no_points_and_counts(tmp_path, capsys):
    path = changed(tmp_path, lambda cells: cells.remove(of_exercise(cells, "03-divergence")))
    status, result = graded(capsys, path)
    assert status == 1 and points(result)["03.divergence"] == 0 < points(result)["03.race"]
    (message,) = [one["message"] for one in result["exercises"] if one["message"]]
    assert message == "03.divergence: the answer's cell is missing."


def test_a_copied_cell_belongs_to_the_answer(tmp_path, capsys):
    def copy(cells):
        cell = of_exercise(cells, "03-race")
        extra = nbformat.v4.new_code_cell("helper = 1", metadata=cell.metadata)
        cells.insert(cells.index(cell) + 1, extra)

    assert graded(capsys, changed(tmp_path, copy))[0] == 0


def test_a_broken_answer_and_a_replaced_check_cost_their_own_points_alone(tmp_path, capsys):
    def spoil(cells):
        of_exercise(cells, "03-race").source = "def ("
        of_exercise(cells, "03-tail").source = "check = print"
        of_exercise(cells, "03-tail-check").source = "print('03.tail: right.')"

    _, result = graded(capsys, changed(tmp_path, spoil))
    earned = points(result)
    assert earned["03.race"] == earned["03.tail"] == 0 < earned["03.divergence"]


def test_threads_that_an_answer_leaves_behind_are_not_waited_for(tmp_path, capsys):
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    start = time.monotonic()
    assert graded(capsys, file_with(tmp_path, COPY + threads))[0] == 0
    assert time.monotonic() - start < 30


# Student versions


def test_release_writes_the_student_s_notebooks(tmp_path, capsys):
    lessons = [
        str(ROOT / f"notebooks/solutions/{name}.ipynb") for name in ("00_kernel", "10_backward")
    ]
    assert main(["release", *lessons, "--to", str(tmp_path / "new/students")]) == 0
    for lesson in lessons:
        name = Path(lesson).name
        written = nbformat.read(tmp_path / "new/students" / name, as_version=4)
        assert written == nbformat.read(ROOT / "notebooks" / name, as_version=4)
    printed = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in printed] == [Path(lesson).name for lesson in lessons]


def test_release_takes_sources(tmp_path):
    source = ROOT / "notebooks/source/00_kernel.py"
    assert main(["release", str(source), "--to", str(tmp_path)]) == 0
    assert "raise NotImplementedError()" in (tmp_path / "00_kernel.ipynb").read_text()


def test_release_overwrites_only_if_told_to_and_never_the_original(tmp_path, capsys):
    lesson = tmp_path / "00_kernel.ipynb"
    lesson.write_bytes((ROOT / "notebooks/solutions/00_kernel.ipynb").read_bytes())
    before = lesson.read_bytes()
    for options in ([], ["--force"]):
        assert main(["release", str(lesson), "--to", str(tmp_path), *options]) == 2
        assert "is the lesson itself" in capsys.readouterr().err
        assert lesson.read_bytes() == before
    students = tmp_path / "students"
    assert main(["release", str(lesson), "--to", str(students)]) == 0
    (students / lesson.name).write_text("homework")
    assert main(["release", str(lesson), "--to", str(students)]) == 2
    assert "exists: give another --to, or --force" in capsys.readouterr().err
    assert (students / lesson.name).read_text() == "homework"
    assert main(["release", str(lesson), "--to", str(students), "--force"]) == 0
    assert "YOUR CODE HERE" in (students / lesson.name).read_text()


INVALID = (
    '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": '
    '[{"id": "a", "cell_type": "code", "source": "", "metadata": {}}]}'
)


@pytest.mark.parametrize("text", ["{}", INVALID], ids=["empty", "no outputs"])
def test_release_writes_nothing_if_one_lesson_is_bad(tmp_path, capsys, text):
    bad = tmp_path / "bad.ipynb"
    bad.write_text(text)
    lesson = str(ROOT / "notebooks/solutions/00_kernel.ipynb")
    assert main(["release", lesson, str(bad), "--to", str(tmp_path / "students")]) == 2
    assert "bad.ipynb" in capsys.readouterr().err and not (tmp_path / "students").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("### END SOLUTION", ""),
        ("    ### BEGIN SOLUTION", "    #### BEGIN SOLUTION"),
        ("    ### BEGIN SOLUTION\n", "    x = 1  ### BEGIN SOLUTION\n"),
        ("SOLUTION\n", "solution\n"),
    ],
    ids=["no end", "four marks", "behind code", "lower case"],
)
def test_a_solution_whose_markers_do_not_match_is_not_handed_out(tmp_path, capsys, old, new):
    source = (ROOT / "notebooks/source/00_kernel.py").read_text()
    assert old in source
    lesson = tmp_path / "00_kernel.py"
    lesson.write_text(source.replace(old, new))
    assert main(["release", str(lesson), "--to", str(tmp_path / "students")]) == 2
    error = capsys.readouterr().err
    assert str(lesson) in error and "must stand between" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "students").exists()


def test_blanks_behind_markers_and_lost_metadata_hide_the_solution_all_the_same(tmp_path):
    notebook = notebooks.read_lesson(ROOT / "notebooks/source/00_kernel.py")
    for cell in notebook.cells:
        cell.source = cell.source.replace(" SOLUTION\n", " SOLUTION  \n")
        cell.metadata.pop("nbgrader", None)
    text = "\n".join(cell.source for cell in notebooks.student_version(notebook).cells)
    assert "raise NotImplementedError()" in text and "target[i] = source[i]" not in text


def test_a_student_s_notebook_is_not_released_again(tmp_path, capsys):
    student = str(ROOT / "notebooks/00_kernel.ipynb")
    assert main(["release", student, "--to", str(tmp_path)]) == 2
    assert "must stand between" in capsys.readouterr().err


def test_release_into_a_file_is_refused(tmp_path, capsys):
    file = tmp_path / "students"
    file.write_text("")
    lesson = str(ROOT / "notebooks/solutions/00_kernel.ipynb")
    assert main(["release", lesson, "--to", str(file)]) == 2
    assert "students" in capsys.readouterr().err


def test_cells_have_what_nbgrader_asks_for():
    """Its schema, version 3: which keys, and ids that are unique in a notebook."""
    keys = {"grade", "grade_id", "locked", "schema_version", "solution", "task", "cell_type"}
    for path in build.sources():
        cells = [c for c in notebooks.read_lesson(path).cells if "nbgrader" in c.metadata]
        ids = [cell.metadata.nbgrader.grade_id for cell in cells]
        assert ids and len(set(ids)) == len(ids)
        for cell in cells:
            data = cell.metadata.nbgrader
            assert set(data) == keys | ({"points"} if data.grade else set())
            assert data.schema_version == 3 and re.fullmatch(r"[\w-]+", data.grade_id)
            assert data.locked == data.grade != data.solution
            assert data.solution == ("### BEGIN SOLUTION" in cell.source)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_an_unknown_lesson_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        build.main(["77"])
    assert "lesson '77': must be one of 00, " in capsys.readouterr().err


# Exercises


def test_three_hints_say_more_and_more(capsys):
    for exercise in all_exercises():
        for number in (1, 2, 3):
            hint(exercise.id, number)
        assert capsys.readouterr().out == "".join(f"{text}\n" for text in exercise.hints)
        assert len(set(exercise.hints)) == 3


@pytest.mark.parametrize("number", [0, 4, True, "1", 1.0, None])
def test_a_hint_that_there_is_not_is_refused(number):
    with pytest.raises(ExerciseError, match="must be 1 to 3"):
        hint("00.copy", number)


@pytest.mark.parametrize("id", ["00.paste", "77.copy", "copy", None, "00_copy"])
def test_an_unknown_exercise_is_refused_with_all_there_are(id):
    with pytest.raises(ExerciseError, match=r"must be one of 00\.copy, 01\.predict_bytes, "):
        check(id, None)


def test_what_is_wrong_is_shown_without_a_traceback():
    with pytest.raises(NotSolved) as wrong:
        check("00.copy", copy_without_tail)
    (shown,) = wrong.value._render_traceback_()
    assert shown.startswith("00.copy: the simulator refuses what a GPU would punish. OutOfBounds")
    assert shown.endswith('Help: hint("00.copy", 1), then 2, then 3.')


def test_what_only_looks_right_is_rejected():
    with pytest.raises(
        NotSolved, match="target .* is wrong in 8 of 8 places: at .0,. 2, must be 1"
    ):
        check("00.copy", double)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "copy"}, "must be like '07.split_q'"),
        ({"points": 0}, "must be at least 1"),
        ({"hints": ("one", "two", "")}, "must be 3 texts"),
    ],
)
def test_an_exercise_that_cannot_be_is_refused(change, says):
    whole = {"id": "00.a", "answer": "f", "points": 1, "hints": ("a", "b", "c"), "judge": print}
    with pytest.raises(ValueError, match=says):
        Exercise(**whole | change)


# Judging


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([1.0, np.nan], "1 of them are NaN"),
        ([np.nan, np.nan], "wrong in 2 of 2 places"),
        ([1.0, 2.2], "at .1,. 2.2, must be 2"),
        ([1.0, np.inf], "inf, must be 2"),
        ([1.0], r"shape \(1,\): must be \(2,\)"),
        (None, "is a NoneType: must be numbers"),
        ("text", "is a str: must be numbers"),
        (["1", "2"], "is a list: must be numbers"),
        ([1 + 5j, 2], "is a list: must be numbers"),
        ([[1], [1, 2]], "is a list: must be numbers"),
    ],
)
def test_numbers_that_are_not_close_are_named(found, says):
    with pytest.raises(NotSolved, match=says):
        expect_close("x", found, np.array([1.0, 2.0]), 0.1)


def test_numbers_that_differ_in_their_last_digits_are_shown_with_them():
    with pytest.raises(NotSolved, match="0.10000000149011612, must be 0.1000000000000000"):
        expect_close("x", np.float32(0.1), 0.1)


def test_infinities_are_close_to_themselves_alone():
    expect_close("x", [-np.inf, 1.05], np.array([-np.inf, 1.0]), 0.1)
    with pytest.raises(NotSolved):
        expect_close("x", [np.inf], np.array([-np.inf]), 1e300)
    with pytest.raises(NotSolved):
        expect_close("x", [np.nan], np.array([np.nan]), 1.0)


def test_counts_that_differ_are_named_with_the_reason():
    source, target = np.zeros(8, np.float32), np.zeros(8, np.float32)
    one, two = (simulate(double, progress=False)[blocks, 4](source, target) for blocks in (1, 2))
    expect_counts(one, ["barriers"], two, "why")
    with pytest.raises(NotSolved, match="global_load_bytes is 16: must be 32. It is so."):
        expect_counts(one, ["barriers", "global_load_bytes"], two, "It is so.")
    with pytest.raises(NotSolved, match="x is 3: must be 4"):
        expect_equal("x", 3, 4)


# What lessons print and show


def test_source_is_shown_from_a_text_to_another(capsys):
    show_source(double, "if i <", "target[i]")
    assert capsys.readouterr().out == "if i < source.size:\n    target[i] = 2 * source[i]\n"
    with pytest.raises(ValueError, match="must be in the source"):
        show_source(double, "nowhere")


def test_an_error_that_does_not_come_is_an_error(capsys):
    with expected(ValueError):
        raise ValueError("as told")
    assert capsys.readouterr().out == "ValueError: as told\n"
    with pytest.raises(AssertionError, match="expected: ValueError"), expected(ValueError):
        pass
    with pytest.raises(TypeError), expected(ValueError):
        raise TypeError


@pytest.fixture
def picture():
    figure = new_figure((2.0, 1.0))
    figure.subplots().plot([1, 2], [3, 4])
    return Picture(figure, 'A line from 3 to 4, "up" & away < 5', {"y": [3, 4]})


def test_a_picture_is_svg_with_words_in_a_notebook(picture):
    shown = picture._repr_mimebundle_()
    assert set(shown) == {"image/svg+xml", "text/plain"} and shown["text/plain"] == picture.alt
    svg = shown["image/svg+xml"]
    assert "<title>A line from 3 to 4, &quot;up&quot; &amp; away &lt; 5</title>" in svg
    assert 'role="img"' in svg and not re.search("<script|<image|@import|href=.http", svg)


def test_a_picture_is_saved_for_slides(picture, tmp_path):
    picture.save(tmp_path / "a.svg")
    assert read_numbers(tmp_path / "a.svg") == {"y": [3, 4]}
    assert "<title>A line from 3 to 4" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    picture.save(str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"must end with one of \.svg, \.png"):
        picture.save(tmp_path / "a.gif")
    assert not (tmp_path / "a.gif").exists()
