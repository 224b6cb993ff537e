"""Real Q, K and V: two layers of SmolLM2-135M-Instruct reading "Alice in Wonderland"."""

from importlib import resources
from typing import NamedTuple

import numpy as np

LAYERS = (0, 15)


class SmolLM2Layer(NamedTuple):
    """What one attention layer is given; arrays are float16 (batch, seqlen, heads, head_dim)."""

    tokens: tuple[str, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def load_smollm2(layer: int) -> SmolLM2Layer:
    """Load the tokens and the Q, K and V of one layer, rotary embedding applied to Q and K.

    >>> layer = load_smollm2(15)
    >>> layer.tokens[:4]
    ('Alice', ' was', ' beginning', ' to')
    >>> layer.q.shape, layer.k.shape
    ((1, 256, 9, 64), (1, 256, 3, 64))
    """
    if layer not in LAYERS:
        raise ValueError(f"layer={layer!r}: the data holds layers {LAYERS[0]} and {LAYERS[1]}")
    file = resources.files(__name__).joinpath("smollm2_qkv.npz")
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        q, k, v = (arrays[f"{name}_layer{layer}"] for name in "qkv")
        return SmolLM2Layer(tuple(arrays["tokens"].tolist()), q, k, v)
