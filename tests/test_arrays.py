"""Arrays of four libraries behind one description; CuPy's and Numba's by stand-ins, without a GPU.

A stand-in has the class name, module and attributes by which the real one is recognised and
described, and lies in host memory; no kernel ever sees one.
"""

import array
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_numba.arrays import (
    DTYPES,
    Array,
    CupyLibrary,
    NumbaLibrary,
    NumpyLibrary,
    TorchLibrary,
    describe,
)
from fa2_numba.errors import ArgumentTypeError

NUMPY_DTYPES = pytest.mark.parametrize("dtype", DTYPES)


class Subclass(np.ndarray):
    pass


def named(name, module, bases=(), **attributes):
    return type(name, bases, attributes | {"__module__": module})


FakeCupyArray = named("ndarray", "cupy")
FakeNumbaArray = named("DeviceNDArray", "numba.cuda.cudadrv.devicearray")


def fake_cupy(values, device=0, cls=FakeCupyArray):
    """A stand-in for a CuPy array on a GPU, laid out like the NumPy array `values`."""
    fake = cls()
    fake.shape, fake.strides, fake.dtype = values.shape, values.strides, values.dtype
    address = values.__array_interface__["data"][0]
    fake.data = SimpleNamespace(ptr=address, device_id=device)
    return fake


def fake_numba(values, device=0):
    """A stand-in for a Numba device array, laid out like the NumPy array `values`."""
    fake = FakeNumbaArray()
    fake.shape, fake.strides, fake.dtype = values.shape, values.strides, values.dtype
    fake.size = values.size
    fake.gpu_data = SimpleNamespace(context=SimpleNamespace(device=SimpleNamespace(id=device)))
    fake.__cuda_array_interface__ = values.__array_interface__
    return fake


def address_of(values):
    return values.__array_interface__["data"][0]


def layout(description):
    return description.shape, description.strides, description.dtype, description.address


