"""Every kernel compiles for every architecture without a GPU, within its resources.

NVVM writes the PTX, ptxas assembles it and reports registers, spills and shared memory.
"""

import itertools
import re
import shutil
import subprocess
from functools import lru_cache
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda import compiler

from fa2_numba import RUNGS
from fa2_numba.config import DeviceLimits
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.errors import ArgumentError
from fa2_numba.launch import BackwardTensors, ForwardTensors, signature
from fa2_numba.lessons.occupancy import blocks_per_multiprocessor

from .conftest import CUDA_CORE_RUNGS, TENSOR_CORE_RUNGS

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
MOST_SPILLED = {("fa2_tensor_core", 128): 120, ("fa1_tensor_core", 256): 16}
"""(Rung, head dim) -> bytes that it may store to and load from local memory, of each thread.

All 255 registers are full there; what gives way is m, l and addresses, used once a tile.
"""
BACKWARD_SPILLED = 700
"""The same of `fa2_split_q`'s backward pass with head dim 256 on sm_75, and of no other: dQ, dK and
dV alone take 128 registers of a thread there."""
TENSOR_CORE_BACKWARD_SPILLED = {
    ("sm_80", 256): 32,
    ("sm_90a", 256): 8,
    ("sm_100", 256): 24,
}
"""(Architecture, head dim) -> the same of `fa2_tensor_core`'s backward pass, with a causal mask."""


def ptxas():
    """The assembler of the nvidia-cuda-nvcc wheel, or of an installed toolkit."""
    spec = util.find_spec("nvidia")
    wheels = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
    found = [path for folder in wheels for path in folder.glob("cu*/bin/ptxas")]
    return str(found[0]) if found else shutil.which("ptxas")


def limits_of(architecture):
    capability = ARCHITECTURES[architecture][:2]
    return DeviceLimits(capability, SHARED_BYTES_PER_BLOCK[capability])


def one_row(dtype, head_dim, offset):
    """An array with one row, so many elements behind a multiple of 16 bytes."""
    room = np.zeros(head_dim + 64, KERNEL_DTYPES[dtype])
    start = -room.__array_interface__["data"][0] % 16 // room.itemsize + offset
    return room[start : start + head_dim].reshape(1, 1, 1, head_dim)


def launches(rung, dtype, head_dim, architecture, causal, offset=0):
    """The architecture's shared memory, and what a rung launches on a small problem, tiled for it.

    offset: how many elements the arrays begin behind a multiple of 16 bytes.
    """
    x, lse = one_row(dtype, head_dim, offset), np.zeros((1, 1, 1), np.float32)
    tensors = ForwardTensors(
        x, x, x, x, lse, np.float32(1), causal, dtype, lambda s: np.zeros(s, np.float32)
    )
    limits = limits_of(architecture)
    config = RUNGS[rung].choose_tiles(head_dim, limits)
    return limits.shared_bytes_per_block, RUNGS[rung].plan_forward(tensors, config)


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
    # ptxas says so where it makes `wgmma` wait for each other.
    assert "(C75" not in done.stderr, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr).group(1))
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    ).groups()
    return registers, int(stores) + int(loads), int(stack)


TWINS = "fa2_fewer_flops", "fa2_seq_parallel"
"""Rungs that differ in where a block finds its query tiles."""


