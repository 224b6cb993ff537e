"""The shape of an attention problem."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """How large Q, K and V are and which keys a query sees.

    causal: bottom-right aligned; itemsize: bytes of an element of Q, K, V and O, by keyword.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    itemsize: int = field(default=4, kw_only=True)
