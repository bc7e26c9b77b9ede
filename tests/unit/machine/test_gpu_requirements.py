"""An image with torch alone needs `tests/gpu/requirements.txt` for the tests and benchmarks of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

#: Prints the imported distributions that neither torch nor the list brings.
_IMPORTS = """
import importlib, importlib.metadata as metadata, importlib.util, pathlib, re, sys, warnings

warnings.simplefilter("ignore")

def name_of(text):
    return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text).group()).lower()

def closure(names):
    seen, left = set(), [name_of(name) for name in names]
    while left:
        name = left.pop()
        if name in seen:
            continue
        try:
            needs = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        seen.add(name)
        left += [name_of(need) for need in needs if "extra ==" not in need]
    return seen

for file in pathlib.Path("benchmarks/gpu").glob("*.py"):
    importlib.import_module(f"benchmarks.gpu.{file.stem}")
for number, file in enumerate(sorted(pathlib.Path("tests/gpu").glob("test_*.py"))):
    spec = importlib.util.spec_from_file_location(f"gpu{number}", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
# Of several distributions nothing says which one was imported.
owners = {top: given[0] for top, given in metadata.packages_distributions().items() if len(given) == 1}
used = {name_of(owners[top]) for top in {module.split(".")[0] for module in sys.modules} if top in owners}
lines = [line for line in open("tests/gpu/requirements.txt").read().splitlines() if line[:1] not in ("", "#")]
# gRPC and httpx2 import the last two where they are.
optional = {"triptych", "setuptools", "grpcio-tools", "sniffio"}
print(*sorted(used - closure([*lines, "torch"]) - optional))
"""


def test_the_list_of_wheels_has_all_that_tests_and_benchmarks_of_a_gpu_import() -> None:
    command = [sys.executable, "-c", _IMPORTS]
    path = f"{ROOT / 'tests'}:{ROOT}"
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": path, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
