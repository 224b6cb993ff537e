"""flash_attn's functions on NumPy, CuPy, Numba and torch arrays: check, plan, launch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from numbers import Real

import numpy as np
from numba import cuda

from fa2_numba.arrays import DTYPES, Array, describe, of_library
from fa2_numba.config import TileConfig
from fa2_numba.constants import MAX_GRID_X, MAX_GRID_YZ, MAX_HEAD_DIM
from fa2_numba.errors import ArgumentError, ArgumentTypeError
from fa2_numba.ladder import Rung, choose_rung, tiles_for
from fa2_numba.launch import (
    ForwardTensors,
    GpuMachine,
    KernelLaunch,
    SimulatorMachine,
    gpu_available,
)
from fa2_numba.simulator import Report, RunTooLongError, Simulator
from fa2_numba.staging import GpuPlan, gpu_workspace, stage
from fa2_numba.tensor_core_config import TensorCoreConfig

MAX_AXIS = 2**31 - 1
"""Kernels count rows, heads and batch elements in 32 bits."""

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

SIMULATED_SECONDS_PER_MULTIPLY_ADD = {
    TileConfig: {True: 4e-6, False: 1e-6},
    TensorCoreConfig: {True: 1.5e-6, False: 1e-6},
}
"""What a simulated multiply-add of Q K^T or P V costs, all in, by the kind of tiles and with the
checks on and off. A thread does one at a time, a tensor-core instruction 1024 or 2048."""

COUNTING_FACTOR = 3
"""How many times longer a run takes at most that is counted."""

REMEMBERED = 1024
"""So many kinds of calls are remembered, with what was found out about each."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Layouts of q, k and v that go together, of which there is one object each.

    q_repeats: whether some elements of q may lie at one address.
    """

    layouts: tuple[tuple, tuple, tuple]
    dtype: str
    q_repeats: bool


_problems: dict[tuple[tuple, tuple, tuple], Problem] = {}


def flash_attn_func(
    q: object,
    k: object,
    v: object,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: object = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    rung: str = "auto",
    machine: str | Simulator = "auto",
    out: object = None,
    return_lse: bool = False,
    report: bool = False,
) -> object:
    """Exact attention, softmax(softmax_scale Q K^T) V, by one rung of the ladder.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim), all float32,
    float16 or bfloat16, head_dim 1 to 256, heads a multiple of kv_heads (query head h reads
    key-value head h // (heads / kv_heads)). NumPy arrays (bfloat16 by ml_dtypes), CuPy arrays,
    Numba device arrays, torch CPU or CUDA tensors; any strides. Values that no query may see must
    be finite all the same: 0 x NaN is NaN in P V.

    softmax_scale: defaults to 1 / sqrt(head_dim).
    causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right alignment).
    deterministic: accepted; the forward pass always is.
    window_size: (-1, -1), or (-1, 0) for causal; other windows are NotImplementedError so far.
    dropout_p, softcap, alibi_slopes: NotImplementedError if used; not built yet.
    rung: an id of `ladder.RUNGS`, or "auto" for the highest one that runs on the device.
    machine: "auto" (the GPU that holds the arrays; for host arrays the GPU if there is one, else
    the simulator), "gpu", "simulator", or a `Simulator` with its own options.
    out: an array to write the result into; like q in library, device, shape and dtype, any strides.
        It must be writable and share no memory with q, k or v. Refused arguments leave it as it is.
    report: also return what the kernels did, counted by the simulator; no GPU can tell.

    Returns out like q; with return_lse (out, lse); with return_attn_probs (out, lse, S_dmask) where
    S_dmask is empty, as flash_attn's is without dropout. lse: (batch, heads, seqlen_q) float32,
    the natural logarithm of the softmax denominator. A query that sees no key gets out = 0 and
    lse = -inf (FlashAttention-2 itself returns +inf there). With report, a `Report` comes last.

    Kernels on a GPU run asynchronously on the library's current stream. Raises `ArgumentError` (a
    ValueError) or TypeError before any launch, naming the argument, its value and the rule.
    """
    causal = _check_options(dropout_p, causal, window_size, softcap, alibi_slopes)
    q, k, v = describe("q", q), describe("k", k), describe("v", v)
    problem = _problem(q, k, v)
    scale = _check_scale(softmax_scale, q)
    place = _choose_machine(machine, q, report)
    chosen = choose_rung(rung, q.dtype, place.limits.compute_capability)

    out = _output(out, q, k, v, problem)
    batch, seqlen_q, heads, _ = q.shape
    lse = q.library.empty((batch, heads, seqlen_q), "float32", q.device)
    lse = of_library("lse", lse, q.library)
    reports = []
    if 0 in q.shape or 0 in k.shape:
        q.library.fill(out.value, 0.0)
        q.library.fill(lse.value, -math.inf)
    else:
        reports = _forward(problem, chosen, place, (q, k, v, out, lse), scale, causal)

    results = [out.value]
    if return_lse or return_attn_probs:
        results.append(lse.value)
    if return_attn_probs:
        results.append(q.library.empty((0,), q.dtype, q.device))
    if report:
        results.append(replace(sum(reports, Report(chosen.name)), name=chosen.name))
    return tuple(results) if len(results) > 1 else results[0]


def _forward(
    problem: Problem,
    rung: Rung,
    machine: GpuMachine | SimulatorMachine,
    arrays: tuple[Array, ...],
    softmax_scale: float,
    causal: bool,
) -> list[Report]:
    """Run the rung's launches for q, k, v, out, lse on `machine`; returns its reports."""
    q, _, _, out, lse = arrays
    how = rung, softmax_scale, causal
    with machine.activate():
        if q.device is not None and not isinstance(machine, SimulatorMachine):
            plan = _gpu_plan(problem, out.layout, lse.layout, machine.device, *how)
            allocate = partial(gpu_workspace, q.library, q.device)
            plan.run(machine, arrays, allocate)
            return []
        there = stage({array.name: array for array in arrays}, ("out", "lse"), machine)
        views = [there.views[array.name] for array in arrays]
        launches = _plan(*how, q.dtype, machine, views, there.allocate)
        reports = machine.run(launches)
        there.finish()
        return reports


