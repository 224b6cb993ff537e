"""The block scheduler's model, occupancy, stamps of real blocks, and the figures made of them."""

import doctest
import itertools
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda
from numba.cuda import types

from fa2_numba import RUNGS, Simulator, flash_attn_func
from fa2_numba.config import TileConfig
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.launch import (
    ForwardTensors,
    GpuMachine,
    KernelLaunch,
    SimulatorMachine,
    signature,
)
from fa2_numba.lessons import draw, figures, fragments
from fa2_numba.lessons.fragments import mma_fragments
from fa2_numba.lessons.occupancy import MULTIPROCESSORS, blocks_per_multiprocessor
from fa2_numba.lessons.stamps import record_launch, record_timeline, stamped
from fa2_numba.lessons.timeline import (
    Timeline,
    head_costs,
    measured_costs,
    schedule,
    tile_costs,
)
from fa2_numba.problem import Problem
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict
from tests.test_compile import ARCHITECTURES, assemble, launches, ptxas

ROOT = Path(__file__).parents[1]
GRIDS = ("fa1_sliced_k", "fa2_split_q")

# Occupancy


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "compute_capability", "expected"),
    [
        # What NVIDIA's calculator says (cuda_occupancy.h of CUDA 13, compiled): blocks by
        # registers, shared memory, threads and block slots.
        (32, 0, 128, (9, 0), (16, 228, 16, 32)),
        (163, 68_608, 128, (9, 0), (3, 3, 16, 32)),
        (145, 49_664, 128, (9, 0), (3, 4, 16, 32)),
        (168, 231_424, 384, (9, 0), (1, 1, 5, 32)),
        (64, 227 * 1024, 256, (9, 0), (4, 1, 8, 32)),
        (64, 227 * 1024 + 1, 256, (9, 0), (4, 0, 8, 32)),
        (33, 1000, 96, (8, 0), (16, 82, 21, 32)),
        (255, 0, 1024, (8, 0), (0, 164, 2, 32)),
        (72, 5000, 160, (8, 6), (5, 16, 9, 16)),
        (40, 20_000, 256, (8, 9), (6, 4, 6, 24)),
        (191, 38_697, 75, (7, 5), (2, 1, 10, 16)),
        (96, 16_384, 64, (7, 5), (10, 4, 16, 16)),
        (128, 32_768, 128, (10, 0), (4, 6, 16, 32)),
        (56, 12_345, 416, (12, 0), (2, 7, 3, 24)),
    ],
)
def test_occupancy(registers, shared_bytes, threads, compute_capability, expected):
    found = blocks_per_multiprocessor(registers, shared_bytes, threads, compute_capability)
    limits = found.registers, found.shared_memory, found.threads, found.block_slots
    assert limits == expected and found.blocks == min(expected)


def test_occupancy_says_what_limits():
    found = blocks_per_multiprocessor(64, 11 * 1024, 128, (9, 0))
    assert found.limited_by == ("registers",) and found.blocks == 8
    found = blocks_per_multiprocessor(32, 13 * 1024, 128, (9, 0))
    assert found.limited_by == ("registers", "shared_memory", "threads")
    assert str(found).startswith("16 blocks per multiprocessor, limited by registers and shared")


def test_every_known_architecture_has_a_multiprocessor():
    assert MULTIPROCESSORS.keys() == SHARED_BYTES_PER_BLOCK.keys()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 0, 32, (9, 0)), "registers_per_thread=0"),
        ((256, 0, 32, (9, 0)), "registers_per_thread=256"),
        ((32, -1, 32, (9, 0)), "shared_bytes=-1"),
        ((32, 0, 1025, (9, 0)), "threads=1025"),
        ((32, 0, 32.0, (9, 0)), r"threads=32\.0"),
        ((32, 0, True, (9, 0)), "threads=True"),
        ((32, 0, 32, (6, 1)), r"compute_capability=\(6, 1\)"),
    ],
)
def test_occupancy_refuses(arguments, named):
    with pytest.raises(ValueError, match=named + ".*must be"):
        blocks_per_multiprocessor(*arguments)


# The model


def test_blocks_spread_over_empty_multiprocessors_first():
    timeline = schedule([5] * 7, multiprocessors=3, slots=2)
    assert timeline.multiprocessor.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert timeline.start.tolist() == [0] * 6 + [5]
    assert timeline.end.tolist() == [5] * 6 + [10]
    assert timeline.span == 10


