"""Where the heads of a language model look: what a kernel's LSE says of real Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.data import load_smollm2
from fa2_numba.interface import flash_attn_func
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLACK,
    BLUE,
    IDLE,
    ORANGE,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.simulator import Simulator
from fa2_numba.testing import assert_attention

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 8
"""Keys that count as near: the query's own and those just before it."""
KINDS = ("the first token", f"itself and the {NEAR - 1} before", "all others")
COLOURS = (ORANGE, BLUE, IDLE)
LEVELS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Weights at which a map's cells become darker."""
LEVELS_OF_OVERLAP = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)


@dataclass(frozen=True)
class Heads:
    """One layer as a kernel saw it, causal: tokens (N words), q, k (N, heads, d), lse (heads, N).

    There are fewer key heads than query heads: group = query heads a key head.
    """

    layer: int
    tokens: tuple[str, ...]
    q: np.ndarray
    k: np.ndarray
    lse: np.ndarray

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.q.shape[1] // self.k.shape[1]

    def weights_of_key(self, key: int) -> np.ndarray:
        """What every query gives to one key, 0 where it is hidden: (heads, N)."""
        K = np.repeat(self.k[key], self.group, axis=0)
        S = np.einsum("nhd,hd->hn", self.q, K) * self.q.shape[-1] ** -0.5
        return np.where(np.arange(len(self.q)) >= key, np.exp(S - self.lse), 0.0)

    @property
    def weights(self) -> np.ndarray:
        """P (heads, N, N), for drawing; N is small here."""
        return np.stack([self.weights_of_key(key) for key in range(len(self.q))], axis=2)


@cache
def run_layer(layer: int, tokens: int) -> Heads:
    """Run `fa2_split_q` on all heads of a layer of SmolLM2 in the simulator, and keep its LSE."""
    data = load_smollm2(layer)
    q, k, v = (np.ascontiguousarray(x[:, :tokens]) for x in (data.q, data.k, data.v))
    simulator = Simulator(checks=False, counts=False, progress=False)
    out, lse = flash_attn_func(
        q, k, v, causal=True, rung="fa2_split_q", machine=simulator, return_lse=True
    )
    assert_attention(out, lse, q, k, v, causal=True)
    exact = [x[0].astype(np.float64) for x in (q, k, lse)]
    return Heads(layer, data.tokens[:tokens], *exact)


def shares(heads: Heads) -> np.ndarray:
    """What a head gives to each of KINDS, on average over the queries: (heads, 3)."""
    P = heads.weights
    query, key = np.indices(P.shape[1:])
    near = (key > 0) & (query - key < NEAR)
    given = [P[:, :, 0].sum(axis=1), (P * near).sum(axis=(1, 2))]
    total = P.sum(axis=(1, 2))
    return np.stack([*given, total - sum(given)], axis=1) / P.shape[1]


def overlap(heads: Heads) -> np.ndarray:
    """How much of their attention two heads give to the same keys, 0 to 1: (heads, heads)."""
    P = heads.weights
    return np.minimum(P[:, None], P[None]).sum(axis=3).mean(axis=2)


def draw_shares(layers: Sequence[Heads]) -> Picture:
    """For each layer a bar for each head; a line between those that share a key-value head."""
    found = {f"layer {heads.layer}": shares(heads) for heads in layers}
    with styled():
        figure = new_figure((WIDTH_INCHES, 3.6))
        panels = figure.subplots(1, len(layers), squeeze=False)[0]
        for axes, heads, (name, given) in zip(panels, layers, found.items(), strict=True):
            left = np.zeros(len(given))
            for kind, colour, share in zip(KINDS, COLOURS, given.T, strict=True):
                axes.barh(range(len(given)), share, left=left, color=colour, label=kind)
                left += share
            for edge in range(heads.group, len(given), heads.group):
                axes.axhline(edge - 0.5, color=BLACK, linewidth=1)
            axes.set(title=name, xlim=(0, 1), ylim=(len(given) - 0.5, -0.5))
            axes.set_xlabel("share of attention, mean over queries")
            axes.set_yticks(range(len(given)))
            axes.xaxis.set_major_formatter(matplotlib_module("ticker").PercentFormatter(1.0))
        panels[0].set_ylabel("query head")
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=len(KINDS))
    said = [
        f"{name}: {_percent(given[:, 0])} to the first token by head, {_percent(given[:, 1])} near."
        for name, given in found.items()
    ]
    alt = f"Where each head's attention goes. {' '.join(said)}"
    return Picture(figure, alt, {name: given.tolist() for name, given in found.items()})


