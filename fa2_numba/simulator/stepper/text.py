"""The microscope as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.simulator.engine import with_warps
from fa2_numba.simulator.source import ranges
from fa2_numba.simulator.stepper.state import Group, SourceLine

if TYPE_CHECKING:
    from fa2_numba.simulator.stepper.stepper import Stepper


def render(stepper: Stepper, shared: dict[str, np.ma.MaskedArray]) -> str:
    """What happened, where the threads stand, who waits for what, what is in shared memory."""
    parts = [
        [heading(stepper)],
        _source(stepper.source()),
        [group_text(group) for group in stepper.waiting()],
        [array_text(name, array) for name, array in shared.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def heading(stepper: Stepper) -> str:
    """Kernel and event in one line."""
    return f"{stepper.kernel}: {stepper.event}"


def _source(lines: list[SourceLine]) -> list[str]:
    return [
        f"{label}{line.text}" + (f"  <- {with_warps(list(line.threads))}" if line.threads else "")
        for label, line in labelled(lines)
    ]


def labelled(lines: list[SourceLine]) -> Iterator[tuple[str, SourceLine]]:
    """Each line with what stands left of it: the file's name above, a mark, its number."""
    before = None
    for line in lines:
        new_file = before is None or before.file != line.file
        header = f"{Path(line.file).name}\n" if new_file else ""
        gap = "    ...\n" if not new_file and before.line + 1 < line.line else ""
        yield f"{header}{gap}{'>' if line.threads else ' '}{line.line:5}  ", line
        before = line


def group_text(group: Group) -> str:
    """`warp 0, threads 0-31: waiting for syncthreads at file.py:12: source text`."""
    threads = f"thread{'s' * (len(group.threads) > 1)} {ranges(list(group.threads))}"
    where = f" at {group.line}" if group.line else ""
    return f"warp {group.warp}, {threads}: {group.state}{where}"


def array_text(name: str, array: np.ma.MaskedArray) -> str:
    """Shape, dtype, how much is written, and the smallest and largest value."""
    written = array.compressed()
    text = f"{name} {array.shape} {array.dtype}, {len(written) / max(array.size, 1):.0%} written"
    numbers = written[~np.isnan(written.astype(np.float64))]
    return text + (f", {numbers.min():.4g} to {numbers.max():.4g}" if numbers.size else "")
