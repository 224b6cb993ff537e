"""Remembered calls: an earlier one like it never decides what a call launches, refuses or returns.

On a stand-in for CuPy whose arrays lie at made-up addresses, and a driver that notes launches.
"""

import gc
import itertools
import math
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fa2_numba import (
    RUNGS,
    ArgumentError,
    checks,
    flash_attn_backward,
    flash_attn_func,
    gradients,
    interface,
    launch,
    machines,
    staging,
)
from fa2_numba.arrays import ALIGNMENT, DTYPES, describe
from fa2_numba.config import DeviceLimits
from fa2_numba.errors import ArgumentTypeError
from fa2_numba.kernels import fa2_split_q
from fa2_numba.launch import BackwardTensors, ForwardTensors, GpuMachine, as_bits
from fa2_numba.staging import STAND_IN_SPACING, GpuPlan

from .conftest import PORTABLE_RUNGS
from .test_arrays import FakeCupyArray, address_of, fake_numba
from .test_launch import note_launches

LIMITS = DeviceLimits((9, 0), 232_448)
SHAPE = (2, 70, 3, 20)


class GpuArray(FakeCupyArray):
    """A CuPy array as far as the package looks at one; no memory lies at its address."""

    def __init__(self, shape, dtype, address, device=0, like=None):
        # NumPy says what the strides are, and asks for memory that nobody touches.
        self._like = np.empty(shape, dtype) if like is None else like
        self.shape, self.strides, self.dtype = shape, self._like.strides, np.dtype(dtype)
        self.flags = self._like.flags
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.device = nullcontext()

    def fill(self, number):
        """What is written does not matter here."""


class Gpu:
    """CuPy's module: its current device and stream, and what it has allocated."""

    def __init__(self):
        self.addresses = itertools.count(1 << 40, 1 << 20)
        self.device, self.stream, self.allocated, self.launched_on = 0, 7, [], []
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.device),
            get_current_stream=lambda device: SimpleNamespace(ptr=self.stream + 100 * device),
            Device=self.current,
        )

    def current(self, device):
        """A context in which another device is current."""

        def swap(*_):
            self.device, held[0] = held[0], self.device

        held = [device]
        return type("Device", (), {"__enter__": swap, "__exit__": swap})()

    def empty(self, shape, dtype):
        """A new array on the current device."""
        self.allocated.append(GpuArray(shape, dtype, next(self.addresses), self.device))
        return self.allocated[-1]

    def empty_like(self, array):
        """A new array in the order of another."""
        address, like = next(self.addresses), np.empty_like(array._like)
        new = GpuArray(array.shape, array.dtype, address, self.device, like)
        self.allocated.append(new)
        return new