def test_the_first_free_slot_takes_the_next_block():
    timeline = schedule([3, 1, 1, 1, 4], multiprocessors=2, slots=1)
    assert timeline.multiprocessor.tolist() == [0, 1, 1, 1, 0]
    assert timeline.start.tolist() == [0, 0, 1, 2, 3]
    # When two become free together, the emptier multiprocessor takes it.
    timeline = schedule([2, 9, 2, 2, 1], multiprocessors=2, slots=2)
    assert timeline.multiprocessor.tolist() == [0, 1, 0, 1, 0]


def test_utilisation_of_a_small_timeline():
    timeline = schedule([4, 1, 1], multiprocessors=2, slots=2)  # third block: 0, beside the first
    used = timeline.utilisation([0, 0.5, 1, 3.9, 4, -1])
    assert used.multiprocessors.tolist() == [1, 1, 0.5, 0.5, 0, 0]
    assert used.slots.tolist() == [0.75, 0.75, 0.25, 0.25, 0, 0]
    mean = timeline.mean_utilisation
    assert mean.multiprocessors == 5 / 8 and mean.slots == 6 / 16


def test_a_block_of_no_cost_runs():
    timeline = schedule([0, 0, 2, 0], multiprocessors=1, slots=1)
    assert timeline.start.tolist() == [0, 0, 0, 2] and timeline.end.tolist() == [0, 0, 2, 2]
    assert np.isnan(schedule([0], 1, 1).mean_utilisation).all()


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_what_holds_for_every_schedule(costs, multiprocessors, slots):
    timeline = schedule(costs, multiprocessors, slots)
    assert (timeline.end - timeline.start).tolist() == costs
    assert (np.diff(timeline.start) >= 0).all(), "blocks start in launch order"
    assert timeline.span >= max(max(costs), sum(costs) / (multiprocessors * slots))
    times = np.unique(np.concatenate([timeline.start, timeline.end]))
    for time, m in itertools.product(times, range(multiprocessors)):
        there = timeline.multiprocessor == m
        resident = there & (timeline.start <= time) & (time < timeline.end)
        assert resident.sum() <= slots
    used = timeline.utilisation(times)
    area = (used.slots[:-1] * np.diff(times)).sum() * multiprocessors * slots
    assert area == pytest.approx(sum(costs))
    assert (used.slots <= used.multiprocessors).all() and (used.multiprocessors <= 1).all()
    if timeline.span:
        mean = (used.multiprocessors[:-1] * np.diff(times)).sum() / timeline.span
        assert timeline.mean_utilisation.multiprocessors == pytest.approx(mean)
        # A slot never idles while a block waits for one.
        waiting = times[times < timeline.start[-1]]
        assert (timeline.utilisation(waiting).slots == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 1), r"costs of shape \(0,\): must be one dimension, not empty"),
        (([[1]], 1, 1), r"costs of shape \(1, 1\)"),
        (([1, -2], 1, 1), r"costs\[1\]=-2\.0: must be finite and not negative"),
        (([np.inf], 1, 1), r"costs\[0\]=inf"),
        (([1, 2, np.nan], 1, 1), r"costs\[2\]=nan"),
        (([1], 0, 1), "multiprocessors=0: must be a positive integer"),
        (([1], 1, 1.5), "slots=1.5: must be a positive integer"),
        (([1], True, 1), "multiprocessors=True"),
    ],
)
def test_schedule_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


@pytest.mark.parametrize(
    ("start", "end", "multiprocessor", "message"),
    [
        ([0, 0], [1], [0, 0], "of one length"),
        ([], [], [], "not empty"),
        ([0, 3], [1, 2], [0, 0], "block 1: start=3, end=2: .*must not end before"),
        ([0], [1], [2], "multiprocessor from 2 to 2: must be 0 to 1"),
        ([0], [1], [-1], "multiprocessor from -1"),
    ],
)
def test_a_timeline_refuses(start, end, multiprocessor, message):
    arrays = (np.array(values, np.int64) for values in (start, end, multiprocessor))
    with pytest.raises(ValueError, match=message):
        Timeline(*arrays, multiprocessors=2, slots=1, unit="ns")


# Costs


