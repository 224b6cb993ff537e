"""Launching on a GPU as far as it goes without one: parameters, contexts, the cache on disk."""

import ast
import ctypes
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

from bench import host_time, timing
from fa2_numba import RUNGS, Simulator, cubin_cache, flash_attn_func, launch
from fa2_numba.arrays import describe
from fa2_numba.config import DeviceLimits, TileConfig
from fa2_numba.kernels import fa2_split_q
from fa2_numba.launch import (
    ForwardTensors,
    GpuArray,
    GpuMachine,
    KernelLaunch,
    Parameters,
    SimulatorMachine,
    signature,
)
from fa2_numba.lessons.stamps import stamped
from fa2_numba.testing import random_qkv

from .test_arrays import fake_cupy

ROOT = Path(__file__).parents[1]
CONFIG = TileConfig(32, 32, 32)


def gpu_array(shape, dtype, address=0x7F00_0000_0000):
    strides = np.empty(shape, dtype).strides
    return GpuArray(address, shape, strides, np.dtype(dtype), owner=None)


def gpu_tensors(dtype="float16", seqlen=70):
    element = np.uint16 if dtype == "bfloat16" else dtype
    q, k, v, out = (gpu_array((2, seqlen, 3, 20), element, 1 << 40 + i) for i in range(4))
    lse = gpu_array((2, 3, seqlen), np.float32, 1 << 45)
    allocate = partial(gpu_array, dtype=np.float32)
    return ForwardTensors(q, k, v, out, lse, np.float32(0.25), True, dtype, allocate)


# Parameters


@cuda.jit
def mixed(x, small, y, flag, real, count, scale, last):
    x[0, 0] = small + y[0] + flag + real + count + scale + last


MIXED = (
    gpu_array((3, 5), np.float16),
    np.int8(-3),
    gpu_array((7,), np.float64, 0x7F00_0000_1000),
    np.bool_(True),
    np.float32(0.5),
    12345678901,
    2.5,
    np.uint16(7),
)


