"""The programs to start from say how they are called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda program: program.name)
def test_an_example_without_arguments_ends_in_its_usage_line(program: Path) -> None:
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith(f"usage: python examples/{program.name} ")
    assert f"examples/{program.name} " + run.stderr.split(program.name)[1].strip() in program.read_text()
