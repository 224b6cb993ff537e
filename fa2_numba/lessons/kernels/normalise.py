"""Lesson 05: attention of one head that divides O by l after every tile of keys."""

import math

from numba import cuda
from numba.cuda import float32

from fa2_numba.constants import NEG_INF
from fa2_numba.device import device_function
from fa2_numba.lessons.kernels.tiled import HEAD_DIM, KEYS, load_rows


@device_function
def score_keys(S_reg, Q_reg, K_smem, keys, softmax_scale):
    """Scores of a row of Q with the first `keys` rows of K_smem into S_reg; their maximum."""
    m = NEG_INF
    for j in range(keys):
        s = float32(0.0)
        for d in range(HEAD_DIM):
            s += Q_reg[d] * K_smem[j, d]
        S_reg[j] = softmax_scale * s
        m = max(m, S_reg[j])
    return m


@cuda.jit
def normalise_always(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, softmax_scale):
    """O = softmax(softmax_scale Q K^T) V and LSE of one head; one block, a thread owns rows.

    Q, O: (seqlen_q, HEAD_DIM); K, V: (seqlen_k, HEAD_DIM); LSE: (seqlen_q,); float32. The loops
    are those of FlashAttention-2, what happens to O is line 12 of FlashAttention-1.
    """
    K_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    V_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    Q_reg = cuda.local.array(HEAD_DIM, float32)
    O_reg = cuda.local.array(HEAD_DIM, float32)
    S_reg = cuda.local.array(KEYS, float32)
    seqlen_q, seqlen_k = Q_gmem.shape[0], K_gmem.shape[0]

    for first_row in range(0, seqlen_q, cuda.blockDim.x):  # FA2 Alg. 1 line 3
        row = first_row + cuda.threadIdx.x
        m, l = NEG_INF, float32(0.0)  # FA2 Alg. 1 line 5
        for d in range(HEAD_DIM):
            O_reg[d] = float32(0.0)
            if row < seqlen_q:
                Q_reg[d] = Q_gmem[row, d]  # FA2 Alg. 1 line 4
        for first_key in range(0, seqlen_k, KEYS):  # FA2 Alg. 1 line 6
            # Slower threads may still read the previous tile.
            cuda.syncthreads()
            load_rows(K_smem, K_gmem, first_key)  # FA2 Alg. 1 line 7
            load_rows(V_smem, V_gmem, first_key)
            # Every thread reads what all have loaded.
            cuda.syncthreads()
            keys = min(KEYS, seqlen_k - first_key)
            if row < seqlen_q:
                # FA2 Alg. 1 line 8
                m_new = max(m, score_keys(S_reg, Q_reg, K_smem, keys, softmax_scale))
                old = l * math.exp(m - m_new)
                l = old
                for j in range(keys):
                    S_reg[j] = math.exp(S_reg[j] - m_new)
                    l += S_reg[j]
                for d in range(HEAD_DIM):  # FA1 Alg. 1 line 12
                    o = old * O_reg[d]
                    for j in range(keys):
                        o += S_reg[j] * V_smem[j, d]
                    O_reg[d] = o / l
                m = m_new
        if row < seqlen_q:
            for d in range(HEAD_DIM):
                O_gmem[row, d] = O_reg[d]
            LSE_gmem[row] = m + math.log(l)  # FA2 Alg. 1 line 13
