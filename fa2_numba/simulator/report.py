"""What a simulated launch did, in numbers: in total, per block and per source line."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, fields
from functools import cached_property

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

TEXT_WIDTH = 100
NUMBER_WIDTH = 13
NUMBERS_WIDTH = 62
"""What the columns of numbers take beside a source line."""


class _Sum:
    """Numbers that add up, field by field."""

    def __add__(self, other: object) -> object:
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: int) -> object:
        return type(self)(*(times * getattr(self, field.name) for field in fields(self)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Traffic(_Sum):
    """Loads and stores. A request is one instruction of a warp, for up to 32 lanes at once.

    global_load_requests, global_store_requests, shared_load_requests, shared_store_requests:
        requests, by where and what.
    global_load_bytes, ..., shared_store_bytes: what the lanes asked for, the element size for each.
    global_load_sectors, global_store_sectors: 32-byte pieces of HBM that the requests touch; as
        many as bytes / 32 where neighbouring lanes read neighbouring addresses (coalesced).
    shared_load_replays, shared_store_replays: bank conflicts, times that a request was repeated.
    """

    global_load_requests: int = 0
    global_load_bytes: int = 0
    global_load_sectors: int = 0
    global_store_requests: int = 0
    global_store_bytes: int = 0
    global_store_sectors: int = 0
    shared_load_requests: int = 0
    shared_load_bytes: int = 0
    shared_load_replays: int = 0
    shared_store_requests: int = 0
    shared_store_bytes: int = 0
    shared_store_replays: int = 0

    @property
    def bank_conflicts(self) -> int:
        """Replays of requests to shared memory."""
        return self.shared_load_replays + self.shared_store_replays


@dataclass(frozen=True)
class Counts(Traffic):
    """All that is counted.

    barriers: `syncthreads`, once for a block. warp_syncs, shuffles, votes: once for a warp; so are
        tensor_core_instructions (`mma`), matrix_loads (`ldmatrix`), matrix_stores (`stmatrix`) and
        async_copies (`cp.async`). A `wgmma` is one instruction of four warps, a copy by TMA one of
        one thread; what they move is one request each.
    named_barriers: times that a numbered barrier opened. mbarrier_phases: phases completed.
    atomics: atomic updates, once for a thread, which are no loads or stores here.
    special_calls: exp, log, sqrt and the like of float32, once for a thread; so are the following.
    multiply_adds: steps `acc += a * b` of matrix products, each two float32 operations; those of
        tensor-core instructions too.
    additions, multiplications, divisions, maxima: all other float32 operations.

    Constants that a kernel captures (global NumPy arrays) and local arrays are no memory traffic.
    """

    barriers: int = 0
    warp_syncs: int = 0
    shuffles: int = 0
    votes: int = 0
    atomics: int = 0
    tensor_core_instructions: int = 0
    matrix_loads: int = 0
    matrix_stores: int = 0
    async_copies: int = 0
    named_barriers: int = 0
    mbarrier_phases: int = 0
    special_calls: int = 0
    multiply_adds: int = 0
    additions: int = 0
    multiplications: int = 0
    divisions: int = 0
    maxima: int = 0

    @property
    def matmul_flops(self) -> int:
        """float32 operations of matrix products."""
        return 2 * self.multiply_adds

    @property
    def other_flops(self) -> int:
        """All other float32 operations; special functions are counted apart."""
        return self.additions + self.multiplications + self.divisions + self.maxima


TENSOR_CORE = (
    "tensor_core_instructions",
    "matrix_loads",
    "matrix_stores",
    "async_copies",
    "named_barriers",
    "mbarrier_phases",
)
"""What is shown only of kernels that do it."""

SUMMARY = (
    "global_load_bytes",
    "global_load_sectors",
    "global_store_bytes",
    "global_store_sectors",
    "shared_load_bytes",
    "shared_store_bytes",
    "bank_conflicts",
    "barriers",
    "shuffles",
    "atomics",
    *TENSOR_CORE,
    "special_calls",
    "matmul_flops",
    "other_flops",
)
"""The numbers that tell most, in the order they are shown."""

DETAILS = tuple(field.name for field in fields(Counts))

ARITHMETIC = (
    "matmul_flops",
    "other_flops",
    "multiply_adds",
    "additions",
    "multiplications",
    "divisions",
)
"""What is counted from the source alone."""


@dataclass(frozen=True)
class BlockCounts:
    """One thread block: the kernel's name, the block's index (x, y, z), its counts."""

    kernel: str
    index: tuple[int, int, int]
    counts: Counts


@dataclass(frozen=True)
class LineTraffic:
    """Memory traffic of one line of a kernel, with that of the device functions it calls."""

    kernel: str
    file: str
    line: int
    traffic: Traffic

    @property
    def text(self) -> str:
        """The source line."""
        return linecache.getline(self.file, self.line).strip()


class _Shown(JupyterMixin):
    """Renders in a notebook, and as plain text wherever it is printed."""

    def __str__(self) -> str:
        console = Console(width=TEXT_WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Report(_Shown):
    """What one launch did, or several: `a + b`, `sum(reports)`.

    Every field and property of `Counts` is an attribute, the total of all blocks:
    `report.global_load_bytes`. `blocks` and `lines` hold the parts.

    uncounted: why the arithmetic could not be counted, if so; asking for it is a ValueError then
        (in `total`, `blocks` and `lines` it stands as 0), and loops could not be followed: accesses
        of lanes that do not all go through an iteration may be taken for one request.
    """

    name: str
    blocks: tuple[BlockCounts, ...] = ()
    lines: tuple[LineTraffic, ...] = ()
    uncounted: str = ""

    @cached_property
    def total(self) -> Counts:
        """The sum over the blocks."""
        return sum((block.counts for block in self.blocks), Counts())

    @property
    def counted(self) -> tuple[str, ...]:
        """The names of SUMMARY that this report knows."""
        return tuple(name for name in SUMMARY if not (self.uncounted and name in ARITHMETIC))

    def __getattr__(self, name: str) -> int:
        if name in ARITHMETIC and self.uncounted:
            raise ValueError(f"{name}: not counted; {self.uncounted}")
        if name in DETAILS or name in SUMMARY:
            return getattr(self.total, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *DETAILS, *SUMMARY})

    def __add__(self, other: Report) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        lines: dict[tuple[str, str, int], LineTraffic] = {}
        for one in self.lines + other.lines:
            key = (one.kernel, one.file, one.line)
            traffic = lines[key].traffic + one.traffic if key in lines else one.traffic
            lines[key] = LineTraffic(*key, traffic)
        name = self.name if self.name == other.name else f"{self.name} + {other.name}"
        uncounted = self.uncounted or other.uncounted
        return Report(name, self.blocks + other.blocks, tuple(lines.values()), uncounted)

    def __radd__(self, other: object) -> Report:
        """`sum` starts with 0."""
        return self if other == 0 else NotImplemented

    def compare(self, other: Report) -> Comparison:
        """This report beside another one, with ratios."""
        return Comparison(self, other)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = len(self.blocks)
        yield Text(f"{self.name}: {blocks} block{'s' * (blocks != 1)}")
        yield self._totals(max(blocks, 1))
        if self.uncounted:
            yield Text(f"Arithmetic is not counted: {self.uncounted}")
        text_width = max(options.max_width - NUMBERS_WIDTH, NUMBERS_WIDTH)
        for kernel in dict.fromkeys(line.kernel for line in self.lines):
            yield Text(f"Bytes by source line of {kernel}")
            yield self._by_line(kernel, text_width)

    def _totals(self, blocks: int) -> Table:
        table = _table("", "total", "per block")
        for name in _rows(self):
            value = getattr(self, name)
            table.add_row(name, f"{value:,}", f"{value / blocks:,.1f}".removesuffix(".0"))
        return table

    def _by_line(self, kernel: str, text_width: int) -> Table:
        table = _table("line", "global", "shared", "conflicts")
        table.add_column("source", no_wrap=True, overflow="ellipsis", max_width=text_width)
        for line in self.lines:
            if line.kernel != kernel:
                continue
            traffic = line.traffic
            table.add_row(
                str(line.line),
                f"{traffic.global_load_bytes + traffic.global_store_bytes:,}",
                f"{traffic.shared_load_bytes + traffic.shared_store_bytes:,}",
                f"{traffic.bank_conflicts:,}",
                Text(line.text),
            )
        return table


@dataclass(frozen=True, repr=False)
class Comparison(_Shown):
    """Two reports side by side; `ratios[name]` is the second over the first."""

    first: Report
    second: Report

    @property
    def ratios(self) -> dict[str, float]:
        """Second over first by name; nan for 0 over 0, inf for something over 0."""
        return {
            name: _ratio(getattr(self.first, name), getattr(self.second, name))
            for name in self.first.counted
            if name in self.second.counted
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = _table("", self.first.name, self.second.name, "ratio")
        for name in _rows(self.first, self.second):
            ratio = self.ratios[name]
            first, second = getattr(self.first, name), getattr(self.second, name)
            shown = "" if ratio != ratio else f"{ratio:.3g}"
            table.add_row(name, f"{first:,}", f"{second:,}", shown)
        yield table


def _rows(*reports: Report) -> list[str]:
    """The names of SUMMARY to show: those that all reports know."""
    return [
        name
        for name in SUMMARY
        if all(name in report.counted for report in reports)
        and not (name in TENSOR_CORE and all(getattr(report, name) == 0 for report in reports))
    ]


def _ratio(first: int, second: int) -> float:
    if first:
        return second / first
    return float("inf") if second else float("nan")


def _table(*names: str) -> Table:
    """A column of names, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(names):
        justify = "right" if number else "left"
        table.add_column(Text(name), justify=justify, min_width=NUMBER_WIDTH if number else None)
    return table
