"""The ladder: every rung by its id. Tests, the demo and benches iterate over it.

A rung's id is its file in `kernels/`, its API argument, its test id and its name in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from fa2_numba import config, tensor_maps
from fa2_numba.arrays import Array
from fa2_numba.config import DeviceLimits, TileConfig
from fa2_numba.errors import ArgumentError
from fa2_numba.hopper_config import choose_hopper_tiles
from fa2_numba.kernels import (
    fa1_sliced_k,
    fa1_tensor_core,
    fa2_fewer_flops,
    fa2_seq_parallel,
    fa2_split_q,
    fa2_split_q_backward,
    fa2_tensor_core,
    fa2_tensor_core_backward,
    fa3_hopper,
    standard,
    standard_backward,
)
from fa2_numba.launch import BackwardTensors, ForwardTensors, KernelLaunch
from fa2_numba.tensor_core_backward_config import choose_backward_tiles
from fa2_numba.tensor_core_config import choose_sliced_k_tiles, choose_split_q_tiles


@dataclass(frozen=True, eq=False)
class Rung:
    """One kernel of the ladder.

    idea: what it changes against the rung below; source: where the paper describes it;
    dtypes: of the arrays it takes, each with the lowest compute capability that runs it;
    choose_tiles: its tile configuration for a head dim on a device; plan_forward: the launches that
    compute O and LSE with it; choose_backward_tiles, plan_backward: the same for dQ, dK and dV,
    None where a rung has no backward pass; architecture: the one compute capability that runs it,
    None where later ones do as well; refusal: why it cannot read an array with such an address,
    shape and strides, None if it can; by_name_only: "auto" does not take it.
    """

    name: str
    idea: str
    source: str
    dtypes: Mapping[str, tuple[int, int]]
    choose_tiles: Callable[[int, DeviceLimits], object]
    plan_forward: Callable[[ForwardTensors, object], list[KernelLaunch]]
    choose_backward_tiles: Callable[[int, DeviceLimits], object] | None = None
    plan_backward: Callable[[BackwardTensors, object], list[KernelLaunch]] | None = None
    architecture: tuple[int, int] | None = None
    refusal: Callable[[object], str | None] = lambda array: None
    by_name_only: bool = False

    def runs(self, dtype: str, compute_capability: tuple[int, int]) -> bool:
        """Whether a device runs it on arrays of a dtype."""
        return (
            dtype in self.dtypes
            and compute_capability >= self.dtypes[dtype]
            and self.architecture in (None, compute_capability)
        )


CUDA_CORE_DTYPES = {"float32": (5, 0), "float16": (5, 0), "bfloat16": (5, 0)}
TENSOR_CORE_DTYPES = {"float16": (7, 5), "bfloat16": (8, 0)}
HOPPER = (9, 0)
HOPPER_DTYPES = {"float16": HOPPER, "bfloat16": HOPPER}


def cuda_core_tiles(head_dim: int, limits: DeviceLimits) -> TileConfig:
    """The tiles of every CUDA-core rung."""
    return config.choose_tiles(head_dim, limits.shared_bytes_per_block)


def cuda_core_backward_tiles(head_dim: int, limits: DeviceLimits) -> TileConfig:
    """The tiles of every CUDA-core backward pass."""
    return config.choose_backward_tiles(head_dim, limits.shared_bytes_per_block)


RUNGS = {
    rung.name: rung
    for rung in (
        Rung(
            "standard",
            "three kernels; S and P live in HBM",
            "FA2 section 2.2",
            CUDA_CORE_DTYPES,
            cuda_core_tiles,
            standard.plan_forward,
            cuda_core_backward_tiles,
            standard_backward.plan_backward,
        ),
        Rung(
            "fa1_sliced_k",
            "tiles and online softmax; one block a head, warps slice K and V",
            "FA1 Alg. 1; FA2 Fig. 3 left",
            CUDA_CORE_DTYPES,
            cuda_core_tiles,
            fa1_sliced_k.plan_forward,
        ),
        Rung(
            "fa2_fewer_flops",
            "loops swapped: O stays on chip, unscaled, and is divided by l once",
            "FA2 Alg. 1, section 3.1",
            CUDA_CORE_DTYPES,
            cuda_core_tiles,
            fa2_fewer_flops.plan_forward,
        ),
        Rung(
            "fa2_seq_parallel",
            "one block a query tile: the grid runs over the sequence too",
            "FA2 section 3.2",
            CUDA_CORE_DTYPES,
            cuda_core_tiles,
            fa2_seq_parallel.plan_forward,
        ),
        Rung(
            "fa2_split_q",
            "warps own rows of Q: no number crosses warps",
            "FA2 section 3.3, Fig. 3 right",
            CUDA_CORE_DTYPES,
            cuda_core_tiles,
            fa2_split_q.plan_forward,
            cuda_core_backward_tiles,
            fa2_split_q_backward.plan_backward,
        ),
        Rung(
            "fa1_tensor_core",
            "the partition of FlashAttention-1 on tensor cores: the baseline",
            "FA1 Alg. 1; PTX mma, ldmatrix, cp.async",
            TENSOR_CORE_DTYPES,
            choose_sliced_k_tiles,
            fa1_tensor_core.plan_forward,
        ),
        Rung(
            "fa2_tensor_core",
            "that of FlashAttention-2: split-Q, with the products in mma instructions",
            "FA2 Alg. 1; PTX mma, ldmatrix, cp.async",
            TENSOR_CORE_DTYPES,
            choose_split_q_tiles,
            fa2_tensor_core.plan_forward,
            choose_backward_tiles,
            fa2_tensor_core_backward.plan_backward,
        ),
        Rung(
            "fa3_hopper",
            "warpgroups have roles: one loads by TMA, the others multiply by wgmma, in turns",
            "FA3 Alg. 1 and 2, section 3; PTX wgmma, cp.async.bulk.tensor, mbarrier",
            HOPPER_DTYPES,
            choose_hopper_tiles,
            fa3_hopper.plan_forward,
            # The code of sm_90a runs on no other architecture, be it a later one.
            architecture=HOPPER,
            refusal=tensor_maps.refusal,
            # Not yet run on a GPU in this form, nor the way to it from `flash_attn_func`.
            by_name_only=True,
        ),
    )
}
"""Rung id -> rung, from the bottom of the ladder to its top."""


def cuda_core_rungs() -> list[str]:
    """The rungs that take float32 arrays, from the bottom of the ladder up."""
    return [name for name, rung in RUNGS.items() if "float32" in rung.dtypes]


def choose_rung(
    rung: str, dtype: str, compute_capability: tuple[int, int], arrays: Iterable[Array] = ()
) -> Rung:
    """The rung of that id, or for "auto" the highest one that takes the dtype on the device.

    arrays: all that it has to read and write.
    """
    return _choose_among(RUNGS, rung, dtype, compute_capability, arrays)


def choose_backward_rung(rung: str, dtype: str, head_dim: int, limits: DeviceLimits) -> Rung:
    """The same for the backward pass, which not every rung has, nor for every head dim."""
    refuse_without_backward(rung)
    rungs = _backward_rungs()
    if rung == "auto":
        rungs = {
            name: one for name, one in rungs.items() if _has_backward_tiles(one, head_dim, limits)
        }
    return _choose_among(rungs, rung, dtype, limits.compute_capability)


def refuse_without_backward(rung: str) -> None:
    """Refuse the id of a rung that has no backward pass."""
    rungs = _backward_rungs()
    if isinstance(rung, str) and rung in RUNGS and rung not in rungs:
        raise ArgumentError(f"rung={rung!r}: has no backward pass; {', '.join(rungs)} have one")


def _backward_rungs() -> dict[str, Rung]:
    return {name: rung for name, rung in RUNGS.items() if rung.plan_backward is not None}


@cache
def _has_backward_tiles(rung: Rung, head_dim: int, limits: DeviceLimits) -> bool:
    try:
        rung.choose_backward_tiles(head_dim, limits)
    except ValueError:
        return False
    return True


def _choose_among(
    rungs: Mapping[str, Rung],
    rung: str,
    dtype: str,
    compute_capability: tuple[int, int],
    arrays: Iterable[Array] = (),
) -> Rung:
    if rung == "auto":
        return _highest_rung(rungs, dtype, compute_capability, arrays)
    if not isinstance(rung, str) or rung not in rungs:
        raise ArgumentError(f"rung={rung!r}: must be 'auto' or one of {', '.join(rungs)}")
    chosen = rungs[rung]
    if dtype not in chosen.dtypes:
        raise ArgumentError(f"rung={rung!r}: takes {', '.join(chosen.dtypes)}, not {dtype}")
    if not chosen.runs(dtype, compute_capability):
        lowest = _dotted(chosen.dtypes[dtype])
        where = f"from compute capability {lowest} on"
        if chosen.architecture is not None:
            where = f"on compute capability {_dotted(chosen.architecture)} only"
        device = _dotted(compute_capability)
        raise ArgumentError(f"rung={rung!r}: takes {dtype} {where}; this device has {device}")
    for array in arrays:
        if (why := chosen.refusal(array)) is not None:
            raise ArgumentError(f"{array.name}: {why} for rung={rung!r}; 'auto' takes another rung")
    return chosen


def _highest_rung(
    rungs: Mapping[str, Rung],
    dtype: str,
    compute_capability: tuple[int, int],
    arrays: Iterable[Array],
) -> Rung:
    for rung in reversed(rungs.values()):
        takes = rung.runs(dtype, compute_capability) and not any(map(rung.refusal, arrays))
        if takes and not rung.by_name_only:
            return rung
    raise ArgumentError(
        f"rung='auto': no rung takes {dtype} on compute capability {_dotted(compute_capability)}"
    )


def _dotted(compute_capability: tuple[int, int]) -> str:
    return ".".join(map(str, compute_capability))


@cache
def tiles_for(rung: Rung, head_dim: int, limits: DeviceLimits) -> object:
    """The tile configuration with which a rung computes a head dim on a device."""
    return rung.choose_tiles(head_dim, limits)


@cache
def backward_tiles_for(rung: Rung, head_dim: int, limits: DeviceLimits) -> object:
    """The tile configuration with which its backward pass computes a head dim on a device."""
    return rung.choose_backward_tiles(head_dim, limits)
