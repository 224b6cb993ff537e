"""Which machines the tests run on: always the simulator, and the GPU where there is one."""

import numpy as np
import pytest

from fa2_numba import Simulator, arrays, interface, staging
from fa2_numba.config import HEAD_DIM_STEP, TileConfig
from fa2_numba.launch import ForwardTensors, SimulatorMachine, gpu_available
from fa2_numba.testing import poisoned

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


def run_rung(plan_forward, qkv, config, simulator, causal):
    """Run a rung's launches on float32, float16 q, k, v: out, lse (NaN before), the reports."""
    q, k, v = qkv
    batch, seqlen_q, heads, _ = q.shape
    out, lse = poisoned(q.shape, q.dtype), poisoned((batch, heads, seqlen_q), np.float32)
    tensors = ForwardTensors(
        *(q, k, v, out, lse),
        np.float32(q.shape[-1] ** -0.5),
        causal,
        q.dtype.name,
        lambda shape: poisoned(shape, np.float32),
    )
    return out, lse, SimulatorMachine(simulator).run(plan_forward(tensors, config))


def with_small_tiles(machine, monkeypatch):
    """Give the simulator the smallest tiles of 4 warps, so that small shapes have several of them.

    A GPU keeps the tiles of the product.
    """
    if machine != "gpu":
        monkeypatch.setattr(interface, "choose_tiles", small_tiles)
    return machine


def small_tiles(head_dim, shared_bytes_limit):
    """16 x 16 tiles."""
    return TileConfig(-(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, 16, 16, 4)


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
