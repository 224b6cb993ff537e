"""Rebuild a kernel's Python function so that what it calls has its simulated meaning.

Its globals and closure cells that are the `cuda` module, a Numba type, a device function or an
instruction are replaced, by identity and not by name, in a copy of the function. Of its code only
the float literals change: they become NumPy's float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from weakref import WeakKeyDictionary

import numpy as np
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher

from fa2_numba.device.instruction import Instruction
from fa2_numba.simulator.addresses import ADDRESS_FUNCTIONS
from fa2_numba.simulator.instructions import simulated
from fa2_numba.simulator.machine import CUDA
from fa2_numba.simulator.memory import plain
from fa2_numba.simulator.source import MARKER
from fa2_numba.simulator.values import (
    BUILTINS,
    LIBDEVICE,
    NUMBA_TYPES,
    NUMPY_INTEGERS,
    SIMULATED_MATH,
    scalar_value,
)

_PUBLIC_OPERATIONS = [name for name in dir(CUDA) if not name.startswith("_")]
_MEANING: dict[int, object] = {
    id(cuda): CUDA,
    id(math): SIMULATED_MATH,
    **{id(real): simulated for real, simulated in (NUMBA_TYPES | LIBDEVICE).items()},
    **{id(real): simulated for real, simulated in NUMPY_INTEGERS.items()},
    **{id(getattr(math, name)): function for name, function in vars(SIMULATED_MATH).items()},
}
for _name in _PUBLIC_OPERATIONS:
    if _name != "laneid" and hasattr(cuda, _name):
        _MEANING[id(getattr(cuda, _name))] = getattr(CUDA, _name)
for _space in ("shared", "local", "const", "atomic"):
    _real, _simulated = getattr(cuda, _space), getattr(CUDA, _space)
    for _name in dir(_simulated):
        if not _name.startswith("_"):
            _MEANING[id(getattr(_real, _name))] = getattr(_simulated, _name)


class Retargeting:
    """One way to rebuild kernels; `PLAIN` is that of a run that is not counted.

    meanings: what else stands for something, by identity; builtins: built-in functions that differ;
    hooks: further globals of every copy; code_of: the code a copy gets; called: wraps the copies of
    device functions.
    """

    def __init__(
        self,
        meanings: Mapping[int, object] = MappingProxyType({}),
        builtins: Mapping[str, object] = MappingProxyType({}),
        hooks: Mapping[str, object] = MappingProxyType({}),
        code_of: Callable[[FunctionType], CodeType] = attrgetter("__code__"),
        called: Callable[[Callable], Callable] = lambda function: function,
    ) -> None:
        self._hooks = dict(hooks)
        self._code_of = code_of
        self._meanings = _MEANING | dict(meanings)
        self._builtins = BUILTINS | dict(builtins)
        self._called = called
        self._copies: WeakKeyDictionary[FunctionType, FunctionType] = WeakKeyDictionary()

    def meaning(self, value: object) -> object:
        """What a global or closure variable of a kernel stands for in the simulator."""
        if id(value) in self._meanings:
            return self._meanings[id(value)]
        if isinstance(value, CUDADispatcher):
            return self._called(self.function(value.py_func))
        if isinstance(value, ModuleType):
            return SimulatedModule(value, self.meaning)
        if isinstance(value, np.ndarray):
            return plain(value)
        return _intrinsic_meaning(value) or scalar_value(value)

    def function(self, function: FunctionType) -> FunctionType:
        """A copy of `function` that runs in the simulator, and of the device functions it calls."""
        if function in self._copies:
            return self._copies[function]
        scope = {MARKER: True, "__builtins__": self._builtins} | self._hooks
        code = _with_float64_literals(self._code_of(function))
        cells = {name: CellType() for name in code.co_freevars}
        defaults = scalar_value(function.__defaults__)
        copy = FunctionType(code, scope, function.__name__, defaults, tuple(cells.values()))
        copy.__kwdefaults__ = function.__kwdefaults__
        self._copies[function] = copy
        for name in _names(code) & function.__globals__.keys():
            scope[name] = self.meaning(function.__globals__[name])
        originals = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, original in originals:
            cells[name].cell_contents = self.meaning(original.cell_contents)
        return copy


class SimulatedModule:
    """A module whose attributes have their simulated meaning (`tiles.load_tile`, `np.int32`)."""

    def __init__(self, module: ModuleType, meaning: Callable[[object], object]) -> None:
        self._module = module
        self._meaning = meaning

    def __getattr__(self, name: str) -> object:
        value = self._meaning(getattr(self._module, name))
        setattr(self, name, value)
        return value


PLAIN = Retargeting()


def _intrinsic_meaning(value: object) -> Callable | None:
    """What one of our own intrinsics stands for; None if `value` is no such thing."""
    what = getattr(value, "instruction", None)
    if isinstance(what, Instruction):
        return simulated(what)
    space = getattr(value, "address_space", None)
    if isinstance(space, str):
        return ADDRESS_FUNCTIONS[space]
    meaning = getattr(value, "simulated", None)
    return meaning if callable(meaning) else None


def _with_float64_literals(code: CodeType) -> CodeType:
    """A code object of its own also tells the shared arrays of two functions apart."""
    constants = (
        _with_float64_literals(constant)
        if isinstance(constant, CodeType)
        else scalar_value(constant)
        for constant in code.co_consts
    )
    return code.replace(co_consts=tuple(constants))


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
