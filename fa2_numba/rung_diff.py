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
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path

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
ALIKE = 0.5
"""Lines with a smaller part in common are different as a whole, not word by word."""

PIPE_WIDTH = 216
"""Room for two lines of 100 characters with their numbers."""

KERNELS = Path(kernels.__file__).parent

SAME, CODE, DOCSTRING = "same", "code", "docstring"
LEGEND = (
    'Marked - and +: changed code, counted. Marked ": changed docstring or import, not counted. '
    "Blank lines and indentation are ignored."
)


@dataclass(frozen=True)
class Line:
    """One line of a source that is not blank; after_blank: the line above it is."""

    number: int
    text: str
    after_blank: bool = False


@dataclass(frozen=True)
class Row:
    """What stands side by side; kind: SAME, or what is changed, CODE or DOCSTRING."""

    before: Line | None
    after: Line | None
    kind: str

    @property
    def sides(self) -> tuple[Line | None, Line | None]:
        """The line before and the line after."""
        return self.before, self.after

    @property
    def marks(self) -> tuple[str, str]:
        """What marks the line before and the line after where there is no colour."""
        return {SAME: (" ", " "), CODE: ("-", "+"), DOCSTRING: ('"', '"')}[self.kind]

    @property
    def after_blank(self) -> bool:
        """Whether one of the two lines follows a blank one."""
        return any(line is not None and line.after_blank for line in self.sides)


@dataclass(frozen=True)
class Part:
    """Rows that are shown or folded together; fold: what stands in their place, "" if shown."""

    rows: tuple[Row, ...]
    fold: str = ""


def changed_lines(before: str, after: str) -> int:
    r"""Count the lines of code that differ; n lines replaced by m count as the larger of the two.

    >>> changed_lines("for i in range(n):\n    x += 1\n    y += 1\n", "x += 1\ny += 2\n")
    2
    """
    (old, _), (new, _) = _read(before), _read(after)
    return sum(
        max(old_end - old_start, new_end - new_start)
        for tag, old_start, old_end, new_start, new_end in _opcodes(old, new)
        if tag != "equal"
    )


def _read(source: str) -> tuple[list[Line], dict[int, list[Line]]]:
    """The lines of code, and those not counted by the number of code lines above them."""
    texts = source.split("\n")
    apart = _docstring_lines(source) | _import_lines(source)
    code: list[Line] = []
    others: dict[int, list[Line]] = defaultdict(list)
    for number, text in enumerate(texts, 1):
        if text.strip():
            line = Line(number, text.rstrip(), number > 1 and not texts[number - 2].strip())
            (others[len(code)] if number in apart else code).append(line)
    return code, others


def _docstring_lines(source: str) -> set[int]:
    """The numbers of the lines of every text that is a statement of its own."""
    return {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for number in range(node.lineno, node.end_lineno + 1)
    }


def _import_lines(source: str) -> set[int]:
    return {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, node.end_lineno + 1)
    }


def _opcodes(before: list[Line], after: list[Line]) -> list[tuple[str, int, int, int, int]]:
    old, new = ([line.text.strip() for line in lines] for lines in (before, after))
    return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _docstring_rows(before: str, after: str) -> Iterator[Row]:
    """The docstrings of both modules, each to be read on its own, so not aligned."""
    for old, new in zip_longest(_module_docstring(before), _module_docstring(after)):
        same = old is not None and new is not None and old.text == new.text
        yield Row(old, new, SAME if same else DOCSTRING)


def _module_docstring(source: str) -> list[Line]:
    first = next(iter(ast.parse(source).body), None)
    if first is None or first.lineno not in _docstring_lines(source):
        return []
    texts = source.split("\n")
    return [Line(n, texts[n - 1].rstrip()) for n in range(first.lineno, first.end_lineno + 1)]


def _module_docstring_text(source: str) -> list[Line]:
    return [line for line in _module_docstring(source) if line.text]


