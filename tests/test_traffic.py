"""The closed forms of every rung's traffic are what the simulator counts, number by number."""

from dataclasses import fields, replace

import numpy as np
import pytest

from fa2_numba import RUNGS
from fa2_numba.config import TileConfig, choose_tiles
from fa2_numba.errors import ArgumentError
from fa2_numba.launch import ForwardTensors, SimulatorMachine
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts, Simulator
from fa2_numba.testing import poisoned, random_qkv
from fa2_numba.traffic import predict

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
    "odd-causal": (Problem(2, 1, 1, 21, 37, 40, causal=True), TileConfig(48, 16, 16, 4)),
    "one-query": (Problem(1, 3, 1, 1, 19, 16, causal=True), SMALL),
    "one-warp": (Problem(1, 1, 1, 9, 30, 16, causal=True), TileConfig(16, 8, 8, 1)),
    "eight-warps": (Problem(1, 1, 1, 33, 70, 24), TileConfig(32, 32, 32, 8)),
    "blind-rows": (Problem(1, 1, 1, 37, 5, 8, causal=True, itemsize=2), SMALL),
}


def count(rung, problem, config):
    """What the simulator counts; outputs start as NaN."""
    p, dtype = problem, DTYPES[problem.itemsize]
    q, k, v = random_qkv(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, dtype)
    out, lse = poisoned(q.shape, dtype), poisoned((p.batch, p.heads, p.seqlen_q), np.float32)
    tensors = ForwardTensors(
        *(q, k, v, out, lse),
        np.float32(0.3),
        p.causal,
        np.dtype(dtype).name,
        lambda shape: poisoned(shape, np.float32),
    )
    simulator = Simulator(checks=False, counts=True, progress=False)
    return sum(SimulatorMachine(simulator).run(RUNGS[rung].plan_forward(tensors, config))).total


def differences(counted, predicted, leave_out=()):
    return {
        field.name: (getattr(counted, field.name), getattr(predicted, field.name))
        for field in fields(Counts)
        if field.name not in leave_out
        and getattr(counted, field.name) != getattr(predicted, field.name)
    }


@pytest.mark.parametrize("case", ALIGNED)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_number_is_as_predicted(rung, case):
    problem, config = ALIGNED[case]
    assert differences(count(rung, problem, config), predict(rung, problem, config)) == {}


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_number_but_sectors_is_as_predicted_for_odd_shapes(rung, case):
    problem, config = RAGGED[case]
    counted, predicted = count(rung, problem, config), predict(rung, problem, config)
    assert differences(counted, predicted, leave_out=SECTORS) == {}


def test_a_wrong_prediction_is_seen():
    problem, config = ALIGNED["one-tile"]
    right = predict("fa2_split_q", problem, config)
    for field in fields(Counts):
        wrong = replace(right, **{field.name: getattr(right, field.name) + 1})
        assert list(differences(right, wrong)) == [field.name]


def test_there_is_a_formula_for_these_rungs_and_no_other():
    with pytest.raises(ArgumentError, match="rung='fa9'"):
        predict("fa9", *ALIGNED["one-tile"])


# The formulas of the docstrings: one head, float32, whole tiles.

HEAD_DIM, WARPS = 64, 4
TILES = choose_tiles(HEAD_DIM, 232_448)
BLOCK_M, BLOCK_N = TILES.block_m, TILES.block_n
lengths = pytest.mark.parametrize("N", [256, 1024, 4096])
masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def head(rung, N, causal=False, config=TILES):
    return predict(rung, Problem(1, 1, 1, N, N, config.head_dim, causal), config)


def tile_pairs(N, causal):
    """Pairs of tiles that a rung visits which skips what a causal mask hides."""
    return sum(
        -(-(row + BLOCK_M) // BLOCK_N) if causal else N // BLOCK_N for row in range(0, N, BLOCK_M)
    )


@masks
@lengths
def test_standard_moves_S_and_P(N, causal):
    counts = head("standard", N, causal)
    D, T_m, T_n = HEAD_DIM, N // BLOCK_M, N // BLOCK_N
    assert counts.global_load_bytes == 4 * (N * D * (T_n + 2 * T_m) + 4 * N * N)
    assert counts.global_store_bytes == 4 * (2 * N * N + N * D + N)
    assert counts.barriers == 3 * T_m * T_n


@masks
@lengths
def test_fa1_reads_and_writes_O_in_every_pass(N, causal):
    counts = head("fa1_sliced_k", N, causal)
    D, T_m, T_n = HEAD_DIM, N // BLOCK_M, N // BLOCK_N
    O_m_and_l = N * D + 2 * N
    assert counts.global_load_bytes == 4 * (2 * N * D + T_n * N * D + (T_n - 1) * O_m_and_l)
    assert counts.global_store_bytes == 4 * (T_n * O_m_and_l + N * D + N)
    assert counts.barriers == T_m * T_n * (3 + 2 * D // 16)


@masks
@lengths
@pytest.mark.parametrize("rung", ["fa2_fewer_flops", "fa2_seq_parallel", "fa2_split_q"])
def test_fa2_writes_O_once(rung, N, causal):
    counts = head(rung, N, causal)
    D = HEAD_DIM
    assert counts.global_load_bytes == 4 * (N * D + 2 * tile_pairs(N, causal) * BLOCK_N * D)
    assert counts.global_store_bytes == 4 * (N * D + N)


@masks
@lengths
def test_shared_memory_and_barriers_of_the_two_partitions(N, causal):
    D, W, T_m, T = HEAD_DIM, WARPS, N // BLOCK_M, tile_pairs(N, causal)
    tiles = 4 * D * (N + 2 * T * BLOCK_N)

    split_q = head("fa2_split_q", N, causal)
    assert split_q.shared_load_bytes == T * 32 * D * (BLOCK_M + W * BLOCK_N)
    assert split_q.shared_store_bytes == tiles
    assert split_q.barriers == 2 * T

    sliced_k = head("fa2_seq_parallel", N, causal)
    products = 4 * D * (4 * W * BLOCK_M + 16 * BLOCK_N)
    partial_O, statistics = 4 * BLOCK_M * D, 4 * BLOCK_M
    assert sliced_k.shared_load_bytes == (
        T * (products + (W + 1) * partial_O + 4 * W * W * statistics)
        + T_m * (16 * W + 1) * statistics
    )
    assert sliced_k.shared_store_bytes == (
        tiles + T * (W * partial_O + (W + 1) * statistics) + T_m * 2 * W * statistics
    )
    assert sliced_k.barriers == T * (2 + 2 * D // 16) + T_m
    assert head("fa2_fewer_flops", N, causal).barriers == sliced_k.barriers + T_m


@masks
@lengths
def test_all_flash_rungs_do_the_same_products_but_for_skipped_tiles(N, causal):
    everything = 4 * N * N * HEAD_DIM
    assert head("standard", N, causal).matmul_flops == everything
    assert head("fa1_sliced_k", N, causal).matmul_flops == everything
    visited = 4 * tile_pairs(N, causal) * BLOCK_M * BLOCK_N * HEAD_DIM
    for rung in ("fa2_fewer_flops", "fa2_seq_parallel", "fa2_split_q"):
        assert head(rung, N, causal).matmul_flops == visited


@lengths
def test_fewer_flops_are_fewer(N):
    before, after = head("fa1_sliced_k", N), head("fa2_fewer_flops", N)
    assert after.other_flops < 0.95 * before.other_flops
    assert after.divisions < 0.1 * before.divisions
    assert after.matmul_flops == before.matmul_flops
    assert after.special_calls <= 1.05 * before.special_calls


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
