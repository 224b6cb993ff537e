"""Every barrier of the rungs is necessary, and mutated rungs do not pass for right.

A mutation changes the syntax tree of a rung's module and keeps its line numbers; the mutated module
is executed under the rung's own file name, so that errors show the rung's lines.
"""

import ast
import importlib
import inspect
import re
import time
import types
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from fa2_numba.config import TileConfig, choose_tiles
from fa2_numba.device import fa1_passes, mask, sliced_k
from fa2_numba.launch import ForwardTensors, SimulatorMachine
from fa2_numba.simulator import RaceError, Simulator
from fa2_numba.testing import assert_attention, poisoned, random_qkv

RUNGS = ["standard", "fa1_sliced_k", "fa2_fewer_flops", "fa2_seq_parallel", "fa2_split_q"]
HEAD_DIM = 32
# Small tiles, so that a small problem has two key tiles and four query tiles, the last ones ragged.
TILES = TileConfig(head_dim=HEAD_DIM, block_m=16, block_n=16, num_warps=4)
# With a causal mask the first two query tiles see no key.
SEQLEN_Q, SEQLEN_K = 59, 27
UNCHECKED = Simulator(checks=False, progress=False)


def rung(name: str) -> types.ModuleType:
    return importlib.import_module(f"fa2_numba.kernels.{name}")


def mutated(module: types.ModuleType, change: ast.NodeTransformer) -> types.ModuleType:
    """The module with `change` applied to its syntax tree, exactly once."""
    tree = change.visit(ast.parse(inspect.getsource(module)))
    assert change.changes == 1
    return executed(module, tree)


def executed(module: types.ModuleType, tree: ast.AST) -> types.ModuleType:
    """A copy of the module, made from a syntax tree."""
    copy = types.ModuleType(module.__name__)
    code = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
    exec(code, vars(copy))
    return copy


def mutated_rung(name: str, where: types.ModuleType, change: ast.NodeTransformer):
    """The rung with `change` applied to it or to the module `where` its verbs come from."""
    if where is rung(name):
        return mutated(where, change)
    copy = executed(rung(name), ast.parse(inspect.getsource(rung(name))))
    verbs = vars(mutated(where, change))
    vars(copy).update(
        {verb: verbs[verb] for verb in vars(copy) if verb.startswith("make_") and verb in verbs}
    )
    return copy


class Change(ast.NodeTransformer):
    """Replaces the expression or statement that reads `old`, at the given line if there is one."""

    def __init__(self, old: str, new: str, line: int | None = None) -> None:
        self.old, self.new, self.line = old, ast.parse(new).body[0], line
        self.changes = 0

    def visit(self, node: ast.AST) -> ast.AST:
        at_line = self.line in (None, getattr(node, "lineno", None))
        if isinstance(node, ast.stmt | ast.expr) and at_line and ast.unparse(node) == self.old:
            self.changes += 1
            new = self.new.value if isinstance(node, ast.expr) else self.new
            return ast.copy_location(new, node)
        return super().visit(node)


@cache
def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return random_qkv(1, SEQLEN_Q, SEQLEN_K, 1, 1, HEAD_DIM, np.float32)


