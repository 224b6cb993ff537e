"""Instructions that Numba does not offer, each with its PTX text, its types and its meaning in one.

An instruction is written as a plain function named after it: the function's body is what the
instruction means in the simulator, its decorator the PTX that a GPU runs. What is particular to
Numba-CUDA is in the decorator alone.
"""

import inspect
import itertools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

CONSTRAINTS = {types.uint32: "r", types.uint64: "l", types.float32: "f"}
"""How inline PTX names the register kind of an operand (CUDA's guide to inline PTX)."""


def instruction(text: str, result: types.Type, *operands: types.Type, volatile: bool) -> Callable:
    """Decorator: a function becomes a PTX instruction, callable in kernels on both machines.

    text: the PTX; `$0` is the result, `$1` and on are the operands. result, operands: Numba types,
    keys of CONSTRAINTS. volatile: the instruction is more than a function of its operands, so the
    compiler may neither move it past another volatile one, nor merge two, nor drop one.
    """
    constraints = ",".join(["=" + CONSTRAINTS[result], *(CONSTRAINTS[t] for t in operands)])

    def build(context, builder, signature, arguments):
        kinds = [context.get_value_type(operand) for operand in signature.args]
        function = ir.FunctionType(context.get_value_type(signature.return_type), kinds)
        assembly = ir.InlineAsm(function, text, constraints, side_effect=volatile)
        return builder.call(assembly, arguments)

    def decorate(meaning: Callable) -> Callable:
        def define(typingctx, *_):
            return result(*operands), build

        # Numba counts the operands in the signature, and a `*_` is none to it.
        parameters = inspect.signature(meaning).parameters.values()
        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        define.__signature__ = inspect.Signature([context, *parameters])
        define.__name__, define.__doc__ = meaning.__name__, meaning.__doc__
        wrapper = intrinsic(define)
        wrapper.simulated = meaning
        return wrapper

    return decorate


_ticks = itertools.count()


@instruction("mov.u32 $0, %smid;", types.uint32, volatile=True)
def smid():
    """The number of the multiprocessor that this thread runs on (PTX special register %smid).

    Numbers start at 0. In the simulator there is one multiprocessor, 0.
    """
    return 0


@instruction("mov.u64 $0, %globaltimer;", types.uint64, volatile=True)
def globaltimer():
    """Nanoseconds on a clock that all multiprocessors share (PTX special register %globaltimer).

    How often the clock is updated differs between GPUs: from tens of nanoseconds to a microsecond.
    In the simulator every look at the clock comes one nanosecond after the one before, so that runs
    repeat exactly; differences say in which order things happened, not how long they took.
    """
    return np.uint64(next(_ticks))
