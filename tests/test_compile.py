"""Every kernel compiles for every architecture without a GPU, within its resources.

NVVM writes the PTX, ptxas assembles it and reports registers, spills and shared memory.
"""

import itertools
import re
import shutil
import subprocess
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from fa2_numba import RUNGS
from fa2_numba.config import choose_tiles
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.launch import ForwardTensors, signature

ARCHITECTURES = {
    "sm_75": (7, 5),
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90a": (9, 0, "a"),
    "sm_100": (10, 0),
    "sm_120": (12, 0),
}
KERNEL_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
MAX_REGISTERS = 255


def ptxas():
    """The assembler of the nvidia-cuda-nvcc wheel, or of an installed toolkit."""
    spec = util.find_spec("nvidia")
    wheels = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
    found = [path for folder in wheels for path in folder.glob("cu*/bin/ptxas")]
    return str(found[0]) if found else shutil.which("ptxas")


def launches(rung, dtype, head_dim, architecture, causal):
    """What a rung launches on a small problem, tiled for the architecture's shared memory."""
    x = np.zeros((1, 1, 1, head_dim), KERNEL_DTYPES[dtype])
    lse = np.zeros((1, 1, 1), np.float32)
    tensors = ForwardTensors(
        x, x, x, x, lse, np.float32(1), causal, dtype, lambda s: np.zeros(s, np.float32)
    )
    limit = SHARED_BYTES_PER_BLOCK[ARCHITECTURES[architecture][:2]]
    return limit, RUNGS[rung].plan_forward(tensors, choose_tiles(head_dim, limit))


def assemble(ptx, architecture, folder):
    """Registers, spilled bytes and stack bytes that ptxas reports."""
    assembler = ptxas()
    if assembler is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [assembler, f"-arch={architecture}", "-v", str(source), "-o", str(folder / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr).group(1))
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    ).groups()
    return registers, int(stores) + int(loads), int(stack)


def compiled_cases():
    """Every dtype, head dim and mask on Hopper, one of each on every other architecture.

    On Hopper the default run compiles every dtype and head dim under one of the two masks.
    """
    hopper = itertools.product(KERNEL_DTYPES, (16, 64, 128, 256), (False, True))
    for number, case in enumerate(hopper):
        with_other_mask = (number // 2 + number) % 2 == 1
        yield "sm_90a", *case, with_other_mask
    for architecture in ARCHITECTURES:
        if architecture != "sm_90a":
            yield architecture, "float16", 64, True, False
            yield architecture, "bfloat16", 128, False, False
            yield architecture, "float32", 256, True, False


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim", "causal"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-d{case[2]}" + ("-causal" if case[3] else ""),
            marks=pytest.mark.sweep if in_sweep else (),
        )
        for *case, in_sweep in compiled_cases()
    ],
)
@pytest.mark.parametrize("rung", RUNGS)
def test_kernels_fit_the_architecture(rung, architecture, dtype, head_dim, causal, tmp_path):
    limit, planned = launches(rung, dtype, head_dim, architecture, causal)
    for launch in planned:
        name = launch.kernel.py_func.__name__
        ptx, _ = cuda.compile_ptx(
            launch.kernel.py_func, signature(launch.arguments), cc=ARCHITECTURES[architecture]
        )
        assert launch.shared_bytes <= limit
        assert ".f64" not in ptx, f"{name} computes in float64"
        assert ".local" not in ptx, f"{name} keeps an array in local memory"
        registers, spilled, stack = assemble(ptx, architecture, tmp_path)
        assert (spilled, stack) == (0, 0), f"{name} spills {spilled} bytes, stack {stack}"
        assert registers <= MAX_REGISTERS
        assert registers * launch.threads <= 65_536


def test_a_float64_constant_would_be_seen():
    def kernel(x):
        x[0] = x[0] * 0.1

    ptx, _ = cuda.compile_ptx(kernel, signature((np.zeros(1, np.float32),)), cc=(9, 0))
    assert ".f64" in ptx


def test_an_array_in_local_memory_would_be_seen():
    def kernel(x, i):
        a = cuda.local.array(8, np.float32)
        for j in range(8):
            a[j] = x[j]
        x[0] = a[i]

    arguments = (np.zeros(8, np.float32), np.int32(3))
    ptx, _ = cuda.compile_ptx(kernel, signature(arguments), cc=(9, 0))
    assert ".local" in ptx
