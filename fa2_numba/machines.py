"""Where the kernels of a call run: the choice of a machine, what it refuses, and the run itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from numba import cuda

from fa2_numba.arrays import Array
from fa2_numba.checks import REMEMBERED, check_flag
from fa2_numba.config import TileConfig
from fa2_numba.constants import MAX_GRID_X, MAX_GRID_YZ
from fa2_numba.errors import ArgumentError
from fa2_numba.launch import (
    BackwardTensors,
    ForwardTensors,
    GpuMachine,
    KernelLaunch,
    SimulatorMachine,
    gpu_available,
)
from fa2_numba.simulator import Report, RunTooLongError, Simulator
from fa2_numba.staging import Allocate, GpuPlan, gpu_workspace, stage
from fa2_numba.tensor_core_config import TensorCoreConfig

Machine = GpuMachine | SimulatorMachine
Plan = Callable[[Machine, Sequence[object], Allocate], list[KernelLaunch]]
"""Plans the launches for arrays as kernels on a machine take them."""

SIMULATED_SECONDS_PER_MULTIPLY_ADD = {
    TileConfig: {True: 4e-6, False: 1e-6},
    TensorCoreConfig: {True: 1.5e-6, False: 1e-6},
}
"""What a simulated multiply-add of a product costs, all in, by the kind of tiles and with the
checks on and off. A thread does one at a time, a tensor-core instruction 1024 or 2048."""

COUNTING_FACTOR = 3
"""How many times longer a run takes at most that is counted."""


def choose_machine(machine: str | Simulator, q: Array, report: bool) -> Machine:
    """The machine that the argument `machine` means for arrays that are where q is."""
    check_flag("report", report)
    if isinstance(machine, Simulator):
        return SimulatorMachine(replace(machine, counts=bool(report)))
    if not isinstance(machine, str) or machine not in ("auto", "gpu", "simulator"):
        raise ArgumentError(
            f"machine={machine!r}: must be 'auto', 'gpu', 'simulator' or a Simulator"
        )
    on_gpu = q.device is not None or (machine != "simulator" and gpu_available())
    if machine == "gpu" and not on_gpu:
        raise ArgumentError("machine='gpu': no GPU here; `python -m fa2_numba doctor` says why")
    if machine == "simulator" or not on_gpu:
        return SimulatorMachine(Simulator(counts=bool(report)))
    if report:
        raise ArgumentError(
            f"report=True, machine={machine!r}: would run on a GPU; must be machine='simulator' or "
            "a Simulator, which can count"
        )
    if q.device is None:
        # Host arrays travel on the default stream; their library may not even know of GPUs.
        return GpuMachine(cuda.get_current_device().id)
    return _gpu_machine(q.device, q.library.stream(q.device))


@lru_cache(REMEMBERED)
def _gpu_machine(device: int, stream: int) -> GpuMachine:
    return GpuMachine(device, stream)


def run_planned(
    machine: Machine,
    arrays: Sequence[Array],
    outputs: tuple[str, ...],
    plan: Plan,
    remembered: Callable[[], GpuPlan],
) -> list[Report]:
    """Run on `machine` what `plan` plans for `arrays`; returns its reports.

    outputs: the names of those that are written; remembered(): the same plan for arrays that lie on
    the GPU already.
    """
    library, device = arrays[0].library, arrays[0].device
    with machine.activate():
        if device is not None and not isinstance(machine, SimulatorMachine):
            remembered().run(machine, arrays, partial(gpu_workspace, library, device))
            return []
        there = stage({array.name: array for array in arrays}, outputs, machine)
        views = [there.views[array.name] for array in arrays]
        reports = machine.run(plan(machine, views, there.allocate))
        there.finish()
        return reports


def check_grids(
    launches: list[KernelLaunch], rung: str, tensors: ForwardTensors | BackwardTensors
) -> None:
    """Refuse grids that CUDA cannot have."""
    for launch in launches:
        if launch.grid[0] > MAX_GRID_X or max((1, *launch.grid[1:])) > MAX_GRID_YZ:
            raise ArgumentError(
                f"q of shape {tensors.Q.shape}, k of shape {tensors.K.shape}: rung {rung} "
                f"would need a grid of {launch.grid} blocks; CUDA allows {MAX_GRID_X} x "
                f"{MAX_GRID_YZ} x {MAX_GRID_YZ}"
            )


def refuse_hours(
    simulator: Simulator,
    tensors: ForwardTensors | BackwardTensors,
    config: object,
    products: int,
) -> None:
    """Refuse to simulate what would take too long: so many products of the size of Q K^T."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    # Threads compute whole tiles, also where those reach past the end.
    rows = math.ceil(seqlen_q / config.block_m) * config.block_m
    cols = math.ceil(tensors.K.shape[1] / config.block_n) * config.block_n
    kind = TileConfig if isinstance(config, TileConfig) else TensorCoreConfig
    depth = config.head_dim if kind is TileConfig else config.padded_dim
    # A rung that skips hidden tiles needs about half of it when causal.
    multiply_adds = products * batch * heads * rows * cols * depth
    seconds = SIMULATED_SECONDS_PER_MULTIPLY_ADD[kind][simulator.checks]
    estimate = multiply_adds * seconds * (COUNTING_FACTOR if simulator.counts else 1)
    if simulator.max_seconds is not None and estimate > simulator.max_seconds:
        raise RunTooLongError(
            f"q of shape {tensors.Q.shape}, k of shape {tensors.K.shape} would take about "
            f"{estimate:.0f} s in the simulator; the limit is {simulator.max_seconds:g} s. Use a "
            "smaller problem, or machine=Simulator(max_seconds=None) to run it all the same"
        )
