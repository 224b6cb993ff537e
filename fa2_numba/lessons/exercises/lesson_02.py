"""Lesson 02: two parts of a softmax become one."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import expect_close

ROWS, HEAD_DIM = 5, 3
FAR = 10_000.0
"""Between scores whose exponentials float64 cannot hold together."""
MANY_PARTS = (5, 8)
"""Parts into which a row is cut at chance places, some of them without a key."""
TOLERANCE = 1e-12
"""Of the largest value of what is compared: a few float64 roundings."""


class Part(NamedTuple):
    """What is kept of some keys: m, l (rows), o (rows, head_dim), o not divided by l."""

    m: np.ndarray
    l: np.ndarray
    o: np.ndarray


class Case(NamedTuple):
    """Scores S (rows, keys) and values V (keys, head_dim), in parts that end at `cuts`."""

    name: str
    S: np.ndarray
    V: np.ndarray
    cuts: Sequence[int]


def part_of(S: np.ndarray, V: np.ndarray) -> Part:
    """m, l and o of these keys by their definition; no key, or hidden ones alone: -inf, 0, 0."""
    m = S.max(axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        P = np.where(np.isneginf(S), 0.0, np.exp(S - m[:, None]))
    return Part(m, P.sum(axis=1), P @ V)


def cases() -> list[Case]:
    """Parts of every size, scores far apart, rows and parts without a key that can be seen."""
    rng = np.random.default_rng(2)
    S, V = rng.normal(0, 3, (ROWS, 12)), rng.normal(0, 1, (12, HEAD_DIM))
    found = [worked_example()]
    found += [Case(f"{n} keys and {12 - n}", S, V, (n,)) for n in range(13)]
    for gap in (FAR, -FAR):
        far = S + gap * (np.arange(12) >= 6)
        found.append(Case(f"scores of the second part {gap:+g} higher", far, V, (6,)))
    found.append(Case(f"all scores near {FAR:g}", S + FAR, V, (5,)))
    found.append(Case(f"all scores near {-FAR:g}", S - FAR, V, (5,)))
    hidden = S.copy()
    hidden[0] = hidden[1, :6] = hidden[2, 6:] = -np.inf
    found.append(Case("rows that see no key of one part, or of both", hidden, V, (6,)))
    found.append(Case("three parts", S, V, (4, 9)))
    found.append(Case("three parts, hidden keys among them", hidden, V, (3, 6)))
    for count in MANY_PARTS:
        cuts = np.sort(rng.integers(0, 13, count - 1)).tolist()
        found.append(Case(f"parts that end before keys {cuts}", hidden, V, cuts))
    return found


def worked_example() -> Case:
    """The lesson's: one row, scores in units of ln 2, so that exponentials are powers of 2."""
    S, V = np.log(2) * np.array([[1.0, 2.0, 3.0, 0.0]]), np.array([[10.0], [20.0], [30.0], [40.0]])
    return Case("the worked example", S, V, (2,))


def judge_merge(merge: Callable) -> None:
    """Merged parts are the whole, in either order and either grouping; parts stay as they are.

    The whole is what `part_of` all keys is: the definition, without merging.
    """
    if not callable(merge):
        raise NotSolved(f"merge is a {type(merge).__name__}: must be a function.")
    for case in cases():
        ends = (0, *case.cuts, case.S.shape[1])
        parts = [part_of(case.S[:, a:b], case.V[a:b]) for a, b in pairwise(ends)]
        whole = part_of(case.S, case.V)
        if len(parts) == 2:
            _expect_part(case.name, _merged(merge, *parts), whole)
            _expect_part(f"{case.name}, the other way round", _merged(merge, *parts[::-1]), whole)
            continue
        left = reduce(lambda a, b: _merged(merge, a, b), parts)
        _expect_part(f"{case.name}, the first two merged first", left, whole)
        right = reduce(lambda b, a: _merged(merge, a, b), parts[::-1])
        _expect_part(f"{case.name}, the last two merged first", right, whole)


def _merged(merge: Callable, a: Part, b: Part) -> Part:
    kept = [tuple(x.copy() for x in part) for part in (a, b)]
    with np.errstate(all="ignore"):
        found = merge(tuple(a), tuple(b))
    for part, before in zip((a, b), kept, strict=True):
        if not all(np.array_equal(x, y) for x, y in zip(part, before, strict=True)):
            raise NotSolved("merge changes the arrays that it is given: must make new ones.")
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise NotSolved(f"merge returns a {type(found).__name__}: must be a tuple (m, l, o).")
    return Part(*found)


def _expect_part(name: str, found: Part, expected: Part) -> None:
    for what, got, wanted in zip(Part._fields, found, expected, strict=True):
        if isinstance(got, np.ndarray) and got.dtype.kind == "f" and np.isnan(got).any():
            row = np.argwhere(np.isnan(got))[0][0]
            raise NotSolved(
                f"{what} ({name}) is NaN in row {row}: neither -inf - -inf nor 0 times inf is a "
                "number."
            )
        finite = np.abs(wanted[np.isfinite(wanted)])
        tolerance = TOLERANCE * finite.max(initial=0.0) if what != "m" else 0.0
        expect_close(f"{what} ({name})", got, wanted, tolerance)


EXERCISES = (
    Exercise(
        id="02.merge",
        answer="merge",
        points=2,
        hints=(
            "m of both together is the larger m, row by row. l and o of a part were summed with "
            "its own m: by which factor do they change if m becomes larger?",
            "exp(s - m) = exp(s - m_a) exp(m_a - m): multiply l_a and o_a by exp(m_a - m), l_b and "
            "o_b by exp(m_b - m), and add. In which row is m_a - m not a number?",
            "m = np.maximum(m_a, m_b); safe = np.where(np.isneginf(m), 0, m); the factors are "
            "np.exp(m_a - safe) and np.exp(m_b - safe), and o needs them as columns, [:, None].",
        ),
        judge=judge_merge,
    ),
)
