"""What is predicted of each counter of `bench.counters`, and what comes of comparing the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fa2_numba.config import TileConfig
from fa2_numba.constants import SECTOR_BYTES
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.traffic import predict

FAR_OFF = 0.1
"""A ratio further from 1 than this needs a reason."""

FEW_REPLAYS = 0.05
"""Where none is predicted, so many replays a request are the hardware's own."""

GENERIC = (
    "Where the compiler loses sight of the address space (views of shared memory from a row on) it "
    "loads and stores by generic instructions, which this counter leaves out; all_load_requests "
    "and all_store_requests have them."
)
L2_CACHE = (
    "Tiles of K and V that another block has just read come from the L2 cache. FlashAttention-1 "
    "reads each of them once, and what it reads again (Q, O, m, l of all heads) is more than the "
    "cache holds: there the ratio is 1."
)
REASONS: dict[str, str] = {
    "fa1_sliced_k.shared_load_requests": GENERIC,
    "fa2_fewer_flops.shared_load_requests": GENERIC,
    "fa2_seq_parallel.shared_load_requests": GENERIC,
    "fa2_fewer_flops.global_load_hbm_bytes": L2_CACHE,
    "fa2_seq_parallel.global_load_hbm_bytes": L2_CACHE,
    "fa2_split_q.global_load_hbm_bytes": L2_CACHE,
    "standard.global_load_hbm_bytes": (
        "Tiles of Q, K and V that another block has just read come from the L2 cache, and so does "
        "a part of S, which the second kernel reads three times."
    ),
    "standard.global_load_l2_bytes": (
        "The second kernel reads a row of S three times, the last two in part from the L1 cache."
    ),
    "standard.fp32_flops": (
        "P is divided element by element, and a division takes about ten operations; with these "
        "and those of exp the ratio is 1 (fp32_flops_with_special)."
    ),
}
"""Why a counter differs from its prediction: by "counter", or "rung.counter" for one rung alone."""

OPCODES = "sass__inst_executed_per_opcode"
THREAD_OPCODES = "sass__thread_inst_executed_true_per_opcode"
"""How often each instruction was executed, by warps and by the threads of them that took part."""

OF_LAUNCHES = {
    "gpu__time_duration.sum": ("ms", 1e-6),
    "launch__registers_per_thread": ("registers", 1),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("% of warps active", 1),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": (
        "warps at barriers per issue",
        1,
    ),
}
"""Metric -> what it is, and how many of that its unit is: shown of each launch."""

# Metric -> factor: a sum. "warp SHFL" and "thread MUFU" are counts of one instruction.
Formula = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One counter: its prediction, and the sum of metrics that measures it.

    predicted: of the counts of all launches and the warps of a block. allowed: how much of it there
    may be where none is predicted.
    """

    counter: str
    predicted: Callable[[Counts, int], float]
    formula: Formula
    allowed: Callable[[Counts], float] | None = None


def count(*fields: str, factor: int = 1) -> Callable[[Counts, int], float]:
    """A prediction: the sum of these fields."""
    return lambda counts, warps: factor * sum(getattr(counts, field) for field in fields)


def global_rows(what: str, op: str, direction: str) -> list[Row]:
    """Loads or stores of global memory, from what threads ask for to what reaches HBM."""
    asked = f"global_{what}"
    l1, l2 = f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}", "lts__t_sectors_srcunit_tex_op_"
    sector_bytes = count(f"{asked}_sectors", factor=SECTOR_BYTES)
    instructions = {f"smsp__sass_inst_executed_op_global_{op}.sum": 1}
    return [
        Row(f"{asked}_requests", count(f"{asked}_requests"), instructions),
        Row(f"{asked}_l1_bytes", sector_bytes, {f"{l1}.sum": SECTOR_BYTES}),
        Row(f"{asked}_l2_bytes", sector_bytes, {f"{l2}{direction}.sum": SECTOR_BYTES}),
        Row(f"{asked}_hbm_bytes", count(f"{asked}_bytes"), {f"dram__bytes_{direction}.sum": 1}),
    ]


def all_row(what: str, op: str) -> Row:
    """Loads or stores of global and shared memory together, however the compiler does them."""
    requests = count(f"global_{what}_requests", f"shared_{what}_requests")
    return Row(
        f"all_{what}_requests", requests, {f"warp {op}": 1, f"warp {op}S": 1, f"warp {op}G": 1}
    )


def shared_rows(what: str, op: str) -> list[Row]:
    """Loads or stores of shared memory.

    A wavefront is one turn of the memory: a request takes one, and one more for each replay.
    """
    requests, replays = f"shared_{what}_requests", f"shared_{what}_replays"
    unit = f"l1tex__data_{{}}_mem_shared_op_{op}.sum"
    return [
        Row(requests, count(requests), {f"smsp__inst_executed_op_shared_{op}.sum": 1}),
        Row(
            f"shared_{what}_wavefronts",
            count(requests, replays),
            {unit.format("pipe_lsu_wavefronts"): 1},
        ),
        Row(
            replays,
            count(replays),
            {unit.format("bank_conflicts_pipe_lsu"): 1},
            lambda counts: FEW_REPLAYS * getattr(counts, requests),
        ),
    ]


FLOPS = {
    f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum": flops
    for op, flops in (("fadd", 1), ("fmul", 1), ("ffma", 2))
}
FLOPS_OF_SPECIAL = 10
"""An exponential is four FFMA, an FADD and an FMUL around one MUFU, a division five FFMA."""


def plain_flops(counts: Counts, warps: int) -> int:
    """float32 additions and multiplications; divisions and special functions left out."""
    return counts.matmul_flops + counts.additions + counts.multiplications


def flops_with_special(counts: Counts, warps: int) -> int:
    """The same and what divisions and special functions are made of."""
    special = counts.special_calls + counts.divisions
    return plain_flops(counts, warps) + FLOPS_OF_SPECIAL * special


ROWS = [
    *global_rows("load", "ld", "read"),
    *global_rows("store", "st", "write"),
    all_row("load", "LD"),
    all_row("store", "ST"),
    *shared_rows("load", "ld"),
    *shared_rows("store", "st"),
    Row("fp32_flops", plain_flops, FLOPS),
    Row("fp32_flops_with_special", flops_with_special, FLOPS),
    Row("maxima", count("maxima"), {"thread FMNMX": 1}),
    # A division asks for a reciprocal.
    Row("special_calls_and_divisions", count("special_calls", "divisions"), {"thread MUFU": 1}),
    Row("shuffles", count("shuffles"), {"warp SHFL": 1}),
    Row("barriers_of_warps", lambda counts, warps: counts.barriers * warps, {"warp BAR": 1}),
]

IN_FORMULAS = [name for row in ROWS for name in row.formula if " " not in name]
METRICS = tuple(dict.fromkeys([*OF_LAUNCHES, *IN_FORMULAS, OPCODES, THREAD_OPCODES]))
"""What ncu is asked for."""


def total(launches: list[dict]) -> dict[str, float]:
    """Sums over launches: of metrics that are sums, and of instructions if all launches know them.

    Instructions are named as in a `Formula`.
    """
    known = set.intersection(*(set(launch["metrics"]) for launch in launches))
    sums = {
        name: sum(launch["metrics"][name] for launch in launches)
        for name in METRICS
        if name in known and name.endswith(".sum")
    }
    for who in ("warp", "thread"):
        tables = [launch[f"{who}_instructions"] for launch in launches]
        if all(tables):
            counts = sum((Counter(table) for table in tables), Counter())
            sums |= {f"{who} {name}": count for name, count in counts.items()}
    return sums


def evaluate(formula: Formula, measured: dict[str, float]) -> float | None:
    """A formula's value, None if a metric is missing. An instruction never executed counts 0."""
    tables = {name.split()[0] for name in measured if " " in name}
    value = 0.0
    for name, factor in formula.items():
        executed_never = " " in name and name not in measured and name.split()[0] in tables
        if name not in measured and not executed_never:
            return None
        value += factor * measured.get(name, 0.0)
    return value


