"""All checks together: one that breaks keeps no other from its answer, and the exit code tells."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from triptych.apps.cli.app import app
from triptych.apps.doctor import run
from triptych.apps.doctor.finding import failed
from triptych.base.config import DoctorConfig


def _headings(config: DoctorConfig) -> list[str]:
    return [heading for heading, _ in run.examine(config)]


def test_the_store_and_a_cluster_are_looked_at_when_they_are_named():
    alone = _headings(DoctorConfig())
    assert alone == ["versions", "machine", "devices and model", "secrets", "ports"]
    named = _headings(DoctorConfig(store="redis://127.0.0.1:1/0", url="http://127.0.0.1:1"))
    assert named == [
        "versions",
        "machine",
        "devices and model",
        "secrets",
        "store redis://127.0.0.1:1/0",
        "cluster",
    ]


def test_a_check_that_breaks_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch):
    def broken(found: object) -> list[object]:
        raise RuntimeError("odd")

    monkeypatch.setattr(run, "check_versions", broken)
    first, *others = run.examine(DoctorConfig())
    assert "RuntimeError: odd" in first[1][0].found and failed([first])
    assert all(findings for _, findings in others)


def test_a_flag_that_cannot_be_used_is_a_failure_with_its_remedy():
    result = CliRunner().invoke(app, ["doctor", "--store", "nonsense://x", "--port", "0", "--grpc-port", "0"])
    assert result.exit_code == 1 and "redis://" in result.output
