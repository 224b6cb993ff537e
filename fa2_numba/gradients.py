"""The backward pass on NumPy, CuPy, Numba and torch arrays: check, plan, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from fa2_numba.arrays import Array, describe
from fa2_numba.checks import (
    REMEMBERED,
    Problem,
    check_flag,
    check_like,
    check_options,
    check_scale,
    given_output,
    new_output,
    problem_of,
    refuse_recording,
)
from fa2_numba.ladder import Rung, backward_tiles_for, choose_backward_rung
from fa2_numba.launch import BackwardTensors, GpuMachine, KernelLaunch, SimulatorMachine
from fa2_numba.machines import Machine, check_grids, choose_machine, refuse_hours, run_planned
from fa2_numba.simulator import Report, Simulator
from fa2_numba.staging import Allocate, GpuPlan

BACKWARD_PRODUCTS = 5
"""Q K^T, dO V^T, P^T dO, dS K and dS^T Q."""

NO_DROPOUT = 0.0

OUTPUTS = "dq", "dk", "dv"


def flash_attn_backward(
    dout: object,
    q: object,
    k: object,
    v: object,
    out: object,
    lse: object,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: object = None,
    deterministic: bool = False,
    *,
    rung: str = "auto",
    machine: str | Simulator = "auto",
    dq: object = None,
    dk: object = None,
    dv: object = None,
    report: bool = False,
) -> tuple[object, ...]:
    """The gradients of sum(dout * out), where out is `flash_attn_func`'s, by one rung.

    dout, out: like q in library, device, shape and dtype, any strides; out and lse are what
    `flash_attn_func(..., return_lse=True)` returned for q, k and v under the same options. lse:
    (batch, heads, seqlen_q) float32, -inf (or FlashAttention-2's own +inf) for a query that sees no
    key; such a query adds nothing.
    q, k, v and the options are those of `flash_attn_func`.

    deterministic: whether dq must be the same, bit by bit, in every run; dk and dv always are.
    rung: an id of `ladder.RUNGS` that has a backward pass, or "auto" for the highest one that runs
    on the device.
    dq, dk, dv: arrays to write the results into, each like q, k or v in library, device, shape and
        dtype, any strides. What they held before does not matter. Each must be writable and share
        no memory with another argument. Refused arguments leave them as they are.
    report: also return what the kernels did, counted by the simulator; no GPU can tell.

    Returns (dq, dk, dv), each like q, k or v; with report, a `Report` comes last. dk and dv of a
    key-value head are summed over its query heads in float32 before they are rounded.

    Kernels on a GPU run asynchronously on the library's current stream. Raises `ArgumentError` (a
    ValueError) or TypeError before any launch, naming the argument, its value and the rule.
    """
    causal = check_options(NO_DROPOUT, causal, window_size, softcap, alibi_slopes)
    deterministic = check_flag("deterministic", deterministic)
    q, k, v = describe("q", q), describe("k", k), describe("v", v)
    problem = problem_of(q, k, v)
    inputs = q, k, v, *_of_forward(q, out, lse, dout)
    refuse_recording(inputs)
    scale = check_scale(softmax_scale, q)
    place = choose_machine(machine, q, report)
    chosen = choose_backward_rung(rung, q.dtype, q.shape[3], place.limits)

    outputs = _outputs((dq, dk, dv), inputs, problem)
    reports = []
    if 0 in q.shape or 0 in k.shape:
        for output in outputs:
            output.library.fill(output.value, 0.0)
    else:
        how = chosen, scale, causal, deterministic
        reports = _backward(problem, place, (*inputs, *outputs), how)

    results = [output.value for output in outputs]
    if report:
        results.append(replace(sum(reports, Report(chosen.name)), name=chosen.name))
    return tuple(results)


def _of_forward(q: Array, out: object, lse: object, dout: object) -> tuple[Array, Array, Array]:
    """What goes with the result of a forward pass over q, after checks."""
    out, lse, dout = describe("out", out), describe("lse", lse), describe("dout", dout)
    batch, seqlen_q, heads, _ = q.shape
    for array in (out, dout):
        check_like(array, q.shape, q.dtype, "that of q", q)
    check_like(lse, (batch, heads, seqlen_q), "float32", "as the forward pass returns it", q)
    return out, lse, dout


def _outputs(values: tuple, inputs: tuple[Array, ...], problem: Problem) -> list[Array]:
    """Arrays for dq, dk and dv: the caller's own after checks, new ones for None."""
    likes = inputs[:3]
    given, others = {}, list(inputs)
    for name, value, like in zip(OUTPUTS, values, likes, strict=True):
        if value is not None:
            given[name] = given_output(name, value, like, others)
            others.append(given[name])
    return [
        given.get(name) or new_output(name, like, repeats)
        for name, like, repeats in zip(OUTPUTS, likes, problem.repeats, strict=True)
    ]


How = tuple[Rung, float, bool, bool]
"""The rung, the scale, whether the mask is causal, whether dq has to be deterministic."""


def _backward(
    problem: Problem, machine: Machine, arrays: tuple[Array, ...], how: How
) -> list[Report]:
    """Run the rung's launches for q, k, v, out, lse, dout, dq, dk, dv; returns its reports."""

    def remembered() -> GpuPlan:
        layouts = tuple([array.layout for array in arrays[3:]])
        return _gpu_plan(problem, layouts, machine.device, how)

    return run_planned(machine, arrays, OUTPUTS, partial(_plan, how, problem.dtype), remembered)


@lru_cache(REMEMBERED)
def _gpu_plan(problem: Problem, layouts: tuple[tuple, ...], device: int, how: How) -> GpuPlan:
    """The launches for q, k, v and arrays of these layouts on the current GPU."""
    machine = GpuMachine(device)
    plan = partial(_plan, how, problem.dtype, machine)
    return GpuPlan((*problem.layouts, *layouts), plan, machine)


def _plan(
    how: How, dtype: str, machine: Machine, views: Sequence[object], allocate: Allocate
) -> list[KernelLaunch]:
    """The rung's launches for arrays as kernels on `machine` take them."""
    rung, scale, causal, deterministic = how
    tensors = BackwardTensors(*views, np.float32(scale), causal, deterministic, dtype, allocate)
    config = backward_tiles_for(rung, tensors.Q.shape[3], machine.limits)
    if isinstance(machine, SimulatorMachine):
        refuse_hours(machine.simulator, tensors, config, BACKWARD_PRODUCTS)
    launches = rung.plan_backward(tensors, config)
    check_grids(launches, rung.name, tensors)
    return launches
