"""Exact attention in NumPy: what every kernel of the ladder is compared with.

This is standard attention, the algorithm of FA2 section 2.2, one (batch, head) at a time::

    S = scale * Q K^T           then soft-cap, ALiBi bias and mask, in this order
    lse_i = ln sum_j exp(S_ij)  over the visible keys j; -inf if there is none
    P_ij = exp(S_ij - lse_i)    0 where the key is not visible
    O = (Z * P) V               Z_ij = 1 / (1 - p) if dropout keeps the entry, else 0

and its gradient, with D_i = sum_d dO_id O_id::

    dV = (Z * P)^T dO           dP = Z * (dO V^T)
    dS = P * (dP - D)           times 1 - tanh^2 where a soft-cap is used
    dQ = scale * dS K           dK = scale * dS^T Q

Arrays are laid out (batch, seqlen, heads, head_dim), as in flash_attn. With fewer key/value heads
Hk than query heads H (GQA, MQA), query head h reads key/value head h // (H // Hk).
`attention_forward` and `attention_backward` compute in float64. Each has a `..._same_precision`
that makes the roundings a kernel has to make, so it shows how much error is fair.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Window = tuple[int, int]


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool = False, window_size: Window = (-1, -1)
) -> np.ndarray:
    """Say which keys each query may look at.

    Query i stands at key position ``i + seqlen_k - seqlen_q``: the last query is aligned with the
    last key. With ``window_size=(left, right)`` it sees the keys from `left` before that position
    to `right` after it, both included. A negative side is unbounded; `causal` sets right to 0.

    Returns a bool array (seqlen_q, seqlen_k), True = visible.

    >>> visible(2, 3, causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    >>> visible(3, 2, causal=True).astype(int)
    array([[0, 0],
           [1, 0],
           [1, 1]])
    """
    left, right = window_size
    if causal:
        right = 0
    distance = _distance(seqlen_q, seqlen_k)
    mask = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if left >= 0:
        mask &= distance <= left
    if right >= 0:
        mask &= distance >= -right
    return mask


def alibi_bias(slope: np.floating, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Return ``-slope * |distance|``, (seqlen_q, seqlen_k), in the dtype of `slope`.

    The distance is that from query to key with the last query aligned with the last key
    (Press et al. 2022, "Train Short, Test Long").
    """
    return -slope * np.abs(_distance(seqlen_q, seqlen_k)).astype(slope.dtype)


def apply_softcap(x: np.ndarray, softcap: float) -> np.ndarray:
    """Squash scores into (-softcap, softcap) by tanh; ``softcap <= 0`` leaves them alone."""
    return softcap * np.tanh(x / softcap) if softcap > 0 else x


def softcap_derivative(x: np.ndarray, softcap: float) -> np.ndarray:
    """Return the derivative of `apply_softcap` at each x."""
    return 1 - np.tanh(x / softcap) ** 2 if softcap > 0 else np.ones_like(x)


def stable_exponentials(S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``exp(S - m)``, the row maxima m and the row sums l of the exponentials.

    S is (Sq, Sk) with -inf at hidden keys. Subtracting m keeps every exponential at most 1. A row
    without any visible key has no maximum; m = 0 stands in, since -inf - (-inf) would be NaN, and
    the row comes out as zeros with l = 0.
    """
    m = S.max(axis=1, initial=-np.inf)  # (Sq,)
    m = np.where(m == -np.inf, 0, m).astype(S.dtype)
    exponentials = np.exp(S - m[:, None])  # (Sq, Sk)
    return exponentials, m, exponentials.sum(axis=1)


def log_sum_exp(m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """Return ``m + ln l`` (FA2 section 3.1): natural logarithm, -inf where l is 0."""
    logarithm = np.full_like(l, -np.inf)
    np.log(l, out=logarithm, where=l > 0)
    return m + logarithm


def reciprocal(x: np.ndarray) -> np.ndarray:
    """Return ``1 / x``, and 0 where x is 0, so that a row without visible keys stays 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def softmax(S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P (Sq, Sk), whose rows sum to 1, and lse (Sq,) of the scores S (Sq, Sk).

    A row without any visible key is 0 in P and -inf in lse.
    """
    exponentials, m, l = stable_exponentials(S)
    return exponentials * reciprocal(l)[:, None], log_sum_exp(m, l)


def matmul_in_order(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return A @ B (M, N), each entry summed as one GPU thread sums it: term after term.

    NumPy's own product sums in whatever order is fastest on this computer, with smaller errors.
    Here the answer is the same everywhere, and its error is what a plain kernel loop would make.
    """
    total = np.zeros((A.shape[0], B.shape[1]), A.dtype)
    for column, row in zip(A.T, B, strict=True):
        total += np.outer(column, row)
    return total


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention in float64 (FA2 section 2.2).

    Args:
        q: (B, Sq, H, D), any float dtype, bfloat16 of ml_dtypes included.
        k: (B, Sk, Hk, D); H must be a multiple of Hk.
        v: (B, Sk, Hk, D).
        softmax_scale: factor on Q K^T; D ** -0.5 if None.
        causal: hide the keys to the right of the query, see `visible`.
        window_size: keys visible to the left and to the right, see `visible`.
        softcap: bound on the scores by tanh, off if not positive.
        alibi_slopes: (H,) or (B, H), one slope per query head, see `alibi_bias`.
        dropout_p: probability of dropping an entry of P; kept entries are scaled by 1 / (1 - p).
        dropout_mask: (B, H, Sq, Sk) bool, True = kept. Required if dropout_p > 0.

    Returns:
        out: float64 (B, Sq, H, D); 0 for a query without visible keys.
        lse: float64 (B, H, Sq), natural logarithm of the row sums before dropout; -inf for a
            query without visible keys.

    Raises:
        ValueError: if shapes do not fit together or dropout_p is not in [0, 1).
    """
    problem = _problem(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask
    )
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.zeros(problem.lse_shape)
    for b, h, kv_head in problem.heads():
        Q, K, V = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head]
        S = problem.biased_and_masked(problem.softmax_scale * (Q @ K.T), b, h)  # (Sq, Sk)
        P, lse[b, h] = softmax(S)
        out[b, :, h] = (problem.dropout_factor(b, h) * P) @ V
    return out, lse


def attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of ``sum(dout * out)`` in float64 (FA2 section 2.2).

    Args:
        dout: (B, Sq, H, D), the gradient of the loss with respect to `out`.
        q: (B, Sq, H, D), and all further arguments as for `attention_forward`.
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        softmax_scale: see `attention_forward`, as are the options below.
        causal: see above.
        window_size: see above.
        softcap: see above.
        alibi_slopes: see above; no gradient is computed for them.
        dropout_p: see above.
        dropout_mask: the mask used in the forward pass.

    Returns:
        dq: float64 (B, Sq, H, D).
        dk: float64 (B, Sk, Hk, D), summed over the query heads that share a key/value head.
        dv: float64 (B, Sk, Hk, D), summed likewise.
        A query without visible keys contributes exactly 0 to all three.

    Raises:
        ValueError: as `attention_forward`, or if dout does not have the shape of q.
    """
    problem = _problem(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask
    )
    _check_dout(dout, q)
    dout, q, k, v = (np.asarray(x, dtype=np.float64) for x in (dout, q, k, v))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    scale = problem.softmax_scale
    for b, h, kv_head in problem.heads():
        Q, K, V, dO = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head], dout[b, :, h]
        scaled = scale * (Q @ K.T)  # (Sq, Sk)
        P, _ = softmax(problem.biased_and_masked(scaled, b, h))
        Z = problem.dropout_factor(b, h)
        O = (Z * P) @ V
        D = (dO * O).sum(axis=1, keepdims=True)  # (Sq, 1), FA2 Alg. 2 line 4
        dP = Z * (dO @ V.T)
        dS = P * (dP - D) * softcap_derivative(scaled, problem.softcap)
        dq[b, :, h] = scale * (dS @ K)
        dk[b, :, kv_head] += scale * (dS.T @ Q)
        dv[b, :, kv_head] += (Z * P).T @ dO
    return dq, dk, dv


def attention_forward_same_precision(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention with the roundings of a kernel, to learn how large their error is.

    S, the softmax and the sums of O are float32, added up by `matmul_in_order`. The exponentials
    are rounded to the dtype of the inputs before they meet V, as a tensor core requires; l is
    summed before that rounding. O is divided by l once, at the end, and rounded.

    Args:
        q: (B, Sq, H, D), float32, float16 or bfloat16; all arguments as for `attention_forward`.
        k: (B, Sk, Hk, D), same dtype.
        v: (B, Sk, Hk, D), same dtype.
        softmax_scale: see `attention_forward`, as are the options below.
        causal: see above.
        window_size: see above.
        softcap: see above.
        alibi_slopes: see above.
        dropout_p: see above.
        dropout_mask: see above.

    Returns:
        out: (B, Sq, H, D) in the dtype of q; 0 for a query without visible keys.
        lse: float32 (B, H, Sq), natural logarithm; -inf for a query without visible keys.

    Raises:
        ValueError: as `attention_forward`.
    """
    problem = _problem(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask
    )
    return _forward_same_precision(problem, q, k, v)


def _forward_same_precision(
    problem: "_Problem", q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    dtype = np.asarray(q).dtype
    q, k, v = (np.asarray(x, dtype=np.float32) for x in (q, k, v))
    out, lse = np.zeros(q.shape, dtype), np.zeros(problem.lse_shape, np.float32)
    for b, h, kv_head in problem.heads():
        Q, K, V = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head]
        scaled = problem.softmax_scale * matmul_in_order(Q, K.T)  # (Sq, Sk)
        S = problem.biased_and_masked(scaled, b, h)
        exponentials, m, l = stable_exponentials(S)
        rounded = exponentials.astype(dtype).astype(np.float32)
        # The dropout factor 1 / (1 - p) joins 1 / l, so it never passes through the low precision.
        unscaled = matmul_in_order(rounded * problem.kept(b, h), V)
        factor = reciprocal(l) / np.float32(1 - problem.dropout_p)
        out[b, :, h] = (unscaled * factor[:, None]).astype(dtype)
        lse[b, h] = log_sum_exp(m, l)
    return out, lse


def attention_backward_same_precision(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients in the precision of a kernel (FA2 Alg. 2).

    out and lse are those of `attention_forward_same_precision`, out rounded to the dtype of the
    inputs. Everything else is float32, added up by `matmul_in_order`. P and dS, which is not scaled
    yet, are rounded to the dtype of the inputs before they enter a product, as a tensor core
    requires. dK and dV of a key/value head are summed over its query heads in float32. dQ, dK and
    dV are rounded once, at the end.

    Args:
        dout: (B, Sq, H, D), in the dtype of q; all further arguments as for `attention_backward`.
        q: (B, Sq, H, D), float32, float16 or bfloat16.
        k: (B, Sk, Hk, D), same dtype.
        v: (B, Sk, Hk, D), same dtype.
        softmax_scale: see `attention_forward`, as are the options below.
        causal: see above.
        window_size: see above.
        softcap: see above.
        alibi_slopes: see above.
        dropout_p: see above.
        dropout_mask: see above.

    Returns:
        dq, dk, dv: as `attention_backward`, in the dtype of q.

    Raises:
        ValueError: as `attention_backward`.
    """
    options = softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask
    problem = _problem(q, k, v, *options)
    _check_dout(dout, q)
    dtype = np.asarray(q).dtype
    out, lse = _forward_same_precision(problem, q, k, v)
    dout, q, k, v, out = (np.asarray(x, dtype=np.float32) for x in (dout, q, k, v, out))
    gradients = dq, dk, dv = tuple(np.zeros(x.shape, np.float32) for x in (q, k, v))
    scale = problem.softmax_scale
    for b, h, kv_head in problem.heads():
        Q, K, V, dO = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head], dout[b, :, h]
        scaled = scale * matmul_in_order(Q, K.T)  # (Sq, Sk)
        P = _probabilities(problem.biased_and_masked(scaled, b, h), lse[b, h])
        D = matmul_in_order(dO * out[b, :, h], np.ones((dO.shape[1], 1), np.float32))  # (Sq, 1)
        kept, factor = problem.kept(b, h), np.float32(1 / (1 - problem.dropout_p))
        dP = factor * (matmul_in_order(dO, V.T) * kept)
        dS = P * (dP - D) * softcap_derivative(scaled, problem.softcap)
        P, dS = ((x).astype(dtype).astype(np.float32) for x in (P * kept, dS))
        dv[b, :, kv_head] += factor * matmul_in_order(P.T, dO)
        dq[b, :, h] = scale * matmul_in_order(dS, K)
        dk[b, :, kv_head] += scale * matmul_in_order(dS.T, Q)
    return tuple(x.astype(dtype) for x in gradients)


def uncancelled_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    dropout_p: float = 0.0,
    dropout_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return how large dQ and dK would be if they were made of D alone, added up without signs.

    dP and D are float32 sums, each with its own error, and ``dS = P * (dP - D)`` keeps both errors
    however small the difference is: with a single key it is 0. With ``D = sum_d |dO_id O_id|`` one
    rounding of the sums moves dQ and dK by eps times::

        scale * (P * D) |K|         scale * (P * D)^T |Q|

    Args:
        dout: (B, Sq, H, D); all arguments as for `attention_backward`.
        q: (B, Sq, H, D).
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        softmax_scale: see `attention_forward`, as are the options below.
        causal: see above.
        window_size: see above.
        softcap: see above.
        alibi_slopes: see above.
        dropout_p: see above.
        dropout_mask: see above.

    Returns:
        float64 (B, Sq, H, D) and (B, Sk, Hk, D).
    """
    options = softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, dropout_mask
    problem = _problem(q, k, v, *options)
    dout, q, k, v = (np.asarray(x, dtype=np.float64) for x in (dout, q, k, v))
    dq, dk = np.zeros(q.shape), np.zeros(k.shape)
    scale = problem.softmax_scale
    for b, h, kv_head in problem.heads():
        Q, K, V, dO = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head], dout[b, :, h]
        P, _ = softmax(problem.biased_and_masked(scale * (Q @ K.T), b, h))
        O = (problem.dropout_factor(b, h) * P) @ V
        terms = abs(scale) * P * np.abs(dO * O).sum(axis=1, keepdims=True)  # (Sq, Sk)
        dq[b, :, h] = terms @ np.abs(K)
        dk[b, :, kv_head] += terms.T @ np.abs(Q)
    return dq, dk


def _probabilities(S: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return ``exp(S - lse)`` (Sq, Sk), 0 in a row whose lse is -inf (FA2 Alg. 2 line 11)."""
    return np.exp(S - np.where(lse == -np.inf, 0, lse)[:, None])


def _check_dout(dout: np.ndarray, q: np.ndarray) -> None:
    if np.shape(dout) != np.shape(q):
        raise ValueError(
            f"dout has shape {np.shape(dout)}; it must have the shape of q, {np.shape(q)}"
        )


def _distance(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """How far each key lies to the left of its aligned query, int (Sq, Sk)."""
    aligned = np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    return aligned - np.arange(seqlen_k)[None, :]


@dataclass(frozen=True)
class _Problem:
    """Checked sizes and options of one call, ready to be asked for one (batch, head)."""

    batch: int
    num_heads: int
    num_kv_heads: int
    mask: np.ndarray  # (Sq, Sk) bool, True = visible
    softmax_scale: float
    softcap: float
    slopes: np.ndarray | None  # (B, H)
    dropout_p: float
    dropout_mask: np.ndarray | None  # (B, H, Sq, Sk) bool, True = kept

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.num_heads, self.mask.shape[0]

    def heads(self) -> Iterator[tuple[int, int, int]]:
        """Yield every (batch, query head, key/value head it reads)."""
        for b in range(self.batch):
            for h in range(self.num_heads):
                yield b, h, h // (self.num_heads // self.num_kv_heads)

    def biased_and_masked(self, scaled: np.ndarray, b: int, h: int) -> np.ndarray:
        """Turn scale * Q K^T (Sq, Sk) into S: soft-cap, then ALiBi, then the mask."""
        S = apply_softcap(scaled, self.softcap)
        if self.slopes is not None:
            S = S + alibi_bias(self.slopes[b, h].astype(S.dtype), *S.shape)
        return np.where(self.mask, S, S.dtype.type(-np.inf))

    def kept(self, b: int, h: int) -> np.ndarray | bool:
        """Return True where dropout keeps the entry of P."""
        return True if self.dropout_mask is None else self.dropout_mask[b, h]

    def dropout_factor(self, b: int, h: int) -> np.ndarray | float:
        """Return Z: 1 / (1 - p) where the entry of P is kept, 0 where it is dropped."""
        return self.kept(b, h) / (1 - self.dropout_p)


def _problem(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: np.ndarray | None,
    dropout_p: float,
    dropout_mask: np.ndarray | None,
) -> _Problem:
    """Check the arguments the three public functions share."""
    batch, seqlen_q, num_heads, head_dim, seqlen_k, num_kv_heads = _sizes(q, k, v)
    if alibi_slopes is not None:
        alibi_slopes = np.asarray(alibi_slopes)
        if alibi_slopes.shape not in ((num_heads,), (batch, num_heads)):
            raise ValueError(
                f"alibi_slopes has shape {alibi_slopes.shape}; "
                f"it must be {(num_heads,)} or {(batch, num_heads)}"
            )
        alibi_slopes = np.broadcast_to(alibi_slopes, (batch, num_heads))
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1")
    if dropout_mask is None and dropout_p > 0:
        raise ValueError(f"dropout_p is {dropout_p}; a positive value needs a dropout_mask")
    if dropout_mask is not None:
        dropout_mask = np.asarray(dropout_mask, dtype=bool)
        expected = (batch, num_heads, seqlen_q, seqlen_k)
        if dropout_mask.shape != expected:
            raise ValueError(f"dropout_mask has shape {dropout_mask.shape}; it must be {expected}")
    return _Problem(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mask=visible(seqlen_q, seqlen_k, causal, window_size),
        softmax_scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        softcap=float(softcap),
        slopes=alibi_slopes,
        dropout_p=float(dropout_p),
        dropout_mask=dropout_mask,
    )


def _sizes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[int, int, int, int, int, int]:
    """Return B, Sq, H, D, Sk, Hk, or raise ValueError if the shapes do not fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if np.ndim(array) != 4:
            raise ValueError(
                f"{name} has shape {np.shape(array)}; it must be (batch, seqlen, heads, head_dim)"
            )
    batch, seqlen_q, num_heads, head_dim = np.shape(q)
    _, seqlen_k, num_kv_heads, _ = np.shape(k)
    if np.shape(k) != (batch, seqlen_k, num_kv_heads, head_dim):
        raise ValueError(
            f"k has shape {np.shape(k)}; batch and head_dim must be those of q, {np.shape(q)}"
        )
    if np.shape(v) != np.shape(k):
        raise ValueError(f"v has shape {np.shape(v)}; it must have the shape of k, {np.shape(k)}")
    if head_dim < 1:
        raise ValueError(f"q has shape {np.shape(q)}; head_dim must be at least 1")
    if num_heads and (not num_kv_heads or num_heads % num_kv_heads):
        raise ValueError(
            f"q has {num_heads} heads and k has {num_kv_heads}; "
            "the heads of q must be a multiple of the heads of k"
        )
    return batch, seqlen_q, num_heads, head_dim, seqlen_k, num_kv_heads
