"""Bringing arrays to the machine that will run on them: views where they are, copies where not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numpy.typing import DTypeLike

from fa2_numba.arrays import (
    ALIGNMENT,
    DTYPES,
    KERNEL_DTYPES,
    Array,
    NumbaLibrary,
    NumpyLibrary,
    of_library,
)
from fa2_numba.launch import (
    MADE_FOR_LAUNCH,
    GpuArray,
    GpuLaunch,
    GpuMachine,
    KernelLaunch,
    SimulatorMachine,
)
from fa2_numba.tensor_maps import TensorMap, TileCounter

Shape = tuple[int, ...]
Allocate = Callable[[Shape], object]
Planner = Callable[[Sequence[object], Allocate], list[KernelLaunch]]
"""Plans the launches for arrays as kernels take them, with workspaces of float32."""

STAND_IN_SPACING = 1 << 48


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
    copies = {
        name: device_workspace(values.shape, values.dtype)
        if name in outputs
        else cuda.to_device(np.ascontiguousarray(values))
        for name, values in host.items()
    }

    def finish() -> None:
        for name in outputs:
            host[name][...] = copies[name].copy_to_host()

    views = {name: gpu_view(copy) for name, copy in copies.items()}
    return Stage(views, lambda shape: gpu_view(device_workspace(shape)), finish)


def gpu_view(value: DeviceNDArray) -> GpuArray:
    """A Numba device array as kernels take it."""
    shape, strides, _, _, address = NumbaLibrary.layout(value)
    return GpuArray(address, shape, strides, value.dtype, owner=value)


def _on_gpu(arrays: dict[str, Array], machine: GpuMachine) -> Stage:
    views = {name: array.gpu_view() for name, array in arrays.items()}
    library = next(iter(arrays.values())).library
    return Stage(views, partial(gpu_workspace, library, machine.device), lambda: None)


def gpu_workspace(library: type[NumpyLibrary], device: int, shape: Shape) -> GpuArray:
    """A new float32 array of a library on its GPU, its elements not set."""
    workspace = library.empty(shape, "float32", device)
    view = of_library("workspace", workspace, library).gpu_view()
    if view.address % ALIGNMENT:
        raise MemoryError(f"workspace at {view.address:#x}: must be at a multiple of {ALIGNMENT}")
    return view


class GpuPlan:
    """Launches on one GPU for arrays of given layouts, wherever these lie.

    They are planned for stand-ins, at addresses that no array has. So nothing in them can depend on
    an array but by its layout, and every address among their arguments tells whose it is: launches
    are given arrays and workspaces whole. A workspace lies at a multiple of `ALIGNMENT`. Tensor
    maps and tile counters are looked up in every run, behind all arrays.
    """

    def __init__(self, layouts: Sequence[tuple], plan: Planner, machine: GpuMachine) -> None:
        self._stand_ins: dict[int, int] = {}
        self._workspaces: list[Shape] = []
        self._made: list[tuple[TensorMap | TileCounter, int | None]] = []
        views = [
            self._stand_in(shape, strides, KERNEL_DTYPES[dtype], offset)
            for _, shape, strides, dtype, _, offset in layouts
        ]
        planned = [
            (launch, machine.load(launch, elsewhere=True))
            for launch in plan(views, self._workspace)
        ]
        self._launches = [(loaded, self._places(launch, loaded)) for launch, loaded in planned]

    def _stand_in(self, shape: Shape, strides: Shape, dtype: np.dtype, offset: int) -> GpuArray:
        number = len(self._stand_ins)
        address = STAND_IN_SPACING * (number + 1) + offset
        self._stand_ins[address] = number
        return GpuArray(address, shape, strides, dtype, owner=None)

    def _workspace(self, shape: Shape) -> GpuArray:
        self._workspaces.append(shape)
        dtype = np.dtype(np.float32)
        strides = tuple(
            dtype.itemsize * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)
        )
        return self._stand_in(shape, strides, dtype, 0)

    def _places(self, launch: KernelLaunch, loaded: GpuLaunch) -> tuple[tuple[int, int], ...]:
        """Where addresses lie among the parameters, and the number of the array each belongs to."""
        arguments = zip(loaded.places, launch.arguments, strict=True)
        return tuple(
            (word, self._number(argument)) for word, argument in arguments if word is not None
        )

    def _number(self, argument: object) -> int:
        if not isinstance(argument, MADE_FOR_LAUNCH):
            return self._stand_ins[argument.address]
        self._made.append((argument, self._stand_ins.get(argument.address)))
        return len(self._stand_ins) + len(self._made) - 1

    def run(
        self, machine: GpuMachine, arrays: Sequence[Array], allocate: Callable[[Shape], GpuArray]
    ) -> None:
        """Queue the launches for arrays of these layouts; call it inside `activate()`."""
        everything = [*arrays, *map(allocate, self._workspaces)]
        addresses = [array.address for array in everything]
        for made, number in self._made:
            array = None if number is None else addresses[number]
            addresses.append(machine.place(made, array))
        machine.run([launch.moved(places, addresses) for launch, places in self._launches])
