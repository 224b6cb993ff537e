"""`python -m fa2_numba.lessons.build [07 ...]`: run lessons and write their notebooks.

From `notebooks/source/NN_topic.py` come `notebooks/solutions/NN_topic.ipynb`, executed, and
`notebooks/NN_topic.ipynb`, the student's, whose figures are those of the run; the tables of
`notebooks/README.md` are written anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fa2_numba.lessons import page
from fa2_numba.lessons.notebooks import execute, read_lesson, save, student_version
from fa2_numba.lessons.page import FOLDER, SOLUTIONS

SOURCES = FOLDER / "source"


def sources(numbers: Sequence[str] = ()) -> list[Path]:
    """The lessons' sources, all or those of the numbers, in their order."""
    found = sorted(SOURCES.glob("[0-9][0-9]_*.py"))
    if not numbers:
        return found
    by_number = {path.name[:2]: path for path in found}
    if unknown := set(numbers) - by_number.keys():
        raise ValueError(f"lesson {min(unknown)!r}: must be one of {', '.join(by_number)}")
    return [by_number[number] for number in numbers]


def build(source: Path) -> int:
    """Run a lesson and write both notebooks; returns the seconds it ran."""
    done = execute(read_lesson(source), SOLUTIONS)
    save(done, SOLUTIONS / f"{source.stem}.ipynb")
    save(student_version(done), FOLDER / f"{source.stem}.ipynb")
    return done.metadata.fa2_numba.seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Build the lessons of the given numbers, or all."""
    parser = argparse.ArgumentParser(prog="python -m fa2_numba.lessons.build", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="lessons; default all")
    options = parser.parse_args(argv)
    try:
        chosen = sources(options.numbers)
    except ValueError as error:
        parser.error(str(error))
    for source in chosen:
        print(f"{source.stem}: {build(source)} s", flush=True)
    page.main()


if __name__ == "__main__":
    main()
