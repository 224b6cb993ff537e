"""Time the backward pass and torch's on a GPU: `python -m bench.backward`.

On the problems of `bench.forward`: all that a call of `flash_attn_backward` launches, against
torch's FlashAttention-2 and cuDNN. All are given the O and LSE of a forward pass of their own kind,
ours those of torch's FlashAttention-2. `--table FILE` writes recorded times into a file as a table,
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from bench import backward_summary, timing
from bench.backward_summary import CUDNN, DETERMINISTIC, FLASH, OURS
from bench.forward import (
    DTYPES,
    QUICK_DTYPES,
    SLOW_MS,
    SLOW_ROUNDS,
    Problem,
    lines,
    matmul_tflops,
    problems,
)
from bench.ladder import take_times
from fa2_numba import flash_attn_backward
from fa2_numba.testing import Comparison

if TYPE_CHECKING:
    from torch import Tensor

RUNGS = {OURS: False, DETERMINISTIC: True}
"""Name of a contestant that is `fa2_tensor_core` -> deterministic."""
CHUNK = 2048
"""So many rows of S the exact gradients take at a time: they fit the GPU beside all the rest."""
RECORDED = timing.results_file("NVIDIA H200", "backward.json")

Gradients = tuple["Tensor", "Tensor", "Tensor"]
"""dQ, dK, dV."""


class Sample(NamedTuple):
    """One head, with what its gradients (seqlen, head_dim) should be."""

    batch: int
    head: int
    exact: Gradients
    rounded: Gradients

    def judge(self, gradients: Gradients) -> list[Comparison]:
        """Compare this head of dQ, dK and dV (batch, seqlen, heads, head_dim)."""
        ours = [x[self.batch, :, self.head] for x in gradients]
        return [compare(*three) for three in zip(ours, self.exact, self.rounded, strict=True)]


def compare(actual: Tensor, exact: Tensor, rounded: Tensor) -> Comparison:
    """`fa2_numba.testing.compare` where the tensors are, for whole heads of long sequences."""
    import torch

    error, reference = ((x.double() - exact).abs().flatten() for x in (actual, rounded))
    # NaN compares as neither larger nor smaller: rank it above every number.
    worst = error.nan_to_num(nan=math.inf).argmax()
    return Comparison(
        error=error[worst].item(),
        reference_error=reference.max().item(),
        rounding=torch.finfo(actual.dtype).eps * exact.abs().max().item(),
        worst=tuple(divmod(worst.item(), exact.shape[1])),
        actual=actual.flatten()[worst].item(),
        exact=exact.flatten()[worst].item(),
    )


def exact_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Gradients:
    """The gradients of one head, all in float64: its Q, K, V and dO are (seqlen, head_dim)."""
    wide = [x.double() for x in (q, k, v, dout)]
    return _head_gradients(*wide, causal, lambda x: x)


def rounded_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Gradients:
    """The same in float32; what enters a product, and the gradients, rounded to the dtype of q."""
    wide = [x.float() for x in (q, k, v, dout)]
    gradients = _head_gradients(*wide, causal, lambda x: x.to(q.dtype).float())
    return tuple(x.to(q.dtype) for x in gradients)


def _head_gradients(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    dO: Tensor,
    causal: bool,
    rounded: Callable[[Tensor], Tensor],
) -> Gradients:
    """`FA2 Alg. 2` as a formula, some rows of S at a time; P, O and dS are rounded by `rounded`."""
    import torch

    seqlen, head_dim = Q.shape
    scale = 1 / math.sqrt(head_dim)
    dQ, dK, dV = (torch.zeros_like(x) for x in (Q, K, V))
    columns = torch.arange(seqlen, device=Q.device)
    for first in range(0, seqlen, CHUNK):
        rows = slice(first, min(first + CHUNK, seqlen))
        S = scale * (Q[rows] @ K.T)  # (CHUNK, seqlen)
        if causal:
            S.masked_fill_(columns > columns[rows, None], -math.inf)
        P = S.softmax(dim=1)
        O = rounded(rounded(P) @ V)
        D = (dO[rows] * O).sum(dim=1, keepdim=True)
        dS = rounded(P * (dO[rows] @ V.T - D))
        dV += rounded(P).T @ dO[rows]
        dQ[rows] = scale * (dS @ K)
        dK += scale * (dS.T @ Q[rows])
    return dQ, dK, dV


def make_samples(inputs: Sequence[Tensor], causal: bool) -> list[Sample]:
    """The first and the last head of Q, K, V, dO (batch, seqlen, heads, head_dim)."""
    samples = []
    for batch, head in ((0, 0), (-1, -1)):
        one = [x[batch, :, head] for x in inputs]
        exact, rounded = exact_gradients(*one, causal), rounded_gradients(*one, causal)
        samples.append(Sample(batch, head, exact, rounded))
    return samples


def contestants(inputs: Sequence[Tensor], causal: bool) -> dict[str, Callable[[], Gradients]]:
    """Name -> function that runs the backward pass once and returns dQ, dK, dV.

    The forward pass of each kind runs with its first call.
    """
    torch = timing.import_torch()
    q, k, v, dout = inputs
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    dout_heads_first = dout.transpose(1, 2)
    aten = torch.ops.aten

    @cache
    def flash_forward() -> tuple:
        return aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)

    @cache
    def cudnn_forward() -> tuple:
        # No bias, with LSE.
        return aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, causal)

    def flash() -> Gradients:
        out, lse, starts_q, starts_k, seqlen_q, seqlen_k, *random, _ = flash_forward()
        lengths = starts_q, starts_k, seqlen_q, seqlen_k
        return _heads_last(
            aten._scaled_dot_product_flash_attention_backward(
                dout_heads_first, *heads_first, out, lse, *lengths, 0.0, causal, *random
            )
        )

    def cudnn() -> Gradients:
        out, lse, starts_q, starts_k, seqlen_q, seqlen_k, *random, _ = cudnn_forward()
        lengths = starts_q, starts_k, seqlen_q, seqlen_k
        return _heads_last(
            aten._scaled_dot_product_cudnn_attention_backward(
                dout_heads_first, *heads_first, out, lse, *random, None, *lengths, 0.0, causal
            )
        )

    def ours(buffers: dict[str, Tensor], deterministic: bool) -> Gradients:
        out, lse = flash_forward()[:2]
        return flash_attn_backward(
            *(dout, q, k, v, out.transpose(1, 2), lse),
            causal=causal,
            deterministic=deterministic,
            rung=OURS,
            **buffers,
        )

    def buffers() -> dict[str, Tensor]:
        return {f"d{name}": torch.full_like(q, math.nan) for name in "qkv"}

    rungs = {name: partial(ours, buffers(), repeatable) for name, repeatable in RUNGS.items()}
    return rungs | {FLASH: flash, CUDNN: cudnn}


def _heads_last(gradients: Gradients) -> Gradients:
    return tuple(x.transpose(1, 2) for x in gradients)


def judge(gradients: Gradients, samples: list[Sample]) -> Comparison:
    """The worst of the comparisons of two heads' gradients, error over what is allowed."""
    verdicts = [verdict for sample in samples for verdict in sample.judge(gradients)]
    # NaN compares as neither: a verdict that failed comes first.
    return max(verdicts, key=lambda verdict: (not verdict.passed, verdict.error / verdict.allowed))


