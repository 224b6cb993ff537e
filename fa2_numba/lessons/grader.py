"""`python -m fa2_numba grade`: points for the exercises in a notebook or a Python file.

Each answer is judged in a process of its own, which is killed at a time limit, by the simulator, so
that the points are the same on every machine. Only a notebook's cells for imports and answers run.
This finds mistakes, not cheats: an answer is code, and runs with the rights of whoever grades.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fa2_numba.lessons.exercises import NotSolved, all_exercises, check, find
from fa2_numba.lessons.ladder_table import write_whole

SECONDS = 60.0
SETUP = "setup"
SILENCE = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
MAGIC = ("%", "!")
"""A line that begins so is IPython's, not Python's."""


@dataclass(frozen=True)
class Grade:
    """An exercise's id, its points of how many, and what is wrong, if something is."""

    id: str
    points: int
    of: int
    message: str = ""


def answers(path: Path) -> dict[str, str | None]:
    """Exercise id -> the code that answers it; ValueError if the file cannot hold answers.

    None: a notebook has the exercise's check, and the answer is gone.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".ipynb":
        found = _answers_of_notebook(text)
    elif path.suffix == ".py":
        found = _answers_of_file(text)
    else:
        raise ValueError("must end with .ipynb or .py")
    if not found:
        raise ValueError(
            "holds no answer: a notebook needs the metadata of the lessons' cells, a .py file "
            "functions of the exercises' names"
        )
    return found


def grade(path: Path, seconds: float = SECONDS) -> Iterator[Grade]:
    """Grades of the exercises in a file, one by one, each judged in at most so many seconds."""
    for id, code in answers(path).items():
        missing = Grade(id, 0, find(id).points, f"{id}: the answer's cell is missing.")
        yield missing if code is None else _judged(id, code, seconds)


def _answers_of_notebook(text: str) -> dict[str, str | None]:
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        parts = [(_python(cell["source"]), cell["metadata"]) for cell in cells]
        setup = "\n".join(code for code, metadata in parts if SETUP in metadata.get("tags", ()))
        graded = [(code, metadata.get("nbgrader") or {}) for code, metadata in parts]
        checked = {grading["grade_id"] for _, grading in graded if grading.get("grade")}
        solutions: dict[str, str] = {}
        for code, grading in graded:
            if grading.get("solution"):
                # A cell that was copied has the id of the first.
                id = grading["grade_id"]
                solutions[id] = f"{solutions.get(id, '')}\n{code}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is no notebook of a lesson ({type(error).__name__}: {error})") from error
    if solutions and not setup:
        raise ValueError(f"has no cell with the tag {SETUP!r}: its imports are needed")
    return {
        exercise.id: f"{setup}\n{solutions[id]}\n" if id in solutions else None
        for exercise in all_exercises()
        if (id := exercise.grade_id) in solutions or f"{id}-check" in checked
    }


def _python(source: str | list[str]) -> str:
    lines = "".join(source).splitlines()
    return "\n".join("" if line.startswith(MAGIC) else line for line in lines)


def _answers_of_file(text: str) -> dict[str, str]:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"is no Python file ({error})") from error
    defined = {getattr(node, "name", None) for node in body}
    targets = (target for node in body if isinstance(node, ast.Assign) for target in node.targets)
    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {exercise.id: text for exercise in all_exercises() if exercise.answer in defined}


def _judged(id: str, code: str, seconds: float) -> Grade:
    of = find(id).points
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "answer.py"), Path(folder, "result.json")
        source.write_text(code, encoding="utf-8")
        command = [sys.executable, "-m", __name__, id, str(source), str(result)]
        status = _run(command, seconds)
        if not result.exists():
            ended = f"the process ended with status {status} before it was judged"
            what = f"not judged within {seconds:g} s" if status is None else ended
            return Grade(id, 0, of, f"{id}: {what}.")
        message = json.loads(result.read_text(encoding="utf-8"))
    return Grade(id, 0 if message else of, of, message)


def _run(command: Sequence[str], seconds: float) -> int | None:
    """The status of a silent process, None if it had to be killed, with all that it started."""
    # No pipes: whoever holds one after the kill would keep the grader waiting.
    process = subprocess.Popen(command, start_new_session=True, **SILENCE)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill(process)


def _kill(process: subprocess.Popen) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def judge_file(id: str, source: Path, result: Path) -> None:
    """Run a file and check the answer in it; writes what is wrong, or "", as JSON."""
    write_whole(result, json.dumps(_what_is_wrong(id, source)))


def _what_is_wrong(id: str, source: Path) -> str:
    names: dict[str, object] = {"__name__": "answer"}
    try:
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), names)
    except Exception as error:
        return f"{id}: the code fails with {type(error).__name__}: {error}"
    name = find(id).answer
    if name not in names:
        return f"{id}: defines no {name}."
    try:
        check(id, names[name])
    except NotSolved as wrong:
        return str(wrong)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the points; 0 if all are reached, 1 if not, 2 if the file cannot be graded."""
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba grade", description="Points for the exercises in a file."
    )
    option = parser.add_argument
    option("file", type=Path, help="a lesson's notebook, or a .py file that defines the answers")
    option("--json", action="store_true", help="print JSON")
    option("--seconds", type=float, default=SECONDS, help="for each exercise; default %(default)g")
    options = parser.parse_args(argv)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: must be positive")
    try:
        grades = list(grade(options.file, options.seconds))
    except (OSError, ValueError) as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return 2
    points, of = sum(one.points for one in grades), sum(one.of for one in grades)
    if options.json:
        exercises = [asdict(one) for one in grades]
        print(json.dumps({"points": points, "of": of, "exercises": exercises}, indent=1))
    else:
        _print_table(grades, points, of)
    return 0 if points == of else 1


def _print_table(grades: Sequence[Grade], points: int, of: int) -> None:
    console = Console(markup=False)
    table = Table("exercise", "points", "of", box=box.SIMPLE_HEAD)
    for one in grades:
        table.add_row(one.id, str(one.points), str(one.of))
    table.add_section()
    table.add_row("all", str(points), str(of))
    console.print(table)
    for one in grades:
        if one.message:
            console.print(one.message, "")


if __name__ == "__main__":
    judge_file(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    # Threads that an answer has left behind are not waited for.
    os._exit(0)
