"""Figures drawn from what kernels did, each as SVG that carries its numbers."""

from fa2_numba.lessons.figures.curves import draw_curves
from fa2_numba.lessons.figures.fragments import draw_fragments
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.svg import read_numbers, save_svg
from fa2_numba.lessons.figures.threads import draw_threads, follow
from fa2_numba.lessons.figures.timelines import draw_timeline, timeline_numbers

__all__ = [
    "Picture",
    "draw_curves",
    "draw_fragments",
    "draw_threads",
    "draw_timeline",
    "follow",
    "read_numbers",
    "save_svg",
    "timeline_numbers",
]
