"""The course: notebooks are what their sources say and run; exercises know right from wrong."""

import contextlib
import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
import nbformat  # noqa: E402  nbclient brings it

from fa2_numba.lessons import notebooks  # noqa: E402
from fa2_numba.lessons.build import FOLDER, SOLUTIONS, sources  # noqa: E402
from fa2_numba.lessons.exercises import NotSolved, all_exercises, check, find  # noqa: E402

ROOT = Path(__file__).parents[1]
HEADINGS = [
    "Before you start",
    "Predict",
    "Run it wrong",
    "Look",
    "Understand",
    "Exercise",
    "Question",
    "Further reading",
]
LONGEST_BYTES = 900_000
EXERCISES = {exercise.id: exercise for exercise in all_exercises()}
MUTANTS = [
    pytest.param(id, mutant, id=f"{id}-{mutant.name}")
    for lesson in sorted({id[:2] for id in EXERCISES})
    for id, mutants in import_module(f"tests.mutants.lesson_{lesson}").MUTANTS.items()
    for mutant in mutants
]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


with contextlib.chdir(ROOT):
    LESSONS = [path.stem for path in sources()]

lessons = pytest.mark.parametrize("lesson", LESSONS)
exercises = pytest.mark.parametrize("id", EXERCISES)


@cache
def source_of(lesson):
    return notebooks.read_lesson(ROOT / f"notebooks/source/{lesson}.py")


def written(path):
    return nbformat.read(path, as_version=4)


def markdown(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


# Notebooks


def test_lessons_are_numbered_without_gaps():
    assert [lesson[:2] for lesson in LESSONS] == [f"{n:02d}" for n in range(len(LESSONS))]
    assert len(LESSONS) >= 1


@lessons
def test_a_lesson_has_the_course_s_grammar(lesson):
    text = markdown(source_of(lesson))
    assert re.match(rf"# {lesson[:2]}\. .+\n", text)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    rows = re.findall(r"^\| (You will|You need|Minutes|Symbols) \| \S", text, flags=re.MULTILINE)
    assert rows == ["You will", "You need", "Minutes", "Symbols"]
    minutes = int(re.search(r"^\| Minutes \| (\d+) \|", text, flags=re.MULTILINE)[1])
    assert 25 <= minutes <= 45
    question = text.split("## Question\n")[1]
    assert "?" in question and "<details>" in question and "wrong" in question
    assert source_of(lesson).cells[1].metadata.get("tags") == ["setup"]


@lessons
def test_a_lesson_has_its_exercises_each_with_a_check(lesson):
    found = [
        cell.metadata.nbgrader for cell in source_of(lesson).cells if "nbgrader" in cell.metadata
    ]
    wanted = [id for id in EXERCISES if id.startswith(lesson[:2])]
    grade_ids = [EXERCISES[id].grade_id for id in wanted]
    assert wanted and [cell.grade_id for cell in found] == [
        f"{id}{part}" for id in grade_ids for part in ("", "-check")
    ]
    assert [cell.points for cell in found if cell.grade] == [EXERCISES[id].points for id in wanted]
    text = markdown(source_of(lesson))
    assert all(f'hint("{id}", 1)' in text for id in wanted)


@lessons
def test_notebooks_are_made_of_their_source(lesson):
    solution = written(SOLUTIONS / f"{lesson}.ipynb")
    plain = [(cell.cell_type, cell.source, cell.metadata) for cell in solution.cells]
    assert plain == [
        (cell.cell_type, cell.source, cell.metadata) for cell in source_of(lesson).cells
    ]
    assert written(FOLDER / f"{lesson}.ipynb") == notebooks.student_version(solution)


@lessons
def test_committed_notebooks_are_executed_and_clean(lesson):
    path = SOLUTIONS / f"{lesson}.ipynb"
    assert path.stat().st_size < LONGEST_BYTES
    code = [cell for cell in written(path).cells if cell.cell_type == "code" and cell.source]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "text/html", "image/svg+xml"} and "image/svg+xml" in kinds
    assert "base64" not in path.read_text()


