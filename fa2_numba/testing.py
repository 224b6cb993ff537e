"""How the kernels are judged: a tolerance taken from data, poisoned buffers, a shape matrix.

A kernel's answer is compared with exact attention in float64. The error it may have is not a habit
such as 1e-3. It is twice the error of a NumPy computation that makes the same roundings, plus
twice one rounding of the largest exact value::

    max|actual - exact| <= 2 * (max|same_precision - exact| + eps * max|exact|)

This works for every dtype and every size of numbers, and a kernel that skips part of its work
does not fit in. No test framework is needed here.

dQ and dK are made of differences between float32 sums, and a kernel may be off by a rounding of
those even where the exact value is 0 everywhere. For these two, one rounding is at least float32's
eps times the largest of `reference.uncancelled_gradients`.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from fa2_numba.problem import Problem
from fa2_numba.reference import (
    attention_backward,
    attention_backward_same_precision,
    attention_forward,
    attention_forward_same_precision,
    uncancelled_gradients,
)

# How many times the error of the same-precision reference, and one rounding, a kernel may be off:
# it sums in another order and uses faster exponentials than NumPy does.
ALLOWANCE = 2

FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on one array and the numbers that led to it.

    `error` and `reference_error` are the largest absolute differences from the exact values of
    the judged array and of the same-precision reference. Both are NaN or inf if a NaN or an
    infinity stands where it should not. `rounding` is one rounding of the largest exact value, or
    of the float32 sums it is a difference of.
    `worst` is the index where `error` was found (None for an empty array); `actual` and `exact`
    are the values there.
    """

    error: float
    reference_error: float
    rounding: float
    worst: tuple[int, ...] | None
    actual: float
    exact: float

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return ALLOWANCE * (self.reference_error + self.rounding)

    @property
    def passed(self) -> bool:
        """Whether the error is finite and at most what is allowed; NaN never passes."""
        finite = math.isfinite(self.error) and math.isfinite(self.allowed)
        return finite and self.error <= self.allowed

    def __str__(self) -> str:
        """Both errors, and the coordinate where the worst one was found."""
        relation = "<=" if self.passed else "is not <="
        return (
            f"error {self.error:.3g} {relation} allowed {self.allowed:.3g} = {ALLOWANCE} * "
            f"(reference error {self.reference_error:.3g} + one rounding {self.rounding:.3g}); "
            f"worst at {self.worst}: actual {self.actual:.9g}, exact {self.exact:.9g}"
        )


def compare(
    actual: np.ndarray,
    exact: np.ndarray,
    same_precision: np.ndarray,
    uncancelled: np.ndarray | None = None,
) -> Comparison:
    """Judge an array by the tolerance rule of this module.

    Args:
        actual: what a kernel computed; its dtype decides the size of one rounding.
        exact: the float64 answer. An infinity in it (the lse of a row without visible keys) must
            stand in `actual` too, and takes no part in the maxima.
        same_precision: the answer of a reference that rounds as the kernel does.
        uncancelled: how large values would be if the float32 sums in them did not cancel.

    Raises:
        ValueError: if the first three shapes differ.
    """
    actual, exact, same_precision = map(np.asarray, (actual, exact, same_precision))
    if not actual.shape == exact.shape == same_precision.shape:
        raise ValueError(
            f"actual has shape {actual.shape}, exact {exact.shape} and same_precision "
            f"{same_precision.shape}; they must be equal"
        )
    exact = exact.astype(np.float64)
    error, worst = _largest_error(actual, exact)
    reference_error, _ = _largest_error(same_precision, exact)
    largest = np.abs(exact).max(initial=0.0, where=np.isfinite(exact))
    rounding = float(ml_dtypes.finfo(actual.dtype).eps) * float(largest)
    if uncancelled is not None:
        rounding = max(rounding, FLOAT32_EPS * float(uncancelled.max(initial=0.0)))
    return Comparison(
        error=error,
        reference_error=reference_error,
        rounding=rounding,
        worst=worst,
        actual=math.nan if worst is None else float(actual[worst]),
        exact=math.nan if worst is None else float(exact[worst]),
    )


def _largest_error(values: np.ndarray, exact: np.ndarray) -> tuple[float, tuple[int, ...] | None]:
    """Return max|values - exact| and where it is; NaN or inf if a value is not finite there."""
    if values.size == 0:
        return 0.0, None
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is looked at in the next line
        differences = np.abs(values - exact)
    differences[np.isinf(exact) & (values == exact)] = 0
    # NaN compares as neither larger nor smaller: rank it above every number, or max may miss it.
    ranks = np.where(np.isnan(differences), np.inf, differences)
    worst = tuple(int(i) for i in np.unravel_index(ranks.argmax(), ranks.shape))
    return float(differences[worst]), worst


def compare_attention(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options
) -> tuple[Comparison, Comparison]:
    """Compare out and lse with both references, each of which runs once.

    Args:
        out: (B, Sq, H, D), in the dtype of q.
        lse: (B, H, Sq), natural logarithm.
        q: (B, Sq, H, D), as given to the kernel.
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        **options: keyword arguments of `fa2_numba.reference.attention_forward`.

    Returns:
        The comparison of out and that of lse.
    """
    exact = attention_forward(q, k, v, **options)
    rounded = attention_forward_same_precision(q, k, v, **options)
    return compare(out, exact[0], rounded[0]), compare(lse, exact[1], rounded[1])


def assert_attention(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options
) -> None:
    """Raise AssertionError, also under ``python -O``, unless out and lse both pass.

    The arguments are those of `compare_attention`.
    """
    _assert_passed(("out", "lse"), compare_attention(out, lse, q, k, v, **options))


