"""What traffic and arithmetic allow a kernel, beside what was measured on an H200."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fa2_numba
from fa2_numba.config import DeviceLimits
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.ladder import RUNGS, tiles_for
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    IDLE,
    VERMILION,
    WIDTH_INCHES,
    new_figure,
    styled,
)
from fa2_numba.problem import Problem
from fa2_numba.traffic import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(fa2_numba.__file__).parents[1] / "bench" / "results" / "h200"
DIRECTIONS = ("forward", "backward")
H200 = (9, 0)
H200_TB_PER_SECOND = 4.8
"""HBM, by NVIDIA's data sheet of the H200."""
H200_FLOAT32_TFLOPS = 67.0
"""Without tensor cores, by the same data sheet."""
ITEMSIZE = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class Dot:
    """A kernel at one length: matmul FLOPs a byte of HBM, and TFLOP/s measured if it was."""

    seqlen: int
    intensity: float
    measured: float | None = None


def recorded(name: str) -> dict[str, object]:
    """Measurements on the H200: a file, such as "ladder" or "counters", or a part of "run".

    "forward" and "backward" are its records of that direction, on the grid of the FA2 paper.
    """
    file = "run" if name in DIRECTIONS else name
    found = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    if name in DIRECTIONS:
        part = {"direction": name, "group": "paper"}.items()
        found["records"] = [record for record in found["records"] if part <= record.items()]
    return found


def measured_dots(name: str, rung: str, dtype: str, head_dim: int = 64) -> list[Dot]:
    """A rung without a mask at the lengths that a file has, bytes in closed form."""
    records = recorded(name)["records"]
    wanted = {"name": rung, "dtype": dtype, "head_dim": head_dim, "causal": False}
    speeds = {
        record["seqlen"]: record["tflops"]
        for record in records
        if all(record[key] == value for key, value in wanted.items())
    }
    return [Dot(n, intensity(rung, n, head_dim, dtype), speeds[n]) for n in sorted(speeds)]


def intensity(rung: str, seqlen: int, head_dim: int, dtype: str = "float32") -> float:
    """FLOPs of the two matrix products a byte of HBM, with the tiles that an H200 gets."""
    config = tiles_for(RUNGS[rung], head_dim, DeviceLimits(H200, SHARED_BYTES_PER_BLOCK[H200]))
    problem = Problem(1, 1, 1, seqlen, seqlen, head_dim, itemsize=ITEMSIZE[dtype])
    counts = predict(rung, problem, config)
    moved = counts.global_load_bytes + counts.global_store_bytes
    return 4 * seqlen * seqlen * head_dim / moved


def hbm_bytes_counted_by_gpu(rung: str) -> tuple[int, float]:
    """Bytes that a rung asks for on the problem of counters.json, and those the H200 counted."""
    (record,) = [one for one in recorded("counters")["rungs"] if one["rung"] == rung]
    asked = record["predicted"]
    counted = sum(
        launch["metrics"][f"dram__bytes_{way}.sum"]
        for launch in record["launches"]
        for way in ("read", "write")
    )
    return asked["global_load_bytes"] + asked["global_store_bytes"], counted


def draw_roofline(
    kernels: Mapping[str, Sequence[Dot]],
    bytes_per_second: float,
    peaks: Mapping[str, float],
    title: str,
    mark: tuple[str, float],
) -> Picture:
    """TFLOP/s over matmul FLOPs a byte: what traffic and arithmetic allow, and what was measured.

    bytes_per_second: of HBM, in units of 10**12. peaks: what limits arithmetic -> TFLOP/s, the
    lowest first. mark: a label and a number of FLOPs a byte, a vertical line.
    """
    if not kernels or not all(kernels.values()):
        raise ValueError("kernels: must be at least one, each with dots")
    highest = max(peaks.values())
    low, high = 4.0, 2 * highest / bytes_per_second
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.0))
        axes = figure.subplots()
        axes.plot([low, highest / bytes_per_second], [low * bytes_per_second, highest], color=BLACK)
        for name, peak in peaks.items():
            axes.plot([peak / bytes_per_second, high], [peak, peak], color=BLACK)
            axes.text(high / 1.03, peak * 1.06, name, ha="right", fontsize=9)
        allowed = f"what HBM allows: {bytes_per_second} TB/s (data sheet)"
        axes.text(70, 78 * bytes_per_second, allowed, ha="right", fontsize=9)
        axes.axvline(mark[1], color=VERMILION, linestyle=":")
        axes.text(mark[1] * 1.03, 4.5, mark[0], color=VERMILION, fontsize=9)
        looks = zip((VERMILION, BLUE, GREEN), "osD", strict=True)
        for (name, dots), (colour, marker) in zip(kernels.items(), looks, strict=False):
            _dots(axes, name, dots, bytes_per_second, (colour, marker))
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(4, 2 * highest), title=title)
        axes.set(xlabel="matmul FLOPs a byte of HBM", ylabel="TFLOP/s")
        for axis, ticks in (
            (axes.xaxis, (5, 10, 20, 50, 100, 200)),
            (axes.yaxis, (5, 20, 100, 500)),
        ):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.grid(True, color=IDLE)
        axes.legend(loc="upper left", fontsize=9, framealpha=1)
    numbers = {
        name: [[dot.seqlen, dot.intensity, dot.measured] for dot in dots]
        for name, dots in kernels.items()
    }
    return Picture(figure, _roofline_alt(kernels, bytes_per_second, peaks), numbers)


def _dots(
    axes: Axes, name: str, dots: Sequence[Dot], bandwidth: float, look: tuple[str, str]
) -> None:
    """Hollow on the slope at every length, filled where it was measured."""
    colour, marker = look
    x = np.array([dot.intensity for dot in dots])
    axes.plot(x, bandwidth * x, marker, color=colour, markerfacecolor="white", linestyle="")
    for dot in (dots[0], dots[-1]):
        side = -6 if dot is dots[0] else 6
        axes.annotate(
            f"N = {dot.seqlen:,}",
            (dot.intensity, bandwidth * dot.intensity),
            (side, -4 if side > 0 else 2),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            fontsize=8,
            color=colour,
        )
    measured = [dot for dot in dots if dot.measured is not None]
    axes.plot(
        [dot.intensity for dot in measured],
        [dot.measured for dot in measured],
        marker,
        color=colour,
        label=name,
    )


def _roofline_alt(
    kernels: Mapping[str, Sequence[Dot]], bandwidth: float, peaks: Mapping[str, float]
) -> str:
    limits = ", ".join(f"{name} {peak:.0f} TFLOP/s" for name, peak in peaks.items())
    said = []
    for name, dots in kernels.items():
        speeds = [dot.measured for dot in dots if dot.measured is not None]
        said.append(
            f"{name}: {dots[0].intensity:.1f} FLOPs a byte at N = {dots[0].seqlen:,}, "
            f"{dots[-1].intensity:.1f} at N = {dots[-1].seqlen:,}"
            + (f", at most {max(speeds):.0f} TFLOP/s measured." if speeds else ".")
        )
    return f"Roofline: HBM {bandwidth} TB/s; {limits}. " + " ".join(said)