def forget():
    launch._loaded.cache_clear()
    interface._gpu_plan.cache_clear()
    gradients._gpu_plan.cache_clear()
    machines._gpu_machine.cache_clear()
    checks._problems.clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything can be launched and nothing runs, as CuPy's and the driver's."""
    gpu, noted = Gpu(), note_launches(monkeypatch)
    gpu.launches, gpu.loaded = noted.launches, noted.loaded
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    success = launch.driver.CUresult(0)
    monkeypatch.setattr(launch.driver, "cuCtxGetDevice", lambda: (success, gpu.device))
    launch_kernel = launch.driver.cuLaunchKernel

    def on_current(*how):
        gpu.launched_on.append(gpu.device)
        return launch_kernel(*how)

    monkeypatch.setattr(launch.driver, "cuLaunchKernel", on_current)
    monkeypatch.setattr(launch, "_device_limits", lambda device: LIMITS)
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(gpus=list(map(gpu.current, range(2)))))
    forget()
    yield gpu
    forget()


def on_gpu(gpu, shape=SHAPE, dtype=np.float16, offset=0, device=0, view=lambda x: x):
    """A new array; `view` makes it a part of a larger one that begins `offset` bytes later."""
    whole = np.empty(shape, dtype)
    like = view(whole)
    start = address_of(like) - address_of(whole)
    return GpuArray(like.shape, dtype, next(gpu.addresses) + start + offset, device, like)


def qkv(gpu, **how):
    return [on_gpu(gpu, **how) for _ in range(3)]


def planned_anew(gpu, tensors, plan, choose_tiles, arrays, *options):
    """What the driver is told when a rung plans for the arrays themselves, workspaces too."""
    views = [describe("x", array).gpu_view() for array in arrays]
    workspaces = iter(x for x in gpu.allocated if all(x is not array for array in arrays))
    tensors = tensors(
        *views,
        np.float32(20**-0.5),
        *options,
        describe("q", arrays[0]).dtype,
        lambda shape: describe("workspace", next(workspaces)).gpu_view(),
    )
    before = len(gpu.launches)
    GpuMachine(0, gpu.stream).run(plan(tensors, choose_tiles(20, LIMITS)))
    anew = gpu.launches[before:]
    del gpu.launches[before:]
    return anew


RUNG_DTYPES = [(name, dtype) for name in PORTABLE_RUNGS for dtype in RUNGS[name].dtypes]
STRIDED = {
    "contiguous": {},
    "strided": {"shape": (2, 70, 6, 40), "view": lambda x: x[:, :, ::2, 20:]},
    "other-order": {"shape": (2, 3, 70, 20), "view": lambda x: x.transpose(0, 2, 1, 3)},
    "backwards": {"view": lambda x: x[:, ::-1]},
}


@pytest.mark.parametrize("how", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize(("rung", "dtype"), RUNG_DTYPES)
def test_a_remembered_call_launches_what_a_new_plan_would(gpu, rung, dtype, how):
    """With its own addresses, also those of its workspaces."""
    loaded = set()
    for _ in range(3):
        del gpu.allocated[:], gpu.launches[:]
        inputs = qkv(gpu, dtype=DTYPES[dtype], **how)
        out, lse = flash_attn_func(*inputs, rung=rung, return_lse=True)
        arrays = *inputs, out, lse
        plan = RUNGS[rung].plan_forward, RUNGS[rung].choose_tiles
        assert gpu.launches == planned_anew(gpu, ForwardTensors, *plan, arrays, False)
        loaded.add(len(gpu.loaded))
    assert len(loaded) == 1, "what is remembered is not loaded again"


@pytest.mark.parametrize("how", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize(
    ("rung", "dtype"), [(name, dtype) for name, dtype in RUNG_DTYPES if RUNGS[name].plan_backward]
)
def test_a_remembered_backward_pass_launches_what_a_new_plan_would(gpu, rung, dtype, how):
    loaded = []
    for deterministic in (False, True, False, True):
        del gpu.allocated[:], gpu.launches[:]
        dout, q, k, v, out = (on_gpu(gpu, dtype=DTYPES[dtype], **how) for _ in range(5))
        lse = on_gpu(gpu, (2, 3, 70), np.float32)
        options = {"deterministic": deterministic, "causal": True, "rung": rung}
        answer = flash_attn_backward(dout, q, k, v, out, lse, **options)
        arrays = q, k, v, out, lse, dout, *answer
        plan = RUNGS[rung].plan_backward, RUNGS[rung].choose_backward_tiles
        expected = planned_anew(gpu, BackwardTensors, *plan, arrays, True, deterministic)
        assert gpu.launches == expected
        loaded.append(len(gpu.loaded))
    assert loaded[1] == loaded[2] == loaded[3], "what is remembered is not loaded again"
    assert gradients._gpu_plan.cache_info().currsize == 2


def call(gpu, rung="fa2_split_q", arrays=None, **options):
    """The launches of one call, without the addresses, which no two calls share."""
    del gpu.launches[:]
    inputs = qkv(gpu, **(arrays or {}))
    inputs[0] = options.pop("q", lambda gpu: inputs[0])(gpu)
    answer = flash_attn_func(*inputs, rung=rung, return_lse=True, **options)
    names = {x.data.ptr: name for name, x in zip("qkvol", (*inputs, *answer), strict=True)}
    told = [
        (kernel_of(gpu, number), *how, [names.get(word, word) for word in words_of(parameters)])
        for number, *how, parameters in gpu.launches
    ]
    assert all(set("qkvol") <= set(words) for *_, words in told)
    return told


def kernel_of(gpu, number):
    kernel, _ = gpu.loaded[number - 1001]
    return kernel.py_func.__name__


def words_of(parameters):
    return np.frombuffer(parameters[:-4], np.uint64).tolist() + [parameters[-4:]]


CHANGES = {
    "shape": {"arrays": {"shape": (2, 71, 3, 20)}},
    "head-dim": {"arrays": {"shape": (2, 70, 3, 21)}},
    "dtype": {"arrays": {"dtype": np.float32}},
    "strides": {"arrays": STRIDED["strided"]},
    "order": {"arrays": STRIDED["other-order"]},
    "strides-of-q": {"q": lambda gpu: on_gpu(gpu, **STRIDED["strided"])},
    "length-of-q": {"q": lambda gpu: on_gpu(gpu, (2, 5, 3, 20))},
    "causal": {"causal": True},
    "causal-window": {"window_size": (-1, 0)},
    "scale": {"softmax_scale": 0.5},
    "scale-1": {"softmax_scale": 1},
    "another-rung": {"rung": "fa2_seq_parallel"},
    "out-of-other-strides": {"out": lambda gpu: on_gpu(gpu, **STRIDED["strided"])},
    "another-device": {"arrays": {"device": 1}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_call_is_planned_for_itself(gpu, change):
    def changed():
        options = {k: v(gpu) if k == "out" else v for k, v in change.items()}
        return call(gpu, **options)

    cold = changed()
    forget()
    plain = call(gpu)
    assert changed() == cold != plain
    assert call(gpu) == plain and changed() == cold


def wide_copies(tensors, config):
    """Launches that depend on alignment: as many threads as bytes can be copied at once."""
    arrays = tensors.Q, tensors.K, tensors.V, tensors.O
    width = math.gcd(ALIGNMENT, *(n for x in arrays for n in (x.address, *x.strides[:3])))
    (planned,) = fa2_split_q.plan_forward(tensors, config)
    return [replace(planned, threads=width)]


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "out"])
def test_alignment_is_looked_at_each_time(gpu, monkeypatch, which):
    shape = (1, 8, 1, 16)
    rung = replace(RUNGS["fa2_split_q"], plan_forward=wide_copies)
    monkeypatch.setitem(RUNGS, "fa2_split_q", rung)
    for offset in (0, 2, 16, 8, 4, 2, 12, 48, 0):
        arrays = [on_gpu(gpu, shape, offset=offset * (i == which)) for i in range(4)]
        flash_attn_func(*arrays[:3], out=arrays[3], rung="fa2_split_q")
        assert gpu.launches[-1][1][3] == (math.gcd(offset, 16) or 16)
    arrays[which].data.ptr += 1
    with pytest.raises(ArgumentError, match=r"address 0x\w+, .* multiples of the size"):
        flash_attn_func(*arrays[:3], out=arrays[3])


def test_a_rung_that_is_replaced_is_not_remembered(gpu, monkeypatch):
    before = call(gpu)
    other = replace(
        RUNGS["fa2_split_q"],
        plan_forward=lambda tensors, config: 2 * fa2_split_q.plan_forward(tensors, config),
    )
    monkeypatch.setitem(RUNGS, "fa2_split_q", other)
    assert call(gpu) == 2 * before


def test_what_is_remembered_is_not_found_out_again(gpu, monkeypatch):
    """Strides and address modulo 16 are those of the first call."""
    plans, checked = [], []

    def plan_forward(tensors, config):
        plans.append(tensors)
        return fa2_split_q.plan_forward(tensors, config)

    check = checks._check_arrays
    monkeypatch.setattr(checks, "_check_arrays", lambda *x: checked.append(x) or check(*x))
    monkeypatch.setitem(RUNGS, "standard", replace(RUNGS["standard"], plan_forward=plan_forward))
    for offset in (0, 16, 4096, 0):
        call(gpu, "standard", arrays={"offset": offset})
    assert (len(plans), len(checked)) == (1, 1)


def test_the_stream_is_the_current_one_each_time(gpu):
    for stream in (7, 0, 12, 7):
        gpu.stream = stream
        assert [told[2] for told in call(gpu)] == [stream]


def test_another_device_may_be_current(gpu):
    for device, current in ((0, 0), (1, 0), (0, 1), (1, 1)):
        gpu.device = current
        (told,) = call(gpu, arrays={"device": device})
        assert told[2] == 7 + 100 * device and gpu.device == current
        assert gpu.launched_on[-1] == device
        assert {array.data.device_id for array in gpu.allocated[-2:]} == {device}


REFUSED_AFTER_A_GOOD_CALL = {
    "causal-1": (ArgumentTypeError, {"causal": 1}),
    "scale-true": (ArgumentTypeError, {"softmax_scale": True}),
    "dropout-false": (ArgumentTypeError, {"dropout_p": False}),
    "dropout": (NotImplementedError, {"dropout_p": 0.1}),
    "window-of-floats": (ArgumentError, {"window_size": (-1.0, -1.0)}),
    "window": (NotImplementedError, {"window_size": (4, 0)}),
    "rung-list": (ArgumentError, {"rung": ["fa2_split_q"]}),
    "rung": (ArgumentError, {"rung": "fa9"}),
    "machine": (ArgumentError, {"machine": "tpu"}),
    "report": (ArgumentError, {"report": True}),
}


@pytest.mark.parametrize(
    ("error", "options"), REFUSED_AFTER_A_GOOD_CALL.values(), ids=REFUSED_AFTER_A_GOOD_CALL
)
def test_options_are_checked_each_time(gpu, error, options):
    call(gpu, causal=True, softmax_scale=1.0)
    for _ in range(2):
        with pytest.raises(error):
            call(gpu, **{"causal": True, "softmax_scale": 1.0} | options)
        assert gpu.launches == []


def test_arrays_that_do_not_fit_are_refused_each_time(gpu):
    q, k, v = qkv(gpu)
    short = on_gpu(gpu, (2, 69, 3, 20))
    flash_attn_func(short, k, v)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="v: shape"):
            flash_attn_func(q, k, short)
        with pytest.raises(ArgumentError, match="v: on GPU 1"):
            flash_attn_func(q, k, on_gpu(gpu, device=1))
        with pytest.raises(ArgumentTypeError, match="k is float32"):
            flash_attn_func(q, on_gpu(gpu, dtype=np.float32), v)
    assert len(gpu.launches) == 1


def test_gradients_are_looked_at_each_time(gpu, monkeypatch):
    call(gpu)
    library = describe("q", on_gpu(gpu)).library
    monkeypatch.setattr(library, "tracks_gradient", lambda value: True)
    with pytest.raises(ArgumentError, match="q requires a gradient"):
        call(gpu)


def test_out_may_not_come_to_share_memory(gpu):
    """Whether it does is nothing that layouts can tell."""
    q, k, v = qkv(gpu)
    out = on_gpu(gpu)
    assert flash_attn_func(q, k, v, out=out) is out
    for name, other in (("q", q), ("k", k), ("v", v)):
        out.data.ptr = other.data.ptr + 64
        with pytest.raises(ArgumentError, match=f"out: shares memory with {name}"):
            flash_attn_func(q, k, v, out=out)
    assert len(gpu.launches) == 1


def test_results_are_new_each_time_and_in_the_order_of_q(gpu):
    for how in ({}, STRIDED["other-order"]):
        inputs = qkv(gpu, **how)
        answers = [flash_attn_func(*inputs, return_lse=True) for _ in range(3)]
        assert len({x.data.ptr for answer in answers for x in answer}) == 6
        assert {out.strides for out, _ in answers} == {inputs[0].strides}
        assert all(lse.dtype == np.float32 and lse.shape == (2, 3, 70) for _, lse in answers)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_host_arrays_are_copied_to_the_gpu_and_back(gpu, monkeypatch, dtype):
    """Kernels are given the copies as they are given arrays of the GPU's own."""
    sent = []

    def to_device(values):
        sent.append(fake_numba(values))
        sent[-1].copy_to_host = lambda: values
        return sent[-1]

    monkeypatch.setattr(staging, "cuda", SimpleNamespace(to_device=to_device))
    monkeypatch.setattr(
        staging,
        "device_workspace",
        lambda shape, dtype=np.float32: to_device(np.ones(shape, dtype)),
    )
    q, k, v, out = (np.zeros((1, 5, 2, 4), DTYPES[dtype])[:, ::-1] for _ in range(4))
    lse = np.zeros((1, 2, 5), np.float32)
    names = "q", "k", "v", "out", "lse"
    arrays = {n: describe(n, x) for n, x in zip(names, (q, k, v, out, lse), strict=True)}
    there = staging.stage(arrays, ("out", "lse"), GpuMachine(0))
    for view, array in zip(there.views.values(), sent, strict=True):
        assert view.owner is array and view.dtype == array.dtype
        assert view.address == array.__cuda_array_interface__["data"][0]
        assert view.strides == array.strides
    assert there.allocate((2, 3)).shape == (2, 3)
    there.finish()
    assert (lse == 1).all() and out.tobytes() == sent[3].copy_to_host().tobytes()