def compare_gradients(
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    **options,
) -> tuple[Comparison, Comparison, Comparison]:
    """Compare dq, dk and dv with both references, each of which runs once.

    Args:
        dq: (B, Sq, H, D), in the dtype of q.
        dk: (B, Sk, Hk, D), likewise.
        dv: (B, Sk, Hk, D), likewise.
        dout: (B, Sq, H, D), as given to the kernel.
        q: (B, Sq, H, D), as given to the kernel.
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        **options: keyword arguments of `fa2_numba.reference.attention_backward`.

    Returns:
        The comparisons of dq, dk and dv.
    """
    exact = attention_backward(dout, q, k, v, **options)
    rounded = attention_backward_same_precision(dout, q, k, v, **options)
    uncancelled = *uncancelled_gradients(dout, q, k, v, **options), None
    return tuple(map(compare, (dq, dk, dv), exact, rounded, uncancelled))


def assert_gradients(
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    **options,
) -> None:
    """Raise AssertionError, also under ``python -O``, unless dq, dk and dv all pass.

    The arguments are those of `compare_gradients`.
    """
    verdicts = compare_gradients(dq, dk, dv, dout, q, k, v, **options)
    _assert_passed(("dq", "dk", "dv"), verdicts)


def _assert_passed(names: tuple[str, ...], verdicts: tuple[Comparison, ...]) -> None:
    failures = [
        f"{name}: {verdict}"
        for name, verdict in zip(names, verdicts, strict=True)
        if not verdict.passed
    ]
    if failures:
        raise AssertionError("\n".join(failures))


def poisoned(shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an array full of NaN: an output buffer in which unwritten entries show."""
    return np.full(shape, np.nan, dtype)


def poisoned_rows(
    values: np.ndarray, extra_rows: int, poison: float = math.nan, axis: int = 1
) -> np.ndarray:
    """Copy `values` into a buffer with poison after the last row; return the view of the rows.

    With the default axis, the sequence axis of (batch, seqlen, heads, head_dim), every sequence
    is followed by `extra_rows` rows of `poison`. A kernel that reads past the end and does not
    mask what it found there shows it. NaN tests products and sums; -inf and inf test a maximum,
    which may ignore NaN.

    >>> view = poisoned_rows(np.ones((1, 2, 1, 3)), extra_rows=4)
    >>> view.shape, view.base.shape
    ((1, 2, 1, 3), (1, 6, 1, 3))
    """
    shape = list(values.shape)
    rows = shape[axis]
    shape[axis] += extra_rows
    buffer = np.full(shape, poison, values.dtype)
    view = buffer[(slice(None),) * (axis % values.ndim) + (slice(rows),)]
    view[...] = values
    return view


def random_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw standard normal q (batch, seqlen_q, heads, head_dim) and k, v, rounded to dtype."""
    rng = np.random.default_rng(seed)
    kv_shape = (batch, seqlen_k, kv_heads, head_dim)
    q = rng.standard_normal((batch, seqlen_q, heads, head_dim)).astype(dtype)
    k = rng.standard_normal(kv_shape).astype(dtype)
    v = rng.standard_normal(kv_shape).astype(dtype)
    return q, k, v


@dataclass(frozen=True)
class Case(Problem):
    """One attention problem of the shape matrix and the reason why it is there."""

    reason: str = ""

    @property
    def id(self) -> str:
        """The case as a test id.

        >>> Case(2, 3, 1, 113, 203, 64, True, "an example").id
        'B2-H3-Hk1-Lq113-Lk203-d64-causal'
        """
        sizes = (
            f"B{self.batch}-H{self.heads}-Hk{self.kv_heads}"
            f"-Lq{self.seqlen_q}-Lk{self.seqlen_k}-d{self.head_dim}"
        )
        return sizes + ("-causal" if self.causal else "")

    def qkv(self, dtype: DTypeLike, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw q, k, v of these sizes, see `random_qkv`."""
        return random_qkv(
            self.batch,
            self.seqlen_q,
            self.seqlen_k,
            self.heads,
            self.kv_heads,
            self.head_dim,
            dtype,
            seed,
        )


# Small on purpose: a simulator in Python runs every one of them thread by thread.
SHAPES = [
    Case(2, 4, 4, 1, 1, 64, False, "one query, one key: out is the row of v"),
    Case(2, 4, 4, 1, 130, 64, True, "one query row, as when decoding: causal hides nothing"),
    Case(1, 1, 1, 64, 64, 64, False, "exactly one tile"),
    Case(1, 1, 1, 63, 63, 64, True, "one row less than a tile"),
    Case(1, 1, 1, 65, 65, 64, True, "one row more than a tile: a second tile of one row"),
    Case(1, 1, 1, 5, 259, 64, False, "many key tiles: O and l are rescaled again and again"),
    Case(1, 1, 1, 97, 33, 40, False, "more queries than keys; head_dim not a multiple of 16"),
    Case(1, 1, 1, 33, 97, 64, True, "more keys than queries: causal is aligned bottom-right"),
    Case(1, 1, 1, 97, 33, 64, True, "the first 64 rows, a whole tile, see no key"),
    Case(1, 1, 1, 80, 50, 40, True, "rows without a key and rows with one share a tile"),
    Case(1, 1, 1, 35, 66, 72, True, "head_dim 72: above 64, not a multiple of 16"),
    Case(1, 1, 1, 65, 66, 128, False, "head_dim 128, ragged tiles on both sides"),
    Case(2, 3, 3, 33, 47, 64, False, "several batches and heads: offsets"),
    Case(1, 12, 4, 17, 34, 64, True, "GQA: three query heads read one key/value head"),
    Case(2, 5, 1, 10, 9, 40, True, "MQA with an odd number of heads, first row without a key"),
]
