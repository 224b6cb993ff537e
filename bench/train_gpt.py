"""Train a small GPT with our attention and with torch's: `python -m bench.train_gpt` on a GPU.

One model, characters of *Alice's Adventures in Wonderland*, the same first weights and batches;
only the attention differs. Says whether the loss curves agree within what one rounding of the first
weights changes, whether the model learned more than pairs of characters tell, how fast each trains,
and how the memory of attention grows with length. `--device cpu` trains a tiny one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from bench import timing
from bench.gpt.summary import FLASH, OURS, describe, draw, summarize, title

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpt.model import GPT, AttentionFunction

TEXT = Path(__file__).parent / "data" / "alice.txt.gz"
HELD_OUT = 0.1
"""The end of the text, never trained on."""
ATTENTIONS = (OURS, FLASH, "torch_math")
SEED = 0
"""Of the first weights and of the batches."""
NUDGED_RUNS = 2
"""FLASH is trained so often once more, which shows what a rounding changes."""
DTYPE = "bfloat16"
ROUNDING = 2.0**-9
"""Half the distance of two neighbouring numbers of DTYPE, for numbers near 1."""
LEARNING_RATE = 1e-3
LEARNING_WARM_UP = 100
LARGEST_GRADIENT = 1.0
UNTIMED_STEPS = 10
VALIDATION_BATCHES = 4
SPEC_TFLOPS = {"H100": 989.0, "H200": 989.0}
"""Dense bfloat16 by the data sheets, for GPUs whose name contains the key."""

MEMORY_ATTENTIONS = (*ATTENTIONS, "standard")
MEMORY_SEQLENS = (1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = 4
"""So many of them in a quick run."""
MEMORY_HEADS, MEMORY_HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Setup:
    """The model and its batches."""

    layers: int
    heads: int
    hidden: int
    seqlen: int
    batch: int
    steps: int

    def flops_per_step(self, parameters: int) -> float:
        """Forward and backward by the FlashAttention-2 paper, section 4.2, not halved by the mask.

        6 for each token and parameter, and 12 layers hidden seqlen^2 for each sequence.
        """
        sequence = 6 * self.seqlen * parameters + 12 * self.layers * self.hidden * self.seqlen**2
        return float(self.batch * sequence)

    @property
    def tokens_per_step(self) -> int:
        """Characters whose successor is guessed in a step."""
        return self.batch * self.seqlen


SETUP = Setup(layers=6, heads=8, hidden=512, seqlen=1024, batch=32, steps=300)
QUICK_STEPS = 40
CPU_SETUP = Setup(layers=1, heads=2, hidden=32, seqlen=16, batch=1, steps=3)
"""What the simulator takes seconds for."""


def load_text() -> tuple[np.ndarray, str]:
    """The text as numbers, and the character that each number stands for."""
    text = gzip.decompress(TEXT.read_bytes()).decode("ascii")
    characters = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(characters)}
    return np.array([numbers[character] for character in text]), characters


def split_text(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is learned, and what is held out."""
    learned, held_out = np.split(text, [int(len(text) * (1 - HELD_OUT))])
    return learned, held_out


def bigram_loss(learned: np.ndarray, held_out: np.ndarray, characters: int) -> float:
    """Nats a character of guessing from the last one only, by counted pairs, one added to each."""
    counts = np.ones((characters, characters))
    np.add.at(counts, (learned[:-1], learned[1:]), 1)
    guesses = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(guesses[held_out[:-1], held_out[1:]]).mean())


def batches(text: np.ndarray, setup: Setup, count: int, seed: int) -> np.ndarray:
    """Passages of the text, (count, batch, seqlen + 1), always those of the seed."""
    starts = np.random.default_rng(seed).integers(
        len(text) - setup.seqlen, size=(count, setup.batch)
    )
    return text[starts[..., None] + np.arange(setup.seqlen + 1)]


def train(name: str, setup: Setup, device: str, nudged: int = 0) -> dict:
    """Train a new model; its losses and its speed. Weights and batches are those of SEED.

    nudged: other than 0, each weight is moved about one ROUNDING, differently for each number.
    """
    import torch

    from bench.gpt.model import GPT, attention_by_name

    text, characters = load_text()
    learned, held_out = split_text(text)
    torch.manual_seed(SEED)
    sizes = setup.seqlen, setup.layers, setup.heads, setup.hidden
    model = GPT(len(characters), *sizes, attention_by_name(name)).to(device)
    if nudged:
        nudge(model, nudged)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / LEARNING_WARM_UP)
    )

    def loss_of(passages: Tensor) -> Tensor:
        with autocast(torch, device):
            return model(passages[:, :-1], passages[:, 1:])

    # All of them now: a copy between two steps would make the host wait for the GPU.
    seen = torch.from_numpy(batches(learned, setup, setup.steps, SEED)).to(device)
    losses, untimed = [], min(UNTIMED_STEPS, setup.steps - 1)
    for step, passages in enumerate(seen):
        if step == untimed:
            synchronize(torch, device)
            start = time.perf_counter()
        loss = loss_of(passages)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        # Reading the number here would make it wait too.
        losses.append(loss.detach())
    synchronize(torch, device)
    seconds = (time.perf_counter() - start) / (setup.steps - untimed)
    with torch.no_grad():
        unseen = torch.from_numpy(batches(held_out, setup, VALIDATION_BATCHES, SEED)).to(device)
        validation = [loss_of(passages).item() for passages in unseen]
    return {
        "name": name,
        "nudged": nudged,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": torch.stack(losses).tolist(),
        "validation_loss": statistics.fmean(validation),
        "ms_per_step": seconds * 1e3,
        "tokens_per_second": setup.tokens_per_step / seconds,
    }


