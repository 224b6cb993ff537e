"""How an instruction is defined: its PTX text, its types and its meaning in one place.

An instruction is written as a plain function named after it: its decorator is the PTX that a GPU
runs and the kinds of its operands, its body what it means, in NumPy. Numba's intrinsic, the
simulator's behaviour and the tests all come from that one definition. What is particular to
Numba-CUDA is in `_build` alone.

Matrices in registers are two-dimensional local arrays, and an operand that is a block of one is
passed as three arguments: the array, and row and column of the block's first register.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic
from numba.cuda.types import float32, int32, int64, uint32, uint64

CONSTRAINTS = {int32: "r", uint32: "r", int64: "l", uint64: "l", float32: "f"}
"""How inline PTX names the register kind of an operand (CUDA's guide to inline PTX)."""


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
class Barrier:
    """An operand that is the address of an mbarrier, 8 bytes in shared memory.

    `meaning` gets the barrier's state (`mbarrier.Phases`).
    """

    type = int32


@dataclass(frozen=True)
class Map:
    """An operand that is the address of a tensor map in global memory (`tensor_maps`)."""

    type = int64


@dataclass(frozen=True)
class Descriptor:
    """An operand that describes a matrix in shared memory (`wgmma`): the low word of 64 bits.

    `meaning` gets the matrix, (rows, 16) in float64: A itself, or B with its columns as rows.
    dtype: of its elements. transposed: neighbours in memory are neighbours down a column.
    """

    rows: int
    dtype: str
    transposed: bool
    type = int32


Operand = types.Type | Registers | Address | Barrier | Map | Descriptor


@dataclass(frozen=True)
class Instruction:
    """One instruction: what `instruction` was told of it, and `meaning`, the decorated function.

    operands: by name, in order; a Numba type is a scalar operand. result: the type of the value it
    returns, or None. collective: how many threads carry it out together, a warp or a warpgroup of
    four, 0 for one by itself; `meaning` then gets and returns arrays with a row for each thread.
    asynchronous: what it stores arrives at the wait for its group of copies. group: it is the
    "commit" that closes such a group, or the "wait" for all but so many groups as `meaning`
    returns. multiply_adds: how many it does.
    """

    name: str
    text: str
    operands: MappingProxyType[str, Operand]
    result: types.Type | None
    meaning: Callable
    volatile: bool
    memory: bool
    collective: int
    asynchronous: bool
    group: str | None
    multiply_adds: int


def instruction(
    text: str,
    result: types.Type | None = None,
    *,
    volatile: bool = False,
    memory: bool = False,
    collective: int = 0,
    asynchronous: bool = False,
    group: str | None = None,
    multiply_adds: int = 0,
    **operands: Operand,
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
