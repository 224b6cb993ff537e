"""Who of a block waits for whom: what its warpgroups did in the simulator, laid out in time.

The simulator says in which order a warpgroup loads, multiplies and waits, and who lets whom go on.
It knows no time. `schedule` gives every step a duration, made up but of a GPU's proportions, and
starts each as early as those it waits for allow: copies one after the other through one channel,
products one after the other on one set of tensor cores.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from greenlet import getcurrent

from fa2_numba.config import DeviceLimits
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.device.instruction import Instruction
from fa2_numba.device.warpgroups import WARPGROUP_SIZE
from fa2_numba.hopper_config import HopperConfig
from fa2_numba.kernels.fa3_hopper import plan_forward
from fa2_numba.launch import ForwardTensors, TileCounter
from fa2_numba.simulator import Simulator
from fa2_numba.simulator.engine import Observer

HOPPER = (9, 0)
PRODUCER = 0
LESSON_TILES = HopperConfig(
    head_dim=64,
    block_n=32,
    num_consumers=2,
    stages=2,
    q_stages=2,
    producer_registers=40,
    consumer_registers=232,
)
"""Two consumers and small tiles, so that a run has many steps and takes seconds."""


@dataclass(frozen=True)
class Durations:
    """Of one step each, in units of nothing in particular.

    load: from the start of a copy until it is there; channel: until the next may start; product: of
    S or P V for a tile of keys; exponentials: of one tile, for which a multiprocessor has units
    that its warps share; other: of softmax, the maximum and the sum; rest: rescaling and rounding,
    after P V. With head dim 128 a Hopper GPU takes half as long for the exponentials of a tile as
    for its two products (FA3 section 3.1).
    """

    load: float = 4.0
    channel: float = 1.0
    product: float = 2.0
    exponentials: float = 2.0
    other: float = 1.0
    rest: float = 0.5


@dataclass(frozen=True)
class Step:
    """Something that took time: on which lane, whose it was, what, from when to when."""

    lane: str
    group: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Roles:
    """A run of a block: its steps, by start, and what the tensor cores did of the time."""

    steps: tuple[Step, ...]

    @property
    def span(self) -> float:
        """From the first step to the end of the last."""
        return max(step.end for step in self.steps)

    @property
    def busy(self) -> float:
        """The share of the span in which the tensor cores multiply."""
        worked = sum(s.end - s.start for s in self.steps if s.lane == "tensor cores")
        return worked / self.span

    def hidden(self) -> float:
        """The share of all softmax during which the tensor cores multiply."""
        products = [(s.start, s.end) for s in self.steps if s.lane == "tensor cores"]
        softmaxes = [(s.start, s.end) for s in self.steps if s.what == "softmax"]
        overlap = sum(
            max(0.0, min(end, e) - max(start, s)) for start, end in softmaxes for s, e in products
        )
        return overlap / sum(end - start for start, end in softmaxes)


Call = tuple[str, tuple]
"""An instruction's name, and its operands."""


