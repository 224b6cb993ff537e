"""Every rung against exact attention, on the simulator and on the GPU."""

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import RUNGS, flash_attn_func
from fa2_numba.config import TileConfig, col_step, row_step
from fa2_numba.testing import (
    SHAPES,
    assert_attention,
    poisoned_rows,
    random_qkv,
)

from .conftest import FAST_SIMULATOR, SIMULATOR, run_rung

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
HEAD_DIMS = (1, 8, 40, 59, 64, 72, 96, 111, 128, 256)
LENGTHS = (1, 2, 31, 33, 63, 64, 65, 97, 127, 129)
rungs = pytest.mark.parametrize("rung", RUNGS)


def attend(q, k, v, machine, rung, **options):
    return flash_attn_func(q, k, v, machine=machine, rung=rung, return_lse=True, **options)


def check(q, k, v, machine, rung, **options):
    out, lse = attend(q, k, v, machine, rung, **options)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    assert_attention(out, lse, q, k, v, **options)


@rungs
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in SHAPES])
def test_shapes(case, rung, machine):
    # The simulator takes each case in one dtype, a different one on each rung; many heads, wide
    # ones, and a rung whose blocks do what those of its neighbour do, without its checks. A GPU
    # takes all dtypes.
    costly = case.batch * case.heads > 3 or case.head_dim > 64 or rung == "fa2_seq_parallel"
    if machine != "gpu" and costly:
        machine = FAST_SIMULATOR
    first = SHAPES.index(case) + list(RUNGS).index(rung)
    dtypes = list(DTYPES.values())
    for dtype in dtypes if machine == "gpu" else [dtypes[first % len(dtypes)]]:
        check(*case.qkv(dtype), machine, rung, causal=case.causal)


@rungs
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, rung, fast_machine):
    qkv = random_qkv(1, 9, 21, 2, 1, head_dim, np.float32, seed=head_dim)
    check(*qkv, fast_machine, rung, causal=True)


DEFAULT_PAIRS = {(1, 129), (129, 1), (31, 33), (33, 31), (63, 65), (65, 64), (64, 64), (97, 2)}
LENGTH_PAIRS = [
    pytest.param(
        q, k, id=f"Lq{q}-Lk{k}", marks=() if (q, k) in DEFAULT_PAIRS else pytest.mark.sweep
    )
    for q in LENGTHS
    for k in LENGTHS
]


@rungs
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTH_PAIRS)
def test_length_pairs(seqlen_q, seqlen_k, rung, fast_machine):
    for causal in (False, True):
        qkv = random_qkv(1, seqlen_q, seqlen_k, 2, 2, 16, np.float32, seed=seqlen_q)
        check(*qkv, fast_machine, rung, causal=causal)


@rungs
@pytest.mark.parametrize("num_warps", range(1, 9))
def test_warps(num_warps, rung):
    """Every number of warps computes the same attention (tiles made for it)."""
    qkv = random_qkv(1, 20, 35, 1, 1, 16, np.float32, seed=num_warps)
    config = TileConfig(16, row_step(num_warps), col_step(num_warps), num_warps)
    out, lse, _ = run_rung(RUNGS[rung].plan_forward, qkv, config, SIMULATOR, causal=True)
    assert_attention(out, lse, *qkv, causal=True)


@rungs
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(12, 4), (6, 2), (5, 1), (8, 8)], ids=lambda n: str(n)
)
def test_a_query_head_reads_the_kv_head_of_its_group(heads, kv_heads, rung, fast_machine):
    q, k, v = random_qkv(1, 3, 5, heads, kv_heads, 8, np.float32, seed=0)
    v[...] = np.arange(kv_heads)[:, None]
    out, _ = attend(q, k, v, fast_machine, rung)
    expected = np.arange(heads) // (heads // kv_heads)
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), rtol=1e-6)