def test_costs_of_both_grids():
    config = TileConfig(64, 64, 64)
    assert tile_costs(config, 3, 128, 192, causal=False).tolist() == [3] * 6
    assert tile_costs(config, 1, 130, 130, causal=True).tolist() == [1, 2, 3]
    # The mask is aligned to the last query: the first rows see no key.
    assert tile_costs(config, 1, 192, 64, causal=True).tolist() == [0, 0, 1]
    assert head_costs(config, 3, 128, 192, causal=False).tolist() == [6] * 3
    with pytest.raises(ValueError, match="heads=0: must be a positive integer"):
        tile_costs(config, 0, 1, 1, causal=True)


def test_costs_that_the_simulator_measured_go_with_the_tiles(monkeypatch):
    """Nearly all work is in the visited tiles, so the two kinds of cost are in proportion."""
    config = TileConfig(32, 16, 16)
    monkeypatch.setattr("fa2_numba.interface.tiles_for", lambda *_: config)
    qkv = random_qkv(1, 48, 48, 2, 2, 32, np.float32)
    _, report = flash_attn_func(
        *qkv, causal=True, rung="fa2_split_q", machine=Simulator(checks=False), report=True
    )
    measured, modelled = measured_costs(report), tile_costs(config, 2, 48, 48, causal=True)
    assert measured.sum() == report.matmul_flops + report.other_flops
    np.testing.assert_allclose(measured / measured.sum(), modelled / modelled.sum(), rtol=0.05)


