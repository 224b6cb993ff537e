"""What the main job prints: tables for people, records for programs."""

from __future__ import annotations

import io
import math
import sys
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from fa2_numba.demo.check import Verdict
from fa2_numba.demo.heads import SINK_SHARE, Look, quoted
from fa2_numba.demo.options import Options, estimate_seconds
from fa2_numba.demo.problem import Problem
from fa2_numba.demo.timing import Timing

Record = dict[str, object]


def new_console() -> Console:
    """Standard output for tables and plain text; brackets in tokens are not markup."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character of the text must not end the run.
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, markup=False)


def introduction(options: Options, problem: Problem) -> str:
    """What is about to be computed, and how long that takes in the simulator."""
    heads, kv_heads = problem.q.shape[2], problem.k.shape[2]
    text = (
        f"SmolLM2-135M-Instruct reads Alice in Wonderland: layer {options.layer}, "
        f"{_count(len(problem.tokens), 'token')}, {_count(heads, 'query head')} on "
        f"{_count(kv_heads, 'key-value head')}, D={problem.q.shape[3]}, {options.dtype}, causal."
    )
    if options.machine == "gpu":
        return f"{text} Times of the checked runs include compilation and copies."
    seconds = estimate_seconds(len(options.rungs), options.tokens, options.heads)
    minutes = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{max(seconds, 5):.0f} seconds"
    return f"{text} Every thread runs in Python, in the simulator: about {minutes}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def rung_table(verdicts: list[Verdict]) -> Table:
    """One row a rung: how far out and lse are from exact attention, and may be."""
    table = _table("Largest error against exact attention in float64")
    table.add_column("rung", no_wrap=True)
    table.add_column("the one idea", ratio=1)
    table.add_column("error", no_wrap=True)
    for header in ("allowed", "check"):
        table.add_column(header, no_wrap=True)
    table.add_column("time\nmachine", no_wrap=True)
    table.expand = True
    for verdict in verdicts:
        out, lse = verdict.out, verdict.lse
        finished = out is not None and lse is not None
        table.add_row(
            verdict.rung.name,
            verdict.rung.idea,
            f"out {out.error:.1e}\nlse {lse.error:.1e}" if finished else "stopped",
            f"{out.allowed:.1e}\n{lse.allowed:.1e}" if finished else "",
            _mark(verdict.passed),
            f"{verdict.seconds:.1f} s\n{verdict.machine}",
        )
    return table


def _mark(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _table(title: str) -> Table:
    # Narrow gaps: at 80 columns every character is needed.
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def row_sum_line(verdicts: list[Verdict]) -> str:
    """How well the rows of P = exp(S - lse) sum to 1, over rungs that finished; empty if none."""
    finished = [verdict for verdict in verdicts if verdict.P is not None]
    if not finished:
        return ""
    worst = max(finished, key=lambda v: (math.isnan(v.row_sum_error), v.row_sum_error))
    return (
        f"Rows of P = exp(softmax_scale Q K^T - lse) sum to 1 within {worst.row_sum_error:.1e} "
        f"(allowed {worst.row_sum_allowed:.1e})."
    )


def look_table(looks: list[Look], tokens: tuple[str, ...], rung: str) -> Table:
    """One row a token and head: the tokens it attends to most, with their shares."""
    table = _table(f"Where the heads look, from the lse of {rung}")
    table.add_column("token", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("looks at")
    for position, group in groupby(looks, key=lambda look: look.position):
        for index, look in enumerate(group):
            name = f"{position}: {quoted(tokens[position])}" if index == 0 else ""
            keys = "   ".join(f"{quoted(tokens[j])} {weight:.0%}" for j, weight in look.keys)
            table.add_row(name, str(look.head), keys)
        table.add_section()
    return table


def sink_line(shares: list[float], first_token: str) -> str:
    """Which heads use the first token as an attention sink; empty if none does."""
    sinks = [f"head {head} {share:.0%}" for head, share in enumerate(shares) if share >= SINK_SHARE]
    if not sinks:
        return ""
    return (
        f"Attention sink: a head with nothing to look for leaves its attention on the first token, "
        f"{quoted(first_token)}. On average over the text: {', '.join(sinks)}."
    )


def timing_table(timings: list[Timing], dtype: str) -> Table:
    """One row a shape and rung."""
    table = _table(f"Kernel time, random {dtype}, causal, median")
    table.add_column("shape", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    for header in ("ms", "TFLOP/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for shape, group in groupby(timings, key=lambda timing: timing.shape):
        for index, timing in enumerate(group):
            numbers = ("no room", "for S, P")
            if timing.milliseconds is not None:
                numbers = (f"{timing.milliseconds:.3f}", f"{timing.tflops_per_second:.2f}")
            table.add_row(str(shape) if index == 0 else "", timing.rung, *numbers)
        table.add_section()
    return table


def verdict_record(verdict: Verdict) -> Record:
    """One rung for a program; numbers that are not finite are None."""
    record: Record = {
        "rung": verdict.rung.name,
        "idea": verdict.rung.idea,
        "source": verdict.rung.source,
        "machine": verdict.machine,
        "seconds": verdict.seconds,
        "passed": verdict.passed,
        "complaints": verdict.complaints(),
    }
    for name, part in (("out", verdict.out), ("lse", verdict.lse)):
        record[f"{name}_error"] = _finite(part.error if part else math.nan)
        record[f"{name}_allowed"] = _finite(part.allowed if part else math.nan)
    record["row_sum_error"] = _finite(verdict.row_sum_error)
    record["row_sum_allowed"] = _finite(verdict.row_sum_allowed)
    return record


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def problem_record(options: Options, problem: Problem) -> Record:
    """The slice of the data and the machine."""
    return {
        "layer": options.layer,
        "tokens": len(problem.tokens),
        "heads": problem.q.shape[2],
        "kv_heads": problem.k.shape[2],
        "head_dim": problem.q.shape[3],
        "dtype": options.dtype,
        "causal": True,
        "machine": options.machine,
    }


def look_record(look: Look, tokens: tuple[str, ...]) -> Record:
    """Where one head looks from one token."""
    keys = [{"position": j, "token": tokens[j], "weight": weight} for j, weight in look.keys]
    return {
        "position": look.position,
        "token": tokens[look.position],
        "head": look.head,
        "looks_at": keys,
    }


def timing_record(timing: Timing) -> Record:
    """One rung's time on one shape."""
    return {
        "rung": timing.rung,
        "batch": timing.shape.batch,
        "heads": timing.shape.heads,
        "seqlen": timing.shape.seqlen,
        "head_dim": timing.shape.head_dim,
        "milliseconds": timing.milliseconds,
        "tflops_per_second": timing.tflops_per_second,
    }