def offsets_in(ptx):
    """Offset and bytes of every parameter of the PTX's kernel, laid out as in a C struct."""
    declared = re.findall(r"\.param \.\w(\d+) \w+", ptx.partition("\n{")[0].partition(".entry")[2])
    end = 0
    for size in (int(bits) // 8 for bits in declared):
        start = -(-end // size) * size
        yield start, size
        end = start + size


def flattened(arguments):
    """The values of all parameters in their order, as NumPy scalars."""
    for a in arguments:
        if isinstance(a, GpuArray):
            size, itemsize = np.prod(a.shape), a.dtype.itemsize
            fields = (0, 0, size, itemsize, a.address, *a.shape, *a.strides)
            yield from map(np.int64, fields)
        else:
            yield np.dtype(type(a)).type(a)


def check_parameters(kernel, arguments):
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature(arguments), cc=(9, 0))
    parameters = Parameters(tuple(map(launch._kind, arguments)))
    words = parameters.pack(arguments)
    packed = words.tobytes()[launch.HEADER_BYTES :][: parameters.size]
    places, values = list(offsets_in(ptx)), list(flattened(arguments))
    assert [size for _, size in places] == [value.nbytes for value in values]
    assert sum(places[-1]) == parameters.size == len(packed)
    addresses = [a.address if isinstance(a, GpuArray) else None for a in arguments]
    assert [word and words[word] for word in parameters.places] == addresses
    for (start, size), value in zip(places, values, strict=True):
        assert packed[start : start + size] == value.tobytes()


def test_mixed_parameters_lie_where_the_kernel_reads_them():
    check_parameters(mixed, MIXED)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rung", ["standard", "fa1_sliced_k", "fa2_split_q"])
def test_the_parameters_of_rungs_lie_where_their_kernels_read_them(rung, dtype):
    for planned in RUNGS[rung].plan_forward(gpu_tensors(dtype), CONFIG):
        check_parameters(planned.kernel, planned.arguments)


def test_a_moved_launch_has_memory_of_its_own(driver):
    """Two threads may launch it at once; what it was moved from stays as it is."""
    loaded = GpuMachine(0).load(a_launch())
    word, scalar = loaded.places
    assert scalar is None
    elsewhere = [loaded.moved([(word, 1)], (5, address)) for address in (1 << 40, 1 << 41)]
    assert GpuMachine(0, stream=3).run([*elsewhere, loaded]) == []
    assert [np.frombuffer(p[:-4], np.int64)[4] for *_, p in driver.launches] == [
        1 << 40,
        1 << 41,
        0x7F00_0000_0000,
    ]
    assert {(function, *sizes) for function, sizes, *_ in driver.launches} == {
        (1001, 5, 2, 1, 96, 1, 1, 64)
    }


def test_signatures_are_those_of_any_strides():
    array, integer, real = signature((gpu_array((3, 5), np.float16), 3, np.float32(1)))
    assert (str(array), str(integer), str(real)) == ("array(float16, 2d, A)", "int64", "float32")
    assert signature((np.zeros((3, 5), np.float16), 3, np.float32(1))) == (array, integer, real)


def test_bits_are_the_same_memory():
    x = np.arange(6, dtype=np.float16).reshape(2, 3)[:, ::2]
    bits = launch.as_bits(x)
    assert bits.dtype == np.uint16 and bits.strides == x.strides and np.shares_memory(bits, x)
    array = gpu_array((3, 5), np.float16)
    assert launch.as_bits(array) == array._replace(dtype=np.dtype(np.uint16))


# The machine


def note_launches(monkeypatch):
    """A driver that notes launches, and kernels that are loaded without being compiled."""
    noted = SimpleNamespace(launches=[], loaded=[], error=launch.driver.CUresult(0))

    def launch_kernel(function, *shape):
        *sizes, stream, pointers, extra = shape
        header = (ctypes.c_uint64 * 6).from_address(extra)
        assert pointers == 0 and (header[0], header[2], header[4]) == (1, 2, 0)
        assert header[3] == ctypes.addressof(header) + 40
        parameters = ctypes.string_at(header[1], header[5])
        noted.launches.append((int(function), sizes, int(stream), parameters))
        return (noted.error,)

    def load(kernel, types):
        noted.loaded.append((kernel, types))
        return SimpleNamespace(handle=1000 + len(noted.loaded))

    monkeypatch.setattr(launch.driver, "cuLaunchKernel", launch_kernel)
    monkeypatch.setattr(launch, "_load", load)
    monkeypatch.setattr(launch.GpuKernel, "allow_shared_bytes", lambda self, size, device: None)
    return noted


@pytest.fixture
def driver(monkeypatch):
    """Nothing is compiled, and nothing runs."""
    launch._loaded.cache_clear()
    yield note_launches(monkeypatch)
    launch._loaded.cache_clear()


def a_launch(length=3, dtype=np.float32, shared_bytes=64):
    arguments = (gpu_array((length,), dtype), np.float32(1.5))
    return KernelLaunch(mixed, (5, 2), 96, shared_bytes, arguments)


def test_a_launch_reaches_the_driver(driver):
    assert GpuMachine(0, stream=77).run([a_launch(), a_launch(length=4)]) == []
    (function, sizes, stream, first), (*_, second) = driver.launches
    assert (function, sizes, stream) == (1001, [5, 2, 1, 96, 1, 1, 64], 77)
    numbers = np.frombuffer(first[:-4], np.int64)
    assert numbers.tolist() == [0, 0, 3, 4, 0x7F00_0000_0000, 3, 4]
    assert np.frombuffer(first[-4:], np.float32) == 1.5
    assert np.frombuffer(second[:-4], np.int64)[2] == 4


def test_a_new_length_loads_nothing(driver):
    machine = GpuMachine(0)
    for length in (3, 4, 5000):
        machine.run([a_launch(length)])
    assert len(driver.loaded) == 1 and len({function for function, *_ in driver.launches}) == 1
    machine.run([a_launch(dtype=np.float16)])
    GpuMachine(1).run([a_launch()])
    assert len(driver.loaded) == 3


def test_an_error_of_the_driver_is_raised(driver):
    driver.error = launch.driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaAPIError, match=r"mixed, \(5, 2, 1\) blocks of 96.*_INVALID_VALUE"):
        GpuMachine(0).run([a_launch()])