@lru_cache(REMEMBERED)
def _gpu_plan(
    problem: Problem, out: tuple, lse: tuple, device: int, rung: Rung, scale: float, causal: bool
) -> GpuPlan:
    """The launches for arrays of these layouts on the current GPU."""
    machine, dtype = GpuMachine(device), problem.dtype
    plan = partial(_plan, rung, scale, causal, dtype, machine)
    return GpuPlan((*problem.layouts, out, lse), plan, machine)


def _plan(
    rung: Rung,
    softmax_scale: float,
    causal: bool,
    dtype: str,
    machine: GpuMachine | SimulatorMachine,
    views: Sequence[object],
    allocate: Callable[[tuple[int, ...]], object],
) -> list[KernelLaunch]:
    """The rung's launches for arrays as kernels on `machine` take them."""
    tensors = ForwardTensors(*views, np.float32(softmax_scale), causal, dtype, allocate)
    config = tiles_for(rung, tensors.Q.shape[3], machine.limits)
    if isinstance(machine, SimulatorMachine):
        _refuse_hours(machine.simulator, tensors, config)
    launches = rung.plan_forward(tensors, config)
    _check_grids(launches, rung, tensors)
    return launches


def _check_grids(launches: list[KernelLaunch], rung: Rung, tensors: ForwardTensors) -> None:
    for launch in launches:
        if launch.grid[0] > MAX_GRID_X or max((1, *launch.grid[1:])) > MAX_GRID_YZ:
            raise ArgumentError(
                f"q of shape {tensors.Q.shape}, k of shape {tensors.K.shape}: rung {rung.name} "
                f"would need a grid of {launch.grid} blocks; CUDA allows {MAX_GRID_X} x "
                f"{MAX_GRID_YZ} x {MAX_GRID_YZ}"
            )


