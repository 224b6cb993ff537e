"""What the tensor-core rungs do on the host: how wide copies may be, how scores are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fa2_numba.constants import LOG2_E
from fa2_numba.device.tensor_core_tiles import CP_ASYNC
from fa2_numba.launch import ForwardTensors, GpuArray, KernelLaunch, as_bits
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import CHUNK_BYTES, ELEMENT_BYTES, TensorCoreConfig

MAX_ROW_STRIDE = 2**31 - 1
"""Bytes from row to row that are a factor of 32 bits."""


def plan_launch(
    make_forward: Callable,
    tensors: ForwardTensors,
    config: TensorCoreConfig,
    blocks: int,
    workspaces: tuple = (),
) -> KernelLaunch:
    """The launch of a rung's kernel on a grid of so many blocks."""
    score_scale, exponent_scale, scale_first = split_scale(tensors.softmax_scale)
    arrays = (tensors.Q, tensors.K, tensors.V, tensors.O)
    width = copy_bytes(arrays, config)
    return KernelLaunch(
        kernel=make_forward(config, tensors.dtype, tensors.causal, width, scale_first),
        grid=(blocks,),
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        arguments=(*map(as_bits, arrays), tensors.LSE, *workspaces, score_scale, exponent_scale),
    )


def copy_bytes(arrays: Sequence[object], config: TensorCoreConfig | BackwardConfig) -> int:
    """The widest pieces in which rows of all arrays can be copied: 16, 8, 4 bytes, or an element.

    Every address must be a multiple of it, every stride that is ever taken too, and a row's
    elements neighbours. What sm_75 loads at once cannot end in the middle of 16 bytes.
    """
    axes = [axis for x in arrays for axis in zip(x.strides[:3], x.shape[:3], strict=True)]
    strides = [stride for stride, size in axes if size > 1]
    in_rows = all(array.strides[3] == ELEMENT_BYTES or array.shape[3] == 1 for array in arrays)
    if not in_rows or any(abs(array.strides[1]) > MAX_ROW_STRIDE for array in arrays):
        return ELEMENT_BYTES
    aligned = math.gcd(CHUNK_BYTES, *map(address, arrays), *strides)
    if config.turing:
        whole = config.head_dim * ELEMENT_BYTES % CHUNK_BYTES == 0
        return CHUNK_BYTES if aligned == CHUNK_BYTES and whole else ELEMENT_BYTES
    return aligned if aligned in CP_ASYNC else ELEMENT_BYTES


def address(array: np.ndarray | GpuArray) -> int:
    """Of the first element, in bytes."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.address


def split_scale(softmax_scale: np.float32) -> tuple[np.float32, np.float32, bool]:
    """score_scale, exponent_scale and scale_first, which says whether the former is not 1.

    With them, S = score_scale Q K^T and P = 2^(exponent_scale (S - m)).

    A positive softmax_scale goes into the exponent, where it costs nothing, and log2 e with it. But
    the largest score is only the largest exponent if the factor is positive: otherwise scores are
    scaled first.
    """
    with np.errstate(over="ignore"):
        scale = softmax_scale * LOG2_E
    if 0 < scale < math.inf:
        return np.float32(1), scale, False
    return scale, np.float32(1), True


def kernel_name(
    rung: str,
    config: TensorCoreConfig | BackwardConfig,
    dtype: str,
    causal: bool,
    width: int,
    scale_first: bool,
) -> str:
    """The rung and all that its kernel is built for, as profilers and tracebacks show it."""
    narrow = f"_x{width}" if width < CHUNK_BYTES else ""
    return f"{rung}_{config}_{dtype}{narrow}" + "_scaled" * scale_first + "_causal" * causal
