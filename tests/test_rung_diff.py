"""`python -m fa2_numba diff`: what is counted, what is shown, and that a rung is a small step."""

import ast
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from fa2_numba import rung_diff
from fa2_numba.__main__ import main
from fa2_numba.errors import ArgumentError
from fa2_numba.ladder import RUNGS, cuda_core_rungs
from fa2_numba.rung_diff import SAME, UNCOUNTED, changed_lines, diff_rungs

ROOT = Path(__file__).parents[1]
FLASH_RUNGS = [name for name in cuda_core_rungs() if name.startswith("fa")]
MAX_CHANGED_LINES = 60

SOURCE = '''"""Module.

More.
"""

X = 1
"""An X."""


def f(n):
    """What f does."""
    total = 0  # FA2 Alg. 1 line 5
    for i in range(n):
        total += i

    return total
'''


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compare two sources as if they were rungs."""

    def compare_sources(before, after, **options):
        rung = RUNGS["standard"]
        for name, source in (("one", before), ("two", after)):
            (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
            monkeypatch.setitem(RUNGS, name, replace(rung, name=name, idea=f"idea of {name}"))
        monkeypatch.setattr(rung_diff, "KERNELS", tmp_path)
        return diff_rungs("one", "two", **options)

    return compare_sources


def printed(diff, width=160, **options):
    stream = io.StringIO()
    Console(file=stream, width=width, **options).print(diff)
    return stream.getvalue()


# The ladder's promise.


@pytest.mark.parametrize(("below", "rung"), list(itertools.pairwise(FLASH_RUNGS)))
def test_a_rung_is_a_small_step(below, rung):
    assert 0 < diff_rungs(below, rung).changed <= MAX_CHANGED_LINES


# What is counted.


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        pytest.param("", "", 0, id="same"),
        pytest.param("What f does.", "What f\n    really\n\n    does.", 0, id="docstring"),
        pytest.param('"""Module.', '"""Another\nmodule.', 0, id="module-docstring"),
        pytest.param('"""An X."""\n', "", 0, id="docstring-of-a-constant"),
        pytest.param("\n\n    return", "\n    return", 0, id="blank-line"),
        pytest.param("X = 1\n", "X = 1  \n", 0, id="trailing-space"),
        pytest.param("line 5", "line 6", 1, id="comment"),
        pytest.param("  # FA2 Alg. 1 line 5", "", 1, id="comment-gone"),
        pytest.param("    return total\n", "", 1, id="one-gone"),
        pytest.param("X = 1\n", "X = 1\nY = 2\nZ = 3\n", 2, id="two-more"),
        pytest.param(
            "    for i in range(n):\n        total += i\n",
            "    while n:\n        n -= 1\n        total += n\n",
            3,
            id="two-by-three",
        ),
    ],
)
def test_changed_lines_are_lines_of_code(old, new, count):
    assert old in SOURCE
    changed = SOURCE.replace(old, new)
    assert changed_lines(SOURCE, changed) == changed_lines(changed, SOURCE) == count


def test_a_dedented_body_is_unchanged():
    loop = "def f(x):\n    for i in x:\n        a(i)\n        b(i)\n"
    grid = "def f(x):\n    i = x[0]\n    a(i)\n    b(i)\n"
    assert changed_lines(loop, grid) == 1


def test_text_that_is_a_value_is_code():
    assert changed_lines('x = """a\nb"""\n', 'x = """a\nc"""\n') == 1


# The rows.


@pytest.mark.parametrize("pair", [*itertools.pairwise(RUNGS), ("fa2_split_q", "standard")])
def test_every_line_below_the_docstring_is_in_one_row(pair):
    diff = diff_rungs(*pair)
    for side, name in enumerate(pair):
        lines = [row.sides[side] for row in diff.rows if row.sides[side]]
        source = (ROOT / f"fa2_numba/kernels/{name}.py").read_text()
        docstring_end = ast.parse(source).body[0].end_lineno
        numbered = list(enumerate(source.splitlines(), 1))[docstring_end:]
        assert [(line.number, line.text) for line in lines] == [
            (number, text) for number, text in numbered if text.strip()
        ]


def test_what_is_same_is_the_same_but_for_the_indent():
    for row in diff_rungs("fa1_sliced_k", "fa2_split_q").rows:
        texts = [line and line.text.strip() for line in row.sides]
        assert (texts[0] == texts[1]) == (row.kind == SAME)


def test_a_docstring_stays_below_its_function(compare):
    diff = compare(SOURCE, SOURCE.replace("What f does.", "Something else."))
    kinds = [row.kind for row in diff.rows]
    assert diff.changed == 0 and kinds.count(UNCOUNTED) == 1
    assert diff.rows[kinds.index(UNCOUNTED) - 1].after.text == "def f(n):"


# In a terminal.


def test_a_change_is_shown_with_its_surroundings_and_the_rest_is_folded(compare):
    lines = [f"x{i} = {i}" for i in range(30)]
    after = [*lines[:10], "x10 = 11", *lines[11:]]
    text = printed(compare("\n".join(lines), "\n".join(after)))
    assert "one -> two: 1 changed line of code" in text and "idea of two" in text
    assert "... 7 unchanged lines" in text and "... 16 unchanged lines" in text
    marked = [line.split() for line in text.splitlines() if line.startswith("-")]
    assert marked == [["-", "11", "x10", "=", "10", "+", "11", "x10", "=", "11"]]
    assert "x7 = 7" in text and "x6 = 6" not in text
    assert "x13 = 13" in text and "x14 = 14" not in text


def test_with_all_nothing_is_folded(compare):
    lines = "\n".join(f"x{i} = {i}" for i in range(30))
    text = printed(compare(SOURCE + lines, SOURCE + lines + "\ny = 1", show_all=True))
    assert "..." not in text
    assert all(f"x{i} = {i}" in text for i in range(30))


def test_a_narrow_terminal_has_all_lines_before_above_all_lines_after(compare):
    text = printed(compare("a = 1\nb = 2\n", "a = 3\nb = 4\nc = 5\n"), width=60)
    marked = [line.split() for line in text.splitlines() if line[:1] in "-+" and line]
    assert [" ".join(words) for words in marked] == [
        "- 1 a = 1",
        "- 2 b = 2",
        "+ 1 a = 3",
        "+ 2 b = 4",
        "+ 3 c = 5",
    ]
    assert max(map(len, text.splitlines())) <= 60


def test_a_terminal_has_colours(compare):
    diff = compare("x = 1\n", "x = 2\n")
    text = printed(diff, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[91mx = 1" in text and "\x1b[32mx = 2" in text


def test_brackets_are_not_markup(compare):
    assert "O[red] = '[/red]'" in printed(compare("y = 1\n", "O[red] = '[/red]'\n"))


# In a notebook.


def text_of(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


def test_html_is_escaped_and_needs_nothing_else(compare):
    html = compare("x = a < b\n", "x = '<script>alert(1)</script>'\n")._repr_html_()
    assert "<script" not in html and "http" not in html
    assert set(re.findall(r"</?(\w+)", html)) == {"pre", "span"}
    assert html.count("<span") == html.count("</span>")
    assert "x = a < b" in text_of(html) and "x = '<script>alert(1)</script>'" in text_of(html)
    assert "color: #d73a49" in html and "color: #2e9e3e" in html


def test_html_of_real_rungs_has_whole_lines():
    text = text_of(diff_rungs("fa1_sliced_k", "fa2_split_q", show_all=True)._repr_html_())
    source = (ROOT / "fa2_numba/kernels/fa2_split_q.py").read_text()
    below = source[source.index("import math") :].splitlines()
    assert [line for line in below if line not in text] == []


# The command.


def run_diff(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fa2_numba", "diff", *arguments],
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, **environment},
        capture_output=True,
        encoding="utf-8",
    )


def test_a_pipe_gets_plain_text_and_whole_lines():
    done = run_diff("fa1_sliced_k", "fa2_split_q", "--all")
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    source = (ROOT / "fa2_numba/kernels/fa2_split_q.py").read_text()
    below = source[source.index("import math") :].splitlines()
    assert [line for line in below if line not in done.stdout] == []
    assert not re.search(r" $", done.stdout, flags=re.MULTILINE)
    assert all(RUNGS[name].idea in done.stdout for name in ("fa1_sliced_k", "fa2_split_q"))


def test_the_width_asked_for_is_kept():
    lines = run_diff("fa2_split_q", COLUMNS="70").stdout.splitlines()
    assert max(map(len, lines)) <= 70


def test_one_rung_is_compared_with_the_rung_below(capsys):
    for below, rung in itertools.pairwise(RUNGS):
        assert main(["diff", rung]) == 0
        assert capsys.readouterr().out.startswith(f"{below} -> {rung}: ")


def test_a_rung_and_itself_are_the_same(capsys):
    assert main(["diff", "standard", "standard"]) == 0
    assert capsys.readouterr().out == "standard and standard are the same rung\n"
    html = diff_rungs("standard", "standard")._repr_html_()
    assert text_of(html).strip() == "standard and standard are the same rung"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["standard", "nonsense"], "invalid choice: 'nonsense'"),
        (["standard"], "standard is the lowest rung"),
        ([], "required: A"),
        (["standard", "fa1_sliced_k", "fa2_split_q"], "unrecognized arguments: fa2_split_q"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_compared_is_refused(arguments, reason, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["diff", *arguments])
    output = capsys.readouterr()
    assert refusal.value.code == 2 and output.out == ""
    assert reason in output.err.splitlines()[-1]
    if "nonsense" in reason:
        assert all(name in output.err for name in RUNGS)


@pytest.mark.parametrize("name", ["nonsense", "../ladder", "", None, 3])
def test_an_unknown_rung_is_refused_with_the_choices(name):
    with pytest.raises(ArgumentError, match=r"must be one of standard, .*fa2_split_q"):
        diff_rungs("standard", name)


def test_the_command_starts_no_driver():
    program = (
        "import json, sys\n"
        "from numba.cuda.cudadrv.driver import Driver\n"
        "calls = []\n"
        "Driver.ensure_initialized = lambda *_: calls.append('driver')\n"
        "from fa2_numba.__main__ import main\n"
        "status = main(['diff', 'fa2_split_q'])\n"
        "print(json.dumps([status, calls, sorted({'cupy', 'torch'} & set(sys.modules))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, [], []], done.stderr
