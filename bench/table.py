"""`python -m bench table`: write the README's tables of times from the recorded results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import backward_summary, forward_summary
from bench.plot import DTYPE, FOLDER, LADDER_SHAPE
from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.ladder_table import markdown_row

PAGE = Path(__file__).parents[1] / "README.md"
MARKERS = "<!-- whole ladder: begin -->", "<!-- whole ladder: end -->"
COLUMNS = (
    "forward, float16",
    "TFLOP/s",
    "over `standard`",
    "of torch's FlashAttention-2",
    "of cuDNN",
)
"""The last column is the share of a large matrix product, whose rate its head names."""


def ladder_table(result: dict) -> str:
    """Every rung on one shape without a mask: its speed, and ratios within the run."""
    chosen = [r for r in result["records"] if r["shape"] == LADDER_SHAPE and not r["causal"]]
    speeds = {r["name"]: r["tflops"] for r in chosen}
    peak = result["matmul_tflops"][DTYPE]
    head = (*COLUMNS, f"of a matrix product ({peak:.0f} TFLOP/s)")
    rows = [head, ("---", *["--:"] * (len(head) - 1))]
    for name in RUNGS:
        speed = speeds[name]
        ratios = [speed / speeds[other] for other in ("standard", "torch_flash", "torch_cudnn")]
        cells = f"{speed:.3g}", *(f"{ratio:.3g}" for ratio in ratios), f"{speed / peak:.1%}"
        rows.append((f"`{name}`", *cells))
    return "\n".join(map(markdown_row, rows))


WRITERS = {
    "whole_ladder": partial(forward_summary.write_table, table_of=ladder_table, markers=MARKERS),
    "forward": forward_summary.write_table,
    "backward": backward_summary.write_table,
}
"""File of results -> what writes its table between its markers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables; 2 if a file is missing, cannot be read, or has no place for one."""
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    option = parser.add_argument
    option("page", type=Path, nargs="?", default=PAGE, help="default: the README")
    option("--folder", type=Path, default=FOLDER, help="of the results; default: the H200's")
    options = parser.parse_args(argv)
    for name, write in WRITERS.items():
        file = options.folder / f"{name}.json"
        try:
            write(file, options.page)
        except (OSError, KeyError, TypeError, ValueError) as error:
            print(f"error: {file} into {options.page}: {error}", file=sys.stderr)
            return 2
        print(f"{options.page}: {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
