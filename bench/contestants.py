"""Who is measured: the rungs of the ladder, and what a user would pick instead.

A contestant is given Q, K, V and dO (batch, seqlen, heads, head_dim) on the GPU, and runs one
direction in each call. What is ours writes into given arrays; peers take memory from torch's cache.
"""

from __future__ import annotations

import importlib
import math
import runpy
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench import timing
from bench.problems import BACKWARD, BOTH, DIRECTIONS, FORWARD, LADDER, Problem
from fa2_numba import flash_attn_backward, flash_attn_func
from fa2_numba.ladder import RUNGS, cuda_core_rungs

if TYPE_CHECKING:
    from torch import Tensor

OURS = "fa2_tensor_core"
DETERMINISTIC = f"{OURS}_deterministic"
"""Its backward pass with the same bits in every run."""
BACKENDS = {
    "torch_flash": "FLASH_ATTENTION",
    "torch_cudnn": "CUDNN_ATTENTION",
    "torch_efficient": "EFFICIENT_ATTENTION",
    "torch_math": "MATH",
}
"""Peer -> the `SDPBackend` of torch's scaled_dot_product_attention."""
PACKAGES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn.cute"}
"""Peer -> the module whose flash_attn_func it is."""
CUPY, TRITON = "cupy", "triton"
PEERS = (*BACKENDS, CUPY, *PACKAGES, TRITON)
NAMES = (*RUNGS, DETERMINISTIC, *PEERS)

Run = Callable[[], tuple["Tensor", ...]]
"""Runs once; returns (O,), or (dQ, dK, dV)."""
Attention = Callable[["Tensor", "Tensor", "Tensor", bool], "Tensor"]
"""(q, k, v, causal) -> O, differentiable by torch."""


def is_ours(name: str) -> bool:
    """Whether it is a rung of this package."""
    return name.removesuffix("_deterministic") in RUNGS


def missing_peers(triton: Path | None) -> dict[str, str]:
    """Peers that this machine does not have -> why."""
    packages = {CUPY: CUPY, **PACKAGES}
    missing = {name: "not installed" for name, module in packages.items() if not _found(module)}
    return missing if triton else missing | {TRITON: "no file given (--triton)"}


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module would be in
        return False


def runs(
    problem: Problem, direction: str, inputs: Sequence[Tensor], names: Iterable[str], triton: Path
) -> dict[str, Run]:
    """The contestants of these names that compete on a problem in a direction."""
    q, k, v, _ = inputs
    found: dict[str, Run] = {}
    for name in names:
        if is_ours(name):
            if name in _rungs(problem, direction):
                found[name] = _rung_run(name, direction, inputs, problem.causal)
        elif name == CUPY:
            if direction == FORWARD:
                found[name] = partial(_cupy, q, k, v, problem.causal)
        else:
            attention = _peer(name, triton)
            found[name] = PEER_RUNS[direction](attention, inputs, problem.causal)
    return found


def _rungs(problem: Problem, direction: str) -> list[str]:
    """All that the device runs where the ladder is measured, else those that can keep up."""
    slow = [] if problem.group == LADDER else cuda_core_rungs()
    capability = timing.compute_capability()
    rungs = [name for name, rung in RUNGS.items() if rung.runs(problem.dtype, capability)]
    if direction == FORWARD:
        return [name for name in rungs if name not in slow]
    rungs = [name for name in rungs if RUNGS[name].plan_backward and name not in slow]
    return [*rungs, DETERMINISTIC] if direction == BACKWARD else rungs


def _rung_run(name: str, direction: str, inputs: Sequence[Tensor], causal: bool) -> Run:
    """A rung; the forward pass before a backward pass alone runs with its first call."""
    torch = timing.import_torch()
    q, k, v, dout = inputs
    rung = name.removesuffix("_deterministic")
    options = {"causal": causal, "rung": rung}
    out = torch.full_like(q, math.nan)
    forward = partial(flash_attn_func, q, k, v, out=out, **options)
    if direction == FORWARD:
        return lambda: (forward(),)
    buffers = {
        f"d{x}": torch.full_like(like, math.nan) for x, like in {"q": q, "k": k, "v": v}.items()
    }
    backward = partial(
        flash_attn_backward, dout, q, k, v, deterministic=name != rung, **options, **buffers
    )
    once = cache(partial(forward, return_lse=True))
    each_time = partial(forward, return_lse=True)
    return lambda: backward(*(each_time if direction == BOTH else once)())


def _peer(name: str, triton: Path | None) -> Attention:
    if name in BACKENDS:
        return partial(_torch_attention, BACKENDS[name])
    if name == TRITON:
        return partial(_triton_attention, runpy.run_path(str(triton))["attention"])
    return partial(_flash_attn, importlib.import_module(PACKAGES[name]).flash_attn_func)


def _torch_attention(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    options = {"is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}
    with sdpa_kernel(getattr(SDPBackend, backend)), warnings.catch_warnings():
        # It warns of each backend that is not used, and why; the error is enough.
        warnings.simplefilter("ignore")
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, **options)
    return out.transpose(1, 2)


def _triton_attention(attention: Callable, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return attention(*heads_first, causal, 1 / math.sqrt(q.shape[3])).transpose(1, 2)


def _flash_attn(function: Callable, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = function(q, k, v, causal=causal)
    return out[0] if isinstance(out, tuple) else out  # FlashAttention-4 returns LSE, too


def _forward(attention: Attention, inputs: Sequence[Tensor], causal: bool) -> Run:
    torch = timing.import_torch()

    def run() -> tuple[Tensor]:
        with torch.no_grad():
            return (attention(*inputs[:3], causal),)

    return run


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs[:3]]


def _backward(attention: Attention, inputs: Sequence[Tensor], causal: bool) -> Run:
    torch, leaves = timing.import_torch(), _leaves(inputs)
    forward = cache(partial(attention, *leaves, causal))
    return lambda: torch.autograd.grad(forward(), leaves, inputs[3], retain_graph=True)


def _both(attention: Attention, inputs: Sequence[Tensor], causal: bool) -> Run:
    torch, leaves = timing.import_torch(), _leaves(inputs)
    return lambda: torch.autograd.grad(attention(*leaves, causal), leaves, inputs[3])


PEER_RUNS = dict(zip(DIRECTIONS, (_forward, _backward, _both), strict=True))


def _cupy(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor]:
    """Attention as one writes it in NumPy: products in float16, softmax in float32."""
    import cupy as cp
    import torch

    if q.dtype != torch.float16:
        raise RuntimeError("CuPy has no such dtype")
    group = q.shape[2] // k.shape[2]
    with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        Q, K, V = (cp.from_dlpack(x.transpose(1, 2).contiguous()) for x in (q, k, v))
        K, V = (cp.repeat(x, group, axis=1) if group > 1 else x for x in (K, V))
        try:
            S = (Q @ K.swapaxes(2, 3)).astype(cp.float32) * q.shape[3] ** -0.5
            if causal:
                # Assigning through a mask would make the host wait.
                seqlen, seqlen_k = S.shape[2:]
                visible = cp.tri(seqlen, seqlen_k, seqlen_k - seqlen, dtype=bool)
                S = cp.where(visible, S, cp.float32(-cp.inf))
            P = cp.exp(S - S.max(axis=3, keepdims=True))
            P /= P.sum(axis=3, keepdims=True)
            O = P.astype(cp.float16) @ V
        except cp.cuda.memory.OutOfMemoryError as error:
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        return (torch.from_dlpack(O).transpose(1, 2),)
