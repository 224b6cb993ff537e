"""What only a GPU can show: device arrays of three libraries, streams, sizes no simulator runs."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from fa2_numba import ArgumentError, Simulator, flash_attn_func, interface
from fa2_numba.errors import ArgumentTypeError
from fa2_numba.launch import GpuMachine
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.testing import assert_attention, compare_attention, random_qkv

from .conftest import (
    DTYPES,
    PORTABLE_RUNGS,
    TENSOR_CORE_RUNGS,
    all_kinds,
    kinds,
    small_tiles,
)

pytestmark = pytest.mark.gpu
rungs = pytest.mark.parametrize("rung", PORTABLE_RUNGS)


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def bits(array):
    """bfloat16 through its bits, which every library can carry."""
    return array.view(np.int16)


def to_torch(torch, array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(bits(array)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def from_torch(torch, tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


@all_kinds()
def test_cupy_arrays(cupy, dtype, rung):
    host = random_qkv(2, 65, 130, 4, 2, 64, dtype, seed=0)
    q, k, v = (cupy.asarray(x) for x in host)
    out, lse = flash_attn_func(q, k, v, causal=True, rung=rung, return_lse=True)
    assert isinstance(out, cupy.ndarray) and out.dtype == q.dtype
    assert_attention(out.get(), lse.get(), *host, causal=True)


@all_kinds()
def test_torch_tensors(torch, dtype, rung):
    host = random_qkv(2, 65, 130, 4, 2, 64, dtype, seed=1)
    q, k, v = (to_torch(torch, x) for x in host)
    out, lse = flash_attn_func(q, k, v, causal=True, rung=rung, return_lse=True)
    assert out.device == q.device and out.dtype == q.dtype and out.shape == q.shape
    assert_attention(from_torch(torch, out), lse.cpu().numpy(), *host, causal=True)


@all_kinds(("float32", "float16"))
def test_numba_device_arrays(dtype, rung):
    host = random_qkv(1, 40, 50, 2, 2, 32, dtype, seed=2)
    q, k, v = (cuda.to_device(x) for x in host)
    out, lse = flash_attn_func(q, k, v, rung=rung, return_lse=True)
    assert cuda.is_cuda_array(out)
    assert_attention(out.copy_to_host(), lse.copy_to_host(), *host)


@rungs
def test_strided_views_give_the_same_bits(cupy, rung):
    host = random_qkv(2, 33, 47, 4, 2, 40, np.float16, seed=3)
    expected = flash_attn_func(*(cupy.asarray(x) for x in host), rung=rung).get()
    views = [cupy.asarray(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for x in host]
    np.testing.assert_array_equal(flash_attn_func(*views, rung=rung).get(), expected)
    backwards = [cupy.asarray(x[:, ::-1].copy())[:, ::-1] for x in host]
    np.testing.assert_array_equal(flash_attn_func(*backwards, rung=rung).get(), expected)
    last = [cupy.asarray(np.moveaxis(x, 3, 1).copy()) for x in host]
    views = [cupy.moveaxis(x, 1, 3) for x in last]
    np.testing.assert_array_equal(flash_attn_func(*views, rung=rung).get(), expected)


@rungs
@pytest.mark.parametrize("offset", range(1, 9))
def test_any_alignment(cupy, offset, rung):
    host = random_qkv(1, 33, 33, 2, 2, 64, np.float16, seed=4)
    views = []
    for x in host:
        buffer = cupy.full(x.size + 16, cupy.nan, x.dtype)
        views.append(buffer[offset : offset + x.size].reshape(x.shape))
        views[-1][...] = cupy.asarray(x)
    out, lse = flash_attn_func(*views, rung=rung, return_lse=True)
    assert_attention(out.get(), lse.get(), *host)


@kinds()
def test_zero_strides(cupy, rung, dtype):
    q, k, v = random_qkv(3, 10, 20, 2, 2, 16, dtype, seed=5)
    k, v = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)
    devices = [cupy.asarray(q)] + [cupy.broadcast_to(cupy.asarray(x[:1]), x.shape) for x in (k, v)]
    out, lse = flash_attn_func(*devices, rung=rung, return_lse=True)
    assert_attention(out.get(), lse.get(), q, k, v)


def test_out_is_written_in_place_and_memory_stays_flat(cupy):
    q, k, v = (cupy.asarray(x) for x in random_qkv(1, 64, 64, 2, 2, 64, np.float16, seed=6))
    out = cupy.full_like(q, cupy.nan)
    assert flash_attn_func(q, k, v, out=out) is out
    assert cupy.isfinite(out).all()
    used = set()
    for rung in PORTABLE_RUNGS:
        for _ in range(5):
            flash_attn_func(q, k, v, out=out, rung=rung)
    pool = cupy.get_default_memory_pool()
    for _ in range(20):
        for rung in PORTABLE_RUNGS:
            flash_attn_func(q, k, v, out=out, rung=rung)
        cupy.cuda.Device().synchronize()
        used.add((pool.total_bytes(), cupy.cuda.Device().mem_info[0]))
    assert len(used) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_runs_on_the_current_stream_without_synchronising(cupy, dtype):
    """The call returns while an earlier kernel on its stream still runs, and waits behind it."""
    q, k, v = (cupy.asarray(x) for x in random_qkv(1, 64, 64, 2, 2, 64, dtype, seed=7))
    expected = flash_attn_func(q, k, v)
    late = cupy.zeros_like(q)
    sleep = cupy.RawKernel(
        'extern "C" __global__ void sleep(long long cycles)'
        "{ long long start = clock64(); while (clock64() - start < cycles); }",
        "sleep",
    )
    # Loading a kernel for the first time may wait for the device: load them all before.
    sleep((1,), (1,), (np.int64(1),))
    late[...] = q
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        sleep((1,), (1,), (np.int64(1_000_000_000),))
        late[...] = q
        out = flash_attn_func(late, k, v)
        assert not stream.done, "the call waited for the device"
        stream.synchronize()
    cupy.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_torch_stream(torch, dtype):
    q, k, v = (to_torch(torch, x) for x in random_qkv(1, 64, 64, 2, 2, 64, dtype, seed=8))
    expected = flash_attn_func(q * 1.0, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        late = q * 1.0
        out = flash_attn_func(late, k, v)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_gpu_and_simulator_in_one_process(cupy):
    host = random_qkv(1, 20, 30, 2, 1, 16, np.float32, seed=9)
    devices = [cupy.asarray(x) for x in host]
    on_gpu = flash_attn_func(*devices, return_lse=True)
    simulated = flash_attn_func(*devices, return_lse=True, machine=Simulator(progress=False))
    assert isinstance(simulated[0], cupy.ndarray)
    for got in (on_gpu, simulated):
        assert_attention(got[0].get(), got[1].get(), *host)


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        *(("fa1_sliced_k", np.float32), ("fa2_split_q", np.float32)),
        *(("fa1_tensor_core", np.float16), ("fa2_tensor_core", np.float16)),
    ],
)
def test_more_heads_than_one_grid_dimension_holds(cupy, rung, dtype):
    batch, heads = 70_000, 2
    q = cupy.random.standard_normal((batch, 2, heads, 8), dtype=np.float32).astype(dtype)
    out = flash_attn_func(q, q, q, rung=rung)
    for b in (0, 32_767, 32_768, 65_535, 65_536, batch - 1):
        one = q[b : b + 1].get()
        errors = compare_attention(
            *flash_attn_func(one, one, one, rung=rung, return_lse=True), *[one] * 3
        )
        assert errors[0].passed
        np.testing.assert_allclose(out[b].get(), flash_attn_func(one, one, one, rung=rung)[0])


@rungs
def test_offsets_beyond_32_bits(cupy, rung):
    """The second batch element, and the last rows, lie more than 2^31 elements into the buffer."""
    host = random_qkv(2, 70, 70, 2, 2, 64, np.float16, seed=10)
    far = 2**31 + 64
    row = host[0][0].size
    views = []
    for x in host:
        buffer = cupy.empty(far + row, np.float16)
        view = cupy.lib.stride_tricks.as_strided(buffer, x.shape, (2 * far, *x[0].strides))
        view[...] = cupy.asarray(x)
        views.append(view)
    out, lse = flash_attn_func(*views, rung=rung, return_lse=True, causal=True)
    assert_attention(out.get(), lse.get(), *host, causal=True)


@rungs
def test_long_row_offsets_beyond_32_bits(cupy, rung):
    """seqlen x row stride itself exceeds 2^31 elements."""
    host = random_qkv(1, 70, 70, 1, 1, 64, np.float16, seed=11)
    step = 2**31 // 69 + 64
    views = []
    for x in host:
        buffer = cupy.empty(69 * step + 64, np.float16)
        view = cupy.lib.stride_tricks.as_strided(buffer, x.shape, (2, 2 * step, 2, 2))
        view[...] = cupy.asarray(x)
        views.append(view)
    out, lse = flash_attn_func(*views, rung=rung, return_lse=True)
    assert_attention(out.get(), lse.get(), *host)


@pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 33, 64, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores_on_many_tiles(dtype, head_dim, causal, rung):
    host = random_qkv(1, 700, 830, 4, 2, head_dim, DTYPES[dtype], seed=16)
    out, lse = flash_attn_func(*host, causal=causal, rung=rung, machine="gpu", return_lse=True)
    assert_attention(out, lse, *host, causal=causal)


@pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_repeats_what_tensor_cores_compute_bit_for_bit(dtype, rung):
    host = random_qkv(2, 333, 444, 4, 4, 64, DTYPES[dtype], seed=17)
    options = {"causal": True, "rung": rung, "machine": "gpu"}
    first, *others = (flash_attn_func(*host, **options) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
@pytest.mark.parametrize("head_dim", [33, 64, 128])
def test_the_instructions_of_turing_on_any_gpu(head_dim, rung, monkeypatch):
    def turing_tiles(rung, head_dim, limits):
        small = small_tiles(rung, head_dim, limits)
        fields = head_dim, small.block_m, small.block_n, small.num_warps
        return TensorCoreConfig(*fields, turing=True, sliced_k=small.sliced_k)

    monkeypatch.setattr(interface, "tiles_for", turing_tiles)
    host = random_qkv(1, 65, 130, 2, 1, head_dim, np.float16, seed=18)
    out, lse = flash_attn_func(*host, causal=True, rung=rung, machine="gpu", return_lse=True)
    assert_attention(out, lse, *host, causal=True)


def test_mixed_places_are_refused(cupy, torch):
    q, k, v = random_qkv(1, 4, 4, 1, 1, 8, np.float32, seed=12)
    with pytest.raises(ArgumentTypeError, match="k"):
        flash_attn_func(cupy.asarray(q), k, v)
    with pytest.raises(ArgumentError, match="on the host"):
        flash_attn_func(torch.from_numpy(q).cuda(), torch.from_numpy(k), torch.from_numpy(v))


def test_zero_sizes_launch_nothing(cupy, torch):
    q, kv = cupy.ones((1, 3, 2, 8), np.float32), cupy.ones((1, 0, 2, 8), np.float32)
    out, lse = flash_attn_func(q, kv, kv, return_lse=True)
    assert (out == 0).all() and cupy.isneginf(lse).all()
    tq, tkv = torch.ones(1, 3, 2, 8, device="cuda"), torch.ones(1, 0, 2, 8, device="cuda")
    out, lse = flash_attn_func(tq, tkv, tkv, return_lse=True)
    assert (out == 0).all() and torch.isneginf(lse).all()
    nq, nkv = (
        cuda.to_device(np.ones((1, 3, 2, 8), np.float32)),
        cuda.device_array((1, 0, 2, 8), np.float32),
    )
    out, lse = flash_attn_func(nq, nkv, nkv, return_lse=True)
    assert (out.copy_to_host() == 0).all() and np.isneginf(lse.copy_to_host()).all()


def test_strided_numba_output():
    """Also where no kernel runs, and where the result comes from the simulator."""
    host = random_qkv(1, 5, 7, 2, 2, 8, np.float32, seed=14)
    q, k, v = (cuda.to_device(x) for x in host)
    expected = flash_attn_func(q, k, v).copy_to_host()
    for machine in ("gpu", Simulator(progress=False)):
        out = cuda.to_device(np.full((1, 5, 4, 8), np.nan, np.float32))[:, :, ::2]
        assert flash_attn_func(q, k, v, out=out, machine=machine) is out
        np.testing.assert_allclose(out.copy_to_host(), expected, rtol=1e-5, atol=1e-6)
    no_keys = cuda.device_array((1, 0, 2, 8), np.float32)
    flash_attn_func(q, no_keys, no_keys, out=out)
    assert (out.copy_to_host() == 0).all()


def test_second_gpu(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("only one GPU here")
    host = random_qkv(1, 65, 65, 2, 2, 128, np.float16, seed=13)
    for device in (1, 0):
        with cupy.cuda.Device(device):
            arrays = [cupy.asarray(x) for x in host]
        out, lse = flash_attn_func(*arrays, return_lse=True)
        assert out.device.id == device
        assert_attention(out.get(), lse.get(), *host)


@pytest.mark.parametrize("library", ["numpy", "cupy", "torch", "numba"])
def test_a_rung_that_writes_nothing_leaves_nan(library, cupy, torch, monkeypatch):
    """Also where a memory pool still holds the right answer of an earlier call."""
    host = random_qkv(1, 4, 5, 1, 1, 8, np.float32, seed=15)
    send, fetch = {
        "numpy": (np.copy, np.asarray),
        "cupy": (cupy.asarray, cupy.asnumpy),
        "torch": (lambda x: to_torch(torch, x), lambda x: from_torch(torch, x)),
        "numba": (cuda.to_device, lambda x: x.copy_to_host()),
    }[library]
    arrays = [send(x) for x in host]
    assert_attention(
        *(fetch(x) for x in flash_attn_func(*arrays, machine="gpu", return_lse=True)), *host
    )
    monkeypatch.setattr(GpuMachine, "run", lambda self, launches: [])
    for result in flash_attn_func(*arrays, machine="gpu", return_lse=True):
        assert np.isnan(fetch(result)).all()
