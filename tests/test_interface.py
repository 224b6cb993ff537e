"""What a caller can do on the host: options, array kinds, strides, `out=`, and every refusal."""

import gc
import inspect
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import RUNGS, ArgumentError, Simulator, flash_attn_func, interface, machines
from fa2_numba.arrays import DTYPES
from fa2_numba.config import TileConfig
from fa2_numba.errors import ArgumentTypeError
from fa2_numba.ladder import cuda_core_tiles
from fa2_numba.launch import SimulatorMachine
from fa2_numba.simulator import RunTooLongError
from fa2_numba.testing import assert_attention, poisoned, random_qkv

from .conftest import CUDA_CORE_RUNGS, FAST_SIMULATOR, PORTABLE_RUNGS, small_tiles
from .test_arrays import Subclass, address_of, fake_cupy, fake_numba

TILES = TileConfig(head_dim=16, block_m=8, block_n=8, num_warps=2)
rungs = pytest.mark.parametrize("rung", PORTABLE_RUNGS)


@pytest.fixture(autouse=True)
def smallest_tiles(monkeypatch):
    """Tiles of 8 x 8, so that the simulator is fast and 20 keys are three tiles.

    Those of tensor cores cannot be so small.
    """

    def tiles_for(rung, head_dim, limits):
        is_cuda_core = rung.choose_tiles is cuda_core_tiles
        return TILES if is_cuda_core else small_tiles(rung, head_dim, limits)

    monkeypatch.setattr(interface, "tiles_for", tiles_for)


@pytest.fixture
def no_launch(monkeypatch):
    """Nothing may run, on either machine; and there is no GPU, whatever this computer has."""

    def launched(*_):
        pytest.fail("a kernel was launched")

    monkeypatch.setattr(SimulatorMachine, "run", launched)
    monkeypatch.setattr(Simulator, "launch", launched)
    monkeypatch.setattr(machines, "GpuMachine", launched)
    monkeypatch.setattr(machines, "gpu_available", lambda: False)


def attend(q, k, v, **options):
    return flash_attn_func(q, k, v, **{"machine": FAST_SIMULATOR} | options)


def qkv(seqlen_q=5, seqlen_k=20, heads=2, kv_heads=1, head_dim=9, dtype="float32", batch=1):
    sizes = (batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim)
    return random_qkv(*sizes, DTYPES[dtype], seed=sum(sizes))


def widest_dtype(rung):
    return "float32" if rung in CUDA_CORE_RUNGS else "float16"


