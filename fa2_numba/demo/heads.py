"""Where the heads look: the weights P, from a kernel's own log-sum-exp and Q K^T.

A flash kernel never stores P; what it keeps, one number a row, is enough to have it back:

    P_ij = exp(softmax_scale q_i . k_j - lse_i)     0 where query i may not see key j
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa2_numba.reference import visible

SHOWN_TOKENS = 3
SHOWN_KEYS = 4
WORD_LETTERS = 4
SINK_SHARE = 0.25
"""A head that gives the first token so much on average uses it as an attention sink."""


@dataclass(frozen=True)
class Look:
    """What one head's query at `position` looks at most: (key position, weight), largest first."""

    position: int
    head: int
    keys: tuple[tuple[int, float], ...]


def attention_weights(q: np.ndarray, k: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """P (heads, seqlen, seqlen) of causal attention, float32, hidden keys 0.

    q: (1, seqlen, heads, head_dim); k: (1, seqlen, kv_heads, head_dim), any float dtype;
    lse: (1, heads, seqlen), natural logarithm.
    """
    seqlen, heads, head_dim = q.shape[1:]
    group = heads // k.shape[2]
    Q = q[0].astype(np.float32).transpose(1, 0, 2)  # (heads, seqlen, head_dim)
    K = k[0].astype(np.float32).transpose(1, 2, 0).repeat(group, axis=0)
    scale = np.float32(1 / math.sqrt(head_dim))
    mask = visible(seqlen, seqlen, causal=True)
    # A wrong lse may overflow; the sums of the rows then tell.
    with np.errstate(over="ignore", invalid="ignore"):
        S = np.where(mask, scale * (Q @ K), -np.float32(np.inf))  # (heads, seqlen, seqlen)
        return np.exp(S - lse[0].astype(np.float32)[:, :, None])


def row_sum_error(P: np.ndarray) -> float:
    """How far the sum of a row of P is from 1 at most; NaN if any weight is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.abs(P.sum(axis=-1) - 1).max())


def looks(P: np.ndarray, tokens: tuple[str, ...]) -> list[Look]:
    """For a few tokens, head by head, the keys with the largest weights."""
    return [
        Look(position, head, _largest(P[head, position]))
        for position in telling_positions(tokens)
        for head in range(P.shape[0])
    ]


def telling_positions(tokens: tuple[str, ...]) -> list[int]:
    """A few tokens spread over the text up to its end, whole words where there are enough.

    >>> telling_positions(("Once", " upon", " a", " time", " there", " was", " a", " king"))
    [1, 3, 7]
    """
    words = [
        position
        for position, token in enumerate(tokens)
        if position and token.strip().isalpha() and len(token.strip()) >= WORD_LETTERS
    ]
    positions = words if len(words) >= SHOWN_TOKENS else list(range(len(tokens)))
    count = min(SHOWN_TOKENS, len(positions))
    return [positions[(i + 1) * len(positions) // count - 1] for i in range(count)]


def _largest(weights: np.ndarray) -> tuple[tuple[int, float], ...]:
    order = np.argsort(-weights, kind="stable")[:SHOWN_KEYS]
    return tuple((int(j), float(weights[j])) for j in order if weights[j] > 0)


def first_token_shares(P: np.ndarray) -> list[float]:
    """Per head, the share of the first token, averaged over the later queries.

    >>> first_token_shares(np.array([[[1.0, 0.0], [0.75, 0.25]]]))
    [0.75]
    """
    later = P[:, 1:, 0]
    return [float(share) for share in later.mean(axis=1)] if later.size else []


def readable(token: str) -> str:
    r"""A token as one printable word: a dot for a space, an escape for a line end.

    >>> readable(" Alice"), readable("\n")
    ('·Alice', '\\n')
    """
    shown = token.replace(" ", "·")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def quoted(token: str) -> str:
    r"""A token as it stands in a sentence or list: in quotes if it has no letter and no digit.

    >>> print(quoted(" Alice"), quoted(","), quoted(' "'), quoted("\n"))
    ·Alice ',' '·"' '\n'
    """
    is_word = any(c.isalnum() for c in token)
    return readable(token) if is_word else repr(token.replace(" ", "·"))
