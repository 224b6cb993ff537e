"""Time the tensor-core rungs and torch's attention on a GPU: `python -m bench.forward`.

float16 and bfloat16, with and without a mask, over head dims and lengths that all have the same
number of elements. `--table FILE` writes recorded times into a file as a table, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tqdm import tqdm

from bench import forward_summary, timing
from bench.ladder import Sample, make_samples, take_times
from fa2_numba import flash_attn_func
from fa2_numba.arrays import describe
from fa2_numba.testing import Comparison, compare

TOKENS = 16384
"""Of all batch elements together."""
COLUMNS = 2048
"""Of all heads together."""
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 4096)
DTYPES = ("float16", "bfloat16")
QUICK_DTYPES = DTYPES[:1]
RUNGS = ("fa2_tensor_core", "fa1_tensor_core")
BACKENDS = {
    "torch_flash": "FLASH_ATTENTION",
    "torch_cudnn": "CUDNN_ATTENTION",
    "torch_efficient": "EFFICIENT_ATTENTION",
}
"""Name -> torch's `SDPBackend`."""
SLOW_MS = 20.0
SLOW_ROUNDS = 5
CHECKED_ROWS = 64
MATMUL_SIZE = 8192
RECORDED = timing.results_file("NVIDIA H200", "forward.json")


@dataclass(frozen=True)
class Problem:
    """Self-attention on `TOKENS` tokens."""

    dtype: str
    head_dim: int
    seqlen: int
    causal: bool

    @property
    def batch(self) -> int:
        """Sequences."""
        return TOKENS // self.seqlen

    @property
    def heads(self) -> int:
        """Heads of each sequence."""
        return COLUMNS // self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, heads, seqlen, head_dim."""
        return self.batch, self.heads, self.seqlen, self.head_dim

    def random_inputs(self) -> tuple:
        """Q, K, V on the GPU."""
        return timing.random_inputs(*self.sizes, dtype=self.dtype)

    def __str__(self) -> str:
        causal = " causal" if self.causal else ""
        return f"B{self.batch} H{self.heads} N{self.seqlen} d{self.head_dim} {self.dtype}{causal}"


def problems(quick: bool) -> list[Problem]:
    """All problems, or the few on which things are tried."""
    dtypes, seqlens = (QUICK_DTYPES, QUICK_SEQLENS) if quick else (DTYPES, SEQLENS)
    return [Problem(*sizes) for sizes in product(dtypes, HEAD_DIMS, seqlens, (False, True))]


def contestants(
    inputs: tuple,
    causal: bool,
    rungs: Sequence[str] = RUNGS,
    backends: Mapping[str, str] = MappingProxyType(BACKENDS),
) -> dict[str, Callable[[], object]]:
    """Name -> function that runs attention once and returns (batch, seqlen, heads, head_dim)."""
    torch = timing.import_torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_first = [x.transpose(1, 2) for x in inputs]

    def torch_backend(backend: str) -> object:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(*heads_first, is_causal=causal).transpose(1, 2)

    ours = {
        name: partial(
            flash_attn_func, *inputs, causal=causal, rung=name, out=torch.empty_like(inputs[0])
        )
        for name in rungs
    }
    return ours | {name: partial(torch_backend, backend) for name, backend in backends.items()}


def two_heads(x: object) -> np.ndarray:
    """The first head of the first and the last of the last batch element, as heads of a batch."""
    heads = describe("x", x[0, :, 0]), describe("x", x[-1, :, -1])
    return np.stack([head.library.host_values(head.value) for head in heads])[:, :, None]


def judge(out: object, samples: list[Sample]) -> Comparison:
    """The worst of the comparisons of two heads' rows, error over what is allowed."""
    O = two_heads(out)
    verdicts = [
        compare(O[s.batch, s.rows, s.head][None, :, None], s.exact[0], s.rounded[0])
        for s in samples
    ]
    # NaN compares as neither: a verdict that failed comes first.
    return max(verdicts, key=lambda verdict: (not verdict.passed, verdict.error / verdict.allowed))


