"""The oracle against finite differences, PyTorch, hand-computed answers and its own properties."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_numba.reference import (
    attention_backward,
    attention_backward_same_precision,
    attention_forward,
    attention_forward_same_precision,
    softmax,
    uncancelled_gradients,
    visible,
)
from fa2_numba.testing import random_qkv

BFLOAT16 = ml_dtypes.bfloat16
repeatable = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(1, 9)


@pytest.fixture(autouse=True)
def no_floating_point_surprises():
    """Any NaN or overflow made on the way is an error, not a warning."""
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        yield


def dropout_options(batch: int, heads: int, seqlen_q: int, seqlen_k: int, p: float = 0.3) -> dict:
    kept = np.random.default_rng(7).random((batch, heads, seqlen_q, seqlen_k)) >= p
    return {"dropout_p": p, "dropout_mask": kept}


SLOPES = np.array([0.5, 0.125, 0.25, 1.0, 0.0625, 0.75], np.float32)

# Sizes are (B, Sq, Sk, H, Hk).
GRADIENT_CASES = [
    pytest.param((1, 4, 5, 2, 2), {}, id="plain"),
    pytest.param((2, 3, 4, 1, 1), {"softmax_scale": 1.7}, id="scale"),
    pytest.param((1, 3, 5, 2, 2), {"causal": True}, id="causal-Sq<Sk"),
    pytest.param((1, 5, 3, 2, 2), {"causal": True}, id="causal-Sq>Sk"),
    pytest.param((1, 5, 6, 1, 1), {"window_size": (2, 1)}, id="window"),
    pytest.param((1, 6, 3, 1, 1), {"window_size": (0, 0)}, id="window-empty-rows"),
    pytest.param((1, 5, 5, 1, 1), {"causal": True, "window_size": (1, 3)}, id="window-causal"),
    pytest.param((1, 4, 5, 2, 2), {"softcap": 0.9}, id="softcap"),
    pytest.param((1, 4, 5, 2, 2), {"alibi_slopes": SLOPES[:2]}, id="alibi-H"),
    pytest.param((2, 4, 3, 3, 1), {"alibi_slopes": SLOPES.reshape(2, 3)}, id="alibi-BH"),
    pytest.param(
        (1, 4, 5, 2, 2),
        {"softcap": 0.9, "alibi_slopes": SLOPES[:2], "causal": True},
        id="softcap-alibi-causal",
    ),
    pytest.param((2, 4, 5, 2, 1), dropout_options(2, 2, 4, 5), id="dropout"),
    pytest.param((1, 4, 5, 4, 2), {}, id="gqa"),
    pytest.param((1, 4, 5, 3, 1), {"causal": True}, id="mqa-causal"),
]


@pytest.mark.parametrize(("sizes", "options"), GRADIENT_CASES)
def test_gradients_equal_finite_differences(sizes, options):
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes
    inputs = random_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, 3, np.float64, seed=1)
    dout = np.random.default_rng(2).standard_normal(inputs[0].shape)
    step = 1e-5

    def loss() -> float:
        return float((attention_forward(*inputs, **options)[0] * dout).sum())

    gradients = attention_backward(dout, *inputs, **options)
    for array, gradient in zip(inputs, gradients, strict=True):
        numeric = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            original = array[index]
            array[index] = original + step
            above = loss()
            array[index] = original - step
            below = loss()
            array[index] = original
            numeric[index] = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, rtol=0, atol=1e-8)


def test_scores_of_minus_102400_do_not_underflow():
    q, k = np.full((1, 1, 1, 16), -64.0), np.full((1, 4, 1, 16), 100.0)
    v = np.broadcast_to(np.arange(4.0)[None, :, None, None], k.shape)
    out, lse = attention_forward(q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(out, 1.5, rtol=1e-15)
    np.testing.assert_allclose(lse, -102400 + math.log(4), rtol=1e-15)
    assert f"{lse.item():.4f}" == "-102398.6137"


def test_causal_hides_a_far_larger_score():
    q = np.array([-3e4, 0.0]).reshape(1, 2, 1, 1)
    k = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    v = np.array([2.0, 500.0]).reshape(1, 2, 1, 1)
    out, lse = attention_forward(q, k, v, softmax_scale=1.0, causal=True)
    assert out[0, 0, 0, 0] == 2.0
    assert lse[0, 0, 0] == -30000.0


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(attention_forward, id="exact"),
        pytest.param(attention_forward_same_precision, id="same-precision"),
    ],
)
class TestSmallAnswers:
    """Answers one can work out by hand, from both forward functions."""

    def test_more_queries_than_keys(self, forward):
        q, k = np.zeros((1, 5, 1, 1), np.float32), np.zeros((1, 2, 1, 1), np.float32)
        v = np.array([1, 3], np.float32).reshape(1, 2, 1, 1)
        out, lse = forward(q, k, v, causal=True)
        assert out.ravel().tolist() == [0, 0, 0, 1, 2]
        assert lse.ravel().tolist() == [-np.inf] * 3 + [0, pytest.approx(math.log(2), rel=1e-7)]

    def test_more_keys_than_queries(self, forward):
        q, k = np.zeros((1, 2, 1, 1), np.float32), np.zeros((1, 5, 1, 1), np.float32)
        v = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
        out, lse = forward(q, k, v, causal=True)
        np.testing.assert_allclose(out.ravel(), [1.5, 2.0], rtol=1e-7)
        np.testing.assert_allclose(lse.ravel(), np.log([4, 5]), rtol=1e-7)

    def test_scores_beyond_the_range_of_float16(self, forward):
        q, k = np.full((1, 1, 1, 64), 64, np.float16), np.full((1, 3, 1, 64), 64, np.float16)
        v = np.broadcast_to(np.arange(3)[None, :, None, None], k.shape).astype(np.float16)
        out, lse = forward(q, k, v)
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)
        np.testing.assert_allclose(lse, 32768 + math.log(3), rtol=1e-7)

    def test_alibi_halves_the_weight_with_every_step(self, forward):
        q, k = np.zeros((1, 2, 1, 1), np.float32), np.zeros((1, 3, 1, 1), np.float32)
        v = np.array([4, 2, 1], np.float32).reshape(1, 3, 1, 1)
        out, lse = forward(q, k, v, alibi_slopes=np.full(1, math.log(2), np.float32))
        # The queries stand at keys 1 and 2: weights 1/2, 1, 1/2 and 1/4, 1/2, 1.
        np.testing.assert_allclose(out.ravel(), [4.5 / 2, 3 / 1.75], rtol=1e-6)
        np.testing.assert_allclose(lse.ravel(), np.log([2, 1.75]), rtol=1e-6)

    def test_every_batch_and_head_has_its_own_slope(self, forward):
        q = k = v = np.zeros((2, 2, 3, 1), np.float32)
        slopes = np.arange(6, dtype=np.float32).reshape(2, 3)
        _, lse = forward(q, k, v, alibi_slopes=slopes)
        # Of two keys, one is at distance 0 and one at distance 1.
        expected = np.log(1 + np.exp(-slopes.astype(np.float64)))
        np.testing.assert_allclose(lse, np.stack([expected, expected], axis=-1), atol=2e-7)

    def test_softcap_comes_before_alibi(self, forward):
        q = np.ones((1, 1, 1, 1), np.float32)
        k = np.array([100, -100], np.float32).reshape(1, 2, 1, 1)
        slopes = np.full(1, 5, np.float32)
        _, lse = forward(q, k, k, softcap=3.0)
        np.testing.assert_allclose(lse.item(), math.log(math.exp(3) + math.exp(-3)), rtol=1e-6)
        _, lse = forward(q, k, k, softcap=3.0, alibi_slopes=slopes)
        np.testing.assert_allclose(lse.item(), math.log(math.exp(3 - 5) + math.exp(-3)), rtol=1e-6)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(12, 4), (6, 2), (5, 1), (8, 8)])
    def test_query_heads_read_their_group(self, forward, heads, kv_heads):
        q, k, _ = random_qkv(1, 3, 4, heads, kv_heads, 8, np.float32)
        v = np.zeros_like(k) + np.arange(kv_heads, dtype=np.float32)[:, None]
        out, _ = forward(q, k, v)
        expected = np.arange(heads) // (heads // kv_heads)
        np.testing.assert_allclose(
            out, np.broadcast_to(expected[:, None], out.shape), rtol=1e-6, atol=0
        )

    @pytest.mark.parametrize(
        ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads"),
        [(0, 3, 4, 2, 1), (2, 0, 4, 2, 1), (2, 3, 0, 2, 1), (2, 0, 0, 2, 2), (2, 3, 4, 0, 0)],
    )
    def test_zero_sizes(self, forward, batch, seqlen_q, seqlen_k, heads, kv_heads):
        q, k, v = random_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, 8, np.float32)
        out, lse = forward(q, k, v, causal=True)
        assert out.shape == q.shape
        assert lse.shape == (batch, heads, seqlen_q)
        if seqlen_k == 0:
            assert (out == 0).all()
            assert (lse == -np.inf).all()
        dq, dk, dv = attention_backward(out, q, k, v, causal=True)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        if seqlen_q == 0 or seqlen_k == 0:
            assert not dq.any() and not dk.any() and not dv.any()


def test_rows_without_keys_contribute_exactly_nothing_to_the_gradients():
    q, k, v = random_qkv(1, 5, 2, 1, 1, 4, np.float64)
    dout = np.random.default_rng(1).standard_normal(q.shape)
    dq, dk, dv = attention_backward(dout, q, k, v, causal=True)
    last = slice(3, 5)
    dq_last, dk_last, dv_last = attention_backward(dout[:, last], q[:, last], k, v, causal=True)
    assert (dq[:, :3] == 0).all()
    np.testing.assert_allclose(dq[:, last], dq_last, rtol=1e-12)
    np.testing.assert_allclose(dk, dk_last, rtol=1e-12)
    np.testing.assert_allclose(dv, dv_last, rtol=1e-12)


@pytest.mark.parametrize(
    ("window_size", "expected"),
    [
        pytest.param((-1, -1), ["111", "111", "111", "111"], id="unbounded"),
        pytest.param((-5, -2), ["111", "111", "111", "111"], id="any-negative-is-unbounded"),
        pytest.param((0, 0), ["000", "100", "010", "001"], id="diagonal"),
        pytest.param((1, 0), ["000", "100", "110", "011"], id="left-1"),
        pytest.param((0, 1), ["100", "110", "011", "001"], id="right-1"),
        pytest.param((-1, 1), ["100", "110", "111", "111"], id="left-unbounded"),
        pytest.param((1, -1), ["111", "111", "111", "011"], id="right-unbounded"),
    ],
)
def test_visible_windows(window_size, expected):
    mask = visible(4, 3, False, window_size)
    assert ["".join(map(str, row)) for row in mask.astype(int)] == expected


def test_causal_overrides_the_right_side_only():
    np.testing.assert_array_equal(visible(5, 4, True, (1, 3)), visible(5, 4, False, (1, 0)))


@repeatable
@given(seqlen_q=lengths, seqlen_k=lengths, left=st.integers(-2, 9), right=st.integers(-2, 9))
def test_visible_is_the_definition(seqlen_q, seqlen_k, left, right):
    mask = visible(seqlen_q, seqlen_k, False, (left, right))
    for i, j in np.ndindex(mask.shape):
        aligned = i + seqlen_k - seqlen_q
        in_left = left < 0 or j >= aligned - left
        in_right = right < 0 or j <= aligned + right
        assert mask[i, j] == (in_left and in_right)


@repeatable
@given(seed=seeds, rows=lengths, columns=lengths, scale=st.floats(0, 1e4))
def test_rows_of_p_sum_to_one(seed, rows, columns, scale):
    rng = np.random.default_rng(seed)
    S = scale * rng.standard_normal((rows, columns))
    S[rng.random(S.shape) < 0.3] = -np.inf
    P, lse = softmax(S)
    has_key = np.isfinite(S).any(axis=1)
    np.testing.assert_allclose(P.sum(axis=1), has_key, rtol=1e-14)
    np.testing.assert_array_equal(np.isfinite(lse), has_key)


@repeatable
@given(seed=seeds, seqlen_q=lengths, seqlen_k=lengths)
def test_the_order_of_keys_does_not_matter_without_a_mask(seed, seqlen_q, seqlen_k):
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 2, 1, 4, np.float64, seed)
    order = np.random.default_rng(seed).permutation(seqlen_k)
    out, lse = attention_forward(q, k, v)
    permuted_out, permuted_lse = attention_forward(q, k[:, order], v[:, order])
    np.testing.assert_allclose(permuted_out, out, atol=1e-14)
    np.testing.assert_allclose(permuted_lse, lse, atol=1e-14)


@repeatable
@given(seed=seeds, group=st.integers(1, 4), kv_heads=st.integers(1, 3), causal=st.booleans())
def test_gqa_is_mha_with_repeated_heads(seed, group, kv_heads, causal):
    q, k, v = random_qkv(1, 4, 5, group * kv_heads, kv_heads, 4, np.float64, seed)
    dout = np.random.default_rng(seed).standard_normal(q.shape)
    k_all, v_all = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    for grouped, repeated in zip(
        attention_forward(q, k, v, causal=causal),
        attention_forward(q, k_all, v_all, causal=causal),
        strict=True,
    ):
        np.testing.assert_array_equal(grouped, repeated)
    dq, dk, dv = attention_backward(dout, q, k, v, causal=causal)
    dq_all, dk_all, dv_all = attention_backward(dout, q, k_all, v_all, causal=causal)
    np.testing.assert_array_equal(dq, dq_all)
    by_group = (1, 5, kv_heads, group, 4)
    np.testing.assert_allclose(dk, dk_all.reshape(by_group).sum(axis=3), atol=1e-14)
    np.testing.assert_allclose(dv, dv_all.reshape(by_group).sum(axis=3), atol=1e-14)


@repeatable
@given(seed=seeds, seqlen_q=lengths, seqlen_k=lengths)
def test_causal_is_the_window_without_a_right_side(seed, seqlen_q, seqlen_k):
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 1, 4, np.float64, seed)
    causal = attention_forward(q, k, v, causal=True)
    window = attention_forward(q, k, v, window_size=(-1, 0))
    np.testing.assert_array_equal(causal[0], window[0])
    np.testing.assert_array_equal(causal[1], window[1])


def test_dropout_scales_what_it_keeps_and_leaves_lse_alone():
    q, k, v = random_qkv(1, 3, 4, 2, 2, 8, np.float64)
    all_kept = np.ones((1, 2, 3, 4), bool)
    out, lse = attention_forward(q, k, v)
    kept_out, kept_lse = attention_forward(q, k, v, dropout_p=0.75, dropout_mask=all_kept)
    dropped_out, dropped_lse = attention_forward(q, k, v, dropout_p=0.75, dropout_mask=~all_kept)
    np.testing.assert_allclose(kept_out, 4 * out, rtol=1e-14)
    assert not dropped_out.any()
    np.testing.assert_array_equal(kept_lse, lse)
    np.testing.assert_array_equal(dropped_lse, lse)


same_precision_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(np.float32, 2e-6, id="fp32"),
        pytest.param(np.float16, 2e-3, id="fp16"),
        pytest.param(BFLOAT16, 2e-2, id="bf16"),
    ],
)
same_precision_options = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"causal": True}, id="causal"),
        pytest.param({"window_size": (3, 2)}, id="window"),
        pytest.param({"softcap": 0.9}, id="softcap"),
        pytest.param({"alibi_slopes": SLOPES[:2]}, id="alibi"),
        pytest.param(dropout_options(2, 2, 11, 7), id="dropout"),
    ],
)


@same_precision_dtypes
@same_precision_options
def test_same_precision_is_near_the_exact_answer(dtype, tolerance, options):
    q, k, v = random_qkv(2, 11, 7, 2, 1, 16, dtype)
    out, lse = attention_forward_same_precision(q, k, v, **options)
    exact_out, exact_lse = attention_forward(q, k, v, **options)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    np.testing.assert_allclose(out.astype(np.float64), exact_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-6)


@same_precision_dtypes
@same_precision_options
def test_same_precision_gradients_are_near_the_exact_ones(dtype, tolerance, options):
    q, k, v = random_qkv(2, 11, 7, 2, 1, 16, dtype)
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(dtype)
    gradients = attention_backward_same_precision(dout, q, k, v, **options)
    for rounded, exact in zip(gradients, attention_backward(dout, q, k, v, **options), strict=True):
        assert rounded.dtype == dtype
        largest = np.abs(exact).max()
        assert np.abs(rounded.astype(np.float64) - exact).max() <= tolerance * largest


def test_same_precision_sums_the_heads_of_a_group_before_it_rounds():
    q, k, v = random_qkv(1, 9, 4, 6, 2, 8, np.float16)
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype)
    _, dk, dv = attention_backward_same_precision(dout, q, k, v)
    k_all, v_all = np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2)
    _, dk_all, dv_all = attention_backward_same_precision(dout, q, k_all, v_all)
    for grouped, by_head in ((dk, dk_all), (dv, dv_all)):
        rounded_too_early = by_head.reshape(1, 4, 2, 3, 8).sum(axis=3)
        np.testing.assert_allclose(grouped, rounded_too_early, atol=1e-2)
        assert (grouped != rounded_too_early).any()


def test_same_precision_rows_without_keys_contribute_exactly_nothing():
    q, k, v = random_qkv(1, 5, 2, 1, 1, 4, np.float32)
    dout = np.ones_like(q)
    dq, dk, dv = attention_backward_same_precision(dout, q, k, v, causal=True)
    last = slice(3, 5)
    arrays = dout[:, last], q[:, last], k, v
    dq_last, dk_last, dv_last = attention_backward_same_precision(*arrays, causal=True)
    assert (dq[:, :3] == 0).all()
    for gradient, alone in ((dq[:, last], dq_last), (dk, dk_last), (dv, dv_last)):
        np.testing.assert_array_equal(gradient, alone)


def test_uncancelled_gradients_of_one_key():
    """P is 1 and O is v, so D is the sum of |dO v|."""
    q, k, v, dout = (np.full((1, 1, 1, 2), x) for x in (3.0, -5.0, 7.0, 11.0))
    dout[..., 1] *= -1
    terms = 0.5 * 2 * 7 * 11
    dq, dk = uncancelled_gradients(dout, q, k, v, softmax_scale=-0.5)
    assert dq.tolist() == [[[[5 * terms] * 2]]] and dk.tolist() == [[[[3 * terms] * 2]]]


def test_options_given_as_float64_do_not_raise_the_precision():
    q, k, v = random_qkv(1, 16, 16, 1, 1, 32, np.float32)
    plain = attention_forward_same_precision(q, k, v, softmax_scale=0.2, softcap=2.1)
    options = {"softmax_scale": np.float64(0.2), "softcap": np.float64(2.1)}
    for ours, theirs in zip(
        attention_forward_same_precision(q, k, v, **options), plain, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_same_precision_differs_from_the_exact_answer_by_its_roundings(dtype):
    q, k, v = random_qkv(1, 16, 64, 1, 1, 32, dtype)
    rounded, _ = attention_forward_same_precision(q, k, v)
    exact, _ = attention_forward(q, k, v)
    only_rounded_at_the_end = exact.astype(dtype)
    assert (rounded != only_rounded_at_the_end).any(), "P was not rounded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"q": np.zeros((3, 4, 8))}, "q has shape", id="q-3d"),
        pytest.param({"k": np.zeros((1, 5, 2, 4))}, "k has shape", id="k-head-dim"),
        pytest.param({"v": np.zeros((1, 4, 2, 8))}, "v has shape", id="v-seqlen"),
        pytest.param({"q": np.zeros((1, 3, 5, 8))}, "multiple", id="5-heads-over-2"),
        pytest.param({"dropout_p": 0.5}, "dropout_mask", id="dropout-without-mask"),
        pytest.param({"dropout_p": 1.0}, "dropout_p is 1.0", id="dropout-of-everything"),
        pytest.param({"dropout_mask": np.ones((1, 4, 5, 3), bool)}, "dropout_mask", id="mask"),
        pytest.param({"alibi_slopes": np.zeros(2)}, "alibi_slopes", id="slopes-of-kv-heads"),
    ],
)
def test_misfits_are_refused(change, message):
    arguments = {
        "q": np.zeros((1, 3, 4, 8)),
        "k": np.zeros((1, 5, 2, 8)),
        "v": np.zeros((1, 5, 2, 8)),
    }
    for function in (attention_forward, attention_forward_same_precision):
        with pytest.raises(ValueError, match=message):
            function(**arguments | change)


def test_dout_must_have_the_shape_of_q():
    q, k, v = random_qkv(1, 3, 5, 4, 2, 8, np.float64)
    for function in (attention_backward, attention_backward_same_precision):
        with pytest.raises(ValueError, match="dout has shape"):
            function(q[:, :2], q, k, v)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 5, 7, 3, 3), {}, id="plain"),
        pytest.param((2, 5, 7, 4, 2), {"causal": True}, id="gqa-causal-Sq<Sk"),
        pytest.param((1, 7, 5, 2, 2), {"causal": True}, id="causal-Sq>Sk"),
        pytest.param((1, 6, 6, 6, 1), {"window_size": (2, 1), "softmax_scale": 0.3}, id="window"),
        pytest.param((2, 5, 7, 3, 3), {"alibi_slopes": SLOPES.reshape(2, 3)}, id="alibi"),
    ],
)
def test_torch_agrees(sizes, options):
    torch = pytest.importorskip("torch")
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes
    arrays = random_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, 8, np.float64)
    dout = np.random.default_rng(1).standard_normal(arrays[0].shape)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in arrays)

    # PyTorch's own causal flag is aligned top-left, so the mask is spelled out here.
    aligned = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = aligned - torch.arange(seqlen_k)
    left, right = options.get("window_size", (seqlen_k + seqlen_q, seqlen_k + seqlen_q))
    hidden = (distance > left) | (distance < -(0 if options.get("causal") else right))
    slopes = torch.tensor(options.get("alibi_slopes", np.zeros((batch, heads))))
    bias = -slopes[:, :, None, None].double() * distance.abs()
    bias = bias.masked_fill(hidden, -torch.inf)  # (B, H, Sq, Sk)
    scale = options.get("softmax_scale", 8**-0.5)

    by_head = [x.transpose(1, 2) for x in (q, k, v)]  # (B, heads, seqlen, D)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *by_head, attn_mask=bias, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    k_all = by_head[1].repeat_interleave(heads // kv_heads, dim=1)
    expected_lse = torch.logsumexp(scale * by_head[0] @ k_all.transpose(2, 3) + bias, dim=-1)
    expected.backward(torch.tensor(dout))

    out, lse = attention_forward(*arrays, **options)
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse.detach().numpy(), atol=1e-13)
    gradients = attention_backward(dout, *arrays, **options)
    for gradient, tensor in zip(gradients, (q, k, v), strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-13)
