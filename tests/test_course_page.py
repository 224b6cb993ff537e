"""The teacher's page: its tables are those of the lessons, and it leaves no lesson out."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
from fa2_numba.lessons.build import sources  # noqa: E402
from fa2_numba.lessons.page import PAGE, executed_lessons, with_tables  # noqa: E402


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])


def test_tables_are_those_of_the_executed_lessons():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, executed_lessons()) == page, "run python -m fa2_numba.lessons.page"


def test_each_lesson_is_in_the_tables_and_in_the_advice():
    page = PAGE.read_text(encoding="utf-8")
    for source in sources():
        number = source.name[:2]
        assert f"| [{number}]({source.stem}.ipynb) | " in page
        assert f"| {source.stem} | " in page
        assert re.search(rf"^\| {number} \| [^|]{{20,}} \| [^|]+\? \|$", page, re.MULTILINE), number


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="<!-- lessons: begin -->"):
        with_tables("# The course\n", executed_lessons())
