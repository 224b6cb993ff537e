"""The doctor names every fault it is told of, and never falls over itself."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fa2_numba import doctor
from fa2_numba.doctor import Facts, Finding, Gpu, diagnose

ROOT = Path(__file__).parents[1]
H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000, 232_448)
V100 = Gpu("Tesla V100", (7, 0), 16_000_000_000, 98_304)
PACKAGES = {
    "numpy": "2.4.6",
    "numba": "0.68.1",
    "numba-cuda": "0.30.4",
    "cuda-bindings": "13.5.0",
    "cuda-core": "1.1.0",
    "ml_dtypes": "0.6.0",
    "greenlet": "3.5.6",
    "rich": "15.0.0",
    "tqdm": "4.69.0",
    "torch": None,
}
HEALTHY = Facts(
    python="3.11.7",
    os="Linux",
    packages=PACKAGES,
    cupy={"cupy-cuda13x": "14.2.0"},
    driver_cuda=(13, 0),
    gpus=(H200,),
    machine="gpu",
)
LAPTOP = replace(HEALTHY, cupy={}, driver_cuda=None, gpus=(), machine="simulator")


def with_package(name: str, version: str | None, facts: Facts = HEALTHY) -> Facts:
    return replace(facts, packages={**facts.packages, name: version})


FAULTS = [
    # id, facts, severity, part of what, part of action
    ("numpy", with_package("numpy", "2.5.0"), "error", "NumPy 2.5.0", "numpy>=1.26,<2.5"),
    ("numpy-rc", with_package("numpy", "2.5.0rc1"), "error", "NumPy 2.5.0rc1", "<2.5"),
    ("greenlet", with_package("greenlet", None), "error", "greenlet", "pip install greenlet"),
    ("ml_dtypes", with_package("ml_dtypes", None), "error", "ml_dtypes", "pip install ml_dtypes"),
    ("cuda-core", with_package("cuda-core", None), "error", "cuda-core", "pip install cuda-core"),
    ("rich", with_package("rich", None), "error", "rich", "pip install rich"),
    ("tqdm", with_package("tqdm", None), "error", "tqdm", "pip install tqdm"),
    ("cudasim", replace(HEALTHY, numba_simulator=True), "error", "NUMBA_ENABLE_CUDASIM", "unset"),
    (
        "numba-cuda-broken",
        replace(HEALTHY, numba_cuda_problem="AttributeError: gone"),
        "error",
        "AttributeError: gone",
        "--force-reinstall",
    ),
    ("old-gpu", replace(HEALTHY, gpus=(V100,)), "error", "7.0, where 7.5", "CUDA_VISIBLE_DEVICES"),
    ("second-gpu-old", replace(HEALTHY, gpus=(H200, V100)), "error", "GPU 1", "simulator"),
    ("no-compiler", replace(HEALTHY, ptx_problem="no nvrtc"), "error", "no nvrtc", ".[cu13]"),
    ("no-compiler-no-gpu", replace(LAPTOP, ptx_problem="no nvrtc"), "note", "no nvrtc", ".[test]"),
    (
        "cupy-newer-than-driver",
        replace(HEALTHY, driver_cuda=(12, 8)),
        "error",
        "cupy-cuda13x is newer than the driver (CUDA 12.8)",
        ".[cu12]",
    ),
    (
        "bindings-newer-than-driver",
        replace(HEALTHY, driver_cuda=(12, 8), cupy={"cupy-cuda12x": "14.2.0"}),
        "warning",
        "cuda-bindings 13.5.0 is newer than the driver",
        ".[cu12]",
    ),
    (
        "cupy-differs-from-bindings",
        replace(HEALTHY, cupy={"cupy-cuda12x": "14.2.0"}),
        "warning",
        "different CUDA versions",
        "pip uninstall cupy-cuda12x",
    ),
    (
        "several-cupys",
        replace(HEALTHY, cupy={"cupy": "14.2.0", "cupy-cuda13x": "14.2.0"}),
        "warning",
        "cupy, cupy-cuda13x",
        "pip uninstall cupy cupy-cuda13x",
    ),
    ("no-cupy", replace(HEALTHY, cupy={}), "note", "no CuPy", ".[cu13]"),
    (
        "no-cupy-old-driver",
        replace(with_package("cuda-bindings", "12.9.1"), cupy={}, driver_cuda=(12, 4)),
        "note",
        "no CuPy",
        ".[cu12]",
    ),
    ("no-driver", LAPTOP, "note", "no NVIDIA driver", "nothing to do"),
    (
        "driver-without-gpu",
        replace(LAPTOP, driver_cuda=(13, 0), gpu_problem="RuntimeError: CUDA_ERROR_NO_DEVICE"),
        "warning",
        "CUDA_ERROR_NO_DEVICE",
        "nvidia-smi",
    ),
]


def test_a_healthy_machine_has_no_finding():
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize(
    ("facts", "severity", "what", "action"),
    [case[1:] for case in FAULTS],
    ids=[c[0] for c in FAULTS],
)
def test_fault_is_found(facts, severity, what, action):
    matching = [f for f in diagnose(facts) if what in f.what and action in f.action]
    assert [f.severity for f in matching] == [severity], diagnose(facts)


def test_every_rule_is_fed_a_fault():
    silent = [r for r in doctor.RULES if not any(list(r(facts)) for _, facts, *_ in FAULTS)]
    assert silent == []


def test_every_dependency_is_looked_for():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {re.match(r"[\w-]+", text)[0] for text in pyproject["project"]["dependencies"]}
    assert needed and needed <= set(doctor.NEEDED)


def test_a_plain_cupy_says_nothing_of_its_cuda_version():
    assert diagnose(replace(HEALTHY, cupy={"cupy": "14.2.0"})) == []


def test_numpy_2_5_is_fine_with_a_later_numba_cuda():
    facts = with_package("numpy", "2.5.0", with_package("numba-cuda", "0.31.0"))
    assert diagnose(facts) == []


def test_no_findings_about_an_empty_machine_raise():
    assert diagnose(Facts())


def test_findings_are_ordered_by_severity():
    facts = replace(with_package("numpy", "2.5.1", LAPTOP), driver_cuda=(13, 0))
    assert [f.severity for f in diagnose(facts)] == ["error", "warning"]


def test_one_action_is_printed_and_an_error_sets_the_status(monkeypatch, capsys):
    facts = with_package("greenlet", None, LAPTOP)
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert printed.count("Suggested action:") == 1
    assert "Suggested action: pip install greenlet" in printed
    assert "no NVIDIA driver" in printed


def test_a_healthy_machine_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect", lambda: HEALTHY)
    assert doctor.main([]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in (
        "NVIDIA H200",
        "capability 9.0",
        "140 GiB",
        "227 KiB",
        "CUDA 13.0",
        "gpu",
        "Nothing",
    ):
        assert text in printed


@pytest.mark.parametrize("ptx_problem", [None, "no nvrtc"])
def test_notes_alone_ask_for_no_action(ptx_problem, monkeypatch, capsys):
    facts = replace(LAPTOP, ptx_problem=ptx_problem)
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("Nothing to fix.\n") and "Suggested action" not in printed
    assert printed.count("note: ") == len(diagnose(facts)) == (2 if ptx_problem else 1)
    doctor.main(["--json"])
    assert json.loads(capsys.readouterr().out)["action"] is None


def test_json_holds_facts_findings_and_action(monkeypatch, capsys):
    facts = with_package("tqdm", None, LAPTOP)
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert doctor.main(["--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["packages"]["numpy"] == "2.4.6"
    assert record["machine"] == "simulator"
    assert [Finding(**finding) for finding in record["findings"]] == diagnose(facts)
    assert record["action"] == "pip install tqdm"


def test_what_cannot_be_looked_at_becomes_a_fact(monkeypatch):
    def broken(*_):
        raise AttributeError("gone\nfor good")

    for look in ("_driver_cuda", "_gpus", "_numba_cuda_is_available", "_compile_ptx"):
        monkeypatch.setattr(doctor, look, broken)
    facts = doctor.collect()
    assert facts.driver_cuda is None and facts.gpus == ()
    assert facts.gpu_problem == facts.numba_cuda_problem == "AttributeError: gone"
    assert facts.ptx_problem == "AttributeError: gone"
    assert facts.machine == "simulator"


def test_gpus_are_read_from_the_driver(monkeypatch):
    attributes = {"MAJOR": 9, "MINOR": 0, "OPTIN": 232_448}

    class Driver:
        CUdevice_attribute = type("Names", (), {"__getattr__": lambda _, name: name})()

        def cuDeviceGet(self, index):
            return 0, index

        def cuDeviceGetName(self, length, device):
            return 0, b"NVIDIA H200".ljust(length, b"\0")

        def cuDeviceTotalMem(self, device):
            return 0, 150_000_000_000

        def cuDeviceGetAttribute(self, name, device):
            return 0, attributes[name.split("_")[-1]]

    assert doctor._gpu(Driver(), 0) == H200
    with pytest.raises(RuntimeError, match="100"):
        doctor._checked((100,))


def test_numba_simulator_is_not_taken_for_a_gpu(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(doctor, "_numba_cuda_is_available", lambda: True)
    # Compiling would make Numba read the variable, for the rest of this process.
    monkeypatch.setattr(doctor, "_compile_ptx", lambda: None)
    facts = doctor.collect()
    assert facts.numba_simulator and facts.machine == "simulator"


def run_without(missing: str, command: str) -> subprocess.CompletedProcess:
    """Run a module and its arguments in a process that cannot import `missing`."""
    module, *arguments = command.split()
    program = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; "
        f"sys.argv[1:] = {arguments}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["rich", "tqdm", "cuda.core"])
def test_doctor_prints_where_a_package_is_missing(missing):
    done = run_without(missing, "fa2_numba doctor")
    assert done.stderr == "" and "numba-cuda" in done.stdout
    assert ("greenlet: " in done.stdout) == (missing == "rich")


# What NumPy 2.5 does to numba-cuda 0.30 is that the import itself fails.
@pytest.mark.parametrize("command", ["fa2_numba doctor", "fa2_numba.doctor"])
def test_doctor_works_where_numba_cuda_cannot_be_imported(command):
    done = run_without("numba.cuda", f"{command} --json")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    assert "numba.cuda" in record["numba_cuda_problem"]
    assert record["findings"][0]["severity"] == "error"
