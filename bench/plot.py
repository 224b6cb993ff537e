"""`python -m bench plot`: the recorded results of a GPU as SVG files beside them.

Each picture is of one file, for numbers of different runs are not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.problems import BACKWARD, BOTH, DIRECTIONS, FORWARD, LADDER, LADDER_SHAPES
from bench.records import part
from bench.timing import results_file
from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.figures import save_svg
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    CURVE_COLOURS,
    CURVE_DASHES,
    CURVE_MARKERS,
    GREEN,
    IDLE,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = results_file("NVIDIA H200", "")
DTYPE = "float16"
LOOKS = {
    "fa3_hopper": (BLACK, "X", "-"),
    "fa2_tensor_core": (BLUE, "o", "-"),
    "fa2_tensor_core_deterministic": (SKY, "^", "-"),
    "fa1_tensor_core": (ORANGE, "v", "-"),
    "torch_flash": (VERMILION, "s", "--"),
    "torch_cudnn": (GREEN, "D", "--"),
    "torch_efficient": (PURPLE, "P", "--"),
}
"""Contestant -> colour, marker and dashes, the same in every picture."""
PEER_COLOUR = "#999999"
LADDER_SHAPE = "between"
TITLES = {
    FORWARD: "Forward pass",
    BACKWARD: "Backward pass",
    BOTH: "Forward and backward pass",
}
MIB = 2**20

Drawn = tuple["Figure", dict[str, object]]
"""A figure, and the numbers that it shows."""


def draw_speed(result: dict, direction: str) -> Drawn:
    """TFLOP/s over N, without a mask and causal, for each head dim; at the right, of the peak."""
    records = [r for r in part(result, direction)["records"] if _fits_in(r)]
    dims = sorted({r["head_dim"] for r in records})
    peak = result["matmul_tflops"][DTYPE]
    numbers: dict[str, object] = {"peak": peak}
    with styled():
        figure = new_figure((WIDTH_INCHES, 5.6))
        panels = figure.subplots(2, len(dims), sharex=True, sharey=True, squeeze=False)
        for causal, row in zip((False, True), panels, strict=True):
            for head_dim, axes in zip(dims, row, strict=True):
                mask = "causal" if causal else "no mask"
                chosen = [r for r in records if (r["head_dim"], r["causal"]) == (head_dim, causal)]
                numbers[f"{mask}, D = {head_dim}"] = _draw_lines(axes, chosen)
                axes.set_title(f"D = {head_dim}, {mask}")
                share = axes.secondary_yaxis("right", functions=_share_of(peak))
                share.yaxis.set_major_formatter(matplotlib_module("ticker").PercentFormatter(1.0))
                share.tick_params(labelsize=8)
        for axes in panels[-1]:
            axes.set_xlabel("N")
        for axes in panels[:, 0]:
            axes.set_ylabel("TFLOP/s")
        panels[0, 0].set_ylim(bottom=0)
        figure.suptitle(
            f"{TITLES[direction]}, {DTYPE}, 16k tokens in sequences of N, heads of 2048 "
            f"columns in all\n{_where(result)}; right: share of a large matrix product "
            f"({peak:.0f} TFLOP/s)"
        )
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure, numbers


def draw_ladder(result: dict) -> Drawn:
    """A bar for each CUDA-core rung, a panel for each shape: TFLOP/s, without a mask and causal."""
    shapes = list(dict.fromkeys(r["shape"] for r in result["records"]))
    names = list(dict.fromkeys(r["name"] for r in result["records"]))
    numbers: dict[str, object] = {}
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.4))
        for axes, shape in zip(
            figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0], shapes, strict=True
        ):
            chosen = [r for r in result["records"] if r["shape"] == shape]
            one = chosen[0]
            for place, (causal, colour) in enumerate(((False, BLUE), (True, SKY))):
                speeds = {r["name"]: r["tflops"] for r in chosen if r["causal"] == causal}
                label = "causal" if causal else "no mask"
                places = [number + 0.4 * place - 0.2 for number in range(len(names))]
                axes.barh(places, [speeds[n] for n in names], 0.4, color=colour, label=label)
                numbers[f"{shape}, {label}"] = speeds
            axes.set_title(f"{shape}\nB{one['batch']} H{one['heads']} N{one['seqlen']}")
            axes.set(xlabel="TFLOP/s", ylim=(len(names) - 0.5, -0.5))
            axes.set_yticks(range(len(names)), names)
            axes.grid(True, axis="x", color=IDLE)
            axes.set_axisbelow(True)
        figure.suptitle(f"The CUDA-core rungs, float32, D = 64, forward. {_where(result)}")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure, numbers


def draw_memory(result: dict) -> Drawn:
    """Bytes that attention takes beside its arrays, forward and backward, over N."""
    numbers: dict[str, object] = {}
    with styled():
        figure = new_figure((WIDTH_INCHES, 4.0))
        axes = figure.subplots()
        looks = zip(CURVE_COLOURS, CURVE_MARKERS, CURVE_DASHES * 2, strict=False)
        for one, (colour, marker, dash) in zip(result["memory"], looks, strict=False):
            points = [
                (n, size / MIB)
                for n, size in zip(one["seqlens"], one["bytes"], strict=True)
                if size is not None
            ]
            look = {"color": colour, "marker": marker, "linestyle": dash}
            axes.plot(*zip(*points, strict=True), label=one["name"], **look)
            numbers[one["name"]] = points
        axes.set(xscale="log", yscale="log", xlabel="N", ylabel="MiB beside Q, K, V and dO")
        ticks = result["memory"][0]["seqlens"]
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(True, color=IDLE)
        axes.legend()
        axes.set_title(
            f"Memory of one attention, forward and backward, 8 heads of 64. {_where(result)}"
        )
    return figure, numbers


def draw_whole_ladder(result: dict) -> Drawn:
    """A bar for every rung and every peer on one shape, without a mask and causal; log axis."""
    records = on_ladder_shape(result)
    names = list(dict.fromkeys(r["name"] for r in records))
    peak = result["matmul_tflops"][DTYPE]
    numbers: dict[str, object] = {"peak": peak}
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.9))
        # Fonts differ: long names need room.
        figure.get_layout_engine().set(w_pad=0.12)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, causal in zip(panels, (False, True), strict=True):
            speeds = {r["name"]: r["tflops"] for r in records if r["causal"] == causal}
            colours = [BLUE if name in RUNGS else PEER_COLOUR for name in names]
            axes.barh(range(len(names)), [speeds[name] for name in names], color=colours)
            for place, name in enumerate(names):
                beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(f"{speeds[name]:.3g}", (speeds[name], place), fontsize=9, **beside)
            axes.axvline(peak, color=BLACK, linestyle=":")
            title = "causal" if causal else "no mask"
            axes.set(xscale="log", xlim=(1, 2 * peak), ylim=(len(names) - 0.5, -0.5), title=title)
            axes.set_xlabel("TFLOP/s")
            axes.spines[["top", "right"]].set_visible(False)
            numbers[title] = speeds
        panels[0].set_yticks(range(len(names)), names)
        one = records[0]
        figure.suptitle(
            f"Forward, {DTYPE}, {one['batch']} x {one['heads']} heads of {one['seqlen']} tokens, "
            f"D = {one['head_dim']}, all in one run\n{_where(result)}"
        )
        patch = matplotlib_module("patches").Patch
        line = matplotlib_module("lines").Line2D
        meanings = ((BLUE, "rungs of this package"), (PEER_COLOUR, "peers"))
        handles = [patch(facecolor=colour, label=label) for colour, label in meanings]
        label = f"a large matrix product, {peak:.0f}"
        handles.append(line([], [], color=BLACK, linestyle=":", label=label))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure, numbers


def on_ladder_shape(result: dict) -> list[dict]:
    """The records of the forward pass of all rungs, on the shape that is shown of them."""
    sizes = dict(zip(("batch", "heads", "seqlen"), LADDER_SHAPES[LADDER_SHAPE], strict=True))
    records = part(result, FORWARD, LADDER)["records"]
    return [r for r in records if sizes.items() <= r.items()]


def _fits_in(record: dict) -> bool:
    """The plain formula and its like are lines at the bottom: ratios tell of them."""
    return record["dtype"] == DTYPE and record["name"] in LOOKS


PICTURES: dict[str, tuple[str, Callable[[dict], Drawn]]] = {
    **{
        f"speed_{direction}": ("run", partial(draw_speed, direction=direction))
        for direction in DIRECTIONS
    },
    "ladder": ("ladder", draw_ladder),
    "memory": ("train_gpt", draw_memory),
    "whole_ladder": ("run", draw_whole_ladder),
}
"""Picture = name of its SVG file -> file of results that it shows, and what draws it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw all results that a folder has; 2 if it has none, or one that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: the H200's")
    folder = parser.parse_args(argv).folder
    there = {name: source for name, source in PICTURES.items() if _file(folder, source[0]).exists()}
    if not there:
        print(f"error: {folder}: has no results to draw", file=sys.stderr)
        return 2
    for name, (source, draw) in there.items():
        path = folder / f"{name}.svg"
        try:
            save_svg(*_arguments(draw, _file(folder, source), path))
        except (OSError, KeyError, TypeError, ValueError) as error:
            print(
                f"error: {_file(folder, source)}: {type(error).__name__}: {error}", file=sys.stderr
            )
            return 2
        print(path)
    return 0