def grid(dtype="float32"):
    """(2, 3, 4, 5), contiguous."""
    return np.arange(120).reshape(2, 3, 4, 5).astype(DTYPES[dtype])


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2, 1, 3),
    "reversed": lambda x: x[:, ::-1],
    "every-second": lambda x: x[..., ::2],
    "part": lambda x: x[:, 1:, 2:3, :-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "empty": lambda x: x[:, :0],
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
@NUMPY_DTYPES
def test_describes_numpy_arrays(dtype, view):
    x = view(grid(dtype))
    described = describe("q", x)
    assert described.name == "q" and described.value is x
    assert described.library is NumpyLibrary and described.device is None
    assert layout(described) == (x.shape, x.strides, dtype, address_of(x))


@views
@NUMPY_DTYPES
@pytest.mark.parametrize(
    ("fake", "library"), [(fake_cupy, CupyLibrary), (fake_numba, NumbaLibrary)]
)
def test_describes_device_arrays(fake, library, dtype, view, monkeypatch):
    # Numba keeps no device with an empty array: it counts as on the current one.
    current = SimpleNamespace(device=SimpleNamespace(id=3))
    monkeypatch.setattr("numba.cuda.current_context", lambda: current)
    x = view(grid(dtype))
    described = describe("k", fake(x, device=3))
    assert described.library is library
    assert described.device == 3
    assert layout(described) == (x.shape, x.strides, dtype, address_of(x))


def test_subclasses_are_recognised():
    inherited = named("Tracked", "someone.arrays", (FakeCupyArray,))
    assert describe("q", fake_cupy(grid(), cls=inherited)).library is CupyLibrary
    assert describe("q", grid().view(Subclass)).library is NumpyLibrary


def test_the_stand_in_has_the_name_of_numbas_class():
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    assert DeviceNDArray.__name__ == FakeNumbaArray.__name__
    assert DeviceNDArray.__module__.partition(".")[0] == "numba"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_describes_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    base = torch.zeros(2, 4, 3, 10, dtype=getattr(torch, dtype))
    for x in (base, base.transpose(1, 2), base[:, 1:, :, ::2], base[:, :1].expand(2, 6, 3, 10)):
        described = describe("v", x)
        size = x.element_size()
        assert described.library is TorchLibrary and described.device is None
        strides = tuple(size * stride for stride in x.stride())
        assert layout(described) == (tuple(x.shape), strides, dtype, x.data_ptr())
    assert describe("v", torch.nn.Parameter(base)).library is TorchLibrary


class Frame:
    """Like a pandas object: convertible, and no array."""

    __array_interface__ = property(lambda self: grid().__array_interface__)

    def __array__(self, dtype=None, copy=None):
        return grid()


NOT_ARRAYS = {
    "none": None,
    "float": 1.0,
    "list": [[[[1.0]]]],
    "tuple": (1.0,),
    "bytes": b"1234",
    "memoryview": memoryview(grid()),
    "array.array": array.array("f", [1.0]),
    "numpy-float32": np.float32(1),
    "numpy-bfloat16": ml_dtypes.bfloat16(1),
    "pandas-like": Frame(),
    "class": np.ndarray,
    "another-ndarray": named("ndarray", "cupyx")(),
    "another-tensor": named("Tensor", "tinygrad.tensor")(),
    "gpu-interface": SimpleNamespace(__cuda_array_interface__=grid().__array_interface__),
}


@pytest.mark.parametrize("value", NOT_ARRAYS.values(), ids=NOT_ARRAYS)
def test_other_objects_are_refused(value):
    with pytest.raises(ArgumentTypeError) as refusal:
        describe("k", value)
    message = str(refusal.value)
    assert message.startswith("k: a ") and type(value).__qualname__ in message
    assert all(kind in message for kind in ("NumPy", "CuPy", "Numba", "torch"))


@pytest.mark.parametrize("dtype", [">f4", ">f2"])
def test_byte_swapped_arrays_are_refused(dtype):
    with pytest.raises(ArgumentTypeError, match=f"q: .*{dtype}.*native"):
        describe("q", np.zeros((1, 2, 3, 4), dtype))


def test_masked_arrays_are_refused():
    with pytest.raises(ArgumentTypeError, match="v: .*mask"):
        describe("v", np.ma.masked_array(grid()))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        pytest.param(lambda torch, x: x.to("meta"), "CPU or CUDA", id="meta"),
        pytest.param(lambda torch, x: x.to_sparse(), "strided", id="sparse"),
        pytest.param(lambda torch, x: torch._neg_view(x), "resolve_neg", id="lazily-negated"),
        pytest.param(
            lambda torch, x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
            "nested",
            id="nested",
            marks=pytest.mark.filterwarnings("ignore"),
        ),
    ],
)
def test_tensors_without_plain_memory_are_refused(make, rule):
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match=f"q: .*{rule}"):
        describe("q", make(torch, torch.ones(2, 3, 4, 5)))


# Views, not copies.


@views
@NUMPY_DTYPES
def test_the_host_view_is_the_memory_itself(dtype, view):
    x = view(grid(dtype))
    taken = describe("q", x).host_view()
    assert taken.dtype == (np.uint16 if dtype == "bfloat16" else x.dtype)
    assert (taken.shape, taken.strides, address_of(taken)) == (x.shape, x.strides, address_of(x))
    if x.size and x.flags.writeable:
        taken[0, 0, 0, 0] = taken[-1, -1, -1, -1]
        assert x[0, 0, 0, 0] == x[-1, -1, -1, -1]


def test_a_subclass_is_viewed_as_a_plain_array():
    x = grid().view(Subclass)
    taken = describe("q", x).host_view()
    assert type(taken) is np.ndarray and np.shares_memory(taken, x)


@NUMPY_DTYPES
def test_the_host_view_of_a_tensor_is_its_memory(dtype):
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 4, 3, 10, dtype=getattr(torch, dtype)).transpose(1, 2)[..., ::2]
    taken = describe("q", x).host_view()
    assert (taken.shape, address_of(taken)) == (tuple(x.shape), x.data_ptr())
    taken[...] = DTYPES[dtype].type(1.5).view(taken.dtype)
    assert bool((x == 1.5).all())


@NUMPY_DTYPES
@pytest.mark.parametrize("order", ["C", "F"])
def test_results_are_copied_back_into_a_strided_tensor(dtype, order):
    torch = pytest.importorskip("torch")
    host = np.asarray(grid(dtype), order=order)
    tensor = torch.zeros(2, 4, 3, 5, dtype=getattr(torch, dtype)).transpose(1, 2)
    TorchLibrary.copy_from_host(tensor, host)
    np.testing.assert_array_equal(TorchLibrary.host_values(tensor), host)


