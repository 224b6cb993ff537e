"""The differentiable functions on torch tensors: values, gradients, autograd's rules, errors."""

import gc
import inspect
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import fa2_numba
from fa2_numba import RUNGS, ArgumentError, Simulator, gradients, interface
from fa2_numba.config import TileConfig
from fa2_numba.errors import ArgumentTypeError, TorchArgumentError, TorchArgumentTypeError
from fa2_numba.reference import attention_forward
from fa2_numba.simulator import RunTooLongError
from fa2_numba.testing import assert_attention, assert_gradients, random_qkv

from .conftest import FAST_SIMULATOR, HAS_GPU, NO_GPU

torch = pytest.importorskip("torch", reason="torch is not installed")
differentiable = pytest.importorskip("fa2_numba.torch")

RUNG = "fa2_split_q"
TILES = TileConfig(head_dim=16, block_m=8, block_n=8, num_warps=2)
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.fixture(autouse=True)
def smallest_tiles(request, monkeypatch):
    """Tiles of 8 x 8, so that the simulator is fast; a GPU keeps the tiles of the product."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(interface, "tiles_for", lambda *_: TILES)
    monkeypatch.setattr(gradients, "backward_tiles_for", lambda *_: TILES)


def attend(*tensors, **options):
    return differentiable.flash_attn_func(
        *tensors, **{"machine": FAST_SIMULATOR, "rung": RUNG} | options
    )


def tensors(seqlen_q=5, seqlen_k=9, heads=2, kv_heads=1, head_dim=9, dtype="float32", batch=1):
    """q, k and v, which all require a gradient."""
    sizes = batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
    drawn = random_qkv(*sizes, np.float32, seed=sum(sizes))
    return [torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in drawn]


def noise(like, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def host(tensor):
    """A tensor as NumPy's array of its dtype, bfloat16 included."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view("bfloat16")


def check(found, dout, leaves, **options):
    assert all(x.dtype is leaf.dtype for x, leaf in zip(found, leaves, strict=True))
    assert_gradients(*map(host, found), host(dout), *map(host, leaves), **options)


def gradients_of(leaves, dout=None, **options):
    out = attend(*leaves, **options)
    return torch.autograd.grad(out, leaves, noise(out) if dout is None else dout)


# Values.


