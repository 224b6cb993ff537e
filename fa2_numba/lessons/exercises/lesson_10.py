"""Lesson 10: D = rowsum(dO o O), and what a pair of tiles adds to dQ, dK and dV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import expect_close, numbered
from fa2_numba.lessons.kernels.row_gradients import STEP, finite_differences
from fa2_numba.reference import (
    attention_backward,
    attention_forward,
    uncancelled_gradients,
    visible,
)
from fa2_numba.testing import FLOAT32_EPS, random_qkv

FLOAT64_EPS = float(np.finfo(np.float64).eps)
SCALE = 0.4
"""Not the usual one, so that nobody can take it from the head dim."""
NAMES = ("dQ", "dK", "dV")
OPERANDS = ("Q", "K", "V", "dO", "lse", "D", "seen")


@dataclass(frozen=True)
class Case:
    """Batch, queries, keys, query heads, key-value heads, head dim; rows of the tiles.

    size: how large Q is. slopes: whether gradients are also compared with finite differences.
    """

    sizes: tuple[int, int, int, int, int, int]
    causal: bool
    tiles: tuple[int, int]
    size: float = 1.0
    slopes: bool = False

    def __str__(self) -> str:
        _, queries, keys, heads, kv_heads, _ = self.sizes
        shared = f", {heads} heads on {kv_heads}" if heads > 1 else ""
        return (
            f"{queries} queries, {keys} keys{shared}, tiles of "
            f"{self.tiles[0]} x {self.tiles[1]}{', causal' * self.causal}"
        )


CASES = (
    Case((1, 2, 2, 1, 1, 2), False, (2, 2), slopes=True),
    Case((1, 3, 5, 1, 1, 3), False, (2, 3), slopes=True),
    Case((1, 7, 4, 2, 1, 2), True, (3, 2), slopes=True),
    Case((2, 13, 21, 6, 3, 8), True, (4, 5)),
    Case((1, 37, 10, 2, 2, 8), True, (16, 4)),
    Case((1, 21, 34, 4, 1, 16), False, (8, 16), size=200.0),
)
"""The third and fifth have rows that see no key, the last one scores of hundreds."""


def judge_row_sums(function: Callable) -> None:
    """Sums over the head dim, in float32, laid out like lse."""
    _require_function("row_sums", function)
    sizes = (2, 3, 2, 4)
    expected = numbered(sizes).sum(axis=-1).swapaxes(1, 2)
    one = np.ones(sizes, np.float32)
    _expect_sums("dO 1, 2, 3, ..., O all 1", function(numbered(sizes), one), expected)
    _expect_sums("O 1, 2, 3, ..., dO all 1", function(one, numbered(sizes)), expected)
    for number, (sizes, dtype, size) in enumerate(
        (((2, 5, 3, 7), np.float32, 1), ((1, 3, 2, 64), np.float16, 1), ((1, 9, 2, 64), "f2", 90))
    ):
        rng = np.random.default_rng(number)
        dO, O = ((size * rng.standard_normal(sizes)).astype(dtype) for _ in range(2))
        exact = dO.astype(np.float64) * O.astype(np.float64)
        tolerance = sizes[-1] * FLOAT32_EPS * np.abs(exact).sum(axis=-1).max()
        case = f"{dO.dtype}, shape {sizes}, numbers up to {np.abs(dO).max():.0f}"
        with np.errstate(all="ignore"):
            found = function(dO, O)
        _expect_sums(case, found, exact.sum(axis=-1).swapaxes(1, 2), float(tolerance))


def _expect_sums(case: str, found: object, expected: np.ndarray, tolerance: float = 0.0) -> None:
    try:
        expect_close(f"D ({case})", found, expected, tolerance)
    except NotSolved as error:
        why = (
            " D[b, h, i] is the sum over d of dO[b, i, h, d] * O[b, i, h, d]: the layout of lse."
            if getattr(found, "shape", None) != expected.shape
            else " In float16 a sum of thousands has few digits left, and 65,504 is the end."
            if "float16" in case
            else ""
        )
        raise NotSolved(f"{error}{why}") from None
    if np.asarray(found).dtype != np.float32:
        raise NotSolved(f"D is {np.asarray(found).dtype} ({case}): must be float32, like lse.")


def judge_gradients(function: Callable) -> None:
    """Tile after tile in any order, the gradients of exact attention."""
    _require_function("add_gradients", function)
    for number, case in enumerate(CASES):
        q, k, v = random_qkv(*case.sizes, np.float64, seed=number)
        q *= case.size
        dout = np.random.default_rng(100 + number).standard_normal(q.shape)
        found = _tiled(function, case, (dout, q, k, v), seed=number)
        options = {"softmax_scale": SCALE, "causal": case.causal}
        exact = attention_backward(dout, q, k, v, **options)
        tolerances = _tolerances(dout, (q, k, v), options)
        slopes = _measured(dout, (q, k, v), options) if case.slopes else [None] * 3
        without_d = _without_d(dout, (q, k, v), options)
        # dV needs P alone, and what is wrong there is wrong in the others too.
        for index in (2, 0, 1):
            name, tolerance = NAMES[index], tolerances[index]
            try:
                if slopes[index] is not None:
                    what = f"{name} against finite differences of exact attention ({case})"
                    expect_close(what, found[index], *slopes[index])
                expect_close(f"{name} ({case})", found[index], exact[index], tolerance)
            except NotSolved as error:
                likely = _likely(found[index], exact[index], without_d[index], tolerance)
                likely = likely or _nan_in(found[index])
                raise NotSolved(f"{error}{likely}") from None


def _tiled(
    function: Callable, case: Case, arrays: tuple[np.ndarray, ...], seed: int
) -> tuple[np.ndarray, ...]:
    """dQ, dK and dV by the student's function, for every pair of tiles, in a shuffled order."""
    dout, q, k, v = arrays
    batch, seqlen_q, seqlen_k, heads, kv_heads, _ = case.sizes
    out, lse = attention_forward(q, k, v, softmax_scale=SCALE, causal=case.causal)
    D = (dout * out).sum(axis=-1).swapaxes(1, 2)
    mask = visible(seqlen_q, seqlen_k, case.causal)
    gradients = dq, dk, dv = tuple(np.zeros_like(x) for x in (q, k, v))
    starts = (range(0, n, tile) for n, tile in zip((seqlen_q, seqlen_k), case.tiles, strict=True))
    visits = list(product(range(batch), range(heads), *starts))
    for number in np.random.default_rng(seed).permutation(len(visits)):
        b, h, first_row, first_col = visits[number]
        kv_head = h // (heads // kv_heads)
        rows = slice(first_row, first_row + case.tiles[0])
        cols = slice(first_col, first_col + case.tiles[1])
        given = (
            *(q[b, rows, h], k[b, cols, kv_head], v[b, cols, kv_head], dout[b, rows, h]),
            *(lse[b, h, rows], D[b, h, rows], mask[rows, cols]),
        )
        # Copies, for who changes what was given must not change what is judged.
        given = [x.copy() for x in given]
        before = [x.copy() for x in given]
        sums = dq[b, rows, h], dk[b, cols, kv_head], dv[b, cols, kv_head]
        with np.errstate(all="ignore"):
            returned = function(*given, SCALE, *sums)
        _expect_in_place(returned, given, before)
    return gradients


