"""The backward passes of the CUDA-core rungs against exact gradients, and mutations of them.

A mutation replaces a piece of text in the kernel's module, or in one that its verbs come from; both
are executed again, under their own file names.
"""

import numpy as np
import pytest

from fa2_numba import Simulator
from fa2_numba.config import HEAD_DIM_STEP, TileConfig, choose_backward_tiles, col_step, row_step
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.ladder import RUNGS
from fa2_numba.simulator import RaceError, ThreadError
from fa2_numba.testing import assert_gradients, poisoned_rows, random_qkv

from .conftest import (
    CUDA_CORE_RUNGS,
    DTYPES,
    FAST_SIMULATOR,
    SIMULATOR,
    mutated,
    run_backward,
)

BACKWARD_RUNGS = [name for name in CUDA_CORE_RUNGS if RUNGS[name].plan_backward]
KERNELS = "fa2_numba.kernels."
DEVICE = "fa2_numba.device."

rungs = pytest.mark.parametrize("rung", BACKWARD_RUNGS)
PASSES = [
    pytest.param("standard", False, id="standard"),
    pytest.param("fa2_split_q", False, id="fa2_split_q"),
    pytest.param("fa2_split_q", True, id="fa2_split_q-deterministic"),
]
"""Every backward pass there is: `standard` has one, whether it must be deterministic or not."""

PASS = ("rung", "deterministic")
passes = pytest.mark.parametrize(PASS, PASSES)


def tiles(head_dim):
    """The smallest tiles, so that small shapes have several of them."""
    return TileConfig(-(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, 16, 16, 4)


def gradient_of(qkv, seed=7):
    """Draw dout, like q."""
    q = qkv[0]
    return np.random.default_rng(seed).standard_normal(q.shape).astype(q.dtype)


def differentiate(rung, qkv, dout, simulator=FAST_SIMULATOR, causal=False, **options):
    plan = RUNGS[rung].plan_backward if isinstance(rung, str) else rung.plan_backward
    config = options.pop("config", tiles(qkv[0].shape[-1]))
    *gradients, _ = run_backward(plan, qkv, dout, config, simulator, causal, **options)
    return gradients


def check(rung, qkv, simulator=FAST_SIMULATOR, causal=False, dout=None, **options):
    dout = gradient_of(qkv) if dout is None else dout
    gradients = differentiate(rung, qkv, dout, simulator, causal, **options)
    scale = {name: options[name] for name in ("softmax_scale",) if name in options}
    assert [x.dtype for x in gradients] == [x.dtype for x in qkv]
    assert_gradients(*gradients, dout, *qkv, causal=causal, **scale)
    return gradients


# Shapes.

SHAPES = {
    "Lq96-Lk96-d32": (1, 96, 96, 1, 1, 32, False),
    "Lq96-Lk96-d32-causal": (1, 96, 96, 1, 1, 32, True),
    "Lq65-Lk65-d16-causal": (1, 65, 65, 1, 1, 16, True),
    "H6-Hk2-Lq17-Lk17-d16": (1, 17, 17, 6, 2, 16, False),
    "B2-H3-Hk1-Lq5-Lk33-d8-causal": (2, 5, 33, 3, 1, 8, True),
    # The first two query tiles see no key, nor do the first rows of the third.
    "Lq50-Lk10-d16-causal": (1, 50, 10, 1, 1, 16, True),
    "Lq1-Lk1-d16": (1, 1, 1, 1, 1, 16, False),
    "Lq1-Lk33-d16": (1, 1, 33, 1, 1, 16, False),
    "Lq33-Lk1-d16": (1, 33, 1, 1, 1, 16, False),
}
COSTLY = ("Lq96-Lk96-d32", "Lq96-Lk96-d32-causal", "Lq65-Lk65-d16-causal")


def shape_cases():
    """Every shape on every pass; costly ones on one pass each, on the others in the sweep."""
    for number, (shape, sizes) in enumerate(SHAPES.items()):
        for place, one in enumerate(PASSES):
            chosen = shape not in COSTLY or number % len(PASSES) == place
            marks = () if chosen else pytest.mark.sweep
            yield pytest.param(*sizes, *one.values, id=f"{shape}-{one.id}", marks=marks)


@pytest.mark.parametrize(
    (*("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "causal"), *PASS),
    list(shape_cases()),
)
def test_shapes(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, causal, rung, deterministic):
    qkv = random_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, np.float32, seed=1)
    check(rung, qkv, causal=causal, deterministic=deterministic)


@passes
@pytest.mark.parametrize("head_dim", [1, 33, 72, pytest.param(256, marks=pytest.mark.sweep)])
def test_head_dims(head_dim, rung, deterministic):
    qkv = random_qkv(1, 19, 21, 1, 1, head_dim, np.float32, seed=head_dim)
    check(rung, qkv, causal=True, deterministic=deterministic)


@rungs
def test_head_dim_256_with_the_tiles_of_the_smallest_device(rung):
    config = choose_backward_tiles(256, min(SHARED_BYTES_PER_BLOCK.values()))
    check(rung, random_qkv(1, 9, 10, 1, 1, 256, np.float32), causal=True, config=config)


@passes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_arrays(dtype, rung, deterministic):
    qkv = random_qkv(1, 20, 21, 2, 1, 24, DTYPES[dtype], seed=2)
    check(rung, qkv, causal=True, deterministic=deterministic)


@passes
def test_with_all_checks_of_the_simulator(rung, deterministic):
    qkv = random_qkv(1, 21, 19, 2, 1, 12, np.float32, seed=3)
    check(rung, qkv, SIMULATOR, causal=True, deterministic=deterministic)


@passes
@pytest.mark.sweep
@pytest.mark.parametrize("num_warps", range(1, 9))
def test_warps(num_warps, rung, deterministic):
    config = TileConfig(16, row_step(num_warps), 2 * col_step(num_warps), num_warps)
    qkv = random_qkv(1, 70, 45, 1, 1, 16, np.float32, seed=num_warps)
    check(rung, qkv, SIMULATOR, causal=True, deterministic=deterministic, config=config)


@passes
@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 64), ("float16", 100), ("bfloat16", 128)]
)
def test_the_tiles_of_a_large_device(dtype, head_dim, causal, rung, deterministic):
    config = choose_backward_tiles(head_dim, max(SHARED_BYTES_PER_BLOCK.values()))
    qkv = random_qkv(1, 65, 97, 2, 1, head_dim, DTYPES[dtype], seed=4)
    check(rung, qkv, causal=causal, deterministic=deterministic, config=config)


