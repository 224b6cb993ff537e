"""Time every CUDA-core rung, float32, on three shapes: `python -m bench.ladder`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench import timing
from bench.problems import FORWARD, LADDER, LADDER_SHAPES, Problem
from bench.records import record_of
from fa2_numba.ladder import cuda_core_rungs
from fa2_numba.reference import attention_forward, attention_forward_same_precision
from fa2_numba.testing import Comparison, compare

SLOW_MS, SLOW_ROUNDS = 1000.0, 3
CHECKED_ROWS = 128
SHAPES = {label: (*sizes, 64) for label, sizes in LADDER_SHAPES.items()}
"""Name -> batch, heads, seqlen, head_dim."""


@dataclass(frozen=True)
class Sample:
    """Some rows of one head, with what O and LSE should be there."""

    batch: int
    head: int
    rows: slice
    exact: tuple[np.ndarray, np.ndarray]
    rounded: tuple[np.ndarray, np.ndarray]

    def judge(self, O: np.ndarray, LSE: np.ndarray) -> tuple[Comparison, Comparison]:
        """Compare this part of O (batch, seqlen, heads, head_dim) and LSE."""
        O_part = O[self.batch, self.rows, self.head][None, :, None]
        LSE_part = LSE[self.batch, self.head, self.rows][None, None]
        parts = zip((O_part, LSE_part), self.exact, self.rounded, strict=True)
        return tuple(compare(*part) for part in parts)


def on_host(array: object) -> np.ndarray:
    """A torch tensor as a NumPy array; a NumPy array as it is."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def make_samples(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, rows: int = CHECKED_ROWS
) -> list[Sample]:
    """The first and the last rows of the first and the last head.

    Exact attention of whole heads would take minutes. Causal rows see no key to the right of the
    last of them, and the mask is aligned with the last key, so a part of the rows is a problem of
    its own, with the keys up to there.
    """
    batch, seqlen, heads, _ = q.shape
    count = min(rows, seqlen)
    samples = []
    for b, h in sorted({(0, 0), (batch - 1, heads - 1)}):
        for part_rows in (slice(0, count), slice(seqlen - count, seqlen)):
            keys = part_rows.stop if causal else seqlen
            part = q[b, part_rows, h], k[b, :keys, h], v[b, :keys, h]
            operands = [x[None, :, None] for x in part]
            exact = attention_forward(*operands, causal=causal)
            rounded = attention_forward_same_precision(*operands, causal=causal)
            samples.append(Sample(b, h, part_rows, exact, rounded))
    return samples


def check(prepared: timing.Prepared, samples: list[Sample]) -> Comparison:
    """The worst of all comparisons, error over what is allowed; wrong answers end the run."""
    O, LSE = on_host(prepared.O), on_host(prepared.LSE)
    verdicts = [verdict for sample in samples for verdict in sample.judge(O, LSE)]
    for verdict in verdicts:
        if not verdict.passed:
            raise SystemExit(f"{prepared.rung} is wrong on {O.shape}: {verdict}")
    return max(verdicts, key=lambda verdict: verdict.error / verdict.allowed)


def measure(
    label: str,
    inputs: tuple,
    causal: bool,
    machine: object,
    time_once: Callable[[Callable[[], None]], float],
) -> list[dict]:
    """Records of all rungs on Q, K, V, in the order of the ladder."""
    samples = make_samples(*map(on_host, inputs), causal)
    runs, verdicts = {}, {}
    for name in cuda_core_rungs():
        prepared = timing.prepare(name, machine, inputs, causal)
        prepared.run()
        verdicts[name] = check(prepared, samples)
        runs[name] = prepared.run
    times = timing.take_times(runs, time_once, SLOW_MS, SLOW_ROUNDS)
    batch, seqlen, heads, head_dim = inputs[0].shape
    sizes = batch, heads, heads, seqlen, seqlen, head_dim
    problem = Problem(LADDER, "float32", *sizes, causal)
    return [
        record_of(name, FORWARD, problem, ms, verdicts[name]) | {"shape": label}
        for name, ms in times.items()
    ]


def compare_neighbours(records: list[dict]) -> list[dict]:
    """How many times faster each rung is than the rung below, problem by problem."""
    problems: dict[tuple[str, bool], list[dict]] = {}
    for record in records:
        problems.setdefault((record["shape"], record["causal"]), []).append(record)
    return [
        {
            "name": upper["name"],
            "over": lower["name"],
            "shape": shape,
            "causal": causal,
            "faster": lower["ms"] / upper["ms"],
        }
        for (shape, causal), rungs in problems.items()
        for lower, upper in pairwise(rungs)
    ]


def table(records: list[dict], ratios: list[dict]) -> str:
    """All problems, a line for each rung."""
    faster = {(r["name"], r["shape"], r["causal"]): r["faster"] for r in ratios}
    lines, last = [], None
    for r in records:
        problem = r["shape"], r["causal"]
        if problem != last:
            sizes = f"B{r['batch']} H{r['heads']} N{r['seqlen']} d{r['head_dim']}"
            lines += ["", f"{r['shape']}: {sizes} float32{' causal' if r['causal'] else ''}"]
            lines.append(f"{'rung':18}{'ms':>11}{'min':>11}{'max':>11}{'TFLOP/s':>9}  over below")
        last = problem
        ratio = faster.get((r["name"], *problem))
        lines.append(
            f"{r['name']:18}{r['ms']:11.3f}{r['ms_min']:11.3f}{r['ms_max']:11.3f}"
            f"{r['tflops']:9.2f}  {'' if ratio is None else f'{ratio:.2f}x'}".rstrip()
        )
    return "\n".join(lines[1:])


def main(arguments: list[str] | None = None) -> None:
    """Measure all shapes on the GPU and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="result file; default bench/results/<gpu>/ladder.json"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    about = timing.environment()
    out = options.out or timing.results_file(about["gpu"], "ladder.json")
    machine = timing.gpu_machine()
    records, clocks = [], []
    for label, causal in tqdm([(label, causal) for label in SHAPES for causal in (False, True)]):
        inputs = timing.random_inputs(*SHAPES[label])
        records += measure(label, inputs, causal, machine, timing.time_once)
        clocks.append({"shape": label, "causal": causal, "after": timing.clocks()})
    ratios = compare_neighbours(records)
    result = about | {"clocks": clocks, "records": records, "ratios": ratios}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(records, ratios))
    print(f"{len(records)} records in {time.perf_counter() - start:.0f} s -> {out}")


if __name__ == "__main__":
    main()
