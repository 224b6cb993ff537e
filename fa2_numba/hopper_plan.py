"""What `fa3_hopper` does on the host: tensor maps, the grid, and how scores are scaled."""

from __future__ import annotations

import numpy as np

from fa2_numba.constants import MAX_GRID_X
from fa2_numba.device.wgmma import WGMMA_M
from fa2_numba.errors import ArgumentError
from fa2_numba.hopper_config import HopperConfig
from fa2_numba.launch import ForwardTensors, KernelLaunch, as_bits
from fa2_numba.tensor_core_plan import split_scale
from fa2_numba.tensor_maps import TensorMap, TileCounter


def plan_forward_with(
    make_forward, tensors: ForwardTensors, config: HopperConfig
) -> list[KernelLaunch]:
    """The launch that computes O and LSE.

    Arguments of the kernel: tensor maps of Q, K, V and O; LSE as in `ForwardTensors`; the tile
    counter; seqlen_q, seqlen_k, heads, query heads a key-value head, and heads of all batch
    elements (int32); the scales of `split_scale` (float32).
    """
    Q, K, V, O = map(as_bits, (tensors.Q, tensors.K, tensors.V, tensors.O))
    score_scale, exponent_scale, scale_first = split_scale(tensors.softmax_scale)
    batch, seqlen_q, heads, _ = Q.shape
    kv_heads, seqlen_k = K.shape[2], K.shape[1]
    tiles = batch * heads * -(-seqlen_q // config.block_m)
    if tiles > MAX_GRID_X:
        raise ArgumentError(f"q of shape {Q.shape}: {tiles} tiles; must be at most {MAX_GRID_X}")
    blocks = min(tiles, config.max_blocks) if config.persistent else tiles
    sizes = seqlen_q, seqlen_k, heads, heads // kv_heads, batch * heads
    return [
        KernelLaunch(
            kernel=make_forward(config, tensors.dtype, tensors.causal, scale_first),
            grid=(blocks,),
            threads=config.num_threads,
            shared_bytes=config.shared_bytes,
            arguments=(
                TensorMap(Q, config.block_m),
                TensorMap(K, config.block_n),
                TensorMap(V, config.block_n),
                TensorMap(O, WGMMA_M),
                tensors.LSE,
                TileCounter(),
                *map(np.int32, sizes),
                score_scale,
                exponent_scale,
            ),
        )
    ]