def test_the_signature_is_that_of_flash_attn():
    ours = inspect.signature(differentiable.flash_attn_func).parameters
    plain = inspect.signature(fa2_numba.flash_attn_func).parameters
    assert list(ours) == [name for name in plain if name not in ("out", "return_lse", "report")]
    assert all(ours[name].default == plain[name].default for name in ours)
    assert all(ours[name].kind is plain[name].kind for name in ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_values_and_gradients(dtype, causal):
    leaves = tensors(5, 3, 4, 2, dtype=dtype, batch=2)
    out, lse, dropped = attend(*leaves, causal=causal, return_attn_probs=True)
    arrays = [host(x) for x in leaves]
    assert_attention(host(out), host(lse), *arrays, causal=causal)
    assert dropped.shape == (0,) and dropped.dtype is out.dtype
    dout = noise(out)
    out.backward(dout)
    check([x.grad for x in leaves], dout, leaves, causal=causal)


def test_gradients_equal_finite_differences():
    """Of a loss of the exact attention in float64: the kernels' own steps would be too coarse."""
    leaves = tensors(3, 4, 2, 1, 3)
    arrays = [host(x).astype(np.float64) for x in leaves]
    weights = host(noise(leaves[0])).astype(np.float64)

    def loss():
        return float((np.sin(attention_forward(*arrays, causal=True)[0]) * weights).sum())

    (attend(*leaves, causal=True).sin() * torch.from_numpy(weights).float()).sum().backward()
    for array, leaf in zip(arrays, leaves, strict=True):
        numeric, step = np.zeros_like(array), 1e-5
        for index in np.ndindex(array.shape):
            middle = array[index]
            array[index] = middle + step
            above = loss()
            array[index] = middle - step
            numeric[index] = (above - loss()) / (2 * step)
            array[index] = middle
        np.testing.assert_allclose(leaf.grad.numpy(), numeric, rtol=0, atol=2e-6)


def test_options_reach_both_passes():
    leaves = tensors()
    options = {"softmax_scale": -0.7, "window_size": (-1, 0), "deterministic": True}
    dout = noise(leaves[0])
    check(gradients_of(leaves, dout, **options), dout, leaves, softmax_scale=-0.7, causal=True)


def test_zero_sizes():
    for sizes in ((0, 4), (4, 0)):
        leaves = tensors(*sizes)
        attend(*leaves).sum().backward()
        assert all(x.grad.shape == x.shape and not x.grad.any() for x in leaves)


# What autograd may do with it.


def test_lse_and_the_dropout_mask_have_no_gradient():
    out, lse, dropped = attend(*tensors(), return_attn_probs=True)
    assert [x.requires_grad for x in (out, lse, dropped)] == [True, False, False]
    assert out.is_leaf is False and lse.grad_fn is None


def test_a_graph_may_be_kept_and_gone_through_again():
    leaves = tensors()
    out = attend(*leaves)
    dout = noise(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    doubled = torch.autograd.grad(out, leaves, 2 * dout)
    for a, b, c in zip(first, again, doubled, strict=True):
        assert torch.equal(a, b) and torch.equal(2 * a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)


def test_gradients_accumulate():
    leaves = tensors()
    out = attend(*leaves)
    out.sum().backward(retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    out.sum().backward()
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip(leaves, once, strict=True))


DOUTS = {
    "expanded": lambda shape: torch.ones(()).expand(shape),
    "by-head": lambda shape: torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2),
    "last-stride-2": lambda shape: torch.randn(*shape[:3], 2 * shape[3])[..., ::2],
    "negated": lambda shape: torch._neg_view(torch.randn(shape)),
}


@pytest.mark.parametrize("make", DOUTS.values(), ids=DOUTS)
def test_dout_of_any_strides(make):
    leaves = tensors()
    dout = make(leaves[0].shape)
    assert dout.stride() != leaves[0].stride() or dout.is_neg()
    found = gradients_of(leaves, dout)
    plain = dout.resolve_neg().clone(memory_format=torch.contiguous_format)
    expected = gradients_of(leaves, plain)
    assert all(map(torch.equal, found, expected))
    check(found, plain, leaves)


def test_the_gradient_of_a_sum():
    leaves = tensors()
    attend(*leaves).sum().backward()
    check([x.grad for x in leaves], torch.ones_like(leaves[0]), leaves)


def test_tensors_of_any_strides():
    packed = noise(torch.empty(1, 7, 3, 2, 9)).requires_grad_()
    out = attend(*packed.unbind(2))
    out.backward(noise(out))
    leaves = [x.detach() for x in packed.unbind(2)]
    check(packed.grad.unbind(2), noise(out), leaves)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_some_require_a_gradient(wanted):
    leaves = tensors()
    expected = gradients_of(leaves)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
    out = attend(*some)
    out.backward(noise(out))
    for i, leaf in enumerate(some):
        assert torch.equal(leaf.grad, expected[i]) if i in wanted else leaf.grad is None


def test_what_is_kept():
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    leaves = tensors()
    with hooks:
        out, lse, _ = attend(*leaves, return_attn_probs=True)
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (*leaves, out, lse)]
        del kept[:]
        with torch.no_grad():
            assert not attend(*leaves).requires_grad
        assert not attend(*(x.detach() for x in leaves)).requires_grad
    assert kept == []