def bits(value):
    """The bytes of an array or tensor of any strides, in the order of its indices."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    torch = pytest.importorskip("torch")
    return value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""


class Kind:
    """A library and a dtype: what an array is in, and its answer must be."""

    def __init__(self, library, dtype):
        self.library = library
        self.dtype = dtype

    def make(self, values):
        """`values` as an array of this kind."""
        values = np.ascontiguousarray(values, DTYPES[self.dtype])
        if self.library == "numpy":
            return values
        torch = pytest.importorskip("torch")
        as_integers = torch.from_numpy(values.view(f"i{values.itemsize}"))
        return as_integers.view(getattr(torch, self.dtype))

    def check(self, value, shape, dtype=None):
        """Assert that `value` is of this kind and of that shape."""
        assert type(value) is type(self.make(np.zeros(1)))
        assert tuple(value.shape) == shape
        assert str(value.dtype).removeprefix("torch.") == (dtype or self.dtype)


KINDS = [Kind(library, dtype) for library in ("numpy", "torch") for dtype in DTYPES]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.library}-{kind.dtype}")


# The signature and what is returned.


def test_the_signature_is_that_of_flash_attn():
    parameters = inspect.signature(flash_attn_func).parameters.values()
    leading = [p.name for p in parameters if p.default is p.empty]
    tail = {p.name: p.default for p in parameters if p.default is not p.empty}
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert leading == ["q", "k", "v"]
    assert list(tail.items()) == [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
        ("rung", "auto"),
        ("machine", "auto"),
        ("out", None),
        ("return_lse", False),
        ("report", False),
    ]
    assert keyword_only == ["rung", "machine", "out", "return_lse", "report"]


def test_arguments_may_be_positional():
    q, k, v = qkv()
    options = (0.0, 0.5, True, (-1, -1), 0.0, None, True, True)
    out, lse, _ = flash_attn_func(q, k, v, *options, machine=FAST_SIMULATOR)
    assert_attention(out, lse, q, k, v, softmax_scale=0.5, causal=True)


@kinds
def test_every_kind_returns_its_own(kind):
    originals = qkv(dtype=kind.dtype)
    q, k, v = map(kind.make, originals)
    out, lse, dropout_mask = attend(q, k, v, return_attn_probs=True)
    kind.check(out, (1, 5, 2, 9))
    kind.check(lse, (1, 2, 5), "float32")
    kind.check(dropout_mask, (0,))
    # The same bits as NumPy's, and right.
    expected, expected_lse = attend(*originals, return_lse=True)
    assert (bits(out), bits(lse)) == (bits(expected), bits(expected_lse))
    assert_attention(expected, expected_lse, *originals)


def test_what_is_returned():
    q, k, v = qkv()
    out = attend(q, k, v)
    with_lse = attend(q, k, v, return_lse=True)
    with_probs = attend(q, k, v, return_attn_probs=True)
    both = attend(q, k, v, return_attn_probs=True, return_lse=True)
    assert type(out) is np.ndarray and [len(x) for x in (with_lse, with_probs, both)] == [2, 3, 3]
    assert all(bits(x[0]) == bits(out) and bits(x[1]) == bits(both[1]) for x in (with_lse, both))


def test_a_subclass_returns_its_own():
    q, k, v = (x.view(Subclass) for x in qkv())
    out, lse = attend(q, k, v, return_lse=True)
    assert isinstance(out, Subclass) and type(lse) is np.ndarray
    assert bits(out) == bits(attend(*qkv()))


def test_deterministic_changes_nothing():
    assert bits(attend(*qkv(), deterministic=True)) == bits(attend(*qkv()))


# out=


@kinds
def test_out_is_reused_and_returned(kind):
    q, k, v = map(kind.make, qkv(dtype=kind.dtype))
    expected = bits(attend(q, k, v))
    out = kind.make(poisoned((1, 5, 2, 9), np.float32))
    for options in ({}, {"return_lse": True}, {"return_attn_probs": True}):
        out[...] = float("nan")
        answer = attend(q, k, v, out=out, **options)
        assert (answer[0] if options else answer) is out
        assert bits(out) == expected


def test_out_may_be_a_part_of_the_buffer_that_holds_q_k_and_v():
    q, k, v = qkv(seqlen_k=5, kv_heads=2)
    expected = attend(q, k, v)
    packed = np.stack([q, k, v, np.full_like(q, np.nan)], axis=2)
    parts = [packed[:, :, i] for i in range(4)]
    assert attend(*parts[:3], out=parts[3]) is parts[3]
    np.testing.assert_array_equal(packed, np.stack([q, k, v, expected], axis=2))


def growth(attend_once, calls):
    """By how many bytes memory has grown after so many calls, the first two not counted."""

    def repeat(times):
        for _ in range(times):
            attend_once()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = repeat(2)
        return repeat(calls) - before
    finally:
        tracemalloc.stop()


def test_memory_is_flat_over_repeated_calls():
    q, k, v = qkv(4, 3, heads=1)
    out = np.empty_like(q)
    assert growth(lambda: attend(q, k, v, out=out), calls=6) < 100_000


def test_no_array_is_kept_after_a_call(monkeypatch):
    """The same with arrays that are large beside everything else, and kernels that do nothing."""
    monkeypatch.setattr(SimulatorMachine, "run", lambda self, launches: [])
    q, k, v = qkv(4000, 4000, head_dim=16)
    out = np.empty_like(q)
    machine = Simulator(max_seconds=None)
    assert growth(lambda: attend(q, k, v, out=out, machine=machine), calls=40) < q.nbytes


# Strides.


def offset_by(elements):
    """A copy whose first element lies so many elements after an address divisible by 16."""

    def place(x):
        buffer = np.full(x.size + 32, np.nan, x.dtype)
        start = -address_of(buffer) % 16 // x.itemsize + elements
        moved = buffer[start : start + x.size].reshape(x.shape)
        moved[...] = x
        assert address_of(moved) % 16 == elements * x.itemsize % 16
        return moved

    return place


def misaligned(x):
    buffer = np.full(x.nbytes + 16, 0xFF, np.uint8)
    moved = buffer[1 : 1 + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def inside(*index):
    """A copy at `index` of a larger buffer, six times as large as x along every axis."""

    def place(x):
        buffer = np.full([6 * size for size in x.shape], np.nan, x.dtype)
        view = buffer[index][tuple(slice(size) for size in x.shape)]
        view[...] = x
        return view

    return place


def packed(x):
    buffer = np.full((*x.shape[:2], 3, *x.shape[2:]), np.nan, x.dtype)
    buffer[:, :, 1] = x
    return buffer[:, :, 1]


BACKWARDS = slice(None, None, -1)
LAYOUTS = {
    "transposed-BHSD": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "transposed-DSHB": lambda x: x.transpose(3, 1, 2, 0).copy().transpose(3, 1, 2, 0),
    "fortran": np.asfortranarray,
    "reversed-rows": lambda x: x[:, BACKWARDS].copy()[:, BACKWARDS],
    "reversed-all": lambda x: x[(BACKWARDS,) * 4].copy()[(BACKWARDS,) * 4],
    "last-stride-2": inside(..., slice(None, None, 2)),
    "last-stride-minus-3": inside(..., slice(None, None, -3)),
    "padded-everywhere": inside(slice(1, None), slice(2, None, 2), slice(1, None), slice(3, None)),
    "packed-qkv": packed,
    "misaligned-1-byte": misaligned,
    **{f"offset-{n}": offset_by(n) for n in range(1, 9)},
}
# Offsets of 2, 4, 8 and 16 bytes stand for the others.
IN_SWEEP = {f"offset-{n}" for n in (3, 5, 6, 7)}
layouts = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=pytest.mark.sweep if name in IN_SWEEP else ())
        for name, layout in LAYOUTS.items()
    ],
)


def memory_of(x):
    """Every byte of the buffer that a view looks into."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x.tobytes("A")


