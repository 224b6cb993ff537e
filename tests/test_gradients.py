"""`flash_attn_backward` on the host: array kinds, strides, its buffers, and every refusal."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fa2_numba import (
    RUNGS,
    ArgumentError,
    Simulator,
    flash_attn_backward,
    flash_attn_func,
    gradients,
    interface,
    machines,
)
from fa2_numba.config import TileConfig
from fa2_numba.errors import ArgumentTypeError
from fa2_numba.launch import SimulatorMachine
from fa2_numba.simulator import RunTooLongError
from fa2_numba.testing import assert_gradients, poisoned, random_qkv

from .conftest import CUDA_CORE_RUNGS, FAST_SIMULATOR
from .test_arrays import fake_cupy, fake_numba
from .test_interface import (
    CAUSAL_BY_ANOTHER_NAME,
    EMPTY,
    LAYOUTS,
    NOT_BUILT,
    TENSOR_LAYOUTS,
    WRONG_ARRAYS,
    WRONG_OPTIONS,
    Kind,
    assert_refused,
    bits,
    kinds,
    memory_of,
    misaligned,
    qkv,
    read_only,
    refused,
    zeros,
)

RUNG = "fa2_split_q"
TILES = TileConfig(head_dim=16, block_m=8, block_n=8, num_warps=2)
NAMES = "dq", "dk", "dv"
BACKWARD_RUNGS = [name for name in CUDA_CORE_RUNGS if RUNGS[name].plan_backward]
SOME_LAYOUTS = {
    name: layout
    for name, layout in LAYOUTS.items()
    if not name.startswith("offset") or name in ("offset-1", "offset-4")
}


@pytest.fixture(autouse=True)
def smallest_tiles(monkeypatch):
    """Tiles of 8 x 8, so that the simulator is fast and 20 keys are three tiles."""
    monkeypatch.setattr(interface, "tiles_for", lambda *_: TILES)
    monkeypatch.setattr(gradients, "backward_tiles_for", lambda *_: TILES)


@pytest.fixture
def no_launch(monkeypatch):
    """Nothing may run, on either machine; and there is no GPU, whatever this computer has."""

    def launched(*_):
        pytest.fail("a kernel was launched")

    monkeypatch.setattr(SimulatorMachine, "run", launched)
    monkeypatch.setattr(machines, "GpuMachine", launched)
    monkeypatch.setattr(machines, "gpu_available", lambda: False)


def differentiate(*arrays, **options):
    return flash_attn_backward(*arrays, **{"machine": FAST_SIMULATOR, "rung": RUNG} | options)


def problem(*sizes, causal=False, softmax_scale=None, **named):
    """dout, q, k, v, out, lse as NumPy arrays, the last two from a forward pass."""
    q, k, v = qkv(*sizes, **named)
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype)
    options = {"causal": causal, "softmax_scale": softmax_scale, "rung": RUNG}
    out, lse = flash_attn_func(q, k, v, machine=FAST_SIMULATOR, return_lse=True, **options)
    return dout, q, k, v, out, lse


def all_bits(values):
    return [bits(value) for value in values]


# The signature and what is returned.


def test_the_signature():
    parameters = inspect.signature(flash_attn_backward).parameters.values()
    leading = [p.name for p in parameters if p.default is p.empty]
    tail = {p.name: p.default for p in parameters if p.default is not p.empty}
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert leading == ["dout", "q", "k", "v", "out", "lse"]
    assert list(tail.items()) == [
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("rung", "auto"),
        ("machine", "auto"),
        ("dq", None),
        ("dk", None),
        ("dv", None),
        ("report", False),
    ]
    assert keyword_only == ["rung", "machine", "dq", "dk", "dv", "report"]


@kinds
def test_every_kind_returns_its_own(kind):
    arrays = problem(dtype=kind.dtype)
    *originals, lse = arrays
    as_kind = Kind(kind.library, "float32").make(lse)
    answer = differentiate(*map(kind.make, originals), as_kind)
    for value, shape in zip(answer, ((1, 5, 2, 9), (1, 20, 1, 9), (1, 20, 1, 9)), strict=True):
        kind.check(value, shape)
    # The same bits as NumPy's, and right.
    expected = differentiate(*arrays)
    assert all_bits(answer) == all_bits(expected)
    assert_gradients(*expected, *arrays[:4])


@pytest.mark.parametrize("rung", BACKWARD_RUNGS)
def test_arguments_may_be_positional(rung):
    arrays = problem(causal=True, softmax_scale=0.5)
    options = 0.5, True, (-1, -1), 0.0, None, True
    answer = flash_attn_backward(*arrays, *options, machine=FAST_SIMULATOR, rung=rung)
    assert_gradients(*answer, *arrays[:4], softmax_scale=0.5, causal=True)


def test_a_report_comes_last():
    arrays = problem()
    *answer, report = differentiate(*arrays, report=True)
    assert all_bits(answer) == all_bits(differentiate(*arrays))
    assert report.name == RUNG and report.global_load_bytes > 0


def test_deterministic_reaches_the_rung(monkeypatch):
    told = []

    def plan_backward(tensors, config):
        told.append(tensors.deterministic)
        return RUNGS["standard"].plan_backward(tensors, config)

    monkeypatch.setitem(RUNGS, RUNG, replace(RUNGS[RUNG], plan_backward=plan_backward))
    arrays = problem(2, 3)
    for deterministic in (True, False, np.True_):
        differentiate(*arrays, deterministic=deterministic)
    assert told == [True, False, True]


# dq=, dk=, dv=


@kinds
@pytest.mark.parametrize("given", [NAMES, ("dk",)], ids=len)
def test_buffers_are_overwritten_and_returned(kind, given):
    *arrays, lse = problem(dtype=kind.dtype)
    arrays = [*map(kind.make, arrays), Kind(kind.library, "float32").make(lse)]
    expected = differentiate(*arrays)
    full = 1e9 if kind.dtype != "float16" else 6e4
    shapes = dict(zip(NAMES, (x.shape for x in expected), strict=True))
    buffers = {name: kind.make(np.full(shapes[name], full)) for name in given}
    answer = differentiate(*arrays, **buffers)
    for name, value in zip(NAMES, answer, strict=True):
        assert name not in buffers or value is buffers[name]
    assert all_bits(answer) == all_bits(expected)


def test_buffers_may_be_parts_of_one_packed_array():
    arrays = problem(9, 9, 2, 2)
    expected = differentiate(*arrays)
    packed = np.full((1, 9, 3, 2, 9), 1e9, np.float32)
    answer = differentiate(*arrays, **{name: packed[:, :, i] for i, name in enumerate(NAMES)})
    assert all_bits(answer) == all_bits(expected)
    np.testing.assert_array_equal(packed, np.stack(expected, axis=2))


# Strides.


@pytest.mark.parametrize("layout", SOME_LAYOUTS.values(), ids=SOME_LAYOUTS)
def test_strides_change_nothing(layout):
    contiguous = problem(3, 5, causal=True, dtype="bfloat16", batch=2)
    expected = differentiate(*contiguous, causal=True)
    *arrays, lse = contiguous
    arrays = [*map(layout, arrays), lse]
    before = [memory_of(x) for x in arrays]
    buffers = {n: layout(np.full_like(x, 1e9)) for n, x in zip(NAMES, expected, strict=True)}
    for options in ({}, buffers):
        assert all_bits(differentiate(*arrays, causal=True, **options)) == all_bits(expected)
    assert [memory_of(x) for x in arrays] == before
    # Nothing beside the buffers was written: undoing it brings back what was there.
    for x in buffers.values():
        x[...] = 1e9
        assert memory_of(x) == memory_of(layout(np.full_like(x, 1e9)))


def test_strides_of_lse_change_nothing():
    *arrays, lse = problem(5, 9, batch=2)
    strided = np.repeat(lse.transpose(2, 0, 1), 2, axis=2)[..., ::2].transpose(1, 2, 0)
    np.testing.assert_array_equal(strided, lse)
    assert all_bits(differentiate(*arrays, strided)) == all_bits(differentiate(*arrays, lse))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_repeated_elements(axes):
    """All inputs may have zero strides; what is made for them are ordinary arrays."""
    index = tuple(slice(1 if axis in axes else None) for axis in range(4))
    *inputs, _, _ = problem(5, 9, batch=2)
    repeated = [np.broadcast_to(x[index], x.shape) for x in inputs]
    copies = [x.copy() for x in repeated]
    how = {"machine": FAST_SIMULATOR, "rung": RUNG, "return_lse": True}
    forward = flash_attn_func(*copies[1:], **how)
    answer = differentiate(*repeated, *forward)
    assert all_bits(answer) == all_bits(differentiate(*copies, *forward))
    assert all(x.flags.c_contiguous and x.flags.writeable for x in answer)


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS.values(), ids=TENSOR_LAYOUTS)
def test_tensor_strides_change_nothing(layout):
    *arrays, lse = (Kind("torch", "float32").make(x) for x in problem(5, 9))
    expected = differentiate(*arrays, lse)
    assert all_bits(differentiate(*map(layout, arrays), lse)) == all_bits(expected)


def test_gradients_have_the_memory_order_of_their_arrays():
    *arrays, lse = problem(5, 9, 2, 2)
    by_head = [LAYOUTS["transposed-BHSD"](x) for x in arrays]
    answer = differentiate(*by_head, lse)
    assert [x.strides for x in answer] == [x.strides for x in by_head[1:4]]


# Sizes and rows with an answer of their own.


@kinds
@pytest.mark.parametrize(("q_shape", "k_shape"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("machine", [FAST_SIMULATOR, "auto"], ids=["given", "auto"])
def test_zero_sizes(kind, q_shape, k_shape, machine, no_launch):
    dout, q, out = (kind.make(np.ones(q_shape)) for _ in range(3))
    k, v = (kind.make(np.ones(k_shape)) for _ in range(2))
    lse_shape = q_shape[0], q_shape[2], q_shape[1]
    lse = Kind(kind.library, "float32").make(np.full(lse_shape, -np.inf))
    shapes = q_shape, k_shape, k_shape
    buffers = {n: kind.make(poisoned(s, "f4")) for n, s in zip(NAMES, shapes, strict=True)}
    for options in ({}, buffers):
        answer = differentiate(dout, q, k, v, out, lse, machine=machine, causal=True, **options)
        for value, shape in zip(answer, shapes, strict=True):
            kind.check(value, shape)
            assert bool((value == 0).all())


def test_a_group_gets_the_sum_of_the_gradients_of_its_heads():
    arrays = problem(17, 17, 6, 2, causal=True)
    dout, q, k, v, out, lse = arrays
    dq, dk, dv = differentiate(*arrays, causal=True)
    k_all, v_all = np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2)
    by_head = differentiate(dout, q, k_all, v_all, out, lse, causal=True)
    summed = [x.reshape(1, 17, 2, 3, 9).sum(axis=3) for x in by_head[1:]]
    assert_gradients(dq, *summed, *arrays[:4], causal=True)
    assert bits(dq) == bits(by_head[0])
    for grouped, expected in zip((dk, dv), summed, strict=True):
        np.testing.assert_allclose(grouped, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("rung", BACKWARD_RUNGS)
def test_queries_that_see_no_key_add_nothing(rung):
    options = {"causal": True, "rung": rung}
    arrays = problem(9, 5, causal=True)
    answer = differentiate(*arrays, **options)
    assert (arrays[-1][:, :, :4] == -np.inf).all() and not answer[0][:, :4].any()
    assert_gradients(*answer, *arrays[:4], causal=True)
    *inputs, lse = arrays
    as_flash_attn = np.where(lse == -np.inf, np.float32(np.inf), lse)
    assert all_bits(differentiate(*inputs, as_flash_attn, **options)) == all_bits(answer)
    # Nor may what lies in their rows matter.
    changed = [x.copy() for x in arrays]
    changed[0][:, :4] *= 100
    assert all_bits(differentiate(*changed, **options)) == all_bits(answer)


def test_one_key():
    arrays = problem(5, 1)
    assert_gradients(*differentiate(*arrays), *arrays[:4])


# Options.


@pytest.mark.parametrize("options", CAUSAL_BY_ANOTHER_NAME.values(), ids=CAUSAL_BY_ANOTHER_NAME)
def test_other_names_of_causal(options):
    arrays = problem(5, 9, causal=True)
    expected = differentiate(*arrays, causal=True)
    assert all_bits(differentiate(*arrays, **options)) == all_bits(expected)


@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0, 1, np.float16(0.5)], ids=repr)
def test_softmax_scale(scale):
    arrays = problem(5, 9, causal=True, softmax_scale=scale)
    answer = differentiate(*arrays, causal=True, softmax_scale=scale)
    assert_gradients(*answer, *arrays[:4], causal=True, softmax_scale=float(scale))


# Refusals, as in `test_interface`: each changes some arguments of a good call.

WRONG_COMPANIONS = [
    refused(
        "dout-shape", ArgumentError, "dout:", "(1, 5, 2, 8)", "q, (1, 4", dout=zeros(1, 5, 2, 8)
    ),
    refused("out-ndim", ArgumentError, "out:", "(64,)", "that of q, (1", out=zeros(64)),
    refused(
        "dout-fp16",
        ArgumentTypeError,
        "dout: float16; must be that of q, float32",
        dout=zeros(1, 4, 2, 8, dtype=np.float16),
    ),
    refused("out-fp64", ArgumentTypeError, "out: float64", out=zeros(1, 4, 2, 8, dtype=np.float64)),
    refused(
        "lse-fp64", ArgumentTypeError, "lse: float64", "float32", lse=zeros(1, 2, 4, dtype="d")
    ),
    refused("lse-shape", ArgumentError, "lse:", "(1, 4, 2)", "(1, 2, 4)", lse=zeros(1, 4, 2)),
    refused("lse-none", ArgumentTypeError, "lse:", "NoneType", "must be", lse=None),
    refused("dout-list", ArgumentTypeError, "dout:", "list", dout=lambda a: a.q.tolist()),
    refused("out-masked", ArgumentTypeError, "out:", "mask", out=lambda a: np.ma.array(a.out)),
    refused(
        "another-library",
        ArgumentTypeError,
        "dout:",
        "cupy",
        "numpy",
        "one library",
        dout=lambda a: fake_cupy(a.dout),
    ),
    refused(
        "another-gpu",
        ArgumentError,
        "lse:",
        "on GPU 1",
        "q is on GPU 0",
        **{name: lambda a, name=name: fake_cupy(getattr(a, name)) for name in ("q", "k", "v")},
        **{name: lambda a, name=name: fake_cupy(getattr(a, name)) for name in ("dout", "out")},
        lse=lambda a: fake_cupy(a.lse, device=1),
    ),
    refused(
        "misaligned-on-a-gpu",
        ArgumentError,
        "dout:",
        "multiples of the size of a float32",
        **{name: lambda a, name=name: fake_numba(getattr(a, name)) for name in ("q", "k", "v")},
        **{name: lambda a, name=name: fake_numba(getattr(a, name)) for name in ("out", "lse")},
        dout=lambda a: fake_numba(misaligned(a.dout)),
    ),
    refused(
        "deterministic", ArgumentTypeError, "deterministic=1", "True or False", deterministic=1
    ),
    refused("report", ArgumentTypeError, "report=None", "True or False", report=None),
]
WRONG_BUFFERS = [
    refused("dq-shape", ArgumentError, "dq:", "(1, 5, 1, 8)", "that of q", dq=zeros(1, 5, 1, 8)),
    refused("dk-shape", ArgumentError, "dk:", "(1, 4, 2, 8)", "that of k", dk=zeros(1, 4, 2, 8)),
    refused("dv-shape", ArgumentError, "dv:", "(40,)", "that of v", dv=zeros(40)),
    refused("dk-fp16", ArgumentTypeError, "dk: float16", dk=zeros(1, 5, 1, 8, dtype=np.float16)),
    refused("dv-list", ArgumentTypeError, "dv:", "list", dv=lambda a: [a.dv]),
    refused("dv-cupy", ArgumentTypeError, "dv:", "cupy", "numpy", dv=lambda a: fake_cupy(a.dv)),
    refused("dq-read-only", ArgumentError, "dq:", "read-only", "writable", dq=read_only),
    refused(
        "dk-broadcast",
        ArgumentError,
        "dk:",
        "share an address",
        dk=lambda a: np.lib.stride_tricks.as_strided(a.dk, a.k.shape, (160, 0, 32, 4)),
    ),
    *(
        refused(f"dq-is-{name}", ArgumentError, "dq: shares", f"with {name}", dq=get)
        for name, get in {
            "q": lambda a: a.q,
            "dout": lambda a: a.dout[:, ::-1],
            "out": lambda a: a.out,
        }.items()
    ),
    refused("dk-is-v", ArgumentError, "dk: shares memory with v", dk=lambda a: a.v),
    refused("dv-is-k", ArgumentError, "dv: shares memory with k", dv=lambda a: a.k),
    refused("dv-is-dk", ArgumentError, "dv: shares memory with dk", dv=lambda a: a.dk),
    refused(
        "dk-overlaps-dq-by-one-element",
        ArgumentError,
        "dk: shares memory with dq",
        dk=lambda a: a.buffer[63 : 63 + 40].reshape(1, 5, 1, 8),
    ),
    refused(
        "dv-overlaps-lse",
        ArgumentError,
        "dv: shares memory with lse",
        lse=lambda a: a.dv.ravel()[-8:].reshape(1, 2, 4),
    ),
]


def of_backward(refusals):
    return [each for each in refusals if "dropout_p" not in each.values[2]]


def good_arguments():
    """A good call's arrays; dq, dk and dv are parts of `buffer`, all of it poison."""
    q, k, v = random_qkv(1, 4, 5, 2, 1, 8, np.float32)
    buffer = poisoned(200, np.float32)
    parts = buffer[:64], buffer[64:104], buffer[104:144]
    dq, dk, dv = (part.reshape(x.shape) for part, x in zip(parts, (q, k, v), strict=True))
    inputs = {"dout": q.copy(), "q": q, "k": k, "v": v, "out": q.copy(), "lse": zeros(1, 2, 4)}
    return SimpleNamespace(buffer=buffer, dq=dq, dk=dk, dv=dv, **inputs)


