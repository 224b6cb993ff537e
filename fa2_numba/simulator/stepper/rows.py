"""The rows of a query tile, gathered from the threads that hold their parts.

How a kernel shares a tile among its threads is told by the names in its own frame, the ladder's:
split-Q kernels have OUT_COLS there, kernels whose warps slice K have OWN_ROWS.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from fa2_numba.simulator.source import ranges
from fa2_numba.simulator.stepper.state import View, shown
from fa2_numba.simulator.stepper.tracing import kernel_frames

LANE_NAMES = {"row", "LANE_ROWS", "LANE_COLS", "m_reg", "l_reg", "O_reg"}
SPLIT_Q_NAMES = LANE_NAMES | {"col", "OUT_COLS"}
SLICED_K_NAMES = LANE_NAMES | {"lane_col", "OWN_ROWS", "OWN_COLS", "BLOCK_M", "HEAD_DIM"}
EXCHANGE_INDEX = "first_d"

Names = dict[str, object]


class RowError(ValueError):
    """The threads, where they stand now, do not hold such a row."""


@dataclass(frozen=True)
class Row:
    """A row of a query tile: its maximum m, its sum l, its output O (not divided by l yet).

    threads: the numbers of those that hold a part of it. agree: whether those that hold the same
    number hold the same value, as they do unless some are in the middle of an update: m, and l in
    a split-Q kernel. Where warps slice K, l is the sum of their parts.
    """

    row: int
    m: np.floating
    l: np.floating
    O: np.ndarray
    threads: tuple[int, ...]
    agree: bool


def row_gatherer(kernel: Callable) -> Callable[[View, int], Row] | None:
    """What gathers rows from the threads of this kernel; None if its frame lacks the names."""
    code = kernel.__code__
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if names >= SPLIT_Q_NAMES:
        return split_q_row
    return sliced_k_row if names >= SLICED_K_NAMES else None


def gathered_row(view: View, number: int) -> Row:
    """Row `number` of the block's query tile."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"row {number!r}: must be an integer")
    gather = row_gatherer(view.block.function)
    if gather is None:
        raise RowError(
            f"row {number}: kernel {view.block.kernel} does not keep m, l and O in its threads "
            "under the ladder's names. row() needs in its own frame "
            f"{', '.join(sorted(SPLIT_Q_NAMES))}; or, where warps slice K, "
            f"{', '.join(sorted(SLICED_K_NAMES))}. What a kernel keeps in global memory is among "
            "its arguments, in locals()"
        )
    return gather(view, int(number))


def split_q_row(view: View, number: int) -> Row:
    """A row that the lanes of one warp hold: each m, l and every LANE_COLS-th column of O."""
    here = _threads_with(view, SPLIT_Q_NAMES)
    lanes = list(_lanes(here, number))
    if not lanes or len(lanes) < lanes[0][2]["LANE_COLS"]:
        raise _not_there(view, number, here)
    O = _empty_row(lanes[0][2]["LANE_COLS"] * lanes[0][2]["OUT_COLS"], here)
    for _, step, names in lanes:
        O[names["col"] :: names["LANE_COLS"]] = _elements(names["O_reg"])[step]
    m, l = (_over_lanes(lanes, name) for name in ("m_reg", "l_reg"))
    agree = bool((m == m[0]).all() and (l == l[0]).all())
    return Row(number, m[0], l[0], O, tuple(thread for thread, *_ in lanes), agree)


