"""`Picture`: a figure as a notebook shows it, with words for readers who cannot see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fa2_numba.lessons.figures.style import styled
from fa2_numba.lessons.figures.svg import svg_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_TYPES = (".svg", ".png")
PNG_DOTS_PER_INCH = 200


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure, what it says in words (`alt`), and the numbers it shows.

    Its background is white, so that it can be read in dark mode too.
    """

    figure: Figure
    alt: str
    numbers: Mapping[str, object] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write it for slides, as .svg or .png by the end of the name."""
        path = Path(path)
        if path.suffix not in FILE_TYPES:
            raise ValueError(f"path={str(path)!r}: must end with one of {', '.join(FILE_TYPES)}")
        if path.suffix == ".svg":
            path.write_text(self.svg, encoding="utf-8")
            return
        with styled():
            self.figure.savefig(path, dpi=PNG_DOTS_PER_INCH)

    @property
    def svg(self) -> str:
        """The SVG element, with `alt` as its title."""
        text = svg_text(self.figure, self.numbers)
        opening = text.index("<svg")
        inside = text.index(">", opening) + 1
        title = f"\n <title>{escape(self.alt)}</title>"
        return f'<svg role="img"{text[opening + 4 : inside]}{title}{text[inside:]}'

    def __repr__(self) -> str:
        return f"<Picture: {self.alt}>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.alt}
