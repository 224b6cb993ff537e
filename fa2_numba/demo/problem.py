"""What the main job computes: causal attention of one layer's first tokens and first heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa2_numba.arrays import DTYPES
from fa2_numba.data import load_smollm2
from fa2_numba.demo.options import Options

HEADS_PER_KV_HEAD = 3


@dataclass(frozen=True)
class Problem:
    """A slice of the data. q: (1, tokens, heads, 64); k, v: (1, tokens, kv_heads, 64)."""

    tokens: tuple[str, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def load(options: Options) -> Problem:
    """The slice that the options ask for, query head h reading key-value head h // 3."""
    layer = load_smollm2(options.layer)
    kv_heads = -(-options.heads // HEADS_PER_KV_HEAD)
    q, k, v = (
        np.ascontiguousarray(array[:, : options.tokens, :heads]).astype(DTYPES[options.dtype])
        for array, heads in ((layer.q, options.heads), (layer.k, kv_heads), (layer.v, kv_heads))
    )
    return Problem(layer.tokens[: options.tokens], q, k, v)