def test_arrays_of_other_libraries_are_taken(driver):
    values = np.zeros((2, 3), np.float32)
    interface = {"__cuda_array_interface__": values.__array_interface__}
    array = SimpleNamespace(shape=(2, 3), strides=(12, 4), dtype=values.dtype, ndim=2, **interface)
    GpuMachine(0).run([KernelLaunch(mixed, (1,), 32, 0, (array,))])
    address = values.__array_interface__["data"][0]
    (*_, parameters) = driver.launches[0]
    assert np.frombuffer(parameters, np.int64).tolist() == [0, 0, 6, 4, address, 2, 3, 12, 4]


@pytest.mark.parametrize("dynamic, opted_in", [(49_151, []), (49_152, [(49_152, 0)])])
def test_48_kib_of_shared_memory_are_asked_for(driver, monkeypatch, dynamic, opted_in):
    asked = []
    monkeypatch.setattr(
        launch.GpuKernel, "allow_shared_bytes", lambda self, *sizes: asked.append(sizes)
    )
    GpuMachine(0).run([a_launch(shared_bytes=dynamic)] * 2)
    assert asked == opted_in


def test_a_device_that_is_current_is_not_made_current(monkeypatch):
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(gpus={0: "GPU 0", 1: "GPU 1"}))
    success, none = launch.driver.CUresult(0), launch.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
    for answer, entered in (
        ((success, 1), launch.HERE),
        ((success, 0), "GPU 1"),
        ((none, None), "GPU 1"),
    ):
        monkeypatch.setattr(launch.driver, "cuCtxGetDevice", lambda answer=answer: answer)
        assert GpuMachine(1).activate() is entered


def test_both_machines_tell_their_limits(monkeypatch):
    device = SimpleNamespace(
        compute_capability=(9, 0),
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=232_448,
        MULTIPROCESSOR_COUNT=132,
    )
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(gpus=[device]))
    launch._device_limits.cache_clear()
    assert GpuMachine(0).limits == DeviceLimits((9, 0), 232_448, 132)
    launch._device_limits.cache_clear()
    simulated = SimulatorMachine(Simulator(compute_capability=(7, 5))).limits
    assert simulated == DeviceLimits((7, 5), 65_536)


def test_a_view_of_a_gpu_array_keeps_it():
    x = np.zeros((2, 3, 4, 5), np.float16)[:, ::2]
    array = fake_cupy(x)
    view = describe("q", array).gpu_view()
    assert view.owner is array and view.ndim == 4
    assert view[:3] == (array.data.ptr, x.shape, x.strides) and view.dtype == np.float16


# The cache on disk


@pytest.fixture
def settled(monkeypatch):
    """Nobody changes a source file while the test runs."""
    monkeypatch.setattr(cubin_cache, "_sources", lambda: cubin_cache.SOURCES_AT_IMPORT)


@pytest.fixture
def folder(tmp_path, monkeypatch, settled):
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cubins"))
    return tmp_path / "cubins"


def a_kernel(dtype="float16", causal=True, config=CONFIG):
    return fa2_split_q.make_forward(config, dtype, causal)


def a_key(kernel=None, capability=(9, 0)):
    types = signature(fa2_split_q.plan_forward(gpu_tensors(), CONFIG)[0].arguments)
    return cubin_cache.key_of(kernel or a_kernel(), types, capability)


def test_what_is_stored_is_loaded(folder):
    key = a_key()
    assert cubin_cache.load(key) is None
    cubin_cache.store(key, "entry", b"\0machine\0code")
    assert cubin_cache.load(key) == ("entry", b"\0machine\0code")
    assert [path.name for path in folder.iterdir()] == [f"{key}.cubin"]
    assert cubin_cache.load(a_key(capability=(8, 0))) is None


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_damaged_file_is_not_loaded(folder, place):
    cubin_cache.store("key", "entry", b"machine code" * 9)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert cubin_cache.load("key") is None
    path.write_bytes(b"")
    assert cubin_cache.load("key") is None


