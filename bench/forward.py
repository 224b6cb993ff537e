"""Time the forward pass of every rung and of torch's backends: `python -m bench.forward`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from bench.timing import (
    environment,
    forward_flops,
    import_torch,
    results_file,
    summary,
    time_once,
)
from fa2_numba import RUNGS, flash_attn_func
from fa2_numba.reference import attention_forward, attention_forward_same_precision
from fa2_numba.testing import compare

if TYPE_CHECKING:
    import torch

WARM_UPS = 3
ROUNDS = 9
BACKENDS = {
    "torch_math": "MATH",
    "torch_efficient": "EFFICIENT_ATTENTION",
    "torch_flash": "FLASH_ATTENTION",
    "torch_cudnn": "CUDNN_ATTENTION",
}
"""Name -> torch's `SDPBackend`."""
# batch, heads, seqlen, head_dim: 16k tokens, 2048 columns in all heads.
SHAPES = [(16, 32, 1024, 64), (4, 32, 4096, 64), (4, 16, 4096, 128)]


def contestants(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict:
    """Name -> function that runs attention once and returns (batch, seqlen, heads, head_dim)."""
    torch = import_torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def rung(name: str) -> Callable[[], torch.Tensor]:
        out = torch.empty_like(q)
        return lambda: flash_attn_func(q, k, v, causal=causal, rung=name, out=out)

    def torch_backend(backend: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

        return run

    peers = {name: torch_backend(backend) for name, backend in BACKENDS.items()}
    return {name: rung(name) for name in RUNGS} | peers


def first_head(x: torch.Tensor) -> np.ndarray:
    """The first head of the first batch element, on the host."""
    return x[:1, :, :1].cpu().numpy()


def measure(shape: tuple, dtype: torch.dtype, causal: bool) -> list[dict]:
    """Records of all contestants that take this problem."""
    torch = import_torch()
    batch, heads, seqlen, head_dim = shape
    sizes = batch, seqlen, heads, head_dim
    q, k, v = (torch.randn(sizes, dtype=dtype, device="cuda") for _ in range(3))
    one_head = [first_head(x) for x in (q, k, v)]
    exact, _ = attention_forward(*one_head, causal=causal)
    same_precision, _ = attention_forward_same_precision(*one_head, causal=causal)
    runs, verdicts = {}, {}
    for name, run in contestants(q, k, v, causal).items():
        try:
            verdicts[name] = compare(first_head(run()), exact, same_precision)
        except RuntimeError as error:
            print(f"{name} takes no {dtype} {shape}: {str(error).splitlines()[0]}")
            continue
        if name in RUNGS and not verdicts[name].passed:
            raise SystemExit(f"{name} is wrong on {shape} {dtype}: {verdicts[name]}")
        runs[name] = run
    for run in runs.values():
        for _ in range(WARM_UPS):
            run()
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(time_once(run))
    flops = forward_flops(batch, heads, seqlen, head_dim, causal)
    return [
        {
            "name": name,
            "direction": "forward",
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "heads": heads,
            "kv_heads": heads,
            "seqlen": seqlen,
            "seqlen_k": seqlen,
            "head_dim": head_dim,
            "causal": causal,
            **summary(ms, flops),
            "max_error": verdicts[name].error,
            "allowed_error": verdicts[name].allowed,
        }
        for name, ms in times.items()
    ]


def main() -> None:
    """Measure all shapes and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="result file; default bench/results/<gpu>/forward.json"
    )
    options = parser.parse_args()
    torch = import_torch()
    about = environment()
    out = options.out or results_file(about["gpu"], "forward.json")
    problems = [
        (shape, dtype, causal)
        for shape in SHAPES
        for dtype in (torch.float32, torch.float16)
        for causal in (False, True)
    ]
    start = time.perf_counter()
    records = [record for problem in tqdm(problems) for record in measure(*problem)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(about | {"records": records}, indent=1) + "\n")
    for r in records:
        print(
            f"{r['name']:16} {r['dtype']:8} B{r['batch']} H{r['heads']} N{r['seqlen']} "
            f"d{r['head_dim']} {'causal' if r['causal'] else '':6} {r['ms']:9.3f} ms "
            f"{r['tflops']:7.1f} TFLOP/s"
        )
    print(f"{len(records)} records in {time.perf_counter() - start:.0f} s -> {out}")


if __name__ == "__main__":
    main()
