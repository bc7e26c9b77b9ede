"""Each alert by promtool: it fires when it should, and not when one of its conditions does not hold."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from support.monitoring.alerts import CASES, FILE, AlertCase, promtool_test
from support.tools import tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)


def _promtool(*words: str) -> str:
    done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _run(folder: Path, test: dict[str, object]) -> str:
    """What promtool finds wrong."""
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": [test]}))
    return _promtool("test", "rules", str(file))


def test_the_rules_are_valid():
    assert not _promtool("check", "rules", str(FILE))


@EACH
def test_an_alert_fires_with_its_labels_and_words(case: AlertCase, tmp_path: Path):
    assert not _run(tmp_path, promtool_test(case))


@EACH
def test_an_alert_does_not_fire_when_a_condition_does_not_hold(case: AlertCase, tmp_path: Path):
    for changed in case.quiet:
        assert not _run(tmp_path, promtool_test(case, changed)), changed