def nudge(model: GPT, number: int) -> None:
    """Multiply each weight by 1 + ROUNDING times a normal random number."""
    import torch

    random = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.mul_(1 + ROUNDING * noise.to(parameter.device))


def autocast(torch: ModuleType, device: str) -> AbstractContextManager:
    """On a GPU products and attention are bfloat16, weights float32; on a CPU all is float32."""
    return torch.autocast(device, getattr(torch, DTYPE)) if device == "cuda" else nullcontext()


def synchronize(torch: ModuleType, device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(attention: AttentionFunction, seqlen: int) -> int | None:
    """Bytes on the GPU at the most while attention runs forward and backward; None: too many.

    Counted from what Q, K, V and dO take: O, dQ, dK, dV, and what lies between.
    """
    import torch

    sizes = 1, seqlen, MEMORY_HEADS, MEMORY_HEAD_DIM
    create = partial(torch.randn, sizes, dtype=getattr(torch, DTYPE), device="cuda")
    q, k, v = (create(requires_grad=True) for _ in range(3))
    dout = create()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        attention(q, k, v).backward(dout)
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def measure_memory(seqlens: Sequence[int]) -> list[dict]:
    """A record for each attention, with the peaks at the lengths in their order."""
    from bench.gpt.model import attention_by_name

    records = []
    for name in MEMORY_ATTENTIONS:
        attention = attention_by_name(name)
        # The first call compiles, and libraries take their workspaces.
        peak_memory(attention, seqlens[0])
        peaks = [peak_memory(attention, seqlen) for seqlen in seqlens]
        records.append({"name": name, "seqlens": list(seqlens), "bytes": peaks})
    return records


def with_mfu(run: dict, setup: Setup, peaks: dict[str, float | None]) -> dict:
    """A run with its TFLOP/s, and their share of each peak (None where it is not known)."""
    tflops = setup.flops_per_step(run["parameters"]) / run["ms_per_step"] / 1e9
    shares = {name: None if peak is None else tflops / peak for name, peak in peaks.items()}
    return {**run, "tflops": tflops, "mfu": shares}


def peaks_of(gpu: str) -> dict[str, float | None]:
    """TFLOP/s that a training step is measured against: a product timed here, the data sheet."""
    spec = [tflops for name, tflops in SPEC_TFLOPS.items() if name in gpu]
    return {"matmul": timing.matmul_tflops([DTYPE])[DTYPE], "spec": spec[0] if spec else None}


def run_all(setup: Setup, device: str, memory_seqlens: Sequence[int]) -> dict:
    """Train all, measure memory on a GPU, and tell what was found."""
    if device == "cuda":
        about = timing.environment()
        peaks = peaks_of(about["gpu"])
    else:
        about, peaks = (
            {"gpu": None, "date": date.today().isoformat()},
            {"matmul": None, "spec": None},
        )
    plan = [(name, 0) for name in ATTENTIONS] + [(FLASH, 1 + run) for run in range(NUDGED_RUNS)]
    runs = []
    for name, nudged in plan:
        runs.append(with_mfu(train(name, setup, device, nudged), setup, peaks))
        print(f"trained {title(runs[-1])}: {runs[-1]['ms_per_step']:.1f} ms a step", flush=True)
    memory = measure_memory(memory_seqlens) if device == "cuda" else []
    text, characters = load_text()
    summary = summarize(runs, bigram_loss(*split_text(text), len(characters)))
    found = {"setup": asdict(setup), "peak_tflops": peaks, "summary": summary}
    return {**about, **found, "runs": runs, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, write the result file and draw it.

    Fails if the curves disagree, or if all steps taught no more than pairs of characters tell.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.train_gpt", description=__doc__)
    option: Callable = parser.add_argument
    option("--steps", type=int, help=f"of each run; default {SETUP.steps}")
    option("--out", type=Path, help="default bench/results/<gpu>/train_gpt.json; a .svg beside it")
    option("--quick", action="store_true", help="few steps, nothing is written without --out")
    option("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, like --quick")
    option("--draw", type=Path, metavar="FILE", help="only draw a result file, without a GPU")
    options = parser.parse_args(arguments)
    if options.draw:
        try:
            return draw_file(options.draw)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--draw {options.draw}: {error}")
    setup = SETUP if options.device == "cuda" else CPU_SETUP
    default_steps = min(setup.steps, QUICK_STEPS) if options.quick else setup.steps
    steps = default_steps if options.steps is None else options.steps
    if steps < 2:
        parser.error(f"--steps {steps}: must be at least 2")
    if options.device == "cuda":
        timing.import_torch()
    start = time.perf_counter()
    seqlens = MEMORY_SEQLENS[: QUICK_SEQLENS if options.quick else None]
    result = run_all(replace(setup, steps=steps), options.device, seqlens)
    path = options.out
    if path is None and options.device == "cuda" and not options.quick:
        path = timing.results_file(result["gpu"], "train_gpt.json")
    print(describe(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        try:
            draw_file(path)
        except ModuleNotFoundError as error:
            print(f"{error}; then --draw {path}")
    print(f"{time.perf_counter() - start:.0f} s -> {path}")
    if not result["summary"]["agrees"]:
        raise SystemExit(f"the loss curve of {OURS} differs by more than a rounding explains")
    if steps >= SETUP.steps and not result["summary"]["learned"]:
        raise SystemExit(f"{OURS} learned no more than pairs of characters tell")


def draw_file(path: Path) -> None:
    """Draw a result file beside it."""
    draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