def test_the_grids_of_the_figure():
    """16 heads leave most of 132 multiprocessors without a block, however long they are."""
    _, numbers = draw.sm_timeline()
    heads, tiles = (
        Timeline(**{k: np.array(v) if isinstance(v, list) else v for k, v in shown.items()})
        for shown in numbers.values()
    )
    assert (heads.blocks, tiles.blocks) == (16, 16 * 4096 // 64)
    costs = [(timeline.end - timeline.start).sum() for timeline in (heads, tiles)]
    assert costs == [16 * 64 * 65 // 2] * 2
    assert heads.mean_utilisation.multiprocessors == pytest.approx(16 / 132)
    assert tiles.mean_utilisation.multiprocessors > 0.9


def ptxas_version():
    done = subprocess.run([ptxas(), "--version"], capture_output=True, text=True)
    return re.search(r"release ([\d.]+)", done.stdout)[1]


@pytest.mark.parametrize("rung", draw.REGISTERS)
def test_the_stated_registers_are_those_of_the_kernels(rung, tmp_path):
    _, (launch,) = launches(rung, "float32", 64, "sm_90a", True)
    assert launch.kernel.py_func.__name__.startswith(f"{rung}_d64_m64_n64_w4")
    arguments = signature(launch.arguments)
    ptx, _ = cuda.compile_ptx(launch.kernel.py_func, arguments, cc=ARCHITECTURES["sm_90a"])
    registers, _, _ = assemble(ptx, "sm_90a", tmp_path)
    stated = draw.REGISTERS[rung]
    if ptxas_version() == draw.PTXAS_VERSION:
        assert registers == stated
    rest = launch.shared_bytes, launch.threads, draw.H200_COMPUTE_CAPABILITY
    assert (
        blocks_per_multiprocessor(registers, *rest).blocks
        == blocks_per_multiprocessor(stated, *rest).blocks
    )


# Stamps


@cuda.jit
def leave_early(x, n):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i >= n:
        return
    x[i] += 1


def stamps_for(launch):
    return np.zeros((np.prod(launch.grid), 3), np.uint64)


@pytest.mark.parametrize("rung", GRIDS)
def test_stamped_kernels_compile(rung, tmp_path):
    _, (launch,) = launches(rung, "float16", 64, "sm_90a", True)
    kernel = stamped(launch.kernel)
    assert kernel.py_func.__name__ == launch.kernel.py_func.__name__ + "_stamped"
    types_of = signature((stamps_for(launch), *launch.arguments))
    ptx, _ = cuda.compile_ptx(kernel.py_func, types_of, cc=ARCHITECTURES["sm_90a"])
    assert ptx.count("%globaltimer;") == 2 and ptx.count("%smid;") == 1
    assert ".f64" not in ptx and ".local" not in ptx
    _, spilled, stack = assemble(ptx, "sm_90a", tmp_path)
    assert (spilled, stack) == (0, 0)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_120"])
def test_a_stamped_toy_compiles(architecture):
    arguments = signature((np.zeros((1, 3), np.uint64), np.zeros(1, np.float32), np.int32(1)))
    function = stamped(leave_early).py_func
    ptx, _ = cuda.compile_ptx(function, arguments, cc=ARCHITECTURES[architecture])
    assert ptx.count("bar.sync") + ptx.count("barrier.sync") == 1
    assert ".f64" not in ptx


def attention_launch(rung, config, heads, seqlen, to_machine, allocate):
    """A launch of a rung and what it writes, O and LSE."""
    rng = np.random.default_rng(0)
    shape = 1, seqlen, heads, config.head_dim
    Q, K, V = (to_machine(rng.standard_normal(shape, np.float32)) for _ in range(3))
    O, LSE = to_machine(np.full(shape, np.nan, np.float32)), allocate((1, heads, seqlen))
    scale = np.float32(config.head_dim**-0.5)
    tensors = ForwardTensors(Q, K, V, O, LSE, scale, True, "float32", allocate)
    (launch,) = RUNGS[rung].plan_forward(tensors, config)
    return launch, (O, LSE)


@pytest.mark.parametrize("rung", GRIDS)
def test_stamps_leave_the_results_of_a_simulated_kernel(rung):
    machine = SimulatorMachine(Simulator(progress=False))

    def make():
        config = TileConfig(16, 16, 16, 4)
        return attention_launch(rung, config, 2, 20, np.copy, lambda s: np.full(s, np.nan, "f4"))

    (plain, expected), (launch, results) = make(), make()
    machine.run([plain])
    timeline = record_launch(launch, machine)
    for result, value in zip(results, expected, strict=True):
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(result, value)
    assert timeline.blocks == np.prod(launch.grid)
    assert (timeline.multiprocessors, timeline.slots, timeline.unit) == (1, 1, "ns")
    # Blocks one after the other, each with a look at the clock before and one after.
    assert timeline.start.tolist() == list(range(0, 2 * timeline.blocks, 2))
    assert timeline.end.tolist() == list(range(1, 2 * timeline.blocks, 2))


def test_threads_that_leave_early_are_met_at_the_end():
    x = np.zeros(40, np.float32)
    launch = KernelLaunch(leave_early, (3,), 32, 0, (x, 40))
    timeline = record_launch(launch, SimulatorMachine(Simulator(progress=False)))
    assert (x == 1).all()
    assert timeline.blocks == 3 and (timeline.end > timeline.start).all()


def test_stamps_of_a_grid_and_block_of_three_dimensions():
    @cuda.jit
    def note(x):
        b = cuda.blockIdx
        x[b.x, b.y, b.z] += 1

    x = np.zeros((2, 3, 2), np.int32)
    machine = SimulatorMachine(Simulator(progress=False))
    timeline = record_launch(KernelLaunch(note, (2, 3, 2), (1, 1, 1), 0, (x,)), machine)
    assert (x == 1).all()
    assert (np.diff(timeline.start) > 0).all(), "a row a block, in launch order"


@pytest.mark.parametrize("grid", [3, (3,), (3, 1)])
def test_any_kernel_is_recorded_and_its_arrays_stay(grid):
    x = np.zeros(96, np.float32)
    timeline = record_timeline(leave_early, grid, 32, x, 40)
    assert timeline.blocks == 3 and timeline.unit == "ns"
    assert (timeline.end > timeline.start).all() and not x.any()


def test_dynamic_shared_memory_is_given():
    @cuda.jit
    def fill(x):
        tile = cuda.shared.array(0, np.float32)
        tile[cuda.threadIdx.x] = 1
        x[cuda.threadIdx.x] = tile[cuda.threadIdx.x]

    assert record_timeline(fill, 1, 32, np.zeros(32, np.float32), shared_bytes=128).blocks == 1


def test_a_kernel_is_wrapped_once_and_must_leave_names_free():
    assert stamped(leave_early) is stamped(leave_early)

    @cuda.jit
    def clash(body):
        body[0] = 1

    with pytest.raises(ValueError, match="kernel clash: must not name a parameter 'body'"):
        stamped(clash)


@pytest.mark.gpu
def test_stamps_on_a_gpu():
    device = cuda.get_current_device()
    machine = GpuMachine(device.id)
    config = TileConfig(64, 64, 64)
    used = {}
    for rung in GRIDS:
        launch, (O, LSE) = attention_launch(
            rung, config, 4, 1024, cuda.to_device, lambda s: cuda.device_array(s, np.float32)
        )
        timeline = record_launch(launch, machine)
        assert np.isfinite(O.copy_to_host()).all() and np.isfinite(LSE.copy_to_host()).all()
        assert timeline.multiprocessors == device.MULTIPROCESSOR_COUNT
        assert timeline.multiprocessor.max() < device.MULTIPROCESSOR_COUNT
        assert (timeline.end > timeline.start).all() and timeline.span < 10**9
        used[rung] = len(np.unique(timeline.multiprocessor))

        kernel = stamped(launch.kernel)
        kinds = types.void(*signature((stamps_for(launch), *launch.arguments)))
        registers = kernel.get_regs_per_thread(kinds)
        shared_bytes = launch.shared_bytes + kernel.get_shared_mem_per_block(kinds)
        capability = tuple(device.compute_capability)
        model = blocks_per_multiprocessor(registers, shared_bytes, launch.threads, capability)
        assert timeline.slots == model.blocks
    assert used["fa1_sliced_k"] <= 4 < used["fa2_split_q"]


# Figures


@pytest.mark.parametrize("name", draw.FIGURES)
def test_committed_figures_show_fresh_numbers(name):
    _, fresh = draw.FIGURES[name]()
    assert figures.read_numbers(ROOT / draw.FOLDER / f"{name}.svg") == fresh


def test_every_committed_figure_can_be_drawn():
    committed = {path.stem for path in (ROOT / draw.FOLDER).glob("*.svg")}
    # `python -m bench.stamps` draws this one, of a record.
    assert committed - {"sm_timeline_h200"} == draw.FIGURES.keys()


def assert_self_contained(path):
    """It is XML that loads and runs nothing, and is small enough to be shown in a README."""
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    for element in root.iter():
        assert element.tag.split("}")[-1] not in {"image", "script", "foreignObject"}
        for name, value in element.attrib.items():
            assert not name.endswith("href") or value.startswith("#")
            assert "url(" not in value.replace("url(#", "")
    assert "@import" not in text and "<!DOCTYPE" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("name", draw.FIGURES)
def test_committed_figures_are_self_contained(name):
    assert_self_contained(ROOT / draw.FOLDER / f"{name}.svg")


@pytest.mark.parametrize("name", draw.FIGURES)
def test_figures_are_written_the_same_every_time(name, tmp_path, capsys):
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        draw.main([name, "--folder", str(folder)])
        written.append((folder / f"{name}.svg").read_bytes())
    assert written[0] == written[1]
    assert f"{name}.svg" in capsys.readouterr().out


def test_fragments_hold_every_element_once_and_c_lies_as_a_does():
    held = mma_fragments()
    for name, shape in {"C": (16, 8), "A": (16, 16), "B": (16, 8)}.items():
        cells = [cell for holding in held[name] for cell in holding.cells]
        assert sorted(cells) == list(itertools.product(*map(range, shape)))
    left_of_a = [(h.lane, h.cells) for h in held["A"] if h.cells[0][1] < 8]
    assert left_of_a == [(h.lane, h.cells) for h in held["C"]]
    assert doctest.testmod(fragments) == (0, 1)


def test_the_figure_of_fragments_shows_a_lane_in_every_pair():
    figure, numbers = draw.mma_fragments()
    assert [axes.get_title()[0] for axes in figure.axes] == list(numbers) == ["C", "A", "B"]
    for axes, held in zip(figure.axes, numbers.values(), strict=True):
        texts = [text.get_text() for text in axes.texts]
        lanes = sorted(int(text) for text in texts if text.isdigit())
        assert lanes == sorted(lane for lane, _, _ in held)
        assert {register for _, register, _ in held} <= set(texts)


def test_the_curve_follows_the_theorem():
    """The larger the problem against its tiles, the nearer to a slope of -1; S and P stay."""
    _, numbers = draw.hbm_curve()
    slopes = {
        name.split(":")[0]: np.diff(np.log(y)) / np.diff(np.log(memory))
        for name, (memory, y) in numbers.items()
    }
    standard, fa1, fa2, theorem = slopes.values()
    np.testing.assert_allclose(theorem, -1)
    np.testing.assert_allclose(fa1, -1, atol=0.03)
    np.testing.assert_allclose(fa2, -1, atol=0.03)
    assert (np.diff(standard) > 0).all() and standard[-1] > -0.3
    for rung in ("fa2_fewer_flops", "fa2_seq_parallel"):
        problem, config = Problem(1, 1, 1, 4096, 4096, 64), TileConfig(64, 64, 64)
        counts, split_q = predict(rung, problem, config), predict("fa2_split_q", problem, config)
        for field in ("global_load_bytes", "global_store_bytes"):
            assert getattr(counts, field) == getattr(split_q, field)


def test_an_unknown_figure_is_refused(capsys):
    with pytest.raises(SystemExit):
        draw.main(["nothing"])
    assert f"figure 'nothing': must be one of {', '.join(draw.FIGURES)}" in capsys.readouterr().err


def test_charts_draw_every_block_in_a_lane_of_its_own():
    timeline = schedule([3, 1, 2, 2, 1], multiprocessors=2, slots=2)
    figure = figures.draw_timeline({"one": timeline, "two": schedule([9], 2, 2)}, "title")
    chart = figure.axes[0]
    corners = [p.reshape(-1, 5, 2) for p in (patch.get_path().vertices for patch in chart.patches)]
    bars = np.concatenate(corners)
    assert len(bars) == timeline.blocks
    areas = [np.ptp(bar[:, 0]) * np.ptp(bar[:, 1]) for bar in bars]
    assert sum(areas) == pytest.approx(9 / 2 * (1 - 2 * figures.timelines.GAP))
    for a, b in itertools.combinations(bars, 2):
        low = np.maximum(a.min(axis=0), b.min(axis=0))
        high = np.minimum(a.max(axis=0), b.max(axis=0))
        assert not (high - low > 1e-9).all(), "two blocks overlap"
    assert chart.get_xlim() == (0, 3) and figure.axes[1].get_xlim() == (0, 9)
    assert "time axes differ" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][2] == "no block"
    assert "5 blocks" in chart.get_title()


def test_charts_can_share_the_time():
    timelines = {"long": schedule([9], 2, 2), "short": schedule([1], 2, 2)}
    figure = figures.draw_timeline(timelines, "title", same_time_axis=True)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 9)}
    assert figure.get_suptitle() == "title"


