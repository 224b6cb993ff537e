"""Lesson 07: a sliced-K kernel becomes split-Q, with the right values and without the exchange."""

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import expect_close, expect_equal, poisoned, run
from fa2_numba.lessons.kernels.partition import HEAD_DIM, KEYS, ROWS, WARPS
from fa2_numba.reference import attention_forward, attention_forward_same_precision
from fa2_numba.simulator import Report
from fa2_numba.testing import compare, random_qkv

LARGE = 64
"""Makes scores of hundreds: without the maximum their exponentials overflow."""
LAUNCHES = (
    # seqlen_q, seqlen_k, heads, kv_heads, head_dim, seed, factor of Q
    (4, 64, 1, 1, 32, None, 1),
    (1, 5, 1, 1, 8, 1, 1),
    (3, 33, 1, 1, 32, 2, LARGE),
    (7, 64, 4, 2, 9, 1, 1),
    (5, 70, 2, 1, 20, 2, 1),
    (4, 130, 1, 1, 32, None, LARGE),
)
"""A whole tile; one key; a slice of one key; heads that share; ragged ends; three tiles of keys."""
THREADS = 32 * WARPS
FLOAT = 4


def judge_split_q(kernel: object) -> None:
    """Exact attention over odd sizes; no exchange, two barriers a tile, every number once."""
    if not callable(kernel):
        raise NotSolved(f"split_q_attention is a {type(kernel).__name__}: must be a kernel.")
    for *sizes, seed, factor in LAUNCHES:
        seqlen_q, seqlen_k, heads, kv_heads, head_dim = sizes
        q, k, v = random_qkv(1, *sizes, np.float32)
        q *= np.float32(factor)
        out = poisoned(q.shape[1:])
        grid = heads, -(-seqlen_q // ROWS)
        scale = np.float32(head_dim**-0.5)
        report = run(kernel, grid, THREADS, q[0], k[0], v[0], out, scale, seed=seed)
        exact, _ = attention_forward(q, k, v)
        rounded, _ = attention_forward_same_precision(q, k, v)
        allowed = compare(rounded[0], exact[0], rounded[0]).allowed
        given = (
            f"{seqlen_q} queries, {seqlen_k} keys, {heads} query and {kv_heads} key-value heads, "
            f"head dim {head_dim}"
        )
        expect_close(f"O[query, head, column] ({given})", out, exact[0], allowed)
        _expect_traffic(report, sizes, given)


def _expect_traffic(report: Report, sizes: list[int], given: str) -> None:
    seqlen_q, seqlen_k, heads, _, head_dim = sizes
    query_tiles, tiles = -(-seqlen_q // ROWS), -(-seqlen_k // KEYS)
    blocks = heads * query_tiles
    stored = FLOAT * HEAD_DIM * blocks * (ROWS + 2 * KEYS * tiles)
    _expect(
        f"the number of bytes stored in shared memory ({given})",
        report.shared_store_bytes,
        stored,
        "Those are the tiles of Q, K and V, once each. No maximum, sum or partial O has to go "
        "there: a row is one warp's.",
    )
    barriers = 2 * blocks * tiles
    if report.barriers > barriers:
        raise NotSolved(
            f"O is right, but the number of barriers ({given}) is {report.barriers}: must be "
            f"{barriers} at most, two for each tile of keys a block visits, around loading it. "
            "After that each warp needs its own rows only."
        )
    matmul_flops = 4 * blocks * tiles * ROWS * KEYS * HEAD_DIM
    if report.matmul_flops > matmul_flops:
        raise NotSolved(
            f"O is right, but the number of matrix-product FLOPs ({given}) is "
            f"{report.matmul_flops}: must be {matmul_flops} at most. Each warp computes its own "
            "rows, for all keys of the tile, and no others."
        )
    _expect(
        f"the number of bytes written to global memory ({given})",
        report.global_store_bytes,
        FLOAT * seqlen_q * heads * head_dim,
        "Every number of O is written once, at the end.",
    )
    _expect(
        f"the number of bytes read from global memory ({given})",
        report.global_load_bytes,
        FLOAT * head_dim * heads * (seqlen_q + 2 * query_tiles * seqlen_k),
        "A block reads its rows of Q, and every row of K and V, once.",
    )


def _expect(what: str, found: int, expected: int, why: str) -> None:
    try:
        expect_equal(what, found, expected)
    except NotSolved as error:
        raise NotSolved(f"O is right, but {error} {why}") from None


EXERCISES = (
    Exercise(
        id="07.split_q",
        answer="split_q_attention",
        points=4,
        hints=(
            "In the sliced-K kernel a warp does all rows and its own slice of the keys. Swap the "
            "two: its own rows, and all slices of the tile. Which of the barriers are then for "
            "tiles of K and V, and which for the exchange?",
            "For each own row and each slice: 32 scores, one a lane; warp_max and warp_sum give "
            "every lane the slice's maximum and sum. Treat a slice as lesson 02 treats the next "
            "part of a row: rescale l and O by exp(m - new m), then add. One barrier before the "
            "tiles are loaded, for the warp that still reads the old ones, one after.",
            "for i in range(WARP_ROWS): row = WARP_ROWS * warp + i; for first in range(0, KEYS, "
            "SLICE): s = softmax_scale * score(Q_smem, K_smem, row, first + lane, seqlen_k - "
            "first_key); m = max(m_reg[i], warp_max(s)); rescale = math.exp(m_reg[i] - m); "
            "p = math.exp(s - m); then l_reg[i], O_reg[i] with weighted_values(p, V_smem, first), "
            "m_reg[i]. At the end O_reg[i] / l_reg[i], for rows and columns that exist.",
        ),
        judge=judge_split_q,
    ),
)
