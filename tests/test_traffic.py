"""The closed forms of every rung's traffic are what the simulator counts, number by number."""

import re
from dataclasses import fields, replace
from importlib import import_module

import numpy as np
import pytest

from fa2_numba import RUNGS
from fa2_numba.config import TileConfig, choose_tiles
from fa2_numba.errors import ArgumentError
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts, Simulator
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict

from .conftest import CUDA_CORE_RUNGS, TENSOR_CORE_RUNGS, run_rung

DTYPES = {4: np.float32, 2: np.float16}
SMALL = TileConfig(16, 16, 16, 4)
SECTORS = ("global_load_sectors", "global_store_sectors")

# Rows that begin where a sector does, so that sectors can be compared too.
ALIGNED = {
    "one-tile": (Problem(1, 1, 1, 16, 16, 16), SMALL),
    "causal": (Problem(1, 1, 1, 48, 48, 16, causal=True), SMALL),
    "fp16": (Problem(1, 1, 1, 32, 48, 32, itemsize=2), TileConfig(32, 16, 16, 4)),
    "wide-tiles": (Problem(1, 1, 1, 64, 32, 48, causal=True), TileConfig(48, 32, 16, 2)),
    "ragged-tiles": (Problem(1, 2, 1, 40, 24, 16, causal=True), SMALL),
    "more-queries": (Problem(1, 1, 1, 48, 8, 16, causal=True), SMALL),
}
RAGGED = {
    "odd": (Problem(1, 1, 1, 27, 21, 13), SMALL),
    "odd-causal": (Problem(2, 1, 1, 21, 37, 20, causal=True), TileConfig(32, 16, 16, 4)),
    "one-query": (Problem(1, 3, 1, 1, 19, 16, causal=True), SMALL),
    "one-warp": (Problem(1, 1, 1, 9, 30, 16, causal=True), TileConfig(16, 8, 8, 1)),
    "eight-warps": (Problem(1, 1, 1, 33, 35, 24), TileConfig(32, 32, 32, 8)),
    "blind-rows": (Problem(1, 1, 1, 37, 5, 8, causal=True, itemsize=2), SMALL),
}


def split_q(*fields, **options):
    return {"fa2_tensor_core": TensorCoreConfig(*fields, **options)}


def sliced_k(*fields, **options):
    return {"fa1_tensor_core": TensorCoreConfig(*fields, sliced_k=True, **options)}


def half(*sizes, causal=False):
    return Problem(*sizes, causal, itemsize=2)


# Whole copies of 16 bytes; rows of one line of 64 columns, of three of 32, of two of 64.
ALIGNED_16_BITS = {
    "one-tile": (half(1, 1, 1, 32, 16, 64), split_q(64, 32, 16, 2) | sliced_k(64, 16, 32, 2)),
    "causal": (
        half(1, 1, 1, 72, 72, 64, causal=True),
        split_q(64, 64, 16, 2) | sliced_k(64, 16, 32, 2),
    ),
    "d96": (
        half(1, 1, 1, 40, 56, 96, causal=True),
        split_q(96, 32, 32, 2) | sliced_k(96, 16, 32, 2),
    ),
    "d128-more-queries": (
        half(1, 1, 1, 56, 24, 128, causal=True),
        split_q(128, 64, 16, 2) | sliced_k(128, 32, 64, 4),
    ),
}
RAGGED_16_BITS = {
    "odd-causal": (
        half(1, 2, 1, 37, 51, 40, causal=True),
        split_q(40, 32, 16, 2) | sliced_k(40, 16, 32, 2),
    ),
    "blind-tiles": (
        half(2, 1, 1, 70, 3, 8, causal=True),
        split_q(8, 32, 16, 2) | sliced_k(8, 16, 32, 2),
    ),
    "sm75": (
        half(1, 1, 1, 33, 35, 72),
        split_q(72, 32, 16, 2, turing=True) | sliced_k(72, 16, 32, 2, turing=True),
    ),
}


