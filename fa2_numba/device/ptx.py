"""Instructions that Numba does not offer, each with its PTX text, its types and its meaning in one.

An instruction is written as a plain function named after it: its decorator is the PTX that a GPU
runs and the kinds of its operands, its body what it means, in NumPy. Numba's intrinsic, the
simulator's behaviour and the tests all come from that one definition. What is particular to
Numba-CUDA is in `_build` alone.

Matrices in registers are two-dimensional local arrays, and an operand that is a block of one is
passed as three arguments: the array, and row and column of the block's first register. Some
instructions are here for other kernels than the ladder's: smaller `ldmatrix`, deeper pipelines.
(PTX ISA 8.x, chapters "Warp Level Matrix Instructions" and "Data Movement"; fragments: `layouts`.)
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic
from numba.cuda.types import float32, int32, int64, uint32, uint64

from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.layouts import ac_element, b_element, matrix_element

CONSTRAINTS = {int32: "r", uint32: "r", int64: "l", uint64: "l", float32: "f"}
"""How inline PTX names the register kind of an operand (CUDA's guide to inline PTX)."""

DOWN_FIRST = ((0, 0), (1, 0), (0, 1), (1, 1))
RIGHT_FIRST = ((0, 0), (0, 1), (1, 0), (1, 1))
ROW = ((0, 0), (0, 1), (0, 2), (0, 3))


@dataclass(frozen=True)
class Registers:
    """An operand that is a block of a lane's matrix; places: of its registers, in PTX's order.

    read, written: what the instruction does with them. `meaning` gets the values of those it reads,
    as an array along the last axis, and returns the new values of those it writes.
    """

    type: types.Type
    places: tuple[tuple[int, int], ...]
    read: bool = True
    written: bool = False


@dataclass(frozen=True)
class Address:
    """An operand that is a byte address: int32 in shared memory, int64 in global memory.

    size: bytes at the address, which is a multiple of it. `meaning` gets these bytes as uint8 if
    they are loaded, and returns them if they are stored.
    at_most: the scalar operand that says how many of the bytes are loaded, the others being 0.
    updated: they are loaded and stored, and no other thread comes in between.
    """

    space: str
    size: int
    stored: bool = False
    at_most: str | None = None
    updated: bool = False

    @property
    def type(self) -> types.Type:
        """Of the operand."""
        return int32 if self.space == "shared" else int64


@dataclass(frozen=True)
class Instruction:
    """One instruction: what `instruction` was told of it, and `meaning`, the decorated function.

    operands: by name, in order; a Numba type is a scalar operand. result: the type of the value it
    returns, or None. collective: all lanes of a warp carry it out together; `meaning` then gets and
    returns arrays with a row for each lane. asynchronous: what it stores arrives at the wait for
    its group of copies. group: it is the "commit" that closes such a group, or the "wait" for all
    but so many groups as `meaning` returns. multiply_adds: how many it does.
    """

    name: str
    text: str
    operands: MappingProxyType[str, types.Type | Registers | Address]
    result: types.Type | None
    meaning: Callable
    volatile: bool
    memory: bool
    collective: bool
    asynchronous: bool
    group: str | None
    multiply_adds: int


def instruction(
    text: str,
    result: types.Type | None = None,
    *,
    volatile: bool = False,
    memory: bool = False,
    collective: bool = False,
    asynchronous: bool = False,
    group: str | None = None,
    multiply_adds: int = 0,
    **operands: types.Type | Registers | Address,
) -> Callable:
    """Decorator: a function becomes a PTX instruction, callable in kernels on both machines.

    text: the PTX, `{result}` and the operands by name; a block of registers is a vector operand.
    volatile: the instruction is more than a function of its operands, so the compiler may neither
    move it past another volatile one, nor merge two, nor drop one. memory: and it touches memory,
    so that no load or store may move past it either. The rest: see `Instruction`.
    """

    def decorate(meaning: Callable) -> Callable:
        what = Instruction(
            meaning.__name__,
            text,
            MappingProxyType(operands),
            result,
            meaning,
            volatile or memory,
            memory,
            collective,
            asynchronous,
            group,
            multiply_adds,
        )
        wrapper = _build(what)
        wrapper.instruction = what
        return wrapper

    return decorate


def _build(what: Instruction) -> Callable:
    """The Numba intrinsic of an instruction."""
    blocks = {n: o for n, o in what.operands.items() if isinstance(o, Registers)}
    written = [(n, block) for n, block in blocks.items() if block.written]
    parameters = [
        name
        for operand in what.operands
        for name in ((operand, f"{operand}_row", f"{operand}_col")[: 3 if operand in blocks else 1])
    ]
    text, constraints = _assembly(what)

    def define(typingctx, *arguments):
        given = dict(zip(parameters, arguments, strict=True))
        kinds = []
        for name, operand in what.operands.items():
            if name in blocks:
                _check_registers(what.name, name, given[name], operand.type)
                kinds += [given[name], types.intp, types.intp]
            else:
                kinds.append(getattr(operand, "type", operand))
        return (what.result or types.void)(*kinds), generate

    def generate(context, builder, signature, arguments):
        given = dict(zip(parameters, zip(signature.args, arguments, strict=True), strict=True))
        pointers = {
            name: _pointers(context, builder, given, name, block) for name, block in blocks.items()
        }
        inputs = [
            builder.load(p) for name, _ in written if blocks[name].read for p in pointers[name]
        ]
        for name in what.operands:
            if name not in blocks:
                inputs.append(given[name][1])
            elif not blocks[name].written:
                inputs += [builder.load(p) for p in pointers[name]]
        results = [what.result] if what.result else []
        results += [block.type for _, block in written for _ in block.places]
        kinds = [context.get_value_type(kind) for kind in results]
        returned = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        function = ir.FunctionType(returned if kinds else ir.VoidType(), [i.type for i in inputs])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=what.volatile)
        # Nobody may move what a whole warp does to where only some of its lanes come.
        value = builder.call(assembly, inputs, attrs=("convergent",) if what.collective else ())
        if what.result:
            return value
        targets = [p for name, _ in written for p in pointers[name]]
        for number, pointer in enumerate(targets):
            one = value if len(targets) == 1 else builder.extract_value(value, number)
            builder.store(one, pointer)
        return context.get_dummy_value()

    # Numba counts the operands in the signature, and a `*_` is none to it.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typingctx", *parameters]
    define.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    define.__name__, define.__doc__ = what.name, what.meaning.__doc__
    return intrinsic(define)