# Numbers.


@passes
def test_rows_that_see_nothing_contribute_exact_zeros(rung, deterministic):
    qkv = random_qkv(1, 40, 7, 1, 1, 16, np.float32, seed=5)
    dout = gradient_of(qkv)
    dq, dk, dv = check(rung, qkv, causal=True, dout=dout, deterministic=deterministic)
    blind = 40 - 7
    assert not dq[:, :blind].any() and dq[:, blind + 1 :].all()
    dout[:, :blind] *= 1000
    others = differentiate(rung, qkv, dout, causal=True, deterministic=deterministic)
    np.testing.assert_array_equal(others[1], dk)
    np.testing.assert_array_equal(others[2], dv)


@passes
def test_huge_scores(rung, deterministic):
    """Around 1e5, without rounding (1e5 in float32 is known to 0.008, and so is ln P): one key
    takes all, and P = exp(S - LSE) of the others overflows nowhere."""
    rng = np.random.default_rng(2)
    q, k = (100 * rng.integers(-4, 5, (1, 9, 1, 16)).astype(np.float32) for _ in range(2))
    k, v = k[:, :8], random_qkv(1, 9, 8, 1, 1, 16, np.float32)[2]
    options = {"deterministic": deterministic, "softmax_scale": 1.0}
    check(rung, (q, k, v), **options)
    check(rung, (q, -k, v), causal=True, **options)


