"""Lesson 04: the inner loop of a FlashAttention-1 kernel."""

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import SEEDS, expect_close, run
from fa2_numba.lessons.kernels.tiled import HEAD_DIM, KEYS
from fa2_numba.reference import attention_forward, attention_forward_same_precision
from fa2_numba.simulator import Report
from fa2_numba.testing import FLOAT32_EPS

CASES = ((4, 8, 4, 1.0), (9, 16, 16, 1.0), (13, 21, 5, 8.0), (1, 20, 32, 1.0), (19, 3, 32, 8.0))
"""Queries, keys, threads of the block, and how large Q is: the last makes scores of hundreds."""


def judge_tiled(kernel: object) -> None:
    """O, m and l of one head, with no more HBM traffic than the algorithm has."""
    if not callable(kernel):
        raise NotSolved(f"tiled_attention is a {type(kernel).__name__}: must be a kernel.")
    for number, (queries, keys, threads, size) in enumerate(CASES):
        rng = np.random.default_rng(number)
        Q, K, V = (
            rng.standard_normal((rows, HEAD_DIM)).astype(np.float32)
            for rows in (queries, keys, keys)
        )
        Q *= np.float32(size)
        case = f"{queries} queries, {keys} keys, {threads} threads"
        for seed in SEEDS:
            O = np.zeros_like(Q)
            m, l = np.full(queries, -np.inf, np.float32), np.zeros(queries, np.float32)
            scale = np.float32(HEAD_DIM**-0.5)
            report = run(kernel, 1, threads, Q, K, V, O, m, l, scale, seed=seed)
            _expect_attention(case, (Q, K, V), (O, m, l))
            _expect_traffic(case, report, queries, keys)


def _expect_attention(
    case: str, operands: tuple[np.ndarray, ...], found: tuple[np.ndarray, ...]
) -> None:
    """Within twice the error of NumPy with the same roundings; each tile adds some more to O."""
    (Q, K, _), (O, m, l) = operands, found
    heads = [x[None, :, None] for x in operands]
    tiles = -(-len(K) // KEYS)
    exact, exact_lse = (x.reshape(len(Q), -1) for x in attention_forward(*heads))
    near, near_lse = (x.reshape(len(Q), -1) for x in attention_forward_same_precision(*heads))
    S = Q.astype(np.float64) @ K.T.astype(np.float64) * HEAD_DIM**-0.5
    roundings = FLOAT32_EPS * np.abs(S).max()
    m_tolerance = 2 * (np.abs(near_lse - exact_lse).max() + roundings)
    expect_close(f"m, the row maximum ({case})", m, S.max(axis=1), float(m_tolerance))
    expect_close(
        f"l ({case})", l, np.exp(S - S.max(axis=1)[:, None]).sum(axis=1), _sum_tolerance(S)
    )
    error = np.abs(near - exact).max() + tiles * FLOAT32_EPS * np.abs(exact).max()
    expect_close(f"O ({case})", O, exact, float(2 * error))


def _sum_tolerance(S: np.ndarray) -> float:
    """What l may be off: each of its exponentials by the roundings of a score."""
    return float(S.shape[1] * 2 * FLOAT32_EPS * (1 + np.abs(S).max()))


def _expect_traffic(case: str, report: Report, queries: int, keys: int) -> None:
    tiles = -(-keys // KEYS)
    passes = tiles * queries * (HEAD_DIM + 2)
    read = 4 * (2 * keys * HEAD_DIM + tiles * queries * HEAD_DIM + passes)
    for what, found, most in (
        ("read from", report.global_load_bytes, read),
        ("written to", report.global_store_bytes, 4 * passes),
    ):
        if found > most:
            raise NotSolved(
                f"The values are right, but {found:,} bytes are {what} HBM ({case}): must be at "
                f"most {most:,}. In each of the {tiles} passes a row of O is to be read once and "
                "written once, and m and l too; what is in between belongs into registers."
            )


EXERCISES = (
    Exercise(
        id="04.tiled",
        answer="tiled_attention",
        points=3,
        hints=(
            "It is lesson 02 for one row: the keys seen so far are one part, this tile the other. "
            "What was known (m_old, l_old, O) has to be rescaled to the new maximum.",
            "First all scores of the tile into S_reg, and m_new on the way. Then rescale = "
            "exp(m_old - m_new), l_new, and exp(S_reg[j] - m_new) in place of the scores. Then O, "
            "one d at a time. O in HBM is divided by l_old: multiply by it first.",
            "for d: o = rescale * l_old * O_gmem[row, d]; for j: o += S_reg[j] * V_smem[j, d]; "
            "then O_gmem[row, d] = o / l_new. Only the first `keys` rows of the tile are keys.",
        ),
        judge=judge_tiled,
    ),
)