def sliced_k_row(view: View, number: int) -> Row:
    """A row that all warps have a part of.

    Every lane of the row holds m, those in column 0 their warp's part of l. O is held by the
    threads that sum it in the exchange, an element of every exchange each; see `locate_owned`.
    """
    here = _threads_with(view, SLICED_K_NAMES)
    lanes = list(_lanes(here, number))
    if not lanes or len(here) < len(view.block.threads):
        raise _not_there(view, number, here)
    owners = list(_owners(here, number))
    moving = [thread for thread, *_ in owners if _in_exchange(*_kernel_frame(view, thread)[:2])]
    if moving:
        raise RowError(
            f"row {number}: {_threads(moving)} of its owners are in the loop over "
            f"{EXCHANGE_INDEX}, where the columns of O_reg change places. Step out of the loop"
        )
    O = _empty_row(lanes[0][2]["HEAD_DIM"], here)
    for thread, step, names in owners:
        width = _exchange_cols(names)
        O[thread % width :: width] = _elements(names["O_reg"])[step]
    m = _over_lanes(lanes, "m_reg")
    parts = _over_lanes([lane for lane in lanes if lane[2]["lane_col"] == 0], "l_reg")
    threads = sorted({thread for thread, *_ in [*lanes, *owners]})
    # Added in the order of the warps, as the kernel does.
    return Row(number, m[0], sum(parts[1:], parts[0]), O, tuple(threads), bool((m == m[0]).all()))


def _threads_with(view: View, wanted: set[str]) -> dict[int, Names]:
    """Thread -> variables of the kernel's own frame, for those that have come to have them."""
    return {
        number: names
        for number in range(len(view.block.threads))
        if wanted <= (names := _kernel_frame(view, number)[2]).keys()
    }


def _kernel_frame(view: View, number: int) -> tuple[str, int, Names]:
    """File, line and variables of the kernel's own frame, not copied."""
    for frame in view.failed.get(number, [])[-1:]:
        return frame.file, frame.line, frame.variables
    for frame in list(kernel_frames(view.block.threads[number]))[-1:]:
        return frame.f_code.co_filename, frame.f_lineno, dict(frame.f_locals)
    return "", 0, {}


def _lanes(here: dict[int, Names], number: int) -> Iterator[tuple[int, int, Names]]:
    """The threads that hold m and l of a row, and which of their rows it is."""
    for thread, names in here.items():
        step, apart = divmod(number - names["row"], names["LANE_ROWS"])
        if apart == 0 and 0 <= step < len(names["m_reg"]):
            yield thread, step, names


def _owners(here: dict[int, Names], number: int) -> Iterator[tuple[int, int, Names]]:
    """The same for O where warps slice K."""
    for thread, names in here.items():
        apart = names["BLOCK_M"] // names["OWN_ROWS"]
        step, other = divmod(number - thread // _exchange_cols(names), apart)
        if other == 0 and 0 <= step < names["OWN_ROWS"]:
            yield thread, step, names


def _exchange_cols(names: Names) -> int:
    return names["HEAD_DIM"] // names["OWN_COLS"]


def _in_exchange(filename: str, line: int) -> bool:
    """Whether a line belongs to a loop over EXCHANGE_INDEX."""
    loops = (
        node
        for node in ast.walk(ast.parse("".join(linecache.getlines(filename))))
        if isinstance(node, ast.For) and getattr(node.target, "id", None) == EXCHANGE_INDEX
    )
    return any(loop.lineno <= line <= loop.end_lineno for loop in loops)


def _empty_row(size: int, here: dict[int, Names]) -> np.ndarray:
    return np.full(size, np.nan, next(iter(here.values()))["O_reg"].dtype)


def _elements(array: object) -> np.ndarray:
    """A local array; NaN where nothing was written."""
    return shown(array).data


def _over_lanes(lanes: Iterable[tuple[int, int, Names]], name: str) -> np.ndarray:
    return np.array([_elements(names[name])[step] for _, step, names in lanes])


def _not_there(view: View, number: int, here: dict[int, Names]) -> RowError:
    absent = [i for i in range(len(view.block.threads)) if i not in here]
    if not absent:
        return RowError(f"row {number}: the query tile of {view.block.kernel} has no such row")
    return RowError(
        f"row {number}: not all of it is there: {_threads(absent)} have no m_reg, l_reg or O_reg "
        "yet, or not any more"
    )


def _threads(numbers: list[int]) -> str:
    return f"thread{'s' * (len(numbers) > 1)} {ranges(numbers)}"
