"""Times on the reader's own GPU, as lesson 11 says that they should be taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numba import cuda

WARM_UPS, ROUNDS = 5, 15


def print_milliseconds(calls: Mapping[str, Callable[[], object]]) -> None:
    """Run calls on the GPU in turns; prints each one's median and range, host time included."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for attempt in range(WARM_UPS + ROUNDS):
        for name, call in calls.items():
            start, stop = cuda.event(), cuda.event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if attempt >= WARM_UPS:
                taken[name].append(cuda.event_elapsed_time(start, stop))
    for name, ms in taken.items():
        print(f"{name}: {np.median(ms):.3f} ms ({min(ms):.3f} to {max(ms):.3f})")
