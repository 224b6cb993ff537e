"""`python -m fa2_numba diff A B`: the source of two rungs side by side.

What a rung changes is counted in lines of code: docstrings tell of the change and are not part of
it, imports follow from it, blank lines and indentation do not count either (a loop that becomes an
index of the grid moves its body to the left and changes nothing in it), and comments do, since they
carry the steps of the paper. In a notebook `diff_rungs("fa1_sliced_k", "fa2_split_q")` shows the
same as HTML.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fa2_numba import kernels
from fa2_numba.errors import ArgumentError
from fa2_numba.ladder import RUNGS, Rung

CONTEXT = 3
"""Unchanged lines that stay visible above and below a change."""
MIN_FOLDED = 3
"""A shorter run of unchanged lines is not folded."""
SIDE_BY_SIDE_WIDTH = 120
"""A narrower terminal gets the two sources one below the other."""
WHOLE_LINES_WIDTH = 216
"""Room for two lines of 100 characters with their numbers, in a pipe and in a notebook."""

KERNELS = Path(kernels.__file__).parent

SAME, CODE, UNCOUNTED = "same", "code", "uncounted"
MARKS = {SAME: "  ", CODE: "-+", UNCOUNTED: '""'}
"""Kind of a row -> what marks its line before and its line after."""
STYLES = {SAME: ("dim",) * 2, CODE: ("#d73a49", "#2e9e3e"), UNCOUNTED: ("#8250df",) * 2}
"""Colours that can be read on black and on white."""
LEGEND = (
    'Marked - and +: changed code, counted. Marked ": changed docstring or import, not counted. '
    "Blank lines, indentation and the docstrings at the top of the files are ignored."
)
HTML = '<pre style="overflow-x: auto; white-space: pre; line-height: 1.3">{code}</pre>'


class Line(NamedTuple):
    """One line of a source that is not blank; after_blank: the line above it is."""

    number: int
    text: str
    after_blank: bool


class Row(NamedTuple):
    """What stands side by side; kind: SAME, or what is changed, CODE or UNCOUNTED."""

    before: Line | None
    after: Line | None
    kind: str

    @property
    def sides(self) -> tuple[Line | None, Line | None]:
        """The line before and the line after."""
        return self.before, self.after


def changed_lines(before: str, after: str) -> int:
    r"""Count the lines of code that differ; n lines replaced by m count as the larger of the two.

    >>> changed_lines("for i in range(n):\n    x += 1\n    y += 1\n", "x += 1\ny += 2\n")
    2
    """
    return sum(row.kind == CODE for row in _rows(before, after))


def _rows(before: str, after: str) -> Iterator[Row]:
    """All rows; docstrings stay below the code that they describe."""
    (old, old_others), (new, new_others) = _read(before), _read(after)
    yield from _align(old_others.pop(0, []), new_others.pop(0, []), UNCOUNTED)
    old_above, new_above = 0, 0
    for row in _align(old, new, CODE):
        yield row
        old_above += row.before is not None
        new_above += row.after is not None
        others = old_others.pop(old_above, []), new_others.pop(new_above, [])
        yield from _align(*others, UNCOUNTED)


def _read(source: str) -> tuple[list[Line], dict[int, list[Line]]]:
    """The lines of code, and those not counted by the number of code lines above them."""
    tree, texts = ast.parse(source), source.split("\n")
    uncounted = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    has_docstring = tree.body and _is_docstring(tree.body[0])
    top = tree.body[0].end_lineno if has_docstring else 0
    code: list[Line] = []
    others: dict[int, list[Line]] = defaultdict(list)
    for number, text in enumerate(texts[top:], top + 1):
        if text.strip():
            line = Line(number, text.rstrip(), number > 1 and not texts[number - 2].strip())
            (others[len(code)] if number in uncounted else code).append(line)
    return code, others


def _is_docstring(node: ast.AST) -> bool:
    """Whether this is a text that is a statement of its own."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _align(before: list[Line], after: list[Line], kind: str) -> Iterator[Row]:
    old, new = ([line.text.strip() for line in lines] for lines in (before, after))
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        for pair in zip_longest(before[old_start:old_end], after[new_start:new_end]):
            yield Row(*pair, SAME if tag == "equal" else kind)


def _fold(rows: Sequence[Row]) -> Iterator[Row | str]:
    """Changes and what is around them; a line of text in place of each long unchanged run."""
    changes = [i for i, row in enumerate(rows) if row.kind != SAME]
    shown = {i for change in changes for i in range(change - CONTEXT, change + CONTEXT + 1)}
    for is_shown, numbers in groupby(range(len(rows)), key=shown.__contains__):
        run = [rows[i] for i in numbers]
        folded = not is_shown and len(run) >= MIN_FOLDED
        yield from [f"... {len(run)} unchanged lines"] if folded else run