def _expect_in_place(returned: object, given: list[np.ndarray], before: list[np.ndarray]) -> None:
    if returned is not None:
        raise NotSolved(
            f"add_gradients returns a {type(returned).__name__}: must return nothing and add to "
            "dQ, dK and dV in place, `dV += ...`, for other tiles add to them too."
        )
    for name, found, original in zip(OPERANDS, given, before, strict=True):
        if not np.array_equal(found, original, equal_nan=True):
            raise NotSolved(f"{name} was changed: must be left as it is, other tiles read it too.")


def _measured(
    dout: np.ndarray, inputs: tuple[np.ndarray, ...], options: dict
) -> list[tuple[np.ndarray, float]]:
    """Finite differences of the loss in q, k and v, and how far each may be off.

    What the length of the step does is told by another length; the rest is the loss's rounding.
    """

    def loss() -> float:
        return float((dout * attention_forward(*inputs, **options)[0]).sum())

    terms = np.abs(dout * attention_forward(*inputs, **options)[0]).sum()
    rounding = 4 * FLOAT64_EPS * float(terms) / STEP
    measured = []
    for x in inputs:
        near, far = (finite_differences(loss, x, step) for step in (STEP, 2 * STEP))
        measured.append((near, 2 * float(np.abs(far - near).max()) + rounding))
    return measured


