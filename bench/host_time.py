"""What a call costs the host, in microseconds: `python -m bench.host_time` on a GPU.

`flash_attn_func` on arrays that are small enough for the GPU to keep up, so that the host never
waits. The parts of a call are seen from inside: while they are timed, the functions that part from
part begin with note the time, and the call is the product's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from bench import timing
from fa2_numba import flash_attn_func, interface
from fa2_numba.arrays import DTYPES
from fa2_numba.launch import GpuMachine, SimulatorMachine
from fa2_numba.testing import random_qkv

SHAPE = (1, 4, 128, 64)
"""batch, heads, seqlen, head_dim."""
DTYPE = "float16"
CALLS = 100
"""Calls between two synchronisations; their launches fit the driver's queue."""
ROUNDS = 30
WARM_UPS = 20
PARTS = ("describe_and_check", "allocate_outputs", "look_up_plan", "launch", "finish")


def microseconds(run: Callable[[], object], synchronize: Callable[[], None]) -> dict[str, float]:
    """Host time of a call: median and smallest of the rounds' means."""
    for _ in range(WARM_UPS):
        run()
    rounds = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            run()
        rounds.append((time.perf_counter_ns() - start) / CALLS / 1e3)
    synchronize()
    return {"us": statistics.median(rounds), "us_min": min(rounds)}


def parts(run: Callable[[], object], synchronize: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of each of the PARTS of a call that launches one kernel or several."""
    moments: list[int] = []
    with (
        _noted(interface, "_output", moments),
        _noted(interface, "_forward", moments),
        _noted(GpuMachine, "run", moments, after=True),
        _noted(SimulatorMachine, "run", moments, after=True),
    ):
        calls = [_moments_of(run, moments) for _ in range(CALLS)]
    synchronize()
    durations = np.diff(calls, axis=1) / 1e3
    return dict(zip(PARTS, np.median(durations, axis=0).tolist(), strict=True))


def _moments_of(run: Callable[[], object], moments: list[int]) -> list[int]:
    moments[:] = [time.perf_counter_ns()]
    run()
    return [*moments, time.perf_counter_ns()]


def _noted(
    owner: object, name: str, moments: list[int], after: bool = False
) -> AbstractContextManager:
    """A patch: `owner.name` notes when it begins, and if `after` when it is done."""
    original = getattr(owner, name)

    def noting(*arguments: object, **options: object) -> object:
        moments.append(time.perf_counter_ns())
        result = original(*arguments, **options)
        if after:
            moments.append(time.perf_counter_ns())
        return result

    return mock.patch.object(owner, name, noting)


def contestants() -> dict[str, tuple[Callable[[], object], Callable[[], None]]]:
    """Name -> a call, and how to wait for the GPU: CuPy arrays, torch tensors, torch's flash."""
    batch, heads, seqlen, head_dim = SHAPE
    host = random_qkv(batch, seqlen, seqlen, heads, heads, head_dim, DTYPES[DTYPE])
    found = {}
    try:
        import cupy
    except ImportError:
        print("no CuPy here")
    else:
        run = partial(flash_attn_func, *map(cupy.asarray, host))
        found["cupy"] = run, cupy.cuda.runtime.deviceSynchronize
    torch = timing.import_torch()
    tensors = [torch.from_numpy(x).cuda() for x in host]
    found["torch"] = partial(flash_attn_func, *tensors), torch.cuda.synchronize
    heads_first = [x.transpose(1, 2) for x in tensors]
    attention = torch.nn.functional.scaled_dot_product_attention
    found["torch_flash"] = partial(attention, *heads_first), torch.cuda.synchronize
    return found


def flash_in_torch() -> AbstractContextManager:
    """Makes torch's attention its FlashAttention-2; choosing is no part of a call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def measure(
    found: dict[str, tuple[Callable[[], object], Callable[[], None]]],
) -> dict[str, dict]:
    """Name -> host time of a call, and of its parts where the call is ours."""
    records = {}
    for name, (run, synchronize) in found.items():
        records[name] = microseconds(run, synchronize)
        if not name.startswith("torch_"):
            records[name]["parts_us"] = parts(run, synchronize)
    return records


def show(records: dict[str, dict]) -> None:
    """A line for each call, and one for each of its parts."""
    for name, record in records.items():
        print(f"{name:20} {record['us']:7.1f} us (at least {record['us_min']:.1f})")
        for part, us in record.get("parts_us", {}).items():
            print(f"  {part:18} {us:7.1f} us")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>/host_time.json")
    options = parser.parse_args(arguments)
    about = timing.environment()
    with flash_in_torch():
        records = measure(contestants())
    path = options.out or timing.results_file(about["gpu"], "host_time.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**about, "shape": SHAPE, "dtype": DTYPE, "calls": records}
    path.write_text(json.dumps(record, indent=1) + "\n")
    show(records)
    print(path)


if __name__ == "__main__":
    main()