def _refuse_hours(
    simulator: Simulator, tensors: ForwardTensors, config: TileConfig | TensorCoreConfig
) -> None:
    batch, seqlen_q, heads, _ = tensors.Q.shape
    # Threads compute whole tiles, also where those reach past the end.
    rows = math.ceil(seqlen_q / config.block_m) * config.block_m
    cols = math.ceil(tensors.K.shape[1] / config.block_n) * config.block_n
    depth = config.padded_dim if isinstance(config, TensorCoreConfig) else config.head_dim
    # Q K^T and P V; a rung that skips hidden tiles needs about half of it when causal.
    multiply_adds = 2 * batch * heads * rows * cols * depth
    seconds = SIMULATED_SECONDS_PER_MULTIPLY_ADD[type(config)][simulator.checks]
    estimate = multiply_adds * seconds * (COUNTING_FACTOR if simulator.counts else 1)
    if simulator.max_seconds is not None and estimate > simulator.max_seconds:
        raise RunTooLongError(
            f"q of shape {tensors.Q.shape}, k of shape {tensors.K.shape} would take about "
            f"{estimate:.0f} s in the simulator; the limit is {simulator.max_seconds:g} s. Use a "
            "smaller problem, or machine=Simulator(max_seconds=None) to run it all the same"
        )


def _choose_machine(
    machine: str | Simulator, q: Array, report: bool
) -> GpuMachine | SimulatorMachine:
    if not isinstance(report, (bool, np.bool_)):
        raise ArgumentTypeError(f"report={report!r}: must be True or False")
    if isinstance(machine, Simulator):
        return SimulatorMachine(replace(machine, counts=bool(report)))
    if not isinstance(machine, str) or machine not in ("auto", "gpu", "simulator"):
        raise ArgumentError(
            f"machine={machine!r}: must be 'auto', 'gpu', 'simulator' or a Simulator"
        )
    on_gpu = q.device is not None or (machine != "simulator" and gpu_available())
    if machine == "gpu" and not on_gpu:
        raise ArgumentError("machine='gpu': no GPU here; `python -m fa2_numba doctor` says why")
    if machine == "simulator" or not on_gpu:
        return SimulatorMachine(Simulator(counts=bool(report)))
    if report:
        raise ArgumentError(
            f"report=True, machine={machine!r}: would run on a GPU; must be machine='simulator' or "
            "a Simulator, which can count"
        )
    if q.device is None:
        # Host arrays travel on the default stream; their library may not even know of GPUs.
        return GpuMachine(cuda.get_current_device().id)
    return _gpu_machine(q.device, q.library.stream(q.device))


@lru_cache(REMEMBERED)
def _gpu_machine(device: int, stream: int) -> GpuMachine:
    return GpuMachine(device, stream)


def _check_options(
    dropout_p: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: object,
) -> bool:
    """Refuse bad options, then options not built yet; returns whether the mask is causal."""
    if not 0.0 <= _number("dropout_p", dropout_p) < 1.0:
        raise ArgumentError(f"dropout_p={dropout_p!r}: must be at least 0 and below 1")
    if not math.isfinite(_number("softcap", softcap)):
        raise ArgumentError(f"softcap={softcap!r}: must be finite (0 is off)")
    if not isinstance(causal, (bool, np.bool_)):
        raise ArgumentTypeError(f"causal={causal!r}: must be True or False")
    left, right = _window_bounds(window_size)
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p={dropout_p}: dropout is not built yet")
    if softcap > 0.0:
        raise NotImplementedError(f"softcap={softcap}: soft-capping is not built yet")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: ALiBi is not built yet; must be None")
    if left >= 0 or (right > 0 and not causal):
        raise NotImplementedError(f"window_size={window_size}: sliding windows are not built yet")
    # (-1, 0) is the causal mask by another name; causal overrides the right bound.
    return bool(causal) or right == 0


def _window_bounds(window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"window_size={window_size!r}: must be two integers (left, right), negative = unbounded"
        ) from None
    return left, right


def _check_scale(softmax_scale: float | None, q: Array) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if not abs(_number("softmax_scale", softmax_scale)) <= LARGEST_FLOAT32:
        raise ArgumentError(f"softmax_scale={softmax_scale!r}: must be finite in float32, or None")
    return float(softmax_scale)


