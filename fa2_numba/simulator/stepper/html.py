"""The microscope as HTML for a notebook: no script, nothing from the network, all text escaped."""

from __future__ import annotations

import io
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.simulator.source import ranges
from fa2_numba.simulator.stepper.rows import RowError
from fa2_numba.simulator.stepper.state import SourceLine
from fa2_numba.simulator.stepper.text import array_text, heading, labelled, together, who

if TYPE_CHECKING:
    from fa2_numba.simulator.stepper.stepper import Stepper

MARKED = "background:#ffe9a8;color:#000"
NEVER_WRITTEN, IS_NAN, IS_INFINITE = "lightgrey", "crimson", "orange"
MAP_INCHES = 2.6


def render(stepper: Stepper) -> str:
    """What happened, the source with its threads, who waits, one row, shared memory as maps."""
    doing = [(who(threads), what) for threads, what in together(stepper.waiting())]
    parts = [
        f'<p style="white-space:pre-wrap"><b>{escape(heading(stepper))}</b></p>',
        f'<pre style="line-height:1.3">{_source(stepper.source())}</pre>',
        _table(("threads", "what they do"), doing),
        _row(stepper),
        _maps(stepper.shared()),
    ]
    return f"<div>{''.join(parts)}</div>"


def _source(lines: list[SourceLine]) -> str:
    return "\n".join(
        escape(label)
        + (
            f'<span style="{MARKED}">{escape(line.text)}</span>'
            f"  <b>{escape(who(list(line.threads)))}</b>"
            if line.threads
            else escape(line.text)
        )
        for label, line in labelled(lines)
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    def cells(tag: str, row: Iterable[object]) -> str:
        style = ' style="text-align:left"'
        return "".join(f"<{tag}{style}>{escape(str(value))}</{tag}>" for value in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _row(stepper: Stepper) -> str:
    """m, l and O of the row that the stepper shall show, or why it cannot be shown now."""
    if not stepper.has_rows:
        return ""
    try:
        row = stepper.row(stepper.shown_row)
    except RowError as error:
        return f"<p>{escape(str(error))}</p>"
    O = np.array2string(row.O, precision=3, max_line_width=np.inf, threshold=16)
    agree = "yes" if row.agree else "no: in the middle of an update"
    values = (row.row, f"{row.m:.4g}", f"{row.l:.4g}", O, ranges(list(row.threads)), agree)
    head = ("row", "m", "l", "O (not yet divided by l)", "in threads", "they agree")
    return _table(head, [values])


def _maps(shared: dict[str, np.ma.MaskedArray]) -> str:
    """Heat maps side by side, or words where matplotlib is not installed."""
    texts = [escape(array_text(name, array)) for name, array in shared.items()]
    try:
        maps = [_map(array) for array in shared.values()]
    except ImportError:
        return "".join(f"<p>{text}</p>" for text in texts)
    style = "display:inline-block;margin:4px;vertical-align:top;font-size:85%"
    both = zip(texts, maps, strict=True)
    images = "".join(f'<div style="{style}">{text}<br>{image}</div>' for text, image in both)
    colours = f"{NEVER_WRITTEN}: never written, {IS_NAN}: NaN, {IS_INFINITE}: infinite"
    return images + (f"<p>{colours}</p>" if maps else "")


def _map(array: np.ma.MaskedArray) -> str:
    """An array as an SVG image; what is no number has a colour of its own."""
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows, columns = array.size // max(1, array.shape[-1]), array.shape[-1]
    image = array.astype(np.float64).reshape(rows, columns)
    figure = Figure(figsize=(MAP_INCHES, MAP_INCHES), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(NEVER_WRITTEN)
    options = {"aspect": "auto", "interpolation": "nearest"}
    numbers = axes.imshow(np.ma.masked_invalid(image), **options)
    for colour, is_such in ((IS_NAN, np.isnan), (IS_INFINITE, np.isinf)):
        such = is_such(image).filled(False)
        if such.any():
            axes.imshow(np.ma.masked_where(~such, such), cmap=ListedColormap([colour]), **options)
    figure.colorbar(numbers, ax=axes)
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(svg, format="svg", metadata=nothing)
    return svg.getvalue()[svg.getvalue().index("<svg") :]
