"""Where the chunks of a tile lie in the banks of shared memory, and which lanes read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.layouts import ac_element
from fa2_numba.lessons.draw import mma_fragments
from fa2_numba.lessons.figures.picture import Picture
from fa2_numba.lessons.figures.shapes import rectangles
from fa2_numba.lessons.figures.style import (
    BLACK,
    LANE_COLOURS,
    WIDTH_INCHES,
    matplotlib_module,
    new_figure,
    styled,
)
from fa2_numba.lessons.kernels.fragments import (
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    TILE_ROWS,
    WIDE,
    make_read_tile,
)
from fa2_numba.simulator import Report, simulate
from fa2_numba.simulator.addresses import Access
from fa2_numba.simulator.engine import Observer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES_AT_ONCE = 8
"""Lanes that shared memory serves together where each wants 16 bytes: a row of a matrix each."""
GROUP_BANKS = 4
"""Banks that a chunk takes."""
LINE_CHUNKS, LINE_BYTES = 8, 128
"""All banks once: a wide row of the tile, or two narrow ones."""
FADED = 0.25
GAP = 0.06


def new_tile(row_chunks: int = WIDE) -> tuple[np.ndarray, np.ndarray]:
    """What `make_read_tile` takes: words of elements that tell their places, and where to."""
    columns = CHUNK_ELEMENTS * row_chunks
    tile = np.arange(TILE_ROWS * columns, dtype=np.float16).reshape(TILE_ROWS, columns)
    return tile.view(np.uint32), np.zeros((row_chunks // 2, WARP_SIZE, 4), np.uint32)


def came_right(words: np.ndarray, out: np.ndarray) -> bool:
    """Whether every lane got the elements of A that `mma` wants it to have."""
    piece, lane, q, e = np.indices((*out.shape, 2))
    row, col = ac_element(lane, q % 2, 2 * (q // 2) + e)
    found = out.view(np.float16).reshape(row.shape)
    return bool((found == words.view(np.float16)[row, 16 * piece + col]).all())


def read_tile(
    place: Callable, row_chunks: int = WIDE, seed: int | None = None
) -> tuple[Report, bool]:
    """Run `make_read_tile`: the report, and whether all elements came where they belong."""
    words, out = new_tile(row_chunks)
    simulation = simulate(make_read_tile(place, row_chunks), seed=seed, progress=False)
    report = simulation[1, WARP_SIZE](words, out)
    return report, came_right(words, out)


@dataclass(frozen=True)
class Addresses:
    """Shared addresses of a run of `make_read_tile`, from the tile's first line of banks on.

    kept (rows, chunks of a row): where each chunk was stored. read (pieces, lanes): what each lane
    pointed the `ldmatrix` of each piece to.
    """

    kept: np.ndarray
    read: np.ndarray


def record_addresses(place: Callable, row_chunks: int = WIDE) -> Addresses:
    """Run `make_read_tile` and note what its lanes do in shared memory."""
    log = _SharedLog()
    simulation = simulate(make_read_tile(place, row_chunks), progress=False)
    launch = simulation[1, WARP_SIZE].prepare(*new_tile(row_chunks))
    for block in launch.blocks(log):
        block.run()
    # (lanes, passes): in each pass 32 lanes store 32 chunks, one behind the other.
    stored = np.array([log.addresses[lane, True] for lane in range(WARP_SIZE)])
    loaded = np.array([log.addresses[lane, False] for lane in range(WARP_SIZE)])
    start = stored.min() // LINE_BYTES * LINE_BYTES
    return Addresses(stored.T.reshape(TILE_ROWS, row_chunks) - start, loaded.T - start)


class _SharedLog(Observer):
    """(lane, stored) -> the shared addresses that a lane has used, in order."""

    def __init__(self) -> None:
        self.addresses: dict[tuple[int, bool], list[int]] = defaultdict(list)

    def address_used(self, access: Access, owner: object) -> None:
        """One lane's 16 bytes."""
        if access.space == "shared":
            self.addresses[getcurrent().lane, access.stored].append(access.address)


def draw_mma_fragments() -> Picture:
    """Which lane holds which elements of A, B and C of an `mma`."""
    figure, numbers = mma_fragments()
    alt = (
        "C += A B of mma.m16n8k16. Four lanes share a row of A (16 x 16) and of C (16 x 8), two "
        "neighbouring elements each; a lane has four such pairs of A, two of C. B (16 x 8) lies as "
        "A does, transposed: four lanes share a column."
    )
    return Picture(figure, alt, numbers)


