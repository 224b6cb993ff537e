"""Instructions of `device/ptx.py`: what they compile to, and what they mean in the simulator."""

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types, uint32

from fa2_numba import simulate
from fa2_numba.device.ptx import globaltimer, instruction, smid
from fa2_numba.launch import signature
from tests.test_compile import ARCHITECTURES

STAMPS = np.zeros(4, np.uint64)


@instruction("sub.u32 $0, $1, $2;", types.uint32, types.uint32, types.uint32, volatile=False)
def sub(a, b):
    """Difference, wrapped into 32 bits."""
    return (a - b) % 2**32


def look_around(stamps):
    if cuda.threadIdx.x == 0:
        stamps[0] = globaltimer()
        stamps[1] = smid()
        stamps[2] = globaltimer()
        stamps[3] = smid()


def subtract(x):
    # The result is not used the first time.
    sub(uint32(x[1]), uint32(x[0]))
    x[2] = sub(uint32(x[0]), uint32(x[1]))


def lines_of(ptx, instruction_start):
    return [line for line in ptx.splitlines() if line.strip().startswith(instruction_start)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_look_stays_and_is_an_integer(architecture):
    ptx, _ = cuda.compile_ptx(look_around, signature((STAMPS,)), cc=ARCHITECTURES[architecture])
    instructions = [line for line in lines_of(ptx, "mov.u") if "%globaltimer" in line]
    assert len(instructions) == 2
    assert all(line.strip().startswith("mov.u64") for line in instructions)
    looks = [
        line.split(",")[-1]
        for line in lines_of(ptx, "mov.u")
        if "%globaltimer;" in line or "%smid;" in line
    ]
    assert [look.strip(" ;") for look in looks] == ["%globaltimer", "%smid"] * 2
    assert ".f64" not in ptx


def test_an_instruction_without_effect_can_be_dropped_and_takes_operands():
    ptx, _ = cuda.compile_ptx(subtract, signature((np.zeros(3, np.uint32),)), cc=(9, 0))
    assert len(lines_of(ptx, "sub.u32")) == 1
    x = np.array([2, 5, 0], np.uint32)
    simulate(cuda.jit(subtract), progress=False)[1, 1](x)
    assert x[2] == 2**32 - 3


def test_wrappers_carry_name_and_documentation():
    assert smid.__name__ == "smid" and "multiprocessor" in smid.__doc__
    assert globaltimer.__name__ == "globaltimer" and "anoseconds" in globaltimer.__doc__


def test_what_the_instructions_mean_in_the_simulator():
    assert smid.simulated() == 0
    first, second = globaltimer.simulated(), globaltimer.simulated()
    assert isinstance(first, np.uint64) and second == first + np.uint64(1)


def test_simulated_clock_runs_the_same_every_time():
    runs = []
    for _ in range(2):
        stamps = np.zeros(4, np.uint64)
        simulate(cuda.jit(look_around), progress=False)[2, 32](stamps)
        runs.append((stamps[2] - stamps[0], stamps[1], stamps[3]))
    assert runs == [(1, 0, 0)] * 2


@pytest.mark.gpu
def test_instructions_on_a_gpu():
    stamps = cuda.to_device(np.zeros(4, np.uint64))
    cuda.jit(look_around)[1, 32](stamps)
    before, first, after, second = stamps.copy_to_host().tolist()
    assert 0 < before <= after < before + 10**9
    assert first == second < cuda.get_current_device().MULTIPROCESSOR_COUNT
    x = cuda.to_device(np.array([2, 5, 0], np.uint32))
    cuda.jit(subtract)[1, 1](x)
    assert x.copy_to_host()[2] == 2**32 - 3
