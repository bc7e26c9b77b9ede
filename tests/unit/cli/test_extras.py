"""Commands on an installation without their extra: one sentence that says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.matrix import matrix
from support.options import assert_refused
from triptych.apps.launch.model_path import DEMO_MODEL

_STORE = ("--store", "redis://127.0.0.1:1/0")
#: Runs `triptych` as if the packages of these extras were not there.
_CORE_ALONE = """
import importlib.abc, re, sys
from importlib.metadata import packages_distributions, requires

extras = {re.match(r"[\\w-]+", line)[0].lower() for line in requires("triptych") if "extra ==" in line}
core = {re.match(r"[\\w-]+", line)[0].lower() for line in requires("triptych") if "extra ==" not in line}
missing = {
    module
    for module, names in packages_distributions().items()
    if any(name.lower() in extras - core for name in names)
}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from triptych.apps.cli import main

main()
"""


def on_a_core_install(*words: str) -> subprocess.CompletedProcess[str]:
    """`triptych` with these words, where no extra is installed."""
    return subprocess.run(
        [sys.executable, "-c", _CORE_ALONE, *words], text=True, capture_output=True, timeout=50, check=False
    )


ROWS = [
    (("check",), "worker"),
    (("plan",), "bench"),
    (("cert", "tls"), "cert"),
    (("encoder", *_STORE), "worker"),
    (("pd", *_STORE), "worker"),
    (("colocated", *_STORE), "worker"),
    (("namespace", str(DEMO_MODEL)), "worker"),
    (("tones", "555", "-o", "tones.wav"), "worker"),
    (("profile",), "worker"),
    (("bench", "workloads"), "bench"),
]


@pytest.mark.parametrize(("words", "extra"), matrix(ROWS, quick=3), ids=[row[0][0] for row in ROWS])
def test_a_command_names_the_extra_that_it_needs(words, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = on_a_core_install(*words)
    assert_refused(refused, f"triptych {words[0]}", f"pip install 'triptych[{extra}]'")
    assert "Traceback" not in refused.stderr


def test_the_doctor_of_a_core_install_says_what_a_worker_needs():
    ran = on_a_core_install("doctor", "--port", "0", "--grpc-port", "0")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "is not installed: no more is known here" in ran.stdout
    assert "pip install 'triptych[worker]'" in ran.stdout
