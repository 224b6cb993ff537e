"""`python -m fa2_numba.lessons.ladder_table`: what the CUDA-core rungs do on one problem, a table.

The numbers are the simulator's. `--write README.md` puts the table between the two markers there;
a test compares each of its rows with a fresh measurement.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fa2_numba.interface import flash_attn_func
from fa2_numba.ladder import RUNGS, cuda_core_rungs
from fa2_numba.rung_diff import diff_rungs
from fa2_numba.simulator import Report, Simulator
from fa2_numba.testing import random_qkv

SEQLEN, HEAD_DIM = 192, 32

PROBLEM = (
    f"One causal head of {SEQLEN} tokens, head dim {HEAD_DIM}, float32, tiles of 64 x 64, counted "
    "by the\nsimulator; HBM and shared memory read and written; no bank conflicts:"
)
BEGIN, END = "<!-- ladder numbers: begin -->", "<!-- ladder numbers: end -->"

COLUMNS = (
    "rung",
    "what it changed",
    "changed lines",
    "blocks",
    "HBM KiB",
    "shared KiB",
    "barriers",
    "shuffles",
    "matmul FLOPs",
    "other FLOPs",
    "special calls",
)
NUMBERS_FROM = COLUMNS.index("changed lines")
"""Columns from this one on hold numbers, which are aligned to the right."""


def measure_rung(rung: str) -> Report:
    """Run one rung on the problem in the simulator, and count."""
    q, k, v = random_qkv(1, SEQLEN, SEQLEN, 1, 1, HEAD_DIM, np.float32)
    simulator = Simulator(checks=False, progress=False)
    _, report = flash_attn_func(q, k, v, causal=True, rung=rung, machine=simulator, report=True)
    return report


def measure_ladder() -> dict[str, Report]:
    """Run every CUDA-core rung on the problem: about half a minute."""
    rungs = tqdm(cuda_core_rungs(), unit="rung", disable=None)
    reports = {}
    for rung in rungs:
        rungs.set_description(rung)
        reports[rung] = measure_rung(rung)
    return reports


def table_row(report: Report) -> str:
    """The row of the rung that the report is named after."""
    idea = RUNGS[report.name].idea
    hbm = report.global_load_bytes + report.global_store_bytes
    shared = report.shared_load_bytes + report.shared_store_bytes
    cells = (
        f"`{report.name}`",
        re.split("[;:]", idea)[0],
        _changed_lines(report.name),
        f"{len(report.blocks):,}",
        *(f"{size / 1024:,.1f}" for size in (hbm, shared)),
        *(f"{count:,}" for count in (report.barriers, report.shuffles)),
        *(f"{count:,}" for count in (report.matmul_flops, report.other_flops)),
        f"{report.special_calls:,}",
    )
    return markdown_row(cells)


def markdown_table(reports: Mapping[str, Report]) -> str:
    """The problem and the table, one row a report."""
    rule = ["---" if i < NUMBERS_FROM else "--:" for i in range(len(COLUMNS))]
    rows = [markdown_row(COLUMNS), f"|{'|'.join(rule)}|", *map(table_row, reports.values())]
    return "\n".join((PROBLEM, "", *rows))


def replace_between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with the table between its markers; ValueError unless both stand there once."""
    parts = re.fullmatch(f"(.*{begin}\n).*({end}.*)", text, flags=re.DOTALL)
    if parts is None or text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"must hold a line {begin} and after it a line {end}, each once")
    return f"{parts[1]}{table}\n{parts[2]}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees the old text or the new one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table or write it into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba.lessons.ladder_table", description=main.__doc__
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help=f"replace what stands after {BEGIN}"
    )
    options = parser.parse_args(arguments)
    if options.write is None:
        print(markdown_table(measure_ladder()))
        return
    try:
        # Markers are looked for before half a minute is spent.
        replace_between_markers(options.write.read_text(encoding="utf-8"), "")
    except (OSError, ValueError) as error:
        parser.error(f"--write {options.write}: {error}")
    table = markdown_table(measure_ladder())
    # Read once more: the file may have been edited while the rungs ran.
    text = replace_between_markers(options.write.read_text(encoding="utf-8"), table)
    write_whole(options.write, text)


def _changed_lines(rung: str) -> str:
    """How many lines of code differ from the rung below; the lowest one has none below."""
    rungs = list(RUNGS)
    below = rungs.index(rung) - 1
    return str(diff_rungs(rungs[below], rung).changed) if below >= 0 else ""


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
