"""`python -m bench table`: write the README's tables of times from the recorded run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import backward_summary, forward_summary
from bench.contestants import OURS
from bench.plot import DTYPE, FOLDER, on_ladder_shape
from bench.problems import BACKWARD, DECODE, FEW_HEADS, FORWARD, GROUPED
from bench.records import part
from bench.summary import problem_of
from fa2_numba.ladder import RUNGS
from fa2_numba.lessons.ladder_table import markdown_row, replace_between_markers, write_whole

PAGE = Path(__file__).parents[1] / "README.md"
LADDER_COLUMNS = (
    "forward, float16",
    "TFLOP/s",
    "over `standard`",
    "of torch's FlashAttention-2",
    "of cuDNN",
)
"""The last column is the share of a large matrix product, whose rate its head names."""
OTHER_COLUMNS = (
    "problem",
    f"`{OURS}` ms",
    "of torch's FlashAttention-2",
    "of cuDNN",
    "of torch's plain formula",
)
OTHER_PEERS = ("torch_flash", "torch_cudnn", "torch_math")
OTHER_PARTS = (
    (FEW_HEADS, FORWARD),
    (FEW_HEADS, BACKWARD),
    (GROUPED, FORWARD),
    (GROUPED, BACKWARD),
    (DECODE, FORWARD),
)


def ladder_table(result: dict) -> str:
    """Every rung on one shape without a mask: its speed, and ratios within the run."""
    speeds = {r["name"]: r["tflops"] for r in on_ladder_shape(result) if not r["causal"]}
    peak = result["matmul_tflops"][DTYPE]
    head = (*LADDER_COLUMNS, f"of a matrix product ({peak:.0f} TFLOP/s)")
    rows = [head, ("---", *["--:"] * (len(head) - 1))]
    for name in [name for name in RUNGS if name in speeds]:  # a file may be older than a rung
        speed = speeds[name]
        ratios = [speed / speeds[other] for other in ("standard", "torch_flash", "torch_cudnn")]
        cells = f"{speed:.3g}", *(f"{ratio:.3g}" for ratio in ratios), f"{speed / peak:.1%}"
        rows.append((f"`{name}`", *cells))
    return "\n".join(map(markdown_row, rows))


def other_table(result: dict) -> str:
    """The shapes outside the paper's grid: few heads, decoding, shared heads of K and V."""
    rows = [OTHER_COLUMNS, ("---", *["--:"] * (len(OTHER_COLUMNS) - 1))]
    for group, direction in OTHER_PARTS:
        records = part(result, direction, group)["records"]
        ms = {(r["name"], problem_of(r)): r["ms"] for r in records}
        for problem in [problem_of(r) for r in records if r["name"] == OURS]:
            ours = ms[OURS, problem]
            ratios = [ms.get((other, problem), None) for other in OTHER_PEERS]
            shown = ("" if peer is None else f"{peer / ours:.2f}" for peer in ratios)
            rows.append((problem, f"{ours:.3g}", *shown))
    return "\n".join(map(markdown_row, rows))


TABLES = {
    "whole ladder": ladder_table,
    "tensor-core times": lambda result: forward_summary.markdown_table(part(result, FORWARD)),
    "backward times": lambda result: backward_summary.markdown_table(part(result, BACKWARD)),
    "other shapes": other_table,
}
"""What stands in a table's markers -> the table of a run."""


def write_table(name: str, result: dict, page: Path) -> None:
    """Put one table between its markers of a page; ValueError where it has none."""
    markers = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    write_whole(page, replace_between_markers(text, TABLES[name](result), *markers))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables; 2 if a file is missing, cannot be read, or has no place for one."""
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    option = parser.add_argument
    option("page", type=Path, nargs="?", default=PAGE, help="default: the README")
    option("--folder", type=Path, default=FOLDER, help="of the results; default: the H200's")
    options = parser.parse_args(argv)
    file = options.folder / "run.json"
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        for name in TABLES:
            write_table(name, result, options.page)
            print(f"{options.page}: {name}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"error: {file} into {options.page}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
