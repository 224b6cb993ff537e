"""Bringing arrays to the machine that will run on them: views where they are, copies where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from fa2_numba.arrays import DTYPES, Array, describe
from fa2_numba.launch import GpuMachine, SimulatorMachine

Shape = tuple[int, ...]


def host_workspace(shape: Shape, dtype: DTypeLike = np.float32) -> np.ndarray:
    """A new host array, its elements not set."""
    return np.empty(shape, dtype)


def device_workspace(shape: Shape, dtype: DTypeLike = np.float32) -> object:
    """A new array on the current GPU, its elements not set."""
    return cuda.device_array(shape, dtype)


@dataclass(frozen=True)
class Stage:
    """Arrays as kernels on one machine take them.

    views: by name. allocate(shape): a float32 workspace there. finish(): after the kernels, brings
    the outputs back to arrays that live elsewhere.
    """

    views: dict[str, object]
    allocate: Callable[[Shape], object]
    finish: Callable[[], None]


def stage(
    arrays: dict[str, Array], outputs: tuple[str, ...], machine: GpuMachine | SimulatorMachine
) -> Stage:
    """Bring `arrays`, of one library and device, to `machine`."""
    if isinstance(machine, SimulatorMachine):
        return _in_simulator(arrays, outputs)
    if next(iter(arrays.values())).device is None:
        return _copied_to_gpu(arrays, outputs)
    return _on_gpu(arrays, machine)


def _in_simulator(arrays: dict[str, Array], outputs: tuple[str, ...]) -> Stage:
    views = {name: array.host_view() for name, array in arrays.items()}

    def finish() -> None:
        for name in outputs:
            array = arrays[name]
            if array.device is not None:
                array.library.copy_from_host(array.value, views[name].view(DTYPES[array.dtype]))

    return Stage(views, host_workspace, finish)


def _copied_to_gpu(arrays: dict[str, Array], outputs: tuple[str, ...]) -> Stage:
    host = {name: array.host_view() for name, array in arrays.items()}
    views = {
        name: device_workspace(values.shape, values.dtype)
        if name in outputs
        else cuda.to_device(np.ascontiguousarray(values))
        for name, values in host.items()
    }

    def finish() -> None:
        for name in outputs:
            host[name][...] = views[name].copy_to_host()

    return Stage(views, device_workspace, finish)


def _on_gpu(arrays: dict[str, Array], machine: GpuMachine) -> Stage:
    views = {name: array.device_view() for name, array in arrays.items()}
    library = next(iter(arrays.values())).library

    def allocate(shape: Shape) -> object:
        workspace = library.empty(shape, "float32", machine.device)
        return describe("workspace", workspace).device_view()

    return Stage(views, allocate, lambda: None)
