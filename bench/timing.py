"""What the scripts of this folder share: a rung ready to run, a time, the machine's description.

torch is imported where it is used, so that all the rest works, and is tested, without a GPU.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import numpy as np
from numba import cuda

from fa2_numba.arrays import describe
from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS, tiles_for
from fa2_numba.launch import ForwardTensors, GpuMachine, KernelLaunch, SimulatorMachine
from fa2_numba.staging import stage
from fa2_numba.testing import Comparison

SLEEP_CYCLES = (2_000_000, 20_000_000)
"""How long the GPU waits for the host's launches, about a millisecond; then once more, longer."""
BACKWARD_OVER_FORWARD = 2.5
"""Matrix products of the backward pass (five, one of them S again) over those of the forward."""
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw")


@dataclass(frozen=True)
class Prepared:
    """A rung's launches with all their arrays: running them allocates nothing.

    O and LSE: the arrays that `run` fills, NaN before that.
    """

    rung: str
    config: TileConfig
    machine: GpuMachine | SimulatorMachine
    launches: list[KernelLaunch]
    O: object
    LSE: object

    def run(self) -> None:
        """Queue the launches."""
        with self.machine.activate():
            self.machine.run(self.launches)


def prepare(
    rung: str, machine: GpuMachine | SimulatorMachine, inputs: tuple, causal: bool
) -> Prepared:
    """Plan a rung for the arrays Q, K, V, all of one library, on the machine that holds them."""
    arrays = {name: describe(name, value) for name, value in zip("qkv", inputs, strict=True)}
    library, device, dtype = (getattr(arrays["q"], a) for a in ("library", "device", "dtype"))
    batch, seqlen_q, heads, head_dim = arrays["q"].shape
    out = library.empty_like(inputs[0])
    lse = library.empty((batch, heads, seqlen_q), "float32", device)
    for name, value in (("out", out), ("lse", lse)):
        library.fill(value, math.nan)
        arrays[name] = describe(name, value)
    with machine.activate():
        there = stage(arrays, ("out", "lse"), machine)
        tensors = ForwardTensors(
            *(there.views[name] for name in ("q", "k", "v", "out", "lse")),
            softmax_scale=np.float32(1 / math.sqrt(head_dim)),
            causal=causal,
            dtype=dtype,
            allocate=there.allocate,
        )
        config = tiles_for(RUNGS[rung], head_dim, machine.limits)
        launches = RUNGS[rung].plan_forward(tensors, config)
    return Prepared(rung, config, machine, launches, out, lse)


def import_torch() -> ModuleType:
    """torch with a GPU that it can use; ends the run where there is none."""
    try:
        import torch
    except ModuleNotFoundError:
        raise SystemExit("error: this benchmark needs PyTorch: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU, and torch finds none")
    return torch


def random_inputs(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: str = "float32"
) -> tuple:
    """Standard normal Q, K, V on the GPU."""
    torch = import_torch()
    torch.manual_seed(0)
    sizes = batch, seqlen, heads, head_dim
    kind = getattr(torch, dtype)
    return tuple(torch.randn(sizes, dtype=kind, device="cuda") for _ in range(3))


def gpu_machine() -> GpuMachine:
    """torch's current GPU and stream, on which kernels and events stand in one queue."""
    torch = import_torch()
    return GpuMachine(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)


def time_once(run: Callable[[], object]) -> float:
    """Milliseconds on the GPU, the host's part hidden behind a waiting kernel."""
    import torch

    for cycles in SLEEP_CYCLES:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        hidden = not start.query()
        end.synchronize()
        if hidden:
            return start.elapsed_time(end)
    raise SystemExit("error: the GPU has waited, and the host had not launched all the same")


def forward_flops(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> float:
    """Operations of the two matrix products, half of them if causal."""
    return 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)


def forward_record(
    name: str,
    problem: tuple[int, int, int, int],
    dtype: str,
    causal: bool,
    ms: list[float],
    verdict: Comparison,
) -> dict:
    """What the result files say of one contestant on (batch, heads, seqlen, head_dim)."""
    batch, heads, seqlen, head_dim = problem
    return {
        "name": name,
        "direction": "forward",
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "kv_heads": heads,
        "seqlen": seqlen,
        "seqlen_k": seqlen,
        "head_dim": head_dim,
        "causal": causal,
        **summary(ms, forward_flops(*problem, causal)),
        "max_error": verdict.error,
        "allowed_error": verdict.allowed,
    }


def backward_record(
    name: str,
    problem: tuple[int, int, int, int],
    dtype: str,
    causal: bool,
    ms: list[float],
    verdict: Comparison,
) -> dict:
    """What the result files say of one contestant's backward pass, in the same words."""
    flops = BACKWARD_OVER_FORWARD * forward_flops(*problem, causal)
    record = forward_record(name, problem, dtype, causal, ms, verdict)
    return record | {"direction": "backward", **summary(ms, flops)}


def summary(ms: list[float], flops: float) -> dict[str, float]:
    """What a record says of the times of one problem: median, smallest, largest, TFLOP/s."""
    median = statistics.median(ms)
    return {"ms": median, "ms_min": min(ms), "ms_max": max(ms), "tflops": flops / median / 1e9}


def nvidia_smi(*names: str) -> list[str] | None:
    """What nvidia-smi says of the first GPU, None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else None


def clocks() -> dict[str, str] | None:
    """The clocks and the power right now, None if nvidia-smi does not tell."""
    values = nvidia_smi(*CLOCKS)
    return dict(zip(CLOCKS, values, strict=False)) if values else None


def environment() -> dict:
    """The machine and the versions a result belongs to."""
    torch = import_torch()
    driver = nvidia_smi("driver_version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else None,
        "driver_cuda": ".".join(map(str, cuda.cudadrv.driver.driver.get_version())),
        "versions": {name: _version(name) for name in ("numba", "numba-cuda", "numpy", "torch")},
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def results_file(gpu: str, name: str) -> Path:
    """Where the results of a GPU are kept."""
    folder = gpu.lower().replace("nvidia ", "").replace(" ", "_")
    return Path(__file__).parent / "results" / folder / name
