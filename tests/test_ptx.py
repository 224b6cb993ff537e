"""Instructions of `device/ptx.py`: what they compile to, and that both machines do the same.

Every instruction has one kernel of one warp, which feeds it from arrays. It runs in the simulator
and, where there is one, on a GPU.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import float32, int32, types, uint32

from fa2_numba import simulate
from fa2_numba.constants import WARP_SIZE
from fa2_numba.device import ptx as ptx_module
from fa2_numba.device.instruction import (
    CONSTRAINTS,
    Address,
    Instruction,
    Registers,
    instruction,
)
from fa2_numba.device.ptx import ex2, global_address, globaltimer, shared_address, smid
from fa2_numba.launch import signature
from tests.test_compile import ARCHITECTURES, assemble, ptxas

STAMPS = np.zeros(4, np.uint64)
INSTRUCTIONS = {
    wrapper.instruction.name: wrapper
    for wrapper in vars(ptx_module).values()
    if isinstance(getattr(wrapper, "instruction", None), Instruction)
}


@instruction("sub.u32 {result}, {a}, {b};", types.uint32, a=types.uint32, b=types.uint32)
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


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_wrappers_carry_name_and_documentation(name):
    wrapper = INSTRUCTIONS[name]
    assert getattr(ptx_module, name) is wrapper
    assert wrapper.__name__ == name and len(wrapper.__doc__) > 40


def test_what_the_plain_instructions_mean():
    assert smid.instruction.meaning() == 0
    first, second = (globaltimer.instruction.meaning() for _ in range(2))
    assert isinstance(first, np.uint64) and second == first + np.uint64(1)


def test_simulated_clock_runs_the_same_every_time():
    runs = []
    for _ in range(2):
        stamps = np.zeros(4, np.uint64)
        simulate(cuda.jit(look_around), progress=False)[2, 32](stamps)
        runs.append((stamps[2] - stamps[0], stamps[1], stamps[3]))
    assert runs == [(1, 0, 0)] * 2


# One kernel an instruction. The last argument is what it writes.


def unary_kernel(operation):
    @cuda.jit
    def unary(x, out):
        out[cuda.threadIdx.x] = operation(x[cuda.threadIdx.x])

    return unary


def binary_kernel(operation):
    @cuda.jit
    def binary(x, y, out):
        i = cuda.threadIdx.x
        out[i] = operation(x[i], y[i])

    return binary


def mma_kernel(multiply, depth):
    PAIRS = depth // 8

    @cuda.jit
    def mma(A, B, C, out):
        lane = cuda.threadIdx.x
        A_reg = cuda.local.array((2, PAIRS), uint32)
        B_reg = cuda.local.array((PAIRS, 1), uint32)
        C_reg = cuda.local.array((2, 2), float32)
        for i in range(2):
            for j in range(PAIRS):
                A_reg[i, j] = A[lane, i, j]
            for j in range(2):
                C_reg[i, j] = C[lane, i, j]
        for i in range(PAIRS):
            B_reg[i, 0] = B[lane, i]
        multiply(C_reg, 0, 0, A_reg, 0, 0, B_reg, 0, 0)
        for i in range(2):
            for j in range(2):
                out[lane, i, j] = C_reg[i, j]

    return mma


def unpack_kernel(unpack):
    @cuda.jit
    def unpack_word(words, out):
        lane = cuda.threadIdx.x
        R = cuda.local.array((1, 2), float32)
        unpack(R, 0, 0, words[lane])
        out[2 * lane] = R[0, 0]
        out[2 * lane + 1] = R[0, 1]

    return unpack_word


def ldmatrix_kernel(load, matrices):
    @cuda.jit
    def ldmatrix(words, offsets, out):
        smem = cuda.shared.array(256, uint32, alignment=128)
        lane = cuda.threadIdx.x
        for i in range(8):
            smem[lane + 32 * i] = words[lane + 32 * i]
        cuda.syncwarp()
        R = cuda.local.array((2, 2), uint32)
        load(R, 0, 0, int32(shared_address(smem) + offsets[lane]))
        for q in range(matrices):
            out[lane, q] = R[q % 2, q // 2]

    return ldmatrix


def cp_async_kernel(copy, size):
    WORDS = size * WARP_SIZE // 4

    @cuda.jit
    def cp_async(words, counts, out):
        smem = cuda.shared.array(WORDS, uint32, alignment=128)
        lane = cuda.threadIdx.x
        destination = int32(shared_address(smem) + size * lane)
        copy(destination, global_address(words) + size * lane, counts[lane])
        ptx_module.cp_async_commit_group()
        ptx_module.cp_async_wait_group_0()
        cuda.syncwarp()
        for i in range(size // 4):
            out[lane + WARP_SIZE * i] = smem[lane + WARP_SIZE * i]

    return cp_async


def ld_global_kernel(load, kind=uint32):
    @cuda.jit
    def ld_global(words, out):
        lane = cuda.threadIdx.x
        R = cuda.local.array((1, 4), kind)
        load(R, 0, 0, global_address(words) + 16 * (31 - lane))
        for j in range(4):
            out[4 * lane + j] = R[0, j]

    return ld_global


def st_global_kernel(store, kind=uint32):
    @cuda.jit
    def st_global(words, out):
        lane = cuda.threadIdx.x
        R = cuda.local.array((1, 4), kind)
        for j in range(4):
            R[0, j] = words[4 * lane + j]
        store(global_address(out) + 16 * (31 - lane), R, 0, 0)

    return st_global


def ld_shared_kernel(load, kind=uint32):
    @cuda.jit
    def ld_shared(words, out):
        smem = cuda.shared.array(128, kind, alignment=128)
        lane = cuda.threadIdx.x
        for i in range(4):
            smem[lane + 32 * i] = words[lane + 32 * i]
        cuda.syncwarp()
        R = cuda.local.array((1, 4), kind)
        load(R, 0, 0, int32(shared_address(smem) + 16 * (31 - lane)))
        for j in range(4):
            out[4 * lane + j] = R[0, j]

    return ld_shared


def ld_shared_pair_kernel(load, kind=float32):
    @cuda.jit
    def ld_shared_pair(numbers, out):
        smem = cuda.shared.array(64, kind, alignment=128)
        lane = cuda.threadIdx.x
        smem[lane] = numbers[lane]
        smem[lane + 32] = numbers[lane + 32]
        cuda.syncwarp()
        R = cuda.local.array((1, 2), kind)
        load(R, 0, 0, int32(shared_address(smem) + 8 * (31 - lane)))
        out[2 * lane] = R[0, 0]
        out[2 * lane + 1] = R[0, 1]

    return ld_shared_pair


def atom_inc_global_kernel(count):
    @cuda.jit
    def atom_inc_global(last, out):
        # All lanes draw a number, in whatever order: their sum says that they drew the right ones.
        drawn = count(global_address(out), uint32(last[0]))
        cuda.atomic.add(out, 1, drawn)

    return atom_inc_global


def stmatrix_kernel(store):
    @cuda.jit
    def stmatrix(words, out):
        smem = cuda.shared.array(128, uint32, alignment=128)
        lane = cuda.threadIdx.x
        R = cuda.local.array((2, 2), uint32)
        for q in range(4):
            R[q % 2, q // 2] = words[32 * q + lane]
        # Rows anywhere, but each of its own.
        store(int32(shared_address(smem) + 16 * ((5 * lane + 3) % 32)), R, 0, 0)
        cuda.syncwarp()
        for q in range(4):
            out[32 * q + lane] = smem[32 * q + lane]

    return stmatrix


def red_global_add_kernel(add):
    @cuda.jit
    def red_global_add(numbers, out):
        lane = cuda.threadIdx.x
        add(global_address(out) + 4 * (lane // 2), numbers[lane])

    return red_global_add


def st_shared_kernel(store):
    @cuda.jit
    def st_shared(words, out):
        smem = cuda.shared.array(128, uint32, alignment=128)
        lane = cuda.threadIdx.x
        R = cuda.local.array((1, 4), uint32)
        for j in range(4):
            R[0, j] = words[4 * lane + j]
        store(int32(shared_address(smem) + 16 * (31 - lane)), R, 0, 0)
        cuda.syncwarp()
        for i in range(4):
            out[lane + 32 * i] = smem[lane + 32 * i]

    return st_shared


def st_shared_word_kernel(store):
    @cuda.jit
    def st_shared_word(words, out):
        smem = cuda.shared.array(32, uint32, alignment=128)
        lane = cuda.threadIdx.x
        store(int32(shared_address(smem) + 4 * (31 - lane)), words[lane])
        cuda.syncwarp()
        out[lane] = smem[lane]

    return st_shared_word


def random_words(rng, *shape):
    return rng.integers(0, 2**32, shape, np.uint32)


def moved_words(rng):
    return random_words(rng, 128), np.zeros(128, np.uint32)


def moved_numbers(rng):
    return rng.standard_normal(128).astype(np.float32), np.zeros(128, np.float32)


def paired_numbers(rng):
    return rng.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)


def numbers_to_add(rng):
    """Numbers that two threads at a time add to one, exactly: no order gives another sum."""
    return whole_numbers(rng, 32).astype(np.float32), whole_numbers(rng, 32).astype(np.float32)


def paired_words(rng):
    return random_words(rng, 64), np.zeros(64, np.uint32)


def counted_numbers(rng):
    """Where to count to, and from where on."""
    last = rng.integers(1, 9)
    return np.array([last], np.uint32), np.array([rng.integers(0, last), 0], np.uint32)


def few_words(rng):
    return random_words(rng, 32), np.zeros(32, np.uint32)


def exponents(rng):
    x = rng.uniform(-120, 127, 32).astype(np.float32)
    return x, np.full(32, np.nan, np.float32)


def positive_numbers(rng):
    x = rng.uniform(1, 2, 32) * 2.0 ** rng.integers(-120, 120, 32)
    x[:8] = rng.uniform(0.5, 2, 8)
    return x.astype(np.float32), np.full(32, np.nan, np.float32)


def special_numbers(rng):
    """Zeros, infinities, NaN, numbers below the normal ones, and one whose reciprocal is such."""
    x = np.ones(32, np.float32)
    x[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**127
    return x, np.full(32, 7, np.float32)


def positive_specials(rng):
    x, out = special_numbers(rng)
    x[7] = -1.0
    return x, out


def special_exponents(rng):
    x = np.zeros(32, np.float32)
    x[:8] = -np.inf, np.inf, np.nan, -0.0, -150.0, -127.5, 128.0, 1e-40
    return x, np.full(32, 7, np.float32)


def numbers_to_pack(rng):
    """Random bits, and of the numbers that float16 can hold some that need rounding."""
    x, y = random_words(rng, 2, 32).view(np.float32)
    x[::2] = rng.standard_normal(16) * 2.0 ** rng.integers(-26, 16, 16)
    return x, y, np.zeros(32, np.uint32)


def special_numbers_to_pack(rng):
    """NaNs, infinities, overflows, ties of float16 and of bfloat16, numbers below the normal."""
    x = np.zeros(32, np.float32)
    specials = [np.nan, -np.nan, np.inf, -np.inf, 65504, 65519.9, 65520, -65520, 3.4e38, -3.4e38]
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-25, 3 * 2**-26, 1e-40, -0.0]
    x[: len(specials) + len(ties)] = specials + ties
    return x, x[::-1].copy(), np.zeros(32, np.uint32)


def packed_numbers(dtype):
    """All kinds of 16-bit numbers, but no NaN, whose bits two machines need not agree on."""

    def inputs(rng):
        bits = rng.integers(0, 2**16, 64).astype(np.uint16)
        bits[:8] = 0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7F80, 0xFF80
        bits[np.isnan(bits.view(dtype))] = 0x3C01
        return bits.view(np.uint32), np.full(64, np.nan, np.float32)

    return inputs


def packed_nans(dtype):
    def inputs(rng):
        bits = np.full(64, 0x7FFF, np.uint16)
        bits[::3] = 0xFFC1
        assert np.isnan(bits.view(dtype)).all()
        return bits.view(np.uint32), np.zeros(64, np.float32)

    return inputs


def matrix_rows(rng):
    """Words of shared memory, and for each lane the offset of some row of 16 bytes in them."""
    offsets = 16 * rng.integers(0, 64, 32).astype(np.int32)
    return random_words(rng, 256), offsets


def ldmatrix_inputs(matrices):
    return lambda rng: (*matrix_rows(rng), np.zeros((32, matrices), np.uint32))


def cp_async_inputs(size):
    def inputs(rng):
        counts = (np.arange(32) % (size + 1)).astype(np.int32)
        words = size * WARP_SIZE // 4
        return random_words(rng, words), counts, np.zeros(words, np.uint32)

    return inputs


def mma_inputs(dtype, depth, numbers):
    """Registers of all lanes; numbers(rng, shape) are the elements of A, B and C."""
    pairs = depth // 8

    def inputs(rng):
        A = numbers(rng, (32, 2, pairs, 2)).astype(dtype).view(np.uint32).reshape(32, 2, pairs)
        B = numbers(rng, (32, pairs, 2)).astype(dtype).view(np.uint32).reshape(32, pairs)
        C = numbers(rng, (32, 2, 2)).astype(np.float32)
        return A, B, C, np.full((32, 2, 2), np.nan, np.float32)

    return inputs


def whole_numbers(rng, shape):
    return rng.integers(-64, 65, shape)


def numbers_of_many_sizes(rng, shape):
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)


def same_bits(found, expected, inputs):
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def same_numbers(found, expected, inputs):
    np.testing.assert_array_equal(found, expected)


def within_approximation(found, expected, inputs):
    np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=0)


def within_approximation_near_one(found, expected, inputs):
    np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=2.0**-22)


def within_last_place(found, expected, inputs):
    np.testing.assert_allclose(found, expected, rtol=2.0**-23, atol=0)


def within_accumulation(name, depth):
    """PTX leaves order and rounding of the sums open: a rounding for each term may differ."""

    def compare(found, expected, inputs):
        A, B, C, _ = inputs
        without_signs = 0x7FFF7FFF
        # Registers of A go down before they go right.
        A, B = A.swapaxes(1, 2).reshape(WARP_SIZE, -1) & without_signs, B & without_signs
        nothing = np.zeros((WARP_SIZE, 4), np.float32)
        terms = INSTRUCTIONS[name].instruction.meaning(nothing, A, B).reshape(C.shape)
        bound = 2.0**-23 * (depth * terms + np.abs(C))
        assert (np.abs(found.astype(np.float64) - expected) <= bound).all()

    return compare


@dataclass(frozen=True)
class Case:
    """One instruction with operands; `compare` says when two results agree."""

    instruction: str
    kernel: Callable
    inputs: Callable
    compare: Callable
    since: tuple[int, int] = (7, 5)


SM_75, SM_80, SM_90 = (7, 5), (8, 0), (9, 0)
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def scalar_cases():
    yield "ex2", Case("ex2", unary_kernel(ex2), exponents, within_approximation)
    yield "ex2-special", Case("ex2", unary_kernel(ex2), special_exponents, same_numbers)
    lg2, rcp = unary_kernel(INSTRUCTIONS["lg2"]), unary_kernel(INSTRUCTIONS["rcp"])
    yield "lg2", Case("lg2", lg2, positive_numbers, within_approximation_near_one)
    yield "lg2-special", Case("lg2", lg2, positive_specials, same_numbers)
    yield "rcp", Case("rcp", rcp, positive_numbers, within_last_place)
    yield "rcp-special", Case("rcp", rcp, special_numbers, same_numbers)
    for name, since in (("pack_float16", SM_75), ("pack_bfloat16", SM_80)):
        kernel = binary_kernel(INSTRUCTIONS[name])
        yield name, Case(name, kernel, numbers_to_pack, same_bits, since)
        yield f"{name}-special", Case(name, kernel, special_numbers_to_pack, same_bits, since)


def unpack_cases():
    for name, dtype in (("unpack_float16", FLOAT16), ("unpack_bfloat16", BFLOAT16)):
        kernel = unpack_kernel(INSTRUCTIONS[name])
        yield f"{name}-nan", Case(name, kernel, packed_nans(dtype), same_numbers)
        yield name, Case(name, kernel, packed_numbers(dtype), same_bits)


def mma_cases():
    for name, dtype, depth, since in (
        ("mma_m16n8k16_float16", FLOAT16, 16, SM_80),
        ("mma_m16n8k16_bfloat16", BFLOAT16, 16, SM_80),
        ("mma_m16n8k8_float16", FLOAT16, 8, SM_75),
    ):
        kernel = mma_kernel(INSTRUCTIONS[name], depth)
        whole = mma_inputs(dtype, depth, whole_numbers)
        yield f"{name}-whole", Case(name, kernel, whole, same_bits, since)
        many = mma_inputs(dtype, depth, numbers_of_many_sizes)
        yield name, Case(name, kernel, many, within_accumulation(name, depth), since)


def memory_cases():
    for matrices in (1, 2, 4):
        for name in (f"ldmatrix_x{matrices}", f"ldmatrix_x{matrices}_trans"):
            kernel = ldmatrix_kernel(INSTRUCTIONS[name], matrices)
            yield name, Case(name, kernel, ldmatrix_inputs(matrices), same_bits)
    for size in (4, 8, 16):
        name = f"cp_async_{size}"
        kernel = cp_async_kernel(INSTRUCTIONS[name], size)
        yield name, Case(name, kernel, cp_async_inputs(size), same_bits, SM_80)
    for name, make, inputs in (
        ("ld_global_v4_b32", ld_global_kernel, moved_words),
        ("st_global_v4_b32", st_global_kernel, moved_words),
        ("ld_shared_v4_b32", ld_shared_kernel, moved_words),
        ("st_shared_v4_b32", st_shared_kernel, moved_words),
        ("st_shared_b32", st_shared_word_kernel, few_words),
    ):
        yield name, Case(name, make(INSTRUCTIONS[name]), inputs, same_bits)
    words = ld_shared_pair_kernel(INSTRUCTIONS["ld_shared_v2_b32"], uint32)
    yield "ld_shared_v2_b32", Case("ld_shared_v2_b32", words, paired_words, same_bits)
    stored = stmatrix_kernel(INSTRUCTIONS["stmatrix_x4"])
    yield "stmatrix_x4", Case("stmatrix_x4", stored, moved_words, same_bits, SM_90)
    for name, make, inputs in (
        ("atom_inc_global", atom_inc_global_kernel, counted_numbers),
        ("ld_shared_v2_f32", ld_shared_pair_kernel, paired_numbers),
        ("red_global_add_f32", red_global_add_kernel, numbers_to_add),
    ):
        yield name, Case(name, make(INSTRUCTIONS[name]), inputs, same_bits)
    for name, make in (
        ("ld_global_v4_f32", ld_global_kernel),
        ("st_global_v4_f32", st_global_kernel),
        ("ld_shared_v4_f32", ld_shared_kernel),
    ):
        kernel = make(INSTRUCTIONS[name], float32)
        yield name, Case(name, kernel, moved_numbers, same_bits)


CASES = dict([*scalar_cases(), *unpack_cases(), *mma_cases(), *memory_cases()])
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
KERNELS = {case.instruction: case for case in CASES.values()}
WITHOUT_KERNEL = {
    *("smid", "globaltimer", "cp_async_commit_group"),
    *("cp_async_wait_group_0", "cp_async_wait_group_1"),
}


def test_every_instruction_has_a_kernel():
    assert KERNELS.keys() | WITHOUT_KERNEL == INSTRUCTIONS.keys()


def pattern(what):
    """The PTX line of an instruction, whatever registers its operands are in."""
    operands = {"result": 1} | {
        name: len(kind.places) if isinstance(kind, Registers) else 1
        for name, kind in what.operands.items()
    }
    text = re.escape(what.text.format(**{name: f"<{name}>" for name in operands}))
    for name, count in operands.items():
        register = r"[%\w]+"
        vector = r"\{" + r", ?".join([register] * count) + r"\}"
        is_block = isinstance(what.operands.get(name), Registers)
        text = text.replace(f"<{name}>", vector if is_block else register)
    return re.compile(text)


def architectures(since):
    return [name for name, capability in ARCHITECTURES.items() if capability[:2] >= since]


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        (name, architecture)
        for name, case in KERNELS.items()
        for architecture in architectures(case.since)
    ],
)
def test_every_instruction_compiles_where_it_exists(name, architecture):
    arrays = KERNELS[name].inputs(np.random.default_rng(0))
    function = KERNELS[name].kernel.py_func
    ptx, _ = cuda.compile_ptx(function, signature(arrays), cc=ARCHITECTURES[architecture])
    assert len(pattern(INSTRUCTIONS[name].instruction).findall(ptx)) == 1
    assert ".local" not in ptx and ".f64" not in ptx


@pytest.mark.parametrize("name", KERNELS)
def test_the_oldest_architecture_assembles_it(name, tmp_path):
    case = KERNELS[name]
    architecture = architectures(case.since)[0]
    arrays = case.inputs(np.random.default_rng(0))
    ptx, _ = cuda.compile_ptx(
        case.kernel.py_func, signature(arrays), cc=ARCHITECTURES[architecture]
    )
    assemble(ptx, architecture, tmp_path)


@pytest.mark.skipif(ptxas() is None, reason="no ptxas: pip install nvidia-cuda-nvcc")
@pytest.mark.parametrize("name", [n for n, case in KERNELS.items() if case.since == SM_80])
def test_what_needs_sm_80_is_refused_before(name, tmp_path):
    case = KERNELS[name]
    arrays = case.inputs(np.random.default_rng(0))
    ptx, _ = cuda.compile_ptx(case.kernel.py_func, signature(arrays), cc=SM_75)
    with pytest.raises(AssertionError, match="sm_"):
        assemble(ptx, "sm_75", tmp_path)


def test_every_operand_kind_has_a_register_kind():
    for wrapper in INSTRUCTIONS.values():
        for operand in wrapper.instruction.operands.values():
            kind = operand.type if isinstance(operand, (Registers, Address)) else operand
            assert kind in CONSTRAINTS


def run_simulated(case, arrays, **options):
    copies = [array.copy() for array in arrays]
    simulate(case.kernel, **{"counts": False, "progress": False} | options)[1, 32](*copies)
    return copies[-1]


@every_case
def test_the_simulator_needs_no_checks_and_no_order(case):
    arrays = case.inputs(np.random.default_rng(3))
    expected = run_simulated(case, arrays)
    for options in ({"seed": 5}, {"checks": False}, {"counts": True}):
        result = run_simulated(case, arrays, **options)
        np.testing.assert_array_equal(result, expected)


def test_the_judge_of_products_sees_a_wrong_one():
    case = CASES["mma_m16n8k16_float16"]
    arrays = case.inputs(np.random.default_rng(3))
    right = run_simulated(case, arrays)
    case.compare(right, right, arrays)
    for wrong in (right[::-1], right + np.float32(0.5), np.full_like(right, np.nan)):
        with pytest.raises(AssertionError):
            case.compare(wrong, right, arrays)


@every_case
@pytest.mark.gpu
def test_both_machines_do_the_same(case):
    if cuda.get_current_device().compute_capability < case.since:
        pytest.skip(f"{case.instruction} needs sm_{case.since[0]}{case.since[1]}")
    rng = np.random.default_rng(7)
    for _ in range(8):
        arrays = case.inputs(rng)
        on_gpu = [cuda.to_device(array) for array in arrays]
        case.kernel[1, 32](*on_gpu)
        case.compare(on_gpu[-1].copy_to_host(), run_simulated(case, arrays), arrays)


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