class _Recorder(Observer):
    """Writes down what the first thread of each warpgroup does."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Call]] = defaultdict(list)

    def hopper_called(self, what: Instruction, operands: tuple) -> None:
        """One call more."""
        group, number = divmod(getcurrent().number, WARPGROUP_SIZE)
        if number == 0:
            self.calls[group].append((what.name, operands))


def record_calls(seqlen: int = 256, causal: bool = False, **changes: int) -> dict[int, list[Call]]:
    """What each warpgroup of `fa3_hopper` calls, for one head; changes: of `LESSON_TILES`."""
    rng = np.random.default_rng(0)
    shape = 1, seqlen, 1, LESSON_TILES.head_dim
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
    lse = np.empty((1, 1, seqlen), np.float32)
    scale = np.float32(shape[3] ** -0.5)
    tensors = ForwardTensors(q, k, v, np.empty_like(q), lse, scale, causal, "float16", None)
    if changes.get("num_consumers") == 1:
        changes["consumer_registers"] = 256
    config = replace(LESSON_TILES, **changes)
    (launch,) = plan_forward(tensors, config)
    counter = np.zeros(1, np.uint32)
    arguments = tuple(counter if isinstance(a, TileCounter) else a for a in launch.arguments)
    simulator = Simulator(checks=False, progress=False)
    prepared = simulator.prepare(
        launch.kernel, launch.grid, launch.threads, launch.shared_bytes, arguments
    )
    recorder = _Recorder()
    for block in prepared.blocks(recorder):
        block.run()
    return dict(recorder.calls)


def schedule(calls: dict[int, list[Call]], durations: Durations | None = None) -> Roles:
    """The calls in time, each as early as it can be."""
    return _Schedule(calls, durations or Durations()).run()


class _Schedule:
    """The state of a run: how far each warpgroup is, and what has been reached when."""

    def __init__(self, calls: dict[int, list[Call]], durations: Durations) -> None:
        self.durations = durations
        self.left = {group: deque(listed) for group, listed in calls.items()}
        self.now = dict.fromkeys(calls, 0.0)
        self.steps: list[Step] = []
        self.channel_free = self.tensor_cores_free = self.exponentials_free = 0.0
        self.arrivals: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.landings: dict[int, list[float]] = defaultdict(list)
        self.parties = _parties(calls)
        self.waits: dict[tuple[int, str, int], int] = defaultdict(int)
        self.groups: dict[int, deque[float]] = {group: deque() for group in calls}
        self.open: dict[int, str] = {}

    def run(self) -> Roles:
        """Until nobody has anything left to do."""
        while any(self.left.values()):
            ready = [(self._ready_at(group), group) for group in self.left if self.left[group]]
            time, group = min(pair for pair in ready if pair[0] is not None)
            self.now[group] = time
            self._do(group, *self.left[group].popleft())
        return Roles(tuple(sorted(self.steps, key=lambda step: step.start)))

    def _ready_at(self, group: int) -> float | None:
        """When a warpgroup can do its next call; None if it waits for one that has not come."""
        name, operands = self.left[group][0]
        now = self.now[group]
        if name == "mbarrier_wait":
            address, parity = operands
            number = self.waits[group, "mbarrier", address]
            # The first wait of a producer is for a phase before the first.
            first = self._first_parity(group, address, parity)
            phase = number - first
            done = 0.0 if phase < 0 else self._phase_at(address, phase)
            return None if done is None else max(now, done)
        if name == "bar_sync":
            number = self.waits[group, "bar", operands[0]]
            others = self.arrivals["bar", operands[0]]
            came = [times for party, times in others.items() if party != group]
            if not self.parties["bar", operands[0]] - {group}:
                return now
            if not came or len(came[0]) <= number:
                return None
            return max(now, came[0][number])
        if name.startswith("wgmma_wait_group"):
            pending = int(name.split("_")[3])
            groups = list(self.groups[group])
            return max([now, *groups[: len(groups) - pending]])
        return now

    def _first_parity(self, group: int, address: int, parity: int) -> int:
        key = group, "first", address
        if key not in self.waits:
            self.waits[key] = parity
        return self.waits[key]

    def _phase_at(self, address: int, phase: int) -> float | None:
        """When a phase of an mbarrier is complete."""
        times = [self.arrivals["mbarrier", address][p] for p in self.parties["mbarrier", address]]
        if not times or any(len(one) <= phase for one in times):
            return None
        landed = self.landings.get(address)
        if landed is not None and len(landed) <= phase:
            return None
        return max(*(one[phase] for one in times), landed[phase] if landed else 0.0)

    def _do(self, group: int, name: str, operands: tuple) -> None:
        now = self.now[group]
        if name == "mbarrier_wait":
            self.waits[group, "mbarrier", operands[0]] += 1
        elif name == "mbarrier_arrive":
            self.arrivals["mbarrier", operands[0]][group].append(now)
        elif name == "mbarrier_arrive_expect_tx":
            self.arrivals["mbarrier", operands[0]][group].append(now)
            self.landings[operands[0]].append(0.0)
        elif name == "tma_load_4d":
            self._load(group, operands)
        elif name in ("bar_sync", "bar_arrive"):
            if name == "bar_sync":
                self.waits[group, "bar", operands[0]] += 1
            else:
                self.arrivals["bar", operands[0]][group].append(now)
        elif name.startswith("wgmma_m64"):
            self.open[group] = "O += P V" if "from_registers" in name else "S = Q Kᵀ"
        elif name == "wgmma_commit_group":
            self._multiply(group)
        elif name.startswith("wgmma_wait_group"):
            self._compute(group, name)

    def _load(self, group: int, operands: tuple) -> None:
        start = max(self.now[group], self.channel_free)
        self.channel_free = start + self.durations.channel
        end = start + self.durations.load
        self.landings[operands[-1]][-1] = end
        self.steps.append(Step("copies", group, "load", start, start + self.durations.channel))

    def _multiply(self, group: int) -> None:
        start = max(self.now[group], self.tensor_cores_free)
        end = self.tensor_cores_free = start + self.durations.product
        self.groups[group].append(end)
        self.steps.append(Step("tensor cores", group, self.open.pop(group), start, end))

    def _compute(self, group: int, name: str) -> None:
        """What a consumer does with the product it has waited for."""
        pending, columns = (int(part) for part in name.split("_")[3:5])
        while len(self.groups[group]) > pending:
            self.groups[group].popleft()
        start = self.now[group]
        lane = f"consumer {group}"
        if columns != LESSON_TILES.block_n:
            self.now[group] = start + self.durations.rest
            self.steps.append(Step(lane, group, "rest", start, self.now[group]))
            return
        begin = max(start + self.durations.other, self.exponentials_free)
        self.now[group] = self.exponentials_free = begin + self.durations.exponentials
        self.steps.append(Step(lane, group, "softmax", start, self.now[group]))


def _parties(calls: dict[int, list[Call]]) -> dict[tuple[str, int], set[int]]:
    """Which warpgroups arrive at which barrier."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for group, name, operands in _all_calls(calls):
        if name in ("mbarrier_arrive", "mbarrier_arrive_expect_tx"):
            found["mbarrier", operands[0]].add(group)
        elif name in ("bar_sync", "bar_arrive"):
            found["bar", operands[0]].add(group)
    return found


def _all_calls(calls: dict[int, list[Call]]) -> Iterator[tuple[int, str, tuple]]:
    return ((group, *call) for group, listed in calls.items() for call in listed)


def simulated_limits() -> DeviceLimits:
    """The device that the lesson's runs are on."""
    return DeviceLimits(HOPPER, SHARED_BYTES_PER_BLOCK[HOPPER])