def _number(name: str, value: object) -> float:
    """The value of a real argument (infinity above the floats); True is no number here."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{name}={value!r}, a {type(value).__qualname__}: must be a real number"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _problem(q: Array, k: Array, v: Array) -> Problem:
    """What q, k and v are together, or an error; layouts seen before are not checked again."""
    layouts = q.layout, k.layout, v.layout
    problem = _problems.get(layouts)
    if problem is None:
        _check_arrays(q, k, v)
        if len(_problems) >= REMEMBERED:
            _problems.clear()
        problem = _problems[layouts] = Problem(layouts, q.dtype, q.overlaps_itself)
    for array in (q, k, v):
        if array.library.tracks_gradient(array.value):
            raise NotImplementedError(
                f"{array.name} requires a gradient: the backward pass is not built yet; "
                "detach it or use torch.no_grad()"
            )
    return problem


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    for array in (q, k, v):
        if len(array.shape) != 4:
            raise ArgumentError(
                f"{array.name}: shape {array.shape}; must be (batch, seqlen, heads, head_dim)"
            )
        if max(array.shape) > MAX_AXIS:
            raise ArgumentError(
                f"{array.name}: shape {array.shape}; no axis may be longer than {MAX_AXIS}"
            )
    _check_kinds(q, k, v)
    if k.shape != v.shape:
        raise ArgumentError(f"v: shape {v.shape}; must be that of k, {k.shape}")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"k: batch {k.shape[0]}; must be that of q, {q.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"k: head dim {k.shape[3]}; must be that of q, {q.shape[3]}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(f"q: head dim {q.shape[3]}; must be 1 to {MAX_HEAD_DIM}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads if kv_heads else heads:
        raise ArgumentError(f"q: {heads} heads; must be a multiple of k's {kv_heads} heads")


def _check_kinds(q: Array, k: Array, v: Array) -> None:
    """One dtype, one library, one device that can read them."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: all three must have one dtype, "
            f"{', '.join(DTYPES)}"
        )
    for array in (k, v):
        _check_same_place(array, q)
    for array in (q, k, v):
        _check_aligned(array)


def _check_same_place(array: Array, q: Array) -> None:
    if array.library is not q.library:
        raise ArgumentTypeError(
            f"{array.name}: of {type(array.value).__module__}; q is of {type(q.value).__module__}, "
            "and all arrays must be of one library"
        )
    if array.device != q.device:
        where = ["on the host" if d is None else f"on GPU {d}" for d in (array.device, q.device)]
        raise ArgumentError(f"{array.name}: {where[0]}; q is {where[1]}, and all must be together")


def _check_aligned(array: Array) -> None:
    if array.device is not None and not array.aligned:
        raise ArgumentError(
            f"{array.name}: address {array.address:#x}, strides {array.strides} bytes; on a GPU "
            f"all must be multiples of the size of a {array.dtype}"
        )


def _output(value: object, q: Array, k: Array, v: Array, problem: Problem) -> Array:
    """A new output array, or the caller's own after checks."""
    if value is None:
        # In the memory order of q; plain where q repeats elements and so has no order to keep.
        library = q.library
        new = (
            library.empty(q.shape, q.dtype, q.device)
            if problem.q_repeats
            else library.empty_like(q.value)
        )
        return of_library("out", new, library)
    out = describe("out", value)
    _check_same_place(out, q)
    if out.dtype != q.dtype:
        raise ArgumentTypeError(f"out: {out.dtype}; must be that of q, {q.dtype}")
    if out.shape != q.shape:
        raise ArgumentError(f"out: shape {out.shape}; must be that of q, {q.shape}")
    _check_aligned(out)
    if not out.library.writable(value):
        raise ArgumentError("out: a read-only array; must be writable")
    if out.library.tracks_gradient(value):
        raise ArgumentError("out: requires a gradient; must be a plain tensor to write into")
    if out.overlaps_itself:
        raise ArgumentError(
            f"out: shape {out.shape}, strides {out.strides} bytes; no two elements may share an "
            "address, as those of a broadcast array do"
        )
    for other in (q, k, v):
        if out.shares_memory_with(other):
            raise ArgumentError(f"out: shares memory with {other.name}, which kernels still read")
    return out