@passes
@pytest.mark.parametrize("softmax_scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(softmax_scale, rung, deterministic):
    qkv = random_qkv(1, 19, 35, 1, 1, 16, np.float32, seed=7)
    options = {"deterministic": deterministic, "softmax_scale": softmax_scale}
    dq, dk, _ = check(rung, qkv, causal=True, **options)
    if softmax_scale == 0:
        assert not dq.any() and not dk.any()


# Memory.


@passes
def test_padding_never_leaks(rung, deterministic):
    """Rows past the end may hold anything."""
    qkv = random_qkv(1, 9, 10, 1, 1, 24, np.float16, seed=8)
    dout = gradient_of(qkv)
    expected = check(rung, qkv, dout=dout, deterministic=deterministic)
    for poison in (np.nan, np.inf):
        *dirty, dirty_dout = (poisoned_rows(x, 30, poison) for x in (*qkv, dout))
        got = differentiate(rung, dirty, dirty_dout, deterministic=deterministic)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def strided(x, order):
    """The same values, with axes in memory in this order and the rows backwards."""
    return x.transpose(order)[..., ::-1].copy()[..., ::-1].transpose(np.argsort(order))


@passes
def test_strides_change_no_bit(rung, deterministic):
    qkv = random_qkv(1, 6, 18, 2, 1, 5, np.float32, seed=9)
    dout = gradient_of(qkv)
    expected = differentiate(rung, qkv, dout, deterministic=deterministic)
    orders = (0, 2, 1, 3), (3, 0, 2, 1), (2, 1, 3, 0), (1, 2, 0, 3)
    *views, dout = map(strided, (*qkv, dout), orders)
    got = differentiate(rung, views, dout, deterministic=deterministic)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# Order.


def in_shuffled_order(rung, seeds, **options):
    """The gradients of one problem in several orders of threads and blocks."""
    qkv = random_qkv(1, 18, 40, 2, 1, 4, np.float32, seed=10)
    dout = gradient_of(qkv)
    for seed in seeds:
        simulator = Simulator(seed=seed, checks=False, progress=False)
        yield differentiate(rung, qkv, dout, simulator, causal=True, **options)


@rungs
def test_gradients_repeat_bit_for_bit(rung):
    """dK and dV always, and whichever way dQ is computed; dQ where it must."""
    (dq, dk, dv), again = in_shuffled_order(rung, (None, 1), deterministic=True)
    np.testing.assert_array_equal(again[0], dq)
    for other in (again, *in_shuffled_order(rung, (2,), deterministic=False)):
        np.testing.assert_array_equal(other[1], dk)
        np.testing.assert_array_equal(other[2], dv)


# Mutations.

MODULES = (
    *(DEVICE + verbs for verbs in ("mask", "tiles", "backward")),
    *(KERNELS + kernels for kernels in ("standard", "backward_parts")),
)
"""What is mutated or imports one that is, each behind those it imports."""


def mutated_rung(monkeypatch, rung, *mutation):
    return mutated(monkeypatch, (*MODULES, f"{KERNELS}{rung}_backward"), *mutation)


SPLIT_Q = KERNELS + "fa2_split_q_backward"
STANDARD = KERNELS + "standard_backward"
PARTS = KERNELS + "backward_parts"
VERBS = DEVICE + "backward"
MASK_OF_KEYS = "int32(one_key {}+ seqlen_q - seqlen_k)"
BOTH = {
    "D-of-one-lane": (PARTS, "total = sum_over_lanes(total)", "pass"),
    "D-without-O": (PARTS, "head, d]) * o", "head, d])"),
    "lse-of-blind-rows": (VERBS, "-NEG_INF if lse == NEG_INF else lse", "lse"),
}
REJECTED = {
    ("fa2_split_q", False): BOTH
    | {
        "lse-not-loaded": (VERBS, "lse_reg[i] = weight_exponent", "D_reg[i] = weight_exponent"),
        "mask-off-by-one": (DEVICE + "mask", MASK_OF_KEYS.format(""), MASK_OF_KEYS.format("- 1 ")),
        "last-query-tile-left-out": (
            SPLIT_Q,
            "begin, seqlen_q, BLOCK_M)",
            "begin, seqlen_q - 3, BLOCK_M)",
        ),
        "one-head-of-the-group": (SPLIT_Q, "(kv_head + 1) * group", "kv_head * group + 1"),
        "D-left-out": (SPLIT_Q, "dP_reg[i, j] - D_reg[j]", "dP_reg[i, j]"),
        "dK-not-scaled": (SPLIT_Q, "col, dK_reg, scale", "col, dK_reg, float32(1.0)"),
        "dV-scaled": (SPLIT_Q, "col, dV_reg, float32(1.0)", "col, dV_reg, scale"),
        "dP-not-P": (SPLIT_Q, "P_reg[i, j] *=", "P_reg[i, j] ="),
        "dS-not-transposed": (
            SPLIT_Q,
            "dS_smem[d + LANE_COLS * j, query + LANE_ROWS * i]",
            "dS_smem[query + LANE_ROWS * i, d + LANE_COLS * j]",
        ),
        "dQ-not-cleared": (SPLIT_Q, "clear_queries(dQ_reg)", "pass"),
        "dQ-sum-not-cleared": (PARTS, "if clears_dq:", "if False:"),
        "dQ-not-scaled": (PARTS, "softmax_scale * dQ_sum_gmem", "dQ_sum_gmem"),
        "dQ-stored-not-added": (
            VERBS,
            "cuda.atomic.add(X_gmem, (batch, i_row, head, d), X_reg[i, c])",
            "X_gmem[batch, i_row, head, d] = X_reg[i, c]",
        ),
    },
    ("fa2_split_q", True): {
        "D-left-out": (SPLIT_Q, "dP_reg[i, j] - D_reg[i]", "dP_reg[i, j]"),
        "dQ-not-scaled": (SPLIT_Q, "col, dQ_reg, softmax_scale", "col, dQ_reg, float32(1.0)"),
        "dQ-of-V": (SPLIT_Q, "dQ_reg, P_reg, K_smem", "dQ_reg, P_reg, V_smem"),
        "mask-left-out": (SPLIT_Q, "mask_scores(P_reg, first_row", "(P_reg, first_row"),
    },
    ("standard", False): BOTH
    | {
        "dS-not-scaled": (STANDARD, "= softmax_scale * dS", "= dS"),
        "dS-left-as-dP": (STANDARD, "dS = p * (", "dS = ("),
        "one-head-of-the-group": (STANDARD, "(kv_head + 1) * group", "kv_head * group + 1"),
        "dP-of-K": (STANDARD, "(tensors.dO, tensors.V, dS", "(tensors.dO, tensors.K, dS"),
        "W-not-transposed": (STANDARD, "head, i_row, j_col]", "head, j_col, i_row]"),
    },
}


def blind_and_grouped():
    """A problem in which each mutation shows: ragged tiles, a group, rows that see no key."""
    qkv = random_qkv(1, 11, 9, 2, 1, 4, np.float32, seed=11)
    return qkv, gradient_of(qkv)


def check_mutated(module, deterministic):
    qkv, dout = blind_and_grouped()
    options = {"deterministic": deterministic, "config": TileConfig(16, 8, 8, 2)}
    check(module, qkv, causal=True, dout=dout, **options)


@passes
def test_without_a_mutation_the_problem_is_solved(rung, deterministic, monkeypatch):
    module = mutated_rung(monkeypatch, rung, VERBS, "scale * X_reg", "scale * X_reg")
    check_mutated(module, deterministic)


@pytest.mark.parametrize(
    ("rung", "deterministic", "where", "old", "new"),
    [
        pytest.param(*kind, *mutation, id="-".join((kind[0], "deterministic" * kind[1], name)))
        for kind, mutations in REJECTED.items()
        for name, mutation in mutations.items()
    ],
)
def test_a_mutated_kernel_is_rejected(rung, deterministic, where, old, new, monkeypatch):
    module = mutated_rung(monkeypatch, rung, where, old, new)
    with pytest.raises((AssertionError, ThreadError)), np.errstate(all="ignore"):
        check_mutated(module, deterministic)


def barriers():
    """(rung, deterministic, number of the barrier, how many there are), for each pass it is in.

    `fa2_split_q` has two in the kernel of dK and dV and two in that of dQ alone.
    """
    of_pass = {("standard", False): (2, 0, 1), ("fa2_split_q", False): (4, 0, 1)}
    of_pass["fa2_split_q", True] = (4, 0, 1, 2, 3)
    for (rung, deterministic), (count, *numbers) in of_pass.items():
        for nth in numbers:
            name = f"{rung}-{'deterministic-' * deterministic}{nth + 1}"
            yield pytest.param(rung, deterministic, nth, count, id=name)


@pytest.mark.parametrize((*PASS, "nth", "count"), list(barriers()))
def test_without_any_one_barrier_there_is_a_race(rung, deterministic, nth, count, monkeypatch):
    where = f"{KERNELS}{rung}_backward"
    module = mutated_rung(monkeypatch, rung, where, "cuda.syncthreads()", "pass", nth, count)
    qkv, dout = blind_and_grouped()
    options = {"deterministic": deterministic, "config": TileConfig(16, 8, 8, 2)}
    with pytest.raises(RaceError):
        differentiate(module, qkv, dout, SIMULATOR, **options)
