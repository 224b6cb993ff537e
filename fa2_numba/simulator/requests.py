"""From what the lanes of a warp did one by one to what the warp asked the memory for.

Hardware runs the lanes of a warp together: one load instruction is one request with up to 32
addresses. The simulator runs threads one after the other, so it logs every access with the place
it came from and puts together what belongs together afterwards.
"""

import numpy as np

from fa2_numba.constants import BANK_BYTES, NUM_BANKS, SECTOR_BYTES, WARP_SIZE

IDLE = -1
"""Stands in a table of addresses where a lane takes no part in a request."""

LOG_COLUMNS = 3
SITE = 1
"""An access in a lane's log: position, site, byte address.

position: a number for the calls and the iterations of all loops around the access; site: a number
for the instruction. Lanes that are at one site in one position are there together.
"""


def warp_requests(logs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The requests of one warp: their sites (R,) and their addresses (R, 32), IDLE for no access.

    logs: what each of the 32 lanes did in its order, int64 (accesses, LOG_COLUMNS). If a lane is at
    one site in one position several times, its n-th time meets that of the others.
    """
    busy = [lane for lane, log in enumerate(logs) if len(log)]
    first = logs[busy[0]]
    same = all(len(logs[lane]) == len(first) for lane in busy)
    if same and all(np.array_equal(logs[lane][:, :2], first[:, :2]) for lane in busy[1:]):
        addresses = np.full((len(first), WARP_SIZE), IDLE)
        for lane in busy:
            addresses[:, lane] = logs[lane][:, 2]
        return first[:, 1], addresses
    return _matched(logs)


def _matched(logs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    position, site, address = np.concatenate(logs).T
    lane = np.repeat(np.arange(len(logs)), [len(log) for log in logs])
    # A stable sort: the accesses of one lane at one place stay in the order they were made.
    order = np.lexsort((lane, site, position))
    position, site, address, lane = position[order], site[order], address[order], lane[order]
    time = _rank(_changes(position, site, lane))
    order = np.lexsort((lane, time, site, position))
    begins = _changes(position[order], site[order], time[order])
    request = np.cumsum(begins) - 1
    addresses = np.full((request[-1] + 1, WARP_SIZE), IDLE)
    addresses[request, lane[order]] = address[order]
    return site[order][begins], addresses


def _changes(*columns: np.ndarray) -> np.ndarray:
    """Where any of the sorted columns has another value than before."""
    begins = np.ones(len(columns[0]), bool)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return begins


def _rank(begins: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within every run."""
    number = np.arange(len(begins))
    return number - np.maximum.accumulate(np.where(begins, number, 0))


def count_sectors(addresses: np.ndarray, itemsize: int) -> np.ndarray:
    """32-byte sectors of global memory that each request touches: 4 if 32 lanes read 128 bytes.

    >>> lanes = np.arange(32)
    >>> count_sectors(np.array([4 * lanes, 128 * lanes, 0 * lanes]), 4).tolist()
    [4, 32, 1]
    """
    # An element lies in one sector, or reaches into a second one.
    ends = np.where(addresses < 0, IDLE, addresses + itemsize - 1)
    return _distinct(_units(np.concatenate([addresses, ends], axis=1), SECTOR_BYTES)).sum(axis=1)


def count_replays(addresses: np.ndarray, itemsize: int) -> np.ndarray:
    """How many times each request to shared memory is repeated for bank conflicts.

    Word w (4 bytes) lies in bank w % 32. A bank gives one word at a time, to all lanes that want
    that word. Elements of 8 bytes are served by half warps, larger ones by quarter warps.

    >>> lanes = np.arange(32)
    >>> words = np.array([lanes, 2 * lanes, 32 * lanes, 33 * lanes, 0 * lanes])
    >>> count_replays(4 * words, 4).tolist()
    [0, 1, 31, 0, 0]
    """
    words = max(1, -(-itemsize // BANK_BYTES))
    turns = min(words, 4) if words != 3 else 4
    parts = addresses.reshape(len(addresses) * turns, WARP_SIZE // turns)
    first = _units(parts, BANK_BYTES)
    wanted = np.concatenate([np.where(first < 0, IDLE, first + k) for k in range(words)], axis=1)
    wanted.sort(axis=1)
    part, column = np.nonzero(_distinct(wanted))
    bank = wanted[part, column] % NUM_BANKS
    loads = np.bincount(part * NUM_BANKS + bank, minlength=len(parts) * NUM_BANKS)
    replays = np.maximum(loads.reshape(len(parts), NUM_BANKS).max(axis=1) - 1, 0)
    return replays.reshape(len(addresses), turns).sum(axis=1)


def _units(addresses: np.ndarray, size: int) -> np.ndarray:
    """The number of each address's unit of `size` bytes, sorted along the lanes."""
    return np.sort(np.where(addresses < 0, IDLE, addresses // size), axis=1)


def _distinct(units: np.ndarray) -> np.ndarray:
    """Of sorted numbers: which ones are there for the first time."""
    new = units >= 0
    new[:, 1:] &= units[:, 1:] != units[:, :-1]
    return new
