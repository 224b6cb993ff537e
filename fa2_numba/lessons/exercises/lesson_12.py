"""Lesson 12: the head that looks at the first key most, found without P."""

import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fa2_numba.data import load_smollm2
from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.reference import attention_forward

LARGE = 2048
MOST_BYTES = 2**22
"""P of one head of LARGE queries and keys would take 8 times as much in float64."""
TOLERANCE = 1e-4
"""Of a share: room for float32."""


class Case(NamedTuple):
    """q (seqlen_q, heads, d), k (seqlen_k, kv_heads, d), and their causal lse (heads, seqlen_q)."""

    name: str
    q: np.ndarray
    k: np.ndarray
    lse: np.ndarray


def shares(case: Case) -> np.ndarray:
    """What each head gives to the first key, on average over the queries that see any: (heads,)."""
    K = np.repeat(case.k[0], case.q.shape[1] // case.k.shape[1], axis=0)
    S = np.einsum("nhd,hd->hn", case.q.astype(np.float64), K) * case.q.shape[-1] ** -0.5
    sees = np.isfinite(case.lse)
    return np.array(
        [np.exp(s[i] - lse[i]).mean() for s, lse, i in zip(S, case.lse, sees, strict=True)]
    )


def random_case(
    name: str, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, sink: int, seed: int
) -> Case:
    """Heads whose scores of the first key are all alike, but one of them has smaller other ones.

    So the raw scores of the first key name another head than the shares do.
    """
    rng = np.random.default_rng(seed)
    d = 8
    q = rng.normal(0, 1, (seqlen_q, heads, d)).astype(np.float32)
    k = rng.normal(0, 1, (seqlen_k, kv_heads, d)).astype(np.float32)
    # The last column of a query meets the first key alone, the one before it all others.
    k[:, :, -2:] = (1, 0)
    k[0, :, -2:] = (0, 1)
    q[:, :, -2:] = 8
    q[:, sink, -2:] = (-2, 6)
    return Case(name, q, k, lse_of(q, k))


def lse_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The causal LSE of the float64 oracle: (heads, seqlen_q)."""
    _, lse = attention_forward(q[None], k[None], k[None], causal=True)
    return lse[0].astype(np.float64)


def cases() -> list[Case]:
    """Head ratios, unequal lengths, queries that see no key; then a layer that is real."""
    layer = load_smollm2(15)
    q, k = (x[0, :100].astype(np.float32) for x in (layer.q, layer.k))
    return [
        random_case("4 heads of their own keys", 20, 20, 4, 4, sink=2, seed=1),
        random_case("6 heads, 2 key heads", 33, 33, 6, 2, sink=1, seed=2),
        random_case("3 heads, 1 key head, more keys than queries", 7, 19, 3, 1, sink=0, seed=3),
        random_case("6 heads, 3 key heads, queries that see no key", 19, 7, 6, 3, sink=4, seed=4),
        random_case("one query, one key", 1, 1, 1, 1, sink=0, seed=5),
        Case("layer 15 of SmolLM2, 100 tokens", q, k, lse_of(q, k)),
    ]


def judge_sink_head(function: Callable) -> None:
    """Finds head and share, and takes no memory that grows with the square of N."""
    if not callable(function):
        raise NotSolved(f"sink_head is a {type(function).__name__}: must be a function.")
    for case in cases():
        _compare(function, case)
    _expect_little_memory(function)


def _compare(function: Callable, case: Case) -> None:
    with np.errstate(all="ignore"):
        found = function(case.q.copy(), case.k.copy(), case.lse.copy())
    if not isinstance(found, tuple) or len(found) != 2:
        raise NotSolved(f"sink_head returns {found!r}: must be (head, share).")
    expected = shares(case)
    head, share = found
    best = int(expected.argmax())
    listed = ", ".join(f"{value:.3f}" for value in expected)
    if head != best:
        raise NotSolved(
            f"head is {head} ({case.name}): must be {best}. The shares of the heads are {listed}."
        )
    if not abs(share - expected[best]) <= TOLERANCE:
        raise NotSolved(
            f"The head is right, but share is {share} ({case.name}): must be {expected[best]:.6f}, "
            "the mean of exp(score of the first key - lse) over the queries that see a key."
        )


def _expect_little_memory(function: Callable) -> None:
    rng = np.random.default_rng(6)
    q, k = (rng.normal(0, 1, (LARGE, 1, 4)).astype(np.float32) for _ in range(2))
    lse = np.full((1, LARGE), 10.0)
    tracemalloc.start()
    try:
        function(q, k, lse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > MOST_BYTES:
        raise NotSolved(
            f"The answers are right, but for {LARGE} tokens of one head it takes "
            f"{peak / 2**20:.0f} MiB: must be less than {MOST_BYTES / 2**20:.0f}. P would have "
            f"{LARGE} x {LARGE} numbers; one column of it is enough."
        )


EXERCISES = (
    Exercise(
        id="12.sink_head",
        answer="sink_head",
        points=2,
        hints=(
            "A weight is exp(S - lse): with lse at hand, each weight can be had alone. Which "
            "scores does the question need?",
            "Only those of key 0: for query head h the dot product of q[:, h] with "
            "k[0, h // group], times head_dim ** -0.5, one number a query. Group: query heads a "
            "key head.",
            "s = q[:, h] @ k[0, h // group] * scale; sees = np.isfinite(lse[h]); the share is "
            "np.exp(s[sees] - lse[h][sees]).mean(). Return the head with the largest, and it.",
        ),
        judge=judge_sink_head,
    ),
)
