"""Stack dumps of test processes that died, printed at the end of the run, where a log's reader looks."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


#: Lines of a dump that are shown: the thread that died comes first.
SHOWN_LINES = 40


class CrashReports:
    """The controller's plugin: how each worker process that died ended, and its stacks if it wrote any."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-crashes-")
        self._ends: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["crash_folder"] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        if error:
            # Negative: the number of the signal. 1 is also the exit code of a hang timer.
            code = node.gateway._io.popen.wait(timeout=5)  # type: ignore[attr-defined]
            self._ends.append(f"{node.gateway.id} ended with exit code {code}: {error}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for end in self._ends:
            terminalreporter.write_line(end)
        for dump in sorted(Path(self._folder.name).iterdir()):
            if lines := dump.read_text(errors="replace").splitlines():
                terminalreporter.section(f"stacks of {dump.stem}")
                terminalreporter.write_line("\n".join(lines[:SHOWN_LINES]))

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


def report_crashes(config: pytest.Config) -> None:
    """Called by the root conftest: the controller collects dumps, and each worker process writes its own."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(CrashReports())
    elif "crash_folder" in worker:
        # Stays open for the life of the process: the handler of a fatal signal cannot open one.
        path = Path(worker["crash_folder"], f"{worker['workerid']}-{os.getpid()}.txt")
        faulthandler.enable(file=path.open("w"))