def check(
    problem: Problem, runs: dict[str, Callable[[], Gradients]], samples: list[Sample]
) -> dict[str, Comparison]:
    """The verdicts on all that take this problem; what is wrong and ours ends the run."""
    verdicts = {}
    for name, run in runs.items():
        try:
            gradients = run()
        except RuntimeError as error:
            if name in RUNGS:
                raise
            print(f"{name} does not take {problem}: {str(error).splitlines()[0]}")
            continue
        verdicts[name] = judge(gradients, samples)
        if not verdicts[name].passed:
            message = f"{name} is wrong on {problem}: {verdicts[name]}"
            if name in RUNGS:
                raise SystemExit(message)
            print(message)
        if name == DETERMINISTIC:
            before = [x.clone() for x in gradients]
            if not all(x.equal(y) for x, y in zip(before, run(), strict=True)):
                raise SystemExit(f"{name} computes other bits the second time on {problem}")
    return verdicts


def measure(problem: Problem) -> list[dict]:
    """Records of all contestants that take this problem."""
    torch = timing.import_torch()
    q, k, v = problem.random_inputs()
    inputs = q, k, v, torch.randn_like(q)
    runs = contestants(inputs, problem.causal)
    verdicts = check(problem, runs, make_samples(inputs, problem.causal))
    timed = {name: runs[name] for name in verdicts}
    times = take_times(timed, timing.time_once, SLOW_MS, SLOW_ROUNDS)
    kind = problem.sizes, problem.dtype, problem.causal
    return [timing.backward_record(name, *kind, ms, verdicts[name]) for name, ms in times.items()]


def run_all(quick: bool, out: Path | None) -> None:
    """Measure, print, and write the result file; a quick run writes only where it is told to."""
    start, about = time.perf_counter(), timing.environment()
    path = out or (None if quick else timing.results_file(about["gpu"], "backward.json"))
    peak = matmul_tflops(QUICK_DTYPES if quick else DTYPES)
    records = [record for problem in tqdm(problems(quick)) for record in measure(problem)]
    result = {**about, "matmul_tflops": peak, "records": records}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(*lines(records), backward_summary.describe(result), sep="\n")
    print(f"{len(records)} records in {time.perf_counter() - start:.0f} s -> {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or write the table of what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.backward", description=__doc__)
    option = partial(parser.add_argument, metavar="FILE", type=Path)
    option("--out", help="result file; default bench/results/<gpu>/backward.json")
    option("--table", help="put the table of --out, or of the H200's file, between its markers")
    what = "float16 and two lengths only, nothing is written without --out"
    parser.add_argument("--quick", action="store_true", help=what)
    options = parser.parse_args(arguments)
    if options.table is None:
        return run_all(options.quick, options.out)
    try:
        backward_summary.write_table(options.out or RECORDED, options.table)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--table {options.table}: {error}")


if __name__ == "__main__":
    main()