def count(rung, problem, config):
    """What the simulator counts; outputs start as NaN."""
    p, dtype = problem, DTYPES[problem.itemsize]
    qkv = random_qkv(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, dtype)
    simulator = Simulator(checks=False, counts=True, progress=False)
    *_, reports = run_rung(RUNGS[rung].plan_forward, qkv, config, simulator, p.causal)
    return sum(reports).total


def differences(counted, predicted, leave_out=()):
    return {
        field.name: (getattr(counted, field.name), getattr(predicted, field.name))
        for field in fields(Counts)
        if field.name not in leave_out
        and getattr(counted, field.name) != getattr(predicted, field.name)
    }


def cases(problems):
    """Each on each CUDA-core rung; one that only adds a barrier has most in the sweep."""
    for rung in CUDA_CORE_RUNGS:
        for case in problems:
            swept = rung == "fa2_seq_parallel" and case not in ("ragged-tiles", "odd-causal")
            yield pytest.param(rung, case, marks=pytest.mark.sweep if swept else ())


@pytest.mark.parametrize(("rung", "case"), list(cases(ALIGNED)))
def test_every_number_is_as_predicted(rung, case):
    problem, config = ALIGNED[case]
    assert differences(count(rung, problem, config), predict(rung, problem, config)) == {}


@pytest.mark.parametrize(("rung", "case"), list(cases(RAGGED)))
def test_every_number_but_sectors_is_as_predicted_for_odd_shapes(rung, case):
    problem, config = RAGGED[case]
    counted, predicted = count(rung, problem, config), predict(rung, problem, config)
    assert differences(counted, predicted, leave_out=SECTORS) == {}


@pytest.mark.parametrize("case", ALIGNED_16_BITS | RAGGED_16_BITS)
@pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
def test_every_number_of_a_tensor_core_rung_is_as_predicted(rung, case):
    problem, configs = (ALIGNED_16_BITS | RAGGED_16_BITS)[case]
    counted, predicted = (f(rung, problem, configs[rung]) for f in (count, predict))
    leave_out = SECTORS if case in RAGGED_16_BITS else ()
    assert differences(counted, predicted, leave_out) == {}


def growing_qkv(steps, rows=32, keys=16, head_dim=64):
    """q, k, v of one head: from each tile of keys to the one before it, scores grow by `steps`.

    In powers of 2, and with the scale in them, since fa2_tensor_core begins with the last tile.
    """
    scores = np.repeat(np.cumsum([0, *steps])[::-1], keys) * np.log(2) * head_dim**0.5
    q = np.zeros((1, rows, 1, head_dim), np.float16)
    k, v = np.zeros((2, 1, len(scores), 1, head_dim), np.float16)
    q[..., 0], k[0, :, 0, 0] = 1, scores
    return q, k, v


def test_a_maximum_that_outgrows_m_is_predicted_by_how_often():
    """By 2^9; by less than 2^8, twice; and by less again, but by more than 2^8 in all."""
    q, k, v = growing_qkv([9, 7, 0.5, 7])
    config = TensorCoreConfig(64, 32, 16, 2)
    simulator = Simulator(checks=False, counts=True, progress=False)
    *_, reports = run_rung(
        RUNGS["fa2_tensor_core"].plan_forward, (q, k, v), config, simulator, False
    )
    predicted = predict("fa2_tensor_core", half(1, 1, 1, 32, 80, 64), config, outgrown=2 * 2)
    assert differences(sum(reports).total, predicted) == {}


def test_a_wrong_prediction_is_seen():
    problem, config = ALIGNED["one-tile"]
    right = predict("fa2_split_q", problem, config)
    for field in fields(Counts):
        wrong = replace(right, **{field.name: getattr(right, field.name) + 1})
        assert list(differences(right, wrong)) == [field.name]