def compare(rung: str, counts: Counts, warps: int, measured: dict[str, float]) -> list[dict]:
    """Every row: counter, predicted, measured and from what, ratio, reason, whether unexplained."""
    return [_compare_row(row, rung, counts, warps, measured) for row in ROWS]


def _compare_row(
    row: Row, rung: str, counts: Counts, warps: int, measured: dict[str, float]
) -> dict:
    value = evaluate(row.formula, measured)
    predicted = row.predicted(counts, warps)
    ratio = value / predicted if value is not None and predicted else None
    agrees = value == predicted or (ratio is not None and abs(ratio - 1) <= FAR_OFF)
    if row.allowed and not predicted and value is not None:
        agrees = value <= row.allowed(counts)
    reason = REASONS.get(f"{rung}.{row.counter}", REASONS.get(row.counter))
    return {
        "counter": row.counter,
        "predicted": predicted,
        "measured": value,
        "from": {} if value is None else row.formula,
        "ratio": ratio,
        "reason": reason,
        "unexplained": value is not None and not agrees and reason is None,
    }


def compare_rung(measured: dict, problem: Problem) -> dict:
    """A rung's measured part with its prediction and the comparison."""
    config = TileConfig(**measured["config"])
    counts = predict(measured["rung"], problem, config)
    comparison = compare(measured["rung"], counts, config.num_warps, total(measured["launches"]))
    return measured | {"predicted": asdict(counts), "comparison": comparison}


def table(rung: dict) -> str:
    """A rung's launches, then its comparison."""
    lines = ["", rung["rung"]]
    lines += [f"  {_launch_line(i, launch)}" for i, launch in enumerate(rung["launches"], 1)]
    lines.append(f"  {'counter':28}{'predicted':>18}{'measured':>18}{'ratio':>8}")
    for row in rung["comparison"]:
        value, ratio = row["measured"], row["ratio"]
        shown = "not measured" if value is None else f"{value:,.0f}"
        mark = "UNEXPLAINED" if row["unexplained"] else row["reason"] or ""
        lines.append(
            f"  {row['counter']:28}{row['predicted']:18,.0f}{shown:>18}"
            f"{'' if ratio is None else f'{ratio:.3f}':>8}  {mark}".rstrip()
        )
    return "\n".join(lines)


def _launch_line(position: int, launch: dict) -> str:
    metrics = launch["metrics"]
    shown = [
        f"{metrics[name] * scale:.4g} {label}"
        for name, (label, scale) in OF_LAUNCHES.items()
        if name in metrics
    ]
    return f"kernel {position}: {', '.join(shown)}"


def finish(result: dict) -> dict:
    """The measured result with predictions, comparisons and reasons."""
    batch, heads, seqlen, head_dim = result["shape"]
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal=result["causal"])
    rungs = [compare_rung(rung, problem) for rung in result["rungs"]]
    return result | {"reasons": REASONS, "rungs": rungs}
