"""Run one rung through `flash_attn_func`, and judge what comes out."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import numpy as np
from numba import cuda

from fa2_numba.demo.heads import attention_weights, row_sum_error
from fa2_numba.demo.problem import Problem
from fa2_numba.interface import flash_attn_func
from fa2_numba.ladder import Rung
from fa2_numba.simulator import Simulator
from fa2_numba.testing import Comparison, compare_attention, poisoned

ROW_SUM_ALLOWANCE = 2
"""An lse that is off by x changes the sum of its row of P by x; so may float32 scores."""


@dataclass(frozen=True)
class Verdict:
    """How one rung did. Without `out`, `lse` and `P` it did not finish, and `trouble` says why.

    seconds: of the whole call, on a GPU with compilation and copies; P: (heads, tokens, tokens).
    """

    rung: Rung
    machine: str
    seconds: float
    out: Comparison | None = None
    lse: Comparison | None = None
    P: np.ndarray | None = None
    trouble: str = ""

    @property
    def row_sum_error(self) -> float:
        """How far a row of P is from summing to 1."""
        return math.nan if self.P is None else row_sum_error(self.P)

    @property
    def row_sum_allowed(self) -> float:
        """How far it may be."""
        return math.nan if self.lse is None else ROW_SUM_ALLOWANCE * self.lse.allowed

    @property
    def passed(self) -> bool:
        """Whether out, lse and the sums of P are all within what is allowed; NaN is not."""
        finished = self.out is not None and self.lse is not None
        rows = self.row_sum_error <= self.row_sum_allowed
        return bool(finished and self.out.passed and self.lse.passed and rows)

    def complaints(self) -> list[str]:
        """One line for each thing that is wrong."""
        if self.trouble:
            return [self.trouble]
        parts = (("out", self.out), ("lse", self.lse))
        found = [f"{name}: {part}" for name, part in parts if not part.passed]
        if not self.row_sum_error <= self.row_sum_allowed:
            error, allowed = self.row_sum_error, self.row_sum_allowed
            found.append(f"rows of P miss 1 by {error:.3g}, which is not <= {allowed:.3g}")
        return found


@dataclass(frozen=True)
class Attempt:
    """What a rung left behind, on the host: out and lse, or the trouble that stopped it.

    buffers: what the rung itself wrote to.
    """

    rung: Rung
    machine: str
    seconds: float
    out: np.ndarray | None = None
    lse: np.ndarray | None = None
    buffers: tuple[object, ...] = ()
    trouble: str = ""


def attempt(rung: Rung, problem: Problem, machine: str) -> Attempt:
    """Run a rung on "gpu" or "simulator"; whatever it raises becomes its trouble.

    Keep every attempt until the last rung has run, and judge only then: a buffer that holds a right
    lse and is freed would come back as the lse of the next rung, which need not write it to pass.
    """
    start = time.perf_counter()
    try:
        buffers = _attend(rung.name, problem, machine)
        # Copied now: after an error of a later rung the GPU may give nothing back.
        out, lse = map(_on_host, buffers)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
        return Attempt(rung, machine, time.perf_counter() - start, trouble=trouble)
    return Attempt(rung, machine, time.perf_counter() - start, out, lse, buffers)


def _attend(rung: str, problem: Problem, machine: str) -> tuple[object, object]:
    """out and lse, once they are computed; where the kernel does not write, out stays NaN."""
    q, k, v = problem.q, problem.k, problem.v
    out = poisoned(q.shape, q.dtype)
    options = {"causal": True, "rung": rung, "return_lse": True}
    if machine == "simulator":
        simulator = Simulator(progress=sys.stderr.isatty())
        return flash_attn_func(q, k, v, machine=simulator, out=out, **options)
    q, k, v, out = (cuda.to_device(array) for array in (q, k, v, out))
    results = flash_attn_func(q, k, v, machine="gpu", out=out, **options)
    cuda.synchronize()
    return results


def _on_host(array: object) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.copy_to_host()


def judge(tried: Attempt, problem: Problem) -> Verdict:
    """Compare what a rung left behind with exact attention in float64."""
    if tried.trouble:
        return Verdict(tried.rung, tried.machine, tried.seconds, trouble=tried.trouble)
    out, lse = tried.out, tried.lse
    q, k, v = problem.q, problem.k, problem.v
    out_verdict, lse_verdict = compare_attention(out, lse, q, k, v, causal=True)
    P = attention_weights(q, k, lse)
    return Verdict(tried.rung, tried.machine, tried.seconds, out_verdict, lse_verdict, P)
