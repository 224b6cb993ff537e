"""`python -m fa2_numba.lessons.page`: the tables of `notebooks/README.md`.

They say which lessons there are, and what they last ran with, and come from the executed notebooks.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from fa2_numba.lessons.exercises import all_exercises
from fa2_numba.lessons.ladder_table import markdown_row, replace_between_markers, write_whole

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PAGE, SOLUTIONS = FOLDER / "README.md", FOLDER / "solutions"


def executed_lessons() -> dict[str, NotebookNode]:
    """Lesson -> its executed notebook, in the course's order."""
    paths = sorted(SOLUTIONS.glob("[0-9][0-9]_*.ipynb"))
    return {path.stem: nbformat.read(path, as_version=4) for path in paths}


def lesson_table(lessons: dict[str, NotebookNode]) -> str:
    """A row for each lesson: its name as a link, question, minutes and exercises."""
    rows = [("lesson", "question", "minutes", "exercises"), ("---", "---", "---:", "---")]
    for name, notebook in lessons.items():
        text = notebook.cells[0].source
        question = re.match(r"# \d\d\. (.+)", text)[1]
        minutes = re.search(r"^\| Minutes \| (\d+) \|", text, flags=re.MULTILINE)[1]
        ids = [f"`{one.id}`" for one in all_exercises() if one.id[:2] == name[:2]]
        rows.append((f"[{name[:2]}]({name}.ipynb)", question, minutes, ", ".join(ids)))
    return "\n".join(map(markdown_row, rows))


def run_table(lessons: dict[str, NotebookNode]) -> str:
    """What the execution of each lesson left in its metadata: a column for each entry."""
    runs = {name: notebook.metadata.fa2_numba for name, notebook in lessons.items()}
    columns = list(next(iter(runs.values())))
    rows = [("lesson", *columns), ("---", *["---:"] * len(columns))]
    rows += [(name, *(str(run[column]) for column in columns)) for name, run in runs.items()]
    return "\n".join(map(markdown_row, rows))


def with_tables(text: str, lessons: dict[str, NotebookNode]) -> str:
    """The page's text with both tables between their markers."""
    for name, table in (("lessons", lesson_table(lessons)), ("versions", run_table(lessons))):
        markers = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text = replace_between_markers(text, table, *markers)
    return text


def main() -> None:
    """Write both tables."""
    write_whole(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), executed_lessons()))


if __name__ == "__main__":
    main()
