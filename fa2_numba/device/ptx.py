"""Instructions that Numba does not offer, each with its PTX text, its types and its meaning in one.

They are defined by `instruction.instruction`. Some are here for other kernels than the ladder's:
smaller `ldmatrix`, deeper pipelines. Hopper's own stand in `mbarrier`, `tma`, `warpgroups` and
`wgmma`. (PTX ISA 8.x, chapters "Warp Level Matrix Instructions" and "Data Movement"; fragments:
`layouts`.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.types import float32, int32, int64, uint32, uint64

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.instruction import Address, Registers, instruction
from fa2_numba.device.layouts import ac_element, b_element, matrix_element

DOWN_FIRST = ((0, 0), (1, 0), (0, 1), (1, 1))
RIGHT_FIRST = ((0, 0), (0, 1), (1, 0), (1, 1))
ROW = ((0, 0), (0, 1), (0, 2), (0, 3))


def _address_of(space: str, kind: types.Type, text: str) -> Callable:
    def define(typingctx, array):
        def build(context, builder, signature, arguments):
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            pointer = builder.ptrtoint(data, ir.IntType(64))
            if not text:
                return pointer
            function = ir.FunctionType(context.get_value_type(kind), [pointer.type])
            assembly = ir.InlineAsm(function, text, "=r,l", side_effect=False)
            return builder.call(assembly, [pointer])

        return kind(array), build

    define.__name__ = f"{space}_address"
    define.__doc__ = f"The byte address of an array's first element, in {space} memory ({kind})."
    wrapper = intrinsic(define)
    wrapper.address_space = space
    return wrapper


shared_address = _address_of(
    "shared", int32, "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
)
global_address = _address_of("global", int64, "")

_ticks = itertools.count()


@instruction("mov.u32 {result}, %smid;", uint32, volatile=True)
def smid():
    """The number of the multiprocessor that this thread runs on (PTX special register %smid).

    Numbers start at 0. In the simulator there is one multiprocessor, 0.
    """
    return 0


@instruction("mov.u64 {result}, %globaltimer;", uint64, volatile=True)
def globaltimer():
    """Nanoseconds on a clock that all multiprocessors share (PTX special register %globaltimer).

    How often the clock is updated differs between GPUs: from tens of nanoseconds to a microsecond.
    In the simulator every look at the clock comes one nanosecond after the one before, so that runs
    repeat exactly; differences say in which order things happened, not how long they took.
    """
    return np.uint64(next(_ticks))


@instruction("ex2.approx.ftz.f32 {result}, {x};", float32, x=float32)
def ex2(x):
    """2 to the power x; the hardware is within 2^-22 of it. Results below 2^-126 are 0."""
    return _flushed(np.exp2(_flushed(x)))


@instruction("lg2.approx.ftz.f32 {result}, {x};", float32, x=float32)
def lg2(x):
    """Logarithm of base 2, within 2^-22 of it on hardware: absolute near 1, relative elsewhere."""
    return np.log2(_flushed(x))


@instruction("rcp.approx.ftz.f32 {result}, {x};", float32, x=float32)
def rcp(x):
    """1 / x; the hardware is within one unit in the last place."""
    return _flushed(np.float32(1) / _flushed(x))


def _flushed(x):
    """`ftz`: a number below the normal ones counts as 0."""
    x = np.float32(x)
    return np.copysign(np.float32(0), x) if np.abs(x) < np.finfo(np.float32).tiny else x


@instruction(
    "{{ .reg .b16 l, h; cvt.rn.f16.f32 l, {low}; cvt.rn.f16.f32 h, {high};"
    " mov.b32 {result}, {{l, h}}; }}",
    uint32,
    low=float32,
    high=float32,
)
def pack_float16(low, high):
    """Two numbers rounded to float16, in the low and the high half of a register."""
    return _pack(np.array([low, high], np.float32).astype(np.float16))


@instruction("cvt.rn.bf16x2.f32 {result}, {high}, {low};", uint32, low=float32, high=float32)
def pack_bfloat16(low, high):
    """Two numbers rounded to bfloat16, in the low and the high half of a register (sm_80)."""
    return _pack(np.array([low, high], np.float32).astype(ml_dtypes.bfloat16))


def _pack(pair):
    """Both halves as one integer; any NaN becomes the one that the hardware makes."""
    bits = np.where(np.isnan(pair), 0x7FFF, pair.view(np.uint16)).astype(np.uint32)
    return int(bits[0] | bits[1] << 16)


def _unpack(dtype: str, text: str) -> Callable:
    element = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)

    def meaning(R, x):
        return np.array([x], np.uint32).view(element).astype(np.float32)

    meaning.__name__ = f"unpack_{dtype}"
    meaning.__doc__ = f"The two {dtype} numbers in a register, low half first, as float32."
    return instruction(
        "{{ .reg .b16 l, h; .reg .b32 a, b; .reg .b64 t; "
        f"{text} mov.b64 t, {{{{a, b}}}}; mov.b64 {{R}}, t; }}}}",
        R=Registers(float32, ROW[:2], read=False, written=True),
        x=uint32,
    )(meaning)


unpack_float16 = _unpack("float16", "mov.b32 {{l, h}}, {x}; cvt.f32.f16 a, l; cvt.f32.f16 b, h;")
unpack_bfloat16 = _unpack("bfloat16", "shl.b32 a, {x}, 16; and.b32 b, {x}, 0xffff0000;")


def _ldmatrix(matrices: int, transposed: bool) -> Callable:
    """`ldmatrix` of 1, 2 or 4 matrices of 8 x 8 16-bit elements."""
    suffix = ".trans" if transposed else ""
    row, col = matrix_element(*np.meshgrid(range(WARP_SIZE), range(2), indexing="ij"))

    def meaning(R, address):
        rows = address.view(np.uint16)[: 8 * matrices].reshape(matrices, 8, 8)
        loaded = rows.swapaxes(1, 2) if transposed else rows
        pairs = loaded[:, row, col].astype(np.uint32)
        return (pairs[..., 0] | pairs[..., 1] << 16).T

    meaning.__name__ = f"ldmatrix_x{matrices}" + suffix.replace(".", "_")
    meaning.__doc__ = (
        f"{matrices} matrices of 8 x 8 16-bit elements from shared memory"
        f"{', transposed' if transposed else ''}: lane l points to 16 bytes, row l % 8 of matrix "
        f"l // 8; register q of a lane is its pair of matrix q (`layouts.matrix_element`)."
    )
    return instruction(
        f"ldmatrix.sync.aligned.m8n8.x{matrices}{suffix}.shared.b16 {{R}}, [{{address}}];",
        memory=True,
        collective=WARP_SIZE,
        R=Registers(uint32, DOWN_FIRST[:matrices], read=False, written=True),
        address=Address("shared", 16),
    )(meaning)


ldmatrix_x1, ldmatrix_x1_trans = _ldmatrix(1, False), _ldmatrix(1, True)
ldmatrix_x2, ldmatrix_x2_trans = _ldmatrix(2, False), _ldmatrix(2, True)
ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(4, False), _ldmatrix(4, True)


def _mma(dtype: str, depth: int) -> Callable:
    """`mma.sync` of a 16 x depth A and a depth x 8 B in `dtype`; C and the sums are float32."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    element = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    pairs = depth // 8
    A_places, C_places = _places(ac_element, 2, 2 * pairs), _places(ac_element, 2, 2)
    B_places = _places(b_element, 2 * pairs, 1)

    def meaning(C, A, B):
        # Products of 16-bit numbers are exact in float64; the sum is rounded once. (Hardware sums
        # in an order and with a rounding that PTX leaves open.)
        down, right = A.view(element).reshape(WARP_SIZE, pairs, 2, 2), (WARP_SIZE, 2, 2 * pairs)
        A = _gathered(down.swapaxes(1, 2).reshape(right), A_places, (16, depth))
        B = _gathered(B.view(element).reshape(WARP_SIZE, 2 * pairs, 1), B_places, (depth, 8))
        products = (A @ B)[C_places]
        return (products.reshape(WARP_SIZE, 4) + C).astype(np.float32)

    meaning.__name__ = f"mma_m16n8k{depth}_{dtype}"
    meaning.__doc__ = (
        f"C += A B on a warp's tiles: A 16 x {depth} and B {depth} x 8 in {dtype}, C 16 x 8 in "
        f"float32 (`layouts`). Needs sm_{75 if depth == 8 else 80}."
    )
    return instruction(
        f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{C}}, {{A}}, {{B}}, {{C}};",
        collective=WARP_SIZE,
        multiply_adds=16 * 8 * depth,
        C=Registers(float32, RIGHT_FIRST, written=True),
        A=Registers(uint32, DOWN_FIRST[: 2 * pairs]),
        B=Registers(uint32, DOWN_FIRST[:pairs]),
    )(meaning)


