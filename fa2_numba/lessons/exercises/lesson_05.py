"""Lesson 05: a tiled kernel that divides O by l once, behind its loop over the keys."""

from itertools import product

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import SEEDS, expect_close, poisoned, run
from fa2_numba.lessons.kernels.tiled import HEAD_DIM, KEYS
from fa2_numba.reference import attention_forward, attention_forward_same_precision
from fa2_numba.simulator import Report
from fa2_numba.testing import FLOAT32_EPS, compare, random_qkv

CASES = ((4, 8, 4, 1.0), (9, 16, 16, 1.0), (13, 21, 5, 8.0), (1, 20, 32, 1.0), (7, 43, 8, 99.0))
"""Queries, keys, threads of the block, and how large Q is: 99 makes scores of hundreds."""
FLOAT = 4
SPARE = 4
"""Operations a tile of keys, and a row, that other ways to write the same may need more."""


def judge_normalise_last(kernel: object) -> None:
    """O and LSE of one head, one division at the end, nothing computed or moved twice."""
    if not callable(kernel):
        raise NotSolved(f"normalise_last is a {type(kernel).__name__}: must be a kernel.")
    scale = np.float32(HEAD_DIM**-0.5)
    for (queries, keys, threads, size), seed in product(CASES, SEEDS):
        q, k, v = random_qkv(1, queries, keys, 1, 1, HEAD_DIM, np.float32, seed=keys)
        heads = np.float32(size) * q, k, v
        Q, K, V = (x[0, :, 0] for x in heads)
        O, LSE = poisoned(Q.shape), poisoned((queries,))
        report = run(kernel, 1, threads, Q, K, V, O, LSE, scale, seed=seed)
        case = f"{queries} queries, {keys} keys, {threads} threads"
        _expect_attention(case, heads, O, LSE)
        _expect_arithmetic(case, report, queries, keys)
        _expect_traffic(case, report, queries, keys, threads)


def _expect_attention(
    case: str, heads: tuple[np.ndarray, ...], O: np.ndarray, LSE: np.ndarray
) -> None:
    """Within twice the error of NumPy with the same roundings; each tile adds some more."""
    tiles = -(-heads[1].shape[1] // KEYS)
    exact, near = attention_forward(*heads), attention_forward_same_precision(*heads)
    for what, found, true, rounded in zip(
        ("LSE", "O"), (LSE, O), exact[::-1], near[::-1], strict=True
    ):
        allowed = compare(rounded, true, rounded).allowed
        spread = 2 * tiles * FLOAT32_EPS * float(np.abs(true).max())
        expect_close(f"{what} ({case})", found, true.reshape(found.shape), allowed + spread)


def _expect_arithmetic(case: str, report: Report, queries: int, keys: int) -> None:
    tiles = -(-keys // KEYS)
    products = 4 * queries * keys * HEAD_DIM
    if report.matmul_flops != products:
        raise NotSolved(
            f"The values are right, but the products have {report.matmul_flops:,} FLOPs ({case}): "
            f"must be {products:,}, each score and each p V once. Write a step of a product as "
            "acc += a * b; that is how the simulator knows it."
        )
    # 1 / l a row, or a division of each number of O; what lies between is 1 / l in every tile.
    divides_rows = report.divisions < queries * HEAD_DIM
    every_tile = (
        f"O has {HEAD_DIM} numbers a row; what is done to each of them in each of the {tiles} "
        "tiles counts."
    )
    for what, found, most, why in (
        (
            "divisions",
            report.divisions,
            queries * HEAD_DIM,
            f"{every_tile} A row needs one l, and needs it after its last tile.",
        ),
        (
            "divisions",
            report.divisions,
            queries if divides_rows else queries * HEAD_DIM,
            f"{every_tile} A row needs 1 / l once, or each of its numbers divided once.",
        ),
        (
            "calls of exp and log",
            report.special_calls,
            queries * (keys + tiles + 1),
            "A row needs one exp a key, one a tile to rescale by, and one log.",
        ),
        (
            "other FLOPs",
            report.other_flops,
            queries * (4 * keys + tiles * (2 * HEAD_DIM + 3 + SPARE) + 2 * HEAD_DIM + SPARE),
            f"{every_tile} One multiplication, by exp(m - m_new), and one sum are all that O needs "
            "a tile.",
        ),
    ):
        if found > most:
            raise NotSolved(
                f"The values are right, but the kernel has {found:,} {what} ({case}): must be at "
                f"most {most:,}. {why}"
            )


def _expect_traffic(case: str, report: Report, queries: int, keys: int, threads: int) -> None:
    passes = -(-queries // threads)
    read = FLOAT * HEAD_DIM * (queries + 2 * passes * keys)
    for what, found, most in (
        ("read from", report.global_load_bytes, read),
        ("written to", report.global_store_bytes, FLOAT * queries * (HEAD_DIM + 1)),
    ):
        if found > most:
            raise NotSolved(
                f"The values are right, but {found:,} bytes are {what} HBM ({case}): must be at "
                f"most {most:,}. O stays in O_reg until it is finished, and is written once."
            )


EXERCISES = (
    Exercise(
        id="05.normalise_last",
        answer="normalise_last",
        points=2,
        hints=(
            "What is O multiplied by l, tile after tile? That is what O_reg shall hold. Which "
            "lines of normalise_always multiply by the old l and divide by the new one?",
            "A new tile may raise the maximum. Then everything that was summed under the old one, "
            "l and O_reg[d] alike, is multiplied by the same exp(m - m_new). l and O_reg[d] differ "
            "in one thing only: l sums p, O_reg[d] sums p times V_smem[j, d].",
            "In the loop: rescale = math.exp(m - m_new); l = rescale * l, then each p onto l; for "
            "each d: o = rescale * O_reg[d], then o += S_reg[j] * V_smem[j, d]; O_reg[d] = o; at "
            "last m = m_new. Behind it: O_gmem[row, d] = O_reg[d] / l, LSE_gmem[row] = m + "
            "math.log(l).",
        ),
        judge=judge_normalise_last,
    ),
)
