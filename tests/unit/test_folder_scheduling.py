"""A test process that dies fails the test that it ran; all others are run, and the run ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
HOOK = """
from support.folder_scheduling import FolderScheduling

def pytest_xdist_make_scheduler(config, log):
    return FolderScheduling(config, log)

def pytest_collection_finish(session):
    import os
    from pathlib import Path

    if os.environ["PYTEST_XDIST_WORKER"] == "gw2":
        Path("replaced").touch()
"""
#: What a process has done before it dies.
DONE = "def test_it():\n    pass\n"
#: It dies in the first test of a file.
DIES = "import os\n\ndef test_dies():\n    os._exit(3)\n\ndef test_after():\n    pass\n"
#: The other process is not through with them before the dead one is replaced.
WAITS = """
import time
from pathlib import Path

def test_waits():
    deadline = time.monotonic() + 20
    while not Path("replaced").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
"""
DONE_FILES, WAITING_FILES = 8, 12


def test_a_process_that_dies_fails_its_test_and_the_run_goes_on_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(HOOK)
    for number in range(DONE_FILES):
        (folder / f"test_a{number:02}.py").write_text(DONE)
    (folder / "test_b.py").write_text(DIES)
    for number in range(WAITING_FILES):
        (folder / f"test_c{number:02}.py").write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-q"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 1
    assert re.search(rf"1 failed, {DONE_FILES + 1 + WAITING_FILES} passed", run.stdout), run.stdout
    assert "test_b.py::test_dies" in run.stdout