def test_a_file_of_another_kernel_is_not_loaded(folder):
    cubin_cache.store("key", "entry", b"machine code")
    shutil.copy(folder / "key.cubin", folder / "other.cubin")
    assert cubin_cache.load("other") is None


def test_the_cache_can_be_off(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for off in ("", "0"):
        monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, off)
        cubin_cache.store("key", "entry", b"code")
        assert cubin_cache.load("key") is None and cubin_cache.folder() is None
    assert list(tmp_path.iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(cubin_cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubin_cache.folder() == tmp_path / "fa2_numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cubin_cache.folder() == tmp_path / ".cache" / "fa2_numba"

    def homeless():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert cubin_cache.folder() is None


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    cubin_cache.store("key", "entry", b"code")
    assert cubin_cache.load("key") is None


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(cubin_cache.os, "replace", refuse)
    cubin_cache.store("key", "entry", b"code")
    assert list(folder.iterdir()) == []


def test_keys_tell_kernels_apart(settled):
    kernels = [
        a_kernel("bfloat16"),
        a_kernel(causal=False),
        a_kernel(config=TileConfig(32, 16, 16)),
    ]
    keys = {a_key(), a_key(capability=(8, 0)), *map(a_key, kernels)}
    assert len(keys) == 5
    assert a_key().startswith("fa2_split_q_d32_m32_n32_w4_float16_causal-")


def test_only_the_kernels_of_this_package_are_kept(folder):
    for kernel in (mixed, stamped(a_kernel())):
        assert cubin_cache.key_of(kernel, (), (9, 0)) is None
    cubin_cache.store(None, "entry", b"code")
    assert cubin_cache.load(None) is None and not folder.exists()


def test_constants_of_a_factory_are_ingredients():
    def factory(number):
        @cuda.jit(device=True)
        def helper():
            return number

        return cuda.jit(lambda x: helper())

    one, two = (cubin_cache.ingredients(factory(n).py_func) for n in (1, 2))
    assert one == ("<lambda>", ("helper", ("helper", ("number", "1"))))
    assert one != two


@pytest.mark.parametrize("rung", RUNGS)
def test_ingredients_are_the_same_in_every_process(rung):
    """An object shown by its address would be another one each time."""
    for planned in RUNGS[rung].plan_forward(gpu_tensors(), RUNG_TILES[rung]):
        assert " at 0x" not in str(cubin_cache.ingredients(planned.kernel.py_func))


LIMITS = DeviceLimits((9, 0), 232_448)
RUNG_TILES = {name: rung.choose_tiles(20, LIMITS) for name, rung in RUNGS.items()}
KEYS = """
from fa2_numba.ladder import RUNGS
from tests.test_launch import RUNG_TILES, cubin_cache, gpu_tensors, signature
for name, rung in RUNGS.items():
    for planned in rung.plan_forward(gpu_tensors(), RUNG_TILES[name]):
        print(cubin_cache.key_of(planned.kernel, signature(planned.arguments), (9, 0)))
"""


def test_keys_are_the_same_in_every_process():
    runs = [
        subprocess.run([sys.executable, "-c", KEYS], cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(set(runs[0].stdout.split())) == len(runs[0].stdout.split()) > len(RUNGS)


@pytest.mark.parametrize("file", ["kernels/standard.py", "device/softmax.py", "constants.py"])
def test_a_change_of_any_source_changes_the_key(file, tmp_path, monkeypatch):
    """Also of a helper that a kernel finds among the names of its module, not in its closure."""
    copy = tmp_path / "fa2_numba"
    shutil.copytree(cubin_cache.PACKAGE, copy, ignore=shutil.ignore_patterns("data", "__pycache__"))
    monkeypatch.setattr(cubin_cache, "PACKAGE", copy)
    monkeypatch.setattr(cubin_cache, "SOURCES_AT_IMPORT", cubin_cache._sources())
    before = a_key()
    with (copy / file).open("a") as source:
        source.write("# another line\n")
    assert before is not None and a_key() is None, "what runs now is not known"
    monkeypatch.setattr(cubin_cache, "SOURCES_AT_IMPORT", cubin_cache._sources())
    assert a_key() not in (before, None)


def test_kernels_are_made_of_nothing_but_the_sources():
    """Every module of the package that kernels import is in the key, or launches them."""
    names = dict(cubin_cache.SOURCES_AT_IMPORT)
    assert {"kernels/fa2_split_q.py", "device/tiles.py", "config.py", "constants.py"} <= set(names)
    imported = set()
    for name in names:
        tree = ast.parse((cubin_cache.PACKAGE / name).read_text())
        imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {m.removeprefix("fa2_numba.") for m in imported if m.startswith("fa2_numba.")}
    files = {module.replace(".", "/") + ".py" for module in ours}
    assert {f for f in files if f not in names} <= {
        *("launch.py", "tensor_maps.py", "kernels.py", "device.py")
    }


def test_a_kept_kernel_is_not_compiled(folder, monkeypatch):
    """The first time it is compiled and kept, the second time loaded."""
    compiled = SimpleNamespace(
        entry_name="entry",
        library=SimpleNamespace(
            get_cubin=lambda: SimpleNamespace(code=b"code"),
            get_cufunc=lambda: SimpleNamespace(kernel="compiled"),
        ),
    )
    compilations = []
    kernel = SimpleNamespace(
        py_func=a_kernel().py_func,
        targetoptions={},
        compile=lambda types: compilations.append(types) or compiled,
    )
    loaded = SimpleNamespace(
        from_cubin=lambda code: SimpleNamespace(get_kernel=lambda entry: (entry, code))
    )
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(get_current_device=lambda: device))
    monkeypatch.setattr(launch, "ObjectCode", loaded)
    assert launch._load(kernel, ("types",)) == "compiled"
    assert launch._load(kernel, ("types",)) == ("entry", b"code")
    assert compilations == [("types",)]


COUNT_COMPILATIONS = """
import numpy as np
from numba.cuda.dispatcher import CUDADispatcher
from fa2_numba import flash_attn_func
from fa2_numba.testing import assert_attention, random_qkv
compile, count = CUDADispatcher.compile, 0
def counting(self, types):
    global count
    count += 1
    return compile(self, types)
CUDADispatcher.compile = counting
for seqlen in (65, 130):
    host = random_qkv(1, seqlen, seqlen, 2, 2, 64, np.float16, seed=0)
    out, lse = flash_attn_func(*host, machine="gpu", rung="fa2_split_q", return_lse=True)
    assert_attention(out, lse, *host)
print(count)
"""


@pytest.mark.gpu
def test_a_second_process_compiles_nothing(folder):
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", COUNT_COMPILATIONS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts.append(done.stdout.strip())
    assert counts == ["1", "0"]


# bench/host_time.py


def test_the_parts_of_a_call_are_seen(monkeypatch):
    monkeypatch.setattr(host_time, "CALLS", 2)
    q, k, v = random_qkv(1, 1, 1, 1, 1, 1, np.float32)
    run = partial(flash_attn_func, q, k, v, machine=Simulator(checks=False, progress=False))
    waits = []
    found = host_time.parts(run, lambda: waits.append(1))
    assert tuple(found) == host_time.PARTS and min(found.values()) > 0 and waits == [1]
    assert max(found, key=found.get) == "launch"


def test_host_times_are_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host_time, "CALLS", 1)
    monkeypatch.setattr(host_time, "ROUNDS", 2)
    monkeypatch.setattr(timing, "environment", lambda: {"gpu": "NVIDIA Test"})
    monkeypatch.setattr(host_time, "flash_in_torch", lambda: launch.HERE)
    monkeypatch.setattr(host_time, "contestants", lambda: {"torch_flash": (int, int)})
    host_time.main(["--out", str(tmp_path / "new" / "host_time.json")])
    written = json.loads((tmp_path / "new" / "host_time.json").read_text())
    assert written["gpu"] == "NVIDIA Test" and written["dtype"] == "float16"
    assert 0 < written["calls"]["torch_flash"]["us_min"] <= written["calls"]["torch_flash"]["us"]
    assert "torch_flash" in capsys.readouterr().out