@rungs
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_padding_never_leaks(dtype, rung, machine):
    """Rows past the end, and the next batch element, may hold anything."""
    q, k, v = random_qkv(1, 9, 9, 1, 1, 64, dtype, seed=1)
    expected = attend(q, k, v, machine, rung)
    assert_attention(*expected, q, k, v)
    for poison in (0.0, np.nan, np.inf):
        dirty = [poisoned_rows(x, 60, poison) for x in (q, k, v)]
        for got, want in zip(attend(*dirty, machine, rung), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    two = [np.concatenate([x, np.full_like(x, np.nan)]) for x in (q, k, v)]
    out, lse = attend(*two, machine, rung)
    np.testing.assert_array_equal(out[:1], expected[0])
    np.testing.assert_array_equal(lse[:1], expected[1])
    assert np.isnan(out[1:].astype(np.float32)).all()


def columns(*values):
    """(1, n, 1, d) from n rows of d values (or n numbers)."""
    rows = np.array(values, np.float32)
    return rows.reshape(1, len(values), 1, -1)


@rungs
def test_huge_equal_scores(rung, machine):
    q, k = np.full((1, 1, 1, 16), -64, np.float32), np.full((1, 4, 1, 16), 100, np.float32)
    v = np.broadcast_to(columns(0, 1, 2, 3), k.shape)
    out, lse = attend(q, k, v, machine, rung, softmax_scale=1.0)
    np.testing.assert_array_equal(out, np.full_like(q, 1.5))
    np.testing.assert_allclose(lse, -102398.6137, atol=0.01)


@rungs
def test_a_masked_key_takes_no_part_however_low_the_others_are(rung, machine):
    q, k, v = columns(-3e4, 0), columns(1, 0), columns(2, 500)
    out, lse = attend(q, k, v, machine, rung, softmax_scale=1.0, causal=True)
    assert out[0, 0, 0, 0] == 2.0 and lse[0, 0, 0] == -30000.0
    assert_attention(out, lse, q, k, v, softmax_scale=1.0, causal=True)


@rungs
def test_rows_that_see_nothing(rung, machine):
    q, k, v = columns(0, 0, 0, 0, 0), columns(7, 8), columns(1, 3)
    out, lse = attend(q, k, v, machine, rung, causal=True)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 0, 1, 2])
    np.testing.assert_array_equal(lse[0, 0, :4], [-np.inf, -np.inf, -np.inf, 0])
    np.testing.assert_allclose(lse[0, 0, 4], np.log(2), rtol=1e-6)


@rungs
def test_fp16_scores_above_the_fp16_range(rung, machine):
    q, k = np.full((1, 1, 1, 64), 64, np.float16), np.full((1, 3, 1, 64), 64, np.float16)
    v = np.broadcast_to(columns(0, 1, 2), k.shape).astype(np.float16)
    out, lse = attend(q, k, v, machine, rung)
    np.testing.assert_array_equal(out, np.ones_like(q))
    np.testing.assert_allclose(lse, 32768 + np.log(3), rtol=1e-6)


@rungs
def test_causal_is_aligned_at_the_bottom_right(rung, machine):
    q, k, v = columns(0, 0), columns(1, 2, 3, 4, 5), columns(0, 1, 2, 3, 4)
    out, lse = attend(q, k, v, machine, rung, causal=True)
    np.testing.assert_allclose(out.ravel(), [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log([4, 5]), rtol=1e-6)


@rungs
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 2), (65, 64), (200, 1)])
def test_causal_with_more_queries_than_keys(seqlen_q, seqlen_k, rung, fast_machine):
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 1, 16, np.float32, seed=3)
    check(q, k, v, fast_machine, rung, causal=True)


@rungs
def test_nan_in_a_query_stays_in_its_row(rung, machine):
    q, k, v = random_qkv(1, 20, 20, 1, 1, 16, np.float32, seed=4)
    expected, _ = attend(q, k, v, machine, rung)
    q[0, 7, 0, 3] = np.nan
    out, lse = attend(q, k, v, machine, rung)
    assert np.isnan(out[0, 7]).all() and np.isnan(lse[0, 0, 7])
    np.testing.assert_array_equal(np.delete(out, 7, axis=1), np.delete(expected, 7, axis=1))


@rungs
def test_results_repeat_bit_for_bit(rung, fast_machine):
    qkv = random_qkv(2, 40, 50, 2, 1, 32, np.float16, seed=5)
    first = attend(*qkv, fast_machine, rung, causal=True)
    for got, want in zip(attend(*qkv, fast_machine, rung, causal=True), first, strict=True):
        np.testing.assert_array_equal(got, want)


@rungs
def test_a_batch_element_does_not_depend_on_the_others(rung, fast_machine):
    q, k, v = random_qkv(3, 18, 20, 2, 1, 16, np.float32, seed=6)
    out, lse = attend(q, k, v, fast_machine, rung)
    alone, alone_lse = attend(q[1:2], k[1:2], v[1:2], fast_machine, rung)
    np.testing.assert_array_equal(out[1:2], alone)
    np.testing.assert_array_equal(lse[1:2], alone_lse)


@rungs
def test_tiles_without_a_visible_key_leave_the_output_as_it_is(rung, fast_machine):
    """The first query sees the first key alone, whatever number of tiles comes after."""
    q, k, v = random_qkv(1, 150, 150, 1, 1, 16, np.float32, seed=7)
    out, _ = attend(q, k, v, fast_machine, rung, causal=True)
    np.testing.assert_array_equal(out[0, 0], v[0, 0])
