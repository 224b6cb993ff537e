"""Every rung and every peer in one run, float16: `python -m bench whole_ladder`.

The only file in which CUDA-core rungs, tensor-core rungs and peers may be compared with each other:
the same tensors, in turns. What the machine does not have is named in the file as not installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from bench import timing
from bench.forward import (
    BACKENDS,
    CHECKED_ROWS,
    check,
    contestants,
    lines,
    make_samples,
    matmul_tflops,
    two_heads,
)
from bench.ladder import SHAPES, SLOW_MS, SLOW_ROUNDS, take_times
from fa2_numba.ladder import RUNGS

if TYPE_CHECKING:
    from torch import Tensor

DTYPE = "float16"
MATH = {"torch_math": "MATH"}
"""Torch's plain formula, beside its fused backends."""
OPTIONAL = {"cupy": "cupy", "flash_attn": "flash_attn"}
"""Peer -> the package that it needs."""


def not_installed() -> list[str]:
    """Peers that this machine does not have."""
    return [name for name, package in OPTIONAL.items() if find_spec(package) is None]


def optional_peers(inputs: Sequence[Tensor], causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Those of OPTIONAL that are there: name -> function that returns O as the inputs lie."""
    peers = {"cupy": _cupy, "flash_attn": _flash_attn}
    missing = not_installed()
    return {
        name: partial(run, *inputs, causal) for name, run in peers.items() if name not in missing
    }


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=causal)


def _cupy(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention as one writes it in NumPy: products in float16, softmax in float32."""
    import cupy as cp
    import torch

    stream = torch.cuda.current_stream().cuda_stream
    with cp.cuda.ExternalStream(stream):
        Q, K, V = (cp.from_dlpack(x.transpose(1, 2).contiguous()) for x in (q, k, v))
        S = (Q @ K.swapaxes(2, 3)).astype(cp.float32) * q.shape[-1] ** -0.5
        if causal:
            # Assigning through a mask would make the host wait.
            S = cp.where(cp.tri(S.shape[2], S.shape[3], dtype=bool), S, cp.float32(-cp.inf))
        P = cp.exp(S - S.max(axis=3, keepdims=True))
        P /= P.sum(axis=3, keepdims=True)
        O = P.astype(cp.float16) @ V
        return torch.from_dlpack(O).transpose(1, 2)


def measure(label: str, causal: bool) -> list[dict]:
    """Records of all that take the shape of this label."""
    sizes = SHAPES[label]
    inputs = timing.random_inputs(*sizes, dtype=DTYPE)
    samples = make_samples(*map(two_heads, inputs), causal, CHECKED_ROWS)
    runs = contestants(inputs, causal, tuple(RUNGS), BACKENDS | MATH)
    runs |= optional_peers(inputs, causal)
    verdicts = check(label, runs, samples, tuple(RUNGS))
    timed = {name: runs[name] for name in verdicts}
    times = take_times(timed, timing.time_once, SLOW_MS, SLOW_ROUNDS)
    return [
        timing.forward_record(name, sizes, DTYPE, causal, ms, verdicts[name]) | {"shape": label}
        for name, ms in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all shapes on the current GPU and write the file."""
    parser = argparse.ArgumentParser(prog="python -m bench whole_ladder", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>/whole_ladder.json")
    options = parser.parse_args(argv)
    about = timing.environment()
    path = options.out or timing.results_file(about["gpu"], "whole_ladder.json")
    peak = matmul_tflops([DTYPE])
    problems = tqdm(list(product(SHAPES, (False, True))))
    records = [record for problem in problems for record in measure(*problem)]
    result = about | {
        "not_installed": not_installed(),
        "matmul_tflops": peak,
        "clocks": timing.clocks(),
        "records": records,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(*lines(records), path, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