def test_nothing_is_kept_without_a_gradient():
    leaves = [x.detach() for x in tensors()]
    out, lse, _ = attend(*leaves, return_attn_probs=True)
    assert out.grad_fn is None
    references = [weakref.ref(x) for x in (*leaves, lse)]
    del leaves, lse
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_a_tensor_changed_in_between_is_noticed():
    leaves = tensors()
    q = leaves[0] * 1
    out = attend(q, *leaves[1:])
    with torch.no_grad():
        q += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gradient_of_gradients_is_refused():
    """Also where the gradient that comes in is a constant."""
    leaves = tensors()
    for loss in (torch.sum, lambda out: out.square().sum()):
        found = torch.autograd.grad(loss(attend(*leaves)), leaves, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated"):
            sum(x.square().sum() for x in found).backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_is_refused():
    leaves = [x.detach() for x in tensors()]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        dual = torch.autograd.forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0]))
        attend(dual, *leaves[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_casts_nothing(dtype):
    leaves = tensors(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*leaves)
        assert out.dtype is leaves[0].dtype
        inside = torch.autograd.grad(out, leaves, noise(out))
    assert all(map(torch.equal, inside, gradients_of(leaves)))


def test_autocast_of_what_comes_before():
    """The product is bfloat16 under autocast; its weight, a float32, gets a float32 gradient."""
    weight = noise(torch.empty(9, 9)).requires_grad_()
    q, k, v = (x.detach() for x in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projected = [x @ weight for x in (q, k, v)]
        out = attend(*projected)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype is torch.float32 and weight.grad.any()


def test_checkpointing():
    leaves = tensors()
    expected = gradients_of(leaves)
    out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, noise(out))
    assert all(map(torch.equal, found, expected))


def test_a_parameter_learns():
    """The loss falls at each step downhill."""
    leaves = tensors(3, 4, 1, 1, 4)
    target = noise(leaves[0], seed=3)
    losses = []
    for _ in range(5):
        loss = (attend(*leaves) - target).square().mean()
        losses.append(loss.item())
        found = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf -= 0.3 * gradient
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


# Errors.


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        pytest.param(
            TorchArgumentError,
            "k: head dim 3; must be that of q, 9",
            lambda q, k, v: (q, k[..., :3], v[..., :3]),
            id="head-dim",
        ),
        pytest.param(
            TorchArgumentTypeError,
            "q is float16, k is float32, v is float32",
            lambda q, k, v: (q.half(), k, v),
            id="dtypes",
        ),
        pytest.param(
            TorchArgumentTypeError,
            "q is float64, k is float64, v is float64",
            lambda q, k, v: (q.double(), k.double(), v.double()),
            id="float64",
        ),
        pytest.param(
            TorchArgumentTypeError,
            "v: a numpy.ndarray; must be a torch tensor",
            lambda q, k, v: (q, k, v.detach().numpy()),
            id="numpy",
        ),
        pytest.param(
            TorchArgumentTypeError,
            "q: lazily negated",
            lambda q, k, v: (torch._neg_view(q), k, v),
            id="negated",
        ),
        pytest.param(
            TorchArgumentTypeError,
            "q is complex64",
            lambda q, k, v: (q.to(torch.complex64).conj(), k, v),
            id="conjugate",
        ),
    ],
)
def test_wrong_tensors_are_refused(error, message, change):
    with pytest.raises(error, match=message) as refusal:
        attend(*change(*tensors()))
    assert refusal.type is error


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TorchArgumentError, {"softmax_scale": float("nan")}),
        (TorchArgumentError, {"dropout_p": 1.0}),
        (TorchArgumentTypeError, {"causal": 1}),
        (TorchArgumentTypeError, {"deterministic": 1}),
        (TorchArgumentError, {"machine": "tpu"}),
        (TorchArgumentError, {"rung": "fa9"}),
        (NotImplementedError, {"softcap": 30.0}),
        (RunTooLongError, {"machine": Simulator(max_seconds=1e-9)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_wrong_options_are_refused(error, options):
    with pytest.raises(error) as refusal:
        attend(*tensors(), **options)
    assert refusal.type is error


def test_errors_are_of_both_families():
    for kind, also in (
        (TorchArgumentError, (ArgumentError, ValueError, RuntimeError)),
        (TorchArgumentTypeError, (ArgumentTypeError, TypeError, RuntimeError)),
    ):
        assert all(issubclass(kind, other) for other in also)


def test_a_rung_without_a_backward_pass_is_refused_before_the_forward_pass():
    leaves = tensors()
    assert RUNGS["fa2_seq_parallel"].plan_backward is None
    with pytest.raises(TorchArgumentError, match="has no backward pass"):
        attend(*leaves, rung="fa2_seq_parallel")
    with torch.no_grad():
        attend(*leaves, rung="fa2_seq_parallel")


def test_without_torch_the_import_says_so():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import fa2_numba.gradients\n"
        "try:\n    import fa2_numba.torch\nexcept ImportError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "needs PyTorch" in done.stdout and "pip install torch" in done.stdout


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_tensors_on_a_side_stream(dtype):
    if not (HAS_GPU and torch.cuda.is_available()):
        pytest.skip(NO_GPU)
    leaves = [x.detach().cuda().requires_grad_() for x in tensors(70, 90, 4, 2, 64, dtype)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attend(*leaves, machine="auto", rung="auto", causal=True)
        dout = noise(out.cpu()).cuda()
        out.backward(dout)
    stream.synchronize()
    check([x.grad for x in leaves], dout, leaves, causal=True)