def check(
    problem: Problem | str,
    runs: dict[str, Callable[[], object]],
    samples: list[Sample],
    rungs: Sequence[str] = RUNGS,
) -> dict[str, Comparison]:
    """The verdicts on all that take this problem; a rung that is wrong ends the run."""
    verdicts = {}
    for name, run in runs.items():
        try:
            verdicts[name] = judge(run(), samples)
        except RuntimeError as error:
            if name in rungs:
                raise
            print(f"{name} does not take {problem}: {str(error).splitlines()[0]}")
            continue
        if not verdicts[name].passed:
            message = f"{name} is wrong on {problem}: {verdicts[name]}"
            if name in rungs:
                raise SystemExit(message)
            print(message)
    return verdicts


def measure(problem: Problem) -> list[dict]:
    """Records of all contestants that take this problem."""
    inputs = problem.random_inputs()
    samples = make_samples(*map(two_heads, inputs), problem.causal, CHECKED_ROWS)
    runs = contestants(inputs, problem.causal)
    verdicts = check(problem, runs, samples)
    timed = {name: run for name, run in runs.items() if name in verdicts}
    times = take_times(timed, timing.time_once, SLOW_MS, SLOW_ROUNDS)
    dtype, causal = problem.dtype, problem.causal
    return [
        timing.forward_record(name, problem.sizes, dtype, causal, ms, verdicts[name])
        for name, ms in times.items()
    ]


def matmul_tflops(dtypes: Sequence[str]) -> dict[str, float]:
    """TFLOP/s of torch's product of two large square matrices, dtype by dtype."""
    torch = timing.import_torch()
    found = {}
    for dtype in dtypes:
        sizes = MATMUL_SIZE, MATMUL_SIZE
        a, b, out = (
            torch.randn(sizes, dtype=getattr(torch, dtype), device="cuda") for _ in range(3)
        )
        run = partial(torch.matmul, a, b, out=out)
        times = take_times({"matmul": run}, timing.time_once)["matmul"]
        found[dtype] = 2 * MATMUL_SIZE**3 / statistics.median(times) / 1e9
    return found


def lines(records: list[dict]) -> list[str]:
    """A line for each record."""
    return [
        f"{r['name']:16} {r['dtype']:8} B{r['batch']:<2} H{r['heads']:<2} N{r['seqlen']:<5} "
        f"d{r['head_dim']:<3} {'causal' if r['causal'] else '':6} {r['ms']:9.3f} ms "
        f"({r['ms_min']:.3f} to {r['ms_max']:.3f}) {r['tflops']:6.1f} TFLOP/s"
        for r in records
    ]


def run_all(quick: bool, out: Path | None) -> None:
    """Measure, print, and write the result file; a quick run writes only where it is told to."""
    start = time.perf_counter()
    about = timing.environment()
    if out is None and not quick:
        out = timing.results_file(about["gpu"], "forward.json")
    peak = matmul_tflops(QUICK_DTYPES if quick else DTYPES)
    records = [record for problem in tqdm(problems(quick)) for record in measure(problem)]
    result = about | {"matmul_tflops": peak, "records": records}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(*lines(records), forward_summary.describe(result), sep="\n")
    print(f"{len(records)} records in {time.perf_counter() - start:.0f} s -> {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or write the table of what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.forward", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="result file; default bench/results/<gpu>/forward.json"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="float16 and two lengths only, nothing is written without --out",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="put the table of the result file (--out, or the H200's) between the markers of FILE",
    )
    options = parser.parse_args(arguments)
    if options.table is None:
        run_all(options.quick, options.out)
        return
    try:
        forward_summary.write_table(options.out or RECORDED, options.table)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--table {options.table}: {error}")


if __name__ == "__main__":
    main()
