"""The main job from the command line to its exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from tqdm.auto import tqdm

from fa2_numba.demo import report
from fa2_numba.demo.check import Verdict, attempt, judge
from fa2_numba.demo.heads import first_token_shares, looks
from fa2_numba.demo.options import Options, parse
from fa2_numba.demo.problem import Problem, load
from fa2_numba.demo.timing import Timing, time_rungs
from fa2_numba.ladder import RUNGS


@dataclass(frozen=True)
class Results:
    """All that was found out."""

    verdicts: list[Verdict]
    timings: list[Timing]

    @property
    def best(self) -> Verdict | None:
        """The highest rung that passed."""
        return next((v for v in reversed(self.verdicts) if v.passed), None)

    @property
    def passed(self) -> bool:
        """Whether every rung passed."""
        return all(verdict.passed for verdict in self.verdicts)


def main(argv: Sequence[str]) -> int:
    """Run, check, show; returns 0 if every rung passes, else 1. Bad options exit with 2."""
    options = parse(argv)
    problem = load(options)
    if not options.json:
        report.new_console().print(report.introduction(options, problem))
    verdicts = _run_rungs(options, problem)
    # A GPU that stopped with an error may run nothing more in this process.
    usable = options.machine == "gpu" and not any(verdict.trouble for verdict in verdicts)
    passed = [verdict.rung.name for verdict in verdicts if verdict.passed]
    timings = time_rungs(passed, options.dtype) if usable else []
    results = Results(verdicts, timings)
    (_print_json if options.json else _print_tables)(options, problem, results)
    if options.plot is not None:
        _plot(options, problem, results.best)
    return 0 if results.passed else 1


def _run_rungs(options: Options, problem: Problem) -> list[Verdict]:
    # Bars are for a person who watches; a log file gets none.
    bar = tqdm(
        options.rungs,
        bar_format="{desc}: {n_fmt} of {total_fmt} rungs done |{bar}| {elapsed}",
        leave=False,
        disable=not sys.stderr.isatty(),
    )
    attempts = []
    for name in bar:
        bar.set_description(name)
        attempts.append(attempt(RUNGS[name], problem, options.machine))
    return [judge(tried, problem) for tried in attempts]


def _print_tables(options: Options, problem: Problem, results: Results) -> None:
    console = report.new_console()
    console.print()
    console.print(report.rung_table(results.verdicts))
    complaints = (f"FAIL {v.rung.name}: {c}" for v in results.verdicts for c in v.complaints())
    _print_paragraph(console, report.row_sum_line(results.verdicts), *complaints)
    if results.best is not None:
        P, tokens = results.best.P, problem.tokens
        console.print()
        console.print(report.look_table(looks(P, tokens), tokens, results.best.rung.name))
        _print_paragraph(console, report.sink_line(first_token_shares(P), tokens[0]))
    if results.timings:
        console.print()
        console.print(report.timing_table(results.timings, options.dtype))


def _print_paragraph(console: Console, *lines: str) -> None:
    """A blank line and the lines that are not empty; nothing if all are."""
    if any(lines):
        console.print("", *filter(None, lines), sep="\n")


def _print_json(options: Options, problem: Problem, results: Results) -> None:
    tokens, best = problem.tokens, results.best
    record = {
        "passed": results.passed,
        "problem": report.problem_record(options, problem),
        "rungs": [report.verdict_record(verdict) for verdict in results.verdicts],
        "heads": [report.look_record(look, tokens) for look in looks(best.P, tokens)]
        if best
        else [],
        "first_token_shares": first_token_shares(best.P) if best else [],
        "timings": [report.timing_record(timing) for timing in results.timings],
    }
    print(json.dumps(record, indent=2, allow_nan=False))


def _plot(options: Options, problem: Problem, best: Verdict | None) -> None:
    """Save the maps; what is said goes to stderr, for stdout may be JSON."""
    if best is None:
        print(f"{options.plot} not written: no rung passed", file=sys.stderr)
        return
    from fa2_numba.demo.plot import save_maps

    title = f"SmolLM2 reads Alice, layer {options.layer}: P from the lse of {best.rung.name}"
    save_maps(options.plot, best.P, problem.tokens, title)
    print(f"attention maps: {options.plot}", file=sys.stderr)