def test_there_is_a_formula_for_these_rungs_and_no_other():
    with pytest.raises(ArgumentError, match="rung='fa9'"):
        predict("fa9", *ALIGNED["one-tile"])
    with pytest.raises(ArgumentError, match="head_dim=17: must be that of the tiles, 16"):
        predict("standard", replace(ALIGNED["one-tile"][0], head_dim=17), SMALL)


def test_a_problem_that_a_tensor_core_rung_cannot_have_is_refused():
    rung, problem, config = "fa2_tensor_core", half(1, 1, 1, 9, 9, 40), TensorCoreConfig(40, 64, 16)
    with pytest.raises(ArgumentError, match="itemsize=4: must be 2"):
        predict(rung, replace(problem, itemsize=4), config)
    with pytest.raises(ArgumentError, match="head_dim=41: must be that of the tiles, 40"):
        predict(rung, replace(problem, head_dim=41), config)
    with pytest.raises(ArgumentError, match="head_dim=33: .* whole 16 bytes"):
        predict(rung, replace(problem, head_dim=33), replace(config, head_dim=33))
    with pytest.raises(ArgumentError, match="not of the kind that fa2_tensor_core takes"):
        predict(rung, problem, TileConfig(48, 16, 16))
    with pytest.raises(ArgumentError, match="not of the kind that standard takes"):
        predict("standard", problem, config)
    with pytest.raises(ArgumentError, match="outgrown=1: must be 0"):
        predict("fa2_split_q", half(1, 1, 1, 9, 9, 16), SMALL, outgrown=1)


# The formulas in the docstrings of the kernels: one head, whole tiles.

HEAD_DIM, WARPS = 64, 4
TILES = choose_tiles(HEAD_DIM, 232_448)
BLOCK_M, BLOCK_N = TILES.block_m, TILES.block_n
# A formula may go on in deeper indented lines.
FORMULA = re.compile(r"^    (\w+) += (.+(?:\n {8,}.+)*)$", re.MULTILINE)
EXPECTED = (
    *("global_load_bytes", "global_store_bytes", "shared_load_bytes", "shared_store_bytes"),
    *("barriers", "other_flops"),
)
EXPECTED_OF_TENSOR_CORES = ("tensor_core_instructions", "matrix_loads")
FORMULA_TILES = {
    **dict.fromkeys(
        CUDA_CORE_RUNGS, (TILES, TileConfig(32, 16, 32, 2), TileConfig(128, 64, 32, 8))
    ),
    "fa1_tensor_core": tuple(
        TensorCoreConfig(*fields, sliced_k=True)
        for fields in ((64, 32, 256, 8), (96, 16, 64, 2), (128, 32, 128, 4))
    ),
    "fa2_tensor_core": tuple(
        TensorCoreConfig(*fields)
        for fields in ((64, 128, 64, 4), (96, 32, 32, 2), (128, 64, 32, 4))
    ),
}
lengths = pytest.mark.parametrize("N", [256, 1024, 4096])
masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def head(rung, N, causal=False, config=TILES):
    itemsize = 2 if rung in TENSOR_CORE_RUNGS else 4
    problem = Problem(1, 1, 1, N, N, config.head_dim, causal, itemsize=itemsize)
    return predict(rung, problem, config)


