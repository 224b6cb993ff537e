"""`python -m fa2_numba release`: the student's notebooks of a teacher's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat

from fa2_numba.lessons.notebooks import read_lesson, save, student_version


def main(argv: Sequence[str] | None = None) -> int:
    """Write them; 2 if something cannot be read, or would be overwritten."""
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba release",
        description="Replace solutions by stubs, and clear the outputs of exercises.",
    )
    option = parser.add_argument
    option("lessons", nargs="+", type=Path, help="teacher's notebooks, or their .py sources")
    option("--to", type=Path, required=True, metavar="FOLDER", help="where the students' go")
    option("--force", action="store_true", help="overwrite what is there")
    options = parser.parse_args(argv)
    targets = [options.to / f"{path.stem}.ipynb" for path in options.lessons]
    try:
        students = [_student(path) for path in options.lessons]
        _check_targets(options.lessons, targets, options.force)
        options.to.mkdir(parents=True, exist_ok=True)
        for student, target in zip(students, targets, strict=True):
            save(student, target)
            print(target)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _student(path: Path) -> nbformat.NotebookNode:
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"{path}: must end with .ipynb or .py")
    try:
        is_source = path.suffix == ".py"
        lesson = read_lesson(path) if is_source else nbformat.read(path, as_version=4)
        nbformat.validate(lesson)
        return student_version(lesson)
    except (ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error


def _check_targets(lessons: Sequence[Path], targets: Sequence[Path], force: bool) -> None:
    for lesson, target in zip(lessons, targets, strict=True):
        if target.exists() and target.samefile(lesson):
            raise ValueError(f"{target} is the lesson itself: --to must be another folder")
        if target.exists() and not force:
            raise ValueError(f"{target} exists: give another --to, or --force to overwrite it")
        if targets.count(target) > 1:
            raise ValueError(f"{target}: several lessons have this name")