def run(
    module: types.ModuleType, causal: bool = True, simulator: Simulator | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of the problem, from poisoned buffers."""
    q, k, v = problem()
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, SEQLEN_Q), np.float32)
    forward(module, q, k, v, out, lse, causal, TILES, simulator or Simulator(progress=False))
    return out, lse


@cache
def sound(name: str, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """What a rung computes without checks, its threads in order."""
    return run(rung(name), causal, UNCHECKED)


def forward(module, q, k, v, out, lse, causal, tiles, simulator) -> None:
    allocate: Callable = lambda shape: poisoned(shape, np.float32)  # noqa: E731
    scale = np.float32(q.shape[-1] ** -0.5)
    tensors = ForwardTensors(q, k, v, out, lse, scale, causal, "float32", allocate)
    SimulatorMachine(simulator).run(module.plan_forward(tensors, tiles))


def barrier_lines(name: str) -> list[int]:
    tree = ast.parse(inspect.getsource(rung(name)))
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and ast.unparse(node) == "cuda.syncthreads()"
    )


BARRIERS = [
    pytest.param(name, line, id=f"{name}-barrier-{number}")
    for name in RUNGS
    for number, line in enumerate(barrier_lines(name), 1)
]


def test_every_barrier_of_every_rung_is_looked_at():
    sources = [inspect.getsource(rung(name)) for name in RUNGS]
    assert len(BARRIERS) == sum(source.count("syncthreads") for source in sources) > 0


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name, line", BARRIERS)
def test_without_any_one_barrier_there_is_a_race(name, line, seed):
    broken = mutated(rung(name), Change("cuda.syncthreads()", "pass", line))
    with pytest.raises(RaceError) as caught:
        run(broken, simulator=Simulator(seed=seed, progress=False))
    assert "race on shared array" in str(caught.value)
    assert len(set(re.findall(r" at (\w+\.py:\d+): ", str(caught.value)))) == 2


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", RUNGS)
def test_order_of_threads_does_not_change_the_result(name, causal):
    shuffled = run(rung(name), causal, Simulator(seed=1, progress=False))
    assert_attention(*shuffled, *problem(), causal=causal)
    for got, want in zip(shuffled, sound(name, causal), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", RUNGS)
def test_checks_do_not_change_the_result(name):
    for checked, unchecked in zip(run(rung(name)), sound(name), strict=True):
        np.testing.assert_array_equal(checked, unchecked)


# Mutated rungs

STORE_SLICED_K = "O_head[i_row, d] = from_float32(O_reg[i, c] * scale)"
STORES = {
    "standard": (rung("standard"), "O_gmem[batch, i_row, head, d] = from_float32(O_reg[i, c])"),
    "fa1_sliced_k": (fa1_passes, "O_head[i_row, d] = from_float32(o)"),
    "fa2_fewer_flops": (sliced_k, STORE_SLICED_K),
    "fa2_seq_parallel": (sliced_k, STORE_SLICED_K),
    "fa2_split_q": (
        rung("fa2_split_q"),
        "O_gmem[batch, i_row, head, d] = from_float32(O_reg[i, c] * scale)",
    ),
}
RESCALES = {
    "fa1_sliced_k": (fa1_passes, "math.exp(m_old - finite_max(m_new)) * l_old", "l_old"),
    "fa2_fewer_flops": (rung("fa2_fewer_flops"), "rescale * l_reg[i]", "l_reg[i]"),
    "fa2_seq_parallel": (rung("fa2_seq_parallel"), "rescale * l_reg[i]", "l_reg[i]"),
    "fa2_split_q": (rung("fa2_split_q"), "rescale * l_reg[i]", "l_reg[i]"),
}


def assert_refused(module: types.ModuleType, *arrays: str) -> None:
    """The judge must name all of `arrays` ("out", "lse") as wrong."""
    with pytest.raises(AssertionError) as caught:
        assert_attention(*run(module, simulator=UNCHECKED), *problem(), causal=True)
    assert re.findall(r"^(out|lse): error", str(caught.value), re.MULTILINE) == list(arrays)


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_that_writes_no_output_is_rejected(name):
    where, store = STORES[name]
    assert_refused(mutated_rung(name, where, Change(store, "pass")), "out")


@pytest.mark.parametrize("name", RESCALES)
def test_a_rung_that_does_not_rescale_l_is_rejected(name):
    where, *replacement = RESCALES[name]
    assert_refused(mutated_rung(name, where, Change(*replacement)), "out", "lse")


@pytest.mark.parametrize("offset", [0, 2], ids=["hides-one-more", "shows-one-more"])
@pytest.mark.parametrize("name", RUNGS)
def test_a_mask_that_is_off_by_one_is_rejected(name, offset):
    keys = "row + place(i, 0)[0] + {} + seqlen_k - seqlen_q"
    broken_mask = mutated(mask, Change(keys.format(1), keys.format(offset)))
    make = "from fa2_numba.device.mask import make_mask_scores"
    imports = [line for line in inspect.getsource(rung(name)).splitlines() if make in line]
    broken = mutated(rung(name), Change(imports[0], "pass"))
    vars(broken).update(
        make_mask_scores=broken_mask.make_mask_scores, make_needs_mask=broken_mask.make_needs_mask
    )
    assert_refused(broken, "out", "lse")


# Speed


@pytest.mark.parametrize(
    "checks, most_seconds", [(True, 20.0), (False, 6.0)], ids=["checked", "unchecked"]
)
def test_speed_of_one_head(checks, most_seconds):
    q, k, v = random_qkv(1, 128, 128, 1, 1, 64, np.float32)
    out, lse = poisoned(q.shape, np.float32), poisoned((1, 1, 128), np.float32)
    simulator = Simulator(checks=checks, progress=False)
    tiles = choose_tiles(64, simulator.shared_bytes_per_block)
    start = time.process_time()  # of this process alone, so that busy neighbours do not count
    forward(rung("fa2_split_q"), q, k, v, out, lse, True, tiles, simulator)
    assert time.process_time() - start < most_seconds
    assert_attention(out, lse, q, k, v, causal=True)