# Where elements lie.


def test_arrays_that_share_memory():
    buffer = np.zeros((2, 6, 4, 4, 8), np.float16)  # batch, seqlen, part, heads, head_dim
    parts = [describe(f"part {i}", buffer[:, :, i]) for i in range(4)]
    assert not any(a.shares_memory_with(b) for a in parts for b in parts if a is not b)
    assert all(a.shares_memory_with(a) for a in parts)
    backwards = describe("backwards", buffer[::-1, ::-1, 1, ::-1, ::-1])
    assert parts[1].shares_memory_with(backwards) and backwards.shares_memory_with(parts[1])
    assert not backwards.shares_memory_with(parts[2])
    repeated = describe("repeated", np.broadcast_to(buffer[:, 3:4, 2], (2, 9, 4, 8)))
    assert repeated.shares_memory_with(parts[2]) and not repeated.shares_memory_with(parts[3])


def test_even_and_odd_elements_do_not_share_memory():
    x = grid()
    assert not describe("a", x[..., :4:2]).shares_memory_with(describe("b", x[..., 1::2]))
    assert describe("a", x[..., :4:2]).shares_memory_with(describe("b", x[..., ::4]))


def test_one_address_on_two_devices_is_not_shared():
    x = grid()
    on_gpu = [describe("q", fake_cupy(x, device)) for device in (0, 0, 1)]
    assert on_gpu[0].shares_memory_with(on_gpu[1])
    assert not on_gpu[0].shares_memory_with(on_gpu[2])
    assert not on_gpu[0].shares_memory_with(describe("q", x))


def test_empty_arrays_share_nothing():
    x = grid()
    assert not describe("a", x[:, :0]).shares_memory_with(describe("b", x))


def test_empty_tensors_share_nothing():
    torch = pytest.importorskip("torch")
    empty = describe("a", torch.zeros(0, 3, 4, 5))
    assert not empty.shares_memory_with(empty)


def test_sharing_is_assumed_where_it_is_hard_to_tell(monkeypatch):
    def too_hard(*_, max_work):
        raise np.exceptions.TooHardError(max_work)

    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert describe("a", grid()).shares_memory_with(describe("b", grid()))


@pytest.mark.parametrize(("offset", "aligned"), [(0, True), (4, True), (1, False), (2, False)])
def test_alignment_of_the_address(offset, aligned):
    raw = np.zeros(64, np.uint8)
    start = -address_of(raw) % 8 + offset
    assert describe("q", raw[start : start + 16].view(np.float32)).aligned == aligned


def test_alignment_of_the_strides():
    record = np.zeros(4, np.dtype([("pad", "i1"), ("x", "f2"), ("end", "i1", 5)]))
    even = np.zeros(4, np.dtype([("x", "f2"), ("end", "i1", 4)]))
    assert record.strides == (8,) and even.strides == (6,)
    assert not describe("q", record["x"]).aligned
    assert describe("q", even["x"]).aligned


@views
def test_only_a_broadcast_view_overlaps_itself(view):
    x = view(grid())
    assert describe("q", x).overlaps_itself == (0 in x.strides)


small = st.integers(1, 4)


@given(st.lists(st.tuples(small, st.integers(-9, 9)), min_size=1, max_size=4))
def test_no_overlap_is_missed(axes):
    shape = tuple(size for size, _ in axes)
    strides = tuple(4 * stride for _, stride in axes)
    offsets = [np.dot(index, strides) for index in np.ndindex(shape)]
    described = Array("x", None, NumpyLibrary, shape, strides, "float32", None, 1 << 20)
    assert described.overlaps_itself or len(set(offsets)) == len(offsets)


@given(st.permutations(range(4)), st.lists(st.sampled_from([-3, -2, -1, 1, 2]), min_size=4))
def test_no_overlap_is_invented(order, steps):
    x = grid()[tuple(slice(None, None, step) for step in steps[:4])].transpose(order)
    assert not describe("x", x).overlaps_itself