def tile_pairs(N, causal, config=TILES):
    """Pairs of tiles that a rung visits which skips what a causal mask hides."""
    rows, cols = config.block_m, config.block_n
    return sum(-(-(row + rows) // cols) if causal else N // cols for row in range(0, N, rows))


def formulas(rung):
    """Counter -> formula, from the docstring of the rung's module."""
    return dict(FORMULA.findall(import_module(f"fa2_numba.kernels.{rung}").__doc__))


@pytest.mark.parametrize("rung", FORMULA_TILES)
def test_every_docstring_has_formulas(rung):
    assert set(EXPECTED) <= formulas(rung).keys()
    if rung in TENSOR_CORE_RUNGS:
        assert set(EXPECTED_OF_TENSOR_CORES) <= formulas(rung).keys()


@masks
@pytest.mark.parametrize(
    ("rung", "config"),
    [
        pytest.param(rung, config, id=f"{rung}-{config}")
        for rung, configs in FORMULA_TILES.items()
        for config in configs
    ],
)
def test_the_formulas_of_the_docstrings_hold(rung, config, causal):
    for N in (256, 1024):
        names = {
            **{"N": N, "D": config.head_dim, "W": config.num_warps},
            **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
            **{"T_m": N // config.block_m, "T_n": N // config.block_n},
            "T": tile_pairs(N, causal, config),
        }
        if rung in TENSOR_CORE_RUNGS:
            names["C"] = config.line_cols
            names["T_q"] = names["T_m" if config.keeps_queries else "T"]
        counts = head(rung, N, causal, config)
        for counter, formula in formulas(rung).items():
            assert eval(f"({formula})", {}, names) == getattr(counts, counter), counter


@masks
@lengths
def test_all_flash_rungs_do_the_same_products_but_for_skipped_tiles(N, causal):
    everything = 4 * N * N * HEAD_DIM
    assert head("standard", N, causal).matmul_flops == everything
    assert head("fa1_sliced_k", N, causal).matmul_flops == everything
    visited = 4 * tile_pairs(N, causal) * BLOCK_M * BLOCK_N * HEAD_DIM
    for rung in ("fa2_fewer_flops", "fa2_seq_parallel", "fa2_split_q"):
        assert head(rung, N, causal).matmul_flops == visited


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("N", [512, 1024, 4096])
def test_fewer_flops_are_fewer(N, head_dim):
    """From about 512 keys on: FA1 has nothing to rescale in its first pass, FA2 divides once."""
    config = choose_tiles(head_dim, 232_448)
    before, after = (head(rung, N, config=config) for rung in ("fa1_sliced_k", "fa2_fewer_flops"))
    saved = before.other_flops - after.other_flops
    assert saved > 0.01 * before.other_flops
    assert after.other_flops + after.special_calls < before.other_flops + before.special_calls
    # Two a row and pass against one a row, done by each of its 16 owners.
    assert before.divisions == 2 * N * (N // config.block_n)
    assert after.divisions == 16 * N
    assert after.matmul_flops == before.matmul_flops
    assert head("fa2_split_q", N).other_flops < 0.6 * head("fa2_seq_parallel", N).other_flops


def test_causal_skips_half_the_tiles():
    whole, half = head("fa2_split_q", 8192), head("fa2_split_q", 8192, causal=True)
    assert 0.5 < half.matmul_flops / whole.matmul_flops < 0.51
    assert 0.5 < half.global_load_bytes / whole.global_load_bytes < 0.52


def test_seq_parallel_changes_nothing_but_a_barrier_a_tile():
    one, two = head("fa2_fewer_flops", 1024, True), head("fa2_seq_parallel", 1024, True)
    assert differences(one, two) == {"barriers": (two.barriers + 1024 // BLOCK_M, two.barriers)}


@pytest.mark.parametrize("rung", ["fa1_sliced_k", "fa2_split_q"])
def test_hbm_accesses_fall_as_the_tiles_grow(rung):
    """The theorem of FlashAttention: N^2 d^2 / M, with M the floats of on-chip memory."""
    N = 8192
    products = []
    for block in (16, 32, 64):
        config = TileConfig(HEAD_DIM, block, block)
        counts = head(rung, N, config=config)
        accesses = (counts.global_load_bytes + counts.global_store_bytes) / 4
        M = config.split_q_shared_bytes / 4
        products.append(accesses * M / (N * N * HEAD_DIM**2))
    assert max(products) / min(products) < 1.06
    for N in (4096, 8192):
        counts = head("standard", N)
        assert (counts.global_load_bytes + counts.global_store_bytes) / 4 > 6 * N * N
