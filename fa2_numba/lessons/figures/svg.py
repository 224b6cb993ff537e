"""SVG files that carry the numbers they show, the same bytes in every run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fa2_numba.lessons.figures.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def svg_text(figure: Figure, numbers: Mapping[str, object]) -> str:
    """A figure as an SVG file's text that holds all it needs, and `numbers` as JSON.

    Neither date nor version is in it; the same matplotlib writes the same text. `numbers` are what
    the figure shows: a test compares them, for another matplotlib draws otherwise.
    """
    metadata = {
        "Description": json.dumps(numbers, separators=(",", ":"), allow_nan=False),
        "Creator": "fa2_numba",
        "Date": None,
        "Type": None,
    }
    file = StringIO()
    with styled():
        figure.savefig(file, format="svg", metadata=metadata)
    # A hundredth of a point is enough, and half the file.
    text = re.sub(
        r' d="[^"]*"', lambda data: re.sub(r"(\.\d\d)\d+", r"\1", data[0]), file.getvalue()
    )
    # The document type names a file on the web; git hooks would cut blanks at the ends of lines.
    text = re.sub(r"<!DOCTYPE[^>]*>\n", "", text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def save_svg(figure: Figure, path: Path, numbers: Mapping[str, object]) -> None:
    """Write `svg_text` to a file."""
    Path(path).write_text(svg_text(figure, numbers), encoding="utf-8")


def read_numbers(path: Path) -> dict[str, object]:
    """The numbers that `save_svg` left in a file; ValueError if there are none."""
    description = next(ElementTree.parse(path).iter(DESCRIPTION), None)
    if description is None or not description.text:
        raise ValueError(f"path={str(path)!r}: must be an SVG file that save_svg has written")
    return json.loads(description.text)
