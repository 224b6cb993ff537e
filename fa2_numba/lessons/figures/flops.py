"""Which FLOPs of a rung are matmul, which are not, and what the others cost beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS
from fa2_numba.launch import ForwardTensors, SimulatorMachine
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    IDLE,
    ORANGE,
    VERMILION,
    WIDTH_INCHES,
    new_figure,
    styled,
)
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts, Report, Simulator
from fa2_numba.testing import assert_attention, poisoned, random_qkv
from fa2_numba.traffic import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("matmul", "other", "exp")
NAMES = {"matmul": "matmul FLOPs", "other": "other FLOPs", "exp": "exp and log"}
COLOURS = {"matmul": BLUE, "other": VERMILION, "exp": ORANGE}
HATCHES = {"matmul": "", "other": "///", "exp": "xxx"}
LOOKS = ((VERMILION, "o", "-"), (BLUE, "s", "--"), (GREEN, "D", "-."))
"""Colour, marker and dashes of each rung."""
PERCENT = 100


@dataclass(frozen=True)
class PerScore:
    """What a rung does for each pair of a query and a key, on average."""

    matmul: float
    other: float
    exp: float

    def weighted(self, weight: float) -> dict[str, float]:
        """In matmul FLOPs, if each of the others costs as much as `weight` of them."""
        return {"matmul": self.matmul, "other": weight * self.other, "exp": weight * self.exp}


def per_score(counts: Counts | Report, scores: int) -> PerScore:
    """Counts of a run that computed so many scores, divided by them."""
    return PerScore(
        counts.matmul_flops / scores, counts.other_flops / scores, counts.special_calls / scores
    )


def predicted(rung: str, keys: int, config: TileConfig) -> PerScore:
    """One query tile against so many keys, no mask, in closed form."""
    return per_score(predict(rung, _problem(keys, config), config), config.block_m * keys)


def simulated(rung: str, keys: int, config: TileConfig) -> PerScore:
    """The same from a simulated run."""
    return per_score(run_rung(rung, _problem(keys, config), config), config.block_m * keys)


def run_rung(rung: str, p: Problem, config: TileConfig) -> Report:
    """Simulate a rung on random float32 arrays, in tiles of `config`, and judge its answer."""
    sizes = p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim
    qkv = random_qkv(*sizes, np.float32)
    O, LSE = poisoned(qkv[0].shape, "f4"), poisoned((p.batch, p.heads, p.seqlen_q), "f4")
    scale = np.float32(p.head_dim**-0.5)
    tensors = ForwardTensors(
        *qkv, O, LSE, scale, p.causal, "float32", lambda shape: poisoned(shape, "f4")
    )
    machine = SimulatorMachine(Simulator(checks=False, counts=True, progress=False))
    report = sum(machine.run(RUNGS[rung].plan_forward(tensors, config)))
    assert_attention(O, LSE, *qkv, causal=p.causal)
    return report


def _problem(keys: int, config: TileConfig) -> Problem:
    return Problem(1, 1, 1, config.block_m, keys, config.head_dim)


def first_fewer(
    rungs: tuple[str, str], lengths: Sequence[int], config: TileConfig
) -> tuple[int, float]:
    """The first of these numbers of keys at which the second rung needs fewer other FLOPs.

    And the ratio of the two there. ValueError if it never does.
    """
    for keys in lengths:
        first, second = (predicted(rung, keys, config).other for rung in rungs)
        if second < first:
            return keys, second / first
    raise ValueError(f"lengths={lengths}: {rungs[1]} needs fewer other FLOPs at none of them")


def draw_costs(runs: Mapping[str, PerScore], weight: float, title: str) -> Picture:
    """Bars of what runs do for a score: as counted, and each that is not matmul `weight` times."""
    if not runs:
        raise ValueError("runs: must be at least one")
    with styled():
        figure = new_figure((WIDTH_INCHES, 1.9 + 0.45 * len(runs)))
        figure.suptitle(title)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, factor, what, unit in (
            (panels[0], 1, "as counted", "FLOPs"),
            (panels[1], weight, f"each that is not matmul {weight:g} times", "matmul FLOPs"),
        ):
            _bars(axes, {name: run.weighted(factor) for name, run in runs.items()})
            axes.set(title=what, xlabel=f"{unit} for each score")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    said = " ".join(
        f"{name}: {run.matmul:.0f} matmul FLOPs for each score, {run.other:.1f} others and "
        f"{run.exp:.2f} exp or log, which is {_share(run, 1):.0%} not matmul as counted and "
        f"{_share(run, weight):.0%} if each costs {weight:g} matmul FLOPs."
        for name, run in runs.items()
    )
    numbers = {name: [run.matmul, run.other, run.exp] for name, run in runs.items()}
    return Picture(figure, f"{title}. {said}", numbers)


def _share(run: PerScore, weight: float) -> float:
    costs = run.weighted(weight)
    return 1 - costs["matmul"] / sum(costs.values())


def _bars(axes: Axes, runs: Mapping[str, Mapping[str, float]]) -> None:
    names = list(runs)
    left = np.zeros(len(names))
    for kind in KINDS:
        widths = np.array([runs[name][kind] for name in names])
        axes.barh(
            names,
            widths,
            0.6,
            left,
            color=COLOURS[kind],
            hatch=HATCHES[kind],
            edgecolor="white",
            linewidth=0,
            label=NAMES[kind],
        )
        left += widths
    for place, (name, total) in enumerate(zip(names, left, strict=True)):
        part = 1 - runs[name]["matmul"] / total
        axes.text(total * 1.01, place, f"{part:.0%} not matmul", va="center", fontsize=8)
    axes.set(xlim=(0, 1.5 * left.max()), ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)


def draw_other_flops(
    rungs: tuple[str, str],
    lengths: Sequence[int],
    config: TileConfig,
    runs: Mapping[str, Mapping[int, PerScore]],
) -> Picture:
    """FLOPs for a score over the number of keys, and the second rung's other FLOPs over the first.

    Curves are closed forms at `lengths`, dots the simulated runs: rung -> keys -> counts.
    """
    curves = {rung: [predicted(rung, keys, config) for keys in lengths] for rung in rungs}
    ratio = [b.other / a.other for a, b in zip(*curves.values(), strict=True)]
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.9))
        left, right = figure.subplots(1, 2)
        matmul = [one.matmul for one in curves[rungs[0]]]
        left.plot(lengths, matmul, color=BLACK, label="matmul FLOPs, both rungs")
        for rung, (colour, marker, dash) in zip(rungs, LOOKS, strict=False):
            others = [one.other for one in curves[rung]]
            left.plot(lengths, others, dash, color=colour, label=f"other FLOPs, {rung}")
            dots = runs.get(rung, {})
            left.plot(
                list(dots),
                [one.other for one in dots.values()],
                marker,
                color=colour,
                label="the same, simulated",
            )
        left.set(yscale="log", ylim=(5, 400), ylabel="FLOPs for each score")
        left.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
        left.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.55))
        right.axhline(0, color=BLACK, linewidth=1)
        changes = [PERCENT * (one - 1) for one in ratio]
        right.plot(lengths, changes, color=BLUE)
        both = {n: runs[rungs[1]][n].other / one.other for n, one in runs[rungs[0]].items()}
        right.plot(list(both), [PERCENT * (one - 1) for one in both.values()], "s", color=BLUE)
        right.set(ylabel="change of other FLOPs in %", title=f"{rungs[1]} against {rungs[0]}")
        left.set(title=f"head dim {config.head_dim}, tiles of {config.block_n} keys")
        for axes in (left, right):
            _length_axis(axes, lengths)
    ends = f"{changes[0]:+.0f} % at {lengths[0]} keys, {changes[-1]:+.1f} % at {lengths[-1]:,}"
    alt = (
        f"For each score both rungs need {matmul[-1]:.0f} matmul FLOPs; at {lengths[-1]:,} keys "
        f"{rungs[0]} needs {curves[rungs[0]][-1].other:.1f} others and {rungs[1]} "
        f"{curves[rungs[1]][-1].other:.1f}. Other FLOPs of {rungs[1]} against {rungs[0]}: {ends}."
    )
    numbers = {
        "keys": list(lengths),
        "other FLOPs": {rung: [one.other for one in line] for rung, line in curves.items()},
        "simulated": {
            rung: {n: one.other for n, one in dots.items()} for rung, dots in runs.items()
        },
        "change in %": changes,
    }
    return Picture(figure, alt, numbers)


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = [n for n in lengths if n & (n - 1) == 0][::2]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("keys")
    axes.grid(True, color=IDLE)