def _code_rows(before: str, after: str) -> Iterator[Row]:
    """All below the modules' docstrings; a docstring stays below the code that it describes."""
    (old, old_others), (new, new_others) = _read(before), _read(after)
    imports = (
        others.pop(0, [])[len(_module_docstring_text(source)) :]
        for source, others in ((before, old_others), (after, new_others))
    )
    yield from _align(*imports, DOCSTRING)
    old_above, new_above = 0, 0
    for row in _align(old, new, CODE):
        yield row
        old_above += row.before is not None
        new_above += row.after is not None
        others = old_others.pop(old_above, []), new_others.pop(new_above, [])
        yield from _align(*others, DOCSTRING)


def _align(before: list[Line], after: list[Line], kind: str) -> Iterator[Row]:
    for tag, old_start, old_end, new_start, new_end in _opcodes(before, after):
        old, new = before[old_start:old_end], after[new_start:new_end]
        if tag == "equal":
            yield from (Row(a, b, SAME) for a, b in zip(old, new, strict=True))
        elif len(old) <= len(new):
            yield from (Row(a, b, kind) for a, b in _pair(old, new))
        else:
            yield from (Row(a, b, kind) for b, a in _pair(new, old))


def _pair(short: list[Line], long: list[Line]) -> list[tuple[Line | None, Line]]:
    """Give each line of the shorter text one of the longer, in order, as alike as possible."""
    # best[i][j]: how alike the first i and the first j lines are; i > j cannot be.
    best = [[0.0] * (len(long) + 1)] + [[-1.0] * (len(long) + 1) for _ in short]
    for i in range(1, len(short) + 1):
        for j in range(i, len(long) + 1):
            paired = best[i - 1][j - 1] + _likeness(short[i - 1], long[j - 1])
            best[i][j] = max(best[i][j - 1], paired)
    pairs: list[tuple[Line | None, Line]] = []
    i = len(short)
    for j in range(len(long), 0, -1):
        alone = i == 0 or best[i][j] == best[i][j - 1]
        i -= not alone
        pairs.append((None if alone else short[i], long[j - 1]))
    return pairs[::-1]


def _likeness(line: Line, other: Line) -> float:
    """The part of the words of two lines that stands in both, from 0 to 1."""
    words, others = (set(re.findall(r"\w+", each.text)) for each in (line, other))
    return len(words & others) / max(len(words | others), 1)


def _code_parts(rows: tuple[Row, ...]) -> Iterator[Part]:
    """Changes and what is around them are shown, long runs of unchanged lines are folded."""
    changes = [i for i, row in enumerate(rows) if row.kind != SAME]
    shown = {i for change in changes for i in range(change - CONTEXT, change + CONTEXT + 1)}
    for is_shown, numbers in groupby(range(len(rows)), key=shown.__contains__):
        run = tuple(rows[i] for i in numbers)
        folded = not is_shown and len(run) >= MIN_FOLDED
        yield Part(run, f"... {len(run)} unchanged lines" if folded else "")


def _docstring_parts(rows: tuple[Row, ...]) -> Iterator[Part]:
    """The first lines, which say what the rungs change, are shown; the rest is folded."""
    yield Part(rows[:1])
    if len(rows) > 1:
        yield Part(rows[1:], f"... {len(rows) - 1} more lines of docstring")


def _pieces(line: Line, other: Line | None) -> Iterator[tuple[str, bool]]:
    """Pieces of a line, and whether they differ from the other line, where the two are alike."""
    text = line.text.lstrip()
    yield line.text.removesuffix(text), False
    pieces, others = _split(text), _split(other.text.lstrip() if other else "")
    matcher = SequenceMatcher(None, pieces, others, autojunk=False)
    if matcher.ratio() < ALIKE:
        yield text, False
        return
    for tag, start, end, _, _ in matcher.get_opcodes():
        yield "".join(pieces[start:end]), tag != "equal"


