"""Hardware counters of every CUDA-core rung beside what is predicted: `python -m bench.counters`.

The script runs itself under Nsight Compute, once for each rung: a child process that launches the
rung's kernels once, between cudaProfilerStart and cudaProfilerStop. This process needs no GPU of
its own; with `--measured FILE` it only compares an earlier run's counters anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import timing
from fa2_numba.config import TileConfig
from fa2_numba.constants import SECTOR_BYTES, WARP_SIZE
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.traffic import predict

ROOT = Path(__file__).parents[1]
SHAPE = (4, 32, 1024, 64)
"""batch, heads, seqlen, head_dim; float32, causal."""
SECONDS_PER_COMMAND = 110
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

METRICS = (
    "gpu__time_duration.sum",
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_xu.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "smsp__inst_executed_op_shared_ld.sum",
    "smsp__inst_executed_op_shared_st.sum",
    "smsp__sass_inst_executed_op_shared_ld.sum",
    "smsp__sass_inst_executed_op_shared_st.sum",
    "smsp__sass_inst_executed_op_global_ld.sum",
    "smsp__sass_inst_executed_op_global_st.sum",
    "smsp__sass_inst_executed_op_local_ld.sum",
    "smsp__sass_inst_executed_op_local_st.sum",
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    OPCODES,
    THREAD_OPCODES,
)

# What one of a unit is in bytes or nanoseconds; a unit that is not here counts as it is.
UNITS = {
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "us": 1e3,
    "usecond": 1e3,
    "ms": 1e6,
    "msecond": 1e6,
    "s": 1e9,
    "second": 1e9,
}

# Metric -> factor: a sum. "warp SHFL" and "thread MUFU" are counts of one instruction.
Formula = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One counter: its prediction, and the sums of metrics that measure it, the best one first.

    predicted: of the counts of all launches and the warps of a block. allowed: how much of it there
    may be where none is predicted.
    """

    counter: str
    predicted: Callable[[Counts, int], float]
    formulas: tuple[Formula, ...]
    allowed: Callable[[Counts], float] | None = None