def diff_rungs(before: str, after: str, *, show_all: bool = False) -> RungDiff:
    """Compare two rungs by their ids; show_all: fold nothing.

    >>> diff_rungs("fa2_split_q", "fa2_split_q")
    <RungDiff fa2_split_q and fa2_split_q are the same rung>
    """
    for name in (before, after):
        if not isinstance(name, str) or name not in RUNGS:
            raise ArgumentError(f"rung={name!r}: must be one of {', '.join(RUNGS)}")
    old, new = ((KERNELS / f"{name}.py").read_text(encoding="utf-8") for name in (before, after))
    return RungDiff(RUNGS[before], RUNGS[after], tuple(_rows(old, new)), show_all)


@dataclass(frozen=True, repr=False)
class RungDiff:
    """Two rungs side by side: rich prints it in a terminal, a notebook shows it as HTML."""

    before: Rung
    after: Rung
    rows: tuple[Row, ...]
    show_all: bool = False

    @property
    def changed(self) -> int:
        """How many lines of code differ."""
        return sum(row.kind == CODE for row in self.rows)

    @property
    def title(self) -> str:
        """What is compared, and how much of it differs."""
        if self.before == self.after:
            return f"{self.before.name} and {self.after.name} are the same rung"
        lines = "line" if self.changed == 1 else "lines"
        return f"{self.before.name} -> {self.after.name}: {self.changed} changed {lines} of code"

    def __repr__(self) -> str:
        return f"<RungDiff {self.title}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, sources and legend; the sources one below the other where there is no room."""
        yield Text(self.title, style="bold")
        if self.before != self.after:
            yield ""
            yield _table(self, side_by_side=options.max_width >= SIDE_BY_SIDE_WIDTH)
            yield ""
            yield Text(LEGEND, style="dim")

    def _repr_html_(self) -> str:
        # In a notebook a console of its own would show the table a second time.
        console = _console(WHOLE_LINES_WIDTH, file=io.StringIO(), record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=HTML)


def _table(diff: RungDiff, side_by_side: bool) -> Table:
    headers = [Text(f"{rung.name}\n{rung.idea}\n") for rung in (diff.before, diff.after)]
    if not side_by_side:
        headers = [Text("\n").join(headers)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column("", no_wrap=True)
        table.add_column(header, ratio=1, overflow="fold")
    rows = diff.rows if diff.show_all else _fold(diff.rows)
    for kind, run in groupby(rows, key=lambda row: row if isinstance(row, str) else row.kind):
        if kind not in MARKS:
            table.add_row(*("", Text(kind, style="dim italic")) * len(headers))
            continue
        for cells in (_side_by_side if side_by_side else _stacked)(run):
            table.add_row(*cells)
    return table


def _side_by_side(rows: Iterator[Row]) -> Iterator[tuple[Text, ...]]:
    for row in rows:
        if any(line and line.after_blank for line in row.sides):
            yield ()
        yield (*_cells(row, 0), *_cells(row, 1))


def _stacked(rows: Iterator[Row]) -> Iterator[tuple[Text, ...]]:
    """First all lines before, then all lines after; once if they are the same."""
    rows = list(rows)
    for side in (1,) if rows[0].kind == SAME else (0, 1):
        for row in rows:
            if line := row.sides[side]:
                if line.after_blank:
                    yield ()
                yield _cells(row, side)


def _cells(row: Row, side: int) -> tuple[Text, Text]:
    """Number with mark, and text, of one side."""
    line = row.sides[side]
    if line is None:
        return Text(), Text()
    style = STYLES[row.kind][side]
    return Text(f"{MARKS[row.kind][side]}{line.number:4}", style), Text(line.text, style)


def _console(width: int | None, **options: object) -> Console:
    return Console(highlight=False, markup=False, width=width, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Show what a rung changes against the one below it, or how any two rungs differ."""
    options = _parse(argv)
    diff = diff_rungs(options.before, options.after, show_all=options.all)
    # A pipe has no width: lines stay whole there.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = _console(WHOLE_LINES_WIDTH if piped else None)
    with console.capture() as printed:
        console.print(diff)
    # The cells of a table are padded with blanks, also the last one of a line.
    print(re.sub(" +$", "", printed.get(), flags=re.MULTILINE), end="")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba diff",
        description=main.__doc__,
        epilog=f"{LEGEND} A terminal narrower than {SIDE_BY_SIDE_WIDTH} columns gets the lines "
        "one below the other.",
    )
    rungs = list(RUNGS)
    parser.add_argument("after", choices=rungs, metavar="A", help=f"a rung: {', '.join(rungs)}")
    parser.add_argument(
        "other",
        nargs="?",
        choices=rungs,
        metavar="B",
        help="another one, to the right; without it A is compared with the rung below it",
    )
    parser.add_argument("--all", action="store_true", help="fold nothing")
    options = parser.parse_args(argv)
    if options.other is not None:
        options.before, options.after = options.after, options.other
    elif options.after == rungs[0]:
        parser.error(f"{rungs[0]} is the lowest rung: name another one to compare it with")
    else:
        options.before = rungs[rungs.index(options.after) - 1]
    return options


if __name__ == "__main__":
    raise SystemExit(main())
