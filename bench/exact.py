"""Exact attention of some heads of a large problem, on the GPU that holds it: the bench's gate.

The oracle of the package is NumPy's; for heads of 16k tokens it would take minutes. Here torch
computes the same in float64, some rows of S at a time, and tests hold it equal to the oracle. The
rule that allows an error is the package's (`fa2_numba.testing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa2_numba.testing import Comparison

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 2048
"""So many rows of S are there at a time: they fit the GPU beside all the rest."""

Outputs = tuple["Tensor", ...]
"""O; or dQ, dK and dV."""


@dataclass(frozen=True)
class Sample:
    """A head of K and V, and the heads of Q that share it: what their O and gradients should be.

    exact, rounded: O, dQ (heads, seqlen, head_dim), dK, dV (seqlen_k, head_dim).
    """

    batch: int
    kv_head: int
    heads: slice
    exact: Outputs
    rounded: Outputs

    def judge(self, outputs: Outputs) -> list[Comparison]:
        """Compare these heads of O, or of dQ, dK and dV (batch, seqlen, heads, head_dim)."""
        of_queries, *of_keys = outputs
        parts = [of_queries[self.batch, :, self.heads].transpose(0, 1)]
        parts += [x[self.batch, :, self.kv_head] for x in of_keys]
        chosen = slice(1, None) if of_keys else slice(1)
        wanted = zip(parts, self.exact[chosen], self.rounded[chosen], strict=True)
        return [compare(*three) for three in wanted]


def make_samples(inputs: Sequence[Tensor], causal: bool) -> list[Sample]:
    """The first and the last head of K and V, of Q, K, V, dO (batch, seqlen, heads, head_dim)."""
    q, k, _, _ = inputs
    group = q.shape[2] // k.shape[2]
    samples = []
    for batch, kv_head in sorted({(0, 0), (k.shape[0] - 1, k.shape[2] - 1)}):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        of_queries = [x[batch, :, heads].transpose(0, 1) for x in (inputs[0], inputs[3])]
        of_keys = [x[batch, :, kv_head] for x in inputs[1:3]]
        values = (of_queries[0], *of_keys, of_queries[1])
        samples.append(
            Sample(batch, kv_head, heads, exact(*values, causal), rounded(*values, causal))
        )
    return samples


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Outputs:
    """O, dQ, dK, dV in float64; Q and dO are (heads, seqlen, head_dim), K and V without heads."""
    return _attention(*(x.double() for x in (q, k, v, dout)), causal, lambda x: x)


def rounded(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Outputs:
    """The same in float32; what enters a product, and the results, rounded to the dtype of q."""
    wide = (x.float() for x in (q, k, v, dout))
    found = _attention(*wide, causal, lambda x: x.to(q.dtype).float())
    return tuple(x.to(q.dtype) for x in found)


def _attention(
    Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, causal: bool, rounded: Callable[[Tensor], Tensor]
) -> Outputs:
    """`FA2 Alg. 1` and `FA2 Alg. 2` as formulas, CHUNK rows of a head's S at a time."""
    import torch

    (heads, seqlen, head_dim), seqlen_k = Q.shape, K.shape[0]
    scale = 1 / math.sqrt(head_dim)
    O, dQ, dK, dV = (torch.zeros_like(x) for x in (Q, Q, K, V))
    last_key = torch.arange(seqlen, device=Q.device) + seqlen_k - seqlen
    keys = torch.arange(seqlen_k, device=Q.device)
    for head in range(heads):
        for first in range(0, seqlen, CHUNK):
            rows = slice(first, min(first + CHUNK, seqlen))
            S = scale * (Q[head, rows] @ K.T)  # (CHUNK, seqlen_k)
            if causal:
                S.masked_fill_(keys > last_key[rows, None], -math.inf)
            P = S.softmax(dim=1)
            O[head, rows] = rounded(rounded(P) @ V)
            D = (dO[head, rows] * O[head, rows]).sum(dim=1, keepdim=True)
            dS = rounded(P * (dO[head, rows] @ V.T - D))
            dV += rounded(P).T @ dO[head, rows]
            dQ[head, rows] = scale * (dS @ K)
            dK += scale * (dS.T @ Q[head, rows])
    return O, dQ, dK, dV


def compare(actual: Tensor, exact: Tensor, rounded: Tensor) -> Comparison:
    """`fa2_numba.testing.compare` where the tensors are, for whole heads of long sequences."""
    import torch

    error, reference = ((x.double() - exact).abs().flatten() for x in (actual, rounded))
    # NaN compares as neither larger nor smaller: rank it above every number.
    worst = error.nan_to_num(nan=math.inf).argmax()
    place = torch.unravel_index(worst, exact.shape)
    return Comparison(
        error=error[worst].item(),
        reference_error=reference.max().item(),
        rounding=torch.finfo(actual.dtype).eps * exact.abs().max().item(),
        worst=tuple(index.item() for index in place),
        actual=actual.flatten()[worst].item(),
        exact=exact.flatten()[worst].item(),
    )


def judge(outputs: Outputs, samples: list[Sample]) -> Comparison:
    """The worst of all comparisons, error over what is allowed; one that failed comes first."""
    verdicts = [verdict for sample in samples for verdict in sample.judge(outputs)]
    return max(verdicts, key=lambda verdict: (not verdict.passed, verdict.error / verdict.allowed))
