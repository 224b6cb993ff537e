"""The microscope as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.simulator.engine import with_warps
from fa2_numba.simulator.stepper.state import BEFORE, Group, SourceLine

if TYPE_CHECKING:
    from fa2_numba.simulator.stepper.stepper import Stepper


def render(stepper: Stepper) -> str:
    """What happened, where the threads stand, who waits for what, what is in shared memory."""
    parts = [
        [heading(stepper)],
        _source(stepper.source()),
        [f"{who(threads)}: {what}" for threads, what in together(stepper.waiting())],
        [array_text(name, array) for name, array in stepper.shared().items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def heading(stepper: Stepper) -> str:
    """Kernel and event."""
    return f"{stepper.kernel}: {stepper.event}"


def _source(lines: list[SourceLine]) -> list[str]:
    return [
        f"{label}{line.text}" + (f"  <- {who(list(line.threads))}" if line.threads else "")
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


def who(threads: list[int]) -> str:
    """`threads 0-39 (warps 0-1)`, `thread 3 (warp 0)`."""
    text = with_warps(threads)
    return text if len(threads) > 1 else text.replace("threads", "thread", 1)


def together(groups: list[Group]) -> list[tuple[list[int], str]]:
    """The threads of all warps that do the same: their numbers, and what they do where."""
    threads: dict[str, list[int]] = {}
    for group in groups:
        where = f"{' ' if group.state == BEFORE else ' at '}{group.line}" if group.line else ""
        threads.setdefault(group.state + where, []).extend(group.threads)
    return [(numbers, what) for what, numbers in threads.items()]


def array_text(name: str, array: np.ma.MaskedArray) -> str:
    """Shape, dtype, how much is written, smallest and largest number, how many are none."""
    written = array.compressed().astype(np.float64)
    numbers = written[np.isfinite(written)]
    counts = {"NaN": np.isnan(written).sum(), "infinite": np.isinf(written).sum()}
    return ", ".join(
        [f"{name} {array.shape} {array.dtype}, {written.size / max(array.size, 1):.0%} written"]
        + ([f"{numbers.min():.4g} to {numbers.max():.4g}"] if numbers.size else [])
        + [f"{count} {kind}" for kind, count in counts.items() if count]
    )