def _arguments(draw: Callable[[dict], Drawn], file: Path, path: Path) -> tuple:
    figure, numbers = draw(json.loads(file.read_text(encoding="utf-8")))
    return figure, path, numbers


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _draw_lines(axes: Axes, records: Sequence[dict]) -> dict[str, list[tuple[int, float]]]:
    """A line for each contestant; returns its points."""
    lines = {}
    for name in dict.fromkeys(r["name"] for r in records):
        points = sorted((r["seqlen"], r["tflops"]) for r in records if r["name"] == name)
        colour, marker, dash = LOOKS.get(name, (BLACK, ".", ":"))
        look = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4}
        axes.plot(*zip(*points, strict=True), label=name, **look)
        lines[name] = points
    axes.set_xscale("log", base=2)
    seqlens = sorted({r["seqlen"] for r in records})
    labels = [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens]
    axes.set_xticks(seqlens, labels, fontsize=8)
    axes.grid(True, color=IDLE)
    return lines


def _share_of(peak: float) -> tuple[Callable, Callable]:
    return (lambda tflops: tflops / peak), (lambda share: share * peak)


def _where(result: dict) -> str:
    return f"{result['gpu']}, driver {result['driver']}, {result['date']}"


if __name__ == "__main__":
    raise SystemExit(main())
