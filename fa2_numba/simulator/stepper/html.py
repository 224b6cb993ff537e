"""The microscope as HTML for a notebook: no script, nothing from the network, all text escaped."""

from __future__ import annotations

import io
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.simulator.engine import with_warps
from fa2_numba.simulator.source import ranges
from fa2_numba.simulator.stepper.state import Row, SourceLine
from fa2_numba.simulator.stepper.text import array_text, heading, labelled

if TYPE_CHECKING:
    from fa2_numba.simulator.stepper.stepper import Stepper

MARKED = "background:#ffe9a8;color:#000"
NEVER_WRITTEN = "lightgrey"
MAP_INCHES = 2.6


def render(stepper: Stepper, shared: dict[str, np.ma.MaskedArray]) -> str:
    """What happened, the source with its threads, who waits, one row, shared memory as maps."""
    groups = [
        (group.warp, ranges(list(group.threads)), group.state, group.line)
        for group in stepper.waiting()
    ]
    parts = [
        f"<p><b>{escape(heading(stepper))}</b></p>",
        f'<pre style="line-height:1.3">{_source(stepper.source())}</pre>',
        _table(("warp", "threads", "state", "where"), groups),
        _row(stepper),
        _maps(shared),
    ]
    return f"<div>{''.join(parts)}</div>"


def _source(lines: list[SourceLine]) -> str:
    return "\n".join(
        escape(label)
        + (
            f'<span style="{MARKED}">{escape(line.text)}</span>'
            f"  <b>{escape(with_warps(list(line.threads)))}</b>"
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
    """m, l and O of the tile's first row, if the kernel has such a thing now."""
    try:
        row: Row = stepper.row(0)
    except ValueError:
        return ""
    O = np.array2string(row.O, precision=3, max_line_width=np.inf, threshold=16)
    values = (row.row, f"{row.m:.4g}", f"{row.l:.4g}", O, ranges(list(row.threads)))
    return _table(("row", "m", "l", "O", "in threads"), [values])


def _maps(shared: dict[str, np.ma.MaskedArray]) -> str:
    """Heat maps side by side, or words where matplotlib is not installed."""
    texts = [escape(array_text(name, array)) for name, array in shared.items()]
    try:
        maps = [_map(array) for array in shared.values()]
    except ImportError:
        return "".join(f"<p>{text}</p>" for text in texts)
    style = "display:inline-block;margin:4px;vertical-align:top;font-size:85%"
    both = zip(texts, maps, strict=True)
    return "".join(f'<div style="{style}">{text}<br>{image}</div>' for text, image in both)


def _map(array: np.ma.MaskedArray) -> str:
    """An array as an SVG image: grey where nothing was written."""
    import matplotlib
    from matplotlib.figure import Figure

    size = (array.size // max(1, array.shape[-1]), array.shape[-1])
    image = np.ma.masked_invalid(array.astype(np.float64).reshape(size))
    figure = Figure(figsize=(MAP_INCHES, MAP_INCHES), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(NEVER_WRITTEN)
    shown = axes.imshow(image, aspect="auto", interpolation="nearest")
    figure.colorbar(shown, ax=axes)
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(svg, format="svg", metadata=nothing)
    return svg.getvalue()[svg.getvalue().index("<svg") :]
