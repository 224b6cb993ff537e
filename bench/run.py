"""Every rung and its peers on the same tensors, in turns: `python -m bench run` on a GPU.

Forward, backward, and both after each other, on the grid of the FlashAttention-2 paper and on other
shapes (`bench/problems.py`). Whoever is timed has first computed what is right (`bench/exact.py`).
The file is written after every problem, and --resume goes on from there: a problem's contestants
are always measured together, so their ratios hold whenever that was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from bench import contestants, problems, summary, timing
from bench.contestants import DETERMINISTIC, NAMES, Run, is_ours, missing_peers
from bench.exact import Sample, judge, make_samples
from bench.problems import DIRECTIONS, DTYPES, GROUPS, HEAD_DIMS, Problem
from bench.records import record_of
from fa2_numba import cubin_cache
from fa2_numba.lessons.ladder_table import write_whole
from fa2_numba.testing import Comparison

if TYPE_CHECKING:
    from torch import Tensor

LISTS = ("measured", "left_out", "records")
"""What a file gets more of with every problem."""
SAME = ("gpu", "driver", "driver_cuda", "versions")
"""What must not have changed when a run is resumed."""
DIGITS = 6
"""Of the numbers in a file; events count half microseconds."""
FILTERS = ("group", "dtype", "head_dim", "seqlen_k")
"""Fields of a problem of which the command line can name the values that count."""


def random_arrays(problem: Problem) -> tuple[Tensor, ...]:
    """Standard normal Q, K, V and dO on the GPU."""
    torch = timing.import_torch()
    torch.manual_seed(0)
    of_queries = problem.batch, problem.seqlen, problem.heads, problem.head_dim
    of_keys = problem.batch, problem.seqlen_k, problem.kv_heads, problem.head_dim
    options = {"dtype": getattr(torch, problem.dtype), "device": timing.device()}
    shapes = of_queries, of_keys, of_keys, of_queries
    return tuple(torch.randn(shape, **options) for shape in shapes)


class Refusal(Exception):
    """A peer does not take a problem, finds no memory for it, or is wrong."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


def refusing(name: str, run: Run) -> Run:
    """The run of a peer with its errors as refusals; what is ours has to run."""

    def guarded() -> tuple[Tensor, ...]:
        try:
            return run()
        except RuntimeError as error:
            text = str(error) or type(error).__name__
            no_memory = "out of memory" in text.lower()
            raise Refusal(name, "out of memory" if no_memory else text.splitlines()[0]) from error

    return run if is_ours(name) else guarded


def measure(
    problem: Problem, direction: str, samples: list[Sample], runs: dict[str, Run]
) -> dict[str, list[dict]]:
    """What the lists of a file get: all contestants in one direction on one problem."""
    what = {"direction": direction, **problem.fields}
    left_out, checked, times = [], {}, {}
    runs = {name: refusing(name, run) for name, run in runs.items()}
    for name, run in runs.items():
        try:
            checked[name] = _checked(name, run, samples, f"{direction} {problem}")
        except Refusal as refusal:
            left_out.append({"name": name, **what, "reason": refusal.reason})
    while checked and not times:
        timed = {name: runs[name] for name in checked}
        try:
            times = timing.take_times(timed, timing.time_once)
        except Refusal as refusal:  # no memory beside the others, which start anew
            left_out.append({"name": refusal.name, **what, "reason": refusal.reason})
            del checked[refusal.name]
            timing.free_memory()
    records = [
        record_of(name, direction, problem, ms, checked[name].verdict)
        | checked[name].first_call
        | {"host_us": timing.host_microseconds(runs[name])}
        for name, ms in times.items()
    ]
    measured = [{**what, "clocks_after": timing.clocks()}]
    return {"measured": measured, "left_out": left_out, "records": records}


class Checked(NamedTuple):
    """A contestant that is right: what the gate says, and what its first call took.

    first_call: milliseconds until its results were there, and how many kernels were compiled.
    """

    verdict: Comparison
    first_call: dict[str, float]


def _checked(name: str, run: Run, samples: list[Sample], where: str) -> Checked:
    """A contestant past the gate; a rung that is wrong ends everything."""
    kept, start = _kept_kernels(), time.perf_counter()
    outputs = run()
    timing.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start)
    verdict = judge(outputs, samples)
    if not verdict.passed:
        if is_ours(name):
            raise SystemExit(f"{name} is wrong, {where}: {verdict}")
        raise Refusal(name, f"wrong: {verdict}")
    if name == DETERMINISTIC:
        before = [x.clone() for x in outputs]
        if not all(x.equal(y) for x, y in zip(before, run(), strict=True)):
            raise SystemExit(f"{name} computes other bits the second time, {where}")
    first_call = {"first_call_ms": milliseconds, "compiled": _kept_kernels() - kept}
    return Checked(verdict, first_call)


