"""Hopper's instructions: layouts, PTX, and that a GPU does what the simulator does.

`test_simulator_hopper` has kernels of every instruction in the simulator; the same ones are
compiled here, and run on a Hopper GPU where there is one.
"""

import itertools
import math

import numpy as np
import pytest
from numba import cuda
from numba.cuda import float32, int32, int64, types

from fa2_numba.device import mbarrier, tma, warpgroups
from fa2_numba.device.instruction import Instruction
from fa2_numba.device.layouts import ac_element
from fa2_numba.device.mbarrier import Phases
from fa2_numba.device.wgmma import (
    EIGHT_ROWS_BYTES,
    LINE_BYTES,
    accumulator,
    descriptor,
    element_address,
    swizzled,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
)
from fa2_numba.launch import GpuMachine, KernelLaunch
from fa2_numba.tensor_maps import MAX_MAPS, TensorMap, TileCounter
from tests import test_simulator_hopper as simulated
from tests.test_compile import assemble

SM_90A = (9, 0, "a")
HOPPER = (9, 0)
GROUP = simulated.GROUP


# Layouts


@pytest.mark.parametrize("rows", [64, 80, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_elements_of_an_operand_have_places_of_their_own(rows, transposed):
    """All 64 columns of k, four products deep, fill pieces of lines to the last byte."""
    leading = 64 * LINE_BYTES
    found = set()
    for step in range(4):
        start = step * (16 * LINE_BYTES if transposed else 32)
        row, k = np.meshgrid(range(rows), range(16), indexing="ij")
        found |= set(element_address(start, leading, row, k, transposed).ravel().tolist())
    pieces = math.ceil(rows / 64) if transposed else 1
    lines = 64 if transposed else rows
    columns = [min(64, rows - 64 * piece) if transposed else 64 for piece in range(pieces)]
    wanted = {
        swizzled(piece * leading + line * LINE_BYTES + 2 * column)
        for piece in range(pieces)
        for line in range(lines)
        for column in range(columns[piece])
    }
    assert len(found) == rows * 64 and found == wanted


def test_the_swizzle_is_its_own_inverse_and_keeps_eight_rows_together():
    addresses = np.arange(2 * EIGHT_ROWS_BYTES)
    np.testing.assert_array_equal(swizzled(swizzled(addresses)), addresses)
    np.testing.assert_array_equal(
        swizzled(addresses) // EIGHT_ROWS_BYTES, addresses // EIGHT_ROWS_BYTES
    )


def test_eight_rows_of_one_chunk_lie_in_all_banks():
    banks = {swizzled(row * LINE_BYTES + 48) // 16 % 8 for row in range(8)}
    assert banks == set(range(8))


def test_accumulators_are_those_of_four_warps():
    found = set()
    for thread, i, j in itertools.product(range(GROUP), range(2), range(16)):
        row, col = ac_element(thread % 32, i, j)
        assert accumulator(thread, i, j) == (row + 16 * (thread // 32), col)
        found.add(accumulator(thread, i, j))
    assert found == set(itertools.product(range(64), range(64)))


def test_a_descriptor_has_its_address_and_leading_offset():
    for address, leading in ((0, 16), (0x3FFF0, 0x3FFF0), (1024, 8192)):
        word = descriptor(address, leading)
        assert (word & 0x3FFF) << 4 == address and (word >> 16 & 0x3FFF) << 4 == leading
        assert word < 2**31


# What a barrier means


def test_phases_follow_each_other():
    barrier = Phases(2)
    for phase in range(4):
        parity = phase % 2
        assert not barrier.is_complete(parity) and barrier.is_complete(1 - parity)
        barrier.arrive(expected=32)
        barrier.bring(16)
        barrier.arrive()
        assert not barrier.is_complete(parity)
        barrier.bring(16)
        assert barrier.is_complete(parity)


# PTX


def instructions(module):
    found = (getattr(value, "instruction", None) for value in vars(module).values())
    return [what for what in found if isinstance(what, Instruction)]


@pytest.mark.parametrize(
    "what",
    [
        *instructions(mbarrier),
        *instructions(tma),
        *(w for w in instructions(warpgroups)),
        warpgroups.setmaxnreg_inc(240).instruction,
        warpgroups.setmaxnreg_dec(24).instruction,
        wgmma_ss(256, "bfloat16", True, True, True).instruction,
        wgmma_rs(8, "float16").instruction,
        wgmma_wait_group(1, 128, 64).instruction,
    ],
    ids=lambda what: what.name,
)
def test_instructions_are_documented_and_stay_where_they_are(what):
    assert what.meaning.__doc__ and what.volatile and what.memory


def compiled(kernel, *signature):
    ptx, _ = cuda.compile_ptx(kernel, signature, cc=SM_90A)
    return ptx


def words(ndim):
    return types.Array(types.uint32, ndim, "C")


def numbers(ndim):
    return types.Array(float32, ndim, "C")


KERNELS = {
    "load": (simulated.make_load(), (int64, words(2), int32, int32)),
    "store": (simulated.make_store(), (int64,)),
    "relay": (simulated.make_relay(), (words(2),)),
    **{
        f"product-{dtype}-{'t' if turned else 'n'}{'-registers' if registers else ''}": (
            simulated.make_product("", dtype, turned, registers),
            (int64, int64, words(2), numbers(3)),
        )
        for dtype in ("float16", "bfloat16")
        for turned in (False, True)
        for registers in (False, True)
    },
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_assemble_and_products_are_not_serialised(name, tmp_path):
    kernel, signature = KERNELS[name]
    ptx = compiled(kernel, *signature)
    assert ".local" not in ptx and ".f64" not in ptx
    assert ptx.count("wgmma.mma_async") == (4 if name.startswith("product") else 0)
    registers, spilled, stack = assemble(ptx, "sm_90a", tmp_path)
    assert registers <= 255 and spilled == stack == 0


@pytest.mark.parametrize("n", [8, 80, 128, 256])
def test_products_of_all_widths_assemble(n, tmp_path):
    multiply, wait = wgmma_ss(n, "float16", False), wgmma_wait_group(0, n)
    COLS = n // 4

    def kernel(a, b, out):
        D = cuda.local.array((2, COLS), float32)
        multiply(D, 0, 0, a, b)
        wait(D, 0, 0)
        for i in range(2):
            for j in range(COLS):
                out[i, j, cuda.threadIdx.x] = D[i, j]

    ptx = compiled(kernel, int32, int32, numbers(3))
    assert f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16" in ptx
    assemble(ptx, "sm_90a", tmp_path)


# A GPU does the same


@pytest.fixture
def hopper():
    capability = cuda.get_current_device().compute_capability
    if tuple(capability) != HOPPER:
        pytest.skip(f"needs compute capability 9.0, this GPU has {capability}")
    return GpuMachine(0)


def on_gpu(machine, kernel, arguments, threads=GROUP):
    """Run a kernel of the other module; returns nothing, as arrays lie on the GPU."""
    launch = KernelLaunch(cuda.jit(kernel), (1,), threads, 8 * simulated.TILE, arguments)
    with machine.activate():
        machine.run([launch])
        cuda.synchronize()


def there(array):
    return cuda.to_device(np.ascontiguousarray(array))


def map_of(array, rows=64):
    """A map of a copy on the GPU."""
    from fa2_numba.staging import gpu_view

    return TensorMap(gpu_view(there(simulated.bits(array))), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (100, 72), (10, 24)])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (40, 64)])
def test_a_gpu_loads_the_same_box(hopper, rows, cols, row, col):
    array = simulated.tensor(rows, cols)
    out = there(np.zeros((GROUP, 16), np.uint32))
    arguments = map_of(array), out, np.int32(row), np.int32(col)
    on_gpu(hopper, simulated.make_load(), arguments)
    lines = out.copy_to_host().reshape(64, 8, 4)
    found = np.array([lines[r, np.arange(8) ^ (r % 8)] for r in range(64)]).reshape(64, 32)
    wanted = simulated.loaded(array, row, col)
    np.testing.assert_array_equal(found.view(np.float16), wanted)


@pytest.mark.gpu
def test_a_gpu_stores_the_same_box(hopper):
    from fa2_numba.staging import gpu_view

    out = there(np.full((1, 50, 2, 40), 9, np.uint16))
    on_gpu(hopper, simulated.make_store(), (TensorMap(gpu_view(out), 64),))
    found = out.copy_to_host()
    assert (found[0, :, 0] == 0).all()
    np.testing.assert_array_equal(found[0, :, 1], np.tile([1, 0], (50, 20)))


@pytest.mark.gpu
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_computes_the_same_products(hopper, dtype, transposed, from_registers):
    element = simulated.np.dtype(dtype) if dtype == "float16" else simulated.ml_dtypes.bfloat16
    A = simulated.tensor(64, 64, 1, element)
    B = simulated.tensor(128, 64, 2, element)
    kind = {"dtype": dtype, "transposed": transposed, "from_registers": from_registers}
    wanted = simulated.products(A, B, **kind)
    out = there(np.full((2, 64, 64), np.nan, np.float32))
    registers = there(simulated.bits(A)[0, :, 0].copy().view(np.uint32))
    on_gpu(hopper, simulated.make_product(**kind), (map_of(A), map_of(B), registers, out))
    np.testing.assert_allclose(out.copy_to_host(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_gpu_takes_the_same_turns(hopper):
    out = there(np.zeros((3, 32), np.uint32))
    on_gpu(hopper, simulated.make_relay(), (out,), threads=64)
    np.testing.assert_array_equal(out.copy_to_host(), np.repeat([[0], [1], [2]], 32, axis=1))


@pytest.mark.gpu
def test_maps_are_made_once_for_an_array_and_counters_once_for_a_stream(hopper):
    one, other = (map_of(simulated.tensor(64, 64)) for _ in range(2))
    with hopper.activate():
        first = hopper.place(one)
        assert hopper.place(one) == first and hopper.place(other) != first
        counter = hopper.place(TileCounter())
        assert hopper.place(TileCounter()) == counter
        assert counter % 4 == 0 and MAX_MAPS > 2
