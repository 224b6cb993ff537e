"""What the formulas of `traffic` start from: tiles, what they see, requests for HBM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from fa2_numba.config import TileConfig
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts
from fa2_numba.tensor_core_backward_config import BackwardConfig
from fa2_numba.tensor_core_config import TensorCoreConfig

FLOAT = 4
"""Bytes of a float32."""

Tiles = TileConfig | TensorCoreConfig | BackwardConfig

Requests = tuple[int, int, int]
"""How many, bytes, sectors."""

_LOAD = ("global_load_requests", "global_load_bytes", "global_load_sectors")
_STORE = ("global_store_requests", "global_store_bytes", "global_store_sectors")


@dataclass(frozen=True)
class QueryTile:
    """Rows of one query tile, those of them that see a key, and what they visit of K and V."""

    rows: int
    seeing: int
    visits: int
    keys: int


@dataclass(frozen=True)
class KeyTile:
    """Keys of one key tile, and what its block visits of Q for each query head: tiles, rows."""

    keys: int
    visits: int
    rows: int


def query_tiles(p: Problem, c: Tiles, skip: bool = True) -> Iterator[QueryTile]:
    """The query tiles; with `skip`, key tiles that a causal mask hides whole are not visited."""
    for first_row in range(0, p.seqlen_q, c.block_m):
        end = min(first_row + c.block_m, p.seqlen_q)
        keys = p.seqlen_k
        if p.causal and skip:
            keys = max(0, min(p.seqlen_k, end + p.seqlen_k - p.seqlen_q))
        visits = ceil(keys / c.block_n)
        seeing = seeing_rows(p, end) - seeing_rows(p, first_row)
        yield QueryTile(end - first_row, seeing, visits, min(visits * c.block_n, p.seqlen_k))


def alike(items: Iterable[object]) -> list[tuple[object, int]]:
    """Each different item, and how often it comes."""
    return list(Counter(items).items())


def seeing_rows(p: Problem, end: int) -> int:
    """How many of the first `end` queries see a key."""
    blind = max(0, p.seqlen_q - p.seqlen_k) if p.causal else 0
    return max(0, end - blind)


def key_tiles(p: Problem, c: Tiles) -> Iterator[int]:
    """Keys of each key tile."""
    for first_col in range(0, p.seqlen_k, c.block_n):
        yield min(c.block_n, p.seqlen_k - first_col)


def visited_key_tiles(p: Problem, c: Tiles, all_visit_first: bool) -> Iterator[KeyTile]:
    """The key tiles; query tiles that a causal mask hides from one whole are not visited.

    all_visit_first: but from the first key tile all are.
    """
    for first_col in range(0, p.seqlen_k, c.block_n):
        first_row = 0
        if p.causal and (first_col > 0 or not all_visit_first):
            first_row = max(0, first_col + p.seqlen_q - p.seqlen_k) // c.block_m * c.block_m
        rows = p.seqlen_q - first_row
        yield KeyTile(min(c.block_n, p.seqlen_k - first_col), ceil(rows / c.block_m), rows)


def loaded(requests: Requests) -> Counts:
    """Loads from HBM."""
    return Counts(**dict(zip(_LOAD, requests, strict=True)))


def stored(requests: Requests) -> Counts:
    """Stores to HBM."""
    return Counts(**dict(zip(_STORE, requests, strict=True)))
