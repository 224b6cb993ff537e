"""`python -m fa2_numba doctor`: what is installed, which machine will be used, what to change.

`collect` looks (and changes nothing), `diagnose` judges what was seen, `main` prints both. Nothing
here may need a working installation: whatever cannot be found out becomes a fact of its own.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

SEVERITIES = ("error", "warning", "note")
NEEDED = (
    "numpy",
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "cuda-core",
    "ml_dtypes",
    "greenlet",
    "rich",
    "tqdm",
)
PACKAGES = (*NEEDED, "torch")
OLDEST_GPU = (7, 5)

Version = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    name: str
    compute_capability: Version
    memory_bytes: int
    shared_bytes_per_block: int


@dataclass(frozen=True)
class Facts:
    """What was seen on this machine. A `..._problem` is the error text, or None if all is well."""

    python: str = ""
    os: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    cupy: dict[str, str] = field(default_factory=dict)
    driver_cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str | None = None
    numba_cuda_problem: str | None = None
    ptx_problem: str | None = None
    numba_simulator: bool = False
    machine: str = "simulator"


@dataclass(frozen=True)
class Finding:
    """Something worth knowing, and what to do about it."""

    severity: str
    what: str
    action: str


def collect() -> Facts:
    """Look at this machine; never raises and changes nothing."""
    driver_cuda, _ = _attempt(_driver_cuda)
    gpus, gpu_problem = _attempt(_gpus)
    available, numba_cuda_problem = _attempt(_numba_cuda_is_available)
    _, ptx_problem = _attempt(_compile_ptx)
    numba_simulator = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return Facts(
        python=platform.python_version(),
        os=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
        cupy=_cupy_distributions(),
        driver_cuda=driver_cuda,
        gpus=gpus or (),
        gpu_problem=gpu_problem,
        numba_cuda_problem=numba_cuda_problem,
        ptx_problem=ptx_problem,
        numba_simulator=numba_simulator,
        machine="gpu" if available and not numba_simulator else "simulator",
    )


def _attempt(look: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return look(), None
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return None, f"{type(error).__name__}: {first_line}".rstrip(": ")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cupy_distributions() -> dict[str, str]:
    found = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if re.fullmatch(r"cupy(-cuda\d+x?|-rocm.*)?", name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _driver_cuda() -> Version:
    from cuda.bindings import driver

    version = _checked(driver.cuDriverGetVersion())
    return version // 1000, version % 1000 // 10


def _gpus() -> tuple[Gpu, ...]:
    from cuda.bindings import driver

    _checked(driver.cuInit(0))
    return tuple(_gpu(driver, index) for index in range(_checked(driver.cuDeviceGetCount())))


def _gpu(driver: Any, index: int) -> Gpu:
    device = _checked(driver.cuDeviceGet(index))
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        value = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return _checked(driver.cuDeviceGetAttribute(value, device))

    return Gpu(
        name=_checked(driver.cuDeviceGetName(256, device)).split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        memory_bytes=_checked(driver.cuDeviceTotalMem(device)),
        shared_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def _checked(result: tuple[Any, ...]) -> Any:
    """Unpack what a driver call returns, (status, value) or (status,)."""
    status, *values = result
    if int(status):
        raise RuntimeError(getattr(status, "name", str(status)))
    return values[0] if values else None


def _numba_cuda_is_available() -> bool:
    from numba import cuda

    return bool(cuda.is_available())


def _compile_ptx() -> None:
    from numba import cuda

    def empty_kernel() -> None:
        return None

    cuda.compile_ptx(empty_kernel, (), cc=(8, 0))


def diagnose(facts: Facts) -> list[Finding]:
    """List what is wrong or worth knowing, the most severe first; looks at `facts` only."""
    findings = [finding for rule in RULES for finding in rule(facts)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _numpy_too_new(facts: Facts) -> Iterator[Finding]:
    numpy, numba_cuda = facts.packages.get("numpy"), facts.packages.get("numba-cuda")
    if numpy and numba_cuda and _parse(numpy) >= (2, 5) and _parse(numba_cuda) == (0, 30):
        what = f"NumPy {numpy} removed a name that numba-cuda {numba_cuda} uses"
        yield Finding("error", what, 'pip install "numpy>=1.26,<2.5"')


def _needed_package_missing(facts: Facts) -> Iterator[Finding]:
    for name in NEEDED:
        if facts.packages.get(name) is None:
            yield Finding("error", f"{name} is not installed", f"pip install {name}")


def _numba_simulator_on(facts: Facts) -> Iterator[Finding]:
    if facts.numba_simulator:
        what = (
            "NUMBA_ENABLE_CUDASIM is set: Numba's own simulator takes the place of numba.cuda, and "
            "neither the kernels nor the simulator of fa2_numba run on it"
        )
        yield Finding("error", what, "unset NUMBA_ENABLE_CUDASIM (fa2_numba needs no variable)")


def _numba_cuda_broken(facts: Facts) -> Iterator[Finding]:
    if facts.numba_cuda_problem and not facts.numba_simulator:
        what = f"numba.cuda does not work: {facts.numba_cuda_problem}"
        yield Finding("error", what, "pip install --upgrade --force-reinstall -e .")


def _gpu_too_old(facts: Facts) -> Iterator[Finding]:
    for index, gpu in enumerate(facts.gpus):
        if gpu.compute_capability < OLDEST_GPU:
            capability, oldest = _dotted(gpu.compute_capability), _dotted(OLDEST_GPU)
            what = f"GPU {index} ({gpu.name}) is too old: {capability}, where {oldest} is needed"
            action = 'hide it with CUDA_VISIBLE_DEVICES, or pass machine="simulator"'
            yield Finding("error", what, action)


def _no_compiler(facts: Facts) -> Iterator[Finding]:
    if not facts.ptx_problem or facts.numba_simulator or facts.numba_cuda_problem:
        return
    what = f"kernels cannot be compiled: {facts.ptx_problem}"
    if facts.gpus:
        yield Finding("error", what, _install(_fitting_extra(facts)))
    else:
        yield Finding("note", f"{what} (the simulator needs no compiler)", _install("test"))


def _cupy_newer_than_driver(facts: Facts) -> Iterator[Finding]:
    for name in facts.cupy:
        if facts.driver_cuda and _cupy_major(name) > facts.driver_cuda[0]:
            what = f"{name} is newer than the driver (CUDA {_dotted(facts.driver_cuda)})"
            action = f"update the NVIDIA driver, or pip uninstall {name} && "
            yield Finding("error", what, action + _install(_fitting_extra(facts)))


def _several_cupys(facts: Facts) -> Iterator[Finding]:
    if len(facts.cupy) > 1:
        names = " ".join(facts.cupy)
        what = f"several CuPy packages overwrite each other's files: {', '.join(facts.cupy)}"
        action = f"pip uninstall {names} && {_install(_fitting_extra(facts))}"
        yield Finding("warning", what, action)


def _cupy_differs_from_bindings(facts: Facts) -> Iterator[Finding]:
    bindings = facts.packages.get("cuda-bindings")
    for name in facts.cupy:
        major = _cupy_major(name)
        if bindings and major and major != _parse(bindings)[0]:
            what = f"{name} and cuda-bindings {bindings} are for different CUDA versions"
            action = f"pip uninstall {name} && {_install(_fitting_extra(facts))}"
            yield Finding("warning", what, action)


def _bindings_newer_than_driver(facts: Facts) -> Iterator[Finding]:
    bindings = facts.packages.get("cuda-bindings")
    if bindings and facts.gpus and facts.driver_cuda:
        if _parse(bindings)[0] > facts.driver_cuda[0]:
            driver = _dotted(facts.driver_cuda)
            what = f"cuda-bindings {bindings} is newer than the driver (CUDA {driver})"
            yield Finding("warning", what, _install(_fitting_extra(facts)))


def _no_cupy_with_gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and not facts.cupy:
        what = "a GPU, but no CuPy: arrays made on the host are copied there and back on every call"
        yield Finding("note", what, _install(_fitting_extra(facts)))


def _no_driver(facts: Facts) -> Iterator[Finding]:
    if facts.driver_cuda is None:
        what = "no NVIDIA driver: everything runs in the simulator"
        action = "nothing to do on a machine without an NVIDIA GPU; else install its driver"
        yield Finding("note", what, action)


def _driver_without_gpu(facts: Facts) -> Iterator[Finding]:
    if facts.driver_cuda and not facts.gpus:
        what = f"an NVIDIA driver, but no GPU ({facts.gpu_problem or 'none listed'})"
        action = "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, its GPU option"
        yield Finding("warning", what, action)


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _numpy_too_new,
    _needed_package_missing,
    _numba_simulator_on,
    _numba_cuda_broken,
    _gpu_too_old,
    _no_compiler,
    _cupy_newer_than_driver,
    _several_cupys,
    _cupy_differs_from_bindings,
    _bindings_newer_than_driver,
    _no_cupy_with_gpu,
    _no_driver,
    _driver_without_gpu,
)


def _parse(version: str) -> Version:
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _cupy_major(distribution: str) -> int:
    """Return the CUDA version a CuPy wheel is built for, 0 where its name does not say.

    >>> _cupy_major("cupy-cuda12x"), _cupy_major("cupy")
    (12, 0)
    """
    major = re.search(r"cuda(\d\d)", distribution)
    return int(major[1]) if major else 0


def _fitting_extra(facts: Facts) -> str:
    return "cu12" if facts.driver_cuda and facts.driver_cuda[0] < 13 else "cu13"


def _install(extra: str) -> str:
    return f'pip install -e ".[{extra}]"'


def main(argv: Sequence[str] | None = None) -> int:
    """Print facts, findings and the first thing to fix; return 1 if one is an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m fa2_numba doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    facts = collect()
    findings = diagnose(facts)
    if options.json:
        print(json.dumps(_record(facts, findings), indent=2))
    else:
        _print(facts, findings)
    return int(any(finding.severity == "error" for finding in findings))


