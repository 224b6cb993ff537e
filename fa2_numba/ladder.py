"""The ladder: every rung by its id. Tests, the demo and benches iterate over it.

A rung's id is its file in `kernels/`, its API argument, its test id and its name in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa2_numba.config import TileConfig
from fa2_numba.errors import ArgumentError
from fa2_numba.kernels import (
    fa1_sliced_k,
    fa2_fewer_flops,
    fa2_seq_parallel,
    fa2_split_q,
    standard,
)
from fa2_numba.launch import ForwardTensors, KernelLaunch


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    idea: what it changes against the rung below; source: where the paper describes it;
    dtypes: of the arrays it takes; plan_forward: the launches that compute O and LSE.
    """

    name: str
    idea: str
    source: str
    dtypes: tuple[str, ...]
    plan_forward: Callable[[ForwardTensors, TileConfig], list[KernelLaunch]]


CUDA_CORE_DTYPES = ("float32", "float16", "bfloat16")

RUNGS = {
    rung.name: rung
    for rung in (
        Rung(
            "standard",
            "three kernels; S and P live in HBM",
            "FA2 section 2.2",
            CUDA_CORE_DTYPES,
            standard.plan_forward,
        ),
        Rung(
            "fa1_sliced_k",
            "tiles and online softmax; one block a head, warps slice K and V",
            "FA1 Alg. 1; FA2 Fig. 3 left",
            CUDA_CORE_DTYPES,
            fa1_sliced_k.plan_forward,
        ),
        Rung(
            "fa2_fewer_flops",
            "loops swapped: O stays on chip, unscaled, and is divided by l once",
            "FA2 Alg. 1, section 3.1",
            CUDA_CORE_DTYPES,
            fa2_fewer_flops.plan_forward,
        ),
        Rung(
            "fa2_seq_parallel",
            "one block a query tile: the grid runs over the sequence too",
            "FA2 section 3.2",
            CUDA_CORE_DTYPES,
            fa2_seq_parallel.plan_forward,
        ),
        Rung(
            "fa2_split_q",
            "warps own rows of Q: no number crosses warps",
            "FA2 section 3.3, Fig. 3 right",
            CUDA_CORE_DTYPES,
            fa2_split_q.plan_forward,
        ),
    )
}
"""Rung id -> rung, from the bottom of the ladder to its top."""


def choose_rung(rung: str, dtype: str) -> Rung:
    """The rung of that id, or for "auto" the highest one that takes the dtype."""
    if rung == "auto":
        return [candidate for candidate in RUNGS.values() if dtype in candidate.dtypes][-1]
    if not isinstance(rung, str) or rung not in RUNGS:
        raise ArgumentError(f"rung={rung!r}: must be 'auto' or one of {', '.join(RUNGS)}")
    if dtype not in RUNGS[rung].dtypes:
        raise ArgumentError(f"rung={rung!r}: takes {', '.join(RUNGS[rung].dtypes)}, not {dtype}")
    return RUNGS[rung]
