"""Which machines the tests run on: always the simulator, and the GPU where there is one."""

import gc
import importlib
import inspect
import os
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import Simulator, arrays, interface, ladder, staging
from fa2_numba.config import HEAD_DIM_STEP, TileConfig
from fa2_numba.hopper_config import HopperConfig, choose_hopper_tiles
from fa2_numba.launch import BackwardTensors, ForwardTensors, SimulatorMachine, gpu_available
from fa2_numba.reference import attention_forward
from fa2_numba.tensor_core_config import (
    TensorCoreConfig,
    choose_sliced_k_tiles,
    choose_split_q_tiles,
)
from fa2_numba.testing import poisoned

# Tests compile what they run: what an earlier run left on the disk decides nothing.
os.environ["FA2_NUMBA_CACHE_DIR"] = "0"

HAS_GPU = gpu_available()
NO_GPU = "no NVIDIA GPU that Numba can use"

# All checks, and ready threads in an order that no kernel may depend on.
SIMULATOR = Simulator(seed=2, progress=False)
FAST_SIMULATOR = Simulator(checks=False, progress=False)


def pytest_report_header():
    """Say where kernels will run."""
    if not HAS_GPU:
        return f"kernels run on: the simulator (GPU tests are skipped: {NO_GPU})"
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name if isinstance(device.name, str) else device.name.decode()
    return f"kernels run on: the simulator; {name}, compute capability {device.compute_capability}"


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish():
    """Python's collector need not look at the tests again and again: a tenth of the time."""
    gc.collect()
    gc.freeze()


MACHINES = [
    pytest.param(SIMULATOR, id="simulator"),
    pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch):
    """What to pass as `machine=`: the simulator with all checks, then the GPU."""
    return with_small_tiles(request.param, monkeypatch)


@pytest.fixture(
    params=[
        pytest.param(FAST_SIMULATOR, id="simulator"),
        pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
    ]
)
def fast_machine(request, monkeypatch):
    """Like `machine`, with the simulator's checks off: for the many shapes after the first."""
    return with_small_tiles(request.param, monkeypatch)


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CUDA_CORE_RUNGS = ladder.cuda_core_rungs()
HOPPER_RUNGS = [name for name, rung in ladder.RUNGS.items() if rung.architecture]
"""Those of one architecture, which read no array but those that TMA can read: `test_hopper`."""
PORTABLE_RUNGS = [name for name in ladder.RUNGS if name not in HOPPER_RUNGS]
TENSOR_CORE_RUNGS = [name for name in PORTABLE_RUNGS if name not in CUDA_CORE_RUNGS]


def kinds(in_sweep=()):
    """Decorator: every CUDA-core rung in float32, every tensor-core rung in its two dtypes.

    in_sweep: names of dtypes that only the sweep runs.
    """
    pairs = [(name, "float32") for name in CUDA_CORE_RUNGS]
    pairs += [(name, dtype) for name in TENSOR_CORE_RUNGS for dtype in ("float16", "bfloat16")]
    return pytest.mark.parametrize(
        ("rung", "dtype"),
        [
            pytest.param(
                name,
                DTYPES[dtype],
                id=f"{name}-{dtype}",
                marks=pytest.mark.sweep if dtype in in_sweep else (),
            )
            for name, dtype in pairs
        ],
    )


def all_kinds(dtypes=tuple(DTYPES)):
    """Decorator: every rung for arrays of any layout in each of `dtypes` that it takes."""
    return pytest.mark.parametrize(
        ("rung", "dtype"),
        [
            pytest.param(name, DTYPES[dtype], id=f"{name}-{dtype}")
            for name in PORTABLE_RUNGS
            for dtype in dtypes
            if dtype in ladder.RUNGS[name].dtypes
        ],
    )


def run_rung(plan_forward, qkv, config, simulator, causal):
    """Run a rung's launches on q, k, v: out, lse (NaN before), the reports."""
    batch, seqlen_q, heads, head_dim = qkv[0].shape
    dtype = qkv[0].dtype
    out, lse = poisoned(qkv[0].shape, dtype), poisoned((batch, heads, seqlen_q), np.float32)
    arrays = [x.view(np.uint16) if dtype == ml_dtypes.bfloat16 else x for x in (*qkv, out)]
    tensors = ForwardTensors(
        *(*arrays, lse),
        np.float32(head_dim**-0.5),
        causal,
        dtype.name,
        lambda shape: poisoned(shape, np.float32),
    )
    return out, lse, SimulatorMachine(simulator).run(plan_forward(tensors, config))