@pytest.mark.parametrize(
    ("error", "parts", "changes"),
    of_backward(WRONG_COMPANIONS + WRONG_BUFFERS + WRONG_ARRAYS + WRONG_OPTIONS + NOT_BUILT),
)
def test_wrong_arguments_are_refused(error, parts, changes, no_launch):
    good = good_arguments()
    arguments = {name: value for name, value in vars(good).items() if name != "buffer"}
    assert_refused(differentiate, good, arguments, error, parts, changes)


def test_the_good_call_of_the_refusals_is_good():
    good = vars(good_arguments())
    buffer = good.pop("buffer")
    differentiate(**good)
    assert np.isfinite(buffer[:144]).all() and np.isnan(buffer[144:]).all()


@pytest.mark.parametrize("position", range(6))
def test_a_tensor_that_requires_grad_is_refused(position, no_launch):
    torch = pytest.importorskip("torch")
    good = good_arguments()
    names = "dout", "q", "k", "v", "out", "lse"
    tensors = [torch.from_numpy(getattr(good, name)) for name in names]
    tensors[position].requires_grad_()
    message = f"{names[position]} requires a gradient.*fa2_numba.torch.flash_attn_func"
    with pytest.raises(ArgumentError, match=message):
        differentiate(*tensors)
    with torch.no_grad(), pytest.raises(pytest.fail.Exception, match="was launched"):
        differentiate(*tensors)


