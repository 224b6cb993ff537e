"""A small GPT whose attention is a parameter: pre-norm blocks, as in Radford et al. 2019."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

INITIAL_DEVIATION = 0.02
MLP_WIDTH = 4
"""Columns of an MLP's inside over those of its outside."""

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: Q, K, V and the result are (batch, seqlen, heads, head_dim)."""


BACKENDS = {"torch_flash": "FLASH_ATTENTION", "torch_math": "MATH"}
"""Name -> torch's `SDPBackend`."""


def attention_by_name(name: str) -> AttentionFunction:
    """A name of `BACKENDS`, "fa2_numba" for the rung that is chosen for the GPU, or a rung's id."""
    if name in BACKENDS:
        return partial(_torch_attention, getattr(SDPBackend, BACKENDS[name]))
    from fa2_numba.torch import flash_attn_func

    return partial(flash_attn_func, causal=True, rung="auto" if name == "fa2_numba" else name)


def _torch_attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return out.transpose(1, 2)


class SelfAttention(nn.Module):
    """All heads of one layer: one matrix for Q, K and V, one for what the heads found."""

    def __init__(self, hidden: int, heads: int, attention: AttentionFunction) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, hidden) -> the same."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        # (batch, seqlen, heads, head_dim) each; views, so attention copies nothing.
        return self.out(self.attention(*qkv.unbind(2)).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each added to what it reads."""

    def __init__(self, hidden: int, heads: int, attention: AttentionFunction) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, heads, attention)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, MLP_WIDTH * hidden, bias=False),
            nn.GELU(),
            nn.Linear(MLP_WIDTH * hidden, hidden, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, hidden) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Characters in, the loss of guessing the next one out."""

    def __init__(
        self,
        vocabulary: int,
        seqlen: int,
        layers: int,
        heads: int,
        hidden: int,
        attention: AttentionFunction,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(seqlen, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy in nats of y, the characters after x; both (batch, seqlen)."""
        places = torch.arange(x.shape[1], device=x.device)
        found = self.norm(self.blocks(self.characters(x) + self.positions(places)))
        return functional.cross_entropy(self.logits(found).flatten(0, 1).float(), y.flatten())
