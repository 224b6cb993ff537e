"""`python -m fa2_numba.lessons.draw`: write the figures that the documentation shows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa2_numba.config import TileConfig
from fa2_numba.lessons.figures import draw_curves, draw_timeline, save_svg, timeline_numbers
from fa2_numba.lessons.occupancy import blocks_per_multiprocessor
from fa2_numba.lessons.timeline import head_costs, schedule, tile_costs
from fa2_numba.problem import Problem
from fa2_numba.traffic import predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("docs/figures")

H200_MULTIPROCESSORS = 132
H200_COMPUTE_CAPABILITY = (9, 0)

FEWER_FLOPS_REGISTERS, SEQ_PARALLEL_REGISTERS = 254, 226
"""Registers a thread that ptxas reports for sm_90a, of `fa2_fewer_flops` and `fa2_seq_parallel`,
causal, in 64 x 64 tiles of head dim 64 (CUDA 13.5)."""

CURVE_SEQLEN, CURVE_HEAD_DIM = 4096, 64
CURVE_TILES = (8, 16, 32, 64, 128)
CURVE_WARPS = 2
"""Few enough for tiles of 8 rows; HBM traffic does not depend on it."""


def sm_timeline() -> tuple[Figure, dict[str, object]]:
    """16 causal heads of 8192 tokens on an H200: one block a head against one a query tile.

    The two rungs differ in their grids and in little else, see `python -m fa2_numba diff`.
    """
    config, heads, seqlen = TileConfig(64, 64, 64), 16, 8192
    problem = config, heads, seqlen, seqlen, True
    slots = [
        blocks_per_multiprocessor(
            registers, config.sliced_k_shared_bytes, config.num_threads, H200_COMPUTE_CAPABILITY
        ).blocks
        for registers in (FEWER_FLOPS_REGISTERS, SEQ_PARALLEL_REGISTERS)
    ]
    costs = {
        "fa2_fewer_flops: a block a head": head_costs(*problem),
        "fa2_seq_parallel: a block a query tile": tile_costs(*problem),
    }
    timelines = {
        name: schedule(cost, H200_MULTIPROCESSORS, places, unit="tile pairs of a block")
        for (name, cost), places in zip(costs.items(), slots, strict=True)
    }
    title = (
        f"{heads} causal heads of {seqlen:,} tokens, {config.block_m} x {config.block_n} tiles, "
        f"on the {H200_MULTIPROCESSORS} multiprocessors of an H200\n"
        "(a model: blocks on one multiprocessor do not slow each other)"
    )
    numbers = {name: timeline_numbers(timeline) for name, timeline in timelines.items()}
    return draw_timeline(timelines, title), numbers


def hbm_curve() -> tuple[Figure, dict[str, object]]:
    """HBM traffic of a head against the memory that its Q, K and V tiles take on chip.

    FlashAttention's theorem says N^2 d^2 / M, a slope of -1 on logarithmic axes.
    """
    problem = Problem(1, 1, 1, CURVE_SEQLEN, CURVE_SEQLEN, CURVE_HEAD_DIM)
    configs = [TileConfig(CURVE_HEAD_DIM, tile, tile, CURVE_WARPS) for tile in CURVE_TILES]
    memory = [config.split_q_shared_bytes for config in configs]
    curves = {
        label: (memory, [_hbm_bytes(rung, problem, config) for config in configs])
        for label, rung in (
            ("standard: flattens at the traffic of S and P", "standard"),
            ("FlashAttention-1: Q, O, m and l travel for every key tile", "fa1_sliced_k"),
            ("FlashAttention-2: K and V travel for every query tile", "fa2_split_q"),
        )
    }
    # The theorem counts elements, also those of M.
    elements = [size / problem.itemsize for size in memory]
    bound = [problem.itemsize * (CURVE_SEQLEN * CURVE_HEAD_DIM) ** 2 / size for size in elements]
    curves["N² d² / M elements: a slope of -1"] = memory, bound
    title = (
        f"One head of {CURVE_SEQLEN:,} tokens, head dim {CURVE_HEAD_DIM}, float32, square tiles "
        f"of {CURVE_TILES[0]} to {CURVE_TILES[-1]} rows\n"
        "(closed forms, equal to the simulator's counts wherever tests compare the two)"
    )
    labels = "memory of the Q, K and V tiles, M (bytes)", "HBM read and written (bytes)"
    return draw_curves(curves, title, *labels), {name: list(xy) for name, xy in curves.items()}


def _hbm_bytes(rung: str, problem: Problem, config: TileConfig) -> int:
    counts = predict(rung, problem, config)
    return counts.global_load_bytes + counts.global_store_bytes


FIGURES: dict[str, Callable[[], tuple[Figure, dict[str, object]]]] = {
    "hbm_curve": hbm_curve,
    "sm_timeline": sm_timeline,
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