def memory_rows(what: str, op: str, dram: str) -> list[Row]:
    """Loads or stores of global memory, from what threads ask for to what reaches HBM."""
    l2 = {"ld": "read", "st": "write"}[op]

    def count(name: str, factor: int = 1) -> Callable[[Counts, int], float]:
        return lambda counts, warps: factor * getattr(counts, f"global_{what}_{name}")

    return [
        Row(
            f"global_{what}_requests",
            count("requests"),
            (
                {f"smsp__sass_inst_executed_op_global_{op}.sum": 1},
                {f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum": 1},
            ),
        ),
        Row(
            f"global_{what}_l1_bytes",
            count("sectors", SECTOR_BYTES),
            ({f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum": SECTOR_BYTES},),
        ),
        Row(
            f"global_{what}_l2_bytes",
            count("sectors", SECTOR_BYTES),
            ({f"lts__t_sectors_srcunit_tex_op_{l2}.sum": SECTOR_BYTES},),
        ),
        Row(f"global_{what}_hbm_bytes", count("bytes"), ({f"dram__bytes_{dram}.sum": 1},)),
    ]


def request_row(what: str, op: str) -> Row:
    """Loads or stores of global and shared memory together, however the compiler does them."""
    return Row(
        f"all_{what}_requests",
        lambda counts, warps: sum(
            getattr(counts, f"{space}_{what}_requests") for space in ("global", "shared")
        ),
        ({f"warp {op}": 1, f"warp {op}S": 1, f"warp {op}G": 1},),
    )


def shared_rows(what: str, op: str) -> list[Row]:
    """Loads or stores of shared memory.

    A wavefront is one turn of the memory: a request takes one, and one more for each replay.
    """

    def count(*names: str) -> Callable[[Counts, int], float]:
        return lambda counts, warps: sum(getattr(counts, f"shared_{what}_{n}") for n in names)

    return [
        Row(
            f"shared_{what}_requests",
            count("requests"),
            (
                {f"smsp__inst_executed_op_shared_{op}.sum": 1},
                {f"smsp__sass_inst_executed_op_shared_{op}.sum": 1},
            ),
        ),
        Row(
            f"shared_{what}_wavefronts",
            count("requests", "replays"),
            ({f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum": 1},),
        ),
        Row(
            f"shared_{what}_replays",
            count("replays"),
            ({f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum": 1},),
            lambda counts: FEW_REPLAYS * getattr(counts, f"shared_{what}_requests"),
        ),
    ]


PER_THREAD = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
FLOPS = (
    {PER_THREAD.format(op): n for op, n in (("fadd", 1), ("fmul", 1), ("ffma", 2))},
    {"thread FADD": 1, "thread FMUL": 1, "thread FFMA": 2},
)
FLOPS_OF_SPECIAL = 10
"""An exponential is four FFMA, an FADD and an FMUL around one MUFU, a division five FFMA."""


def plain_flops(counts: Counts) -> int:
    """float32 additions and multiplications; divisions and special functions left out."""
    return counts.matmul_flops + counts.additions + counts.multiplications


ROWS = [
    *memory_rows("load", "ld", "read"),
    *memory_rows("store", "st", "write"),
    request_row("load", "LD"),
    request_row("store", "ST"),
    *shared_rows("load", "ld"),
    *shared_rows("store", "st"),
    Row("fp32_flops", lambda counts, warps: plain_flops(counts), FLOPS),
    Row(
        "fp32_flops_with_special",
        lambda counts, warps: (
            plain_flops(counts) + FLOPS_OF_SPECIAL * (counts.special_calls + counts.divisions)
        ),
        FLOPS,
    ),
    Row("maxima", lambda counts, warps: counts.maxima, ({"thread FMNMX": 1},)),
    Row(
        # A division asks for a reciprocal.
        "special_calls_and_divisions",
        lambda counts, warps: counts.special_calls + counts.divisions,
        ({"thread MUFU": 1}, {"smsp__inst_executed_pipe_xu.sum": WARP_SIZE}),
    ),
    Row("shuffles", lambda counts, warps: counts.shuffles, ({"warp SHFL": 1},)),
    Row("barriers_of_warps", lambda counts, warps: counts.barriers * warps, ({"warp BAR": 1},)),
]


# ncu's output


def number(text: str, unit: str = "") -> float | None:
    """The value of a cell, in bytes or nanoseconds; None for n/a.

    >>> number("1,024.5", "Kbyte"), number("12 (BAR: 5; LDS: 7)"), number("n/a")
    (1024500.0, 12.0, None)
    """
    try:
        return float(text.partition("(")[0].replace(",", "")) * UNITS.get(unit, 1)
    except ValueError:
        return None


def instances(text: str) -> dict[str, float]:
    """The counts by instruction behind the total of a cell.

    >>> instances("1,012 (BAR: 5; LDS.128: 1,007)")
    {'BAR': 5.0, 'LDS.128': 1007.0}
    """
    pairs = re.findall(r"([A-Z][A-Z0-9_.]*):\s*([\d,]*\d)", text.partition("(")[2])
    return {name: float(value.replace(",", "")) for name, value in pairs}


def parse_csv(text: str) -> list[dict]:
    """The launches in ncu's raw page: the kernel's name, metrics, counts by instruction."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(('"ID"', "ID,"))]
    if not starts:
        raise ValueError(f"no table in ncu's output:\n{text[-2000:]}")
    table = [line for line in lines[starts[0] :] if line.strip() and not line.startswith("==")]
    header, *rows = csv.reader(table)
    units = dict(zip(header, rows[0], strict=False))
    launches = []
    for row in rows[1:]:
        cells = dict(zip(header, row, strict=False))
        launches.append(
            {
                "kernel": cells["Kernel Name"],
                "metrics": _metrics(cells, units),
                "warp_instructions": instances(cells.get(OPCODES, "")),
                "thread_instructions": instances(cells.get(THREAD_OPCODES, "")),
            }
        )
    return launches


def _metrics(cells: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    wanted = {name: number(cells[name], units[name]) for name in METRICS if name in cells}
    return {name: value for name, value in wanted.items() if value is not None}


def total(launches: Iterable[dict]) -> dict[str, float]:
    """Sums over launches: of metrics that are sums, and of instructions if all launches know them.

    Instructions are named as in a `Formula`.
    """
    launches = list(launches)
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


# Comparing


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
    values = [(evaluate(formula, measured), formula) for formula in row.formulas]
    value, formula = next(((v, f) for v, f in values if v is not None), (None, {}))
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
        "from": formula,
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
    parts = []
    for name, label, scale in (
        ("gpu__time_duration.sum", "ms", 1e-6),
        ("launch__registers_per_thread", "registers", 1),
        ("sm__warps_active.avg.pct_of_peak_sustained_active", "% of warps active", 1),
        (
            "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
            "warps at barriers per issue",
            1,
        ),
    ):
        if name in launch["metrics"]:
            parts.append(f"{launch['metrics'][name] * scale:.4g} {label}")
    return f"kernel {position}: {', '.join(parts)}"


# Running under ncu

FAILURES = (RuntimeError, ValueError, LookupError, OSError, subprocess.TimeoutExpired)


class Profiler:
    """ncu, and the metrics it turned out to know."""

    def __init__(self, ncu: str) -> None:
        self.ncu = ncu
        self.metrics = list(METRICS)
        self.unknown: list[str] = []

    def version(self) -> str:
        """The last line of what it says of itself."""
        lines = _run([self.ncu, "--version"]).stdout.strip().splitlines()
        return lines[-1] if lines else "unknown"

    def profile(self, rung: str, shape: tuple[int, ...], folder: Path) -> tuple[str, dict]:
        """The raw page for a rung's launches as CSV, and what the child wrote of itself.

        ncu refuses to start for one unknown metric; the unknown ones are then left out.
        """
        report, about = folder / f"{rung}.ncu-rep", folder / f"{rung}.json"
        export = str(report.with_suffix(""))  # ncu adds its own
        child = [sys.executable, "-m", "bench.counters", "--launch", rung, "--about", str(about)]
        child += ["--shape", *map(str, shape)]
        while True:
            options = ["--force-overwrite", "--export", export, "--clock-control", "none"]
            options += ["--profile-from-start", "off", "--metrics", ",".join(self.metrics)]
            done = _run([self.ncu, *options, *child])
            if done.returncode == 0 and report.is_file():
                return self._export(report), json.loads(about.read_text())
            output = done.stdout + done.stderr
            if not self._leave_out(self._unknown_in(output)):
                raise RuntimeError(f"ncu failed:\n{output[-3000:]}")

    def _export(self, report: Path) -> str:
        page = [self.ncu, "--import", str(report), "--page", "raw", "--csv"]
        done = _run([*page, "--print-units", "base", "--print-metric-instances", "details"])
        return done.stdout if done.returncode == 0 else _run(page).stdout

    def _unknown_in(self, output: str) -> list[str]:
        """The metrics an error names, or else those not in ncu's list for this GPU.

        No metric if it was the child that failed.
        """
        errors = " ".join(line for line in output.splitlines() if "==ERROR==" in line)
        words = set(re.findall(r"[\w.]+", errors))
        named = [m for m in self.metrics if m in words or m.partition(".")[0] in words]
        return named or ([] if "Traceback" in output else self._unlisted())

    def _unlisted(self) -> list[str]:
        lines = _run([self.ncu, "--query-metrics"]).stdout.splitlines()
        listed = {line.split()[0] for line in lines if line.strip()}
        unlisted = [m for m in self.metrics if m.partition(".")[0] not in listed]
        return unlisted if len(unlisted) < len(self.metrics) else []

    def _leave_out(self, unknown: list[str]) -> bool:
        """Drop metrics; returns whether there is something new to try."""
        if unknown:
            print(f"left out, unknown to ncu here: {', '.join(unknown)}", flush=True)
        self.unknown += unknown
        self.metrics = [m for m in self.metrics if m not in unknown]
        return bool(unknown and self.metrics)


def _run(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command; past its time, it and the processes it started are killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS_PER_COMMAND)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(rung: str, shape: tuple[int, ...], about: Path) -> None:
    """The child under ncu: run each kernel of a rung once, profiled, after one run that is not."""
    import torch
    from numba import cuda

    prepared = timing.prepare(rung, timing.gpu_machine(), timing.random_inputs(*shape), True)
    prepared.run()
    torch.cuda.synchronize()
    about.write_text(
        json.dumps(
            {
                "environment": timing.environment(),
                "config": asdict(prepared.config),
                "launches": len(prepared.launches),
            }
        )
    )
    with cuda.profiling():
        prepared.run()
        torch.cuda.synchronize()


def measure(rungs: list[str], shape: tuple[int, ...], ncu: str, keep: Path | None) -> dict:
    """Profile the rungs one after the other; one that fails is told of and left out."""
    profiler = Profiler(ncu)
    result = {"ncu": profiler.version(), "shape": shape, "dtype": "float32", "causal": True}
    measured = []
    with TemporaryDirectory() as folder:
        for rung in rungs:
            start = time.perf_counter()
            try:
                text, about = profiler.profile(rung, shape, Path(folder))
                if keep:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"counters_{rung}.csv").write_text(text)
                launches = parse_csv(text)
                if len(launches) != about["launches"]:
                    raise RuntimeError(f"{len(launches)} launches, not {about['launches']}")
            except FAILURES as error:
                print(f"{rung} is left out: {error}", flush=True)
                continue
            print(f"{rung}: profiled in {time.perf_counter() - start:.0f} s", flush=True)
            result |= about["environment"]
            measured.append({"rung": rung, "config": about["config"], "launches": launches})
    return result | {"unknown_metrics": profiler.unknown, "rungs": measured}


def finish(result: dict) -> dict:
    """The measured result with predictions, comparisons and reasons."""
    batch, heads, seqlen, head_dim = result["shape"]
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal=result["causal"])
    rungs = [compare_rung(rung, problem) for rung in result["rungs"]]
    return result | {"reasons": REASONS, "rungs": rungs}


def write(out: Path, result: dict) -> None:
    """Write a result file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    rungs = timing.cuda_core_rungs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="result file; default bench/results/<gpu>/counters.json"
    )
    parser.add_argument("--measured", type=Path, help="compare this file's counters anew, no GPU")
    parser.add_argument("--keep", type=Path, help="folder for ncu's tables, a CSV file a rung")
    parser.add_argument("--rungs", nargs="+", choices=rungs, default=rungs)
    parser.add_argument(
        "--shape",
        nargs=4,
        type=int,
        default=SHAPE,
        metavar=("BATCH", "HEADS", "SEQLEN", "HEAD_DIM"),
    )
    parser.add_argument("--ncu", default="ncu", help="the Nsight Compute command")
    parser.add_argument("--launch", choices=rungs, help=argparse.SUPPRESS)
    parser.add_argument("--about", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Profile, compare, print and write the result file."""
    options = parse_arguments(arguments)
    if options.launch:
        launch(options.launch, tuple(options.shape), options.about)
        return
    if options.measured:
        result = json.loads(options.measured.read_text())
    else:
        result = measure(options.rungs, tuple(options.shape), options.ncu, options.keep)
    if not result["rungs"]:
        raise SystemExit("no rung was profiled")
    out = options.out or options.measured or timing.results_file(result["gpu"], "counters.json")
    # What a GPU was needed for is safe before anything else is done with it.
    write(out, result)
    result = finish(result)
    write(out, result)
    print("\n".join(table(rung) for rung in result["rungs"]))
    unexplained = sum(row["unexplained"] for rung in result["rungs"] for row in rung["comparison"])
    print(f"\n{unexplained} ratios more than {FAR_OFF:.0%} off without a reason -> {out}")


if __name__ == "__main__":
    main()