# Which rung, which machine, for how long.


def test_auto_is_the_highest_rung_that_has_a_backward_pass(monkeypatch):
    higher = replace(RUNGS[RUNG], name="higher", dtypes={"float16": (9, 0)})
    monkeypatch.setitem(RUNGS, "higher", higher)
    monkeypatch.setitem(RUNGS, "forward_only", replace(RUNGS[RUNG], plan_backward=None))
    for capability, dtype, name in (
        ((9, 0), "float16", "higher"),
        ((9, 0), "float32", RUNG),
        ((7, 5), "float32", RUNG),
    ):
        machine = Simulator(checks=False, progress=False, compute_capability=capability)
        arrays = problem(2, 3, dtype=dtype)
        *_, report = differentiate(*arrays, machine=machine, rung="auto", report=True)
        assert report.name == name


def test_a_rung_without_a_backward_pass_is_refused(no_launch):
    good = vars(good_arguments())
    del good["buffer"]
    message = "rung='fa2_seq_parallel': has no backward pass; .*fa2_split_q.* have one"
    with pytest.raises(ArgumentError, match=message):
        differentiate(**good, rung="fa2_seq_parallel")


def test_a_run_that_takes_too_long_is_refused_with_the_estimate(no_launch):
    """One row of each of 200,000 heads: five products, where the forward pass has two."""
    q = np.ones((1, 1, 200_000, 1), np.float32)
    k = np.ones((1, 1, 1, 1), np.float32)
    lse = np.zeros((1, 200_000, 1), np.float32)
    seconds_each = machines.SIMULATED_SECONDS_PER_MULTIPLY_ADD[TileConfig][True]
    seconds = 5 * 200_000 * (8 * 8 * 16) * seconds_each
    with pytest.raises(RunTooLongError, match=f"about {seconds:.0f} s"):
        differentiate(q, q, k, k, q, lse, machine=Simulator(progress=False))


def test_a_grid_that_cuda_cannot_have_is_refused(no_launch, monkeypatch):
    monkeypatch.setattr(machines, "MAX_GRID_YZ", 0)
    good = vars(good_arguments())
    buffer = good.pop("buffer")
    with pytest.raises(ArgumentError, match=r"q of shape \(1, 4, 2, 8\).*rung fa2_split_q.*grid"):
        differentiate(**good)
    assert np.isnan(buffer).all()