@cache
def contiguous_answer(dtype, **options):
    return attend(*qkv(dtype=dtype, batch=2), return_lse=True, **options)


def check_strided(layout, dtype, **options):
    expected = contiguous_answer(dtype, **options)
    q, k, v = map(layout, qkv(dtype=dtype, batch=2))
    before = [memory_of(x) for x in (q, k, v)]
    out, lse = attend(q, k, v, return_lse=True, **options)
    assert (bits(out), bits(lse)) == tuple(map(bits, expected))
    assert [memory_of(x) for x in (q, k, v)] == before
    return expected[0], (q, k, v)


@pytest.mark.parametrize(
    ("layout", "rung"),
    [
        pytest.param(
            layout,
            rung,
            id=f"{name}-{rung}",
            # CUDA-core rungs load element by element, whatever the offset.
            marks=pytest.mark.sweep
            if name in IN_SWEEP or (name.startswith("offset") and rung in CUDA_CORE_RUNGS)
            else (),
        )
        for name, layout in LAYOUTS.items()
        for rung in PORTABLE_RUNGS
    ],
)
def test_strides_change_nothing(layout, rung):
    check_strided(layout, widest_dtype(rung), rung=rung, causal=True)


@layouts
def test_out_may_have_strides(layout):
    expected, (q, k, v) = check_strided(layout, "bfloat16")
    out = layout(np.full_like(expected, np.nan))
    assert attend(q, k, v, out=out) is out
    assert bits(out) == bits(expected)
    # Nothing beside the view was written: undoing it brings the poison back.
    out[...] = np.nan
    assert memory_of(out) == memory_of(layout(np.full_like(expected, np.nan)))


@pytest.mark.parametrize(
    "axes", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=lambda axes: f"axes-{axes}"
)
def test_repeated_elements(axes):
    """q, k and v may have zero strides; what is made for them is an ordinary array."""
    repeated = [
        np.broadcast_to(x[tuple(slice(1 if a in axes else None) for a in range(4))], x.shape)
        for x in qkv(batch=2)
    ]
    expected = attend(*(x.copy() for x in repeated))
    out = attend(*repeated)
    assert bits(out) == bits(expected) and out.flags.c_contiguous and out.flags.writeable


def test_out_has_the_memory_order_of_q():
    q, k, v = map(LAYOUTS["transposed-BHSD"], qkv())
    assert attend(q, k, v).strides == q.strides
    assert attend(packed(q), k, v).flags.c_contiguous == packed(q).copy("K").flags.c_contiguous


