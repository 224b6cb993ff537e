"""The package imports lightly, carries its data, and declares what it needs."""

import json
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from fa2_numba.data import LAYERS, load_smollm2

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Both ways to the driver report that they were taken, also on a machine that has no driver.
PROBE = """
import json, sys
from cuda.bindings import driver
from numba.cuda.cudadrv.driver import Driver
calls = []
def record(name, function):
    return lambda *arguments: (calls.append(name), function(*arguments))[1]
driver.cuInit = record("cuInit", driver.cuInit)
Driver.ensure_initialized = record("ensure_initialized", Driver.ensure_initialized)
{statement}
print(json.dumps([calls, sorted({{"cupy", "torch", "matplotlib"}} & set(sys.modules))]))
"""


def effects_of(statement: str) -> tuple[list[str], list[str]]:
    """Run a statement in a fresh process: the driver calls it makes, the heavy modules it loads."""
    program = PROBE.format(statement=statement)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    calls, modules = json.loads(done.stdout.splitlines()[-1])
    return calls, modules


def test_importing_loads_no_cupy_or_torch_and_starts_no_driver():
    every_public_name = "import fa2_numba; [getattr(fa2_numba, n) for n in dir(fa2_numba)]"
    assert effects_of(every_public_name) == ([], [])


def test_the_probe_sees_a_started_driver_and_a_heavy_module():
    calls, modules = effects_of("from numba import cuda; cuda.is_available(); import matplotlib")
    assert "ensure_initialized" in calls
    assert modules == ["matplotlib"]


@pytest.mark.parametrize("layer", LAYERS)
def test_data_has_the_documented_shapes(layer):
    tokens, q, k, v = load_smollm2(layer)
    assert len(tokens) == 256
    assert q.shape == (1, 256, 9, 64)
    assert k.shape == v.shape == (1, 256, 3, 64)
    assert {array.dtype for array in (q, k, v)} == {np.dtype(np.float16)}
    assert all(np.isfinite(array).all() for array in (q, k, v))


def test_data_is_the_opening_of_alice():
    assert "".join(load_smollm2(0).tokens).startswith("Alice was beginning to get very tired of")


def test_layers_differ():
    assert not np.array_equal(load_smollm2(0).q, load_smollm2(15).q)


@pytest.mark.parametrize("layer", [1, -1, "0", None])
def test_an_unknown_layer_is_refused_with_the_choices(layer):
    with pytest.raises(ValueError, match="0 and 15"):
        load_smollm2(layer)


def test_data_readme_is_packaged_and_states_the_licences():
    text = resources.files("fa2_numba.data").joinpath("README.md").read_text()
    assert "Apache License 2.0" in text and "public domain" in text


def test_data_readme_lists_every_array():
    text = resources.files("fa2_numba.data").joinpath("README.md").read_text()
    with np.load(ROOT / "fa2_numba/data/smollm2_qkv.npz") as arrays:
        missing = [name for name in arrays if f"`{name}`" not in text]
    assert missing == []


def test_project_declares_its_extras():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"cu12", "cu13", "torch", "notebooks", "test", "dev"}
    for cuda in ("12", "13"):
        assert f"numba-cuda[cu{cuda}]" in extras[f"cu{cuda}"]
        assert any(item.startswith(f"cupy-cuda{cuda}x") for item in extras[f"cu{cuda}"])


def test_base_install_needs_no_gpu_package_but_numba_cuda():
    names = {item.split(">")[0] for item in PROJECT["dependencies"]}
    assert names == {"greenlet", "ml_dtypes", "numba-cuda", "numpy", "rich", "tqdm"}
