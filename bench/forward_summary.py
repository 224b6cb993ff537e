"""What records of the forward pass say: ratios of times, and the README's table of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.contestants import OURS
from fa2_numba.lessons.ladder_table import markdown_row

BASELINE = "fa1_tensor_core"
FLASH, CUDNN = "torch_flash", "torch_cudnn"
MEAN_HEAD_DIMS = (64, 128)
"""The head dims that most models have, and the means are over."""
LEAST_SEQLEN = 1024
"""From here on the lowest ratio to FlashAttention-2 is looked for; shorter calls are overhead."""
LONG_SEQLEN = 4096
"""From here on a head is long, and FlashAttention-1 has few blocks."""
TABLE_DTYPE = "float16"
TABLE_SEQLENS = (1024, 4096, 16384)
COLUMNS = (
    "head dim",
    "mask",
    "tokens a head",
    "`fa2_tensor_core` TFLOP/s",
    "torch's FlashAttention-2 TFLOP/s",
    "ratio",
    "over `fa1_tensor_core`",
    "of a matrix product",
)
TEXT_COLUMNS = 2


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another the top rung computed one problem."""

    head_dim: int
    seqlen: int
    causal: bool
    value: float

    def __str__(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"{self.value:.3f} (head dim {self.head_dim}, {self.seqlen} tokens{causal})"


def ratios(records: list[dict], dtype: str, other: str) -> list[Ratio]:
    """The other's time over that of `OURS`, for every problem that both computed."""
    times = {problem_of(r): r["ms"] for r in records if (r["name"], r["dtype"]) == (other, dtype)}
    return [
        Ratio(*problem_of(r), times[problem_of(r)] / r["ms"])
        for r in records
        if (r["name"], r["dtype"]) == (OURS, dtype) and problem_of(r) in times
    ]


def problem_of(record: dict) -> tuple[int, int, bool]:
    """head_dim, seqlen, causal."""
    return record["head_dim"], record["seqlen"], record["causal"]


@dataclass(frozen=True)
class Summary:
    """The ratios of one dtype in a few numbers; above 1 the top rung is the faster one.

    over_flash: geometric mean over `MEAN_HEAD_DIMS`; lowest_over_flash: by head dim, from
    `LEAST_SEQLEN` tokens on; over_fa1, lowest_over_fa1: from `LONG_SEQLEN` tokens on; over_cudnn:
    geometric mean over `MEAN_HEAD_DIMS`, None where cuDNN took none of them; of_matmul: by head
    dim, the largest share of the speed of a matrix product.
    """

    over_flash: float
    lowest_over_flash: dict[int, Ratio]
    over_fa1: float
    lowest_over_fa1: Ratio
    over_cudnn: float | None
    of_matmul: dict[int, float]


def summarize(result: dict) -> dict[str, Summary]:
    """A summary for each dtype of a result file."""
    return {dtype: _summary(result, dtype) for dtype in result["matmul_tflops"]}


def _summary(result: dict, dtype: str) -> Summary:
    records = result["records"]
    flash, fa1, cudnn = (ratios(records, dtype, other) for other in (FLASH, BASELINE, CUDNN))
    ours = [r for r in records if (r["name"], r["dtype"]) == (OURS, dtype)]
    head_dims = sorted({r["head_dim"] for r in ours})
    long_fa1 = [ratio for ratio in fa1 if ratio.seqlen >= LONG_SEQLEN]
    return Summary(
        over_flash=mean(of_most_models(flash)),
        lowest_over_flash={d: lowest(flash, d) for d in sorted({r.head_dim for r in flash})},
        over_fa1=mean(long_fa1),
        lowest_over_fa1=min(long_fa1, key=value_of),
        over_cudnn=mean(of_most_models(cudnn)) if of_most_models(cudnn) else None,
        of_matmul={
            d: max(r["tflops"] for r in ours if r["head_dim"] == d) / result["matmul_tflops"][dtype]
            for d in head_dims
        },
    )


def of_most_models(found: list[Ratio]) -> list[Ratio]:
    """Those with a head dim of `MEAN_HEAD_DIMS`."""
    return [ratio for ratio in found if ratio.head_dim in MEAN_HEAD_DIMS]


def lowest(found: list[Ratio], head_dim: int) -> Ratio:
    """The lowest one of a head dim, from `LEAST_SEQLEN` tokens on."""
    candidates = [r for r in found if r.head_dim == head_dim and r.seqlen >= LEAST_SEQLEN]
    return min(candidates, key=value_of)


def value_of(ratio: Ratio) -> float:
    """The number alone."""
    return ratio.value


def mean(found: Iterable[Ratio | float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(getattr(one, "value", one) for one in found)


def markdown_table(result: dict) -> str:
    """What the README shows of a result file: a table of float16, and the means of all dtypes."""
    rule = ["---" if i < TEXT_COLUMNS else "--:" for i in range(len(COLUMNS))]
    head = [markdown_row(COLUMNS), f"|{'|'.join(rule)}|"]
    return "\n".join((*head, *_rows(result), "", *_means(result)))


def _rows(result: dict) -> list[str]:
    """A row for each head dim, mask and length of the table."""
    found = {(r["name"], *problem_of(r)): r for r in result["records"] if r["dtype"] == TABLE_DTYPE}
    peak = result["matmul_tflops"][TABLE_DTYPE]
    rows = []
    for head_dim in sorted({key[1] for key in found}):
        for causal in (False, True):
            for seqlen in TABLE_SEQLENS:
                problem = head_dim, seqlen, causal
                ours, flash, fa1 = (found[name, *problem] for name in (OURS, FLASH, BASELINE))
                cells = (
                    f"{head_dim}",
                    "causal" if causal else "none",
                    f"{seqlen:,}",
                    f"{ours['tflops']:.0f}",
                    f"{flash['tflops']:.0f}",
                    f"{flash['ms'] / ours['ms']:.2f}",
                    f"{fa1['ms'] / ours['ms']:.1f}",
                    f"{ours['tflops'] / peak:.0%}",
                )
                rows.append(markdown_row(cells))
    return rows


def _means(result: dict) -> list[str]:
    """A line for each dtype."""
    dims = " and ".join(map(str, MEAN_HEAD_DIMS))
    text = []
    for dtype, s in summarize(result).items():
        cudnn = ""
        if s.over_cudnn is not None:
            cudnn = f", {s.over_cudnn:.2f} times as fast as cuDNN's attention"
        text.append(
            f"- {dtype}, head dims {dims}, geometric means: {s.over_flash:.2f} times as fast as\n"
            f"  torch's FlashAttention-2{cudnn}; from {LONG_SEQLEN:,} tokens on "
            f"{s.over_fa1:.1f} times\n"
            f"  as fast as `{BASELINE}` (all head dims), at least {s.lowest_over_fa1.value:.1f} "
            "times."
        )
    return text
