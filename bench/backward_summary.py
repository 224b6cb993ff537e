"""What records of the backward pass say, in the terms of `bench.forward_summary`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.contestants import DETERMINISTIC, OURS
from bench.forward_summary import (
    CUDNN,
    FLASH,
    MEAN_HEAD_DIMS,
    TABLE_DTYPE,
    TABLE_SEQLENS,
    TEXT_COLUMNS,
    Ratio,
    lowest,
    mean,
    of_most_models,
    problem_of,
    ratios,
    value_of,
)
from fa2_numba.lessons.ladder_table import markdown_row

COLUMNS = (
    "head dim",
    "mask",
    "tokens a head",
    f"`{OURS}` TFLOP/s",
    "deterministic TFLOP/s",
    "torch's FlashAttention-2 TFLOP/s",
    "ratio",
    "of a matrix product",
)


@dataclass(frozen=True)
class Summary:
    """The ratios of one dtype in a few numbers; above 1 `OURS` is the faster one.

    over_flash, over_cudnn: geometric means over `MEAN_HEAD_DIMS`, the latter None where cuDNN took
    none of them; by_head_dim: geometric means over FlashAttention-2; lowest_over_flash: by head
    dim, from `LEAST_SEQLEN` tokens on; deterministic_cost, most_deterministic_cost: time of the
    deterministic call over that of the other, geometric mean and maximum over all problems;
    of_matmul: the largest share of the speed of a matrix product.
    """

    over_flash: float
    by_head_dim: dict[int, float]
    lowest_over_flash: dict[int, Ratio]
    over_cudnn: float | None
    deterministic_cost: float
    most_deterministic_cost: Ratio
    of_matmul: float


def summarize(result: dict) -> dict[str, Summary]:
    """A summary for each dtype of a result file."""
    return {
        dtype: _summary(result["records"], dtype, peak)
        for dtype, peak in result["matmul_tflops"].items()
    }


def _summary(records: list[dict], dtype: str, peak: float) -> Summary:
    found = {name: ratios(records, dtype, name) for name in (FLASH, CUDNN, DETERMINISTIC)}
    head_dims = sorted({ratio.head_dim for ratio in found[FLASH]})
    cudnn = of_most_models(found[CUDNN])
    kind = OURS, dtype
    tflops = [r["tflops"] for r in records if (r["name"], r["dtype"]) == kind]
    return Summary(
        over_flash=mean(of_most_models(found[FLASH])),
        by_head_dim={d: mean([r for r in found[FLASH] if r.head_dim == d]) for d in head_dims},
        lowest_over_flash={d: lowest(found[FLASH], d) for d in head_dims},
        over_cudnn=mean(cudnn) if cudnn else None,
        deterministic_cost=mean(of_most_models(found[DETERMINISTIC])),
        most_deterministic_cost=max(found[DETERMINISTIC], key=value_of),
        of_matmul=max(tflops) / peak,
    )


def markdown_table(result: dict) -> str:
    """What the README shows of a result file: a table of float16, and the means of all dtypes."""
    rule = ("---:" if i >= TEXT_COLUMNS else "---" for i in range(len(COLUMNS)))
    lines = markdown_row(COLUMNS), f"|{'|'.join(rule)}|", *_rows(result), "", *_means(result)
    return "\n".join(lines)


def _rows(result: dict) -> list[str]:
    """A row for each head dim, mask and length of the table."""
    records = [r for r in result["records"] if r["dtype"] == TABLE_DTYPE]
    tflops = {(r["name"], *problem_of(r)): r["tflops"] for r in records}
    in_table = [
        problem_of(r) for r in records if r["name"] == OURS and r["seqlen"] in TABLE_SEQLENS
    ]
    peak = result["matmul_tflops"][TABLE_DTYPE]
    rows = []
    for problem in sorted(in_table, key=lambda problem: (problem[0], problem[2], problem[1])):
        head_dim, seqlen, causal = problem
        ours, repeatable, flash = (tflops[name, *problem] for name in (OURS, DETERMINISTIC, FLASH))
        speeds = (f"{speed:.0f}" for speed in (ours, repeatable, flash))
        mask = "causal" if causal else "none"
        shares = f"{ours / flash:.2f}", f"{ours / peak:.0%}"
        rows.append(markdown_row([f"{head_dim}", mask, f"{seqlen:,}", *speeds, *shares]))
    return rows


def _means(result: dict) -> list[str]:
    """Some lines for each dtype."""
    text = []
    for dtype, s in summarize(result).items():
        cudnn = "" if s.over_cudnn is None else f", {s.over_cudnn:.2f} times as fast as cuDNN's"
        each = ", ".join(f"{value:.2f} at {d}" for d, value in s.by_head_dim.items())
        text += [
            f"- {dtype}, head dims {' and '.join(map(str, MEAN_HEAD_DIMS))}, geometric means: "
            f"{s.over_flash:.2f} times as fast as",
            f"  torch's FlashAttention-2{cudnn}.",
            f"  By head dim, over FlashAttention-2: {each}.",
            f"  The deterministic call takes {s.deterministic_cost:.2f} times as long.",
        ]
    return text