def _record(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    listed = [asdict(finding) for finding in findings]
    return {**asdict(facts), "findings": listed, "action": _action(findings)}


def _action(findings: list[Finding]) -> str | None:
    """Return what to do first, if anything is wrong: a note alone needs no action."""
    return next((f.action for f in findings if f.severity != "note"), None)


def _print(facts: Facts, findings: list[Finding]) -> None:
    _print_table(facts)
    for finding in findings:
        print(f"{finding.severity}: {finding.what}")
    action = _action(findings)
    print(f"Suggested action: {action}" if action else "Nothing to fix.")


def _print_table(facts: Facts) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, value in _rows(facts):
            print(f"{name}: {value}")
        return
    table = Table(title="fa2_numba doctor", show_header=False, title_justify="left")
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "Python", facts.python
    yield "operating system", facts.os
    for name in PACKAGES:
        yield name, facts.packages.get(name) or "not installed"
    yield "CuPy", ", ".join(f"{n} {v}" for n, v in facts.cupy.items()) or "not installed"
    yield "driver", f"CUDA {_dotted(facts.driver_cuda)}" if facts.driver_cuda else "none"
    for index, gpu in enumerate(facts.gpus):
        yield f"GPU {index}", _describe(gpu)
    yield "compiles kernels", "no" if facts.ptx_problem else "yes"
    yield 'machine="auto"', f"{facts.machine} (for arrays in host memory)"


def _describe(gpu: Gpu) -> str:
    return (
        f"{gpu.name}, compute capability {_dotted(gpu.compute_capability)}, "
        f"{gpu.memory_bytes / 2**30:.0f} GiB, "
        f"{gpu.shared_bytes_per_block / 2**10:.0f} KiB of shared memory a block"
    )


if __name__ == "__main__":
    raise SystemExit(main())