def test_no_array_is_kept(gpu):
    for rung in ("standard", "fa2_split_q"):
        inputs = qkv(gpu)
        references = [weakref.ref(x) for x in (*inputs, *[flash_attn_func(*inputs, rung=rung)])]
        references += [weakref.ref(x) for x in gpu.allocated]
        del inputs, gpu.allocated[:]
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


def test_so_many_calls_are_remembered(gpu, monkeypatch):
    monkeypatch.setattr(checks, "REMEMBERED", 3)
    for length in (1, 2, 3, 4, 5, 1):
        call(gpu, arrays={"shape": (1, length, 1, 4)})
        assert 1 <= len(checks._problems) <= 3
    assert interface._gpu_plan.cache_info().maxsize == 1024


def test_a_grid_that_cuda_cannot_have_is_refused_each_time(gpu, monkeypatch):
    monkeypatch.setattr(machines, "MAX_GRID_YZ", 1)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="would need a grid of"):
            call(gpu, arrays={"shape": (1, 600, 1, 20)})
    assert gpu.launches == []


def test_a_plan_knows_arrays_by_where_they_begin(gpu):
    """A launch that is given part of an array, or one that is none of the call's, has no plan."""
    layouts = [describe("q", on_gpu(gpu)).layout]
    kernel = fa2_split_q.make_forward(RUNGS["fa2_split_q"].choose_tiles(20, LIMITS), "float16", 0)

    def plan(views, allocate):
        moved = views[0]._replace(address=views[0].address + 2)
        return [launch.KernelLaunch(kernel, (1,), 32, 0, (moved,))]

    with pytest.raises(KeyError):
        GpuPlan(layouts, plan, GpuMachine(0))


def test_stand_ins_are_laid_out_like_what_they_stand_for(gpu):
    arrays = [describe("x", x) for x in (on_gpu(gpu, offset=6), on_gpu(gpu, **STRIDED["strided"]))]
    seen = []

    def plan(views, allocate):
        seen.extend([*views, allocate((2, 3, 5)), as_bits(views[0])])
        return []

    GpuPlan([array.layout for array in arrays], plan, GpuMachine(0))
    for view, array in zip(seen, arrays, strict=False):
        assert view[1:4] == array.gpu_view()[1:4] and view.owner is None
        assert view.address % ALIGNMENT == array.address % ALIGNMENT
    assert seen[2][1:4] == ((2, 3, 5), (60, 20, 4), np.float32)
    assert [view.address // STAND_IN_SPACING for view in seen] == [1, 2, 3, 1]
    assert seen[3].dtype == np.uint16
