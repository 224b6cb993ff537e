"""`python -m fa2_numba.lessons.draw`: write the figures that the documentation shows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa2_numba.config import TileConfig
from fa2_numba.lessons.figures import (
    draw_curves,
    draw_fragments,
    draw_timeline,
    save_svg,
    timeline_numbers,
)
from fa2_numba.lessons.figures.real_heads import draw_maps, run_layer
from fa2_numba.lessons.figures.split_q import split_q_contrast
from fa2_numba.lessons.fragments import mma_fragments as fragments_of_mma
from fa2_numba.lessons.occupancy import blocks_per_multiprocessor
from fa2_numba.lessons.timeline import head_costs, schedule, tile_costs
from fa2_numba.problem import Problem
from fa2_numba.traffic import predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("docs/figures")

H200_MULTIPROCESSORS = 132
H200_COMPUTE_CAPABILITY = (9, 0)

TIMELINE_HEADS, TIMELINE_SEQLEN = 16, 4096
TIMELINE_RUNGS = {
    "fa2_fewer_flops": "fa2_fewer_flops: a block a head",
    "fa2_seq_parallel": "fa2_seq_parallel: a block a query tile",
}
"""Two rungs that differ in their grids and in little else, see `python -m fa2_numba diff`."""

REGISTERS = {"fa2_fewer_flops": 254, "fa2_seq_parallel": 229}
"""Registers a thread that ptxas reports for sm_90a, of these rungs, causal, in 64 x 64 tiles of
head dim 64."""
PTXAS_VERSION = "13.5"

CURVE_SEQLEN, CURVE_HEAD_DIM = 4096, 64
CURVE_TILES = (8, 16, 32, 64, 128)
HEADS_SEQLEN = 20

CURVE_WARPS = 2
"""Few enough for tiles of 8 rows; HBM traffic does not depend on it."""


def sm_timeline() -> tuple[Figure, dict[str, object]]:
    """Causal heads on an H200: one block a head against one a query tile."""
    config = TileConfig(64, 64, 64)
    problem = config, TIMELINE_HEADS, TIMELINE_SEQLEN, TIMELINE_SEQLEN, True
    timelines = {}
    for (rung, label), costs in zip(TIMELINE_RUNGS.items(), (head_costs, tile_costs), strict=True):
        slots = blocks_per_multiprocessor(
            REGISTERS[rung],
            config.sliced_k_shared_bytes,
            config.num_threads,
            H200_COMPUTE_CAPABILITY,
        ).blocks
        timelines[label] = schedule(
            costs(*problem), H200_MULTIPROCESSORS, slots, unit="key tiles visited"
        )
    title = (
        f"A model: {TIMELINE_HEADS} causal heads of {TIMELINE_SEQLEN:,} tokens, "
        f"{config.block_m} x {config.block_n} tiles, on the {H200_MULTIPROCESSORS} "
        "multiprocessors of an H200\nBlocks that share a multiprocessor slow each other; the "
        "model leaves that out."
    )
    numbers = {label: timeline_numbers(timeline) for label, timeline in timelines.items()}
    return draw_timeline(timelines, title), numbers


def hbm_curve() -> tuple[Figure, dict[str, object]]:
    """HBM traffic of a head against the memory that its Q, K and V tiles take on chip.

    FlashAttention's theorem says N^2 d^2 / M, a slope of -1 on logarithmic axes.
    """
    problem = Problem(1, 1, 1, CURVE_SEQLEN, CURVE_SEQLEN, CURVE_HEAD_DIM)
    configs = [TileConfig(CURVE_HEAD_DIM, tile, tile, CURVE_WARPS) for tile in CURVE_TILES]
    memory = [config.split_q_shared_bytes for config in configs]
    traffic = {
        label: [_hbm_bytes(rung, problem, config) for config in configs]
        for label, rung in (
            ("standard: flattens at the traffic of S and P", "standard"),
            ("FlashAttention-1: Q, O, m and l travel for every key tile", "fa1_sliced_k"),
            ("FlashAttention-2: K and V travel for every query tile", "fa2_split_q"),
        )
    }
    # The theorem counts elements, also those of M.
    elements = [size / problem.itemsize for size in memory]
    bound = [problem.itemsize * (CURVE_SEQLEN * CURVE_HEAD_DIM) ** 2 / size for size in elements]
    traffic["N² d² / M elements: a slope of -1"] = bound
    kib = [size / 1024 for size in memory]
    curves = {label: (kib, [size / 2**20 for size in sizes]) for label, sizes in traffic.items()}
    title = (
        f"One head of {CURVE_SEQLEN:,} tokens, no mask, head dim {CURVE_HEAD_DIM}, float32; "
        f"{CURVE_TILES[0]} to {CURVE_TILES[-1]}: rows of the square tiles\n"
        "(closed forms, equal to the simulator's counts wherever tests compare the two)"
    )
    labels = "M, memory of the Q, K and V tiles (KiB)", "HBM read and written (MiB)"
    figure = draw_curves(curves, title, *labels, points=[str(tile) for tile in CURVE_TILES])
    return figure, {name: list(xy) for name, xy in curves.items()}


def mma_fragments() -> tuple[Figure, dict[str, object]]:
    """Which lane holds which elements of the matrices of a tensor-core instruction."""
    fragments = fragments_of_mma()
    sizes = {"C": "16 x 8, float32", "A": "16 x 16, 16 bits", "B": "16 x 8, 16 bits"}
    title = (
        "What the 32 lanes of a warp hold in mma.m16n8k16, C += A B\n"
        "Cell: two neighbouring elements and their lane. Colour: four lanes that share a row "
        "(B: a column).\nFrame: one register of every lane (C: two), named as in kernels' arrays."
    )
    labelled = {f"{name} ({sizes[name]})": held for name, held in fragments.items()}
    numbers = {
        name: [[h.lane, h.register, list(map(list, h.cells))] for h in held]
        for name, held in fragments.items()
    }
    return draw_fragments(labelled, ("+=", "x", ""), title), numbers


def split_q() -> tuple[Figure, dict[str, object]]:
    """Which warp holds what in sliced-K and in split-Q, and what a tile costs in each."""
    picture = split_q_contrast()
    return picture.figure, dict(picture.numbers)


def real_heads() -> tuple[Figure, dict[str, object]]:
    """What heads of a language model attend to, from the LSE of `fa2_split_q`."""
    first, middle = (run_layer(layer, HEADS_SEQLEN) for layer in (0, 15))
    maps = {
        "layer 15, head 6: a sink": (middle, 6),
        "layer 15, head 2: near, and a sink": (middle, 2),
        "layer 0, head 3: near": (first, 3),
    }
    picture = draw_maps(maps, HEADS_SEQLEN)
    return picture.figure, dict(picture.numbers)


def _hbm_bytes(rung: str, problem: Problem, config: TileConfig) -> int:
    counts = predict(rung, problem, config)
    return counts.global_load_bytes + counts.global_store_bytes


FIGURES: dict[str, Callable[[], tuple[Figure, dict[str, object]]]] = {
    "hbm_curve": hbm_curve,
    "mma_fragments": mma_fragments,
    "real_heads": real_heads,
    "sm_timeline": sm_timeline,
    "split_q": split_q,
}
"""Figure name = file name -> function that draws it and gives the numbers it shows."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figures that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m fa2_numba.lessons.draw", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    options = parser.parse_args(arguments)
    for name in options.figures:
        if name not in FIGURES:
            parser.error(f"figure {name!r}: must be one of {', '.join(FIGURES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.figures or FIGURES:
        figure, numbers = FIGURES[name]()
        path = options.folder / f"{name}.svg"
        save_svg(figure, path, numbers)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