def draw_banks(places: Mapping[str, Callable], chunk: int, row_chunks: int = WIDE) -> Picture:
    """Eight rows as banks hold them, for each name; framed: what eight lanes read at once.

    These lanes read `chunk` of rows 0 to 7. Places are addresses of a run that stored and read the
    whole tile, numbers of conflicts what another run of it counted.
    """
    if chunk not in range(row_chunks):
        raise ValueError(f"chunk={chunk!r}: must be 0 to {row_chunks - 1}")
    # An ldmatrix reads 16 rows of two chunks: lanes 0 to 7 and 16 to 23 have rows 0 to 7.
    piece, lanes = chunk // 2, np.arange(LANES_AT_ONCE) + 16 * (chunk % 2)
    who = f"Lanes {lanes[0]} to {lanes[-1]} read chunk {chunk} of rows 0 to 7"
    numbers = {}
    with styled():
        figure = new_figure((WIDTH_INCHES, 1.3 + 0.35 * row_chunks))
        panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
        for axes, (name, place) in zip(panels, places.items(), strict=True):
            addresses = record_addresses(place, row_chunks)
            read = addresses.read[piece, lanes]
            conflicts = read_tile(place, row_chunks)[0].bank_conflicts
            axes.set_title(f"{name}: {conflicts} bank conflicts in the whole tile")
            _draw_chunks(axes, addresses.kept[:LANES_AT_ONCE], read)
            _frame_reads(axes, read, lanes, row_chunks)
            _label_axes(axes, row_chunks)
            banks = {int(lane): int(bank) for lane, bank in zip(lanes, _bank(read), strict=True)}
            numbers[name] = {"conflicts": conflicts, "first_bank_of_lane": banks}
        panels[0].set_ylabel("row of the tile" if row_chunks == WIDE else "rows of the tile")
        figure.supxlabel(
            "banks; above them, how many of the 8 lanes want a word of each\n"
            f"Number and colour: the chunk that is kept there. Framed: {who.lower()}, all at once.",
            fontsize=10,
        )
    said = " ".join(
        f"{name}: they want {GROUP_BANKS * len(set(n['first_bank_of_lane'].values()))} banks, and "
        f"there are {n['conflicts']} conflicts in the whole tile."
        for name, n in numbers.items()
    )
    return Picture(figure, f"Chunks of 16 bytes in the 32 banks. {who}, at once. {said}", numbers)


def _bank(addresses: np.ndarray) -> np.ndarray:
    """The first of the four banks in which 16 bytes lie."""
    return addresses // CHUNK_BYTES % LINE_CHUNKS * GROUP_BANKS


def _cell(addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in the figure 16 bytes lie: group of banks, and line."""
    return _bank(addresses) // GROUP_BANKS, addresses // LINE_BYTES


def _draw_chunks(axes: Axes, kept: np.ndarray, read: np.ndarray) -> None:
    """kept: (rows, chunks) addresses of chunks; read: those that lanes read, which stand out."""
    for number, colour in zip(range(kept.shape[1]), LANE_COLOURS, strict=False):
        for is_read in (True, False):
            at = kept[np.isin(kept[:, number], read) == is_read, number]
            if not at.size:
                continue
            left, line = _cell(at)
            cells = rectangles(left + GAP, left + 1 - GAP, line + GAP, 1 - 2 * GAP, colour)
            cells.set_alpha(0.5 if is_read else FADED)
            axes.add_patch(cells)
            for x, y in zip(left, line, strict=True):
                up = 0.3 if is_read else 0.5
                axes.text(x + 0.5, y + up, number, ha="center", va="center", fontsize=9)


def _frame_reads(axes: Axes, read: np.ndarray, lanes: np.ndarray, lines: int) -> None:
    """Frames with lanes in them, and below all lines how many lanes want each group of banks."""
    rectangle = matplotlib_module("patches").Rectangle
    left, line = _cell(read)
    for lane, x, y in zip(lanes, left, line, strict=True):
        axes.text(x + 0.5, y + 0.7, f"lane {lane}", ha="center", va="center", fontsize=8)
        axes.add_patch(rectangle((x, y), 1, 1, fill=False, edgecolor=BLACK, linewidth=2))
    for x, times in enumerate(np.bincount(left, minlength=LINE_CHUNKS)):
        axes.text(x + 0.5, lines + 0.45, times, ha="center", va="center", fontsize=9)


def _label_axes(axes: Axes, row_chunks: int) -> None:
    lines, line_rows = row_chunks, LINE_CHUNKS // row_chunks
    axes.set(xlim=(-0.1, LINE_CHUNKS + 0.1), ylim=(lines + 0.8, -0.1))
    banks = [f"{GROUP_BANKS * g}-{GROUP_BANKS * g + GROUP_BANKS - 1}" for g in range(LINE_CHUNKS)]
    axes.set_xticks(np.arange(LINE_CHUNKS) + 0.5, banks, fontsize=8)
    rows = np.arange(lines * line_rows).reshape(lines, line_rows)
    names = [", ".join(map(str, line)) for line in rows]
    axes.set_yticks(np.arange(lines) + 0.5, names, fontsize=8)
    axes.tick_params(length=0)