def _split(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def diff_rungs(before: str, after: str, *, show_all: bool = False) -> RungDiff:
    """Compare two rungs by their ids; show_all: fold nothing.

    >>> diff_rungs("fa2_split_q", "fa2_split_q")
    <RungDiff fa2_split_q and fa2_split_q are the same rung>
    """
    for name in (before, after):
        if not isinstance(name, str) or name not in RUNGS:
            raise ArgumentError(f"rung={name!r}: must be one of {', '.join(RUNGS)}")
    old, new = ((KERNELS / f"{name}.py").read_text(encoding="utf-8") for name in (before, after))
    return RungDiff(
        before=RUNGS[before],
        after=RUNGS[after],
        changed=changed_lines(old, new),
        docstring=tuple(_docstring_rows(old, new)),
        code=tuple(_code_rows(old, new)),
        show_all=show_all,
    )


@dataclass(frozen=True, repr=False)
class RungDiff:
    """Two rungs side by side: rich prints it in a terminal, a notebook shows it as HTML.

    changed: how many lines of code differ; docstring: the docstrings of the two modules; code: all
    that is below them.
    """

    before: Rung
    after: Rung
    changed: int
    docstring: tuple[Row, ...]
    code: tuple[Row, ...]
    show_all: bool = False

    @property
    def title(self) -> str:
        """What is compared, and how much of it differs."""
        if self.before.name == self.after.name:
            return f"{self.before.name} and {self.after.name} are the same rung"
        lines = "line" if self.changed == 1 else "lines"
        return f"{self.before.name} -> {self.after.name}: {self.changed} changed {lines} of code"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is shown and what is folded, from top to bottom; nothing of a rung and itself."""
        if self.before.name == self.after.name:
            return ()
        if self.show_all:
            return Part(self.docstring), Part(self.code)
        return (*_docstring_parts(self.docstring), *_code_parts(self.code))

    def __repr__(self) -> str:
        return f"<RungDiff {self.title}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title, sources and legend; the sources one below the other where there is no room."""
        yield Text(self.title, style="bold")
        if self.parts:
            yield ""
            yield _table(self, side_by_side=options.max_width >= SIDE_BY_SIDE_WIDTH)
            yield ""
            yield Text(LEGEND, style="dim")

    def _repr_html_(self) -> str:
        return _html(self)


# In a terminal.

STYLES = {SAME: ("dim", "dim"), CODE: ("red", "green"), DOCSTRING: ("magenta", "cyan")}
"""Kind of a row -> the styles of its line before and of its line after."""


def _table(diff: RungDiff, side_by_side: bool) -> Table:
    headers = [Text(f"{rung.name}\n{rung.idea}\n") for rung in (diff.before, diff.after)]
    if not side_by_side:
        headers = [Text("\n").join(headers)]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column("", no_wrap=True)
        table.add_column(header, ratio=1, overflow="fold")
    for part in diff.parts:
        if part.fold:
            table.add_row(*("", Text(part.fold, style="dim italic")) * len(headers))
            continue
        for cells in (_side_by_side if side_by_side else _stacked)(part.rows):
            table.add_row(*cells)
    return table


def _side_by_side(rows: Sequence[Row]) -> Iterator[tuple[Text | str, ...]]:
    for row in rows:
        if row.after_blank:
            yield ()
        yield (*_cells(row, 0), *_cells(row, 1))


def _stacked(rows: Sequence[Row]) -> Iterator[tuple[Text | str, ...]]:
    """Each run of changes: first all lines before, then all lines after."""
    for kind, run in groupby(rows, key=lambda row: row.kind):
        run = tuple(run)
        for side in (1,) if kind == SAME else (0, 1):
            for row in run:
                line = row.sides[side]
                if line is not None:
                    if line.after_blank:
                        yield ()
                    yield _cells(row, side)


def _cells(row: Row, side: int) -> tuple[Text | str, Text | str]:
    """Number with mark, and text, of one side."""
    line, other = row.sides[side], row.sides[1 - side]
    if line is None:
        return "", ""
    style = STYLES[row.kind][side]
    text = Text()
    for piece, differs in _pieces(line, other):
        text.append(piece, f"{style} bold underline" if differs else style)
    return Text(f"{row.marks[side]}{line.number:4}", style), text


# In a notebook.

CSS = """
.fa2-diff table { table-layout: fixed; width: 100%; margin: 0; border-collapse: collapse }
.fa2-diff tr { background: none !important }
.fa2-diff td, .fa2-diff th { color: inherit; text-align: left !important; vertical-align: top;
  padding: 0 .4em; border: 0 }
.fa2-diff td { font: .85em/1.45 monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.fa2-diff col.number { width: 4em }
.fa2-diff td.number { text-align: right !important; opacity: .6 }
.fa2-diff .same td, .fa2-diff summary, .fa2-diff .legend { opacity: .65 }
.fa2-diff .code .old { background: rgba(248, 81, 73, .18) }
.fa2-diff .code .new { background: rgba(46, 160, 67, .18) }
.fa2-diff .docstring .old, .fa2-diff .docstring .new { background: rgba(110, 118, 250, .14) }
.fa2-diff .old b { background: rgba(248, 81, 73, .4) }
.fa2-diff .new b { background: rgba(46, 160, 67, .4) }
"""
"""Colours are translucent: they lie on the notebook's own background, light or dark."""
COLUMNS = '<colgroup><col class="number"><col><col class="number"><col></colgroup>'


def _html(diff: RungDiff) -> str:
    title = f"<p><strong>{escape(diff.title)}</strong></p>"
    if not diff.parts:
        return title
    headers = "".join(
        f'<th colspan="2">{escape(rung.name)}<br><small>{escape(rung.idea)}</small></th>'
        for rung in (diff.before, diff.after)
    )
    body = "\n".join(map(_html_part, diff.parts))
    return (
        f'<div class="fa2-diff"><style>{CSS}</style>\n{title}\n'
        f"<table>{COLUMNS}<tr>{headers}</tr></table>\n{body}\n"
        f'<p class="legend">{escape(LEGEND)}</p></div>'
    )


def _html_part(part: Part) -> str:
    table = f"<table>{COLUMNS}\n" + "\n".join(map(_html_row, part.rows)) + "\n</table>"
    if not part.fold:
        return table
    return f"<details><summary>{escape(part.fold)}</summary>{table}</details>"


def _html_row(row: Row) -> str:
    blank = '<tr><td colspan="4">&nbsp;</td></tr>' if row.after_blank else ""
    return f'{blank}<tr class="{row.kind}">{_html_cells(row, 0)}{_html_cells(row, 1)}</tr>'


def _html_cells(row: Row, side: int) -> str:
    line, other = row.sides[side], row.sides[1 - side]
    if line is None:
        return "<td></td><td></td>"
    text = "".join(
        f"<b>{escape(piece)}</b>" if differs else escape(piece)
        for piece, differs in _pieces(line, other)
    )
    number = f'<td class="number">{escape(row.marks[side])} {line.number}</td>'
    return f'{number}<td class="{("old", "new")[side]}">{text}</td>'


# The command.


def main(argv: Sequence[str] | None = None) -> int:
    """Show what a rung changes against the one below it, or how any two rungs differ."""
    options = _parse(argv)
    diff = diff_rungs(options.before, options.after, show_all=options.all)
    # A pipe has no width: lines stay whole there.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, markup=False, width=PIPE_WIDTH if piped else None).print(diff)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba diff",
        description=main.__doc__,
        epilog="The number of changed lines is that of code: comments are counted, docstrings, "
        "blank lines and indentation are not. Changed docstrings are shown with a mark of their "
        "own; of the modules' docstrings only the first lines, without --all. A terminal narrower "
        f"than {SIDE_BY_SIDE_WIDTH} columns gets the lines one below the other.",
    )
    rungs = list(RUNGS)
    parser.add_argument("a", choices=rungs, metavar="A", help=f"a rung: {', '.join(rungs)}")
    parser.add_argument(
        "b",
        nargs="?",
        choices=rungs,
        metavar="B",
        help="another one, to the right; without it A is compared with the rung below it",
    )
    parser.add_argument("--all", action="store_true", help="fold nothing")
    options = parser.parse_args(argv)
    options.before, options.after = options.a, options.b
    if options.b is None:
        if options.a == rungs[0]:
            parser.error(f"{options.a} is the lowest rung: name another one to compare it with")
        options.before, options.after = rungs[rungs.index(options.a) - 1], options.a
    return options


if __name__ == "__main__":
    raise SystemExit(main())
