"""What `python -m bench run` measures: problems, in groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

FORWARD, BACKWARD, BOTH = DIRECTIONS = ("forward", "backward", "both")
"""A forward pass, a backward pass after one that is not timed, and one after the other."""
DTYPES = ("float16", "bfloat16")
TOKENS, COLUMNS = 16384, 2048
"""Of all batch elements and of all heads together (FA2 section 4)."""
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 2048, 4096)
LADDER_SHAPES = {
    "few heads, long": (1, 4, 16384),
    "between": (4, 32, 2048),
    "many heads, short": (16, 32, 512),
}
"""Where steps of the ladder show: batch, heads, seqlen; the head dim is 64."""
PAPER, LADDER, FEW_HEADS, DECODE, GROUPED = GROUPS = (
    "paper",
    "ladder",
    "few_heads",
    "decode",
    "grouped_heads",
)


@dataclass(frozen=True)
class Problem:
    """Arrays and a mask that contestants are given, and the directions they are timed in."""

    group: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    seqlen_k: int
    head_dim: int
    causal: bool
    directions: tuple[str, ...] = DIRECTIONS

    @property
    def fields(self) -> dict[str, object]:
        """All but the directions, as records have it."""
        found = asdict(self)
        del found["directions"]
        return found

    def forward_flops(self) -> float:
        """Operations of the two matrix products, half of them if causal."""
        products = 4 * self.batch * self.heads * self.seqlen * self.seqlen_k * self.head_dim
        return products / 2 if self.causal else products

    def flops(self, direction: str) -> float:
        """The backward pass has five products to the forward pass's two, S = Q K^T again in it."""
        return {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}[direction] * self.forward_flops()

    def __str__(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        length = f"N{self.seqlen}" + (f"/{self.seqlen_k}" if self.seqlen_k != self.seqlen else "")
        causal = " causal" if self.causal else ""
        return f"B{self.batch} {heads} {length} d{self.head_dim} {self.dtype}{causal}"


def problems(quick: bool = False) -> list[Problem]:
    """All of them, group by group; quick: float16 and medium lengths only."""
    found = [*_ladder(), *_paper(), *_few_heads(), *_decode(), *_grouped_heads()]
    return [one for one in found if not quick or _is_quick(one)]


def _is_quick(problem: Problem) -> bool:
    return problem.dtype == DTYPES[0] and problem.seqlen_k in QUICK_SEQLENS


def _paper() -> Iterator[Problem]:
    """The grid of the paper's figures (FA2 section 4.1), and head dim 256."""
    for dtype, head_dim, seqlen, causal in product(DTYPES, HEAD_DIMS, SEQLENS, (False, True)):
        heads = COLUMNS // head_dim
        sizes = TOKENS // seqlen, heads, heads, seqlen, seqlen, head_dim
        yield Problem(PAPER, dtype, *sizes, causal)


def _ladder() -> Iterator[Problem]:
    """All rungs."""
    for (batch, heads, seqlen), causal in product(LADDER_SHAPES.values(), (False, True)):
        sizes = batch, heads, heads, seqlen, seqlen, 64
        yield Problem(LADDER, DTYPES[0], *sizes, causal, (FORWARD, BACKWARD))


def _few_heads() -> Iterator[Problem]:
    """One long sequence whose heads are fewer than multiprocessors."""
    for head_dim, seqlen, causal in product((64, 128), (2048, 8192, 32768), (False, True)):
        yield Problem(FEW_HEADS, DTYPES[0], 1, 4, 4, seqlen, seqlen, head_dim, causal)


def _decode() -> Iterator[Problem]:
    """One query for each sequence and many keys, as when a model writes token after token."""
    for head_dim, kv_heads, seqlen_k in product((64, 128), (32, 8), (1024, 4096, 16384)):
        sizes = 16, 32, kv_heads, 1, seqlen_k, head_dim
        yield Problem(DECODE, DTYPES[0], *sizes, causal=False, directions=(FORWARD,))


def _grouped_heads() -> Iterator[Problem]:
    """Query heads that share heads of K and V."""
    for head_dim, kv_heads, seqlen in product((64, 128), (8, 1), (2048, 8192)):
        sizes = 4, 32, kv_heads, seqlen, seqlen, head_dim
        yield Problem(GROUPED, DTYPES[0], *sizes, causal=True)