def _tolerances(
    dout: np.ndarray, inputs: tuple[np.ndarray, ...], options: dict
) -> tuple[float, float, float]:
    """Float64 roundings of the sums, as large as they would be if nothing cancelled.

    A weight is off by the roundings of its score.
    """
    q, k, v = inputs
    largest = SCALE * np.abs(q).max() * np.abs(k).max() * q.shape[-1]
    roundings = 4 * FLOAT64_EPS * (q.shape[1] + k.shape[1] + largest)
    sums = *uncancelled_gradients(dout, q, k, np.abs(v), **options), None
    dv = attention_backward(np.abs(dout), q, k, v, **options)[2]
    return tuple(roundings * float(x.max()) for x in (*sums[:2], dv))


def _without_d(
    dout: np.ndarray, inputs: tuple[np.ndarray, ...], options: dict
) -> tuple[np.ndarray, ...]:
    """What comes out if D is left out: to the exact gradients, what P o D takes away is added."""
    q, k, v = inputs
    exact = attention_backward(dout, q, k, v, **options)
    out, lse = attention_forward(q, k, v, **options)
    group = q.shape[2] // k.shape[2]
    seen = visible(q.shape[1], k.shape[1], options["causal"])
    dq, dk = exact[0].copy(), exact[1].copy()
    for b, h in product(range(q.shape[0]), range(q.shape[2])):
        S = SCALE * q[b, :, h] @ k[b, :, h // group].T
        P = np.exp(S - lse[b, h][:, None], out=np.zeros_like(S), where=seen)
        missing = P * (dout[b, :, h] * out[b, :, h]).sum(axis=1)[:, None]
        dq[b, :, h] += SCALE * missing @ k[b, :, h // group]
        dk[b, :, h // group] += SCALE * missing.T @ q[b, :, h]
    return dq, dk, exact[2]


def _likely(found: np.ndarray, exact: np.ndarray, without_d: np.ndarray, tolerance: float) -> str:
    """What a wrong gradient looks like."""
    guesses = (
        (without_d, "D is left out"),
        (exact / SCALE, "scale is left out"),
        (exact * SCALE, "scale is in it twice"),
        (np.zeros_like(exact), "nothing is added in place (`dV = dV + x` makes a new array)"),
    )
    for wrong, why in guesses:
        if np.abs(found - wrong).max() <= 10 * tolerance / SCALE:
            return f" It is what comes out if {why}."
    return ""


def _nan_in(found: np.ndarray) -> str:
    if not np.isnan(found).any():
        return ""
    return " In a row that sees no key lse is -inf, and -inf - (-inf) is NaN; so is 0 x inf."


def _require_function(name: str, function: object) -> None:
    if not callable(function):
        raise NotSolved(f"{name} is a {type(function).__name__}: must be a function.")


EXERCISES = (
    Exercise(
        id="10.row_sums",
        answer="row_sums",
        points=1,
        hints=(
            "A row is a query of a head: the sum runs over the head dim, the last axis. In which "
            "dtype are the products, and the sum?",
            "Make both arrays float32 before they are multiplied. The sum over the last axis is "
            "(batch, seqlen, heads); lse has the heads before the queries.",
            "(dO.astype(np.float32) * O.astype(np.float32)).sum(axis=-1), then swap axes 1 and 2.",
        ),
        judge=judge_row_sums,
    ),
    Exercise(
        id="10.gradients",
        answer="add_gradients",
        points=3,
        hints=(
            "These are lines 10 to 16 of the algorithm, a line each. lse and D are numbers of "
            "rows: which axis of S do they belong to? What must P be where seen is False?",
            "S = scale * (Q @ K.T). P = exp(S - lse) where seen, else 0; np.exp has arguments out "
            "and where. dP = dO @ V.T, dS = P * (dP - D). lse[:, None] and D[:, None] are columns. "
            "dS is the gradient of the scaled scores, so dQ and dK get a factor scale.",
            "P = np.zeros_like(S); np.exp(S - lse[:, None], out=P, where=seen); dV += P.T @ dO; "
            "dS = P * (dO @ V.T - D[:, None]); dQ += scale * (dS @ K); dK is the same with dS.T "
            "and Q.",
        ),
        judge=judge_gradients,
    ),
)
