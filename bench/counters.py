"""Hardware counters of every CUDA-core rung beside what is predicted: `python -m bench.counters`.

The script runs itself under Nsight Compute, once for each rung: a child process that launches the
rung's kernels once, between cudaProfilerStart and cudaProfilerStop. This process needs no GPU of
its own; with `--measured FILE` it only compares an earlier run's counters anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from numba import cuda

from bench import timing
from bench.comparison import FAR_OFF, METRICS, OPCODES, THREAD_OPCODES, finish, table
from fa2_numba.ladder import cuda_core_rungs

ROOT = Path(__file__).parents[1]
SHAPE = (4, 32, 1024, 64)
"""batch, heads, seqlen, head_dim; float32, causal."""
SECONDS_PER_COMMAND = 110


def number(text: str) -> float | None:
    """The value of a cell; None for n/a.

    >>> number("1,024.5"), number("12 (BAR: 5; LDS: 7)"), number("n/a")
    (1024.5, 12.0, None)
    """
    try:
        return float(text.partition("(")[0].replace(",", ""))
    except ValueError:
        return None


def instances(text: str) -> dict[str, float]:
    """The counts by instruction behind the total of a cell.

    >>> instances("1,012 (BAR: 5; LDS.128: 1,007)")
    {'BAR': 5.0, 'LDS.128': 1007.0}
    """
    pairs = re.findall(r"([A-Z][A-Z0-9_.]*):\s*([\d,]*\d)", text.partition("(")[2])
    return {name: float(value.replace(",", "")) for name, value in pairs}


def parse_csv(text: str) -> list[dict]:
    """The launches in ncu's raw page: the kernel's name, metrics, counts by instruction."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(('"ID"', "ID,"))]
    if not starts:
        raise ValueError(f"no table in ncu's output:\n{text[-2000:]}")
    table = [line for line in lines[starts[0] :] if line.strip() and not line.startswith("==")]
    header, _, *rows = csv.reader(table)  # The second row has the units, base units all of them.
    return [_launch(dict(zip(header, row, strict=False))) for row in rows]


def _launch(cells: dict[str, str]) -> dict:
    values = {name: number(cells[name]) for name in METRICS if name in cells}
    return {
        "kernel": cells["Kernel Name"],
        "metrics": {name: value for name, value in values.items() if value is not None},
        "warp_instructions": instances(cells.get(OPCODES, "")),
        "thread_instructions": instances(cells.get(THREAD_OPCODES, "")),
    }


FAILURES = (RuntimeError, ValueError, LookupError, OSError, subprocess.TimeoutExpired)


def ncu_version(ncu: str) -> str:
    """The last line of what ncu says of itself; ends the run if there is no ncu."""
    try:
        return _run([ncu, "--version"]).stdout.strip().splitlines()[-1]
    except (OSError, IndexError) as error:
        hint = "install NVIDIA Nsight Compute, or say where it is with --ncu"
        raise SystemExit(f"error: {ncu} does not run ({error}): {hint}") from None


def profile(ncu: str, rung: str, shape: tuple[int, ...], folder: Path) -> tuple[str, dict]:
    """The raw page for a rung's launches as CSV, and what the child wrote of itself."""
    report, about = folder / f"{rung}.ncu-rep", folder / f"{rung}.json"
    child = [sys.executable, "-m", "bench.counters", "--launch", rung, "--about", str(about)]
    child += ["--shape", *map(str, shape)]
    options = ["--force-overwrite", "--export", str(report.with_suffix(""))]  # ncu adds its own
    options += ["--clock-control", "none", "--profile-from-start", "off"]
    _run_ncu([ncu, *options, "--metrics", ",".join(METRICS), *child])
    page = [ncu, "--import", str(report), "--page", "raw", "--csv"]
    page += ["--print-units", "base", "--print-metric-instances", "details"]
    return _run_ncu(page), json.loads(about.read_text())


def _run_ncu(command: list[str]) -> str:
    done = _run(command)
    if done.returncode != 0:
        raise RuntimeError(f"ncu failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command; past its time, it and the processes it started are killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS_PER_COMMAND)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(rung: str, shape: tuple[int, ...], about: Path) -> None:
    """The child under ncu: run each kernel of a rung once, profiled, after one run that is not."""
    torch = timing.import_torch()
    prepared = timing.prepare(rung, timing.gpu_machine(), timing.random_inputs(*shape), True)
    prepared.run()
    torch.cuda.synchronize()
    about.write_text(
        json.dumps(
            {
                "environment": timing.environment(),
                "config": asdict(prepared.config),
                "launches": len(prepared.launches),
            }
        )
    )
    with cuda.profiling():
        prepared.run()
        torch.cuda.synchronize()


def measure(rungs: list[str], shape: tuple[int, ...], ncu: str) -> dict:
    """Profile the rungs one after the other; one that fails is told of and left out."""
    result = {"ncu": ncu_version(ncu), "shape": shape, "dtype": "float32", "causal": True}
    measured = []
    with TemporaryDirectory() as folder:
        for rung in rungs:
            start = time.perf_counter()
            try:
                text, about = profile(ncu, rung, shape, Path(folder))
                launches = parse_csv(text)
                if len(launches) != about["launches"]:
                    raise RuntimeError(f"{len(launches)} launches, not {about['launches']}")
            except FAILURES as error:
                print(f"{rung} is left out: {error}", flush=True)
                continue
            print(f"{rung}: profiled in {time.perf_counter() - start:.0f} s", flush=True)
            result |= about["environment"]
            measured.append({"rung": rung, "config": about["config"], "launches": launches})
    if not measured:
        raise SystemExit("no rung was profiled")
    return result | {"rungs": measured}


def read(path: Path) -> dict:
    """A result file of an earlier run; ends the run if it cannot be read."""
    try:
        result = json.loads(path.read_text())
        if "shape" not in result or "rungs" not in result:
            raise ValueError("is no file of this script")
        return result
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"error: --measured {path}: {error}") from None


def write(out: Path, result: dict) -> None:
    """Write a result file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    rungs = cuda_core_rungs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="result file; default bench/results/<gpu>/counters.json"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="compare this file's counters anew, no GPU; written only if --out says where",
    )
    parser.add_argument("--rungs", nargs="+", choices=rungs, default=rungs)
    parser.add_argument(
        "--shape",
        nargs=4,
        type=int,
        default=SHAPE,
        metavar=("BATCH", "HEADS", "SEQLEN", "HEAD_DIM"),
    )
    parser.add_argument("--ncu", default="ncu", help="the Nsight Compute command")
    parser.add_argument("--launch", choices=rungs, help=argparse.SUPPRESS)
    parser.add_argument("--about", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Profile, compare, print and write the result file."""
    options = parse_arguments(arguments)
    if options.launch:
        launch(options.launch, tuple(options.shape), options.about)
        return
    if options.measured:
        result, out = read(options.measured), options.out
    else:
        result = measure(options.rungs, tuple(options.shape), options.ncu)
        out = options.out or timing.results_file(result["gpu"], "counters.json")
        # What a GPU was needed for is safe before anything else is done with it.
        write(out, result)
    result = finish(result)
    print("\n".join(table(rung) for rung in result["rungs"]))
    unexplained = sum(row["unexplained"] for rung in result["rungs"] for row in rung["comparison"])
    print(f"\n{unexplained} ratios more than {FAR_OFF:.0%} off without a reason")
    if out:
        write(out, result)
        print(out)


if __name__ == "__main__":
    main()
