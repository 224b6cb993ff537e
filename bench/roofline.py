"""`python -m bench roofline`: every rung as a dot below what the GPU reaches at best.

To the right, FLOPs of the two matrix products for each byte that the kernel asks of HBM, by the
closed forms that tests hold equal to the simulator's counts; upward, measured TFLOP/s. The slope is
the measured copy bandwidth, the flat lines are measured matrix products. Caches answer a part of
what a kernel asks for, so a dot may lie above the slope; what it may not is above its flat line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.plot import FOLDER
from bench.problems import FORWARD
from bench.records import part
from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.figures import save_svg
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    IDLE,
    VERMILION,
    WIDTH_INCHES,
    new_figure,
    styled,
)
from fa2_numba.lessons.figures.textbook_roofline import intensity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEQLEN, HEAD_DIM = 2048, 64
COLOURS = {"float32": VERMILION, "float16": BLUE}
LABELLED_LEFT = ("fa1_sliced_k",)
SOURCES = {"ladder": "float32", "run": "float16"}
"""File of results -> dtype of its records that are drawn."""


@dataclass(frozen=True)
class Dot:
    """A rung on one problem: matmul FLOPs a byte asked of HBM, and TFLOP/s."""

    rung: str
    dtype: str
    intensity: float
    tflops: float


def dots(results: dict[str, dict]) -> list[Dot]:
    """Every rung of this package without a mask, from the file that has measured it."""
    found = []
    for source, dtype in SOURCES.items():
        of_paper = part(results[source], FORWARD) if source == "run" else results[source]
        for record in of_paper["records"]:
            problem = record["dtype"], record["seqlen"], record["head_dim"], record["causal"]
            if record["name"] in RUNGS and problem == (dtype, SEQLEN, HEAD_DIM, False):
                flops_a_byte = intensity(record["name"], SEQLEN, HEAD_DIM, dtype)
                found.append(Dot(record["name"], dtype, flops_a_byte, record["tflops"]))
    return found


def draw(results: dict[str, dict]) -> tuple[Figure, dict[str, object]]:
    """The roofline of `ceilings` with the rungs of `ladder` and `run`, and its numbers."""
    ceilings, found = results["ceilings"], dots(results)
    slope = ceilings["copy_terabytes"]["median"]
    roofs = {dtype: ceilings["matmul_tflops"][dtype]["median"] for dtype in COLOURS}
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.2))
        axes = figure.subplots()
        _draw_roofs(axes, slope, roofs)
        for dot in found:
            axes.plot(dot.intensity, dot.tflops, "o", color=COLOURS[dot.dtype], markersize=7)
            side = -1 if dot.rung in LABELLED_LEFT else 1
            look = {"xytext": (8 * side, 0), "textcoords": "offset points", "fontsize": 9}
            align = {"va": "center", "ha": "left" if side > 0 else "right"}
            label = f"{dot.rung} {dot.tflops:.3g}"
            axes.annotate(label, (dot.intensity, dot.tflops), **look, **align)
        axes.set(xscale="log", yscale="log", xlim=(4, 600), ylim=(2, 1500))
        axes.set(xlabel="matmul FLOPs a byte asked of HBM", ylabel="TFLOP/s")
        axes.grid(True, color=IDLE)
        axes.set_title(
            f"Forward, N = {SEQLEN}, D = {HEAD_DIM}, no mask. {ceilings['gpu']}, driver "
            f"{ceilings['driver']}\nfloat32 measured {results['ladder']['date']}, float16 "
            f"{results['run']['date']}, lines {ceilings['date']}"
        )
    numbers = {
        "copy_terabytes": slope,
        "matmul_tflops": roofs,
        "rungs": {dot.rung: [dot.dtype, dot.intensity, dot.tflops] for dot in found},
    }
    return figure, numbers


def _draw_roofs(axes: Axes, slope: float, roofs: dict[str, float]) -> None:
    x = np.array([1.0, max(roofs.values()) / slope])
    axes.plot(x, slope * x, color=BLACK)
    for dtype, roof in roofs.items():
        axes.plot([roof / slope, 1e4], [roof, roof], color=COLOURS[dtype], linestyle="--")
        label = f"{dtype} products: {roof:.0f} TFLOP/s"
        axes.text(580, roof * 1.08, label, ha="right", color=COLOURS[dtype], fontsize=9)
    axes.text(20, slope * 24, f"copying: {slope:.2f} TB/s", ha="right", fontsize=9)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a folder's roofline into it; 2 if a file of it is missing or cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m bench roofline", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: the H200's")
    folder = parser.parse_args(argv).folder
    try:
        results = {
            name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("ceilings", *SOURCES)
        }
        figure, numbers = draw(results)
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"error: {folder}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    path = folder / "roofline.svg"
    save_svg(figure, path, numbers)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