def _places(element: Callable, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of what all lanes hold: those of element (i, j) of a lane at [lane, i, j]."""
    return element(*np.meshgrid(*map(range, (WARP_SIZE, rows, cols)), indexing="ij"))


def _gathered(parts, places, shape):
    """A whole matrix, in float64, from what all lanes hold of it: (lane, i, j)."""
    whole = np.zeros(shape)
    whole[places] = parts.astype(np.float64)
    return whole


mma_m16n8k16_float16 = _mma("float16", 16)
mma_m16n8k16_bfloat16 = _mma("bfloat16", 16)
mma_m16n8k8_float16 = _mma("float16", 8)


def _cp_async(size: int) -> Callable:
    """`cp.async` of so many bytes; only 16 can pass by the L1 cache (`cg`)."""
    cache = "cg" if size == 16 else "ca"

    def meaning(destination, source, count):
        return source

    meaning.__name__ = f"cp_async_{size}"
    meaning.__doc__ = (
        f"Start to copy {size} bytes from global to shared memory: `count` of them, then zeros "
        "(sm_80). They are there once this thread has waited for the copy's group."
    )
    return instruction(
        f"cp.async.{cache}.shared.global [{{destination}}], [{{source}}], {size}, {{count}};",
        memory=True,
        asynchronous=True,
        destination=Address("shared", size, stored=True),
        source=Address("global", size, at_most="count"),
        count=int32,
    )(meaning)


cp_async_16, cp_async_8, cp_async_4 = map(_cp_async, (16, 8, 4))


@instruction("cp.async.commit_group;", memory=True, group="commit")
def cp_async_commit_group():
    """The copies that this thread has started since the last commit become one group."""


def _cp_async_wait_group(pending: int) -> Callable:
    def meaning():
        return pending

    meaning.__name__ = f"cp_async_wait_group_{pending}"
    meaning.__doc__ = (
        f"Wait until at most the {pending} youngest groups of this thread's copies are under way."
        if pending
        else "Wait until all groups of this thread's copies have arrived."
    )
    return instruction(f"cp.async.wait_group {pending};", memory=True, group="wait")(meaning)


cp_async_wait_group_0 = _cp_async_wait_group(0)
cp_async_wait_group_1 = _cp_async_wait_group(1)


KINDS = {"b32": uint32, "f32": float32}


def _load(space: str, kind: str, count: int = 4) -> Callable:
    def meaning(R, address):
        return address.view(KINDS[kind].name)

    meaning.__name__ = f"ld_{space}_v{count}_{kind}"
    meaning.__doc__ = f"{4 * count} bytes of {space} memory into {count} registers of a row."
    return instruction(
        f"ld.{space}.v{count}.{kind} {{R}}, [{{address}}];",
        memory=True,
        R=Registers(KINDS[kind], ROW[:count], read=False, written=True),
        address=Address(space, 4 * count),
    )(meaning)


def _store(space: str, kind: str) -> Callable:
    def meaning(address, R):
        return R.view(np.uint8)

    meaning.__name__ = f"st_{space}_v4_{kind}"
    meaning.__doc__ = f"Four registers of a row into 16 bytes of {space} memory."
    return instruction(
        f"st.{space}.v4.{kind} [{{address}}], {{R}};",
        memory=True,
        address=Address(space, 16, stored=True),
        R=Registers(KINDS[kind], ROW),
    )(meaning)


ld_global_v4_b32, ld_shared_v4_b32 = _load("global", "b32"), _load("shared", "b32")
st_global_v4_b32, st_shared_v4_b32 = _store("global", "b32"), _store("shared", "b32")
ld_global_v4_f32, ld_shared_v4_f32 = _load("global", "f32"), _load("shared", "f32")
ld_shared_v2_f32, ld_shared_v2_b32 = _load("shared", "f32", 2), _load("shared", "b32", 2)
st_global_v4_f32 = _store("global", "f32")


@instruction(
    "st.shared.b32 [{address}], {x};",
    memory=True,
    address=Address("shared", 4, stored=True),
    x=uint32,
)
def st_shared_b32(address, x):
    """One register into 4 bytes of shared memory."""
    return np.uint32(x).reshape(1).view(np.uint8)


@instruction(
    "red.relaxed.gpu.global.add.f32 [{address}], {x};",
    memory=True,
    address=Address("global", 4, stored=True, updated=True),
    x=float32,
)
def red_global_add_f32(address, x):
    """Add a number to 4 bytes of global memory, in whatever order threads come."""
    return (address.view(np.float32) + np.float32(x)).view(np.uint8)


@instruction(
    "atom.global.inc.u32 {result}, [{address}], {last};",
    uint32,
    memory=True,
    address=Address("global", 4, stored=True, updated=True),
    last=uint32,
)
def atom_inc_global(address, last):
    """Count on in 4 bytes of global memory, from `last` to 0; returns the number before."""
    number = address.view(np.uint32)[0]
    counted = 0 if number >= last else number + 1
    return number, np.array([counted], np.uint32).view(np.uint8)


@instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{address}], {R};",
    memory=True,
    collective=WARP_SIZE,
    address=Address("shared", 16, stored=True),
    R=Registers(uint32, DOWN_FIRST),
)
def stmatrix_x4(address, R):
    """Four matrices of 8 x 8 16-bit elements to shared memory (sm_90): `ldmatrix_x4` turned round.

    Lane l points to 16 bytes, row l % 8 of matrix l // 8; register q of a lane is its pair of
    matrix q.
    """
    row, col = matrix_element(*np.meshgrid(range(WARP_SIZE), range(2), indexing="ij"))
    matrices = np.empty((4, 8, 8), np.uint16)
    for half in range(2):
        matrices[:, row[:, half], col[:, half]] = (R >> (16 * half) & 0xFFFF).T
    return matrices.reshape(WARP_SIZE, 8).view(np.uint8)
