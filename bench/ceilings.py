"""`python -m bench ceilings`: what a GPU's memory and arithmetic reach at best, measured.

Copying a large array for the memory, products of large matrices for the arithmetic, by the method
of all times here. Both are torch's; what no kernel reaches is no ceiling to hold ours against.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import timing

COPY_BYTES = 2**32
"""Of the array that is copied: many times what the caches hold."""
DTYPES = ("float16", "bfloat16", "float32")
"""float32 without tensor cores: torch's default does not round to TF32."""


def copy_terabytes() -> dict[str, float]:
    """10**12 bytes a second, read and written together, of torch's copy of one array to another."""
    torch = timing.import_torch()
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    run = partial(target.copy_, source)
    ms = timing.take_times({"copy": run}, timing.time_once)["copy"]
    return _spread([2 * COPY_BYTES / 1e9 / one for one in ms])


def _spread(rates: Sequence[float]) -> dict[str, float]:
    """The median rate, the lowest and the highest."""
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the current GPU and write the file."""
    parser = argparse.ArgumentParser(prog="python -m bench ceilings", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>/ceilings.json")
    options = parser.parse_args(argv)
    about = timing.environment()
    path = options.out or timing.results_file(about["gpu"], "ceilings.json")
    found = {
        "copy_terabytes": copy_terabytes(),
        "matmul_tflops": {dtype: _spread(timing.matmul_rates(dtype)) for dtype in DTYPES},
        "clocks": timing.clocks(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
