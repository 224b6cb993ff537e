"""What an argument must be, for every function that takes arrays; a refusal names the rule."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from fa2_numba.arrays import DTYPES, Array, describe, of_library
from fa2_numba.constants import MAX_HEAD_DIM
from fa2_numba.errors import ArgumentError, ArgumentTypeError

MAX_AXIS = 2**31 - 1
"""Kernels count rows, heads and batch elements in 32 bits."""

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

REMEMBERED = 1024
"""So many kinds of calls are remembered, with what was found out about each."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Layouts of q, k and v that go together, of which there is one object each.

    repeats: for q, k and v, whether some of its elements may lie at one address.
    """

    layouts: tuple[tuple, tuple, tuple]
    dtype: str
    repeats: tuple[bool, bool, bool]


_problems: dict[tuple[tuple, tuple, tuple], Problem] = {}


def check_options(
    dropout_p: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: object,
) -> bool:
    """Refuse bad options, then options not built yet; returns whether the mask is causal."""
    if not 0.0 <= _number("dropout_p", dropout_p) < 1.0:
        raise ArgumentError(f"dropout_p={dropout_p!r}: must be at least 0 and below 1")
    if not math.isfinite(_number("softcap", softcap)):
        raise ArgumentError(f"softcap={softcap!r}: must be finite (0 is off)")
    check_flag("causal", causal)
    left, right = _window_bounds(window_size)
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p={dropout_p}: dropout is not built yet")
    if softcap > 0.0:
        raise NotImplementedError(f"softcap={softcap}: soft-capping is not built yet")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: ALiBi is not built yet; must be None")
    if left >= 0 or (right > 0 and not causal):
        raise NotImplementedError(f"window_size={window_size}: sliding windows are not built yet")
    # (-1, 0) is the causal mask by another name; causal overrides the right bound.
    return bool(causal) or right == 0


def _window_bounds(window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"window_size={window_size!r}: must be two integers (left, right), negative = unbounded"
        ) from None
    return left, right


def check_flag(name: str, value: object) -> bool:
    """The value of an argument that is on or off."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}={value!r}: must be True or False")
    return bool(value)


def check_scale(softmax_scale: float | None, q: Array) -> float:
    """The factor on Q K^T, 1 / sqrt(head_dim) for None."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if not abs(_number("softmax_scale", softmax_scale)) <= LARGEST_FLOAT32:
        raise ArgumentError(f"softmax_scale={softmax_scale!r}: must be finite in float32, or None")
    return float(softmax_scale)


def _number(name: str, value: object) -> float:
    """The value of a real argument (infinity above the floats); True is no number here."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{name}={value!r}, a {type(value).__qualname__}: must be a real number"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def problem_of(q: Array, k: Array, v: Array) -> Problem:
    """What q, k and v are together, or an error; layouts seen before are not checked again."""
    layouts = q.layout, k.layout, v.layout
    problem = _problems.get(layouts)
    if problem is None:
        _check_arrays(q, k, v)
        if len(_problems) >= REMEMBERED:
            _problems.clear()
        repeats = q.overlaps_itself, k.overlaps_itself, v.overlaps_itself
        problem = _problems[layouts] = Problem(layouts, q.dtype, repeats)
    return problem


def refuse_recording(arrays: Iterable[Array]) -> None:
    """Refuse tensors for which autograd would have to record what is computed here."""
    for array in arrays:
        if array.library.tracks_gradient(array.value):
            raise ArgumentError(
                f"{array.name} requires a gradient, and autograd sees nothing of this function: "
                "use fa2_numba.torch.flash_attn_func, or detach it, or torch.no_grad()"
            )


def check_like(array: Array, shape: tuple[int, ...], dtype: str, rule: str, q: Array) -> None:
    """Refuse an array that is not of that shape and dtype, or not where q is.

    rule: what its shape and dtype must be, in words.
    """
    check_same_place(array, q)
    if array.dtype != dtype:
        raise ArgumentTypeError(f"{array.name}: {array.dtype}; must be {rule}, {dtype}")
    if array.shape != shape:
        raise ArgumentError(f"{array.name}: shape {array.shape}; must be {rule}, {shape}")
    _check_aligned(array)


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    for array in (q, k, v):
        if len(array.shape) != 4:
            raise ArgumentError(
                f"{array.name}: shape {array.shape}; must be (batch, seqlen, heads, head_dim)"
            )
        if max(array.shape) > MAX_AXIS:
            raise ArgumentError(
                f"{array.name}: shape {array.shape}; no axis may be longer than {MAX_AXIS}"
            )
    _check_kinds(q, k, v)
    if k.shape != v.shape:
        raise ArgumentError(f"v: shape {v.shape}; must be that of k, {k.shape}")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"k: batch {k.shape[0]}; must be that of q, {q.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"k: head dim {k.shape[3]}; must be that of q, {q.shape[3]}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(f"q: head dim {q.shape[3]}; must be 1 to {MAX_HEAD_DIM}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads if kv_heads else heads:
        raise ArgumentError(f"q: {heads} heads; must be a multiple of k's {kv_heads} heads")


def _check_kinds(q: Array, k: Array, v: Array) -> None:
    """One dtype, one library, one device that can read them."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: all three must have one dtype, "
            f"{', '.join(DTYPES)}"
        )
    for array in (k, v):
        check_same_place(array, q)
    for array in (q, k, v):
        _check_aligned(array)


def check_same_place(array: Array, q: Array) -> None:
    """Refuse an array of another library or on another device than q."""
    if array.library is not q.library:
        raise ArgumentTypeError(
            f"{array.name}: of {type(array.value).__module__}; q is of {type(q.value).__module__}, "
            "and all arrays must be of one library"
        )
    if array.device != q.device:
        where = ["on the host" if d is None else f"on GPU {d}" for d in (array.device, q.device)]
        raise ArgumentError(f"{array.name}: {where[0]}; q is {where[1]}, and all must be together")


def _check_aligned(array: Array) -> None:
    if array.device is not None and not array.aligned:
        raise ArgumentError(
            f"{array.name}: address {array.address:#x}, strides {array.strides} bytes; on a GPU "
            f"all must be multiples of the size of a {array.dtype}"
        )


def new_output(name: str, like: Array, repeats: bool) -> Array:
    """A new array of the shape and dtype of `like`, in its memory order.

    repeats: whether `like` repeats elements and so has no order to keep.
    """
    library = like.library
    new = (
        library.empty(like.shape, like.dtype, like.device)
        if repeats
        else library.empty_like(like.value)
    )
    return of_library(name, new, library)


def given_output(name: str, value: object, like: Array, others: Iterable[Array]) -> Array:
    """The caller's own array to write into, after checks.

    others: the arrays with which it may share no memory.
    """
    array = describe(name, value)
    check_like(array, like.shape, like.dtype, f"that of {like.name}", like)
    if not array.library.writable(value):
        raise ArgumentError(f"{name}: a read-only array; must be writable")
    if array.library.tracks_gradient(value):
        raise ArgumentError(f"{name}: requires a gradient; must be a plain tensor to write into")
    if array.overlaps_itself:
        raise ArgumentError(
            f"{name}: shape {array.shape}, strides {array.strides} bytes; no two elements may "
            "share an address, as those of a broadcast array do"
        )
    for other in others:
        if array.shares_memory_with(other):
            raise ArgumentError(
                f"{name}: shares memory with {other.name}; must have memory of its own"
            )
    return array
