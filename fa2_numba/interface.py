"""flash_attn's functions on NumPy, CuPy, Numba and torch arrays: check, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from fa2_numba.arrays import Array, describe, of_library
from fa2_numba.checks import (
    REMEMBERED,
    Problem,
    check_options,
    check_scale,
    given_output,
    new_output,
    problem_of,
    refuse_recording,
)
from fa2_numba.ladder import Rung, choose_rung, tiles_for
from fa2_numba.launch import ForwardTensors, GpuMachine, KernelLaunch, SimulatorMachine
from fa2_numba.machines import Machine, check_grids, choose_machine, refuse_hours, run_planned
from fa2_numba.simulator import Report, Simulator
from fa2_numba.staging import Allocate, GpuPlan

FORWARD_PRODUCTS = 2
"""Q K^T and P V."""


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
    rung: an id of `ladder.RUNGS`, or "auto" for the highest one that runs on the device (so far
        without "fa3_hopper", whose addresses and strides must be multiples of 16 bytes).
    machine: "auto" (the GPU that holds the arrays; for host arrays the GPU if there is one, else
    the simulator), "gpu", "simulator", or a `Simulator` with its own options.
    out: an array to write the result into; like q in library, device, shape and dtype, any strides.
        It must be writable and share no memory with q, k or v. Refused arguments leave it as it is.
    report: also return what the kernels did, counted by the simulator; no GPU can tell.

    Returns out like q; with return_lse (out, lse); with return_attn_probs (out, lse, S_dmask) where
    S_dmask is empty, as flash_attn's is without dropout. lse: (batch, heads, seqlen_q) float32,
    the natural logarithm of the softmax denominator. A query that sees no key gets out = 0 and
    lse = -inf (FlashAttention-2 itself returns +inf there). With report, a `Report` comes last.

    Its gradients are what `flash_attn_backward` computes; autograd sees nothing of this function,
    but of `fa2_numba.torch.flash_attn_func`.

    Kernels on a GPU run asynchronously on the library's current stream. Raises `ArgumentError` (a
    ValueError) or TypeError before any launch, naming the argument, its value and the rule.
    """
    causal = check_options(dropout_p, causal, window_size, softcap, alibi_slopes)
    q, k, v = describe("q", q), describe("k", k), describe("v", v)
    problem = problem_of(q, k, v)
    refuse_recording((q, k, v))
    scale = check_scale(softmax_scale, q)
    place = choose_machine(machine, q, report)
    out = _output(out, q, k, v, problem)
    is_empty = 0 in q.shape or 0 in k.shape
    arrays = () if is_empty else (q, k, v, out)
    chosen = choose_rung(rung, q.dtype, place.limits.compute_capability, arrays)

    batch, seqlen_q, heads, _ = q.shape
    lse = q.library.empty((batch, heads, seqlen_q), "float32", q.device)
    lse = of_library("lse", lse, q.library)
    reports = []
    if is_empty:
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


def _output(value: object, q: Array, k: Array, v: Array, problem: Problem) -> Array:
    """A new output array, or the caller's own after checks."""
    if value is None:
        return new_output("out", q, problem.repeats[0])
    return given_output("out", value, q, (q, k, v))


def _forward(
    problem: Problem,
    rung: Rung,
    machine: Machine,
    arrays: tuple[Array, ...],
    softmax_scale: float,
    causal: bool,
) -> list[Report]:
    """Run the rung's launches for q, k, v, out, lse on `machine`; returns its reports."""
    *_, out, lse = arrays
    how = rung, softmax_scale, causal

    def remembered() -> GpuPlan:
        return _gpu_plan(problem, out.layout, lse.layout, machine.device, *how)

    plan = partial(_plan, *how, problem.dtype)
    return run_planned(machine, arrays, ("out", "lse"), plan, remembered)


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
    machine: Machine,
    views: Sequence[object],
    allocate: Allocate,
) -> list[KernelLaunch]:
    """The rung's launches for arrays as kernels on `machine` take them."""
    tensors = ForwardTensors(*views, np.float32(softmax_scale), causal, dtype, allocate)
    config = tiles_for(rung, tensors.Q.shape[3], machine.limits)
    if isinstance(machine, SimulatorMachine):
        refuse_hours(machine.simulator, tensors, config, FORWARD_PRODUCTS)
    launches = rung.plan_forward(tensors, config)
    check_grids(launches, rung.name, tensors)
    return launches