@pytest.mark.filterwarnings("error")
def test_a_span_of_nothing_is_drawn(tmp_path):
    figure = figures.draw_timeline({"nothing": schedule([0, 0], 2, 2)}, "title")
    figures.save_svg(figure, tmp_path / "nothing.svg", {})
    assert figure.axes[0].get_title() == "nothing\n2 blocks"


def test_points_are_labelled_and_ticks_stand_at_them():
    figure = figures.draw_curves({"a": ([2, 3.5], [1, 4])}, "t", "x", "y", points=["8", "16"])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["8", "16"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "3.5"]


def test_curves_have_labels_and_logarithmic_axes(tmp_path):
    curves = {"FA1 & FA2": ([16, 32, 64], [4e6, 2e6, 1e6]), "<standard>": ([16, 64], [8e6, 8e6])}
    figure = figures.draw_curves(curves, "traffic", "tile rows", "HBM traffic (bytes)")
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(curves)
    path = tmp_path / "curves.svg"
    numbers = {label: [list(x), list(y)] for label, (x, y) in curves.items()}
    figures.save_svg(figure, path, numbers)
    assert_self_contained(path)
    assert figures.read_numbers(path) == numbers
    assert "HBM traffic (bytes)" in path.read_text(encoding="utf-8")


def test_figures_refuse_what_they_cannot_show(tmp_path):
    with pytest.raises(ValueError, match="timelines={}"):
        figures.draw_timeline({}, "title")
    for wrong in (schedule([1], 1, 1), [schedule([1], 1, 1)]):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"timelines is a {kind}: must be a mapping"):
            figures.draw_timeline(wrong, "title")
    with pytest.raises(TypeError, match=r"timelines\['a'\] is a str: must be a Timeline"):
        figures.draw_timeline({"a": "b"}, "title")
    with pytest.raises(ValueError, match="curves={}"):
        figures.draw_curves({}, "title", "x", "y")
    for x, y in (([1], [0]), ([1, 2], [1]), ([], [])):
        with pytest.raises(ValueError, match=r"curves\['a'\].*all positive"):
            figures.draw_curves({"a": (x, y)}, "title", "x", "y")
    (tmp_path / "plain.svg").write_text("<svg/>")
    with pytest.raises(ValueError, match="must be an SVG file that save_svg has written"):
        figures.read_numbers(tmp_path / "plain.svg")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    def refuse(name, *rest):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(figures.style, "import_module", refuse)
    with pytest.raises(ModuleNotFoundError, match=r"fa2_numba\[notebooks\]"):
        figures.draw_timeline({"one": schedule([1], 1, 1)}, "title")


def test_importing_figures_does_not_import_matplotlib():
    program = "import sys, fa2_numba.lessons.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
