"""Lessons as notebooks: the teacher's, and the student's without the solutions.

A lesson is written once, as a script whose cells begin with `# %%` (`notebooks/source`). The cell
of an exercise's answer has `answer="07.split_q"` behind that, the one that checks it
`check="07.split_q"`, and the cell that imports `tags=["setup"]`. Solutions stand between nbgrader's
`### BEGIN SOLUTION` and `### END SOLUTION`, and the cells get its metadata, so that the teacher's
notebook is one that nbgrader can assign.
"""

from __future__ import annotations

import copy
import platform
import re
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from fa2_numba.lessons.exercises import find

SOLUTION = re.compile(
    r"^(?P<indent> *)### BEGIN SOLUTION *\n.*?^ *### END SOLUTION *$", re.DOTALL | re.MULTILINE
)
MARKER = re.compile(r"#+ *(BEGIN|END) SOLUTION")
STUB = "{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError()"
"""What nbgrader puts there too."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 300
"""A cell may take so long, and the start of a kernel on a machine that has much to do."""


def read_lesson(path: Path) -> NotebookNode:
    """The teacher's notebook of a source, not executed."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        answer, checked = (cell.metadata.pop(part, None) for part in ("answer", "check"))
        if answer or checked:
            cell.metadata.nbgrader = nbformat.from_dict(_grading(answer, checked))
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """A copy with outputs, run from top to bottom in a folder; stops where a cell fails."""
    done = copy.deepcopy(notebook)
    options = {
        "timeout": CELL_SECONDS,
        "startup_timeout": CELL_SECONDS,
        "record_timing": False,
    }
    client = NotebookClient(done, resources={"metadata": {"path": str(folder)}}, **options)
    start = time.perf_counter()
    client.execute()
    seconds = round(time.perf_counter() - start)
    done.metadata = nbformat.from_dict(METADATA | {"fa2_numba": _run_with(seconds)})
    return done


def _run_with(seconds: int) -> dict[str, str | int]:
    """What a lesson ran with, and how long: for the page that lists the lessons."""
    packages = {name: version(name) for name in ("numba-cuda", "numpy", "matplotlib")}
    return {
        "date": date.today().isoformat(),
        "seconds": seconds,
        "python": platform.python_version(),
        **packages,
    }


def student_version(notebook: NotebookNode) -> NotebookNode:
    """A copy with stubs for solutions; exercises' cells have no outputs, others keep theirs.

    ValueError where a solution's markers do not match, or an answer has none: nothing must be
    handed out.
    """
    student = copy.deepcopy(notebook)
    for cell in student.cells:
        cell.source, solutions = SOLUTION.subn(stub, cell.source)
        is_answer = cell.metadata.get("nbgrader", {}).get("solution", False)
        if MARKER.search(cell.source) or (is_answer and not solutions):
            raise ValueError(
                f"{cell.get('id', 'a cell')}: a solution must stand between ### BEGIN SOLUTION and "
                "### END SOLUTION, lines of their own"
            )
        if "nbgrader" in cell.metadata:
            cell.outputs, cell.execution_count = [], None
    return student


def stub(solution: re.Match) -> str:
    """What a student finds in the place of a solution."""
    return STUB.format(indent=solution["indent"])


def save(notebook: NotebookNode, path: Path) -> None:
    """Write it whole or not at all."""
    nbformat.validate(notebook)
    beside = path.with_suffix(".writing")
    nbformat.write(notebook, beside)
    beside.replace(path)


def _grading(answer: str | None, checked: str | None) -> dict[str, object]:
    points = {"points": find(checked).points} if checked else {}
    return points | {
        "cell_type": "code",
        "grade": bool(checked),
        "grade_id": f"{find(checked).grade_id}-check" if checked else find(answer).grade_id,
        "locked": bool(checked),
        "schema_version": 3,
        "solution": bool(answer),
        "task": False,
    }
