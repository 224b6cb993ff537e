"""What the README says is true: snippets print what stands below them, links and paths exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa2_numba import RUNGS
from fa2_numba.ladder import cuda_core_rungs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
SNIPPETS = re.findall(
    r"<!-- snippet -->\n```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL
)


def test_every_python_block_is_a_tested_snippet():
    assert len(SNIPPETS) == README.count("```python") >= 2


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_print_what_the_readme_shows(number):
    code, shown = SNIPPETS[number]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", PROSE))))
def test_linked_paths_exist(target):
    assert (ROOT / target).exists()


def test_the_table_of_rungs_is_the_ladder():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \| (.*?) \| (.*?) \|$", README, flags=re.MULTILINE)
    assert rows == [
        (rung.name, f"fa2_numba/kernels/{rung.name}.py", rung.idea, rung.source)
        for rung in RUNGS.values()
    ]


def test_the_times_are_those_on_record():
    record = json.loads((ROOT / "bench/results/h200/ladder.json").read_text())
    columns = [(shape, c) for shape in ("few heads, long", "many heads, short") for c in (0, 1)]
    times = {(r["name"], r["shape"], r["causal"]): r["ms"] for r in record["records"]}
    for rung in cuda_core_rungs():
        shown = (times[rung, *column] for column in columns)
        row = " | ".join(f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" for ms in shown)
        assert f"\n| `{rung}` | {row} |\n" in README


def test_commands_are_those_of_the_package():
    commands = re.findall(r"^(pip install -e .*)$", README, flags=re.MULTILINE)
    assert commands == [
        "pip install -e . && python -m fa2_numba",
        'pip install -e ".[test]" && pytest',
    ]
    options = subprocess.run(
        [sys.executable, "-m", "fa2_numba", "--help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "doctor" in options and "--plot" in options