def _check_registers(instruction: str, name: str, kind: types.Type, element: types.Type) -> None:
    """Refuse what is no matrix of such registers: code for it would go through a wrong pointer."""
    is_matrix = isinstance(kind, types.Array) and (kind.ndim, kind.layout) == (2, "C")
    if not is_matrix or kind.dtype != element:
        rule = f"must be a contiguous two-dimensional array of {element}"
        raise TypingError(f"{instruction}: operand {name} is {kind}; {rule}")


def _assembly(what: Instruction) -> tuple[str, str]:
    """The text with `$0`, `$1`, ... in it, and LLVM's constraints: results first, then inputs.

    A block that is read and written has inputs that are tied to its results, by their numbers.
    """
    outputs, tied, inputs = [], [], []
    numbers = {}
    if what.result:
        numbers["result"] = [0]
        outputs.append("=" + CONSTRAINTS[what.result])
    for name, operand in what.operands.items():
        if isinstance(operand, Registers) and operand.written:
            numbers[name] = [len(outputs) + k for k in range(len(operand.places))]
            outputs += ["=" + CONSTRAINTS[operand.type]] * len(operand.places)
            tied += map(str, numbers[name] if operand.read else [])
    for name, operand in what.operands.items():
        if name not in numbers:
            count = len(operand.places) if isinstance(operand, Registers) else 1
            first = len(outputs) + len(tied) + len(inputs)
            numbers[name] = [first + k for k in range(count)]
            inputs += [CONSTRAINTS[getattr(operand, "type", operand)]] * count
    names = {name: ",".join(f"${k}" for k in places) for name, places in numbers.items()}
    for name, operand in what.operands.items():
        if isinstance(operand, Registers):
            names[name] = "{" + names[name] + "}"
    clobbers = ["~{memory}"] if what.memory else []
    return what.text.format(**names), ",".join(outputs + tied + inputs + clobbers)


def _pointers(context, builder, given, name, block):
    """Where the registers of a block lie: the compiler turns constant places into registers."""
    kind, value = given[name]
    array = context.make_array(kind)(context, builder, value)
    row, col = given[f"{name}_row"][1], given[f"{name}_col"][1]
    cols = builder.extract_value(array.shape, 1)
    first = builder.gep(array.data, [builder.add(builder.mul(row, cols), col)])
    return [
        builder.gep(first, [builder.add(builder.mul(cols, cols.type(i)), cols.type(j))])
        for i, j in block.places
    ]


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
        collective=True,
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
        collective=True,
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
ld_shared_v2_f32 = _load("shared", "f32", 2)
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
