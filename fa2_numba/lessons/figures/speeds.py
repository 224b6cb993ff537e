"""Measured speeds from the repository's results, and what the order of measuring does to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.fake_gpu import FakeGpu, FakeKernel
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLUE,
    ORANGE,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded

PEER_COLOUR = "#999999"
ORDERS = ("one after the other", "in turns")


@dataclass(frozen=True)
class Speed:
    """A kernel's TFLOP/s in one run: of the median time, of the longest and of the shortest."""

    name: str
    tflops: float
    lowest: float
    highest: float

    @property
    def ours(self) -> bool:
        """Whether it is a rung of this package."""
        return self.name.removesuffix("_deterministic") in RUNGS


def speeds(file: str, **wanted: object) -> list[Speed]:
    """All that a file of results measured on one problem in one run, the slowest first.

    wanted: fields of a record and their values, such as seqlen=2048; one problem must be left.
    """
    records = [
        record
        for record in recorded(file)["records"]
        if all(record[field] == value for field, value in wanted.items())
    ]
    names = [record["name"] for record in records]
    if not records or len(set(names)) < len(names):
        raise ValueError(f"{wanted}: {len(records)} records of {file}, must be one problem")
    found = [
        Speed(
            record["name"],
            record["tflops"],
            record["tflops"] * record["ms"] / record["ms_max"],
            record["tflops"] * record["ms"] / record["ms_min"],
        )
        for record in records
    ]
    return sorted(found, key=lambda speed: speed.tflops)


def draw_speeds(runs: Mapping[str, Sequence[Speed]]) -> Picture:
    """Bars of TFLOP/s, a panel for each run: its axis is its own, for runs are not compared."""
    if not runs:
        raise ValueError("runs: must be at least one")
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.4))
        panels = figure.subplots(1, len(runs), squeeze=False)[0]
        for axes, (title, found) in zip(panels, runs.items(), strict=True):
            places = range(len(found))
            colours = [BLUE if speed.ours else PEER_COLOUR for speed in found]
            values = [speed.tflops for speed in found]
            spread = [
                [speed.tflops - speed.lowest for speed in found],
                [speed.highest - speed.tflops for speed in found],
            ]
            axes.barh(places, values, xerr=spread, color=colours, capsize=2)
            axes.set_yticks(places, [speed.name for speed in found], fontsize=9)
            for place, speed in zip(places, found, strict=True):
                axes.text(speed.highest, place, f" {speed.tflops:.3g}", va="center", fontsize=9)
            axes.set_xlim(0, 1.18 * max(values))
            axes.set(xlabel="TFLOP/s", title=title)
            axes.spines[["top", "right"]].set_visible(False)
        patch = matplotlib_module("patches").Patch
        meanings = ((BLUE, "rungs of this package"), (PEER_COLOUR, "peers"))
        shades = [patch(facecolor=colour, label=label) for colour, label in meanings]
        figure.legend(handles=shades, loc="outside lower center", ncols=2)
    said = [
        f"{title}: " + ", ".join(f"{speed.name} {speed.tflops:.3g}" for speed in found) + "."
        for title, found in runs.items()
    ]
    numbers = {
        title: {speed.name: speed.tflops for speed in found} for title, found in runs.items()
    }
    alt = f"Measured TFLOP/s. {' '.join(said)}".replace("\n", ", ")
    return Picture(figure, alt, numbers)


def run_orders(seed: int, rounds: int) -> dict[str, FakeGpu]:
    """Two kernels, one 1.2 times as slow, on a fake GPU: one after the other, and in turns.

    Both have been compiled; the launches for that are taken off the list.
    """
    mine, peer = FakeKernel("mine", 1.2), FakeKernel("peer", 1.0)
    turns = {
        ORDERS[0]: [mine] * rounds + [peer] * rounds,
        ORDERS[1]: [mine, peer] * rounds,
    }
    gpus = {}
    for order, kernels in turns.items():
        gpu = gpus[order] = FakeGpu(seed)
        for kernel in (mine, peer):
            gpu.launch(kernel, gpu.normal())
        gpu.synchronize()
        for kernel in kernels:
            gpu.launch(kernel, gpu.normal())
        gpu.synchronize()
        del gpu.launches[:2]
    return gpus


def draw_orders(gpus: Mapping[str, FakeGpu]) -> Picture:
    """How long each launch took, when it began: the same two kernels in several orders."""
    medians = {order: _medians(gpu) for order, gpu in gpus.items()}
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.6))
        panels = figure.subplots(1, len(gpus), squeeze=False, sharey=True)[0]
        for axes, (order, gpu) in zip(panels, gpus.items(), strict=True):
            for name, colour, marker in (("mine", BLUE, "o"), ("peer", ORANGE, "s")):
                runs = [launch for launch in gpu.launches if launch.kernel.name == name]
                start = [1000 * (launch.start - gpu.launches[0].start) for launch in runs]
                taken = [1000 * (launch.end - launch.start) for launch in runs]
                axes.plot(start, taken, marker, color=colour, markersize=3, label=name)
                look = {"color": colour, "linestyle": "--", "linewidth": 1}
                axes.axhline(medians[order][name], **look)
            ratio = medians[order]["mine"] / medians[order]["peer"]
            axes.set_title(f"{order}\nratio of the medians {ratio:.2f}, in truth 1.20")
            axes.set_xlabel("start of the run (ms)")
        panels[0].set_ylabel("time of one run (ms)")
        panels[0].set_yscale("log")
        ticks = (1, 1.5, 2, 3, 5)
        panels[0].set_yticks(ticks, [str(tick) for tick in ticks])
        panels[0].set_yticks([], minor=True)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    said = [
        f"{order}: medians {medians[order]['mine']:.2f} and {medians[order]['peer']:.2f} ms."
        for order in gpus
    ]
    alt = f"Times of two kernels on a model of a GPU, in truth 1.2 and 1 ms. {' '.join(said)}"
    return Picture(figure, alt, medians)


def _medians(gpu: FakeGpu) -> dict[str, float]:
    return {
        name: float(
            np.median(
                [1000 * (run.end - run.start) for run in gpu.launches if run.kernel.name == name]
            )
        )
        for name in ("mine", "peer")
    }