def run_backward(
    plan_backward,
    qkv,
    dout,
    config,
    simulator,
    causal,
    deterministic=False,
    softmax_scale=None,
):
    """Run a rung's backward launches: dq, dk, dv (NaN before), the reports.

    out and lse, which a forward pass would have left, are exact ones, rounded.
    """
    scale = qkv[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dtype = qkv[0].dtype
    out, lse = attention_forward(*qkv, causal=causal, softmax_scale=scale)
    q, k, v, out, dout, *gradients = (
        x.view(np.uint16) if dtype == ml_dtypes.bfloat16 else x
        for x in (*qkv, out.astype(dtype), dout, *(poisoned(x.shape, dtype) for x in qkv))
    )
    tensors = BackwardTensors(
        *(q, k, v, out, lse.astype(np.float32), dout, *gradients),
        np.float32(scale),
        causal,
        deterministic,
        dtype.name,
        lambda shape: poisoned(shape, np.float32),
    )
    reports = SimulatorMachine(simulator).run(plan_backward(tensors, config))
    return *(x.view(dtype) for x in gradients), reports


def mutated(monkeypatch, modules, where, old, new, nth=0, count=1):
    """The last of `modules`, with the nth of `count` pieces `old` of the module `where` replaced.

    Each of them is made anew, behind those it imports.
    """
    assert where in modules
    for name in modules:
        original = importlib.import_module(name)
        source = inspect.getsource(original)
        if name == where:
            pieces = source.split(old)
            assert len(pieces) == count + 1
            source = old.join(pieces[: nth + 1]) + new + old.join(pieces[nth + 1 :])
        copy = types.ModuleType(name)
        copy.__file__ = original.__file__
        exec(compile(source, original.__file__, "exec"), vars(copy))
        monkeypatch.setitem(sys.modules, name, copy)
    return copy


def with_small_tiles(machine, monkeypatch):
    """Give the simulator small tiles, so that small shapes have several of them.

    A GPU keeps the tiles of the product.
    """
    if machine != "gpu":
        monkeypatch.setattr(interface, "tiles_for", small_tiles)
    return machine


SMALL_TILES = {
    ladder.cuda_core_tiles: lambda head_dim: TileConfig(
        -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, 16, 16, 4
    ),
    choose_split_q_tiles: lambda head_dim: TensorCoreConfig(head_dim, 32, 16, 2),
    choose_sliced_k_tiles: lambda head_dim: TensorCoreConfig(head_dim, 16, 32, 2, sliced_k=True),
    choose_hopper_tiles: lambda head_dim: HopperConfig(head_dim, 16, 2, 2, 1, 40, 232),
}
"""`Rung.choose_tiles` -> the smallest tiles of its kind for a head dim."""


def small_tiles(rung, head_dim, limits):
    """In place of `ladder.tiles_for`."""
    return SMALL_TILES[rung.choose_tiles](head_dim)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Outputs and workspaces hold NaN before a kernel runs: a skipped element is seen."""

    for library in (
        arrays.NumpyLibrary,
        arrays.CupyLibrary,
        arrays.NumbaLibrary,
        arrays.TorchLibrary,
    ):
        for name in ("empty", "empty_like"):
            make = getattr(library, name)
            monkeypatch.setattr(library, name, staticmethod(_filled_with_nan(library, make)))
    monkeypatch.setattr(staging, "host_workspace", _nan_bits)
    monkeypatch.setattr(staging, "device_workspace", _nan_bits_on_gpu)


def _filled_with_nan(library, make):
    def make_and_fill(*arguments):
        array = make(*arguments)
        library.fill(array, np.nan)
        return array

    return make_and_fill


def _nan_bits(shape, dtype=np.float32):
    # A kernel sees bfloat16 as its bits, and all ones are a NaN.
    return np.full(shape, np.iinfo(dtype).max if dtype == np.uint16 else np.nan, dtype)


def _nan_bits_on_gpu(shape, dtype=np.float32):
    from numba import cuda

    return cuda.to_device(_nan_bits(shape, dtype))
