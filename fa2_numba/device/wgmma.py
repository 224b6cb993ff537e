"""Matrix products of a warpgroup, four warps: `wgmma` multiplies from shared memory (sm_90a).

D += A B with D 64 x n and A 64 x 16 and B 16 x n in 16 bits. B lies in shared memory, A there or in
registers, D in registers, all of it asynchronously: a product is issued, goes into a group, and D
may be read after the wait for that group. A thread's registers are those of `mma`: warp w of the
four has rows 16 w to 16 w + 15 of A and D, as `layouts.ac_element` says.

An operand in shared memory is rows of 64 elements, 128 bytes, swizzled as TMA brings them, and is
named by a descriptor. Its leading byte offset (LBO) leads from one piece of 64 rows or columns to
the next; from eight rows to the next eight it is always 1024 bytes. (PTX ISA 8.x, "Asynchronous
Warpgroup Level Matrix Instructions".)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import ml_dtypes
import numpy as np
from numba.cuda.types import float32, uint32

from fa2_numba.device.instruction import Descriptor, Registers, instruction
from fa2_numba.device.ptx import DOWN_FIRST
from fa2_numba.device.warpgroups import WARPGROUP_SIZE

WGMMA_M, WGMMA_K = 64, 16
"""Rows of D, and the depth of one product; its columns are a multiple of 8, at most 256."""
LINE_ELEMENTS, LINE_BYTES = 64, 128
"""Of a swizzled row."""
EIGHT_ROWS_BYTES = 8 * LINE_BYTES
"""The stride byte offset; the swizzle repeats after so many bytes, at whose multiples tiles lie."""
SWIZZLE_128B = 1 << 30
HIGH_WORD = EIGHT_ROWS_BYTES >> 4 | SWIZZLE_128B
"""Of every descriptor here."""
KINDS = {"float16": "f16", "bfloat16": "bf16"}


def swizzled(address):
    """Where a byte of a tile lies: bits 4 to 6 are those of the row (7 to 9), xored.

    The second chunk of 16 bytes of row 3:

    >>> swizzled(3 * 128 + 16) - 3 * 128
    32
    """
    return address ^ (address >> 3 & 0x70)


def element_address(start, leading, i, k, transposed):
    """Where element (i, k) of an operand lies, in bytes; i counts rows of A or columns of B.

    start: of the operand (`descriptor`), leading: its LBO. As Q and K lie, rows are i, and k counts
    along a row. As V lies, transposed, rows are k, and i counts along them, 64 to a piece.

    >>> element_address(0, 0, 1, 2, False), element_address(0, 8192, 2, 0, True)
    (148, 4)
    >>> element_address(0, 8192, 64, 1, True)
    8336
    """
    if transposed:
        piece = i // LINE_ELEMENTS * leading
        address = start + piece + k * LINE_BYTES + 2 * (i % LINE_ELEMENTS)
    else:
        address = start + i * LINE_BYTES + 2 * k
    return swizzled(address)


def descriptor(address, leading):
    """The low word of an operand's descriptor: its address and LBO, both without their low 4 bits.

    Sixteen bytes on in shared memory is one more.

    >>> hex(descriptor(0x4000, 8192)), descriptor(0x4010, 0) - descriptor(0x4000, 0)
    ('0x2000400', 1)
    """
    return address >> 4 | leading >> 4 << 16


def accumulator(thread, i, j):
    """Row and column of element (i, j) of what a thread of a warpgroup holds of D, or of A.

    As `layouts.ac_element`, with 16 rows for each warp:

    >>> accumulator(5, 0, 2), accumulator(32 + 5, 1, 0)
    ((1, 10), (25, 2))
    """
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * i
    return row, 2 * (thread % 4) + 8 * (j // 2) + j % 2


def _accumulators(n: int, read: bool) -> Registers:
    """All registers of a D of n columns in PTX's order: rows 8 apart, before it goes right."""
    places = tuple((r, 2 * i + c) for i in range(n // 8) for r in range(2) for c in range(2))
    return Registers(float32, places, read=read, written=True)


def _whole(parts, columns):
    """A matrix of 64 rows from what 128 threads hold of it: (thread, i, j), in PTX's order."""
    places = accumulator(
        *np.meshgrid(range(WARPGROUP_SIZE), range(2), range(columns // 4), indexing="ij")
    )
    whole = np.empty((WGMMA_M, columns))
    whole[places] = (
        parts.reshape(WARPGROUP_SIZE, columns // 8, 2, 2)
        .swapaxes(1, 2)
        .reshape(WARPGROUP_SIZE, 2, columns // 4)
    )
    return whole


def _parts(whole):
    """The other way round."""
    columns = whole.shape[1]
    places = accumulator(
        *np.meshgrid(range(WARPGROUP_SIZE), range(2), range(columns // 4), indexing="ij")
    )
    parts = whole[places].reshape(WARPGROUP_SIZE, 2, columns // 8, 2)
    return parts.swapaxes(1, 2).reshape(WARPGROUP_SIZE, -1)


def _product(D, A, B):
    """D + A B^T, summed in float64 and rounded once; hardware sums in an order of its own."""
    product = _parts(A @ B.T)
    return (product if D is None else product + D).astype(np.float32)


def _text(n: int, dtype: str, accumulate: bool, a: str, b: str, flags: str) -> str:
    kind = KINDS[dtype]
    return (
        "{{ .reg .pred p; .reg .b64 a, b; "
        f"setp.ne.b32 p, {int(accumulate)}, 0; {a}{b}"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{D}}, "
    ) + f"{'a' if a else '{A}'}, b, p, 1, 1, {flags}; }}}}"


@cache
def wgmma_ss(
    n: int,
    dtype: str,
    accumulate: bool,
    transposed_a: bool = False,
    transposed_b: bool = False,
) -> Callable:
    """The instruction (D, row, col, A, B): D += A B with descriptors of A and B; D = A B if not."""

    def meaning(D, A, B):
        return _product(D, A, B)

    turned = "_transposed_a" * transposed_a + "_transposed_b" * transposed_b
    meaning.__name__ = f"wgmma_m64n{n}k16_{dtype}{turned}" + "_first" * (not accumulate)
    meaning.__doc__ = f"D {'+=' if accumulate else '='} A B, both in shared memory; D is 64 x {n}."
    a = f"mov.b64 a, {{{{{{A}}, {HIGH_WORD}}}}}; "
    b = f"mov.b64 b, {{{{{{B}}, {HIGH_WORD}}}}}; "
    return instruction(
        _text(n, dtype, accumulate, a, b, f"{int(transposed_a)}, {int(transposed_b)}"),
        memory=True,
        collective=WARPGROUP_SIZE,
        multiply_adds=WGMMA_M * n * WGMMA_K,
        D=_accumulators(n, read=accumulate),
        A=Descriptor(WGMMA_M, dtype, transposed_a),
        B=Descriptor(n, dtype, transposed_b),
    )(meaning)


@cache
def wgmma_rs(n: int, dtype: str, accumulate: bool = True, transposed_b: bool = True) -> Callable:
    """The instruction (D, row, col, A, row, col, B): D += A B with A in registers."""
    element = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)

    def meaning(D, A, B):
        pairs = A.view(element).reshape(WARPGROUP_SIZE, 2, 2, 2)  # column pair, row, element
        return _product(D, _whole(pairs.astype(np.float64), WGMMA_K), B)

    turned = "_from_registers" + "_transposed_b" * transposed_b
    meaning.__name__ = f"wgmma_m64n{n}k16_{dtype}{turned}" + "_first" * (not accumulate)
    meaning.__doc__ = f"D {'+=' if accumulate else '='} A B, A in registers; D is 64 x {n}."
    b = f"mov.b64 b, {{{{{{B}}, {HIGH_WORD}}}}}; "
    return instruction(
        _text(n, dtype, accumulate, "", b, f"{int(transposed_b)}"),
        memory=True,
        collective=WARPGROUP_SIZE,
        multiply_adds=WGMMA_M * n * WGMMA_K,
        D=_accumulators(n, read=accumulate),
        A=Registers(uint32, DOWN_FIRST),
        B=Descriptor(n, dtype, transposed_b),
    )(meaning)


@instruction("wgmma.fence.sync.aligned;", memory=True, collective=WARPGROUP_SIZE)
def wgmma_fence():
    """Registers written before it are there for the products after it."""


@instruction("wgmma.commit_group.sync.aligned;", memory=True, collective=WARPGROUP_SIZE)
def wgmma_commit_group():
    """The products issued since the last commit become one group."""


@cache
def wgmma_wait_group(pending: int, *columns: int) -> Callable:
    """The instruction (D, row, col, ...) that waits for all but the `pending` youngest groups.

    columns: of each matrix whose registers pass through it: a compiler that knows nothing of what
    is under way could otherwise move a use of them above the wait.
    """
    operands = {f"D{number}": _accumulators(n, read=True) for number, n in enumerate(columns)}

    def meaning(*matrices):
        return pending

    meaning.__name__ = f"wgmma_wait_group_{pending}_" + "_".join(map(str, columns))
    meaning.__doc__ = f"Wait until at most {pending} groups of products are under way."
    return instruction(
        f"wgmma.wait_group.sync.aligned {pending};",
        memory=True,
        collective=WARPGROUP_SIZE,
        **operands,
    )(meaning)
