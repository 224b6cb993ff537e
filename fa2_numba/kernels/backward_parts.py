"""What the backward passes share: a kernel before their products and one behind them.

    delta:   D = rowsum(dO o O)             one warp a row
    convert: dQ = softmax_scale * sum       one thread an element at a time

D is what softmax subtracts from the gradient of P: with dS = P o (dP - rowsum(P o dP)), the row sum
is that of dO o O, since O = P V and dP = dO V^T. It needs no tile of P, hence a kernel of its own.

A dQ that many blocks add to by atomics is summed in float32, whatever the dtype of the arrays:
`delta` clears the sum, `convert` rounds it.
"""

from functools import cache

from numba import cuda
from numba.cuda import float32

from fa2_numba.config import TileConfig
from fa2_numba.constants import WARP_SIZE
from fa2_numba.device.dtypes import FROM_FLOAT32, TO_FLOAT32
from fa2_numba.device.softmax import make_over_lanes
from fa2_numba.device.tiles import locate_head
from fa2_numba.launch import BackwardTensors, KernelLaunch


@cache
def make_delta(config: TileConfig, dtype: str, clears_dq: bool):
    """The kernel D = rowsum(dO o O), which may also set the float32 sum of dQ to 0.

    Arguments: O, dO as in `BackwardTensors`; D (batch, heads, seqlen_q) float32; dQ_sum float32,
    shaped like dQ (any such array, left as it is, unless clears_dq).
    Grid: (batch x heads, query tiles).
    """
    BLOCK_M, NUM_WARPS = config.block_m, config.num_warps
    to_float32 = TO_FLOAT32[dtype]
    _, sum_over_lanes = make_over_lanes(WARP_SIZE)

    def delta(O_gmem, dO_gmem, D_gmem, dQ_sum_gmem):
        seqlen_q, heads, head_dim = O_gmem.shape[1], O_gmem.shape[2], O_gmem.shape[3]
        batch, head, _ = locate_head(heads, heads)
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        first_row = cuda.blockIdx.y * BLOCK_M
        # A row is one for all lanes of a warp: all of them take part in the shuffles, or none.
        for row in range(first_row + warp, min(first_row + BLOCK_M, seqlen_q), NUM_WARPS):
            total = float32(0.0)
            for d in range(lane, head_dim, WARP_SIZE):
                o = to_float32(O_gmem[batch, row, head, d])
                total += to_float32(dO_gmem[batch, row, head, d]) * o
                if clears_dq:
                    dQ_sum_gmem[batch, row, head, d] = float32(0.0)  # FA2 Alg. 2 line 3
            total = sum_over_lanes(total)
            if lane == 0:
                D_gmem[batch, head, row] = total  # FA2 Alg. 2 line 4

    delta.__name__ = f"backward_delta_{config}_{dtype}" + ("_clears_dq" if clears_dq else "")
    return cuda.jit(delta)


@cache
def make_convert(config: TileConfig, dtype: str):
    """The kernel dQ = softmax_scale * dQ_sum.

    Arguments: dQ_sum float32; dQ as in `BackwardTensors`; softmax_scale (float32).
    Grid: (batch x heads, query tiles).
    """
    BLOCK_M, NUM_WARPS = config.block_m, config.num_warps
    from_float32 = FROM_FLOAT32[dtype]

    def convert(dQ_sum_gmem, dQ_gmem, softmax_scale):
        seqlen_q, heads, head_dim = dQ_gmem.shape[1], dQ_gmem.shape[2], dQ_gmem.shape[3]
        batch, head, _ = locate_head(heads, heads)
        warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
        first_row = cuda.blockIdx.y * BLOCK_M
        for row in range(first_row + warp, min(first_row + BLOCK_M, seqlen_q), NUM_WARPS):
            for d in range(lane, head_dim, WARP_SIZE):
                x = softmax_scale * dQ_sum_gmem[batch, row, head, d]
                dQ_gmem[batch, row, head, d] = from_float32(x)

    convert.__name__ = f"backward_convert_{config}_{dtype}"
    return cuda.jit(convert)


def plan_delta(tensors: BackwardTensors, config: TileConfig, D, dQ_sum=None) -> KernelLaunch:
    """The launch that computes D and clears dQ_sum, if there is one."""
    clears_dq = dQ_sum is not None
    return KernelLaunch(
        kernel=make_delta(config, tensors.dtype, clears_dq),
        grid=query_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=0,
        arguments=(tensors.O, tensors.dO, D, dQ_sum if clears_dq else tensors.dQ),
    )


def plan_convert(tensors: BackwardTensors, config: TileConfig, dQ_sum) -> KernelLaunch:
    """The launch that rounds dQ."""
    return KernelLaunch(
        kernel=make_convert(config, tensors.dtype),
        grid=query_grid(tensors, config),
        threads=config.num_threads,
        shared_bytes=0,
        arguments=(dQ_sum, tensors.dQ, tensors.softmax_scale),
    )


def query_grid(tensors: BackwardTensors, config: TileConfig) -> tuple[int, int]:
    """One block a query tile: (batch x heads, query tiles)."""
    batch, seqlen_q, heads, _ = tensors.Q.shape
    return batch * heads, -(-seqlen_q // config.block_m)


def key_grid(tensors: BackwardTensors, config: TileConfig) -> tuple[int, int]:
    """One block a key tile: (batch x KV heads, key tiles)."""
    batch, seqlen_k, kv_heads, _ = tensors.K.shape
    return batch * kv_heads, -(-seqlen_k // config.block_n)