def _kept_kernels() -> int:
    """Compiled kernels on disk: those that a call adds had to be compiled."""
    folder = cubin_cache.folder()
    return len(list(folder.glob("*.cubin"))) if folder and folder.exists() else 0


class ResultFile:
    """What has been measured, on disk after every problem; without a path in memory only."""

    def __init__(self, path: Path | None, about: dict, resume: bool) -> None:
        self.path = path
        self.content = about | {name: [] for name in LISTS}
        if resume and path is not None and path.exists():
            self._go_on_from(json.loads(path.read_text(encoding="utf-8")))

    def _go_on_from(self, earlier: dict) -> None:
        for field in SAME:
            before, now = earlier.get(field), self.content[field]
            if before != now:
                raise ValueError(f"{self.path}: {field} was {before}, now it is {now}")
        self.content = {**earlier, "date": self.content["date"]}

    def has(self, problem: Problem, direction: str) -> bool:
        """Whether a problem has been measured in a direction."""
        wanted = {"direction": direction, **problem.fields}.items()
        return any(wanted <= one.items() for one in self._measured())

    def _measured(self) -> list[dict]:
        return [one | {"clocks_after": None} for one in self.content["measured"]]

    def add(self, found: dict[str, list[dict]]) -> None:
        """Take in what `measure` has found."""
        for name, more in found.items():
            self.content[name] += more
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, as_lines(self.content))


def as_lines(content: dict) -> str:
    """JSON with a line for each element of a list."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(_rounded(one)) for one in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(record: dict) -> dict:
    return {k: float(f"{v:.{DIGITS}g}") if type(v) is float else v for k, v in record.items()}


def chosen_problems(options: argparse.Namespace) -> list[Problem]:
    """The problems that the command line leaves, with the directions it leaves."""
    wanted = {field: getattr(options, field) for field in FILTERS}
    found = []
    for problem in problems.problems(options.quick):
        fits = all(getattr(problem, f) in values for f, values in wanted.items() if values)
        directions = tuple(d for d in problem.directions if d in (options.direction or DIRECTIONS))
        if fits and directions:
            found.append(replace(problem, directions=directions))
    return found


def run_all(options: argparse.Namespace, file: ResultFile, names: Sequence[str]) -> None:
    """Measure what the file has not yet."""
    wanted = [
        (problem, [d for d in problem.directions if not file.has(problem, d)])
        for problem in chosen_problems(options)
    ]
    with tqdm(total=sum(len(directions) for _, directions in wanted)) as bar:
        for problem, directions in wanted:
            if not directions:
                continue
            bar.set_postfix_str(str(problem))
            inputs = random_arrays(problem)
            samples = make_samples(inputs, problem.causal)
            for direction in directions:
                runs = partial(contestants.runs, problem, direction, inputs, names)
                file.add(measure(problem, direction, samples, runs(options.triton)))
                timing.free_memory()
                bar.update()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench run", description=__doc__)
    option = parser.add_argument
    option("--out", type=Path, help="default: bench/results/<gpu>/run.json, for whole runs only")
    option("--quick", action="store_true", help="float16 and 1024 to 4096 keys")
    option("--resume", action="store_true", help="keep what the file has, measure the rest")
    option("--triton", type=Path, metavar="FILE", help="defines attention(q, k, v, causal, scale)")
    for name, kind, choices in (
        ("group", str, GROUPS),
        ("direction", str, DIRECTIONS),
        ("dtype", str, DTYPES),
        ("head-dim", int, HEAD_DIMS),
        ("seqlen-k", int, None),
        ("name", str, NAMES),
    ):
        option(f"--{name}", type=kind, nargs="+", choices=choices, help=f"only this {name}")
    options = parser.parse_args(argv)
    if options.triton and not options.triton.is_file():
        parser.error(f"--triton {options.triton}: must be a Python file")
    if not chosen_problems(options):
        parser.error("no problem is left: see bench/problems.py for what there is")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and summarise; 2 where the file to resume does not fit."""
    options = parse_arguments(argv)
    about = timing.environment()
    whole = not any(getattr(options, name) for name in ("quick", "direction", "name", *FILTERS))
    path = options.out or (timing.results_file(about["gpu"], "run.json") if whole else None)
    missing = missing_peers(options.triton)
    about |= {"missing_peers": missing, "matmul_tflops": timing.matmul_tflops(DTYPES)}
    try:
        file = ResultFile(path, about, options.resume)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: --resume {error}", file=sys.stderr)
        return 2
    names = [name for name in options.name or NAMES if name not in missing]
    run_all(options, file, names)
    print(summary.describe(file.content), f"-> {path}", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