def cuda_core_cases():
    """Every dtype, head dim and mask on Hopper, one of each elsewhere; most of it in the sweep.

    The default run has every architecture, dtype, head dim and mask. Twins share Hopper's cases:
    one has the mask that the other has not. Architectures come last: see `for_all`.
    """
    everywhere = {("float16", 64, True), ("bfloat16", 128, False), ("float32", 256, True)}
    default = {("float32", 16, False), *everywhere}
    cases = itertools.product(KERNEL_DTYPES, (16, 64, 128, 256), (False, True))
    for (number, case), rung in itertools.product(enumerate(cases), CUDA_CORE_RUNGS):
        is_twins = rung in TWINS and rung != TWINS[(number + number // 4) % 2]
        if is_twins and case not in everywhere:
            continue
        for architecture in ARCHITECTURES if case in everywhere else ("sm_90a",):
            on_others = case[0] == "float16" and rung not in TWINS
            chosen = case in default and (architecture == "sm_90a" or on_others) and not is_twins
            marks = () if chosen else pytest.mark.sweep
            name = f"{rung}-{case_id(architecture, *case)}"
            yield pytest.param(rung, architecture, *case, id=name, marks=marks)


def tensor_core_cases():
    """Both dtypes, each head dim and mask on Hopper, some elsewhere; most of it in the sweep.

    Some head dims have one dtype for each mask. Last of a case: the bytes by which arrays miss a
    multiple of 16.
    """
    default = {("bfloat16", 64, True), ("float16", 128, False)}
    dims = (16, 64, 96, 128, 192, 256)
    for case in itertools.product(("float16", "bfloat16"), dims, (False, True)):
        dtype, head_dim, causal = case
        if head_dim in (64, 128, 256) or causal == (dtype == "bfloat16"):
            yield "sm_90a", *case, 0, case not in default
    yield "sm_90a", "float16", 40, True, 2, False
    yield "sm_90a", "bfloat16", 128, False, 2, True
    yield "sm_75", "float16", 64, True, 0, False
    yield "sm_75", "float16", 40, False, 2, True
    yield "sm_75", "float16", 128, False, 0, True
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        yield architecture, "bfloat16", 64, False, 0, True
        yield architecture, "float16", 128, True, 0, True


def case_id(architecture, dtype, head_dim, causal, offset=0):
    return f"{architecture}-{dtype}-d{head_dim}" + "-causal" * causal + "-unaligned" * (offset > 0)


def compile_cases(cases):
    """Those of one kernel, on many architectures, one behind the other: see `for_all`."""
    cases = sorted(cases, key=lambda case: case[1:])
    marked = ((case[:-1], pytest.mark.sweep if case[-1] else ()) for case in cases)
    return [pytest.param(*case, id=case_id(*case), marks=marks) for case, marks in marked]


@pytest.mark.parametrize(
    ("rung", "architecture", "dtype", "head_dim", "causal"), list(cuda_core_cases())
)
def test_kernels_fit_the_architecture(rung, architecture, dtype, head_dim, causal, tmp_path):
    limit, planned = launches(rung, dtype, head_dim, architecture, causal)
    for launch in planned:
        assert launch.shared_bytes <= limit
        assert check_kernel(launch, architecture, tmp_path) == 0


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim", "causal", "offset"), compile_cases(tensor_core_cases())
)
@pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
def test_tensor_core_kernels_fit_the_architecture(
    rung, architecture, dtype, head_dim, causal, offset, tmp_path
):
    limit, (launch,) = launches(rung, dtype, head_dim, architecture, causal, offset // 2)
    assert launch.shared_bytes <= limit
    spilled = check_kernel(launch, architecture, tmp_path)
    assert spilled <= MOST_SPILLED.get((rung, head_dim), 0)


def backward_cases():
    """Every dtype and head dim on Hopper under one mask, some elsewhere; most in the sweep."""
    default = {("float16", 128)}
    for number, case in enumerate(itertools.product(KERNEL_DTYPES, (16, 64, 128, 256))):
        yield "sm_90a", *case, number % 2 == 0, case not in default
    for architecture in ARCHITECTURES:
        if architecture != "sm_90a":
            yield architecture, "float32", 128, True, True
            yield architecture, "float16", 256, True, True


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim", "causal"), compile_cases(backward_cases())
)
@pytest.mark.parametrize("rung", ["standard", "fa2_split_q"])
def test_backward_kernels_fit_the_architecture(
    rung, architecture, dtype, head_dim, causal, tmp_path
):
    limits, seen = limits_of(architecture), set()
    config = RUNGS[rung].choose_backward_tiles(head_dim, limits)
    x = np.zeros((1, 1, 1, head_dim), KERNEL_DTYPES[dtype])
    lse = np.zeros((1, 1, 1), np.float32)
    for deterministic in (False, True):
        tensors = BackwardTensors(
            *(x, x, x, x, lse, x, x, x, x, np.float32(1), causal, deterministic, dtype),
            lambda s: np.zeros(s, np.float32),
        )
        for launch in RUNGS[rung].plan_backward(tensors, config):
            assert launch.shared_bytes <= limits.shared_bytes_per_block
            if launch.kernel not in seen:
                seen.add(launch.kernel)
                most = BACKWARD_SPILLED if (architecture, head_dim) == ("sm_75", 256) else 0
                assert check_kernel(launch, architecture, tmp_path) <= most


def tensor_core_backward_cases():
    """Head dim 128 on Hopper; in the sweep the rest, and some elsewhere.

    Last of a case: whether dQ is computed alone, and the bytes by which arrays miss 16.
    """
    default = {(128, True)}
    dims = (16, 64, 96, 128, 256)
    for number, case in enumerate(itertools.product(dims, (False, True))):
        yield "sm_90a", ("float16", "bfloat16")[number % 2], *case, False, 0, case not in default
    for number, head_dim in enumerate(dims):
        dtype = ("float16", "bfloat16")[number % 2]
        yield "sm_90a", dtype, head_dim, number % 2 == 0, True, 0, True
    yield "sm_90a", "float16", 64, True, False, 2, True
    yield "sm_90a", "bfloat16", 128, False, True, 2, True
    yield "sm_75", "float16", 32, False, True, 2, True
    yield "sm_75", "float16", 64, True, False, 0, True
    yield "sm_75", "float16", 128, True, True, 0, True
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        yield architecture, "bfloat16", 64, False, True, 0, True
        yield architecture, "float16", 128, True, False, 0, True
        yield architecture, "bfloat16", 256, True, False, 0, True


def backward_compile_cases():
    by_kernel = sorted(tensor_core_backward_cases(), key=lambda case: case[1:])
    for *case, deterministic, offset, in_sweep in by_kernel:
        name = case_id(*case, offset) + "-repeats" * deterministic
        marks = pytest.mark.sweep if in_sweep else ()
        yield pytest.param(*case, deterministic, offset, id=name, marks=marks)


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim", "causal", "deterministic", "offset"),
    list(backward_compile_cases()),
)
def test_tensor_core_backward_kernels_fit_the_architecture(
    architecture, dtype, head_dim, causal, deterministic, offset, tmp_path
):
    limits = limits_of(architecture)
    x, lse = one_row(dtype, head_dim, offset // 2), np.zeros((1, 1, 1), np.float32)
    tensors = BackwardTensors(
        *(x, x, x, x, lse, x, x, x, x, np.float32(1), causal, deterministic, dtype),
        lambda s: np.zeros(s, np.float32),
    )
    rung = RUNGS["fa2_tensor_core"]
    config = rung.choose_backward_tiles(head_dim, limits)
    for launch in rung.plan_backward(tensors, config):
        assert launch.shared_bytes <= limits.shared_bytes_per_block
        spilled = check_kernel(launch, architecture, tmp_path)
        assert spilled <= TENSOR_CORE_BACKWARD_SPILLED.get((architecture, head_dim), 0)


@lru_cache(16)
def for_all(kernel, types):
    """A kernel as Numba hands it to NVVM: most of the work, and the same for all architectures."""
    bounds = kernel.targetoptions.get("launch_bounds")
    options = {"device": False, "abi": "numba", "cc": (9, 0, "a"), "launch_bounds": bounds}
    library, _ = compiler._compile_pyfunc_with_fixup(kernel.py_func, types, **options)
    return library


def test_a_kernel_is_the_same_for_all_architectures_until_nvvm():
    _, (launch,) = launches("fa2_split_q", "float16", 16, "sm_75", True)
    types = signature(launch.arguments)
    for cc in ARCHITECTURES["sm_75"], ARCHITECTURES["sm_120"]:
        alone, _ = cuda.compile_ptx(launch.kernel.py_func, types, cc=cc)
        shared = for_all(launch.kernel, types).get_asm_str(cc=cc)
        # Names have a number that grows.
        shared, alone = (re.sub(r"_Z\w+|smem_\d+", "", ptx) for ptx in (shared, alone))
        assert shared == alone


def check_kernel(launch, architecture, folder):
    """Compile a kernel and see that it fits; returns the bytes that it spills."""
    name = launch.kernel.py_func.__name__
    library = for_all(launch.kernel, signature(launch.arguments))
    ptx = library.get_asm_str(cc=ARCHITECTURES[architecture])
    assert ".f64" not in ptx, f"{name} computes in float64"
    assert ".local" not in ptx, f"{name} keeps an array in local memory"
    registers, spilled, stack = assemble(ptx, architecture, folder)
    assert stack <= spilled, f"{name} has a stack of {stack} bytes, spills {spilled}"
    assert registers <= MAX_REGISTERS
    capability = ARCHITECTURES[architecture][:2]
    assert blocks_per_multiprocessor(
        registers, launch.shared_bytes, launch.threads, capability
    ).blocks
    return spilled


# Tiles of the tensor-core rungs and how many blocks a multiprocessor has shared memory for.

CHOSEN = {
    "fa1_tensor_core": {
        "sm_75": {64: "m16_n128_w4: 1", 128: "m16_n64_w2: 1", 256: ""},
        "sm_80": {64: "m32_n256_w8: 1", 128: "m16_n128_w8: 1", 256: "m16_n64_w4: 1"},
        "sm_86": {64: "m16_n128_w8: 1", 128: "m16_n64_w4: 1", 256: "m16_n32_w2: 1"},
        "sm_90a": {64: "m32_n512_w8: 1", 128: "m16_n256_w8: 1", 256: "m16_n128_w4: 1"},
    },
    "fa2_tensor_core": {
        "sm_75": {64: "m128_n32_w4: 2", 128: "m128_n64_w4: 1", 256: "m64_n32_w4: 1"},
        "sm_80": {64: "m128_n64_w4: 4", 128: "m128_n64_w4: 2", 256: "m64_n32_w4: 2"},
        "sm_86": {64: "m128_n64_w4: 3", 128: "m128_n32_w4: 2", 256: "m64_n64_w4: 1"},
        "sm_90a": {64: "m128_n64_w4: 6", 128: "m128_n64_w4: 3", 256: "m64_n64_w4: 2"},
    },
}
SAME_SHARED_MEMORY = {"sm_89": "sm_86", "sm_100": "sm_90a", "sm_120": "sm_86"}


def chosen(rung, architecture, head_dim):
    try:
        config = RUNGS[rung].choose_tiles(head_dim, limits_of(architecture))
    except ArgumentError:
        return ""
    capability = ARCHITECTURES[architecture][:2]
    room = blocks_per_multiprocessor(
        MAX_REGISTERS, config.shared_bytes, config.num_threads, capability
    )
    assert room.registers >= min(room.shared_memory, 2 if config.num_warps <= 4 else 1)
    tiles = str(config).partition("_")[2].removesuffix("_sm75")
    return f"{tiles}: {room.shared_memory}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rung", CHOSEN)
def test_tiles_and_blocks_of_a_multiprocessor(rung, architecture):
    expected = CHOSEN[rung][SAME_SHARED_MEMORY.get(architecture, architecture)]
    assert {d: chosen(rung, architecture, d) for d in expected} == expected


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