@lessons
def test_figures_have_words(lesson):
    for cell in written(SOLUTIONS / f"{lesson}.ipynb").cells:
        for output in cell.get("outputs", []):
            if "image/svg+xml" in output.get("data", {}):
                assert re.search(r"<title>[^<]{30,}</title>", output.data["image/svg+xml"])


@lessons
def test_students_see_no_solution(lesson):
    student = written(FOLDER / f"{lesson}.ipynb")
    graded = [cell for cell in student.cells if "nbgrader" in cell.metadata]
    answers = [cell for cell in graded if cell.metadata.nbgrader.solution]
    assert all("raise NotImplementedError()" in cell.source for cell in answers)
    assert "SOLUTION" not in json.dumps(student)
    assert not any(cell.outputs for cell in graded)


@lessons
def test_no_cell_installs_or_leaves_python(lesson):
    code = [cell.source for cell in source_of(lesson).cells if cell.cell_type == "code"]
    assert not re.search(r"^\s*[%!]|\bpip\b|subprocess|os\.system", "\n".join(code), re.MULTILINE)


@lessons
def test_a_plain_installation_can_grade(lesson):
    """The cell of imports needs neither IPython nor matplotlib."""
    setup = source_of(lesson).cells[1].source
    program = "import sys\nfor name in ('IPython', 'matplotlib', 'nbformat', 'jupytext'):\n"
    program += f"    sys.modules[name] = None\n{setup}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@lessons
def test_links_lead_somewhere(lesson):
    prose = re.sub(r"`[^`]*`", "", markdown(source_of(lesson)))
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (FOLDER / target).exists(), target


@lessons
def test_a_lesson_runs(lesson, tmp_path):
    done = notebooks.execute(source_of(lesson), tmp_path)
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]


# Exercises


@cache
def answer_cell(id):
    """The code before an exercise's answer, and the answer with its solution."""
    (lesson,) = [lesson for lesson in LESSONS if lesson.startswith(id[:2])]
    cells = [cell for cell in source_of(lesson).cells if cell.cell_type == "code"]
    (answer,) = [
        cell
        for cell in cells
        if cell.metadata.get("nbgrader", {}).get("grade_id") == EXERCISES[id].grade_id
    ]
    return cells[0].source, answer.source


def answer_of(tmp_path, id, change=lambda text: text):
    """The function that a changed solution defines, in a file, where the simulator can read it."""
    setup, answer = answer_cell(id)
    path = tmp_path / "answer.py"
    path.write_text(f"{setup}\n{change(answer)}\n")
    names = {"__name__": "answer"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names[find(id).answer]


def test_answers_have_names_of_their_own():
    assert len({exercise.answer for exercise in EXERCISES.values()}) == len(EXERCISES)


@exercises
def test_the_solution_is_right(tmp_path, capsys, id):
    check(id, answer_of(tmp_path, id))
    assert f"{id}: right." in capsys.readouterr().out


@exercises
def test_the_stub_is_not_written_yet(tmp_path, id):
    stub = answer_of(tmp_path, id, lambda text: notebooks.SOLUTION.sub(notebooks.stub, text))
    with pytest.raises(NotSolved, match=f'{id}: not written yet.\nHelp: hint\\("{id}", 1\\)'):
        check(id, stub)


@exercises
def test_there_are_mutants(id):
    assert len([param for param in MUTANTS if param.values[0] == id]) >= 3


@pytest.mark.parametrize(("id", "mutant"), MUTANTS)
def test_a_mutant_is_rejected_in_words(tmp_path, id, mutant):
    def change(text):
        for old, new in mutant.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    with pytest.raises(NotSolved, match=f"^{id}: ") as wrong:
        check(id, answer_of(tmp_path, id, change))
    assert re.search(mutant.says, str(wrong.value), flags=re.DOTALL), wrong.value
