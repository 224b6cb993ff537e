"""The backward pass on a GPU, with the tiles of the product: dtypes, sizes, strides, repeats."""

import numpy as np
import pytest

from fa2_numba import RUNGS, flash_attn_backward, flash_attn_func
from fa2_numba.testing import assert_gradients, random_qkv

from .conftest import DTYPES

pytestmark = pytest.mark.gpu

KINDS = [
    pytest.param(name, DTYPES[dtype], id=f"{name}-{dtype}")
    for name, rung in RUNGS.items()
    if rung.plan_backward is not None
    for dtype in rung.dtypes
]
rungs = pytest.mark.parametrize(
    "rung", [name for name, rung in RUNGS.items() if rung.plan_backward is not None]
)


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def inputs(*sizes, dtype):
    """dout, q, k, v on the host."""
    q, k, v = random_qkv(*sizes, dtype, seed=sum(sizes))
    return random_qkv(*sizes, dtype, seed=1)[0], q, k, v


def differentiate(cupy, host, rung, place=None, **options):
    """dq, dk and dv of a forward and a backward pass; place: how arrays lie on the GPU."""
    dout, q, k, v = map(place or cupy.asarray, host)
    mask = {"causal": options.get("causal", False)}
    out, lse = flash_attn_func(q, k, v, rung=rung, return_lse=True, **mask)
    return flash_attn_backward(dout, q, k, v, out, lse, rung=rung, **options)


@pytest.mark.parametrize("deterministic", [False, True], ids=["summed", "deterministic"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "causal"),
    [(65, 130, 64, True), (130, 257, 128, False), (140, 30, 40, True), (97, 97, 256, True)],
)
@pytest.mark.parametrize(("rung", "dtype"), KINDS)
def test_gradients(cupy, rung, dtype, seqlen_q, seqlen_k, head_dim, causal, deterministic):
    host = inputs(2, seqlen_q, seqlen_k, 4, 2, head_dim, dtype=dtype)
    found = differentiate(cupy, host, rung, causal=causal, deterministic=deterministic)
    assert_gradients(*(x.get() for x in found), *host, causal=causal)


@rungs
@pytest.mark.parametrize("offset", (1, 2, 4))
def test_any_alignment(cupy, offset, rung):
    host = inputs(1, 70, 40, 2, 1, 64, dtype=np.float16)

    def shifted(x):
        buffer = cupy.full(x.size + 16, cupy.nan, x.dtype)
        view = buffer[offset : offset + x.size].reshape(x.shape)
        view[...] = cupy.asarray(x)
        return view

    found = differentiate(cupy, host, rung, shifted, deterministic=True)
    assert_gradients(*(x.get() for x in found), *host)


@rungs
def test_strided_views_give_the_same_bits(cupy, rung):
    host = inputs(2, 33, 47, 4, 2, 40, dtype=np.float16)
    expected = differentiate(cupy, host, rung, deterministic=True)

    def heads_first(x):
        return cupy.asarray(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3)

    def backwards(x):
        return cupy.asarray(x[:, ::-1].copy())[:, ::-1]

    for place in (heads_first, backwards):
        found = differentiate(cupy, host, rung, place, deterministic=True)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got.get(), want.get())


@rungs
def test_all_but_a_summed_dq_repeats_bit_for_bit(cupy, rung):
    host = inputs(2, 700, 900, 8, 2, 64, dtype=np.float16)
    first = differentiate(cupy, host, rung, causal=True, deterministic=True)
    for deterministic in (True, True, False, False):
        found = differentiate(cupy, host, rung, causal=True, deterministic=deterministic)
        for got, want in list(zip(found, first, strict=True))[not deterministic :]:
            np.testing.assert_array_equal(got.get(), want.get())
