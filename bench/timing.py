"""What the scripts of this folder share: a rung ready to run, a time, the machine's description.

torch is imported where it is used, so that all the rest works, and is tested, without a GPU.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType

import numpy as np
from numba import cuda

from fa2_numba.arrays import describe
from fa2_numba.config import TileConfig
from fa2_numba.ladder import RUNGS, tiles_for
from fa2_numba.launch import ForwardTensors, GpuMachine, KernelLaunch, SimulatorMachine
from fa2_numba.staging import stage

SLEEP_CYCLES = (2_000_000, 20_000_000)
"""How long the GPU waits for the host's launches, about a millisecond; then once more, longer."""
FLUSH_BYTES = 2**28
"""Written before each timed run, several times what an L2 cache holds."""
WARM_UPS = 3
ROUNDS = 9
SLOW_MS, SLOW_ROUNDS = 20.0, 5
"""What takes longer is timed less often, without warm-ups."""
HOST_ROUNDS = 5
MATMUL_SIZE = 8192
VERSIONS = ("numba", "numba-cuda", "numpy", "torch", "cupy")
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


def device() -> str:
    """Where arrays are made."""
    return "cuda"


def compute_capability() -> tuple[int, int]:
    """Of torch's current GPU."""
    return import_torch().cuda.get_device_capability()


def synchronize() -> None:
    """Wait until the GPU has done all it was given."""
    import_torch().cuda.synchronize()


def free_memory() -> None:
    """Give back what torch and CuPy keep, so that each finds what the other has freed."""
    import_torch().cuda.empty_cache()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()


def gpu_machine() -> GpuMachine:
    """torch's current GPU and stream, on which kernels and events stand in one queue."""
    torch = import_torch()
    return GpuMachine(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)


@cache
def _flushed() -> object:
    torch = import_torch()
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def time_once(run: Callable[[], object]) -> float:
    """Milliseconds on the GPU, its L2 cache without the inputs, the host's part hidden.

    The GPU first writes other memory, then waits; by the time it has waited the host has launched.
    """
    import torch

    for cycles in SLEEP_CYCLES:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flushed().zero_()
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        hidden = not start.query()
        end.synchronize()
        if hidden:
            return start.elapsed_time(end)
    raise SystemExit("error: the GPU has waited, and the host had not launched all the same")


def host_microseconds(run: Callable[[], object]) -> float:
    """What a call costs the host, the median; the GPU has something else to do meanwhile."""
    import torch

    times = []
    for _ in range(HOST_ROUNDS):
        torch.cuda._sleep(SLEEP_CYCLES[0])
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
    return statistics.median(times)


def take_times(
    runs: dict[str, Callable[[], object]],
    time_once: Callable[[Callable[[], object]], float],
    slow_ms: float = SLOW_MS,
    slow_rounds: int = SLOW_ROUNDS,
) -> dict[str, list[float]]:
    """Milliseconds of each: in turns, so that drift hits all alike; slow ones less often."""
    times = {name: [time_once(run)] for name, run in runs.items()}
    for name, run in runs.items():
        if times[name][0] < slow_ms:
            for _ in range(WARM_UPS):
                run()
            times[name] = []
    for number in range(ROUNDS):
        for name, run in runs.items():
            slow = times[name] and times[name][0] >= slow_ms
            if not slow or number < slow_rounds - 1:
                times[name].append(time_once(run))
    return times


def matmul_tflops(dtypes: Sequence[str]) -> dict[str, float]:
    """TFLOP/s of torch's product of two large square matrices, dtype by dtype."""
    return {dtype: statistics.median(matmul_rates(dtype)) for dtype in dtypes}


def matmul_rates(dtype: str) -> list[float]:
    """The same of one dtype, run by run."""
    torch = import_torch()
    sizes = MATMUL_SIZE, MATMUL_SIZE
    a, b, out = (torch.randn(sizes, dtype=getattr(torch, dtype), device="cuda") for _ in range(3))
    ms = take_times({"matmul": partial(torch.matmul, a, b, out=out)}, time_once)["matmul"]
    return [2 * MATMUL_SIZE**3 / 1e9 / one for one in ms]


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
        "versions": {name: _version(name) for name in VERSIONS},
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    """Of a distribution, or of the one that brings a module of that name, as CuPy's do."""
    names = packages_distributions().get(package, [package])
    try:
        return version(names[0])
    except PackageNotFoundError:
        return None


def results_file(gpu: str, name: str) -> Path:
    """Where the results of a GPU are kept."""
    folder = gpu.lower().replace("nvidia ", "").replace(" ", "_")
    return Path(__file__).parent / "results" / folder / name
