"""The proxy imports what the package brings alone, a command what its distribution brings."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
#: Imports a module where those named on standard input are not installed.
IMPORT = """
import sys
absent = set(sys.stdin.read().split())
class Installed:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Installed, sys.meta_path)
import importlib
importlib.import_module(sys.argv[1])
"""


def _with_their_own(lines: list[str]) -> set[str]:
    """The distributions that the requirements ask for here, and all that those require themselves."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(line) for line in lines]
    while left:
        requirement = left.pop()
        for extra in {"", *requirement.extras}:
            if (key := (canonicalize_name(requirement.name), extra)) not in found:
                found.add(key)
                own = map(Requirement, requires(requirement.name) or ())
                left += [each for each in own if not each.marker or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.mark.parametrize(
    ("module", "distributions"),
    [("triptych.proxy.service", ["."]), ("triptych_bench.simulator.plan.answer", [".", "triptych_bench"])],
    ids=["proxy", "plan"],
)
def test_a_service_or_command_starts_with_what_it_asks_for_alone(
    module: str, distributions: list[str]
) -> None:
    files = [(ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in distributions]
    lines = [line for text in files for line in tomllib.loads(text)["project"]["dependencies"]]
    installed = _with_their_own([line for line in lines if not line.startswith("triptych=")])
    absent = [
        name
        for name, owners in packages_distributions().items()
        if name not in ("triptych", "triptych_bench") and not set(map(canonicalize_name, owners)) & installed
    ]
    assert "pytest" in absent
    command = [sys.executable, "-c", IMPORT, module]
    done = subprocess.run(command, input="\n".join(absent), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
