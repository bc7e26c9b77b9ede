"""Classes whose processors are on torchvision only, from the picture on, in an environment that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.zoo.processors import ON_TORCHVISION
from support.zoo.status import SERVED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".tools" / "torchvision" / "venv" / "bin" / "python"
MATRIX = "tests/integration/zoo/test_own_processors.py"
TEST = f"{MATRIX}::test_a_picture_is_prepared_placed_and_answered_as_by_transformers"


def test_every_class_on_torchvision_is_answered_as_by_transformers() -> None:
    names = [name for name in SERVED if name.removesuffix("ForConditionalGeneration") in ON_TORCHVISION]
    assert len(names) == len(ON_TORCHVISION)
    tests = [f"{TEST}[{name}]" for name in names]
    _run(tests, len(tests))


def test_lfm2_vl_is_served_by_real_processes() -> None:
    _run(["tests/e2e/test_any_class.py", "-k", "Lfm2Vl"], 4)


def _run(words: list[str], count: int) -> None:
    """Runs tests by that environment's interpreter, which all have to pass."""
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON} is missing: use `make test-slow`, or tests/tools/torchvision.sh")
    done = subprocess.run(
        [PYTHON, "-m", "pytest", *words, "-n", "0", "-p", "no:cacheprovider", "-o", "addopts="],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{count} passed" in done.stdout