def test_read_only_inputs():
    q, k, v = qkv()
    expected = attend(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    assert bits(attend(q, k, v)) == bits(expected)


TENSOR_LAYOUTS = {
    "transposed-BHSD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed-qkv": lambda x: x.unsqueeze(2).repeat(1, 1, 3, 1, 1)[:, :, 1],
    "last-stride-2": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "offset-3": lambda x: x.new_zeros(x.numel() + 3)[3:].view(x.shape).copy_(x),
    "part": lambda x: x.repeat(2, 2, 2, 2)[1:2, x.shape[1] :, x.shape[2] :, : x.shape[3]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", TENSOR_LAYOUTS.values(), ids=TENSOR_LAYOUTS)
def test_tensor_strides_change_nothing(layout, dtype):
    contiguous = [Kind("torch", dtype).make(x) for x in qkv(dtype=dtype)]
    expected = bits(attend(*contiguous))
    q, k, v = map(layout, contiguous)
    assert bits(attend(q, k, v)) == expected
    assert [bits(x) for x in (q, k, v)] == [bits(x) for x in contiguous]
    out = layout(contiguous[0] * float("nan"))
    assert attend(q, k, v, out=out) is out and bits(out) == expected


def test_expanded_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x)[:, :1].expand(1, 7, -1, -1) for x in qkv())
    assert bits(attend(q, k, v)) == bits(attend(q.clone(), k.clone(), v.clone()))


# Nothing to compute.

EMPTY = {
    "B0": ((0, 4, 2, 8), (0, 5, 1, 8)),
    "H0": ((1, 4, 0, 8), (1, 5, 0, 8)),
    "H0-Hk2": ((1, 4, 0, 8), (1, 5, 2, 8)),
    "Sq0": ((1, 0, 2, 8), (1, 5, 1, 8)),
    "Sk0": ((1, 4, 2, 8), (1, 0, 1, 8)),
    "Sq0-Sk0": ((1, 0, 2, 8), (1, 0, 2, 8)),
}


@kinds
@pytest.mark.parametrize(("q_shape", "k_shape"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("machine", [FAST_SIMULATOR, "auto", "simulator"], ids=["a", "b", "c"])
def test_zero_sizes(kind, q_shape, k_shape, machine, no_launch):
    q, k, v = (kind.make(np.ones(shape)) for shape in (q_shape, k_shape, k_shape))
    lse_shape = (q_shape[0], q_shape[2], q_shape[1])
    for out in (None, kind.make(poisoned(q_shape, np.float32))):
        answer = attend(q, k, v, out=out, machine=machine, causal=True, return_attn_probs=True)
        assert out is None or answer[0] is out
        for value, shape, dtype in zip(
            answer, (q_shape, lse_shape, (0,)), (None, "float32", None), strict=True
        ):
            kind.check(value, shape, dtype)
        assert bool((answer[0] == 0).all()) and bool((answer[1] == -np.inf).all())


# Options.

CAUSAL_BY_ANOTHER_NAME = {
    "window": {"window_size": (-1, 0)},
    "window-any-negative": {"window_size": (-7, 0)},
    "window-list": {"window_size": [-1, 0]},
    "window-numpy": {"window_size": np.array([-1, 0])},
    "numpy-bool": {"causal": np.True_},
    "overrides-the-right-bound": {"causal": True, "window_size": (-1, 3)},
}


@pytest.mark.parametrize("options", CAUSAL_BY_ANOTHER_NAME.values(), ids=CAUSAL_BY_ANOTHER_NAME)
def test_other_names_of_causal(options):
    q, k, v = qkv()
    assert bits(attend(q, k, v, **options)) == bits(attend(q, k, v, causal=True))
    assert bits(attend(q, k, v, **options)) != bits(attend(q, k, v))


@pytest.mark.parametrize("window_size", [(-1, -1), (-3, -2), [-1, -1]], ids=str)
def test_negative_bounds_are_no_bounds(window_size):
    assert bits(attend(*qkv(), window_size=window_size)) == bits(attend(*qkv()))


SCALES = [0.3, -0.7, 0.0, 1, Fraction(1, 3), np.float32(0.25), np.float16(0.5), np.int64(2)]


@rungs
@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_softmax_scale(scale, rung):
    q, k, v = qkv(dtype=widest_dtype(rung))
    out, lse = attend(q, k, v, rung=rung, softmax_scale=scale, causal=True, return_lse=True)
    assert_attention(out, lse, q, k, v, softmax_scale=float(scale), causal=True)


def test_options_that_are_off():
    options = {"dropout_p": 0, "softcap": -1.0, "alibi_slopes": None, "deterministic": False}
    assert bits(attend(*qkv(), **options)) == bits(attend(*qkv()))


# Refusals. Each changes some arguments of a call that is good otherwise: a function is called with
# the good ones and gives the bad one.


def refused(id, error, *parts, **changes):
    return pytest.param(error, parts, changes, id=id)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def read_only(good):
    good.out.flags.writeable = False
    return good.out


def not_native(good):
    return good.q.astype(good.q.dtype.newbyteorder())


def overlapping_rows(good):
    buffer = zeros(good.q.size)
    strides = (good.q.strides[0], good.q.strides[1], 4, 4)
    return np.lib.stride_tricks.as_strided(buffer, good.q.shape, strides)


RULE = "must be"
ONE_DTYPE = "all three must have one dtype, float32, float16, bfloat16"
WRONG_ARRAYS = [
    refused("q-3d", ArgumentError, "q:", "(4, 2, 8)", RULE, q=zeros(4, 2, 8)),
    refused("k-5d", ArgumentError, "k:", "(1, 5, 1, 8, 1)", RULE, k=zeros(1, 5, 1, 8, 1)),
    refused("v-0d", ArgumentError, "v:", "()", RULE, v=zeros()),
    refused("batch", ArgumentError, "k:", "batch 2", "1", k=zeros(2, 5, 1, 8), v=zeros(2, 5, 1, 8)),
    refused(
        "head-dim-0",
        ArgumentError,
        "q:",
        "head dim 0",
        "1 to 256",
        q=zeros(1, 4, 2, 0),
        k=zeros(1, 5, 1, 0),
        v=zeros(1, 5, 1, 0),
        out=zeros(1, 4, 2, 0),
    ),
    refused(
        "head-dim-257",
        ArgumentError,
        "q:",
        "head dim 257",
        "1 to 256",
        q=zeros(1, 4, 2, 257),
        k=zeros(1, 5, 1, 257),
        v=zeros(1, 5, 1, 257),
    ),
    refused(
        "head-dim-of-k", ArgumentError, "k:", "9", "q, 8", k=zeros(1, 5, 1, 9), v=zeros(1, 5, 1, 9)
    ),
    refused("head-dim-of-v", ArgumentError, "v:", "(1, 5, 1, 9)", "of k", v=zeros(1, 5, 1, 9)),
    refused("seqlen-of-v", ArgumentError, "v:", "(1, 6, 1, 8)", "of k", v=zeros(1, 6, 1, 8)),
    refused("heads-of-v", ArgumentError, "v:", "(1, 5, 2, 8)", "of k", v=zeros(1, 5, 2, 8)),
    refused(
        "H5-Hk2",
        ArgumentError,
        "q:",
        "5 heads",
        "multiple of k's 2",
        q=zeros(1, 4, 5, 8),
        k=zeros(1, 5, 2, 8),
        v=zeros(1, 5, 2, 8),
    ),
    refused(
        "Hk0", ArgumentError, "q:", "2 heads", "k's 0", k=zeros(1, 5, 0, 8), v=zeros(1, 5, 0, 8)
    ),
    refused(
        "k-is-fp16",
        ArgumentTypeError,
        "q is float32, k is float16, v is float32",
        ONE_DTYPE,
        k=zeros(1, 5, 1, 8, dtype=np.float16),
    ),
    refused(
        "v-is-bf16",
        ArgumentTypeError,
        "q is float32, k is float32, v is bfloat16",
        ONE_DTYPE,
        v=zeros(1, 5, 1, 8, dtype=ml_dtypes.bfloat16),
    ),
    refused(
        "three-dtypes",
        ArgumentTypeError,
        "q is float16, k is float64, v is bfloat16",
        ONE_DTYPE,
        q=zeros(1, 4, 2, 8, dtype=np.float16),
        k=zeros(1, 5, 1, 8, dtype=np.float64),
        v=zeros(1, 5, 1, 8, dtype=ml_dtypes.bfloat16),
    ),
    *(
        refused(
            dtype,
            ArgumentTypeError,
            f"q is {dtype}, k is {dtype}, v is {dtype}",
            ONE_DTYPE,
            q=zeros(1, 4, 2, 8, dtype=dtype),
            k=zeros(1, 5, 1, 8, dtype=dtype),
            v=zeros(1, 5, 1, 8, dtype=dtype),
        )
        for dtype in ("float64", "int32", "bool", "complex64", "object")
    ),
    refused("byte-swapped", ArgumentTypeError, "q:", "native", q=not_native),
    refused("masked", ArgumentTypeError, "k:", "mask", k=lambda a: np.ma.masked_array(a.k)),
    refused("q-list", ArgumentTypeError, "q:", "list", RULE, q=lambda a: a.q.tolist()),
    refused("k-none", ArgumentTypeError, "k:", "NoneType", RULE, k=None),
    refused("v-memoryview", ArgumentTypeError, "v:", "memoryview", RULE, v=lambda a: a.v.data),
    refused(
        "another-library",
        ArgumentTypeError,
        "v:",
        "cupy",
        "numpy",
        "one library",
        v=lambda a: fake_cupy(a.v),
    ),
    refused(
        "another-gpu",
        ArgumentError,
        "k:",
        "on GPU 1",
        "q is on GPU 0",
        q=lambda a: fake_cupy(a.q),
        k=lambda a: fake_cupy(a.k, device=1),
        v=lambda a: fake_cupy(a.v),
    ),
    refused(
        "misaligned-on-a-gpu",
        ArgumentError,
        "k:",
        "strides (160, 32, 32, 4)",
        "multiples of the size of a float32",
        q=lambda a: fake_numba(a.q),
        k=lambda a: fake_numba(misaligned(a.k)),
        v=lambda a: fake_numba(a.v),
    ),
]
WRONG_OPTIONS = [
    refused("scale-nan", ArgumentError, "softmax_scale=nan", "finite", softmax_scale=float("nan")),
    refused("scale-inf", ArgumentError, "softmax_scale=-inf", "finite", softmax_scale=-np.inf),
    refused("scale-above-fp32", ArgumentError, "softmax_scale=1e+39", "fin", softmax_scale=1e39),
    refused("scale-huge-int", ArgumentError, "softmax_scale=10", "finite", softmax_scale=10**400),
    refused("scale-str", ArgumentTypeError, "softmax_scale='1'", "a str", RULE, softmax_scale="1"),
    refused("scale-bool", ArgumentTypeError, "softmax_scale=True", RULE, softmax_scale=True),
    refused("scale-complex", ArgumentTypeError, "softmax_scale=1j", RULE, softmax_scale=1j),
    refused("scale-array", ArgumentTypeError, "softmax_scale=array", RULE, softmax_scale=zeros(1)),
    refused("dropout-1", ArgumentError, "dropout_p=1.0", "below 1", dropout_p=1.0),
    refused("dropout-negative", ArgumentError, "dropout_p=-0.1", "at least 0", dropout_p=-0.1),
    refused("dropout-nan", ArgumentError, "dropout_p=nan", "at least 0", dropout_p=np.nan),
    refused("dropout-bool", ArgumentTypeError, "dropout_p=True", RULE, dropout_p=True),
    refused("dropout-none", ArgumentTypeError, "dropout_p=None", RULE, dropout_p=None),
    refused("softcap-nan", ArgumentError, "softcap=nan", "finite", softcap=np.nan),
    refused("softcap-inf", ArgumentError, "softcap=inf", "finite", softcap=np.inf),
    refused("softcap-str", ArgumentTypeError, "softcap='a'", RULE, softcap="a"),
    refused("causal-int", ArgumentTypeError, "causal=1", "True or False", causal=1),
    refused("causal-none", ArgumentTypeError, "causal=None", "True or False", causal=None),
    *(
        refused(
            f"window-{window}", ArgumentError, f"window_size={window!r}", RULE, window_size=window
        )
        for window in (None, 3, (-1,), (1, 2, 3), (-1.0, 0), ("-1", "0"), "ab", (None, None))
    ),
    refused("rung-unknown", ArgumentError, "rung='fa9'", "fa2_split_q", rung="fa9"),
    refused("rung-none", ArgumentError, "rung=None", "must be 'auto' or one of", rung=None),
    refused("machine-unknown", ArgumentError, "machine='tpu'", RULE, machine="tpu"),
    refused("machine-none", ArgumentError, "machine=None", RULE, machine=None),
    refused("machine-list", ArgumentError, "machine=['gpu']", RULE, machine=["gpu"]),
    refused("machine-array", ArgumentError, "machine=array", RULE, machine=lambda a: a.q),
    refused("machine-class", ArgumentError, "machine=<class", RULE, machine=lambda a: Simulator),
    refused("no-gpu", ArgumentError, "machine='gpu'", "no GPU", "doctor", machine="gpu"),
]
NOT_BUILT = [
    refused("dropout", NotImplementedError, "dropout_p=0.1", dropout_p=0.1),
    refused("softcap", NotImplementedError, "softcap=30.0", softcap=30.0),
    refused("alibi", NotImplementedError, "alibi_slopes", alibi_slopes=zeros(2)),
    refused("window-left", NotImplementedError, "window_size=(3, -1)", window_size=(3, -1)),
    refused("window-right", NotImplementedError, "window_size=(-1, 3)", window_size=(-1, 3)),
    refused("window-both", NotImplementedError, "window_size=(0, 0)", window_size=(0, 0)),
    refused(
        "window-left-causal",
        NotImplementedError,
        "window_size=(3, 0)",
        window_size=(3, 0),
        causal=True,
    ),
    refused(
        "bad-values-first-causal",
        ArgumentTypeError,
        "causal=2",
        dropout_p=0.1,
        softcap=1.0,
        causal=2,
    ),
    refused(
        "bad-values-first-softcap", ArgumentError, "softcap=nan", dropout_p=0.1, softcap=np.nan
    ),
    refused(
        "bad-values-first-window", ArgumentError, "window_size=1", alibi_slopes=1, window_size=1
    ),
]
WRONG_OUT = [
    refused("shape", ArgumentError, "out:", "(1, 4, 2, 9)", "(1, 4, 2, 8)", out=zeros(1, 4, 2, 9)),
    refused("ndim", ArgumentError, "out:", "(64,)", "that of q", out=zeros(64)),
    refused(
        "dtype",
        ArgumentTypeError,
        "out:",
        "float16",
        "that of q, float32",
        out=zeros(1, 4, 2, 8, dtype=np.float16),
    ),
    refused("byte-swapped", ArgumentTypeError, "out:", "native", out=not_native),
    refused("masked", ArgumentTypeError, "out:", "mask", out=lambda a: np.ma.masked_array(a.out)),
    refused("list", ArgumentTypeError, "out:", "list", RULE, out=lambda a: [a.out]),
    refused(
        "another-library",
        ArgumentTypeError,
        "out:",
        "cupy",
        "numpy",
        out=lambda a: fake_cupy(a.out),
    ),
    refused("read-only", ArgumentError, "out:", "read-only", "writable", out=read_only),
    refused(
        "broadcast",
        ArgumentError,
        "out:",
        "strides (256, 0, 32, 4)",
        "share an address",
        out=lambda a: np.lib.stride_tricks.as_strided(a.out, a.q.shape, (256, 0, 32, 4)),
    ),
    refused("overlaps-itself", ArgumentError, "out:", "share an address", out=overlapping_rows),
    refused("is-q", ArgumentError, "out:", "shares memory with q", out=lambda a: a.q),
    refused("is-reversed-q", ArgumentError, "out:", "with q", out=lambda a: a.q[:, ::-1]),
    refused(
        "overlaps-k",
        ArgumentError,
        "out:",
        "shares memory with k",
        k=lambda a: a.out.reshape(1, 8, 1, 8)[:, 3:],
    ),
    refused(
        "overlaps-v-by-one-element",
        ArgumentError,
        "out:",
        "shares memory with v",
        v=lambda a: a.buffer[63 : 63 + 40].reshape(1, 5, 1, 8),
    ),
]


def good_arguments():
    """A good call's arrays; `out` is the first part of `buffer`, all of it poison."""
    q, k, v = qkv(4, 5, 2, 1, 8)
    buffer = poisoned(200, np.float32)
    return SimpleNamespace(q=q, k=k, v=v, buffer=buffer, out=buffer[:64].reshape(1, 4, 2, 8))


def check_refusal(error, parts, changes):
    good = good_arguments()
    arguments = {"q": good.q, "k": good.k, "v": good.v, "out": good.out}
    assert_refused(attend, good, arguments, error, parts, changes)


def assert_refused(call, good, arguments, error, parts, changes):
    """`call` with some of the good arguments changed raises and leaves all arrays as they are."""
    for name, change in changes.items():
        arguments[name] = change(good) if callable(change) else change
    arrays = [good.buffer, *(x for x in arguments.values() if isinstance(x, np.ndarray))]
    before = [memory_of(x) for x in arrays]
    with pytest.raises(error) as refusal:
        call(**arguments)
    assert refusal.type is error
    for part in parts:
        assert part in str(refusal.value)
    assert [memory_of(x) for x in arrays] == before


@pytest.mark.parametrize(("error", "parts", "changes"), WRONG_ARRAYS)
def test_wrong_arrays_are_refused(error, parts, changes, no_launch):
    check_refusal(error, parts, changes)


@pytest.mark.parametrize(("error", "parts", "changes"), WRONG_OPTIONS)
def test_wrong_options_are_refused(error, parts, changes, no_launch):
    check_refusal(error, parts, changes)


@pytest.mark.parametrize(("error", "parts", "changes"), NOT_BUILT)
def test_what_is_not_built_is_refused(error, parts, changes, no_launch):
    check_refusal(error, parts, changes)


@pytest.mark.parametrize(("error", "parts", "changes"), WRONG_OUT)
def test_a_wrong_out_is_refused(error, parts, changes, no_launch):
    check_refusal(error, parts, changes)


def test_the_good_call_of_the_refusals_is_good():
    good = good_arguments()
    assert np.isfinite(attend(good.q, good.k, good.v, out=good.out)).all()
    assert np.isnan(good.buffer[64:]).all()


def test_refusals_are_value_errors_or_type_errors():
    assert issubclass(ArgumentError, ValueError) and issubclass(ArgumentTypeError, TypeError)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_requires_grad_is_refused(name, no_launch):
    torch = pytest.importorskip("torch")
    arguments = dict(zip("qkv", map(torch.from_numpy, qkv()), strict=True))
    arguments[name].requires_grad_()
    with pytest.raises(
        ArgumentError, match=f"{name} requires a gradient.*fa2_numba.torch.*no_grad"
    ):
        attend(**arguments)


def test_without_gradients_such_a_tensor_is_taken():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attend(q, k, v, out=torch.empty_like(q))
        assert not out.requires_grad and bits(out) == bits(attend(*qkv()))


def test_a_tensor_out_that_requires_grad_is_refused(no_launch):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv())
    out = torch.zeros_like(q, requires_grad=True)
    with pytest.raises(ArgumentError, match="out: requires a gradient"):
        attend(q, k, v, out=out)
    assert bool((out == 0).all())


def test_libraries_are_not_mixed(no_launch):
    torch = pytest.importorskip("torch")
    q, k, v = qkv()
    for arguments in (
        {"q": q, "k": torch.from_numpy(k), "v": v},
        {"q": q, "k": k, "v": v, "out": torch.zeros(q.shape)},
    ):
        with pytest.raises(ArgumentTypeError, match="of torch; q is of numpy.*one library"):
            attend(**arguments)


def test_an_expanded_tensor_is_no_out(no_launch):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv())
    out = torch.zeros(1, 1, 2, 9)
    with pytest.raises(ArgumentError, match="out: .*share an address"):
        attend(q, k, v, out=out.expand(q.shape))
    assert bool((out == 0).all())


# Which rung.


def newer(rung, **capabilities):
    """A rung that takes some dtypes only, each from a compute capability on."""
    return replace(RUNGS["fa2_split_q"], name=rung, dtypes=capabilities)


@pytest.mark.parametrize(
    ("capability", "dtype", "highest"),
    [
        ((7, 5), "float16", "half"),
        ((7, 5), "bfloat16", "fa2_split_q"),
        ((7, 5), "float32", "fa2_split_q"),
        ((8, 0), "bfloat16", "half"),
        ((9, 0), "bfloat16", "hopper"),
        ((9, 0), "float16", "half"),
        ((9, 0), "float32", "fa2_split_q"),
    ],
)
def test_auto_is_the_highest_rung_that_runs_on_the_device(capability, dtype, highest, monkeypatch):
    monkeypatch.setitem(RUNGS, "half", newer("half", float16=(7, 5), bfloat16=(8, 0)))
    monkeypatch.setitem(RUNGS, "hopper", newer("hopper", bfloat16=(9, 0)))
    machine = Simulator(checks=False, progress=False, compute_capability=capability)
    _, report = attend(*qkv(seqlen_k=3, dtype=dtype), machine=machine, report=True)
    assert report.name == highest


def test_a_rung_that_needs_a_newer_device_is_refused(monkeypatch, no_launch):
    monkeypatch.setitem(RUNGS, "half", newer("half", float16=(7, 5), bfloat16=(8, 0)))
    machine = Simulator(compute_capability=(7, 5))
    refusals = {
        "bfloat16": "rung='half': takes bfloat16 from compute capability 8.0 on; "
        "this device has 7.5",
        "float32": "rung='half': takes float16, bfloat16, not float32",
    }
    for dtype, message in refusals.items():
        with pytest.raises(ArgumentError) as refusal:
            attend(*qkv(dtype=dtype), rung="half", machine=machine)
        assert str(refusal.value) == message


def test_a_dtype_that_no_rung_takes_on_the_device_is_refused(monkeypatch, no_launch):
    for name in list(RUNGS):
        monkeypatch.setitem(RUNGS, name, newer(name, bfloat16=(9, 0)))
    message = "rung='auto': no rung takes bfloat16 on compute capability 7.5"
    with pytest.raises(ArgumentError, match=message):
        attend(*qkv(dtype="bfloat16"), machine=Simulator(compute_capability=(7, 5)))


# Which machine, and for how long.


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("machine", ["auto", "gpu"])
def test_host_arrays_go_to_the_gpu_on_the_default_stream(library, machine, monkeypatch):
    """The library may be one that knows of no GPU, as a torch for CPUs is."""

    class Chosen(Exception):
        pass

    def chosen(device, stream=0):
        raise Chosen((device, stream))

    monkeypatch.setattr(machines, "gpu_available", lambda: True)
    current = SimpleNamespace(get_current_device=lambda: SimpleNamespace(id=3))
    monkeypatch.setattr(machines, "cuda", current)
    monkeypatch.setattr(machines, "GpuMachine", chosen)
    arrays = map(Kind(library, "float32").make, qkv())
    with pytest.raises(Chosen) as choice:
        attend(*arrays, machine=machine)
    assert choice.value.args[0] == (3, 0)


@pytest.mark.parametrize(
    ("machine", "gpu"), [("auto", False), ("simulator", False), ("simulator", True)]
)
def test_the_simulator_is_forced_or_for_want_of_a_gpu(machine, gpu, monkeypatch):
    monkeypatch.setattr(machines, "gpu_available", lambda: gpu)
    q, k, v = qkv(seqlen_k=3)
    out, lse = attend(q, k, v, machine=machine, return_lse=True)
    assert_attention(out, lse, q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_a_run_that_takes_too_long_is_refused_with_the_estimate(causal, no_launch):
    """One row of each of 200,000 heads is little memory and many tiles."""
    q = np.ones((1, 1, 200_000, 1), np.float32)
    k = np.ones((1, 1, 1, 1), np.float32)
    out = np.full_like(q, np.nan)
    with pytest.raises(RunTooLongError) as refusal:
        attend(q, k, k, causal=causal, out=out, machine=Simulator(progress=False))
    message = str(refusal.value)
    seconds_each = machines.SIMULATED_SECONDS_PER_MULTIPLY_ADD[TileConfig][True]
    seconds = 2 * 200_000 * (8 * 8 * 16) * seconds_each
    for part in (f"about {seconds:.0f} s", "limit is 600 s", str(q.shape), "max_seconds=None"):
        assert part in message
    assert np.isnan(out).all()


@pytest.mark.parametrize("max_seconds", [60.0, None])
def test_a_run_within_the_limit_is_made(max_seconds):
    simulator = Simulator(checks=False, progress=False, max_seconds=max_seconds)
    q, k, v = qkv(seqlen_k=3)
    assert bits(attend(q, k, v, machine=simulator)) == bits(attend(q, k, v))


def test_a_grid_that_cuda_cannot_have_is_refused(no_launch, monkeypatch):
    monkeypatch.setattr(machines, "MAX_GRID_YZ", 1)
    q, k, v = qkv(seqlen_q=17)
    out = np.full_like(q, np.nan)
    with pytest.raises(ArgumentError, match=r"q of shape \(1, 17, 2, 9\).*rung .*grid of \(2, 3\)"):
        attend(q, k, v, out=out)
    assert np.isnan(out).all()