def draw_maps(maps: Mapping[str, tuple[Heads, int]], tokens: int) -> Picture:
    """Name -> layer and head: what the first so many tokens give each other, darker for more."""
    with styled():
        figure = new_figure((WIDTH_INCHES, 0.7 + WIDTH_INCHES / len(maps)))
        panels = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, (name, (heads, head)) in zip(panels, maps.items(), strict=True):
            _draw_map(axes, heads.weights[head, :tokens, :tokens], heads.tokens[:tokens])
            axes.set(title=name, xlabel="key")
        panels[0].set_ylabel("query")
        patch = matplotlib_module("patches").Patch
        shades = [
            patch(facecolor=_shade(number), label=f"{level:.0%} or more")
            for number, level in enumerate(LEVELS)
        ]
        figure.legend(handles=shades, loc="outside lower center", ncols=len(LEVELS), fontsize=8)
    said = []
    for name, (heads, head) in maps.items():
        first, near, _ = shares(heads)[head]
        said.append(f"{name}: {first:.0%} to the first token, {near:.0%} to {KINDS[1]}.")
    # How dark each cell is: from 0, below all levels.
    shade = {
        name: np.searchsorted(LEVELS, heads.weights[head, :tokens, :tokens], side="right").tolist()
        for name, (heads, head) in maps.items()
    }
    alt = f"Attention of the first {tokens} tokens. {' '.join(said)}".replace("\n", ", ")
    return Picture(figure, alt, shade)


def draw_overlap(heads: Heads) -> Picture:
    """A square for each pair of heads, framed where both read the same key-value head."""
    same = overlap(heads)
    with styled():
        figure = new_figure((WIDTH_INCHES / 2, WIDTH_INCHES / 2))
        axes = figure.subplots()
        _draw_cells(axes, same, LEVELS_OF_OVERLAP)
        for row, col in np.ndindex(same.shape):
            colour = "white" if same[row, col] >= LEVELS_OF_OVERLAP[-2] else BLACK
            text = f"{same[row, col]:.0%}"
            axes.text(
                col + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=colour
            )
        frame = matplotlib_module("patches").Rectangle
        for first in range(0, len(same), heads.group):
            size = heads.group, heads.group
            axes.add_patch(frame((first, first), *size, fill=False, edgecolor=BLACK, linewidth=2))
        axes.set(xlim=(0, len(same)), ylim=(len(same), 0), xlabel="query head", ylabel="query head")
        places = np.arange(len(same)) + 0.5
        axes.set_xticks(places, range(len(same)))
        axes.set_yticks(places, range(len(same)))
        axes.tick_params(length=0)
        axes.set_title(f"layer {heads.layer}: attention to the same keys")
    inside, outside = means_of_overlap(heads)
    alt = (
        f"How much of their attention two heads of layer {heads.layer} give to the same keys. On "
        f"average {inside:.0%} where they share a key-value head, {outside:.0%} where not."
    )
    return Picture(figure, alt, {"overlap": same.round(4).tolist()})


def means_of_overlap(heads: Heads) -> tuple[float, float]:
    """The mean overlap of two different heads of one group, and of different groups."""
    same = overlap(heads)
    group = np.arange(len(same)) // heads.group
    one_group = group[:, None] == group
    different = ~np.eye(len(same), dtype=bool)
    return float(same[one_group & different].mean()), float(same[~one_group].mean())


def _draw_map(axes: Axes, P: np.ndarray, tokens: Sequence[str]) -> None:
    _draw_cells(axes, P, LEVELS)
    words = [token.strip() for token in tokens]
    places = np.arange(len(words)) + 0.5
    axes.plot([0, len(words)], [0, len(words)], color=BLACK, linewidth=0.6)
    axes.set(xlim=(0, len(words)), ylim=(len(words), 0))
    axes.set_xticks(places, words, rotation=90, fontsize=8)
    axes.set_yticks(places, words, fontsize=8)
    axes.tick_params(length=0)
    axes.set_aspect("equal")


def _draw_cells(axes: Axes, values: np.ndarray, levels: Sequence[float]) -> None:
    """A shade of blue from each level on, and none below the first."""
    for number, level in enumerate(levels):
        upper = levels[number + 1] if number + 1 < len(levels) else np.inf
        row, col = np.nonzero((values >= level) & (values < upper))
        axes.add_patch(rectangles(col, col + 1, row, 1, _shade(number)))


def _shade(number: int) -> tuple[float, float, float]:
    colours = matplotlib_module("colors")
    part = 0.15 + 0.85 * number / (len(LEVELS) - 1)
    return tuple(1 - part * (1 - channel) for channel in colours.to_rgb(BLUE))


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{value:.0%}" for value in values)
